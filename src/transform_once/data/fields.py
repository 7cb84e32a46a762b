"""`Fields`: the one type for data, pairs or trajectories, in memory or read from files as it is needed."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transform_once.data.arrays import Arranged, Array, HDF5Array, LazyArray, View, check_finite, identity
from transform_once.data.metadata import Metadata, chosen_factors, declare
from transform_once.data.writer import FORMAT, FieldsWriter, as_mask, as_numbers, open_hdf5

Choice = Sequence[str | int]


class Fields:
    """Pairs of fields, or trajectories, with what is known about them.

    ```python
    pairs = Fields(input=x, target=y, grid="node", periodic=True)        # (n, c, *grid) each; the target may be absent
    films = Fields(trajectory=w, dt=0.1, channels=("vorticity",))         # (n, t, c, *grid), oldest frame first
    train, test = pairs.split(1000, 200)
    for block in films[:10].batches(4): block.trajectory                  # tensors (4, t, c, *grid)
    ```

    Arrays are tensors, NumPy arrays or lazy arrays (`data.arrays`); lazy ones are read by slices, only where asked for.
    All entries of `Metadata` can be given by keyword. Indexing, `split`, `select` and `pairs` give `Fields` again and
    read nothing; `input`, `target`, `trajectory` and `mask` read what is left, as CPU tensors.

    mask     nonzero marks points that leave the loss: (n or 1, c or 1, *grid), or with a time axis after the first.
    missing  a value, often nan, that marks missing points: they are masked and hold the mean of the valid points of
             their field, so that what is transformed stays finite. Without it NaN is an error that names the sample.
    """

    def __init__(
        self,
        *,
        input: Tensor | LazyArray | None = None,  # noqa: A002  # the name of the contract
        target: Tensor | LazyArray | None = None,
        trajectory: Tensor | LazyArray | None = None,
        mask: Tensor | LazyArray | None = None,
        names: Sequence[str] = (),
        metadata: Metadata | None = None,
        **declared: Any,
    ) -> None:
        given = {"input": input, "target": target, "trajectory": trajectory}
        arrays = {name: array for name, array in given.items() if array is not None}
        if "dtype" not in declared and metadata is None:
            double = any(str(getattr(array, "dtype", "")).endswith("float64") for array in arrays.values())
            declared["dtype"] = "float64" if double else "float32"
        shapes = {name: tuple(array.shape[1:]) for name, array in arrays.items()}
        self.metadata = declare(metadata, declared, shapes)
        counts = {name: array.shape[0] for name, array in arrays.items()}
        if names:
            counts["names"] = len(names)
        if len(set(counts.values())) > 1:
            raise ValueError(f"the arrays differ in their number of samples: {counts}")
        self._arrays = {name: self._adopt(name, array) for name, array in arrays.items()}
        self._mask = None if mask is None else self._adopt_mask(mask)
        self.names = tuple(names)

    @classmethod
    def open(cls, path: str | Path) -> "Fields":
        """The fields of a finished file written by `save` or `FieldsWriter`, read by slices."""
        path = Path(path)
        with open_hdf5(path) as file:
            if file.attrs.get("format") != FORMAT:
                raise ValueError(f"{path} is not a file of {FORMAT}: it says {file.attrs.get('format', 'nothing')!r}")
            flags = file["finished"][()]
            if not flags.all() or path.suffix == ".partial":
                done = f"{int(flags.sum())} of {flags.size} parts are written"
                raise ValueError(f"{path} is unfinished, {done}: run again what made it, and it continues")
            metadata = Metadata.from_attributes(file.attrs, file["time"][()] if "time" in file else ())
            names = [name.decode() for name in file["names"][()].tolist()]
            keys = [key for key in ("input", "target", "trajectory", "mask") if key in file]
        arrays: dict[str, Any] = {key: HDF5Array(path, key) for key in keys}
        return cls(**arrays, names=names if any(names) else (), metadata=metadata)

    @property
    def kind(self) -> str:
        """Either "pairs" or "trajectories"."""
        return "trajectories" if "trajectory" in self._arrays else "pairs"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array: (n, c, *grid) of input and target, or (n, t, c, *grid) of trajectory."""
        return {name: array.shape for name, array in self._arrays.items()}

    @property
    def ndim(self) -> int:
        """The number of grid axes, 1 to 3."""
        return len(self.metadata.periodic)

    @property
    def resolution(self) -> tuple[int, ...]:
        """The size of every grid axis."""
        return self._first.shape[-self.ndim :]

    @property
    def in_channels(self) -> int:
        """The channels of an input, or of a frame."""
        return self._first.shape[-self.ndim - 1]

    @property
    def out_channels(self) -> int:
        """The channels of a target, or of a frame."""
        return self._arrays[self._judged].shape[-self.ndim - 1]

    @property
    def frames(self) -> int:
        """The frames of each trajectory; 1 for pairs."""
        return self._first.shape[1] if self.kind == "trajectories" else 1

    @property
    def _first(self) -> View:
        return next(iter(self._arrays.values()))

    @property
    def _judged(self) -> str:
        """The array that enters the loss, the one a mask belongs to."""
        return list(self._arrays)[-1]

    def __len__(self) -> int:
        return self._first.shape[0]

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        return f"Fields({arrays}, grid={self.metadata.grid!r}, periodic={self.metadata.periodic})"

    @property
    def input(self) -> Tensor:
        """All inputs, (n, c, *grid)."""
        return self._tensor("input")

    @property
    def target(self) -> Tensor:
        """All targets, (n, c, *grid)."""
        return self._tensor("target")

    @property
    def trajectory(self) -> Tensor:
        """All trajectories, (n, t, c, *grid)."""
        return self._tensor("trajectory")

    @property
    def mask(self) -> Tensor | None:
        """True at points that leave the loss, masked or missing; fits target or trajectory; None: all points count."""
        if self.metadata.missing is not None:
            return self.load().mask
        return None if self._mask is None else torch.from_numpy(self._mask.read() != 0)

    def load(self) -> "Fields":
        """The same fields in memory, missing points filled and joined to the mask."""
        read = {name: self._counted(name) for name in self._arrays}
        arrays: dict[str, Any] = {name: _Checked(values) for name, (values, _) in read.items()}
        mask, metadata = read[self._judged][1], replace(self.metadata, missing=None)
        return Fields(**arrays, mask=mask, names=self.names, metadata=metadata)

    def counted(self, name: str) -> tuple[Tensor, Tensor | None]:
        """One array, and True at its points that do not count: missing, or masked where the loss sees this array."""
        values, mask = self._counted(name)
        return _as_tensor(values), None if mask is None else torch.from_numpy(mask)

    def __getitem__(self, samples: int | slice | Sequence[int] | Sequence[bool] | Array | Tensor) -> "Fields":
        numbers = range(len(self))
        if isinstance(samples, slice):
            kept: slice | list[int] = samples
        else:
            wanted = np.atleast_1d(np.asarray(samples.tolist() if isinstance(samples, Tensor) else samples))
            if wanted.dtype == bool:
                if wanted.shape != (len(self),):
                    raise IndexError(f"there are {len(self)} samples, got {wanted.size} booleans: give one per sample")
                wanted = wanted.nonzero()[0]
            try:
                kept = [numbers[i] for i in wanted.tolist()]
            except IndexError as error:
                raise IndexError(f"there are {len(self)} samples, asked for {samples}") from error
        chosen = numbers[kept] if isinstance(kept, slice) else kept
        return self._narrowed(0, dict.fromkeys(self._arrays, kept), [self.names[i] for i in chosen if self.names])

    def split(self, *counts: int) -> tuple["Fields", ...]:
        """Consecutive parts of these many samples, such as `train, test = fields.split(1000, 200)`."""
        if sum(counts) > len(self) or any(count < 1 for count in counts):
            raise ValueError(f"cannot split {len(self)} samples into parts of {', '.join(map(str, counts))}")
        starts = np.cumsum([0, *counts]).tolist()
        return tuple(self[start:stop] for start, stop in itertools.pairwise(starts))

    def hold_out(self, parts: int, frames: int = 1) -> tuple["Fields", ...]:
        """What is left when a tenth is taken for each of the parts, and the parts; all alone where there is too little.

        A tenth of the samples; of fewer than ten trajectories their last frames, a tenth and at least `frames` of them.
        """
        if len(self) >= 10:
            tenth = len(self) // 10
            return self.split(len(self) - parts * tenth, *[tenth] * parts)
        held = 0 if self.kind == "pairs" else max(frames, self.frames // 10)
        ends = [self.frames - part * held for part in range(parts, -1, -1)]
        if not held or ends[0] < held:
            return (self,)
        return tuple(self.select(frames=slice(*pair)) for pair in itertools.pairwise([0, *ends]))

    def select(
        self,
        *,
        frames: slice | Sequence[int] | None = None,
        channels: Choice | Mapping[str, Choice] | None = None,
        stride: int = 1,
    ) -> "Fields":
        """Some frames (a slice or numbers), some channels (names or numbers, or those by array), every stride-th point.

        A stride s keeps the nodes i·s of a node grid, and of a cell grid the middle of every s cells, exact for odd s.
        """
        fields = self
        if frames is not None:
            if self.kind == "pairs":
                raise ValueError("pairs have no frames to select")
            chosen = frames if isinstance(frames, slice) else list(frames)
            times = np.array(self.metadata.times)[chosen].tolist()
            fields = fields._narrowed(1, {"trajectory": chosen}, times=tuple(times))
        if channels is not None:
            by_array = channels if isinstance(channels, Mapping) else dict.fromkeys(self._arrays, channels)
            numbers = {name: self._channel_numbers(name, wanted) for name, wanted in by_array.items()}
            old = self.metadata.channels
            new = {name: tuple(old[name][i] for i in kept) for name, kept in numbers.items()}
            moved = [chosen_factors(symmetry, old, numbers) for symmetry in self.metadata.symmetries]
            changed: dict[str, Any] = {"symmetries": moved} if moved else {}
            fields = fields._narrowed(-self.ndim - 1, numbers, channels={**old, **new}, **changed)
        if stride != 1:
            for size, periodic in zip(self.resolution, self.metadata.periodic, strict=True):
                if periodic and size % stride:
                    raise ValueError(
                        f"a stride of {stride} does not divide the {size} points of a periodic axis, so the kept ones "
                        "would not be equally spaced around it: choose a divisor, or declare the axis not periodic"
                    )
            first = stride // 2 if self.metadata.grid == "cell" else 0
            for axis in range(-self.ndim, 0):
                fields = fields._narrowed(axis, dict.fromkeys(self._arrays, slice(first, None, stride)))
        return fields

    def pairs(self, input_frame: int = 0, target_frame: int = -1) -> "Fields":
        """Pairs of two frames of every trajectory, by default the first and the last."""
        if self.kind == "pairs":
            raise ValueError("these fields are pairs already")
        view, mask = self._arrays["trajectory"], self._mask
        if mask is not None:
            mask = mask.select(1, target_frame if mask.shape[1] > 1 else 0)
        names = self.metadata.channels["trajectory"]
        metadata = replace(self.metadata, times=(), channels={"input": names, "target": names})
        first, second = view.select(1, input_frame), view.select(1, target_frame)
        return Fields(input=first, target=second, mask=mask, names=self.names, metadata=metadata)

    def batches(self, size: int) -> Iterator["Fields"]:
        """Consecutive samples, `size` at a time, each batch in memory."""
        for start in range(0, len(self), size):
            yield self[start : start + size].load()

    def blocks(self, megabytes: float = 64, start: tuple[int, int] = (0, 0)) -> Iterator[tuple[slice, slice, "Fields"]]:
        """All fields in order, in pieces of bounded size: (samples, frames, fields of those); nothing is read yet.

        A trajectory larger than `megabytes` is cut into runs of frames. `start` is the (sample, frame) to begin with.
        """
        size = np.dtype(self.metadata.dtype).itemsize
        per_frame = sum(size * math.prod(a.shape[1:]) // self.frames for a in self._arrays.values())
        room = max(1, int(megabytes * 2**20 / per_frame))
        sample, frame = start
        while sample < len(self):
            whole = frame == 0 and room >= self.frames
            samples = slice(sample, min(sample + (room // self.frames if whole else 1), len(self)))
            frames = slice(frame, self.frames if whole else min(frame + room, self.frames))
            part = self[samples]
            yield samples, frames, part.select(frames=frames) if self.kind == "trajectories" else part
            sample, frame = (samples.stop, 0) if frames.stop == self.frames else (sample, frames.stop)

    def save(self, path: str | Path) -> "Fields":
        """Stream everything into a file of fields, continuing one that was begun and killed; returns it, opened."""
        missing = None if self.metadata.missing is None else float("nan")
        shapes = {name: shape[1:] for name, shape in self.shapes.items()}
        mask = None
        if self._mask is not None and self._mask.shape[0] == len(self):
            shapes["mask"] = self._mask.shape[1:]
        elif self._mask is not None:
            mask = self._mask.read()[0]
        metadata = replace(self.metadata, missing=missing)
        with FieldsWriter(path, samples=len(self), shapes=shapes, mask=mask, metadata=metadata) as writer:
            for _, _, block in self.blocks(start=(writer.finished, writer.finished_frames)):
                arrays = {name: block._numbers(name) for name in block._arrays}
                if "mask" in shapes and block._mask is not None:
                    arrays["mask"] = block._mask.read()
                writer.append(**arrays, names=block.names or None)
        return Fields.open(path)

    def fingerprint(self) -> str:
        """A hash of metadata and numbers; of numbers in files, their path, size and time of change stand for them."""
        parts = [f"{name} {identity(array)}" for name, array in self._arrays.items()]
        parts += [f"mask {identity(self._mask)}" if self._mask is not None else "", repr(self.metadata)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _adopt(self, name: str, array: Tensor | LazyArray) -> View:
        if isinstance(array, View):
            return array
        if isinstance(array, Tensor | np.ndarray) and not isinstance(array, np.memmap):
            values = as_numbers(array, np.dtype(self.metadata.dtype))
            return _Checked(self._marked(values, name, range(array.shape[0])))
        return View(array)

    def _adopt_mask(self, mask: Tensor | LazyArray) -> View:
        array: LazyArray = as_mask(mask) if isinstance(mask, Tensor | np.ndarray) else mask
        fields = self._arrays[self._judged].shape
        if self.kind == "trajectories" and len(array.shape) == len(fields) - 1:
            letters = "xyz"[: self.ndim]
            array = Arranged(array, f"nc{letters}", f"ntc{letters}", (array.shape[0], 1, *array.shape[1:]))
        free = len(fields) - self.ndim  # the axes that a mask may share: samples, frames, channels
        sizes = zip(array.shape, fields, strict=False)
        fits = all(m == n or (m == 1 and axis < free) for axis, (m, n) in enumerate(sizes))
        if not fits or len(array.shape) != len(fields):
            raise ValueError(
                f"the mask has shape {array.shape}, expected {fields}, where samples, frames and channels may be 1"
            )
        return array if isinstance(array, View) else View(array)

    def _marked(self, values: Array, name: str, samples: Sequence[int]) -> Array:
        """The values, checked to be finite, with NaN at missing points, whatever marked them before."""
        missing = self.metadata.missing
        what = f"{name} from {self.metadata.source}" if self.metadata.source else name
        check_finite(values, what, samples, missing is not None and math.isnan(missing))
        if missing is None or math.isnan(missing):
            return values
        return np.where(values == values.dtype.type(missing), values.dtype.type(np.nan), values)

    def _numbers(self, name: str) -> Array:
        """The numbers of one array, checked, missing ones as NaN."""
        if name not in self._arrays:
            raise ValueError(f"these fields hold {' and '.join(self._arrays)}, no {name}")
        view = self._arrays[name]
        values = view.read().astype(self.metadata.dtype, copy=False)
        if isinstance(view, _Checked):
            return values
        picks = view.picks[0]
        return self._marked(values, name, (picks,) if isinstance(picks, int) else picks)

    def _counted(self, name: str) -> tuple[Array, Array | None]:
        values = self._numbers(name)
        mask = None if self._mask is None or name != self._judged else self._mask.read() != 0
        if self.metadata.missing is not None:
            absent = np.isnan(values)
            mask = absent if mask is None else absent | mask
            values = _filled(values, self.ndim)
        return values, mask

    def _tensor(self, name: str) -> Tensor:
        values = self._numbers(name)
        if self.metadata.missing is not None:
            values = _filled(values, self.ndim)
        return _as_tensor(values)

    def _channel_numbers(self, array: str, wanted: Choice) -> list[int]:
        names = tuple(self.metadata.channels.get(array, ()))
        unknown = [c for c in wanted if (c not in names if isinstance(c, str) else not 0 <= c < len(names))]
        if unknown or not wanted:
            raise ValueError(f"{array} has the channels {', '.join(names)}, not {', '.join(map(str, unknown))}")
        return [names.index(c) if isinstance(c, str) else c for c in wanted]

    def _narrowed(
        self, axis: int, choices: Mapping[str, Any], names: Sequence[str] | None = None, **changed: Any
    ) -> "Fields":
        """The same fields with one axis of some arrays narrowed, and of the mask where it has that axis."""
        arrays: dict[str, Any] = {}
        for name, array in self._arrays.items():
            arrays[name] = array.select(axis, choices[name]) if name in choices else array
        mask, judged = self._mask, self._judged
        if mask is not None and judged in choices and mask.shape[axis] == self._arrays[judged].shape[axis]:
            mask = mask.select(axis, choices[judged])
        names = self.names if names is None else names
        return Fields(**arrays, mask=mask, names=names, metadata=replace(self.metadata, **changed))


class _Checked(View):
    """A view of numbers in memory that were checked when they came in, missing ones NaN."""


def _as_tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _filled(values: Array, ndim: int) -> Array:
    """NaN replaced by the mean of the other points of the same field, or by 0 where there are none."""
    axes = tuple(range(values.ndim - ndim, values.ndim))
    valid = ~np.isnan(values)
    count = valid.sum(axis=axes, keepdims=True)
    mean = np.where(valid, values, 0).sum(axis=axes, keepdims=True, dtype=np.float64) / np.maximum(count, 1)
    return np.where(valid, values, mean).astype(values.dtype)
