"""The fields that figures of the paper show: of a file the user gives, or made by the solvers here."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.reports.paper_table import Array

VELOCITY = ("velocity_x", "velocity_y")


@dataclass(frozen=True, eq=False)
class Shown:
    """Some samples or frames of one array: `values` (n, c, *grid) in float64, with names and units of the channels."""

    source: str
    values: Tensor
    channels: tuple[str, ...]
    units: tuple[str, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Points along each axis."""
        return tuple(self.values.shape[2:])

    @property
    def upright(self) -> bool:
        """Whether pictures must be turned: solvers of flows store [x, y], to be seen with x to the right and y up."""
        return len(self.grid) == 2 and bool({*VELOCITY, "pressure"} & set(self.channels))

    def label(self, channel: int) -> str:
        """A channel with its unit."""
        unit = self.units[channel]
        return self.channels[channel] + (f" in {unit}" if unit else "")


def read_fields(path: Path, options: dict[str, Any]) -> Fields:
    """The fields of a file or folder, in any format that `t1 import` reads."""
    from transform_once.data.formats import read

    given = {name: value for name, value in options.items() if value is not None}
    for key in ("input_key", "target_key", "trajectory_key"):
        if key in given:
            given[key] = given[key].split(",")
    return read(path, **given)


def smoke_fields(device: torch.device, resolution: tuple[int, int] = (256, 144)) -> Fields:
    """Eight frames of one plume of the embedded solver."""
    from transform_once.solvers.smoke import SmokeSettings, simulate

    settings = SmokeSettings(resolution=resolution, frame_interval=0.35)
    frames, _ = simulate(8, settings=settings, device=device)
    return Fields(trajectory=frames, channels=("density",), source="smoke of the embedded solver")


def navier_stokes_fields(
    device: torch.device, samples: int = 16, resolution: int = 64, viscosity: float = 1e-4, time: float = 15.0
) -> Fields:
    """Pairs of vorticity, by default the paper's of low viscosity."""
    from transform_once.solvers.navier_stokes import generate

    first, later, _ = generate(samples, viscosity, time, resolution, device=device)
    source = f"Navier-Stokes of the embedded solver, viscosity {viscosity:g}, time {time:g}"
    pairs: dict[str, Any] = {"input": first.cpu(), "target": later.cpu(), "channels": ("vorticity",)}
    return Fields(**pairs, grid="node", periodic=True, units={"vorticity": "1/s"}, source=source)


def shown(fields: Fields, array: str | None = None, samples: int | Sequence[int] = 16) -> Shown:
    """Some samples of an array, by default the one that is predicted; frames of trajectories count as samples.

    `samples` is how many, evenly spread, or which.
    """
    array = array or list(fields.shapes)[-1]
    frames = fields.frames if array == "trajectory" else 1
    count = len(fields) * frames
    if prod(fields.resolution) == 1:
        raise ValueError("these fields have a single grid point, so a single mode: there is no spectrum to show")
    spread = np.linspace(0, count - 1, min(max(1, samples), count)) if isinstance(samples, int) else np.array(samples)
    numbers: list[int] = np.unique(spread.round().astype(int)).tolist()
    if not all(0 <= number < count for number in numbers):
        raise ValueError(f"there are {count} samples or frames to show, numbered from 0; asked for {numbers}")
    parts = []
    for number in numbers:
        one = fields[[number // frames]]
        one = one.select(frames=[number % frames]) if array == "trajectory" else one
        parts.append(getattr(one.load(), array).reshape(-1, *fields.shapes[array][-fields.ndim - 1 :]).double())
    names = tuple(fields.metadata.channels[array])
    units = tuple(fields.metadata.units.get(name, "") for name in names)
    source = fields.metadata.source
    return Shown(Path(source).name if "/" in source else source, torch.cat(parts), names, units)


def picture(values: Array, upright: bool = False) -> Array:
    """A field (rows, columns), or the middle plane of three axes, as it is drawn."""
    if values.ndim == 1:
        raise ValueError("this figure shows pictures, and these fields have one axis: give fields of two or three axes")
    if values.ndim == 3:
        return values[len(values) // 2]
    return values.T[::-1] if upright else values


def varying(values: Tensor) -> Tensor:
    """Fields (n, *grid) less their means, without those that are constant; a ValueError where all of them are."""
    axes = tuple(range(1, values.ndim))
    scale = values.abs().amax(axes)
    centred = values - values.mean(axes, keepdim=True)
    moving = centred.abs().amax(axes) > 1e-12 * scale
    if not moving.any():
        raise ValueError("every field is constant, so there is nothing to reconstruct: give fields that vary")
    return centred[moving]
