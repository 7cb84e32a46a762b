"""What a file or folder offers, and how what the options choose from it becomes `Fields`.

A reader of a format describes its arrays with one letter per axis: n samples, t time, c channels (may repeat), and x,
y, z the first, second and third grid axis of the result. Everything else, keys, times, channels, strides, is common.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transform_once.data.arrays import Arranged, Array, Index, LazyArray, Stacked, View, identity
from transform_once.data.fields import Fields
from transform_once.data.metadata import Metadata
from transform_once.data.options import ReadOptions

MANY_CHANNELS, FEW_CHANNELS = 16, 8  # more are rare, fewer are likely


@dataclass
class Catalogue:
    """The arrays of a source: `open` gives one by its key, `axes` its letters, or None where the role decides them."""

    path: Path
    keys: Sequence[str]
    open: Callable[[str], LazyArray]
    axes: Callable[[str, tuple[int, ...]], str | None] = lambda key, shape: None
    input: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    trajectory: tuple[str, ...] = ()
    times: Array | None = None
    channels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    names: Sequence[str] = ()
    grid: str = "cell"
    periodic: bool | Sequence[bool] = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def assemble(catalogue: Catalogue, options: ReadOptions) -> Fields:
    """The fields that the options choose from a catalogue; nothing but headers is read."""
    roles = _roles(catalogue, options)
    chosen = {role: [_Variable(catalogue, options, role, key) for key in keys] for role, keys in roles.items()}
    variables = [variable for found in chosen.values() for variable in found]
    if options.axes and not any(variable.named for variable in variables):
        found = "; ".join(variable.described for variable in variables)
        raise ValueError(f"axes {options.axes!r} fits no array ({found}): give one letter for each axis of an array")
    sizes = _sizes(variables)
    letters = "".join(letter for letter in "xyz" if letter in sizes)
    if not letters or "xyz"[: len(letters)] != letters:
        raise ValueError(
            f"{catalogue.path} has no grid axes x, y, z in {[v.described for v in variables]}: name its axes with axes"
        )
    if options.resize is not None and len(letters) != 2:
        raise ValueError(f"resize is for fields of two dimensions, those of {catalogue.path} have {len(letters)}")
    arrays: dict[str, Any] = {}
    for role, variables in chosen.items():
        time = "t" if role == "trajectory" or any("t" in v.axes for v in variables) else ""
        shared = role == "mask" and not any("n" in v.axes for v in variables)
        order = f"n{time}c{letters}"
        parts = [v.arranged(order, {**sizes, "n": 1} if shared else sizes) for v in variables]
        array = parts[0] if len(parts) == 1 else Stacked(tuple(parts), order.index("c"))
        if options.resize is not None:
            array = Resized(array, tuple(options.resize), options.dtype, None if role == "mask" else options.missing)
        arrays[role] = array
    names = {role: [n for v in variables for n in v.names] for role, variables in chosen.items() if role != "mask"}
    known: dict[str, Any] = {
        "grid": options.grid or catalogue.grid,
        "periodic": catalogue.periodic if options.periodic is None else options.periodic,
        "channels": {role: n for role, n in names.items() if all(n)},
        "units": options.units or {},
        "source": str(catalogue.path),
        "settings": {**catalogue.settings, **({"read": options.given()} if options.given() else {})},
        "missing": options.missing,
        "dtype": options.dtype,
    }
    if "trajectory" in roles and catalogue.times is not None:
        known["times"] = tuple(catalogue.times.tolist())
    sample_names = catalogue.names if len(catalogue.names) == sizes.get("n") else ()
    return selected(Fields(**arrays, names=sample_names, metadata=Metadata(), **known), options)


def _roles(catalogue: Catalogue, options: ReadOptions) -> dict[str, tuple[str, ...]]:
    """Which keys are input, target, trajectory and mask."""
    films = _keys(options.trajectory_key) or catalogue.trajectory
    times = (options.input_time, options.target_time)
    keys = (options.input_key, options.target_key) if options.trajectory_key is None else ()
    if films and all(choice is None for choice in (*keys, *times)):
        roles = {"trajectory": films}
    else:
        first = films if options.input_time is not None else ()
        last = films if options.target_time is not None else ()
        roles = {
            "input": _keys(options.input_key) or first or catalogue.input,
            "target": _keys(options.target_key) or catalogue.target or last,
        }
    if not roles.get("trajectory", roles.get("input")):
        raise ValueError(
            f"{catalogue.path} has no input or trajectory of its own: choose input_key and target_key (or input_time "
            f"and target_time), or trajectory_key, from {', '.join(catalogue.keys)}"
        )
    roles["mask"] = _keys(options.mask_key)
    roles = {role: keys for role, keys in roles.items() if keys}
    absent = [key for keys in roles.values() for key in keys if key not in catalogue.keys]
    if absent:
        raise ValueError(f"{catalogue.path} has no {', '.join(absent)}: it has {', '.join(catalogue.keys)}")
    return roles


def _keys(keys: str | Sequence[str] | None) -> tuple[str, ...]:
    if keys is None:
        return ()
    return tuple(keys.split(",")) if isinstance(keys, str) else tuple(keys)


class _Variable:
    """One array in one role, with its axes named and, for pairs, its frame chosen."""

    def __init__(self, catalogue: Catalogue, options: ReadOptions, role: str, key: str) -> None:
        self.array: LazyArray = catalogue.open(key)
        shape = tuple(self.array.shape)
        given = [axes.strip() for axes in (options.axes or "").split(",") if len(axes.strip()) == len(shape)]
        self.named, time = bool(given), {"input": options.input_time, "target": options.target_time}.get(role)
        in_time = role == "trajectory" or time is not None
        self.axes = given[0] if given else catalogue.axes(key, shape) or _usual_axes(in_time, shape)
        self.described = f"{key} {shape} read as {self.axes}"
        unknown = set(self.axes) - set("ntcxyz")
        if len(self.axes) != len(shape) or unknown or any(self.axes.count(letter) > 1 for letter in "ntxyz"):
            raise ValueError(
                f"{key} of {catalogue.path} has the shape {shape}, which is not {self.axes}: name its axes with axes, "
                'n t c x y z for samples, time, channels and grid, such as axes="nxyt"'
            )
        if not given and catalogue.axes(key, shape) is None:
            _suspect_channels(key, shape, self.axes)
        count = int(np.prod([n for n, letter in zip(shape, self.axes, strict=True) if letter == "c"]))
        names = tuple(catalogue.channels.get(key, ()))
        if not names and key not in ("input", "target", "trajectory", "array"):
            names = (key,) if count == 1 else tuple(f"{key}_{i}" for i in range(count))
        self.names = names or ("",) * count
        self.channels = count
        if role in ("input", "target") and "t" in self.axes:
            self._pick_frame(catalogue, key, time)

    def _pick_frame(self, catalogue: Catalogue, key: str, time: float | None) -> None:
        axis = self.axes.index("t")
        frames = self.array.shape[axis]
        times = np.arange(frames) if catalogue.times is None else catalogue.times
        if time is None and frames > 1:
            span = f"{frames} frames from {times[0]:g} to {times[-1]:g}"
            raise ValueError(f"{key} has {span}: choose input_time and target_time for pairs, or read it as trajectory")
        frame = 0 if time is None else frame_at(times, time)
        self.array = View(self.array).select(axis, frame)
        self.axes = self.axes.replace("t", "")

    def arranged(self, order: str, sizes: Mapping[str, int]) -> LazyArray:
        wanted = tuple(self.channels if letter == "c" else sizes[letter] for letter in order)
        return self.array if self.axes == order else Arranged(self.array, self.axes, order, wanted)


def _usual_axes(in_time: bool, shape: tuple[int, ...]) -> str:
    leading = "ntc" if in_time else "nc"
    return leading + "xyz"[: max(0, len(shape) - len(leading))]


def _suspect_channels(key: str, shape: tuple[int, ...], axes: str) -> None:
    """Complain where an axis of the grid is likely to have been taken for the channels."""
    leading, channels, grid = axes[: axes.index("c")], shape[axes.index("c")], shape[axes.index("c") + 1 :]
    if channels < MANY_CHANNELS or not grid:
        return
    if len(grid) == 1:
        doubt = f'a line of {grid[0]} points: if it is a field of two dimensions say axes="{leading}xy"'
    elif grid[-1] <= FEW_CHANNELS and grid[-1] < grid[-2]:
        doubt = f'a grid ending in {grid[-1]}: if its channels come last say axes="{leading}{"xyz"[: len(grid)]}c"'
    else:
        return
    raise ValueError(f'{key} with the shape {shape} would have {channels} channels on {doubt}, otherwise axes="{axes}"')


def _sizes(variables: Sequence[_Variable]) -> dict[str, int]:
    sizes: dict[str, int] = {"n": 1}
    for variable in variables:
        for letter, n in zip(variable.axes, variable.array.shape, strict=True):
            if letter != "c" and sizes.get(letter, 1) not in (1, n) and n != 1:
                described = "; ".join(v.described for v in variables)
                remedy = "give both the same samples" if letter == "n" else "bring them to one grid and the same times"
                raise ValueError(f"the arrays do not fit together along {letter}: {described}: {remedy} first")
            if letter != "c":
                sizes[letter] = max(n, sizes.get(letter, 1))
    return sizes


def selected(fields_: Fields, options: ReadOptions) -> Fields:
    """Channels, times and strides, chosen after the arrays are in order."""
    wanted = {"input": options.input_channels, "target": options.target_channels}
    by_array = {role: wanted.get(role) or options.channels for role in fields_.shapes}
    channels = {role: chosen for role, chosen in by_array.items() if chosen is not None}
    if channels:
        fields_ = fields_.select(channels=channels)
    if options.times is not None:
        if fields_.kind != "trajectories":
            raise ValueError("times keeps frames of trajectories, and these are pairs: leave times out")
        times = np.array(fields_.metadata.times)
        first, last = (frame_at(times, time) for time in options.times)
        fields_ = fields_.select(frames=slice(first, last + 1))
    if options.frame_stride != 1:
        fields_ = fields_.select(frames=slice(None, None, options.frame_stride))
    return fields_.select(stride=options.stride)


def frame_at(times: Array, time: float) -> int:
    """The number of the frame at this time, to a thousandth of the smallest step."""
    nearest = int(np.argmin(np.abs(times - time)))
    step = float(np.diff(times).min()) if len(times) > 1 else 1.0
    if abs(times[nearest] - time) > 1e-3 * step:
        raise ValueError(f"no frame at time {time:g}: there are {len(times)} from {times[0]:g} to {times[-1]:g}")
    return nearest


def grid_kind(coordinates: Array) -> str:
    """ "cell" where the first coordinate lies half a step off a multiple of the step, else "node"."""
    if len(coordinates) < 2:
        return "cell"
    step = float(coordinates[1] - coordinates[0])
    offset = (float(coordinates[0]) / step) % 1.0 if step else 0.0
    return "cell" if abs(offset - 0.5) < 0.05 else "node"


@dataclass
class Resized:
    """A 2-D array of fields resized to other rows and columns: bilinear between cell centres, antialiased.

    A new point that a missing one takes part in is missing too, marked by the same value.
    """

    base: LazyArray
    grid: tuple[int, ...]
    dtype: str
    missing: float | None

    def __post_init__(self) -> None:
        if len(self.grid) != 2:
            raise ValueError(f"resize takes rows and columns, not {self.grid}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The new shape."""
        return (*self.base.shape[:-2], *self.grid)

    def __getitem__(self, index: Index) -> Array:
        values = self.base[(*index[:-2], slice(None), slice(None))].astype(self.dtype)
        if self.missing is None:
            return self._resized(values)[..., index[-2], index[-1]]
        absent = np.isnan(values) if np.isnan(self.missing) else values == values.dtype.type(self.missing)
        resized = self._resized(np.where(absent, values.dtype.type(0), values))
        resized[self._resized(absent.astype(self.dtype)) > 0] = self.missing
        return resized[..., index[-2], index[-1]]

    def _resized(self, values: Array) -> Array:
        images = torch.from_numpy(np.ascontiguousarray(values)).reshape(-1, 1, *values.shape[-2:])
        resized = torch.nn.functional.interpolate(images, self.grid, mode="bilinear", antialias=True)
        shaped: Array = resized.reshape(*values.shape[:-2], *self.grid).numpy()
        return shaped

    def identity(self) -> str:
        """The array and its new size."""
        return f"{identity(self.base)} {self.grid}"
