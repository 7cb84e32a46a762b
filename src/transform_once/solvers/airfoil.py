"""Steady turbulent flow around airfoils, solved by OpenFOAM (`simpleFoam`) on meshes by gmsh.

Incompressible Reynolds-averaged Navier-Stokes with the Spalart-Allmaras model, ν = 1e-5, on [−5, 5]² around an airfoil
of chord one whose leading edge lies at the origin:

    (u·∇)u = −∇p + ∇·((ν + ν_t)(∇u + ∇uᵀ)),   ∇·u = 0,   u = |v| (cos α, sin α) far away,   u = 0 on the airfoil

The solution is sampled at the nodes (xᵢ, yⱼ) = (−½ + 2i/n, −1 + 2j/n) and stored as [channel, i, j]: **x runs along the
first grid axis, y along the second**, as in the Deep-Flow-Prediction set. Nodes inside the airfoil have mask 1 and hold
zero in every other channel, the freestream included. Pressure is p/ρ, in squared units of velocity, and zero far
upstream; the original files fix it elsewhere, so compare pressures after removing the mean.

500 iterations, the default, is where the original files stop. Attached flow is nearly steady by then, separated flow
is not, and the residuals do not tell the two apart. The drift of the sampled velocity does, and decides what counts as
converged.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transform_once.files import held
from transform_once.solvers.airfoil_case import (
    DEFAULTS,
    Airfoil,
    AirfoilSettings,
    Array,
    CaseError,
    case_files,
    find_shapes,
    grid_from_cloud,
    mesh_text,
    patch_boundary,
    read_airfoil,
)

__all__ = [
    "INPUT_CHANNELS",
    "TARGET_CHANNELS",
    "Airfoil",
    "AirfoilFlow",
    "AirfoilSample",
    "AirfoilSettings",
    "CaseError",
    "environment",
    "failures",
    "find_shapes",
    "generate",
    "read_airfoil",
    "require_programs",
    "simulate",
]

INPUT_CHANNELS = ("freestream_x", "freestream_y", "mask")
TARGET_CHANNELS = ("pressure", "velocity_x", "velocity_y")
SPEEDS, ANGLES = (10.0, 100.0), (-22.5, 22.5)  # units of length per time, and degrees; drawn uniformly
PACKAGES = {"gmsh": "gmsh", "gmshToFoam": "openfoam", "simpleFoam": "openfoam"}
PATIENCE = 20  # this many failures in a row mean that the set-up is broken, not the cases


class AirfoilFlow(NamedTuple):
    """`mask` (true inside), `p`, `u`, `v`, each (n, n) as [x, y].

    `residual` is the last initial residual of the x-momentum equation. `drift` is the change of velocity over the last
    fifth of the iterations: root mean square over the fluid nodes, relative to the free stream. `converged` says that
    the drift is within the tolerance.
    """

    mask: NDArray[np.bool_]
    p: Array
    u: Array
    v: Array
    residual: float
    drift: float
    converged: bool


class AirfoilSample(NamedTuple):
    """One pair, float32: `input` (3, n, n) of INPUT_CHANNELS and `target` (3, n, n) of TARGET_CHANNELS."""

    name: str
    input: NDArray[np.float32]
    target: NDArray[np.float32]
    residual: float
    drift: float


def require_programs() -> None:
    """Raise FileNotFoundError with the command that installs them unless gmsh and OpenFOAM are on the PATH."""
    missing = [program for program in PACKAGES if shutil.which(program) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[program] for program in missing}))
        raise FileNotFoundError(
            f"Airfoil flows need {' and '.join(missing)}, not on the PATH; install with: apt-get install {packages}"
        )


def environment() -> dict[str, str]:
    """The environment of the programs: Debian's OpenFOAM needs to be told its folder; an installation of yours wins."""
    return {"WM_PROJECT_DIR": "/usr/share/openfoam"} | dict(os.environ)


def _run(program: str, *arguments: str, folder: Path, time_limit: float) -> str:
    """Run a program in `folder` and return what it printed; a failure of the case raises CaseError."""
    log = folder / f"{program}.log"
    try:
        with log.open("w") as output:
            status = subprocess.run(
                [program, *arguments], cwd=folder, env=environment(), timeout=time_limit, stdout=output, stderr=output
            ).returncode
    except subprocess.TimeoutExpired:
        raise CaseError(f"{program} ran longer than {time_limit:g} s.") from None
    text = log.read_text(errors="replace")
    if status == 0:
        return text
    if status in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL):
        raise InterruptedError(f"{program} was stopped by {signal.Signals(-status).name}; run again to resume.")
    if shutil.disk_usage(folder).free < 2**26:
        raise OSError(f"No space left in {folder} for an OpenFOAM case; free some, or name a folder on another disk.")
    complaint = re.search(r"(?:FOAM FATAL (?:IO )?ERROR\s*:\s*|Error\s*: )(.+)", text)
    cause = signal.Signals(-status).name if status < 0 else f"status {status}"
    raise CaseError(f"{program} ended with {cause}{': ' + complaint[1].strip() if complaint else ''}.")


def _sampled(folder: Path, iteration: int, resolution: int) -> tuple[NDArray[np.bool_], Array]:
    def read(field: str, columns: int) -> Array:
        path = folder / "postProcessing" / "cloud" / str(iteration) / f"grid_{field}.xy"
        if not path.exists():
            raise CaseError(f"simpleFoam left no samples of {field} at iteration {iteration}.")
        return np.array(path.read_text().split(), dtype=np.float64).reshape(-1, columns)

    mask, pressure = grid_from_cloud(read("p", 4), resolution)
    other, velocity = grid_from_cloud(read("U", 6), resolution)
    values = np.concatenate([pressure, velocity[:2]])
    if (mask != other).any() or not np.isfinite(values).all():
        raise CaseError(f"The fields sampled at iteration {iteration} are incomplete or not finite.")
    return mask, values


def simulate(
    airfoil: Airfoil, velocity: float, angle: float, folder: str | Path, settings: AirfoilSettings = DEFAULTS
) -> AirfoilFlow:
    """Solve the flow around `airfoil` for a free stream of speed `velocity` at `angle` degrees to the chord.

    `folder` (new or empty) receives the OpenFOAM case, its logs and its samples. Raises CaseError with the reason where
    a program gives up; an unsteady result is returned with `converged` false.
    """
    if not (np.isfinite([velocity, angle]).all() and velocity > 0):
        raise ValueError(f"velocity must be positive and angle finite (degrees), got {velocity} and {angle}.")
    require_programs()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} must be empty or new, so that no result of another case is taken for this one.")
    for name, text in case_files(freestream(velocity, angle), settings).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "airfoil.geo").write_text(mesh_text(airfoil, settings))
    run = partial(_run, folder=folder, time_limit=settings.time_limit)
    run("gmsh", "-3", "-nt", "1", "-format", "msh2", "-o", "airfoil.msh", "airfoil.geo")
    run("gmshToFoam", "airfoil.msh")
    boundary = folder / "constant" / "polyMesh" / "boundary"
    boundary.write_text(patch_boundary(boundary.read_text()))
    log = run("simpleFoam")
    residuals = re.findall(r"Solving for Ux, Initial residual = ([^,]+),", log)

    _, before = _sampled(folder, settings.iterations * 4 // 5, settings.resolution)
    mask, (p, u, v) = _sampled(folder, settings.iterations, settings.resolution)
    i, j = np.nonzero(mask)
    nodes = np.stack([-0.5 + 2 * i / len(mask), -1 + 2 * j / len(mask)], axis=1)
    margin = 2 / len(mask)
    if (nodes < airfoil.points.min(axis=0) - margin).any() or (nodes > airfoil.points.max(axis=0) + margin).any():
        raise CaseError("simpleFoam returned no values at nodes away from the airfoil: the mesh has holes.")
    change = np.square(np.stack([u, v]) - before[1:]).sum(axis=0)[~mask]
    drift = float(np.sqrt(change.mean()) / velocity)
    return AirfoilFlow(mask, p, u, v, float(residuals[-1]), drift, drift <= settings.tolerance)


def freestream(velocity: float, angle: float) -> tuple[float, float]:
    """The components of a stream of speed `velocity` at `angle` degrees."""
    return velocity * float(np.cos(np.deg2rad(angle))), velocity * float(np.sin(np.deg2rad(angle)))


def channels(flow: AirfoilFlow, velocity: float, angle: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Input (freestream x, freestream y, mask) and target (pressure, velocity x, velocity y), each (3, n, n)."""
    outside = ~flow.mask
    stream_x, stream_y = freestream(velocity, angle)
    given = np.stack([stream_x * outside, stream_y * outside, flow.mask]).astype(np.float32)
    return given, (np.stack([flow.p, flow.u, flow.v]) * outside).astype(np.float32)


def draw(seed: int, index: int, shapes: int) -> tuple[int, float, float]:
    """The number of a shape, speed and angle of case `index`: a function of (seed, index) alone."""
    generator = np.random.default_rng((seed, index))
    return int(generator.integers(shapes)), float(generator.uniform(*SPEEDS)), float(generator.uniform(*ANGLES))


def generate(
    samples: int,
    seed: int = 0,
    workers: int = 1,
    shapes: str | Path | None = None,
    output: str | Path = "airfoils",
    settings: AirfoilSettings = DEFAULTS,
) -> Iterator[AirfoilSample]:
    """Yield `samples` converged flows in the order of their draws, `workers` solver processes at a time.

    Speed is uniform in [10, 100], angle in [−22.5°, 22.5°], the shape any `.dat` of the folder `shapes` (default: the
    UIUC airfoils of AeroSandbox). Each finished case stays in the folder `output` as `000012.npz`, each failed or
    unconverged one as `000012.json` with its reason (see `failures`); it is skipped and the next draw takes its place,
    so the result does not depend on `workers`. Called again with the same arguments, or more samples, known cases are
    read instead of solved.
    """
    if samples < 1 or workers < 1 or seed < 0:
        raise ValueError(
            f"samples and workers must be positive, seed not negative, got {samples}, {workers} and {seed}."
        )
    require_programs()
    paths, folder = find_shapes(shapes), Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, {"seed": seed, "shapes": _fingerprint(paths), **asdict(settings)})
    return _in_order(samples, workers, folder, lambda index: _case(index, seed, paths, folder, settings))


def failures(output: str | Path) -> list[dict[str, Any]]:
    """The recorded failures in a folder of `generate`: index, name, velocity, angle and reason of each."""
    return [json.loads(path.read_text()) for path in sorted(Path(output).glob("[0-9]*.json"))]


def _in_order(
    samples: int, workers: int, folder: Path, case: Callable[[int], AirfoilSample | str]
) -> Iterator[AirfoilSample]:
    pending: deque[Future[AirfoilSample | str]] = deque()
    indices = itertools.count()
    missing, failed_in_a_row = samples, 0
    with held(folder):
        for unfinished in folder.glob(".case-*"):  # of a run that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        pool = ThreadPoolExecutor(workers)  # threads: the work is done by the solver's own processes
        try:
            while missing:
                while len(pending) < min(missing, 2 * workers):
                    pending.append(pool.submit(case, next(indices)))
                result = pending.popleft().result()
                if isinstance(result, AirfoilSample):
                    missing, failed_in_a_row = missing - 1, 0
                    yield result
                else:
                    failed_in_a_row += 1
                    if failed_in_a_row == PATIENCE:
                        raise RuntimeError(f"{PATIENCE} airfoil cases in a row failed; the last reason: {result}")
        finally:
            pool.shutdown(cancel_futures=True)


def _case(index: int, seed: int, paths: Sequence[Path], folder: Path, settings: AirfoilSettings) -> AirfoilSample | str:
    """The sample of draw `index`, or the reason why there is none; from `folder` where it is already known."""
    done, failed = folder / f"{index:06d}.npz", folder / f"{index:06d}.json"
    if (sample := _load(done)) is not None:
        return sample
    if failed.exists():
        return str(json.loads(failed.read_text())["reason"])
    number, velocity, angle = draw(seed, index, len(paths))
    stream = freestream(velocity, angle)
    name = f"{paths[number].stem}_{int(100 * stream[0])}_{int(100 * stream[1])}"
    try:
        with tempfile.TemporaryDirectory(prefix=".case-", dir=folder) as scratch:
            flow = simulate(read_airfoil(paths[number]), velocity, angle, scratch, settings)
        if not flow.converged:
            raise CaseError(
                f"Not converged: the velocity drifts by {flow.drift:.3g}, more than {settings.tolerance:g}."
            )
    except (CaseError, ValueError) as error:
        reason = str(error)
        record = {"index": index, "name": name, "velocity": velocity, "angle": angle, "reason": reason}
        _replace(failed, lambda file: file.write(json.dumps(record, indent=1).encode()))
        return reason
    sample = AirfoilSample(name, *channels(flow, velocity, angle), flow.residual, flow.drift)
    _replace(done, lambda file: np.savez_compressed(file, **sample._asdict()))
    return sample


def _load(path: Path) -> AirfoilSample | None:
    """A finished sample, or None where it is absent or unreadable and must be solved again."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            name, given, target, residual, drift = (stored[key] for key in AirfoilSample._fields)
    except (FileNotFoundError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return AirfoilSample(str(name), given, target, float(residual), float(drift))


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name and rename it, so that a file with its final name is always complete."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        write(file)
    temporary.replace(path)


def _fingerprint(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Note the settings in `folder`, or refuse one that holds the cases of other settings."""
    path = folder / "settings.json"
    if not path.exists():
        _replace(path, lambda file: file.write(json.dumps(settings, indent=1).encode()))
        return
    present = json.loads(path.read_text())
    changed = sorted(key for key in {*present, *settings} if present.get(key) != settings.get(key))
    if changed:
        raise ValueError(
            f"{folder} holds cases of other settings ({', '.join(changed)}); name another folder to keep both."
        )
