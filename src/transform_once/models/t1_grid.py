"""T1 on the grid of its kept modes: one transform, a network on the small field that holds them, one transform back."""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from transform_once.models.fno import FNO
from transform_once.models.operator import INITS, SpectralOperator, check_choice
from transform_once.spectral.modes import ModeSet

# Wave numbers of an axis in a layer of the body, by number of axes: more cost weights and bring little.
MOST_WAVES = {1: 64, 2: 16, 3: 8}
MULTIPLE = 4  # points of an axis are a multiple of this: tensor cores are slow on odd sizes


class T1Grid(SpectralOperator):
    """Transform, an FNO with gated layers on the values that the kept modes take on few points, transform back.

    A block of m modes and a field on m points of an axis are two sides of one thing, an m×m product apart. (Up to three
    points more make a size that is a multiple of four.) T1 takes its activation on the coefficients, this model on the
    values, where products of fields are local. Its cost does not depend on the resolution either, and training runs on
    kept modes alone.

    Args:
        in_channels: Channels of the input fields.
        out_channels: Channels of the output fields.
        resolution: Grid it is trained on; any other works at call time.
        modes: Kept modes, an int or one per axis; the small grid has as many points, or up to three more.
        width: Channels inside. Good values: 24 to 64 in two dimensions.
        depth: Layers. Good values: 4 to 8.
        waves: Wave numbers on both sides that a layer acts on, an int or one per axis; None: half of the points, up
            to 64, 16 or 8 in one, two and three dimensions.
        transform: "dct" (fields on cells) or "fourier" (periodic fields on nodes).
        init: Of the body: "kaiming", "xavier", or "vp" on all layers, since each truncates.
        activation: Of the body: "gate", which multiplies channels, or "gelu", as in an FNO.
        out_resolution: Grid of the output where it is not the input's.
        body: Any module from (batch, in_channels, *points) to (batch, out_channels, *points), instead of the FNO.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        modes: int | Sequence[int],
        width: int = 32,
        depth: int = 4,
        *,
        waves: int | Sequence[int] | None = None,
        transform: str = "dct",
        init: Literal["vp", "xavier", "kaiming"] = "kaiming",
        activation: Literal["gelu", "gate"] = "gate",
        out_resolution: Sequence[int] | None = None,
        body: nn.Module | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, resolution, modes, transform, out_resolution)
        check_choice(init, INITS, "init")
        if self.transform.is_complex or isinstance(modes, ModeSet):
            raise ValueError(
                "T1Grid works on a block of real modes: use dct or fourier, and modes as ints, not a ModeSet"
            )
        self.points = tuple(-(-m // MULTIPLE) * MULTIPLE for m in self.block)
        if body is None:
            if min(self.block) < 2:
                raise ValueError(f"T1Grid needs at least two modes on every axis; got the block {self.block}")
            waves = tuple(min(MOST_WAVES[self.ndim], n // 2) for n in self.points) if waves is None else waves
            body = FNO(in_channels, out_channels, self.points, waves, width, depth, init=init, activation=activation)
        self.body = body

    def kspace(self, X: Tensor) -> Tensor:
        """Kept modes (batch, in_channels, *block) to kept modes (batch, out_channels, *block)."""
        self._check_modes(X)
        points = math.prod(self.points)
        x = self.transform.inverse(X, self.ndim, self.points) * math.sqrt(points / math.prod(self.resolution))
        y: Tensor = self.body(x)
        expected = (X.shape[0], self.out_channels, *self.points)
        if tuple(y.shape) != expected:
            raise ValueError(f"the body must return fields of shape {expected}; it returned {tuple(y.shape)}")
        Y = self.transform.forward(y.to(X.dtype), self.ndim, self.block)
        return Y * math.sqrt(math.prod(self.out_resolution) / points)
