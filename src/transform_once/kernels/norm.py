"""Batch norm of channels-last maps in Triton: two small kernels each way.

    y = (x − mean)·w/√(var + ε) + b,   dx = w/√(var + ε)·(dy − mean(dy) − x̂·mean(dy·x̂))

The first kernel sums over parts of the rows (all samples and points), the second adds the parts up and maps. Sums are
of distances to the first row, so that a large mean does no harm, and in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once import kernels

ROWS, CHANNELS = 64, 32  # of a tile
MOST_PARTS = 32


@triton.jit
def _sums(
    X, dY, mean, scale, parts, rows, channels, BACKWARD: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """A part of Σ(x − x₀) and Σ(x − x₀)², or of Σdy and Σdy·x̂."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = channel < channels
    first, second = tl.zeros((ROWS, CHANNELS), tl.float32), tl.zeros((ROWS, CHANNELS), tl.float32)
    if BACKWARD:
        origin = tl.load(mean + channel, mask=there, other=0.0)
        size = tl.load(scale + channel, mask=there, other=0.0)
    else:
        origin = tl.load(X + channel, mask=there, other=0.0).to(tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & there
        x = tl.load(X + row * channels + channel, mask=inside, other=0.0).to(tl.float32) - origin
        if BACKWARD:
            d = tl.load(dY + row * channels + channel, mask=inside, other=0.0).to(tl.float32)
            first += d
            second += d * x * size
        else:
            x = tl.where(inside, x, 0.0)
            first += x
            second += x * x
    own = parts + 2 * tl.program_id(1) * channels + channel
    tl.store(own, tl.sum(first, 0)[None, :], mask=there)
    tl.store(own + channels, tl.sum(second, 0)[None, :], mask=there)


@triton.jit
def _total(parts, channel, channels, count, which: tl.constexpr, PARTS: tl.constexpr):
    """A sum over all parts, (1, CHANNELS)."""
    part = tl.arange(0, PARTS)[:, None]
    inside = (part < count) & (channel < channels)
    return tl.sum(tl.load(parts + (2 * part + which) * channels + channel, mask=inside, other=0.0), 0)[None, :]


@triton.jit
def _normalize(
    X, weight, bias, Y, mean, scale, running_mean, running_variance, parts, rows, channels, count, momentum, epsilon,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = channel < channels
    average = _total(parts, channel, channels, count, 0, PARTS) / rows
    variance = tl.maximum(_total(parts, channel, channels, count, 1, PARTS) / rows - average * average, 0.0)
    average += tl.load(X + channel, mask=there, other=0.0).to(tl.float32)
    size = 1.0 / tl.sqrt(variance + epsilon)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & there
    x = tl.load(X + row * channels + channel, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + channel, mask=there, other=0.0) * size
    y = (x - average) * w + tl.load(bias + channel, mask=there, other=0.0)
    tl.store(Y + row * channels + channel, y, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(mean + channel, average, mask=there)
        tl.store(scale + channel, size, mask=there)
        old = tl.load(running_mean + channel, mask=there, other=0.0)
        tl.store(running_mean + channel, old + momentum * (average - old), mask=there)
        old = tl.load(running_variance + channel, mask=there, other=0.0)
        unbiased = variance * (rows / tl.maximum(rows - 1.0, 1.0))
        tl.store(running_variance + channel, old + momentum * (unbiased - old), mask=there)


@triton.jit
def _gradient(
    X, dY, weight, dX, dweight, dbias, mean, scale, parts, rows, channels, count, PARTS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = channel < channels
    of_bias = _total(parts, channel, channels, count, 0, PARTS)
    of_weight = _total(parts, channel, channels, count, 1, PARTS)
    size = tl.load(scale + channel, mask=there, other=0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place, inside = row * channels + channel, (row < rows) & there
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + channel, mask=there, other=0.0)
    d = tl.load(dY + place, mask=inside, other=0.0).to(tl.float32)
    d = d - (of_bias + x * size * of_weight) / rows
    tl.store(dX + place, d * size * tl.load(weight + channel, mask=there, other=0.0), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(dweight + channel, of_weight, mask=there)
        tl.store(dbias + channel, of_bias, mask=there)


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    momentum: float,
    epsilon: float,
) -> Tensor:
    """Batch norm in training of (batch, channels, *size), channels last in memory; the running statistics move on."""
    return BatchNorm.apply(x, weight, bias, running_mean, running_variance, momentum, epsilon)


class BatchNorm(torch.autograd.Function):
    """`batch_norm` and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        """The normalised maps; the rest are running mean and variance, momentum and epsilon."""
        *running, momentum, epsilon = rest
        x = _channels_last(x)
        rows, channels, count = _shape(x)
        mean, scale = torch.empty(2, channels, device=x.device, dtype=torch.float32)
        parts = torch.empty(count, 2, channels, device=x.device, dtype=torch.float32)
        tile = {"ROWS": ROWS, "CHANNELS": CHANNELS}
        across = triton.cdiv(channels, CHANNELS)
        _sums[(across, count)](x, x, mean, scale, parts, rows, channels, BACKWARD=False, **tile)
        y = torch.empty_like(x)
        _normalize[(triton.cdiv(rows, ROWS), across)](
            *(x, weight, bias, y, mean, scale, *running, parts, rows, channels, count, momentum, epsilon),
            PARTS=MOST_PARTS,
            **tile,
        )
        ctx.save_for_backward(x, weight, mean, scale)
        return y

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of the maps, of weight and bias."""
        x, weight, mean, scale = ctx.saved_tensors
        d = _channels_last(gradients[0])
        rows, channels, count = _shape(x)
        parts = torch.empty(count, 2, channels, device=x.device, dtype=torch.float32)
        tile = {"ROWS": ROWS, "CHANNELS": CHANNELS}
        across = triton.cdiv(channels, CHANNELS)
        _sums[(across, count)](x, d, mean, scale, parts, rows, channels, BACKWARD=True, **tile)
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        _gradient[(triton.cdiv(rows, ROWS), across)](
            *(x, d, weight, dx, dweight, dbias, mean, scale, parts, rows, channels, count), PARTS=MOST_PARTS, **tile
        )
        return dx, dweight, dbias, None, None, None, None


def _channels_last(x: Tensor) -> Tensor:
    """The same values with the channels last in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _shape(x: Tensor) -> tuple[int, int, int]:
    """Rows, channels, and into how many parts the rows are cut."""
    channels = x.shape[1]
    rows = x.numel() // channels
    return rows, channels, max(1, min(MOST_PARTS, triton.cdiv(rows, ROWS), 8 * 32 * CHANNELS // channels))
