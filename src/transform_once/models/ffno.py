"""The factorised Fourier neural operator, a baseline: a transform along each axis alone, in every layer."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from transform_once.models.fno import HEAD_WIDTH, SpectralConvolution, convolution
from transform_once.models.operator import INITS, Operator, check_choice
from transform_once.spectral.transforms import get_transform


class FFNO(Operator):
    """Affine lift, `depth` × (b = MLP(Σ_axes K_axis x), x ← x + b), head on the last b; weights are not shared.

    Args:
        in_channels: Channels of the input fields.
        out_channels: Channels of the output fields.
        resolution: Grid it is trained on; any other that holds the modes works at call time.
        modes: Wave numbers kept along each axis, an int or one per axis.
        width: Channels inside.
        depth: Layers.
        init: "xavier", "kaiming", or "vp" on all layers (each axis gets its share of the variance).
    """

    # Each layer's output is added. The released research code subtracts it.
    sign = 1

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        modes: int | Sequence[int],
        width: int = 82,
        depth: int = 10,
        *,
        init: Literal["vp", "xavier", "kaiming"] = "xavier",
    ) -> None:
        super().__init__(in_channels, out_channels, resolution)
        check_choice(init, INITS, "init")
        per_axis = (modes,) * self.ndim if isinstance(modes, int) else tuple(modes)
        for n, m in zip(self.resolution, per_axis, strict=True):
            get_transform("dft").block(m, (n,))  # complains about modes that the axis does not have
        conv = convolution(self.ndim)
        self.lift = conv(in_channels, width, 1)
        self.spectral: Sequence[Sequence[SpectralConvolution]] = nn.ModuleList(  # type: ignore[assignment]
            nn.ModuleList(SpectralConvolution(width, m, 1) for m in per_axis) for _ in range(depth)
        )
        self.feed_forward = nn.ModuleList(
            nn.Sequential(conv(width, 2 * width, 1), nn.ReLU(), conv(2 * width, width, 1)) for _ in range(depth)
        )
        self.head = nn.Sequential(conv(width, HEAD_WIDTH, 1), nn.ReLU(), conv(HEAD_WIDTH, out_channels, 1))
        for axes in self.spectral:
            for layer in axes:
                layer.initialize(init)
        if init == "vp":
            self.vp_init_(self.resolution)

    def forward(self, x: Tensor) -> Tensor:
        """Fields (batch, in_channels, *grid) to fields (batch, out_channels, *grid)."""
        self._check(x)
        x = self.lift(self._normalize(x))
        b = x
        for axes, feed_forward in zip(self.spectral, self.feed_forward, strict=True):
            parts = [layer(x.movedim(axis, -1)).movedim(-1, axis) for axis, layer in enumerate(axes, start=2)]
            b = feed_forward(torch.stack(parts).sum(0))
            x = x + self.sign * b
        return self._denormalize(self.head(b))

    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None) -> None:
        """Draw the spectral weights of every layer variance-preserving; the axes share the variance."""
        for axes in self.spectral:
            for n, layer in zip(resolution, axes, strict=True):
                layer.vp_init_((n,), generator, parts=self.ndim)


class ReleasedFFNO(FFNO):
    """The FFNO of the released research code, for the reproduction table only: each layer's output is subtracted."""

    sign = -1
