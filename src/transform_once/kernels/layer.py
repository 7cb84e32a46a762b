"""The T1 layer in Triton, for NVIDIA GPUs: each product with what comes before and after it in one kernel.

A state is (channels, modes, batch). For each mode k and each channel c, with f the activation:

    forward    G_k = f(W_k z_k),   U = V₁ G,   out = z + V₂ U                        (V₁, V₂ along axes 1 and 2)
    backward   P = V₂ᵀ dout,   dA = f'(W z) ∘ V₁ᵀ P,   dz_k = W_kᵀ dA_k + dout_k,   and the gradients of the weights

f' is kept from the forward step: computing it where a product reads it would repeat it in every thread group.

A mixing sees its axis as rows and everything else (other axes, batch) as columns, by strides alone: nothing is ever
rearranged. Weights are read in float32 and rounded on the chip. `layers.T1Layer` computes the same with plain products:
that is the reference, and what runs everywhere else. Gradients are summed in a fixed order, so runs repeat bit by bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once import kernels

MOST_MODES, MOST_CHANNELS = 64, 64  # along an axis, and of a state: what a program holds on the chip
FEWEST_SAMPLES = 8  # below, plain products waste less
COLUMNS = {16: 128, 32: 64, 64: 64}  # of a program, by rows
BLOCK = 4096  # weights that a program of the product with single samples reads
SPLITS = 3  # programs of a mixing's backward step for each processor of the GPU


@triton.jit
def sine(x):
    """sin x to 2e-7 for |x| up to some thousands, without the branches of the library's."""
    turns = tl.floor(x * 0.3183098861837907 + 0.5)
    r = x - turns * 3.140625
    r = r - turns * 9.67653589793e-4  # the rest of pi
    s = r * r
    p = 2.755731922e-6 - s * 2.505210839e-8
    p = -1.984126984e-4 + s * p
    p = 8.333333333e-3 + s * p
    p = -0.1666666667 + s * p
    p = r + r * s * p
    half = turns * 0.5
    return tl.where(half == tl.floor(half), p, -p)


@triton.jit
def activation(x, SINE: tl.constexpr):
    """f(x) and f'(x); the normal distribution to 8e-8 by a rational approximation of the error function."""
    if SINE:
        value, slope = sine(x), sine(x + 1.5707963267948966)
    else:
        bell = tl.exp(-0.5 * x * x)
        k = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
        p = k * (1.421413741 + k * (-1.453152027 + k * 1.061405429))
        p = k * (0.254829592 + k * (-0.284496736 + p))
        upper = 0.5 * p * bell
        share = tl.where(x > 0, 1.0 - upper, upper)
        value, slope = x * share, share + x * 0.3989422804014327 * bell
    return value, slope


@triton.jit
def _rounded(x):
    """To tf32, without the last thirteen bits: a tensor core would cut them off, which makes every number smaller."""
    x = x.to(tl.float32)
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # the carry would make a zero of a NaN


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Of two matrices, summed in float32."""
    if PRECISION == "bfloat16":
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "tf32":
        result = tl.dot(_rounded(a), _rounded(b), input_precision="tf32")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def _square(pointer, SIZE: tl.constexpr, P: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A square matrix, or its transpose, filled up with zeros to P×P."""
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    place = j * SIZE + i if TRANSPOSED else i * SIZE + j
    return tl.load(pointer + place, mask=(i < SIZE) & (j < SIZE), other=0.0).to(tl.float32)


@triton.jit
def _channels(
    Z, W, G, slopes, modes, batch, WIDTH: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SINE: tl.constexpr,
    SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """f(W_k z_k) for one mode and S samples, and the slopes f' there."""
    mode = tl.program_id(0).to(tl.int64)
    channel, sample = tl.arange(0, P)[:, None], tl.program_id(1) * S + tl.arange(0, S)[None, :]
    place, inside = (channel * modes + mode) * batch + sample, (channel < WIDTH) & (sample < batch)
    z = tl.load(Z + place, mask=inside, other=0.0).to(tl.float32)
    a = product(_square(W + mode * WIDTH * WIDTH, WIDTH, P, False), z, PRECISION)
    value, slope = activation(a, SINE)
    tl.store(G + place, value, mask=inside)
    if SLOPES:
        tl.store(slopes + place, slope, mask=inside)


@triton.jit
def _channels_backward(
    dA, Z, W, dout, dZ, dW, modes, batch, WIDTH: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dz_k = W_kᵀ dA_k + dout_k and dW_k = dA_k z_kᵀ for one mode and all samples."""
    mode = tl.program_id(0).to(tl.int64)
    w = _square(W + mode * WIDTH * WIDTH, WIDTH, P, True)
    channel = tl.arange(0, P)[:, None]
    total = tl.zeros((P, P), tl.float32)
    for first in range(0, batch, S):
        sample = first + tl.arange(0, S)[None, :]
        place, inside = (channel * modes + mode) * batch + sample, (channel < WIDTH) & (sample < batch)
        g = tl.load(dA + place, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(Z + place, mask=inside, other=0.0).to(tl.float32)
        total += product(g, tl.trans(z), PRECISION)
        d = product(w, g, PRECISION) + tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dZ + place, d, mask=inside)
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    tl.store(dW + mode * WIDTH * WIDTH + i * WIDTH + j, total, mask=(i < WIDTH) & (j < WIDTH))


@triton.jit
def _tile(number, channel, left, right, SIZE: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """Where tile `number` of a channel's (left, SIZE, right) block lies, rows along the axis, and what of it exists."""
    tiles = tl.cdiv(right, C)
    row, column = tl.arange(0, P)[:, None], (number % tiles) * C + tl.arange(0, C)[None, :]
    start = (channel * left + number // tiles) * SIZE
    return (start + row) * right + column, (row < SIZE) & (column < right)


@triton.jit
def _mix(
    X, V, Y, Z, left, right, SIZE: tl.constexpr, P: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Y = V X along an axis, for one tile of a channel; the last axis adds the state Z."""
    channel = tl.program_id(0).to(tl.int64)
    place, inside = _tile(tl.program_id(1), channel, left, right, SIZE, P, C)
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    y = product(_square(V + channel * SIZE * SIZE, SIZE, P, False), x, PRECISION)
    if LAST:
        y += tl.load(Z + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + place, y, mask=inside)


@triton.jit
def _mix_backward(
    dY, V, X, slopes, dX, parts, left, right, part_stride, SIZE: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX = Vᵀ dY, for the first axis times the slopes of the activation, and this program's part of dV = dY Xᵀ."""
    channel = tl.program_id(0).to(tl.int64)
    v = _square(V + channel * SIZE * SIZE, SIZE, P, True)
    total = tl.zeros((P, P), tl.float32)
    for number in range(tl.program_id(1), left * tl.cdiv(right, C), tl.num_programs(1)):
        place, inside = _tile(number, channel, left, right, SIZE, P, C)
        g = tl.load(dY + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
        d = product(v, g, PRECISION)
        if FIRST:
            d *= tl.load(slopes + place, mask=inside, other=0.0).to(tl.float32)
        total += product(g, tl.trans(x), PRECISION)
        tl.store(dX + place, d, mask=inside)
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    own = parts + tl.program_id(1) * part_stride + channel * SIZE * SIZE
    tl.store(own + i * SIZE + j, total, mask=(i < SIZE) & (j < SIZE))


@triton.jit
def _single(Z, W, A, modes, WIDTH: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    """A_k = W_k z_k for one sample and K modes: the weights are all that counts."""
    mode = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    o, i, k = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :], mode[:, None, None]
    inside = (k < modes) & (o < WIDTH) & (i < WIDTH)
    w = tl.load(W + (k * WIDTH + o) * WIDTH + i, mask=inside, other=0.0)
    z = tl.load(Z + i * modes + k, mask=(k < modes) & (i < WIDTH), other=0.0).to(tl.float32)
    place = tl.arange(0, P)[None, :] * modes + mode[:, None]
    inside = (mode[:, None] < modes) & (tl.arange(0, P)[None, :] < WIDTH)
    tl.store(A + place, tl.sum(w * z, 2), mask=inside)


@triton.jit
def _single_backward(
    dA, Z, W, dZ, dW, modes, WIDTH: tl.constexpr, P: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """dz_k = W_kᵀ dA_k and dW_k = dA_k z_kᵀ for one sample and K modes."""
    mode = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    o, i, k = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :], mode[:, None, None]
    inside = (k < modes) & (o < WIDTH) & (i < WIDTH)
    w = tl.load(W + (k * WIDTH + o) * WIDTH + i, mask=inside, other=0.0)
    z = tl.load(Z + i * modes + k, mask=(k < modes) & (i < WIDTH), other=0.0).to(tl.float32)
    g = tl.load(dA + o * modes + k, mask=(k < modes) & (o < WIDTH), other=0.0).to(tl.float32)
    tl.store(dW + (k * WIDTH + o) * WIDTH + i, g * z, mask=inside)
    place = tl.arange(0, P)[None, :] * modes + mode[:, None]
    inside = (mode[:, None] < modes) & (tl.arange(0, P)[None, :] < WIDTH)
    tl.store(dZ + place, tl.sum(w * g, 1), mask=inside)


def fused_layer(Z: Tensor, sine: bool, weight: Tensor, mixings: Iterable[Tensor]) -> Tensor:
    """z + mixing(f(W z)) of a state (channels, modes, batch), f a sine or a GELU; weights as `T1Layer` has them.

    The new state has the dtype of the old one; products are of the precision that torch is set to.
    """
    weights = (weight, *mixings)
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (Z, *weights))
    return FusedLayer.apply(Z.contiguous(), sine, learns, *weights)


def single_product(Z: Tensor, weight: Tensor) -> Tensor:
    """W_k z_k for every mode of a state (channels, modes, 1) of one sample: the weights are read once."""
    return SingleProduct.apply(Z.contiguous(), weight)


def fits(Z: Tensor, weight: Tensor, mixings: Iterable[Tensor]) -> bool:
    """Whether `fused_layer` is the fast way: a block that fits on the chip, in less than full float32."""
    enough = Z.shape[2] >= FEWEST_SAMPLES and max(V.shape[1] for V in mixings) <= MOST_MODES
    return enough and weight.shape[1] <= MOST_CHANNELS and precision_of(Z) != "ieee"


class FusedLayer(torch.autograd.Function):
    """`fused_layer` of a contiguous state, and its gradient."""

    @staticmethod
    def forward(ctx: Any, Z: Tensor, sine: bool, learns: bool, weight: Tensor, *mixings: Tensor) -> Tensor:
        """The new state; where it `learns`, slopes are kept for the way back."""
        precision, (width, modes, batch) = precision_of(Z), Z.shape
        X = torch.empty_like(Z, dtype=torch.bfloat16 if precision == "bfloat16" else None)
        slopes = torch.empty_like(X) if learns else X
        options = {**_channel_options(width, batch), "SINE": sine, "SLOPES": learns, "PRECISION": precision}
        _channels[(modes, triton.cdiv(batch, options["S"]))](Z, weight, X, slopes, modes, batch, **options)
        inputs = []
        for axis, V in enumerate(mixings):
            last = axis == len(mixings) - 1
            Y = torch.empty_like(Z if last else X)
            left, right, options = _tiling(Z, mixings, axis)
            grid = (width, left * triton.cdiv(right, options["C"]))
            _mix[grid](X, V, Y, Z, left, right, **options, LAST=last, PRECISION=precision)
            inputs.append(X)
            X = Y
        if learns:
            ctx.save_for_backward(Z, slopes, weight, *mixings, *inputs)
        ctx.precision = precision
        return X

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of the state and of the weights."""
        Z, slopes, weight, *rest = ctx.saved_tensors
        (width, modes, batch), count = Z.shape, len(rest) // 2
        mixings, inputs = rest[:count], rest[count:]
        dout = gradients[0].contiguous()
        sizes = [V.numel() for V in mixings]
        splits = max(1, SPLITS * processors(Z.device) // width)
        parts = torch.empty(splits, sum(sizes), device=Z.device, dtype=torch.float32)
        d = dout
        for axis in reversed(range(count)):
            V, X, dX = mixings[axis], inputs[axis], torch.empty_like(inputs[axis])
            left, right, options = _tiling(Z, mixings, axis)
            own = parts[:, sum(sizes[:axis]) :]
            _mix_backward[(width, splits)](
                *(d, V, X, slopes, dX, own, left, right, parts.stride(0)),
                **{**options, "FIRST": axis == 0, "PRECISION": ctx.precision},
            )
            d = dX
        totals = parts.sum(0).split(sizes)
        dZ, dweight = torch.empty_like(Z), torch.empty_like(weight)
        options = {**_channel_options(width, batch), "PRECISION": ctx.precision, "num_stages": 1}
        _channels_backward[(modes,)](d, Z, weight, dout, dZ, dweight, modes, batch, **options)
        return dZ, None, None, dweight, *(total.view_as(V) for total, V in zip(totals, mixings, strict=True))


class SingleProduct(torch.autograd.Function):
    """`single_product` of a contiguous state, and its gradient."""

    @staticmethod
    def forward(ctx: Any, Z: Tensor, weight: Tensor) -> Tensor:
        """The product, (channels, modes, 1)."""
        ctx.save_for_backward(Z, weight)
        A, (width, modes, _) = torch.empty_like(Z), Z.shape
        P, K = _single_block(width)
        _single[(triton.cdiv(modes, K),)](Z, weight, A, modes, WIDTH=width, P=P, K=K)
        return A

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Of the state and of the weights."""
        Z, weight = ctx.saved_tensors
        dZ, dweight = torch.empty_like(Z), torch.empty_like(weight)
        width, modes, _ = Z.shape
        dA, (P, K) = gradients[0].contiguous(), _single_block(width)
        _single_backward[(triton.cdiv(modes, K),)](dA, Z, weight, dZ, dweight, modes, WIDTH=width, P=P, K=K)
        return dZ, dweight


def _channel_options(width: int, batch: int) -> dict[str, int]:
    return {"WIDTH": width, "P": padded(width), "S": min(64, padded(batch)), "num_warps": 4}


def _single_block(width: int) -> tuple[int, int]:
    P = triton.next_power_of_2(width)
    return P, max(1, BLOCK // P**2)


def _tiling(Z: Tensor, mixings: Sequence[Tensor], axis: int) -> tuple[int, int, dict[str, Any]]:
    """A channel as (left, size of the axis, right), the batch being part of the right, and how a program cuts it."""
    size, right = mixings[axis].shape[1], Z.shape[2]
    for V in mixings[axis + 1 :]:
        right *= V.shape[1]
    P = padded(size)
    return (
        Z.shape[1] * Z.shape[2] // (size * right),
        right,
        {"SIZE": size, "P": P, "C": min(COLUMNS[P], padded(right)), "num_warps": 2},
    )


def padded(size: int) -> int:
    """The side of a tile that holds so many rows."""
    return max(16, triton.next_power_of_2(size))


def precision_of(Z: Tensor) -> str:
    """The precision of products with this state: that of autocast or of the state, or what torch is set to."""
    if torch.is_autocast_enabled("cuda") or Z.dtype == torch.bfloat16:
        return "bfloat16"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def processors(device: torch.device) -> int:
    """How many programs run at a time, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
