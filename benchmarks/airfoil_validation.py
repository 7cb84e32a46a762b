"""Solve original Deep-Flow-Prediction samples again and compare: `python benchmarks/airfoil_validation.py FOLDER`.

FOLDER holds `<shape>_<100·vx>_<100·vy>.npz`, key `a`, (6, 128, 128): freestream x, freestream y, mask, pressure,
velocity x, velocity y, in physical units. The first grid axis is x from −½ to 1½, the second is y from −1 to 1, both
without their end; mask is 1 inside the airfoil, where the other five are 0. Pressure carries an arbitrary constant, so
its mean is removed. Errors are ‖ours − original‖ / ‖original‖ over the fluid nodes. One solver process runs at a time,
under a minute a sample on a quiet core.
"""

import argparse
import importlib.metadata
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from transform_once.files import write_rows
from transform_once.solvers.airfoil import (
    AirfoilFlow,
    CaseError,
    environment,
    find_shapes,
    read_airfoil,
    require_programs,
    simulate,
)

# Relative errors of u, v and p that must not be exceeded; other samples are only reported.
BOUNDS = (0.019, 0.072, 0.18)
REQUIRED = ("2032c_4460_113", "2032c_6367_-755", "a18sm_6891_853")
COLUMNS = ("sample", "angle", "mask_differs", "u", "v", "p", "drift", "residual", "converged", "seconds", "verdict")


def relative_errors(original: NDArray[np.float64], flow: AirfoilFlow) -> tuple[int, list[float]]:
    """Pixels whose masks differ, and the relative errors of u, v and p (mean removed) where both are fluid."""
    mask = original[2] > 0.5
    fluid = ~mask & ~flow.mask
    pairs = [(original[4], flow.u), (original[5], flow.v), (original[3], flow.p)]
    values = [(theirs[fluid], ours[fluid]) for theirs, ours in pairs]
    values[2] = (values[2][0] - values[2][0].mean(), values[2][1] - values[2][1].mean())
    errors = [float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)) for theirs, ours in values]
    return int((mask != flow.mask).sum()), errors


def validate(path: Path, shapes: dict[str, Path]) -> dict[str, object]:
    with np.load(path, allow_pickle=False) as stored:
        original = stored["a"]
    stream = original[:2, original[2] < 0.5][:, 0]
    angle, velocity = float(np.degrees(np.arctan2(stream[1], stream[0]))), float(np.hypot(*stream))
    row: dict[str, object] = {**dict.fromkeys(COLUMNS, ""), "sample": path.stem, "angle": f"{angle:.2f}"}
    shape = shapes.get(path.stem.rsplit("_", 2)[0])
    if shape is None:
        return row | {"verdict": "no such shape"}
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="airfoil-") as scratch:
            flow = simulate(read_airfoil(shape), velocity, angle, scratch)
    except CaseError as error:
        return row | {"verdict": f"failed: {error}"}
    differs, errors = relative_errors(original, flow)
    holds = differs == 0 and all(error <= bound for error, bound in zip(errors, BOUNDS, strict=True))
    measured = dict(zip("uvp", (f"{error:.4f}" for error in errors), strict=True))
    return (
        row
        | measured
        | {
            "mask_differs": differs,
            "drift": f"{flow.drift:.4f}",
            "residual": f"{flow.residual:.2e}",
            "converged": flow.converged,
            "seconds": f"{time.perf_counter() - start:.0f}",
            "verdict": "within bounds" if holds else "outside bounds" if path.stem in REQUIRED else "reported only",
        }
    )


def processor() -> str:
    models = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return str(models[0]).strip() if models else platform.machine()


def versions() -> str:
    """What gmsh and OpenFOAM say of themselves."""
    gmsh = subprocess.run(["gmsh", "--version"], capture_output=True, text=True)
    # OpenFOAM tells its version at the end of its help only: "Using: OpenFOAM-… (1912) - visit …".
    text = subprocess.run(["simpleFoam", "-help"], capture_output=True, text=True, env=environment()).stdout
    openfoam = re.search(r"OpenFOAM-.*\((\w+)\)", text)
    return f"gmsh {(gmsh.stdout or gmsh.stderr).strip()}, OpenFOAM {openfoam[1] if openfoam else 'of unknown version'}"


def write_table(rows: list[dict[str, object]], programs: str) -> Path:
    hardware = re.sub(r"\W+", "-", processor()).strip("-").lower()
    torch_version = importlib.metadata.version("torch").split("+")[0]
    output = Path(__file__).parent / "results" / f"{hardware}-torch{torch_version}" / "airfoil_validation.csv"
    output.parent.mkdir(parents=True, exist_ok=True)
    return write_rows(output, [row | {"programs": programs} for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the original .npz samples")
    parser.add_argument("--shapes", type=Path, help="folder of .dat outlines (default: those of AeroSandbox)")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob("*.npz"))
    if not paths:
        sys.exit(f"No .npz files in {arguments.folder}.")
    shapes = {path.stem: path for path in find_shapes(arguments.shapes)}
    require_programs()
    programs = versions()
    print(f"{programs}; one process on {processor()}")
    layout = "{:20} {:>7} {:>12} {:>7} {:>7} {:>7} {:>7} {:>9} {:>9} {:>7}  {}"
    print(layout.format(*COLUMNS))
    rows = []
    for path in paths:
        rows.append(validate(path, shapes))
        print(layout.format(*map(str, rows[-1].values())), flush=True)
    output = write_table(rows, programs)
    print(f"Bounds: u {BOUNDS[0]}, v {BOUNDS[1]}, p {BOUNDS[2]}, equal masks. Table: {output}")
    if any(row["sample"] in REQUIRED and row["verdict"] != "within bounds" for row in rows):
        sys.exit("A required sample is outside its bounds.")


if __name__ == "__main__":
    main()
