"""The Fourier neural operator, a baseline: two transforms in every layer."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from transform_once import kernels
from transform_once.models.operator import INITS, Operator, check_choice
from transform_once.spectral import transforms
from transform_once.spectral.bases import matrix
from transform_once.spectral.initialization import rfft_variance
from transform_once.spectral.precision import autocast_dtype, in_full
from transform_once.spectral.transforms import get_transform

HEAD_WIDTH = 128
IN_ONE = 1024  # up to so many points of a grid, a GPU is faster with one large product for all axes


class _Map(nn.Module):
    """Makes a convolution of one point a product on a CPU, where that takes half the time."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, *grid) to (batch, out_channels, *grid)."""
        if x.is_cuda:
            y: Tensor = super().forward(x)
            return y
        matrix, bias = (p.reshape(len(p), -1).expand(x.shape[0], -1, -1) for p in self.parameters())
        return torch.baddbmm(bias, matrix, x.flatten(2)).unflatten(2, x.shape[2:])


class Map1d(_Map, nn.Conv1d):
    """A map of the channels at each point of a line."""


class Map2d(_Map, nn.Conv2d):
    """A map of the channels at each point of a plane."""


class Map3d(_Map, nn.Conv3d):
    """A map of the channels at each point of a volume."""


def channel_map(inputs: int, outputs: int, ndim: int) -> Map1d | Map2d | Map3d:
    """An affine map of the channels, the same at each point of fields with that many axes."""
    return (Map1d, Map2d, Map3d)[ndim - 1](inputs, outputs, 1)


def two_maps(inputs: int, hidden: int, outputs: int, ndim: int, between: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """A map of the channels to hidden ones, an activation, and a second map."""
    return nn.Sequential(channel_map(inputs, hidden, ndim), between(), channel_map(hidden, outputs, ndim))


def coordinate_channels(x: Tensor) -> Tensor:
    """One channel per axis with coordinates from 0 to 1, for the fields `x` (batch, channels, *grid)."""
    lines = [torch.linspace(0, 1, n, dtype=x.dtype, device=x.device) for n in x.shape[2:]]
    return torch.stack(torch.meshgrid(*lines, indexing="ij")).expand(x.shape[0], -1, *x.shape[2:])


class SpectralConvolution(nn.Module):
    """A complex channel matrix on each of the lowest wave numbers of the last `ndim` axes: a global convolution.

    Wave numbers −m ≤ k < m on all axes but the last and 0 ≤ k < m there. An axis of 2m − 1 points has no −m, whose
    weights then rest. The weights are pairs of real numbers, so that optimisers and data-parallel training need to know
    nothing of complex ones.
    """

    def __init__(self, width: int, modes: int | Sequence[int], ndim: int, phase_blind: bool = False) -> None:
        super().__init__()
        self.width, self.ndim, self.phase_blind = width, ndim, phase_blind
        self.modes = tuple(modes) if isinstance(modes, Sequence) else (int(modes),) * ndim
        self.block = (*(2 * m for m in self.modes[:-1]), self.modes[-1])
        self.weight = nn.Parameter(torch.empty(math.prod(self.block), width, width, 2))
        self.initialize("xavier")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, ..., *grid) to the same."""
        T, grid = get_transform("dft"), x.shape[-self.ndim :]
        block = self._held(grid)
        entries = max(4 * n * m for n, m in zip(grid, self.block, strict=True))
        if x.ndim == 2 + self.ndim and entries <= transforms.MATRIX_ENTRIES:
            return self._by_matrices(x)
        X = T.forward(x, self.ndim, self.modes).flatten(-self.ndim)
        X = X.movedim(-1, 0).transpose(1, 2)  # (modes, width, batch, ...): one batched product over the modes
        Y = torch.bmm(torch.view_as_complex(self._weight_of(block)), X.flatten(2)).unflatten(2, X.shape[2:])
        if self.phase_blind:
            Y = torch.complex(Y.real, torch.zeros_like(Y.real))
        Y = Y.transpose(1, 2).movedim(0, -1).unflatten(-1, block)
        return T.inverse(Y, self.ndim, grid).to(x.dtype)

    def _held(self, grid: Sequence[int]) -> tuple[int, ...]:
        """The block of wave numbers on a grid of so many points; complains about one that does not have the modes."""
        return get_transform("dft").block(self.modes, grid)

    def _weight_of(self, block: tuple[int, ...]) -> Tensor:
        """The weights of that block, without those of −m on an axis that does not have it."""
        if block == self.block:
            return self.weight
        weight = self.weight.unflatten(0, self.block)
        for axis, (own, held) in enumerate(zip(self.block, block, strict=True)):
            if held < own:
                weight = torch.cat(
                    [weight.narrow(axis, 0, own // 2), weight.narrow(axis, own // 2 + 1, own // 2 - 1)], axis
                )
        return weight.flatten(0, self.ndim - 1)

    def _by_matrices(self, x: Tensor) -> Tensor:
        """The same in real numbers, which every runtime has: (batch, width, *grid), transforms as products.

        They give the modes as (m₁, parts, other modes): the numbers that are summed with the parts of a weight, real
        and imaginary, for both parts of what comes out.
        """
        (batch, width, *_), lower = x.shape, autocast_dtype(x)
        dtype = lower or torch.promote_types(x.dtype, torch.float32)
        in_one = self.ndim == 1 or (lower is not None and x.is_cuda and math.prod(x.shape[2:]) <= IN_ONE)
        with in_full(x):
            X = self._all_at_once(x.to(dtype)) if in_one else self._axis_by_axis(x.to(dtype))
        _, _, m1, parts, others = X.shape
        if self.phase_blind:
            X, parts = X[:, :, :, ::2], 2
        weight = self._weight_of(self._held(x.shape[2:]))
        X = _permuted(X, 2, 4, 1, 3, 0).view(len(weight), 2 * width, -1)
        Y = torch.bmm(weight.flatten(2).to(dtype), X)
        Y = _permuted(Y.view(m1, others, width, parts // 2, batch), 4, 2, 0, 3, 1)
        with in_full(x):
            y = self._back_at_once(Y, x) if in_one else self._back_axis_by_axis(Y, x)
        return y.to(x.dtype)

    def _all_at_once(self, x: Tensor) -> Tensor:
        grid = tuple(x.shape[2:])
        rows = matrix("dft of all axes, quads", grid, self._held(grid), x.dtype, x.device)
        return (x.flatten(2) @ rows.T).unflatten(-1, (1, 4, -1))

    def _back_at_once(self, Y: Tensor, x: Tensor) -> Tensor:
        grid = tuple(x.shape[2:])
        rows = matrix("inverse dft of all axes", grid, self._held(grid), Y.dtype, Y.device)
        Y = Y.flatten(2)
        return (Y @ rows[: Y.shape[-1]]).view(x.shape)

    def _axis_by_axis(self, x: Tensor) -> Tensor:
        grid, block = x.shape[2:], self._held(x.shape[2:])
        X = x @ matrix("dft last, halves", grid[-1], block[-1], x.dtype, x.device).T
        X = X.unflatten(-1, (2, block[-1]))
        for axis in range(self.ndim - 2, -1, -1):
            X = X if axis == self.ndim - 2 else X.movedim(axis + 4, axis + 3)  # the parts come to lie beside the axis
            rows = matrix("dft, pairs" if axis else "dft, quads", grid[axis], block[axis], x.dtype, x.device)
            X = _turned(rows, X, axis + 2, 2 if axis else 4)
        return X.flatten(4)

    def _back_axis_by_axis(self, Y: Tensor, x: Tensor) -> Tensor:
        grid, block = x.shape[2:], self._held(x.shape[2:])
        Y = Y.unflatten(4, block[1:])
        for axis in range(self.ndim - 1):
            rows = matrix("dft, pairs", grid[axis], block[axis], Y.dtype, Y.device).T
            if Y.shape[axis + 3] == 1:  # only real parts came
                rows = rows[:, ::2]
            Y = _turned(rows, Y, axis + 2, 2)
            Y = Y if axis == self.ndim - 2 else Y.movedim(axis + 3, axis + 4)
        return Y.flatten(-2) @ matrix("inverse dft last, halves", grid[-1], block[-1], Y.dtype, Y.device)

    @torch.no_grad()
    def initialize(self, scheme: str) -> None:
        """Draw the weights: E|A|² = 1/c for "xavier", 2/c for "kaiming"."""
        self.weight.normal_(0, math.sqrt((1 if scheme == "kaiming" else 0.5) / self.width))

    @torch.no_grad()
    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None, parts: int = 1) -> None:
        """Draw the weights variance-preserving, as one of `parts` layers whose outputs are summed."""
        variance = rfft_variance(resolution, self._held(resolution), self.width) / parts
        self.weight.normal_(0, math.sqrt(variance), generator=generator)


def _permuted(X: Tensor, *order: int) -> Tensor:
    """`X` with its axes in that order, contiguous."""
    if kernels.can_run(X) and kernels.pays(X.numel()):
        from transform_once.kernels.layout import permuted

        return permuted(X, order)
    return X.permute(order).contiguous()


def _turned(rows: Tensor, X: Tensor, axis: int, parts: int) -> Tensor:
    """The product with an axis and its parts, real and imaginary, which are two neighbouring axes of `X`."""
    shape = X.shape
    X = rows @ X.flatten(axis, axis + 1).flatten(axis + 1)
    return X.unflatten(-1, shape[axis + 2 :]).unflatten(axis, (-1, parts))


class FNOLayer(nn.Module):
    """v ← MLP(GELU(Kv + Wv + b)) + v: the spectral and the pointwise map, then a perceptron on the channels.

    Without the perceptron it overfits a thousand pairs far more (docs/measurements.md).
    """

    def __init__(self, width: int, modes: int | Sequence[int], ndim: int) -> None:
        super().__init__()
        self.spectral = SpectralConvolution(width, modes, ndim)
        self.pointwise = channel_map(width, width, ndim)
        self.perceptron = two_maps(width, width, width, ndim)

    @property
    def pointwise_weights(self) -> list[Tensor]:
        """Weights and biases of the three maps of the channels."""
        return [*self.pointwise.parameters(), *self.perceptron.parameters()]

    def forward(self, v: Tensor) -> Tensor:
        """(batch, width, *grid) to the same."""
        if kernels.can_run(v, self.pointwise.weight):
            from transform_once.kernels import perceptron

            weights = self.pointwise_weights
            if perceptron.fits(v, weights[2], weights[0]):
                return perceptron.fno_pointwise(self.spectral(v), v, weights)
        u = nn.functional.gelu(self.spectral(v) + self.pointwise(v))
        return self.perceptron(u) + v


class FNO(Operator):
    """Lift with coordinates, `depth` layers with a GELU between them, head: a correct FNO as strong as the peers' own.

    Args:
        in_channels: Channels of the input fields.
        out_channels: Channels of the output fields.
        resolution: Grid it is trained on; any other that holds the modes works at call time.
        modes: Wave numbers kept on both sides, an int or one per axis.
        width: Channels inside.
        depth: Layers.
        init: "kaiming", "xavier", or "vp" on all layers, since each truncates.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        modes: int | Sequence[int],
        width: int = 32,
        depth: int = 6,
        *,
        init: Literal["vp", "xavier", "kaiming"] = "kaiming",
    ) -> None:
        super().__init__(in_channels, out_channels, resolution)
        check_choice(init, INITS, "init")
        get_transform("dft").block(modes, self.resolution)  # complains about modes that the grid does not have
        self.lift = two_maps(in_channels + self.ndim, 2 * width, width, self.ndim)
        self.layers: Sequence[FNOLayer] = nn.ModuleList(  # type: ignore[assignment]
            FNOLayer(width, modes, self.ndim) for _ in range(depth)
        )
        self.head = two_maps(width, HEAD_WIDTH, out_channels, self.ndim)
        for layer in self.layers:
            layer.spectral.initialize(init)
        if init == "vp":
            self.vp_init_(self.resolution)

    def forward(self, x: Tensor) -> Tensor:
        """Fields (batch, in_channels, *grid) to fields (batch, out_channels, *grid)."""
        self._check(x)
        given = torch.cat([self._normalize(x), coordinate_channels(x)], 1)
        v = mapped(self.lift, given, torch.bfloat16 if torch.is_autocast_enabled("cuda") else given.dtype)
        for number, layer in enumerate(self.layers):
            v = layer(nn.functional.gelu(v) if number else v)
        return self._denormalize(mapped(self.head, v, torch.float32))

    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None) -> None:
        """Draw the spectral weights of every layer variance-preserving."""
        for layer in self.layers:
            layer.spectral.vp_init_(resolution, generator)


def mapped(perceptron: nn.Sequential, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Two maps of the channels with a GELU between them; in the given dtype where one kernel does it all."""
    inner, b1, outer, b2 = perceptron.parameters()
    if kernels.can_run(x, inner):
        from transform_once.kernels import perceptron as fused

        if fused.fits(x, inner, outer):
            return fused.perceptron(x, inner, outer, (b1, b2), sine=False, dtype=dtype)
    y: Tensor = perceptron(x)
    return y


class ReleasedFNO(Operator):
    """The FNO of the released research code, for the reproduction table: v ← GELU(Kv + v + Wv + b) in every layer.

    There the imaginary part of each layer's output spectrum is lost (`phase_blind`), so that a layer can only emit even
    fields; the paper's FNO numbers are those of that model. With `phase_blind=False` the spectrum is kept.
    The other arguments are those of `FNO`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        modes: int | Sequence[int],
        width: int = 32,
        depth: int = 6,
        *,
        init: Literal["vp", "xavier", "kaiming"] = "xavier",
        phase_blind: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, resolution)
        check_choice(init, INITS, "init")
        get_transform("dft").block(modes, self.resolution)
        self.lift = channel_map(in_channels + self.ndim, width, self.ndim)
        self.spectral: Sequence[SpectralConvolution] = nn.ModuleList(  # type: ignore[assignment]
            SpectralConvolution(width, modes, self.ndim, phase_blind) for _ in range(depth)
        )
        self.pointwise = nn.ModuleList(channel_map(width, width, self.ndim) for _ in range(depth))
        self.head = two_maps(width, HEAD_WIDTH, out_channels, self.ndim)
        for layer in self.spectral:
            layer.initialize(init)
        if init == "vp":
            self.vp_init_(self.resolution)

    def forward(self, x: Tensor) -> Tensor:
        """Fields (batch, in_channels, *grid) to fields (batch, out_channels, *grid)."""
        self._check(x)
        v = self.lift(torch.cat([self._normalize(x), coordinate_channels(x)], 1))
        for spectral, pointwise in zip(self.spectral, self.pointwise, strict=True):
            v = self._layer(spectral, pointwise, v)
        return self._denormalize(mapped(self.head, v, torch.float32))

    def _layer(self, spectral: SpectralConvolution, pointwise: nn.Module, v: Tensor) -> Tensor:
        weight, bias = pointwise.parameters()
        if kernels.can_run(v, weight):
            from transform_once.kernels import perceptron

            if perceptron.fits(v, weight):
                identity = torch.eye(len(weight), device=v.device)
                return perceptron.fno_pointwise(spectral(v), v, [weight.flatten(1) + identity, bias])
        return nn.functional.gelu(spectral(v) + v + pointwise(v))

    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None) -> None:
        """Draw the spectral weights of every layer variance-preserving."""
        for layer in self.spectral:
            layer.vp_init_(resolution, generator)
