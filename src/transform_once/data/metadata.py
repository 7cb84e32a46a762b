"""What is known about fields besides their numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

Attributes = dict[str, str | int | float]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Metadata:
    """The facts kept beside the arrays of a `Fields`, in memory and as attributes of its HDF5 file.

    grid        "cell": samples at cell centres (i+½)/N, what the DCT sees; "node": at i/N, what the Fourier bases see.
    periodic    whether each grid axis is periodic; declared by keyword, one bool may stand for all axes.
    channels    the names of the channels by array, `{"input": (…), "target": (…)}` or `{"trajectory": (…)}`; declared
                by keyword, one sequence of names may stand for every array.
    units       unit by channel name, such as `{"pressure": "Pa"}`.
    times       the time of every frame of a trajectory.
    source      where the numbers come from.
    seed        the seed that drew them.
    settings    what the solver or the import was told.
    symmetries  maps that take solutions to solutions, as JSON objects.
    missing     the value that marks missing points, often nan; None: nothing is missing, and NaN is an error.
    dtype       "float32" or "float64": the precision in which the fields are stored and given.
    """

    grid: str = "cell"
    periodic: tuple[bool, ...] = ()
    channels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    times: tuple[float, ...] = ()
    source: str = ""
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    symmetries: Sequence[Mapping[str, Any]] = ()
    missing: float | None = None
    dtype: str = "float32"

    def completed(self, shapes: Shapes) -> "Metadata":
        """The same with every default filled in for arrays of these shapes per sample, checked against them.

        `shapes` holds (c, *grid) for "input" and "target", (t, c, *grid) for "trajectory".
        """
        if self.grid not in ("cell", "node"):
            raise ValueError(f'the grid is "cell" (samples at cell centres) or "node" (at i/N), not {self.grid!r}')
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f'fields are kept as "float32" or "float64", not {self.dtype!r}')
        _check_shapes(shapes)
        axes = _grid_axes(shapes)
        periodic = tuple(bool(p) for p in self.periodic) or (False,) * axes
        if len(periodic) != axes:
            raise ValueError(f"periodic has {len(periodic)} entries for {axes} grid axes: give one per axis")
        times = tuple(float(t) for t in self.times)
        if "trajectory" in shapes:
            frames = shapes["trajectory"][0]
            times = times or tuple(float(i) for i in range(frames))
            if len(times) != frames:
                raise ValueError(f"times has {len(times)} entries for {frames} frames: give one per frame")
        channels = {name: self._names(name, shape[-axes - 1]) for name, shape in shapes.items()}
        return replace(self, periodic=periodic, channels=channels, times=times)

    def _names(self, array: str, count: int) -> tuple[str, ...]:
        names = tuple(self.channels.get(array, ())) or tuple(f"channel_{i}" for i in range(count))
        if len(names) != count:
            raise ValueError(f"{array} has {count} channels but {len(names)} names {names}: give one name per channel")
        return names

    @property
    def dt(self) -> float:
        """The time between frames; a ValueError where they are not equally spaced or there is only one."""
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        if not steps:
            raise ValueError("dt needs a trajectory of at least two frames")
        if any(not math.isclose(step, steps[0], rel_tol=1e-3) for step in steps):
            raise ValueError("the frames are not equally spaced in time, so there is no dt: use metadata.times")
        return (self.times[-1] - self.times[0]) / len(steps)

    def to_attributes(self) -> Attributes:
        """Plain values for the attributes of a file: text and numbers as they are, what is nested as JSON, no None."""
        attributes: Attributes = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "times" or value is None:
                continue  # times are a dataset of their own
            try:
                attributes[item.name] = value if isinstance(value, str | int | float) else json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{item.name} must be plain numbers, texts, lists and dicts: {error}") from error
        return attributes

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any], times: Sequence[float] = ()) -> "Metadata":
        """The inverse of `to_attributes`; attributes of other names are left alone."""
        values: dict[str, Any] = {"times": tuple(float(t) for t in times)}
        for item in fields(cls):
            value = attributes.get(item.name)
            if isinstance(value, str) and item.name not in ("grid", "source", "dtype"):
                value = json.loads(value)
            if value is not None:
                values[item.name] = value.item() if hasattr(value, "item") else value
        return cls(**values)


def _grid_axes(shapes: Shapes) -> int:
    return max(map(len, shapes.values()), default=1) - 1 - ("trajectory" in shapes)


def _check_shapes(shapes: Shapes) -> None:
    names = set(shapes)
    if names not in ({"input"}, {"input", "target"}, {"trajectory"}):
        given = " and ".join(sorted(names)) or "nothing"
        raise ValueError(f"fields are a trajectory, or an input with or without a target, not {given}")
    for name, shape in shapes.items():
        leading = 2 if name == "trajectory" else 1
        layout = "(n, t, c, *grid)" if leading == 2 else "(n, c, *grid)"
        if not leading < len(shape) <= leading + 3:
            raise ValueError(f"{name} has {len(shape) + 1} axes, expected {layout} with one to three grid axes")
        if 0 in shape:
            raise ValueError(f"{name} has an empty axis: its shape is (n, *{shape}), expected {layout}")
    if "target" in names and shapes["input"][1:] != shapes["target"][1:]:
        raise ValueError(
            f"input and target lie on different grids, {shapes['input'][1:]} and {shapes['target'][1:]}: both must be "
            "(n, c, *grid), channels first, on one grid"
        )


def chosen_factors(
    symmetry: Mapping[str, Any], channels: Mapping[str, Sequence[str]], kept: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """A declared symmetry with the factors of the kept channels, numbers by array; a single factor serves all."""
    factors = symmetry.get("factors") or [1.0]
    chosen = {**symmetry, "factors": factors, "input_factors": symmetry.get("input_factors") or factors}
    for name, pair in (("factors", "target"), ("input_factors", "input")):
        array = "trajectory" if "trajectory" in channels else pair
        if array in kept and len(chosen[name]) == len(channels[array]):
            chosen[name] = [chosen[name][i] for i in kept[array]]
    return chosen


def declare(metadata: Metadata | None, declared: Mapping[str, Any], shapes: Shapes) -> Metadata:
    """Completed metadata from a `Metadata`, or the default, with entries declared by keyword; also `dt`."""
    entries = dict(declared)
    known = [item.name for item in fields(Metadata)]
    unknown = [name for name in entries if name not in (*known, "dt")]
    if unknown:
        raise TypeError(f"unknown metadata {', '.join(unknown)}: known are {', '.join(known)} and dt")
    if "dt" in entries:
        dt = float(entries.pop("dt"))
        if "trajectory" not in shapes:
            raise TypeError("dt is the time between the frames of a trajectory; pairs have none")
        entries["times"] = tuple(i * dt for i in range(shapes["trajectory"][0]))
    if isinstance(entries.get("periodic"), bool):
        entries["periodic"] = (entries["periodic"],) * _grid_axes(shapes)
    if "channels" in entries and not isinstance(entries["channels"], Mapping):
        entries["channels"] = {name: tuple(entries["channels"]) for name in shapes}
    return replace(metadata or Metadata(), **entries).completed(shapes)
