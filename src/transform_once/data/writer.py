"""Writing fields to HDF5 so that a kill at any moment loses no finished sample and leaves nothing that reads as whole.

The HDF5 structure is written once, before any field: every dataset has its final shape and its place in the file
(contiguous, uncompressed), and `x.h5.partial` appears by a rename only when that structure is complete. From then on
HDF5 is not involved: a sample is written as bytes into its place, synchronised to disk, and only then its byte in
`finished` is set. A kill can therefore tear no structure, only the bytes of a sample not yet marked, which are written
again on resuming. When the last sample is marked the file is renamed to `x.h5`.

The layout: datasets `input` and `target` (n, c, *grid), or `trajectory` (n, t, c, *grid) with `time` (t,) and the
attribute `dt`; optionally `mask`; `names` (n,) of samples; `finished`, one byte per sample, or per frame of a
trajectory; the attributes of `Metadata`, and `format`.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import torch

from transform_once.data.arrays import Array, check_finite
from transform_once.data.metadata import Metadata, declare
from transform_once.files import atomic_path

FORMAT = "transform-once fields 1"
NAME_BYTES = 64
COPY_BYTES = 1 << 24


class FieldsWriter:
    """Writes samples one after the other into a file of fields, and continues where a killed run stopped.

    ```python
    shapes = {"input": (1, 64, 64), "target": (1, 64, 64)}         # or {"trajectory": (t, c, *grid)}; per sample
    with FieldsWriter("flow.h5", samples=1200, shapes=shapes, grid="node", periodic=True, seed=0) as writer:
        for first in range(writer.finished, 1200, 50):             # from 0, or from where a killed run stopped
            writer.append(input=a, target=u)                       # (50, 1, 64, 64), arrays or tensors on any device
    ```

    samples   how many will be appended; where fewer are, the file becomes as long as they are.
    shapes    the shape of each array without the sample axis; "mask" too, where every sample brings its own.
    mask      one for all samples, (c or 1, *grid) or (t, c or 1, *grid): nonzero marks points that leave the loss.
    metadata  a `Metadata`; its entries can also be given by keyword, and `dt`.

    Leaving the `with` block without an exception completes the file; any exception keeps `flow.h5.partial` for later.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        samples: int,
        shapes: Mapping[str, tuple[int, ...]],
        mask: Array | torch.Tensor | None = None,
        metadata: Metadata | None = None,
        **declared: Any,
    ) -> None:
        self.path = Path(path)
        self.samples = samples
        self.shapes = {name: tuple(int(n) for n in shape) for name, shape in shapes.items()}
        self.metadata = declare(metadata, declared, {name: s for name, s in self.shapes.items() if name != "mask"})
        self._time_axes = 1 if "trajectory" in self.shapes else 0
        self._frames = len(self.metadata.times) if self._time_axes else 1
        self._mask = None if mask is None else _leading_ones(as_mask(mask), 1 + max(map(len, self.shapes.values())))
        self._partial = self.path.with_name(self.path.name + ".partial")
        if self.path.suffix not in (".h5", ".hdf5"):
            raise ValueError(f"fields are written as HDF5, to a name that ends in .h5; got {self.path}")
        if samples < 1:
            raise ValueError(f"a file of fields holds at least one sample, not {samples}")
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists already: remove it or choose another output")
        if not self._partial.exists():
            with self._explained(), atomic_path(self._partial) as temporary:
                self._create(temporary, samples)
        self._places = self._resume()
        self._file = open(self._partial, "r+b", buffering=0)  # noqa: SIM115  # close() closes it
        self._lock()
        flags = np.frombuffer(self._read("finished", samples * self._frames), dtype=np.uint8)
        self._position = int(np.argmin(np.append(flags, 0)))  # in units: samples, or frames of trajectories

    @property
    def finished(self) -> int:
        """The samples that are safely in the file."""
        return self._position // self._frames

    @property
    def finished_frames(self) -> int:
        """The frames, after the finished samples, of a trajectory that is being written piece by piece."""
        return self._position % self._frames

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the finished samples, empty where none was given."""
        stored = self._read("names", self.finished * NAME_BYTES)
        return tuple(name.decode() for name in np.frombuffer(stored, dtype=f"S{NAME_BYTES}").tolist())

    def append(self, *, names: Sequence[str] | None = None, **arrays: Array | torch.Tensor) -> None:
        """Add samples (b, c, *grid), trajectories (b, t, c, *grid), or the next frames of one (1, k, c, *grid).

        When this returns they are finished: no kill can undo them. Inf is refused, and NaN unless declared missing.
        """
        if set(arrays) != set(self.shapes):
            raise ValueError(f"append takes {' and '.join(self.shapes)}; got {' and '.join(arrays) or 'nothing'}")
        dtype = np.dtype(self.metadata.dtype).newbyteorder("<")
        blocks = {name: as_mask(a) if name == "mask" else as_numbers(a, dtype) for name, a in arrays.items()}
        units = self._count(blocks)
        with self._explained():
            for name, block in blocks.items():
                # A mask without a time axis has one row per sample, every other array one per unit.
                row = self._position * self._rows(name) // self._frames
                self._write(name, row * self._row_bytes(name), block)
            if names is not None:
                self._write("names", self.finished * NAME_BYTES, _encoded(names, len(next(iter(blocks.values())))))
            os.fsync(self._file.fileno())  # the numbers are on disk before their marks can be
            self._write("finished", self._position, np.ones(units, dtype=np.uint8))
        self._position += units

    def finish(self) -> None:
        """Complete the file with the samples it has: rename it, or copy it where fewer came than were announced."""
        if self.finished_frames or not self.finished:
            raise ValueError(
                f"{self.path} cannot be completed with {self.finished} whole samples and {self.finished_frames} frames "
                "of the next: append all frames of a trajectory, and at least one sample"
            )
        with self._explained():
            os.fsync(self._file.fileno())
            if self.finished == self.samples:
                os.replace(self._partial, self.path)
            else:
                with atomic_path(self.path) as temporary:
                    self._copy_finished(temporary)
                self._partial.unlink()
        self.close()

    def close(self) -> None:
        """Stop writing; what is not finished stays in the partial file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None and not self._file.closed:
                self.finish()
        finally:
            self.close()

    def _rows(self, name: str) -> int:
        return self.shapes[name][0] if self._time_axes else 1

    def _row_bytes(self, name: str) -> int:
        size = 1 if name == "mask" else np.dtype(self.metadata.dtype).itemsize
        return math.prod(self.shapes[name][self._time_axes :]) * size

    def _count(self, blocks: Mapping[str, Array]) -> int:
        """How many units the blocks add, after checking shapes, values and room."""
        first = blocks[next(name for name in self.shapes if name != "mask")]
        count = len(first)
        frames = first.shape[1] if self._time_axes and first.ndim > 1 else 1
        for name, block in blocks.items():
            rows = (frames if self._rows(name) == self._frames else 1,) if self._time_axes else ()
            expected = (count, *rows, *self.shapes[name][self._time_axes :])
            if block.shape != expected:
                raise ValueError(f"{name} to append has shape {block.shape}, expected {expected}, channels first")
            if name != "mask":
                numbers = range(self.finished, self.finished + count)
                check_finite(block, f"{name} for {self.path.name}", numbers, self.metadata.missing is not None)
        whole = frames == self._frames and not self.finished_frames
        if not whole and (count != 1 or frames > self._frames - self.finished_frames):
            raise ValueError(
                f"{frames} frames of {count} trajectories cannot follow {self.finished_frames} of {self._frames}: "
                "append whole trajectories, or the next frames of one"
            )
        if self.finished + count > self.samples:
            raise ValueError(f"{self.path} was announced with {self.samples} samples: more than that were appended")
        return count * frames

    def _announcement(self) -> dict[str, str]:
        """What the file was begun for, as text: a resumed run must announce the same."""
        mask = b"" if self._mask is None else self._mask.tobytes()
        return {
            **{name: str(value) for name, value in self.metadata.to_attributes().items()},
            **{f"shape of {name}": str(shape) for name, shape in self.shapes.items()},
            "samples": str(self.samples),
            "times": hashlib.sha256(repr(self.metadata.times).encode()).hexdigest(),
            "mask": hashlib.sha256(mask).hexdigest(),
        }

    def _create(self, path: Path, samples: int) -> dict[str, int]:
        """Write the whole HDF5 structure, with room for the numbers; return where in the file each dataset lies."""
        room = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        room.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        room.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(path, "w") as file:
            file.attrs["format"] = FORMAT
            file.attrs["announced"] = json.dumps(self._announcement())
            file.attrs.update(self.metadata.to_attributes())
            for name, shape in self.shapes.items():
                dtype = np.dtype("u1") if name == "mask" else np.dtype(self.metadata.dtype).newbyteorder("<")
                file.create_dataset(name, shape=(samples, *shape), dtype=dtype, dcpl=room.copy())
            if self._mask is not None:
                file["mask"] = self._mask
            if self._time_axes:
                file["time"] = np.array(self.metadata.times)
                with contextlib.suppress(ValueError):  # frames at unequal times have no dt
                    file.attrs["dt"] = self.metadata.dt
            file["names"] = np.zeros(samples, dtype=f"S{NAME_BYTES}")
            file["finished"] = np.zeros(samples * self._frames, dtype=np.uint8)
            places = self._find(file)
        with open(path, "rb") as written:
            os.fsync(written.fileno())
        return places

    def _find(self, file: h5py.File) -> dict[str, int]:
        return {name: file[name].id.get_offset() for name in (*self.shapes, "names", "finished")}

    def _resume(self) -> dict[str, int]:
        """Where the datasets of the partial file lie, if it was begun for the same fields."""
        with open_hdf5(self._partial) as file:
            begun, now = json.loads(file.attrs.get("announced", "{}")), self._announcement()
            different = [key for key in {**begun, **now} if begun.get(key) != now.get(key)]
            if different:
                raise ValueError(
                    f"{self._partial} was begun with other settings ({', '.join(different)}): continue with the same, "
                    "or delete it to start anew"
                )
            return self._find(file)

    def _copy_finished(self, path: Path) -> None:
        """A shorter file with the finished samples, which lie at the front of every dataset."""
        places = self._create(path, self.finished)
        lengths = {name: self.finished * self._rows(name) * self._row_bytes(name) for name in self.shapes}
        lengths |= {"names": self.finished * NAME_BYTES, "finished": self.finished * self._frames}
        with open(path, "r+b") as copy:
            for name, length in lengths.items():
                copy.seek(places[name])
                for start in range(0, length, COPY_BYTES):
                    copy.write(self._read(name, min(COPY_BYTES, length - start), start))
            copy.flush()
            os.fsync(copy.fileno())

    def _read(self, name: str, count: int, start: int = 0) -> bytes:
        self._file.seek(self._places[name] + start)
        return self._file.read(count)

    def _write(self, name: str, start: int, values: Array) -> None:
        remaining = np.ascontiguousarray(values).data.cast("B")
        self._file.seek(self._places[name] + start)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]

    def _lock(self) -> None:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.close()
                raise BlockingIOError(f"another process is writing {self._partial}: wait for it, or end it") from error
            except OSError:
                pass  # some network file systems have no locks; the file is safe all the same with one writer

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what to do when the disk is full."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            remedy = "free some and run again, it continues after the finished samples"
            raise OSError(error.errno, f"no space left to write {self.path}: {remedy}") from error


def open_hdf5(path: Path) -> h5py.File:
    """The file, open for reading, or an OSError that says what is wrong with it."""
    try:
        return h5py.File(path, "r")
    except BlockingIOError as error:
        raise BlockingIOError(f"another process is writing {path}: wait for it, or end it") from error
    except OSError as error:
        raise OSError(f"{path} is no readable HDF5 file: damaged, truncated or of another kind ({error})") from error


def as_mask(mask: Array | torch.Tensor) -> Array:
    """A mask as bytes, 1 where the mask is not zero."""
    values = mask.detach().cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask)
    return (values != 0).astype(np.uint8)


def as_numbers(values: Array | torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Real numbers of any kind, on any device, as a NumPy array of this dtype."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float32 if values.dtype == torch.bfloat16 else values.dtype).numpy()
    values = np.asarray(values)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"fields are real numbers, not {values.dtype}: give real and imaginary parts as channels")
    return values.astype(dtype, copy=False)


def _encoded(names: Sequence[str], count: int) -> Array:
    encoded = [name.encode() for name in names]
    if len(names) != count or any(len(name) > NAME_BYTES for name in encoded):
        raise ValueError(
            f"append takes one name of at most {NAME_BYTES} bytes for each of {count} samples: got {names}"
        )
    return np.array(encoded, dtype=f"S{NAME_BYTES}")


def _leading_ones(values: Array, ndim: int) -> Array:
    return values.reshape((1,) * (ndim - values.ndim) + values.shape)
