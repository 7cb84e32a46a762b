"""T1 on the grid of its kept modes: one transform, a network on the small field that holds them, one transform back."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from transform_once import kernels
from transform_once.models.fno import (
    HEAD_WIDTH,
    SpectralConvolution,
    channel_map,
    coordinate_channels,
    mapped,
    two_maps,
)
from transform_once.models.operator import INITS, SpectralOperator, check_choice
from transform_once.spectral.bases import matrix
from transform_once.spectral.modes import ModeSet

# Wave numbers of an axis in a layer of the body, by number of axes: more cost weights and bring little.
MOST_WAVES = {1: 64, 2: 16, 3: 8}
BOUND = 4.0  # of one side of the product in a layer: beyond the values of fields that are well scaled
HUGE = 1e9  # whose square float32 and bfloat16 can hold
MULTIPLE = 4  # points of an axis are a multiple of this: tensor cores are slow on odd sizes


class GridLayer(nn.Module):
    """v ← P(4g(u / 4) ⊙ g(Gu + c)) + v, u = Kv + Wv + b, where W sees a point and its differences to its neighbours.

    A step of an equation whose terms are fields, their derivatives, and products of both: K acts on the lowest waves,
    W on the channels and their first and second differences along every axis, which the small scales are moved by, and
    the gate multiplies, with g(z) = z / √(1 + z²). Bounded as both sides are, a layer can add to its channels but not
    multiply them: once they were so large that gates are shut or open, each of many layers would multiply them again.
    Where K acts on all waves it has the derivatives itself, and W needs no `neighbours`. The layer begins as the
    identity.
    """

    def __init__(
        self, width: int, waves: int | Sequence[int], ndim: int, periodic: bool, neighbours: bool = True
    ) -> None:
        super().__init__()
        self.periodic, self.neighbours = periodic, neighbours
        self.spectral = SpectralConvolution(width, waves, ndim)
        self.around = channel_map((1 + 2 * ndim * neighbours) * width, width, ndim)
        self.gate = channel_map(width, width, ndim)
        self.last = channel_map(width, width, ndim)
        for parameter in self.last.parameters():
            nn.init.zeros_(parameter)

    @property
    def pointwise_weights(self) -> list[Tensor]:
        """Weights and biases of the three maps of the channels."""
        return [*self.around.parameters(), *self.gate.parameters(), *self.last.parameters()]

    def forward(self, v: Tensor) -> Tensor:
        """(batch, width, *points) to the same."""
        if kernels.can_run(v, self.around.weight):
            from transform_once.kernels import neighbours

            if neighbours.fits(v):
                K, form = self.spectral, (v, self.pointwise_weights, self.periodic)
                if neighbours.few(K.block, v):
                    return neighbours.grid_layer(None, *form, [K.weight, *wave_rows(v, K.block)])
                return neighbours.grid_layer(K(v), *form)
        u = self.spectral(v) + (self._around(v) if self.neighbours else self.around(v))
        return self.last(gated(u, self.gate(u))) + v

    def _around(self, v: Tensor) -> Tensor:
        """W on the channels and their differences; on a CPU as one convolution, unless that has 27 points."""
        ndim = v.ndim - 2
        if v.is_cuda or ndim == 3 or kernels.watched():
            return self.around(self._with_differences(v))
        weights = self.around.weight.flatten(1).unflatten(1, (1 + 2 * ndim, -1))
        point, first, second = weights[:, 0], weights[:, 1::2] / 2, weights[:, 2::2] / 2
        kernel = weights.new_zeros(*point.shape, *(3,) * ndim)
        middle = (1,) * ndim
        kernel[..., *middle] = point - 2 * second.sum(1)
        for axis in range(ndim):
            for place, weight in ((0, second[:, axis] - first[:, axis]), (2, second[:, axis] + first[:, axis])):
                kernel[..., *middle[:axis], place, *middle[axis + 1 :]] = weight
        beyond = nn.functional.pad(v, (1, 1) * ndim, "circular" if self.periodic else "replicate")
        convolve = nn.functional.conv1d if ndim == 1 else nn.functional.conv2d
        return convolve(beyond, kernel, self.around.bias)

    def _with_differences(self, v: Tensor) -> Tensor:
        """The channels, then their first and second differences along every axis.

        Before the first point of a field that is not periodic comes that point again, and so at the end.
        """
        found = [v]
        for axis, n in enumerate(v.shape[2:], 2):
            kind = "differences around" if self.periodic else "differences"
            first, second = (matrix(kind, n, order, v.dtype, v.device) for order in (1, 2))
            if axis == v.ndim - 1:
                found += [v @ first.T, v @ second.T]
            else:
                rest = v.flatten(axis + 1)
                found += [(first @ rest).view(v.shape), (second @ rest).view(v.shape)]
        return torch.cat(found, 1)


def wave_rows(v: Tensor, block: Sequence[int]) -> list[Tensor]:
    """Rows that take waves of a block from fields, real parts before imaginary ones, and those that make fields."""
    kinds = ("dft of all axes, halves", "inverse dft of all axes")
    return [matrix(kind, tuple(v.shape[2:]), tuple(block), v.dtype, v.device) for kind in kinds]


def bounded(z: Tensor, most: float) -> Tensor:
    """z / √(1 + (z / most)²); beyond 1e9, where squares may overflow, it is ± most."""
    z = z.clamp(-HUGE, HUGE)
    return z * torch.rsqrt(1 + (z / most).square())


def gated(u: Tensor, w: Tensor) -> Tensor:
    """4g(u / 4) ⊙ g(w), the product of two bounded fields."""
    if kernels.watched() or torch.is_autocast_enabled(u.device.type):
        return bounded(u, BOUND) * bounded(w, 1)
    product: Tensor = _Gated.apply(u, w)  # type: ignore[no-untyped-call]
    return product


class _Gated(torch.autograd.Function):
    """The same in a third of the passes over memory, there and back, which are what it costs on a CPU."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, w: Tensor) -> Tensor:
        (a, steep), (b, slope) = _with_root(u, BOUND), _with_root(w, 1)
        ctx.save_for_backward(u, w, steep, slope)
        return a.mul_(b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        u, w, steep, slope = ctx.saved_tensors
        if torch.is_grad_enabled():  # the derivative is to be differentiated itself
            return gradient * bounded(w, 1) * _slope(u, BOUND), gradient * bounded(u, BOUND) * _slope(w, 1)
        a, b = (u * steep).clamp_(-BOUND, BOUND), (w * slope).clamp_(-1, 1)
        return b.mul_(gradient).mul_(_cubed(steep)), a.mul_(gradient).mul_(_cubed(slope))


def _with_root(z: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """`bounded(z, most)`, and 1 / √(1 + (z / most)²)."""
    z = z.clamp(-HUGE, HUGE)
    root = torch.addcmul(torch.ones((), dtype=z.dtype, device=z.device), z, z, value=most**-2).rsqrt_()
    return z.mul_(root), root


def _cubed(z: Tensor) -> Tensor:
    return (z * z).mul_(z)


def _slope(z: Tensor, most: float) -> Tensor:
    """The derivative of `bounded`."""
    return (1 + (z.clamp(-HUGE, HUGE) / most).square()) ** -1.5


def grid_points(block: Sequence[int]) -> tuple[int, ...]:
    """Points of each axis of the small grid that holds a block of modes."""
    return tuple(-(-m // MULTIPLE) * MULTIPLE for m in block)


def most_waves(points: Sequence[int]) -> tuple[int, ...]:
    """Wave numbers of each axis in a layer on such a grid, unless fewer are asked for."""
    return tuple(min(MOST_WAVES[len(points)], n // 2) for n in points)


class GridNet(nn.Module):
    """The body of a T1Grid: lift with coordinates, layers, head, on fields that have few points."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        waves: Sequence[int],
        width: int,
        depth: int,
        periodic: bool,
        neighbours: bool,
    ) -> None:
        super().__init__()
        ndim = len(waves)
        self.periodic = periodic
        self.lift = two_maps(in_channels + (2 if periodic else 1) * ndim, 2 * width, width, ndim)
        self.layers: Sequence[GridLayer] = nn.ModuleList(  # type: ignore[assignment]
            GridLayer(width, waves, ndim, periodic, neighbours) for _ in range(depth)
        )
        self.head = two_maps(width, HEAD_WIDTH, out_channels, ndim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, *points) to (batch, out_channels, *points)."""
        given = torch.cat([x, periodic_coordinates(x) if self.periodic else coordinate_channels(x)], 1)
        v = mapped(self.lift, given, torch.bfloat16 if torch.is_autocast_enabled("cuda") else given.dtype)
        for layer in self.layers:
            v = layer(v)
        return mapped(self.head, v, torch.float32)


def periodic_coordinates(x: Tensor) -> Tensor:
    """Two channels per axis, sine and cosine of the angle that goes round once, for (batch, channels, *points)."""
    lines = [torch.arange(n, dtype=x.dtype, device=x.device) * (2 * math.pi / n) for n in x.shape[2:]]
    angles = torch.stack(torch.meshgrid(*lines, indexing="ij"))
    return torch.cat([angles.sin(), angles.cos()]).expand(x.shape[0], -1, *x.shape[2:])


class T1Grid(SpectralOperator):
    """Transform, gated layers on the values that the kept modes take on few points, transform back.

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
        depth: Layers. Good values: 4 to 12.
        waves: Wave numbers on both sides that a layer acts on, an int or one per axis; None: half of the points, which
            are all, up to 64, 16 or 8 in one, two and three dimensions. Few of them, 2 to 4, generalise better where
            higher waves come from products, as in a flow: layers that do not act on all waves also see each point's
            neighbours. `choose_model` finds out which (`evaluation.coherence`).
        transform: "dct" (fields on cells) or "fourier" (periodic fields on nodes).
        init: Of the body: "kaiming", "xavier", or "vp" on all layers, since each truncates.
        out_resolution: Grid of the output where it is not the input's.
        out_transform: "dst" with the dct: the output is zero at the walls, exactly, and needs fewer modes there.
        body: Any module from (batch, in_channels, *points) to (batch, out_channels, *points), instead of ours.
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
        out_resolution: Sequence[int] | None = None,
        out_transform: str | None = None,
        body: nn.Module | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, resolution, modes, transform, out_resolution, out_transform)
        check_choice(init, INITS, "init")
        if self.transform.is_complex or isinstance(modes, ModeSet):
            raise ValueError(
                "T1Grid works on a block of real modes: use dct or fourier, and modes as ints, not a ModeSet"
            )
        self.points = grid_points(self.block)
        self.body = self._body(waves, width, depth, init) if body is None else body

    def _body(self, waves: int | Sequence[int] | None, width: int, depth: int, init: str) -> GridNet:
        if min(self.block) < 2:
            raise ValueError(f"T1Grid needs at least two modes on every axis; got the block {self.block}")
        halves = tuple(n // 2 for n in self.points)
        waves = most_waves(self.points) if waves is None else waves
        waves = (waves,) * self.ndim if isinstance(waves, int) else tuple(waves)
        if len(waves) != self.ndim or not all(1 <= m <= half for m, half in zip(waves, halves, strict=True)):
            raise ValueError(f"waves lie between 1 and half of the points of an axis, {halves}; got {waves}")
        periodic, neighbours = self.transform.name == "fourier", waves != halves
        body = GridNet(self.in_channels, self.out_channels, waves, width, depth, periodic, neighbours)
        for layer in body.layers:
            layer.spectral.vp_init_(self.points) if init == "vp" else layer.spectral.initialize(init)
        return body

    def kspace(self, X: Tensor) -> Tensor:
        """Kept modes (batch, in_channels, *block) to kept modes (batch, out_channels, *block)."""
        self._check_modes(X)
        points = math.prod(self.points)
        x = self.transform.inverse(X, self.ndim, self.points) * math.sqrt(points / math.prod(self.resolution))
        y: Tensor = self.body(x)
        expected = (X.shape[0], self.out_channels, *self.points)
        if tuple(y.shape) != expected:
            raise ValueError(f"the body must return fields of shape {expected}; it returned {tuple(y.shape)}")
        Y = self.out_transform.forward(y.to(X.dtype), self.ndim, self.block)
        return Y * math.sqrt(math.prod(self.out_resolution) / points)
