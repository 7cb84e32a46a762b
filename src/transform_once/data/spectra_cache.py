"""A file of arrays that is built piece by piece, survives a kill at any moment, and is used only when it is whole.

The HDF5 structure is written first, every dataset with its final shape and place in the file (contiguous,
uncompressed). From then on HDF5 is not involved: units, consecutive rows that all arrays have in common, are written as
bytes into their places, each with its checksum in `check`. What was finished when a build was killed, and whether a
file is whole, is told by the checksums alone, so that torn, truncated and foreign bytes are never taken for numbers.
Until it is whole the file is called `*.h5.partial`.
"""

import contextlib
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from transform_once.data.arrays import Array
from transform_once.data.fields import Fields
from transform_once.data.writer import open_hdf5
from transform_once.files import held

Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
Blocks = Iterator[tuple[int, dict[str, Array]]]

READ_BYTES = 1 << 24
SUFFIX = ".spectra"


@dataclass
class Cache:
    """The file at `path` of arrays laid out as `layout`, made from what `key` stands for, in so many `units`.

    `note` is a text that belongs to the numbers and is known once the file is begun; the checksums cover it too.
    """

    path: Path
    key: str
    layout: Layout
    units: int
    note: str = ""
    _places: dict[str, int] = field(default_factory=dict, repr=False)

    def whole(self) -> bool:
        """Whether the file is there, was made from the same, and every checksum is right."""
        return self._finished(self.path) == self.units

    def build(self, note: Callable[[], str], blocks: Callable[[str, int], Blocks]) -> None:
        """Make the file, or go on where a killed build of the same stopped.

        `note()` gives the note of a new file; `blocks(note, start)` the arrays (units, ...) of successive units from
        `start` on, each time with the number of the first. Another process that builds in the same folder is awaited.
        """
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with held(self.path.parent, wait=True):
            if not self.whole():  # or another process has made it in the meantime
                self._build(note, blocks)

    def mapped(self) -> dict[str, Array]:
        """The arrays of a whole file, mapped into memory: read where indexed; changes to them never reach the file."""
        return {
            name: np.memmap(self.path, dtype, "c", self._places[name], shape)
            for name, (shape, dtype) in self.layout.items()
        }

    def _build(self, note: Callable[[], str], blocks: Callable[[str, int], Blocks]) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        start = self._finished(partial)
        if start is None:
            self.note, start = note(), 0
            with self._explained():
                self._create(partial)
        with open(partial, "r+b") as file:
            for first, block in blocks(self.note, start):
                with self._explained():
                    self._write(file, first, block)
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    def _write(self, file: IO[bytes], first: int, block: Mapping[str, Array]) -> None:
        for name, values in {**block, "check": self._checks(block)}.items():
            file.seek(self._places[name] + first * self._row_bytes(name))
            file.write(np.ascontiguousarray(values).data)
        file.flush()  # to the system: a kill of this process cannot undo it

    def _create(self, path: Path) -> None:
        room = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        room.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        room.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(path, "w", libver="latest") as file:  # the latest version has checksums of its structure
            file.attrs.update({"key": self.key, "note": self.note, "check": self._seed})
            for name, (shape, dtype) in self.layout.items():
                file.create_dataset(name, shape=shape, dtype=dtype, dcpl=room.copy())
            file["check"] = np.zeros(self.units, dtype="<u4")
            self._places = self._find(file)

    def _find(self, file: h5py.File) -> dict[str, int]:
        return {name: file[name].id.get_offset() for name in (*self.layout, "check")}

    def _finished(self, path: Path) -> int | None:
        """How many units at the front of a file are right; None where it is damaged or something else."""
        try:
            with open_hdf5(path) as file:
                found = {name: (file[name].shape, file[name].dtype) for name in self.layout}
                if file.attrs["key"] != self.key or found != self.layout:
                    return None
                self.note, self._places = file.attrs["note"], self._find(file)
                if file.attrs["check"] != self._seed:
                    return None
            with open(path, "rb") as numbers:
                return self._right(numbers)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError):  # all that HDF5 has to say of damaged files
            return None

    def _right(self, file: IO[bytes]) -> int:
        step = max(1, READ_BYTES // sum(map(self._row_bytes, self.layout)))
        for start in range(0, self.units, step):
            count = min(step, self.units - start)
            block = {}
            for name in (*self.layout, "check"):
                file.seek(self._places[name] + start * self._row_bytes(name))
                block[name] = np.fromfile(file, np.uint8, count * self._row_bytes(name)).reshape(count, -1)
            wrong = self._checks(block) != block["check"].view("<u4").ravel()
            if wrong.any():
                return start + int(np.argmax(wrong))
        return self.units

    @property
    def _seed(self) -> int:
        return zlib.crc32(f"{self.key} {self.note}".encode())

    def _row_bytes(self, name: str) -> int:
        if name == "check":
            return 4
        shape, dtype = self.layout[name]
        return math.prod(shape) // self.units * dtype.itemsize

    def _checks(self, block: Mapping[str, Array]) -> Array:
        """The checksum of every unit over all arrays; begun with the key and the note, it is theirs too."""
        count = len(next(iter(block.values())))
        sums = [self._seed] * count
        for name in self.layout:
            rows = np.ascontiguousarray(block[name]).reshape(count, -1)
            sums = [zlib.crc32(row.data, total) for row, total in zip(rows, sums, strict=True)]
        return np.array(sums, dtype="<u4")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what to do when the disk is full or the folder cannot be written."""
        try:
            yield
        except OSError as error:
            remedy = "choose another folder with cache=, or keep the spectra in memory with cache=False"
            raise OSError(error.errno, f"cannot write the cache {self.path}: {remedy} ({error})") from error


def folder_for(fields: Fields, cache: bool | str | Path) -> Path | None:
    """The folder to cache in, or None."""
    if not isinstance(cache, bool):
        return Path(cache).resolve()
    files = sorted({file.resolve() for array in fields._arrays.values() for file in _files(array)})
    if not cache or not files:
        return None
    source = files[0] if len(files) == 1 else Path(os.path.commonpath([file.parent for file in files]))
    return source.with_name(source.name + SUFFIX)


def _files(array: Any) -> list[Path]:
    """The files that a lazy array reads, however often it is wrapped."""
    if isinstance(array, np.ndarray):
        return [Path(str(array.filename))] if isinstance(array, np.memmap) else []
    inner = [*getattr(array, "parts", ()), *([array.base] if hasattr(array, "base") else [])]
    own = [*getattr(array, "files", ()), *([array.path] if hasattr(array, "path") else [])]
    return own + [file for part in inner for file in _files(part)]
