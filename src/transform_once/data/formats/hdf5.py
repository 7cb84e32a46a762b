"""HDF5 files of others: PDEBench, The Well, and datasets by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from transform_once.data.arrays import Array, HDF5Array, LazyArray, Stacked
from transform_once.data.formats.catalogue import Catalogue, grid_kind
from transform_once.data.options import ReadOptions
from transform_once.data.writer import open_hdf5

COMPRESSIBLE = ("density", "pressure", "Vx", "Vy", "Vz")


def kind_of(path: Path) -> str:
    """Which layout an HDF5 file has: "fields", "well", "pdebench", or "hdf5", datasets by name."""
    with open_hdf5(path) as file:
        if str(file.attrs.get("format", "")).startswith("transform-once"):
            return "fields"
        if "t0_fields" in file or "t1_fields" in file:
            return "well"
        seeds = all(isinstance(item, h5py.Group) and "data" in item for item in file.values())
        if (
            "tensor" in file
            or "t-coordinate" in file
            or {"velocity", "particles"} <= set(file)
            or (seeds and len(file))
        ):
            return "pdebench"
    return "hdf5"


def hdf5(path: Path, options: ReadOptions) -> Catalogue:
    """Any HDF5 file with datasets `input` and `target`, or `trajectory`, or others chosen by key."""
    keys: list[str] = []
    with open_hdf5(path) as file:
        file.visititems(lambda name, item: keys.append(name) if isinstance(item, h5py.Dataset) else None)
    inputs, targets, films = (tuple(k for k in (name,) if k in keys) for name in ("input", "target", "trajectory"))
    return Catalogue(path, keys, open=lambda key: HDF5Array(path, key), input=inputs, target=targets, trajectory=films)


def pdebench(path: Path, options: ReadOptions) -> Catalogue:
    """PDEBench in all its layouts, as trajectories, or for Darcy's steady flow as pairs `nu` → `tensor`.

    `tensor` (n, t, *grid); for compressible flow one such dataset per variable; a group per sample with `data`
    (t, *grid, c); for incompressible flow `velocity` and `particles` (n, t, *grid, c).
    """
    with open_hdf5(path) as file:
        groups = tuple(sorted(key for key, item in file.items() if isinstance(item, h5py.Group) and "data" in item))
        shapes = {key: tuple(item.shape) for key, item in file.items() if isinstance(item, h5py.Dataset)}
        coordinates = file[groups[0]]["grid"] if groups and "grid" in file[groups[0]] else file
        times = _first(coordinates, ("t-coordinate", "t"))
        line = _first(coordinates, ("x-coordinate", "x"))
    known: dict[str, Any] = {"grid": "cell" if line is None else grid_kind(line)}
    if groups:
        films = HDF5Array(path, tuple(f"{group}/data" for group in groups))
        axes = "nt" + "xyz"[: len(films.shape) - 3] + "c"
        times = None if times is None else times[: films.shape[1]]
        return Catalogue(
            path, ["data"], lambda key: films, lambda key, shape: axes, (), (), ("data",), times, names=groups, **known
        )
    variables = tuple(key for key in COMPRESSIBLE if key in shapes)
    if {"velocity", "particles"} <= set(shapes):
        variables = ("velocity", "particles")
    steady = "nu" in shapes and "tensor" in shapes and len(shapes["nu"]) == len(shapes["tensor"]) - 1
    variables = variables or (() if steady else ("tensor",))
    frames = shapes[variables[0]][1] if variables and variables[0] in shapes else 1

    def axes_of(key: str, shape: tuple[int, ...]) -> str | None:
        if key in ("velocity", "particles", "force"):
            return ("n" if key == "force" else "nt") + "xyz"[: len(shape) - (2 if key == "force" else 3)] + "c"
        if key == "nu":
            return "n" + "xyz"[: len(shape) - 1]
        return "nt" + "xyz"[: len(shape) - 2]

    return Catalogue(
        path,
        list(shapes),
        open=lambda key: HDF5Array(path, key),
        axes=axes_of,
        input=("nu",) if steady else (),
        target=("tensor",) if steady else (),
        trajectory=variables,
        times=None if times is None or steady else times[:frames],  # the published files list one time more than frames
        **known,
    )


def _first(group: h5py.Group, keys: Sequence[str]) -> Array | None:
    for key in keys:
        if key in group:
            values: Array = group[key][()].astype(np.float64)
            return values[0] if values.ndim == 2 else values
    return None


def well(path: Path, options: ReadOptions) -> Catalogue:
    """The Well, a file or a folder of them: scalars, vectors, tensors in `t0_fields`, `t1_fields` and `t2_fields`.

    Everything that varies in time is joined as channels of trajectories; fields constant in time can be chosen by key.
    """
    files = sorted([*path.glob("*.h5"), *path.glob("*.hdf5")]) if path.is_dir() else [path]
    places: dict[str, str] = {}
    axes: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    with open_hdf5(files[0]) as file:
        dims = [_text(dim) for dim in file["dimensions"].attrs["spatial_dims"]]
        times = np.atleast_2d(file["dimensions/time"][()])[0].astype(np.float64)
        kinds = {grid_kind(file["dimensions"][dim][()].ravel()) for dim in dims}
        borders = [item.attrs for item in file.get("boundary_conditions", {}).values()]
        wrapped = [b["associated_dims"] for b in borders if _text(b["bc_type"]).lower() == "periodic"]
        for order, components in enumerate(([""], dims, [a + b for a in dims for b in dims])):
            for name, item in file.get(f"t{order}_fields", {}).items():
                grid = "".join(letter for letter, kept in zip("xyz", item.attrs["dim_varying"], strict=False) if kept)
                leading = [("n", "sample_varying"), ("t", "time_varying")]
                axes[name] = "".join(letter for letter, fact in leading if item.attrs[fact]) + grid + "c" * order
                names[name] = [f"{name}_{end}" if end else name for end in components]
                places[name] = f"t{order}_fields/{name}"
        settings = {key: _text(value) for key, value in file.attrs.items()}

    def load(key: str) -> LazyArray:
        parts = tuple(HDF5Array(file, places[key]) for file in files)
        odd = [part for part in parts if part.shape[1:] != parts[0].shape[1:]]
        if odd:
            found = f"{key} is {parts[0].shape} in {files[0].name} and {odd[0].shape} in {odd[0].path.name}"
            raise ValueError(f"the files of {path} differ in resolution or length: {found}")
        return parts[0] if len(parts) == 1 or "n" not in axes[key] else Stacked(parts, 0)

    return Catalogue(
        path,
        list(axes),
        open=load,
        axes=lambda key, shape: axes[key],
        trajectory=tuple(key for key, letters in axes.items() if "t" in letters),
        times=times,
        channels=names,
        grid="cell" if kinds == {"cell"} else "node",
        periodic=tuple(dim in [_text(d) for group in wrapped for d in group] for dim in dims),
        settings=settings,
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
