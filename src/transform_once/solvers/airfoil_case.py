"""The OpenFOAM case of an airfoil as text and arrays: outline, mesh script, dictionaries, samples; nothing runs."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PATCHES = {"front": "empty", "back": "empty", "airfoil": "wall", "farfield": "patch"}
VISCOSITY, FREESTREAM_VISCOSITY = 1e-5, 0.14


class Airfoil(NamedTuple):
    """A closed outline `points (n, 2)`: counter-clockwise from the trailing edge, leading edge at x = 0, chord one."""

    name: str
    points: Array


@dataclass(frozen=True)
class AirfoilSettings:
    """Mesh, solver and sampling; the defaults reproduce the Deep-Flow-Prediction set (29 000 cells, 30 to 60 s each).

    `resolution` nodes per axis, `iterations` of SIMPLE (a multiple of 5), edge lengths of the mesh on the airfoil and
    far away, `tolerance` of the drift (0.05 leaves out vortex streets; for a truly steady state take 0.01 or less and
    give more iterations), `time_limit` in seconds for each program.
    """

    resolution: int = 128
    iterations: int = 500
    airfoil_edge: float = 0.005
    far_edge: float = 0.2
    tolerance: float = 0.05
    time_limit: float = 3600.0

    def __post_init__(self) -> None:
        if self.resolution < 2 or self.iterations < 5 or self.iterations % 5:
            raise ValueError(
                "resolution must be at least 2 and iterations a positive multiple of 5, "
                f"got {self.resolution} and {self.iterations}."
            )
        if not (0 < self.airfoil_edge <= self.far_edge and self.tolerance > 0 and self.time_limit > 0):
            raise ValueError(f"Edge lengths, tolerance and time limit must be positive, far_edge the longer: {self}.")


DEFAULTS = AirfoilSettings()


class CaseError(RuntimeError):
    """A flow that could not be computed; the message is the reason, in one sentence."""


def read_airfoil(path: str | Path) -> Airfoil:
    """Read a `.dat` outline in Selig form (trailing edge, over the top, back below) or Lednicer form (two surfaces).

    Header and footer lines are skipped, repeated points dropped, the turning direction made counter-clockwise and the
    chord scaled to one with the leading edge at x = 0.
    """
    path = Path(path)
    rows = []
    for line in path.read_text(encoding="latin-1").splitlines():
        try:
            row = [float(word) for word in line.split()]
        except ValueError:
            continue
        if len(row) == 2:
            rows.append(row)
    if len(rows) > 1 and min(rows[0]) > 1.5 and sum(rows[0]) == len(rows) - 1:
        upper = int(rows.pop(0)[0])  # Lednicer: the first row counts the points of each surface, nose to tail
        rows = rows[:upper][::-1] + rows[upper:]
    points = np.array(rows, dtype=np.float64).reshape(-1, 2)
    repeated = np.abs(points - np.roll(points, -1, axis=0)).max(axis=1, initial=0) < 1e-6
    points = points[~repeated]
    if len(points) < 8 or not np.isfinite(points).all():
        raise ValueError(
            f"{path.name} must hold at least 8 distinct finite points 'x y', one a line; found {len(points)}."
        )
    x, y = points.T
    area = float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))) / 2
    if area == 0 or crosses_itself(points):
        raise ValueError(
            f"The outline in {path.name} crosses itself or is flat; list its points in order around the airfoil."
        )
    outline = (points - [x.min(), 0.0]) / (x.max() - x.min())
    return Airfoil(path.stem, outline if area > 0 else outline[::-1])


def crosses_itself(points: Array) -> bool:
    """Whether two edges of the closed polygon `points (n, 2)` cross."""

    def side(a: Array, b: Array, c: Array) -> Array:
        return (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1]) - (b[..., 1] - a[..., 1]) * (c[..., 0] - a[..., 0])

    ends = np.roll(points, -1, axis=0)
    a, b, c, d = points[:, None], ends[:, None], points[None], ends[None]
    return bool(((side(a, b, c) * side(a, b, d) < 0) & (side(c, d, a) * side(c, d, b) < 0)).any())


def find_shapes(folder: str | Path | None = None) -> list[Path]:
    """The `.dat` files of `folder`, sorted by name; by default the UIUC airfoils that come with AeroSandbox."""
    if folder is None:
        package = importlib.util.find_spec("aerosandbox")  # located, not imported: importing takes seconds
        if package is None or not package.submodule_search_locations:
            raise ModuleNotFoundError(
                "The UIUC airfoils come with AeroSandbox, which is not installed; "
                "run: pip install 'transform-once[airfoil]', or name a folder of .dat files."
            )
        folder = Path(package.submodule_search_locations[0]) / "geometry" / "airfoil" / "airfoil_database"
    paths = sorted(Path(folder).glob("*.dat"), key=lambda path: path.name)
    if not paths:
        raise FileNotFoundError(f"No .dat files in {folder}; name a folder of airfoil outlines.")
    return paths


def mesh_text(airfoil: Airfoil, settings: AirfoilSettings) -> str:
    """The gmsh script: a closed spline in a square of side 10, meshed by triangles and extruded by one cell."""
    n = len(airfoil.points)
    corners = ((-5, -5), (5, -5), (5, 5), (-5, 5))
    places = [(x, y, settings.airfoil_edge) for x, y in airfoil.points]
    places += [(x, y, settings.far_edge) for x, y in corners]
    lines = [f"Point({i}) = {{{x:.10g}, {y:.10g}, 0, {edge:g}}};" for i, (x, y, edge) in enumerate(places, start=1)]
    lines += [f"Line({side}) = {{{n + side}, {n + side % 4 + 1}}};" for side in range(1, 5)]
    lines += [
        f"Spline(5) = {{1:{n}, 1}};",
        "Curve Loop(1) = {1, 2, 3, 4};",
        "Curve Loop(2) = {5};",
        "Plane Surface(1) = {1, 2};",
        # swept[] lists the far surface, the volume, then the sides in the order of the loops
        "swept[] = Extrude {0, 0, 1} { Surface{1}; Layers{1}; Recombine; };",
        'Physical Surface("back") = {1};',
        'Physical Surface("front") = {swept[0]};',
        'Physical Volume("fluid") = {swept[1]};',
        'Physical Surface("farfield") = {swept[{2:5}]};',
        'Physical Surface("airfoil") = {swept[6]};',
    ]
    return "\n".join(lines) + "\n"


def patch_boundary(text: str) -> str:
    """Give the patches in gmshToFoam's `boundary` file, all of type `patch`, the types in PATCHES."""
    found = re.findall(r"(\w+)\s*\{\s*type\s", text)
    if sorted(found) != sorted(PATCHES):
        raise CaseError(f"The mesh must have the patches {sorted(PATCHES)}, but has {sorted(found)}.")
    text = re.sub(r"\s*physicalType\s+\w+;", "", text)
    return re.sub(r"(\w+)(\s*\{\s*type\s+)\w+;", lambda match: f"{match[1]}{match[2]}{PATCHES[match[1]]};", text)


def dictionary_text(entries: Mapping[str, Any]) -> str:
    """OpenFOAM's syntax for nested entries: `key value;` and `key { … }`."""
    return "".join(
        f"{key}\n{{\n{dictionary_text(value)}}}\n" if isinstance(value, Mapping) else f"{key} {value};\n"
        for key, value in entries.items()
    )


def case_files(velocity: tuple[float, float], settings: AirfoilSettings) -> dict[str, str]:
    """The text of every file of the OpenFOAM case but the mesh, by its path in the case folder."""
    files = {}
    for path, entries in {**_fields(velocity), **_constants(), **_controls(settings)}.items():
        kind = {"0/U": "volVectorField"}.get(path, "volScalarField" if path.startswith("0/") else "dictionary")
        header = {"version": "2.0", "format": "ascii", "class": kind, "object": Path(path).name}
        files[path] = dictionary_text({"FoamFile": header, **entries})
    return files


def _fields(velocity: tuple[float, float]) -> dict[str, dict[str, Any]]:
    stream, eddies = f"uniform ({velocity[0]!r} {velocity[1]!r} 0)", f"uniform {FREESTREAM_VISCOSITY}"
    far_eddies = {"type": "freestream", "freestreamValue": eddies}
    level = {"type": "zeroGradient"}

    def field(dimensions: str, start: str, far: dict[str, str], airfoil: dict[str, str]) -> dict[str, Any]:
        boundary = {"farfield": far, "airfoil": airfoil, '"(front|back)"': {"type": "empty"}}
        return {"dimensions": f"[0 {dimensions} 0 0 0 0]", "internalField": start, "boundaryField": boundary}

    return {
        # The original set fixed the velocity far away and let the pressure float; freestreamPressure moves v by 24%.
        "0/U": field("1 -1", stream, {"type": "fixedValue", "value": stream}, {"type": "noSlip"}),
        "0/p": field("2 -2", "uniform 0", level, level),
        "0/nut": field("2 -1", eddies, far_eddies, {"type": "nutUSpaldingWallFunction", "value": "uniform 0"}),
        "0/nuTilda": field("2 -1", eddies, far_eddies, {"type": "fixedValue", "value": "uniform 0"}),
    }


def _constants() -> dict[str, dict[str, Any]]:
    return {
        "constant/transportProperties": {"transportModel": "Newtonian", "nu": VISCOSITY},
        "constant/turbulenceProperties": {
            "simulationType": "RAS",
            "RAS": {"RASModel": "SpalartAllmaras", "turbulence": "on", "printCoeffs": "off"},
        },
    }


def _controls(settings: AirfoilSettings) -> dict[str, dict[str, Any]]:
    last, interval, nodes = settings.iterations, settings.iterations // 5, range(settings.resolution)
    place = " ".join(
        f"({-0.5 + 2 * i / len(nodes):.10g} {-1 + 2 * j / len(nodes):.10g} 0.5)" for i in nodes for j in nodes
    )
    cloud = {"type": "sets", "libs": "(sampling)", "writeControl": "timeStep", "writeInterval": interval}
    cloud |= {"interpolationScheme": "cellPoint", "setFormat": "raw", "fields": "(p U)"}
    cloud |= {"sets": f"(grid {{ type cloud; axis xyz; points ({place}); }})"}
    upwind = "bounded Gauss linearUpwind grad"
    sweep = {"solver": "smoothSolver", "smoother": "GaussSeidel", "nSweeps": 2, "tolerance": 1e-8, "relTol": 0.1}
    return {
        "system/controlDict": {
            "startFrom": "startTime",
            "startTime": 0,
            "stopAt": "endTime",
            "endTime": last,
            "deltaT": 1,
            "writeInterval": last,
            "writePrecision": 8,
            "runTimeModifiable": "false",
            "functions": {"cloud": cloud},
        },
        "system/fvSchemes": {
            "ddtSchemes": {"default": "steadyState"},
            "gradSchemes": {"default": "Gauss linear"},
            "divSchemes": {
                "div(phi,U)": f"{upwind}(U)",
                "div(phi,nuTilda)": f"{upwind}(nuTilda)",
                "div((nuEff*dev2(T(grad(U)))))": "Gauss linear",
            },
            "laplacianSchemes": {"default": "Gauss linear corrected"},
            "interpolationSchemes": {"default": "linear"},
            "snGradSchemes": {"default": "corrected"},
            "wallDist": {"method": "meshWave"},
        },
        "system/fvSolution": {
            "solvers": {
                "p": {"solver": "GAMG", "smoother": "GaussSeidel", "tolerance": 1e-6, "relTol": 0.1},
                '"(U|nuTilda)"': sweep,
            },
            "SIMPLE": {"nNonOrthogonalCorrectors": 0, "pRefPoint": "(-4.9 0 0.5)", "pRefValue": 0},
            "relaxationFactors": {"fields": {"p": 0.3}, "equations": {"U": 0.7, "nuTilda": 0.7}},
        },
    }


def grid_from_cloud(rows: Array, resolution: int) -> tuple[NDArray[np.bool_], Array]:
    """Put sampled `rows (k, 3 + c)` of x, y, z and values on the grid: mask (n, n) of absent nodes, values (c, n, n).

    The solver returns values only for points inside the mesh; the nodes it leaves out lie in the airfoil.
    """
    places = (rows[:, :2] - [-0.5, -1.0]) * (resolution / 2)
    i, j = np.rint(places).astype(int).T
    if len(rows) and (min(i.min(), j.min()) < 0 or max(i.max(), j.max()) >= resolution):
        raise CaseError("The sampled points leave the grid.")
    if np.abs(places - np.stack([i, j], axis=1)).max(initial=0) > 0.01 or len({*zip(i, j, strict=True)}) < len(rows):
        raise CaseError("The sampled points are not distinct nodes of the grid.")
    mask = np.ones((resolution, resolution), dtype=bool)
    mask[i, j] = False
    values = np.zeros((rows.shape[1] - 3, resolution, resolution))
    values[:, i, j] = rows[:, 3:].T
    return mask, values
