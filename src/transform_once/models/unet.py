"""The convolutional UNet (DFPNet) that works on a block of kept modes or on fields: one rule for any size.

Seen from above, with B₁ … B_L the encoder blocks and c = `width`:

    x ─B₁─ e₁ ─B₂─ e₂ ─ … ─B_L─ e_L          each block halves the grid, channels c, 2c, … up to 8c
                                  │
    y ─head─ [d₁, e₁] ─ … ─ [d_{L−1}, e_{L−1}]     each decoder block returns to the size of its skip

Encoder block: LeakyReLU(0.2), convolution with stride 2, batch norm (the first: convolution only; the last: no norm).
Decoder block: ReLU, linear upsampling, convolution with stride 1, batch norm. Head: ReLU, transposed convolution with
stride 2. A convolution before a batch norm has no bias, since the norm would take it off again.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from transform_once import kernels
from transform_once.models.operator import Operator

LayoutName = Literal["auto", "published", "rule"]
InitScheme = Literal["default", "dfpnet", "xavier", "kaiming"]

# By number of axes: convolution, transposed convolution.
_LAYERS: dict[int, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}

HEAD_START = 0.1  # of its size: the first predictions are near zero, not noise
# On GPUs convolutions are fastest with the channels last in memory, on CPUs with the channels first.
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
# An upsampling whose matrix over all axes has at most so many entries is one product.
ALL_AXES = 2**15


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
    """(Bi-, tri-)linear upsampling of (B, C, *size) to (B, C, *target) by small matrix products, channels last.

    Equal to `interpolate(align_corners=False)`, whose kernel dominates the time on tiny images on a GPU and whose
    gradient there is not deterministic. Tiny images take one product with all axes at once, others one per axis. An
    axis that keeps its length costs nothing.
    """

    def __init__(self, size: tuple[int, ...], target: tuple[int, ...]) -> None:
        super().__init__()
        self.target = target
        self.products: list[tuple[str, int, int]] = []  # a matrix, and the points before and after its axis
        matrices = [interpolation_matrix(source, to) for source, to in zip(size, target, strict=True)]
        if size != target and math.prod(size) * math.prod(target) <= ALL_AXES:
            self._add("matrix", functools.reduce(torch.kron, matrices), 1, 1)
            return
        for axis, matrix in enumerate(matrices):
            if size[axis] != target[axis]:
                self._add(f"matrix_{axis}", matrix, math.prod(target[:axis]), math.prod(size[axis + 1 :]))

    def _add(self, name: str, matrix: Tensor, before: int, after: int) -> None:
        self.register_buffer(name, matrix, persistent=False)  # recomputed from the sizes, hence no part of the weights
        self.products.append((name, before, after))

    def forward(self, x: Tensor) -> Tensor:
        """Upsample (B, C, *size) to (B, C, *target)."""
        if not self.products:
            return x
        batch, channels = x.shape[:2]
        x = x.movedim(1, -1)
        for name, before, after in self.products:
            matrix = getattr(self, name)
            x = x.reshape(batch * before, matrix.shape[1], after * channels)
            x = torch.bmm(matrix.expand(x.shape[0], -1, -1), x)
        return x.reshape(batch, *self.target, channels).movedim(-1, 1)


class BatchNorm(nn.Module):
    """Batch norm over samples and points of (B, C, *size): (x − mean)/√(var + ε)·weight + bias, per channel.

    In training with the statistics of the batch, which running averages follow; those serve in evaluation.
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, channels: int, momentum: float = 0.1, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight, self.bias = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_variance", torch.empty(channels))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """As at the start."""
        for tensor in (self.weight, self.running_variance):
            tensor.fill_(1)
        for tensor in (self.bias, self.running_mean):
            tensor.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, *size) to the same."""
        running = (self.running_mean, self.running_variance)
        if self.training and kernels.can_run(x):
            from transform_once.kernels.norm import batch_norm

            return batch_norm(x, self.weight, self.bias, *running, self.momentum, self.epsilon)
        return nn.functional.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.epsilon)


class _Cast(torch.autograd.Function):
    """Many weights in another precision by one kernel, and their gradients back by another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        cast = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(cast, weights)
        return tuple(cast)

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(back, gradients)
        return None, *back


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
        _, transposed = _LAYERS[len(size)]
        padding = tuple(1 + n for n in odd)
        self.head = nn.Sequential(nn.ReLU(), transposed(head_inputs, out_channels, 4, 2, padding, tuple(odd)))
        self._arrange()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved._arrange()
        return moved

    def _arrange(self) -> None:
        """Put the weights in the order of memory that is fast where they are: on GPUs the channels last."""
        on_gpu = self.head[1].weight.device.type == "cuda"
        fast = CHANNELS_LAST.get(len(self.size)) if on_gpu else None
        self.memory_format = fast or torch.contiguous_format
        for parameter in self.parameters():
            if parameter.ndim == 2 + len(self.size):
                parameter.data = parameter.data.contiguous(memory_format=self.memory_format)

    def _build_encoder(self, plan: Layout, channels: list[int]) -> list[tuple[int, ...]]:
        """Add the encoder blocks; return the size of the map that each puts out."""
        convolution, _ = _LAYERS[len(self.size)]
        inputs, sizes = [self.in_channels], [self.size]
        self.encoder = nn.ModuleList()
        last = len(plan.encoder) - 1
        for index, (block, outputs) in enumerate(zip(plan.encoder, channels, strict=True)):
            source = self.bottom_reads if index == last else -1
            layers: list[nn.Module] = [nn.LeakyReLU(0.2)] if index > 0 else []
            normed = 0 < index < last
            layers.append(convolution(inputs[source], outputs, block.kernel, 2, block.padding, bias=not normed))
            if normed:
                layers.append(BatchNorm(outputs))
            self.encoder.append(nn.Sequential(*layers))
            inputs.append(outputs)
            sizes.append(tuple((n + 2 * block.padding - block.kernel) // 2 + 1 for n in sizes[source]))
        return sizes[1:]

    def _build_decoder(self, plan: Layout, channels: list[int], sizes: list[tuple[int, ...]]) -> None:
        """Add the decoder blocks, each from the map below it to the size and the channels of its skip."""
        convolution, _ = _LAYERS[len(self.size)]
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
                    convolution(inputs, outputs, block.kernel, 1, block.padding, bias=False),
                    BatchNorm(outputs),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, *size) to (B, out_channels, *size)."""
        if tuple(x.shape[1:]) != (self.in_channels, *self.size):
            expected = ", ".join(map(str, ("batch", self.in_channels, *self.size)))
            raise ValueError(f"UNetBody expects an input of shape ({expected}); got {tuple(x.shape)}.")
        weights = {name: weight for name, weight in self.named_parameters() if weight.ndim > 1}
        if torch.is_autocast_enabled("cuda") and kernels.can_run(x, *weights.values()):
            dtype = torch.get_autocast_dtype("cuda")
            if any(weight.dtype != dtype for weight in weights.values()):
                cast = _Cast.apply(dtype, *weights.values())  # type: ignore[no-untyped-call]
                return torch.func.functional_call(self, dict(zip(weights, cast, strict=True)), x)
        maps = [x.contiguous(memory_format=self.memory_format)]
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
            if isinstance(module, BatchNorm):
                module.reset()
                if scheme == "dfpnet":
                    module.weight.normal_(1.0, 0.02)
            elif isinstance(module, nn.modules.conv._ConvNd):
                _initialize_convolution(module, scheme)

    @torch.no_grad()
    def start_small(self) -> None:
        """Shrink the last map, so that training starts near zero; of a rollout's changes that says: nothing moves."""
        for parameter in self.head.parameters():
            parameter.mul_(HEAD_START)


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
        init: "kaiming" or "xavier", with a head that starts small, or "dfpnet" (N(0, 0.02²), as DFPNet was published).
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
        if init != "dfpnet":
            self.body.start_small()

    def forward(self, x: Tensor) -> Tensor:
        """Fields (batch, in_channels, *grid) to fields (batch, out_channels, *grid)."""
        self._check(x)
        if tuple(x.shape[2:]) != self.resolution:
            raise ValueError(f"this UNet was built for fields of {self.resolution} points; got {tuple(x.shape[2:])}")
        return self._denormalize(self.body(self._normalize(x)))
