"""Normalisation: an affine map per channel, fitted once on the training split and kept with the model."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transform_once.data.fields import Fields

KINDS = ("none", "standard", "unit")


@dataclass(frozen=True, eq=False)
class Normalization:
    """Maps each channel by x ↦ (x − shift)/scale; `invert` maps back.

    `shift` and `scale` are float64 tensors (c, 1, …, 1), one 1 per grid axis, so they fit (n, c, *grid) and
    (n, t, c, *grid) alike. Kinds: "none" leaves the numbers alone, "standard" gives mean 0 and variance 1, "unit" gives
    the range [0, 1]. A channel that never varies keeps its scale.
    """

    kind: str
    shift: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, fields: Fields, array: str, kind: str = "standard") -> "Normalization":
        """Fit to one array, "input", "target" or "trajectory", of the fields, which should be the training split only.

        The fields are streamed in blocks and the sums taken in float64; masked and missing points do not count.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown normalisation {kind!r}: choose one of {', '.join(KINDS)}")
        if array not in fields.shapes:
            raise ValueError(f"these fields hold {' and '.join(fields.shapes)}, no {array}")
        ndim, channels = fields.ndim, fields.shapes[array][-fields.ndim - 1]
        statistics = _Statistics(channels)
        if kind != "none":
            for _, _, block in fields.blocks():
                statistics.add(*block.counted(array), ndim)
        shift, scale = statistics.map(kind)
        return cls(kind, shift.reshape(-1, *[1] * ndim), scale.reshape(-1, *[1] * ndim))

    def without_shift(self) -> "Normalization":
        """The scale alone, the root mean square for "standard": for fields whose zero is a value of its own."""
        return replace(self, shift=torch.zeros_like(self.shift), scale=(self.scale**2 + self.shift**2).sqrt())

    def apply(self, x: Tensor) -> Tensor:
        """From physical units to normalised ones; x is (…, c, *grid)."""
        return (x - self.shift.to(x)) / self.scale.to(x)

    def invert(self, x: Tensor) -> Tensor:
        """From normalised units back to physical ones."""
        return x * self.scale.to(x) + self.shift.to(x)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        shift, scale = self.shift.flatten().tolist(), self.scale.flatten().tolist()
        return {"kind": self.kind, "shift": shift, "scale": scale, "ndim": self.shift.ndim - 1}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Normalization":
        """The inverse of `to_dict`."""
        shape = (-1, *[1] * int(values["ndim"]))
        shift, scale = (torch.tensor(values[name], dtype=torch.float64).reshape(shape) for name in ("shift", "scale"))
        return cls(str(values["kind"]), shift, scale)


class _Statistics:
    """Mean, variance and range per channel, block by block: means are merged, so no large sums cancel."""

    def __init__(self, channels: int) -> None:
        self.count = torch.zeros(channels, dtype=torch.float64)
        self.mean = torch.zeros(channels, dtype=torch.float64)
        self.squares = torch.zeros(channels, dtype=torch.float64)
        self.low = torch.full((channels,), torch.inf, dtype=torch.float64)
        self.high = torch.full((channels,), -torch.inf, dtype=torch.float64)

    def add(self, x: Tensor, mask: Tensor | None, ndim: int) -> None:
        values = x.double().movedim(-ndim - 1, 0).flatten(1)
        keep = torch.ones_like(values, dtype=torch.bool)
        if mask is not None:
            keep = ~mask.expand(x.shape).movedim(-ndim - 1, 0).flatten(1)
        count = keep.sum(1).double()
        mean = (values * keep).sum(1) / count.clamp(min=1)
        squares = ((values - mean[:, None]).square() * keep).sum(1)
        total = (self.count + count).clamp(min=1)
        step = mean - self.mean
        self.squares += squares + step.square() * self.count * count / total
        self.mean += step * count / total
        self.count += count
        self.low = torch.minimum(self.low, values.masked_fill(~keep, torch.inf).amin(1))
        self.high = torch.maximum(self.high, values.masked_fill(~keep, -torch.inf).amax(1))

    def map(self, kind: str) -> tuple[Tensor, Tensor]:
        """The shift and the scale, 1 where a channel does not vary or nothing was seen."""
        if kind == "none":
            return torch.zeros_like(self.mean), torch.ones_like(self.mean)
        if kind == "standard":
            shift, scale = self.mean, (self.squares / self.count.clamp(min=1)).sqrt()
        else:
            shift, scale = self.low, self.high - self.low
        seen = self.count > 0
        rounding = 1e-9 * torch.maximum(
            self.low.abs(), self.high.abs()
        )  # a constant channel varies by as little as this
        return torch.where(seen, shift, 0.0), torch.where(seen & (scale > rounding), scale, 1.0)
