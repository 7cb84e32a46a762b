"""Files that hold whole arrays by name: NumPy, PyTorch, MATLAB, and NetCDF and Zarr through xarray."""

import contextlib
import importlib
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from transform_once.data.arrays import Array, HDF5Array, Index, LazyArray, stamp
from transform_once.data.formats.catalogue import Catalogue, grid_kind
from transform_once.data.options import ReadOptions
from transform_once.data.writer import open_hdf5


def needed(module: str, extra: str, what: str) -> Any:
    """An optional package, or an ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{what} needs {module}: pip install "transform-once[{extra}]"') from error


def _usual(path: Path, keys: list[str], **known: Any) -> Catalogue:
    """The convention for arrays by name: `input` and `target`, or `trajectory`, and the times `t` or `time`.

    A bare array is called `array`.
    """
    times = next((key for key in ("t", "time") if key in keys), None)
    if times is not None:
        known["times"] = np.asarray(known["open"](times), dtype=np.float64).ravel()
    films = tuple(key for key in ("trajectory", "array") if key in keys)[:1]
    inputs, targets = (tuple(key for key in (name,) if key in keys) for name in ("input", "target"))
    return Catalogue(path, keys, input=inputs, target=targets, trajectory=() if inputs else films, **known)


@contextlib.contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a parser raises on a damaged file into one sentence."""
    try:
        yield
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(f"{path} is no readable {kind}: damaged, truncated or of another kind ({reason})") from error


NUMPY = "NumPy file of plain numbers (pickled objects are never loaded)"
PYTORCH = "PyTorch file of plain tensors (nothing else is ever unpickled)"


def npz(path: Path, options: ReadOptions) -> Catalogue:
    """NumPy archives; only the arrays asked for are unpacked, pickled objects never."""

    def load(key: str) -> LazyArray:
        with readable(path, NUMPY), open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            array: Array = archive[key]
        return array

    with readable(path, NUMPY), open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
        keys = list(archive.files)
    return _usual(path, keys, open=load)


def npy(path: Path, options: ReadOptions) -> Catalogue:
    """A single NumPy array, mapped into memory: a trajectory, or with `input_key="array"` inputs."""
    with readable(path, NUMPY):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    return _usual(path, ["array"], open=lambda key: array)


def pt(path: Path, options: ReadOptions) -> Catalogue:
    """PyTorch files of tensors by name, or of one tensor, called `array`; nothing else is ever unpickled."""
    with readable(path, PYTORCH):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    tensors = {"array": content} if isinstance(content, torch.Tensor) else content
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}: expected a tensor, or tensors by name")
    arrays = {str(key): value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    return _usual(path, list(arrays), open=lambda key: arrays[key].detach().numpy())


def mat(path: Path, options: ReadOptions) -> Catalogue:
    """MATLAB files, by default in the layout of Li et al.: `a` (n, *grid), `u` (n, *grid, t), times `t`.

    Version 7.3 is HDF5 with the axes in reverse and is read by slices; older versions need SciPy and are read whole.
    With a time axis the solutions are a trajectory, on nodes of a torus, unless `target_time` makes pairs of them.
    """
    if h5py.is_hdf5(path):
        with open_hdf5(path) as file:
            shapes = {key: tuple(reversed(item.shape)) for key, item in file.items() if isinstance(item, h5py.Dataset)}
        reverse = -1
    else:
        scipy = needed("scipy.io", "mat", "reading MATLAB files older than version 7.3")
        with readable(path, "MATLAB file"):
            shapes = {name: tuple(shape) for name, shape, _ in scipy.whosmat(path)}
        reverse = 1

    def load(key: str) -> LazyArray:
        if reverse == -1:
            return HDF5Array(path, key)
        with readable(path, "MATLAB file"):
            return np.asarray(scipy.loadmat(path, variable_names=[key])[key])

    times: Array | None = None
    if "t" in shapes:
        stored = load("t")
        times = stored[tuple(slice(None) for _ in stored.shape)].astype(np.float64).ravel()
    rank = max((len(shape) for shape in shapes.values()), default=0)

    def axes(key: str, shape: tuple[int, ...]) -> str:
        timed = times is not None and len(shape) == rank > 2 and shapes[key][-1] == len(times)
        return ("n" + "xyz"[: rank - 2] + "t" if timed else "n" + "xyz"[: len(shape) - 1])[::reverse]

    evolving = "u" in shapes and "t" in axes("u", shapes["u"])
    return Catalogue(
        path,
        list(shapes),
        open=load,
        axes=axes,
        input=("a",) if "a" in shapes else (),
        target=("u",) if "u" in shapes else (),
        trajectory=("u",) if evolving else (),
        times=times,
        grid="node",
        periodic=evolving,
    )


LABELS = {"t": ("time", "t", "step"), "n": ("sample", "n", "batch", "member", "number", "realization", "ensemble")}
LABELS["c"] = ("channel", "c", "level", "plev", "pressure_level", "isobaricInhPa", "variable")


def xarray(path: Path, options: ReadOptions) -> Catalogue:
    """NetCDF files and Zarr folders. Axes are known by the usual names of dimensions; those not known are the grid's.

    All variables with the dimensions of the largest are joined as channels of a trajectory, or of inputs without time.
    """
    dataset = _opened(path)
    known = {name: letter for letter, names in LABELS.items() for name in names}
    named = sorted(dataset.data_vars.items()) if path.is_dir() else dataset.data_vars.items()  # folders have no order
    dims: dict[str, tuple[str, ...]] = {str(name): tuple(map(str, v.dims)) for name, v in named}

    def axes(key: str, shape: tuple[int, ...]) -> str:
        free = iter("xyz?????")
        return "".join(known.get(dim.lower()) or known.get(dim) or next(free) for dim in dims[key])

    largest = max(dims.values(), key=len, default=())
    keys = tuple(key for key in dims if dims[key] == largest)
    timed = [dim for dim in largest if known.get(dim.lower()) == "t"]
    times = _seconds(dataset[timed[0]].values) if timed and timed[0] in dataset.coords else None
    spatial = [dim for dim in largest if dim.lower() not in known and dim not in known and dim in dataset.coords]
    kinds = {grid_kind(dataset[dim].values) for dim in spatial if dataset[dim].dtype.kind == "f"}
    return Catalogue(
        path,
        list(dims),
        open=lambda key: Labelled(path, key),
        axes=axes,
        input=() if timed else keys,
        trajectory=keys if timed else (),
        times=times,
        grid="node" if kinds == {"node"} else "cell",
        settings={"attributes": {str(k): str(v) for k, v in dataset.attrs.items()}},
    )


def _opened(path: Path) -> Any:
    module = needed("xarray", "xarray", "reading NetCDF and Zarr")
    with warnings.catch_warnings(), readable(path, "NetCDF or Zarr"):
        warnings.simplefilter("ignore")  # of future versions of the packages underneath, nothing a reader can change
        return (
            module.open_zarr(path, chunks=None) if path.is_dir() else module.open_dataset(path, decode_timedelta=False)
        )


@lru_cache(maxsize=16)
def _dataset(path: Path, changed: str, process: int) -> Any:
    """An open dataset for all variables in it, one per state of its files and per process."""
    return _opened(path)


def _changed(path: Path) -> str:
    """The state of what an open dataset remembers; a Zarr folder reads its thousands of chunks anew every time."""
    if not path.is_dir():
        return stamp(path)
    names = (".zmetadata", ".zarray", ".zattrs", "zarr.json")
    return " ".join(sorted(stamp(file) for name in names for file in (*path.glob(name), *path.glob(f"*/{name}"))))


def _seconds(times: Array) -> Array:
    """Dates as seconds after the first; numbers as they are."""
    if times.dtype.kind == "M":
        return (times - times[0]) / np.timedelta64(1, "s")
    return times.astype(np.float64)


@dataclass
class Labelled:
    """A variable of an xarray dataset, read by slices."""

    path: Path
    key: str
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = tuple(self._variable.shape)

    @property
    def _variable(self) -> Any:
        return _dataset(self.path, _changed(self.path), os.getpid())[self.key]

    def __getitem__(self, index: Index) -> Array:
        return np.asarray(self._variable[index].values)

    def identity(self) -> str:
        """The source and the variable."""
        return f"{stamp(self.path)} {self.key}"
