"""Arrays read by slices: what a `Fields` holds, whether its numbers lie in memory, in a file or in a thousand files.

A lazy array has a `shape` and answers `array[index]` with a NumPy array, where `index` is one slice with a positive
step for every axis. NumPy arrays and memory maps already do; the classes here give the same to HDF5 datasets, to
folders of files, to arrays whose axes come in another order, and to selections of any of these. Nothing is read before
it is asked for, and everything can be sent to another process.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, Self

import h5py
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Index = tuple[slice, ...]
Picks = range | tuple[int, ...]


class LazyArray(Protocol):
    """Anything with a shape that can be read by one slice per axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of every axis."""

    def __getitem__(self, index: Any, /) -> Array:
        """The part asked for, as a NumPy array."""


def _picked(index: slice, size: int) -> range:
    return range(*index.indices(size))


class View:
    """A selection of a lazy array: per axis a range, a tuple of indices, or one index, which drops the axis."""

    def __init__(self, base: LazyArray, picks: Sequence[Picks | int] | None = None) -> None:
        self.base = base
        self.picks: tuple[Picks | int, ...] = tuple(range(n) for n in base.shape) if picks is None else tuple(picks)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes that are left."""
        return tuple(len(picks) for picks in self.picks if not isinstance(picks, int))

    def select(self, axis: int, choice: slice | int | Sequence[int]) -> Self:
        """The same view with one of its axes narrowed to a slice, a list of indices, or one index (the axis goes)."""
        place, old = [(i, picks) for i, picks in enumerate(self.picks) if not isinstance(picks, int)][axis]
        new = old[choice] if isinstance(choice, slice | int) else tuple(old[i] for i in choice)
        return type(self)(self.base, (*self.picks[:place], new, *self.picks[place + 1 :]))

    def read(self) -> Array:
        """The selected numbers."""
        for axis, picks in enumerate(self.picks):
            if not isinstance(picks, int) and _far_apart(picks, axis):  # one read per run of neighbours
                before, after = self.picks[:axis], self.picks[axis + 1 :]
                parts = [View(self.base, (*before, run, *after)).read() for run in _runs(picks)]
                kept = sum(not isinstance(other, int) for other in before)
                return np.concatenate(parts, axis=kept) if parts else np.zeros(self.shape, dtype=np.float32)
        index: list[slice] = []
        inner: list[Any] = []
        for picks in self.picks:
            if isinstance(picks, int):
                index.append(slice(picks, picks + 1))
                inner.append(0)
            elif isinstance(picks, range) and picks.step > 0:
                index.append(slice(picks.start, picks.stop, picks.step))
                inner.append(slice(None))
            else:  # a scattered choice of near neighbours, such as channels: read what spans it, then pick
                low = min(picks, default=0)
                index.append(slice(low, max(picks, default=-1) + 1))
                inner.append(np.asarray(picks, dtype=np.intp) - low)
        values = self.base[tuple(index)]
        for axis in reversed(range(len(inner))):
            if not isinstance(inner[axis], slice):
                values = values[(slice(None),) * axis + (inner[axis],)]
        return values

    def __getitem__(self, index: Index) -> Array:
        view = self
        for axis, part in enumerate(index):
            view = view.select(axis, part)
        return view.read()

    def identity(self) -> str:
        """What the view shows, of what."""
        return f"{identity(self.base)} {self.picks}"


def _far_apart(picks: Picks, axis: int) -> bool:
    """Whether scattered indices are better read one by one than by what spans them; samples always are."""
    if isinstance(picks, range) and picks.step > 0:
        return False
    return axis == 0 or max(picks, default=0) - min(picks, default=0) >= 4 * len(picks)


def _runs(picks: Picks) -> list[range]:
    """Consecutive rising indices, grouped, in order."""
    runs: list[range] = []
    for i in picks:
        if runs and runs[-1].stop == i:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


@lru_cache(maxsize=64)
def _hdf5(path: Path, changed: int, process: int) -> h5py.File:
    """An open file for all arrays in it, one per process: a handle inherited through fork is not safe to share."""
    return h5py.File(path, "r")


@dataclass
class HDF5Array:
    """A dataset of an HDF5 file, or several of one shape stacked along a new first axis; opened when first read."""

    path: Path
    key: str | tuple[str, ...]
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        with h5py.File(self.path, "r") as file:
            shapes = {tuple(int(n) for n in file[key].shape) for key in self._keys}
        if len(shapes) > 1:
            raise ValueError(f"the samples of {self.path} differ in shape: {', '.join(map(str, sorted(shapes)))}")
        self.shape = shapes.pop() if isinstance(self.key, str) else (len(self.key), *shapes.pop())

    @property
    def _keys(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key

    def __getitem__(self, index: Index) -> Array:
        file = _hdf5(self.path, self.path.stat().st_mtime_ns, os.getpid())
        try:
            if isinstance(self.key, str):
                return np.asarray(file[self.key][index])
            rest = index[1:]
            parts = [file[key][rest] for key in self.key[index[0]]]
        except OSError as error:
            raise OSError(f"{self.path} cannot be read: it is damaged or truncated ({error})") from error
        shape = (len(_picked(part, n)) for part, n in zip(index, self.shape, strict=True))
        return np.stack(parts) if parts else np.zeros(tuple(shape), dtype=np.float32)

    def identity(self) -> str:
        """The file and the keys."""
        return f"{stamp(self.path)} {self.key}"


@dataclass
class Items:
    """An array whose first `leading` axes count files: `load(file, index)` reads a part of one, `files` lists them."""

    shape: tuple[int, ...]
    load: Callable[[Path, Index], Array]
    files: tuple[Path, ...]
    leading: int = 1

    def __getitem__(self, index: Index) -> Array:
        numbers = np.arange(len(self.files)).reshape(self.shape[: self.leading])[index[: self.leading]]
        rest = index[self.leading :]
        parts = [self.load(self.files[i], rest) for i in numbers.flat]
        shape = tuple(len(_picked(part, size)) for part, size in zip(index, self.shape, strict=True))
        return np.stack(parts).reshape(shape) if parts else np.zeros(shape, dtype=np.float32)

    def identity(self) -> str:
        """The files, and what is read of them."""
        what = self.load.args if isinstance(self.load, partial) else ()
        return f"{[stamp(path) for path in self.files]} {what} {self.shape}"


@dataclass
class Stacked:
    """Several arrays joined along one axis, alike along the others."""

    parts: tuple[LazyArray, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parts, their sizes added up along the joined axis."""
        first = self.parts[0].shape
        return (*first[: self.axis], sum(part.shape[self.axis] for part in self.parts), *first[self.axis + 1 :])

    def __getitem__(self, index: Index) -> Array:
        wanted = _picked(index[self.axis], self.shape[self.axis])
        found, offset = [], 0
        for part in self.parts:
            size = part.shape[self.axis]
            first = max(0, -(-(offset - wanted.start) // wanted.step))
            last = max(0, -(-(offset + size - wanted.start) // wanted.step))
            inside = wanted[first:last]
            if len(inside):
                local = slice(inside.start - offset, inside.stop - offset, inside.step)
                found.append(part[(*index[: self.axis], local, *index[self.axis + 1 :])])
            offset += size
        return np.concatenate(found, axis=self.axis) if found else self.parts[0][index]

    def identity(self) -> str:
        """The parts in order."""
        return f"{[identity(part) for part in self.parts]} {self.axis}"


@dataclass
class Arranged:
    """An array whose axes are labelled by letters, given in another order of letters.

    `axes` names the axes of `base`, `order` and `sizes` those of the result. A label that `base` lacks is repeated to
    its size, so a constant per sample ("nc") becomes a constant field; several axes labelled "c", such as the entries
    of a tensor, become one.
    """

    base: LazyArray
    axes: str
    order: str
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `order`."""
        return self.sizes

    def __getitem__(self, index: Index) -> Array:
        wanted = dict(zip(self.order, index, strict=True))
        channels = wanted.get("c", slice(None))
        # All channels are read and then chosen: entries of a tensor lie interleaved, one read is cheaper than many.
        values = self.base[tuple(slice(None) if label == "c" else wanted[label] for label in self.axes)]
        present = [label for label in self.order if label in self.axes]
        places = [i for label in present for i, axis in enumerate(self.axes) if axis == label]
        values = values.transpose(places)
        lengths = {label: len(_picked(wanted[label], n)) for label, n in zip(self.order, self.sizes, strict=True)}
        if "c" in present:
            head = present.index("c")
            tail = values.shape[head + self.axes.count("c") :]
            values = values.reshape(*values.shape[:head], -1, *tail)[(slice(None),) * head + (channels,)]
        values = values.reshape([lengths[label] if label in self.axes else 1 for label in self.order])
        return np.broadcast_to(values, [lengths[label] for label in self.order])

    def identity(self) -> str:
        """The array and its labels."""
        return f"{identity(self.base)} {self.axes} {self.order} {self.sizes}"


def identity(array: LazyArray) -> str:
    """A text that changes when the numbers may have: content in memory; path, size and time of change on disk."""
    if isinstance(array, np.memmap) and array.filename is not None:  # a copy of a memory map has no file
        layout = f"{array.dtype.str} {array.shape} {array.strides}"
        return f"{stamp(Path(str(array.filename)))} {_file_offset(array)} {layout}"
    if isinstance(array, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    described: str = array.identity()  # type: ignore[attr-defined]  # every class of lazy arrays has it, NumPy's not
    return described


def _file_offset(array: "np.memmap[Any, Any]") -> int:
    """The byte of the file at which a memory map, or a part of one, begins."""
    whole = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    return int(whole.offset + array.ctypes.data - whole.ctypes.data)


def stamp(path: Path) -> str:
    """A file's absolute path, size and time of change; of a folder its path and a hash of those of its files."""
    if path.is_dir():
        folder = path.resolve()
        found = ((str(file), file.stat()) for file in folder.rglob("*") if file.is_file())
        files = sorted((name, status.st_size, status.st_mtime_ns) for name, status in found)
        return f"{folder} {hashlib.sha256(repr(files).encode()).hexdigest()}"
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def check_finite(values: Array, what: str, samples: Sequence[int], missing: bool) -> None:
    """Raise a ValueError that names the first sample of `values` (n, …) holding Inf, or NaN unless it means missing."""
    bad = np.isinf(values) if missing else ~np.isfinite(values)
    if bad.any():
        first = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
        remedy = "repair or leave out that sample" + ("" if missing else ", or declare missing values with missing=nan")
        count = int(bad[first].sum())
        values_are = "a value that is" if count == 1 else f"{count} values that are"
        raise ValueError(f"sample {samples[first]} of {what} holds {values_are} NaN or Inf: {remedy}")
