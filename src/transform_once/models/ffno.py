"""The factorised Fourier neural operator, a baseline: a transform along each axis alone, in every layer.

Inside a model the fields are (width, batch, *grid), and everything is a product of real matrices. Transformed along an
axis they are (wave number, real or imaginary part, width, rest). So they lie right both for one product a wave number,
with the complex matrices of the channels as real ones of twice the size, and for the transform back. Only an axis that
is not the last one is brought to the front by a copy.

On a GPU there are spare channels, so that all are a multiple of 8, which tensor cores like. The first of them is one
everywhere: its weights are the biases of the perceptrons, which no pass over the fields then adds or sums up.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from transform_once.models.fno import HEAD_WIDTH, SpectralConvolution, channel_map, coordinate_channels, two_maps
from transform_once.models.operator import INITS, Operator, check_choice
from transform_once.spectral import transforms
from transform_once.spectral.bases import matrix
from transform_once.spectral.transforms import get_transform

MULTIPLE = 8  # of channels


class FFNO(Operator):
    """Affine lift, `depth` × (b = MLP(Σ_axes K_axis x), x ← x + b), head on the last b; weights are not shared.

    Without coordinates all of it commutes with cyclic shifts of the fields: such a model cannot know where anything is
    that does not shift with its input, a force for instance.

    Args:
        in_channels: Channels of the input fields.
        out_channels: Channels of the output fields.
        resolution: Grid it is trained on; any other that holds the modes works at call time.
        modes: Wave numbers kept along each axis, an int or one per axis.
        width: Channels inside.
        depth: Layers.
        init: "xavier", "kaiming", or "vp" on all layers (each axis gets its share of the variance).
        coordinates: Whether the lift sees the coordinates, as its authors have it; the paper's has none.
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
        coordinates: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, resolution)
        check_choice(init, INITS, "init")
        per_axis = tuple(modes) if isinstance(modes, Sequence) else (int(modes),) * self.ndim
        for n, m in zip(self.resolution, per_axis, strict=True):
            get_transform("dft").block(m, (n,))  # complains about modes that the axis does not have
        self.lift = channel_map(in_channels + self.ndim * coordinates, width, self.ndim)
        self.coordinates = coordinates
        self.spectral: Sequence[Sequence[SpectralConvolution]] = nn.ModuleList(  # type: ignore[assignment]
            nn.ModuleList(SpectralConvolution(width, m, 1) for m in per_axis) for _ in range(depth)
        )
        self.feed_forward = nn.ModuleList(two_maps(width, 2 * width, width, self.ndim, nn.ReLU) for _ in range(depth))
        self.head = two_maps(width, HEAD_WIDTH, out_channels, self.ndim, nn.ReLU)
        for axes in self.spectral:
            for layer in axes:
                layer.initialize(init)
        if init == "vp":
            self.vp_init_(self.resolution)

    def forward(self, x: Tensor) -> Tensor:
        """Fields (batch, in_channels, *grid) to fields (batch, out_channels, *grid)."""
        self._check(x)
        x = self._normalize(x)
        x = (torch.cat([x, coordinate_channels(x)], 1) if self.coordinates else x).transpose(0, 1)
        shape = x.shape[1:]
        (weight, bias), width = self.lift.parameters(), len(self.lift.weight)
        spare = _spare(x, width) if not _is_long(shape[1:], self.spectral[0]) else 0
        W, b = (nn.functional.pad(p.flatten(1), (0, 0, 0, spare)) for p in (weight, bias[:, None]))
        if spare:
            b[width].fill_(1)  # an assigned number would be copied from the CPU, which no CUDA graph records
        v = b = torch.addmm(b, W, x.flatten(1))  # (channels, batch · points)
        for axes, feed_forward in zip(self.spectral, self.feed_forward, strict=True):
            b = _perceptron(feed_forward, _along_all_axes(axes, v.unflatten(1, shape)).flatten(1), ones=True)
            v = torch.add(v, b, alpha=self.sign)
        y = _perceptron(self.head, b, ones=False).unflatten(1, shape).transpose(0, 1)
        return self._denormalize(y.contiguous())

    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None) -> None:
        """Draw the spectral weights of every layer variance-preserving; the axes share the variance."""
        for axes in self.spectral:
            for n, layer in zip(resolution, axes, strict=True):
                layer.vp_init_((n,), generator, parts=self.ndim)


class ReleasedFFNO(FFNO):
    """The FFNO of the released research code, for the reproduction table only: each layer's output is subtracted.

    As released it is made with `coordinates=False`.
    """

    sign = -1


def _spare(x: Tensor, width: int) -> int:
    """How many channels are added."""
    return MULTIPLE - width % MULTIPLE if x.is_cuda else 0


def _is_long(grid: Sequence[int], layers: Sequence[SpectralConvolution]) -> bool:
    """Whether an axis goes through an FFT."""
    return any(2 * n * layer.modes[0] > transforms.MATRIX_ENTRIES for n, layer in zip(grid, layers, strict=True))


def _along_all_axes(layers: Sequence[SpectralConvolution], v: Tensor) -> Tensor:
    """Σ_axes K_axis v of fields (channels, batch, *grid)."""
    total: Tensor | None = None
    for axis, layer in enumerate(layers, start=2):
        n, m = v.shape[axis], layer.modes[0]
        get_transform("dft").block(m, (n,))  # complains about a grid that does not have the modes
        if _is_long((n,), (layer,)):
            part = layer(v.transpose(0, 1).movedim(axis, -1)).movedim(-1, axis).transpose(0, 1)
            total = part if total is None else total + part
        else:
            total = _along(layer, v, axis, total)
    assert total is not None  # there is an axis
    return total


def _along(layer: SpectralConvolution, v: Tensor, axis: int, total: Tensor | None) -> Tensor:
    """K_axis v for fields (channels, batch, *grid), added to the total of other axes."""
    n, m = v.shape[axis], layer.modes[0]
    forward, inverse = (matrix(kind, n, m, v.dtype, v.device) for kind in ("dft last", "inverse dft last"))
    X = (forward @ v.movedim(axis, 0).flatten(1)).view(m, 2 * len(v), -1)
    weight = _in_real_numbers(layer.weight, len(v), v.dtype)
    if total is None and len(v) > layer.width:  # the channel of ones stays as it is
        weight[0, layer.width, layer.width].fill_(1)
    Y = torch.bmm(weight, X)
    if axis == v.ndim - 1:
        Y = Y.view(2 * m, -1).T
        y = Y @ inverse if total is None else torch.addmm(total.reshape(-1, n), Y, inverse)
    else:
        left, right = math.prod(v.shape[:axis]), math.prod(v.shape[axis + 1 :])
        Y, rows = Y.view(2 * m, left, right).transpose(0, 1), inverse.T.expand(left, n, 2 * m)
        y = torch.bmm(rows, Y) if total is None else torch.baddbmm(total.reshape(left, n, right), rows, Y)
    return y.view(v.shape)


def _in_real_numbers(weight: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Complex matrices as pairs (modes, width, width, 2) to [[Re, −Im], [Im, Re]], (modes, 2 · channels, 2 · channels).

    Spare channels have no weights.
    """
    signs = matrix("complex", 2, 2, dtype, weight.device)
    blocks = (weight.to(dtype) @ signs).unflatten(-1, (2, 2)).permute(0, 3, 1, 4, 2)
    spare = channels - weight.shape[1]
    return nn.functional.pad(blocks, (0, spare, 0, 0, 0, spare)).reshape(-1, 2 * channels, 2 * channels)


def _perceptron(maps: nn.Module, x: Tensor, ones: bool) -> Tensor:
    """Two maps of the channels with a ReLU between them, on (channels, points); what spare channels get stays zero.

    The bias of the second is the weight of a hidden channel that is one everywhere, and so is that of the first where a
    spare channel of `x` holds `ones`. The hidden channels are filled up with such to a multiple of 8.
    """
    W1, b1, W2, b2 = (parameter.to(x.dtype) for parameter in maps.parameters())
    filled, spare = MULTIPLE - len(b1) % MULTIPLE, len(x) - W1.shape[1]
    b1 = nn.functional.pad(b1, (0, filled), value=1.0)
    inner = nn.functional.pad(W1.flatten(1).T, (0, filled, 0, spare))
    outer = nn.functional.pad(torch.cat([W2.flatten(1), b2[:, None]], 1), (0, filled - 1))
    if ones and spare:
        hidden = x.T @ torch.cat([inner[:-spare], b1[None], inner[len(inner) - spare + 1 :]])
        outer = nn.functional.pad(outer, (0, 0, 0, spare))
    else:
        hidden = torch.addmm(b1, x.T, inner)
    return outer @ hidden.relu_().T
