"""The convolutional UNet (DFPNet) that works on a block of kept modes or on fields: one rule for any size.

Seen from above, with B₁ … B_L the encoder blocks and c = `width`:

    x ─B₁─ e₁ ─B₂─ e₂ ─ … ─B_L─ e_L          each block halves the grid, channels c, 2c, … up to 8c
                                  │
    y ─head─ [d₁, e₁] ─ … ─ [d_{L−1}, e_{L−1}]     each decoder block returns to the size of its skip

Encoder block: LeakyReLU(0.2), convolution with stride 2, batch norm (the first: convolution only; the last: no norm).
Decoder block: ReLU, linear upsampling, convolution with stride 1, batch norm. Head: ReLU, transposed convolution with
stride 2. Every convolution has a bias.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from transform_once.models.operator import Operator

LayoutName = Literal["auto", "published", "rule"]
InitScheme = Literal["default", "dfpnet", "xavier", "kaiming"]

# By number of axes: convolution, transposed convolution, batch norm.
_LAYERS: dict[int, tuple[Callable[..., nn.Module], Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


class Down(NamedTuple):
    """One encoder block: output channels in units of the width, kernel and padding of its stride-2 convolution."""

    channels: int
    kernel: int
    padding: int


class Up(NamedTuple):
    """One decoder block: upsampling factor (None: to the size of the skip), kernel and padding of its convolution."""

    factor: int | None
    kernel: int
    padding: int


class Layout(NamedTuple):
    """A whole UNet: encoder outside in, decoder inside out, and which output the last encoder block reads.

    `bottom_reads` counts back from the last encoder block: −1 is the block before it, as one expects.
    """

    encoder: tuple[Down, ...]
    decoder: tuple[Up, ...]
    bottom_reads: int = -1


_OUTER = (Down(1, 4, 1), Down(2, 4, 1), Down(2, 4, 1))

# DFPNet as published for square images, by side length. At 100 and 128 the last two encoder blocks
# read the same map.
PUBLISHED_LAYOUTS: dict[int, Layout] = {
    24: Layout(
        encoder=(*_OUTER, Down(4, 2, 2), Down(8, 2, 2), Down(8, 2, 3), Down(8, 3, 0)),
        decoder=(Up(2, 1, 1), Up(1, 2, 0), Up(1, 3, 1), Up(1, 3, 1), Up(2, 3, 1), Up(2, 3, 1)),
    ),
    100: Layout(
        encoder=(*_OUTER, Down(4, 4, 1), Down(8, 4, 1), Down(8, 2, 1), Down(8, 2, 1)),
        decoder=(Up(1, 3, 1), Up(1, 2, 1), Up(2, 3, 1), Up(2, 3, 1), Up(2, 2, 1), Up(2, 3, 1)),
        bottom_reads=-2,
    ),
    128: Layout(
        encoder=(*_OUTER, Down(4, 4, 1), Down(8, 4, 1), Down(8, 2, 1), Down(8, 2, 1)),
        decoder=(Up(1, 3, 1), Up(1, 2, 1), Up(2, 3, 1), Up(2, 3, 1), Up(2, 3, 1), Up(2, 3, 1)),
        bottom_reads=-2,
    ),
    224: Layout(
        encoder=(*_OUTER, Down(4, 4, 1), Down(8, 4, 0), Down(8, 4, 0), Down(8, 2, 0)),
        decoder=(Up(2, 1, 0), Up(3, 1, 0), Up(3, 5, 0), Up(2, 3, 1), Up(2, 3, 1), Up(2, 3, 1)),
    ),
}


def rule_layout(size: tuple[int, ...]) -> Layout:
    """Our layout for any size: halve, rounding up, until no axis is longer than 2; 3-wide kernels; channels up to 8c.

    There are max(1, ⌈log₂ max(size)⌉ − 1) levels, since on two cells a 3-wide kernel already sees everything. Batch
    norm never meets a map of one value: all levels but the last are at least 3 cells long, and the last has no norm.
    """
    levels = max(1, (max(size) - 1).bit_length() - 1)
    encoder = tuple(Down(min(2**level, 8), 3, 1) for level in range(levels))
    return Layout(encoder, (Up(None, 3, 1),) * (levels - 1))


def choose_layout(size: tuple[int, ...], name: LayoutName = "auto") -> Layout:
    """Return the layout of that name; "auto" is the published one where there is one and the rule elsewhere."""
    if name not in get_args(LayoutName):
        raise ValueError(f"layout must be one of {', '.join(get_args(LayoutName))}; got {name!r}.")
    is_published = len(size) == 2 and size[0] == size[1] and size[0] in PUBLISHED_LAYOUTS
    if name == "published" and not is_published:
        sides = ", ".join(map(str, PUBLISHED_LAYOUTS))
        raise ValueError(
            f"published layouts exist for square images of side {sides}; got {size}, so use layout='auto'."
        )
    return PUBLISHED_LAYOUTS[size[0]] if is_published and name != "rule" else rule_layout(size)


def interpolation_matrix(source: int, target: int) -> Tensor:
    """Linear interpolation from `source` to `target` cell centres of one axis as a (target, source) matrix.

    Row i holds the weights of the two neighbours of (i + ½)·source/target − ½, clamped to the first and last centre:
    what `torch.nn.functional.interpolate(align_corners=False)` computes.
    """
    position = ((torch.arange(target, dtype=torch.float64) + 0.5) * source / target - 0.5).clamp(0, source - 1)
    # The hat function of every source centre, read at every target centre.
    hats = 1 - (position[:, None] - torch.arange(source, dtype=torch.float64)).abs()
    return hats.clamp(min=0).to(torch.get_default_dtype())


class Upsample(nn.Module):
    """(Bi-, tri-)linear upsampling of (B, C, *size) to (B, C, *target) by one small matrix product per axis.

    Equal to `interpolate(align_corners=False)`, whose kernel dominates the time on tiny images on a GPU and whose
    gradient there is not deterministic. An axis that keeps its length costs nothing.
    """

    def __init__(self, size: tuple[int, ...], target: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = [axis for axis, (source, to) in enumerate(zip(size, target, strict=True)) if source != to]
        for axis in self.axes:
            # Recomputed from the sizes, hence no part of the saved weights.
            matrix = interpolation_matrix(size[axis], target[axis])
            self.register_buffer(f"matrix_{axis}", matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Upsample (B, C, *size) to (B, C, *target)."""
        for axis in self.axes:
            matrix = getattr(self, f"matrix_{axis}")
            dim = axis + 2
            if dim == x.ndim - 1:
                x = x @ matrix.T
            else:
                trailing = x.shape[dim + 1 :]
                x = (matrix @ x.flatten(dim + 1)).unflatten(-1, trailing)
        return x


class UNetBody(nn.Module):
    """UNet from (B, in_channels, *size) to (B, out_channels, *size), on one to three axes of any lengths from 1 up.

    `width` is c, the channels of the first encoder block (a power of two by custom: 32, 64, 128). `layout` is "auto"
    (square images of side 24, 100, 128 and 224 get the published DFPNet kernels, all other sizes our rule),
    "published" (an error where there is none) or "rule" (always ours, see `rule_layout`). It is built for one
    `size`: a published layout has 7 encoder blocks, the rule's depth grows with the logarithm of the longest axis.

    Weights start as torch's defaults; see `initialize` for others.
    """

    def __init__(
        self, in_channels: int, out_channels: int, size: tuple[int, ...], width: int = 64, layout: LayoutName = "auto"
    ) -> None:
        super().__init__()
        size = tuple(size)
        if len(size) not in _LAYERS or min(size) < 1:
            raise ValueError(f"size must be one to three axis lengths of at least 1; got {size}.")
        if min(in_channels, out_channels, width) < 1:
            got = f"{in_channels}, {out_channels} and {width}"
            raise ValueError(f"in_channels, out_channels and width must be at least 1; got {got}.")
        self.in_channels = in_channels
        self.size = size
        plan = choose_layout(size, layout)
        self.bottom_reads = plan.bottom_reads
        channels = [width * block.channels for block in plan.encoder]
        sizes = self._build_encoder(plan, channels)
        self._build_decoder(plan, channels, sizes)
        head_inputs = channels[0] * (2 if plan.decoder else 1)
        # A 4-wide transposed kernel doubles its input, an odd axis needs one cell less.
        odd = [length % 2 for length in size]
        _, transposed, _ = _LAYERS[len(size)]
        padding = tuple(1 + n for n in odd)
        self.head = nn.Sequential(nn.ReLU(), transposed(head_inputs, out_channels, 4, 2, padding, tuple(odd)))

    def _build_encoder(self, plan: Layout, channels: list[int]) -> list[tuple[int, ...]]:
        """Add the encoder blocks; return the size of the map that each puts out."""
        convolution, _, norm = _LAYERS[len(self.size)]
        inputs, sizes = [self.in_channels], [self.size]
        self.encoder = nn.ModuleList()
        last = len(plan.encoder) - 1
        for index, (block, outputs) in enumerate(zip(plan.encoder, channels, strict=True)):
            source = self.bottom_reads if index == last else -1
            layers: list[nn.Module] = [nn.LeakyReLU(0.2)] if index > 0 else []
            layers.append(convolution(inputs[source], outputs, block.kernel, 2, block.padding))
            if 0 < index < last:
                layers.append(norm(outputs))
            self.encoder.append(nn.Sequential(*layers))
            inputs.append(outputs)
            sizes.append(tuple((n + 2 * block.padding - block.kernel) // 2 + 1 for n in sizes[source]))
        return sizes[1:]

    def _build_decoder(self, plan: Layout, channels: list[int], sizes: list[tuple[int, ...]]) -> None:
        """Add the decoder blocks, each from the map below it to the size and the channels of its skip."""
        convolution, _, norm = _LAYERS[len(self.size)]
        self.decoder = nn.ModuleList()
        for index, block in enumerate(plan.decoder):
            below = len(channels) - 1 - index
            inputs = channels[below] * (1 if index == 0 else 2)
            outputs = channels[below - 1]
            target = tuple(block.factor * n for n in sizes[below]) if block.factor else sizes[below - 1]
            self.decoder.append(
                nn.Sequential(
                    nn.ReLU(),
                    Upsample(sizes[below], target),
                    convolution(inputs, outputs, block.kernel, 1, block.padding),
                    norm(outputs),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, *size) to (B, out_channels, *size)."""
        if tuple(x.shape[1:]) != (self.in_channels, *self.size):
            expected = ", ".join(map(str, ("batch", self.in_channels, *self.size)))
            raise ValueError(f"UNetBody expects an input of shape ({expected}); got {tuple(x.shape)}.")
        maps = [x]
        last = len(self.encoder) - 1
        for index, block in enumerate(self.encoder):
            maps.append(block(maps[self.bottom_reads if index == last else -1]))
        z = maps.pop()
        for block in self.decoder:
            z = torch.cat([block(z), maps.pop()], dim=1)
        y: Tensor = self.head(z)
        return y

    @torch.no_grad()
    def initialize(self, scheme: InitScheme) -> None:
        """Draw all weights anew by a named scheme.

        - "default": torch's own.
        - "dfpnet": convolutions N(0, 0.02²), gains of the norms N(1, 0.02²), as in DFPNet; other biases as torch's.
        - "kaiming": N(0, 2/n) with n the inputs that one output sums over, zero biases: keeps the size of signals.
        - "xavier": N(0, 2/(n + n′)) with n′ the outputs that one input reaches, zero biases.
        """
        if scheme not in get_args(InitScheme):
            raise ValueError(f"init scheme must be one of {', '.join(get_args(InitScheme))}; got {scheme!r}.")
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_parameters()
                if scheme == "dfpnet":
                    module.weight.normal_(1.0, 0.02)
            elif isinstance(module, nn.modules.conv._ConvNd):
                _initialize_convolution(module, scheme)


def _initialize_convolution(module: nn.modules.conv._ConvNd, scheme: InitScheme) -> None:
    module.reset_parameters()
    if scheme == "dfpnet":
        module.weight.normal_(0.0, 0.02)
    elif scheme in ("kaiming", "xavier"):
        # A stride thins what one output sums over (transposed) or what one input reaches (ordinary); torch's own fans
        # swap the channels of transposed kernels, which would make the output of the head far too large.
        kernel, stride = math.prod(module.kernel_size), math.prod(module.stride)
        fan_in = module.in_channels * kernel / (stride if module.transposed else 1)
        fan_out = module.out_channels * kernel / (1 if module.transposed else stride)
        module.weight.normal_(0.0, math.sqrt(2 / fan_in if scheme == "kaiming" else 2 / (fan_in + fan_out)))
        if module.bias is not None:
            module.bias.zero_()


class UNet(Operator):
    """The DFPNet on fields: a UNet for images of one size, a baseline without a transform.

    Args:
        in_channels: Channels of the input fields.
        out_channels: Channels of the output fields.
        resolution: Grid it is built for, and the only one it works on.
        width: First channel count, 2^exponent in the paper: 64 for airfoils at 128×128.
        init: "kaiming", "xavier" or "dfpnet" (N(0, 0.02²), as DFPNet was published).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        width: int = 64,
        *,
        init: Literal["kaiming", "xavier", "dfpnet"] = "kaiming",
    ) -> None:
        super().__init__(in_channels, out_channels, resolution)
        self.body = UNetBody(in_channels, out_channels, self.resolution, width)
        self.body.initialize(init)

    def forward(self, x: Tensor) -> Tensor:
        """Fields (batch, in_channels, *grid) to fields (batch, out_channels, *grid)."""
        self._check(x)
        if tuple(x.shape[2:]) != self.resolution:
            raise ValueError(f"this UNet was built for fields of {self.resolution} points; got {tuple(x.shape[2:])}")
        return self._denormalize(self.body(self._normalize(x)))
