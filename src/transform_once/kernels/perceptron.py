"""Maps of the channels at every point, or mode, in Triton: what lies between two products never leaves the chip.

Fields are (samples, channels, points); a state of T1 is one sample whose points are modes and samples.

    perceptron     y = W₂ f(W₁ x + b₁) + b₂                                       heads and lifts
    fno_pointwise  y = P₂ g(P₁ u + c₁) + c₂ + v, or y = u,   u = g(s + W v + b)    an FNO layer but for its transform

Going back, hidden channels are computed again. Each program adds up its part of the gradients of the weights, and the
parts are then added in a fixed order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once import kernels
from transform_once.kernels.layer import activation, padded, precision_of, processors, product

POINTS = 64  # of a program at a time
COLUMNS = 32  # of the parts that are summed
WARPS, PROGRAMS = 4, 4  # of a program, and programs of a processor, on the way there
MOST_CHANNELS, MOST_HIDDEN = 64, 128


@triton.jit
def matrix_of(pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """A matrix, filled up with zeros to P×Q."""
    i, j = tl.arange(0, P)[:, None], tl.arange(0, Q)[None, :]
    return tl.load(pointer + i * COLUMNS + j, mask=(i < ROWS) & (j < COLUMNS), other=0.0).to(tl.float32)


@triton.jit
def bias_column(pointer, ROWS: tl.constexpr, P: tl.constexpr):
    """A column, filled up with zeros."""
    i = tl.arange(0, P)[:, None]
    return tl.load(pointer + i, mask=i < ROWS, other=0.0).to(tl.float32)


@triton.jit
def store_part(pointer, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """A program's part of the gradient of a matrix."""
    i, j = tl.arange(0, P)[:, None], tl.arange(0, Q)[None, :]
    tl.store(pointer + i * COLUMNS + j, total, mask=(i < ROWS) & (j < COLUMNS))


@triton.jit
def store_sums(pointer, total, ROWS: tl.constexpr, P: tl.constexpr):
    """A program's part of the gradient of a bias."""
    i = tl.arange(0, P)
    tl.store(pointer + i, total, mask=i < ROWS)


@triton.jit
def _tile(number, points, CHANNELS: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """Where tile `number` of fields with so many channels lies, and what of it exists."""
    tiles = tl.cdiv(points, C)
    sample = (number // tiles).to(tl.int64)
    channel, point = tl.arange(0, P)[:, None], (number % tiles) * C + tl.arange(0, C)[None, :]
    return (sample * CHANNELS + channel) * points + point, (channel < CHANNELS) & (point < points)


@triton.jit
def _perceptron(
    X, W1, b1, W2, b2, Y, points, IN: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, P: tl.constexpr,
    H: tl.constexpr, Q: tl.constexpr, BIASES: tl.constexpr, SINE: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    place, inside = _tile(tl.program_id(0), points, IN, P, C)
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    h = product(matrix_of(W1, HIDDEN, IN, H, P), x, PRECISION)
    if BIASES:
        h += bias_column(b1, HIDDEN, H)
    value, _ = activation(h, SINE)
    w2 = matrix_of(W2, OUT, HIDDEN, Q, H)
    y = product(w2, value, "tf32" if PRECISION == "bfloat16" else PRECISION)
    if BIASES:
        y += bias_column(b2, OUT, Q)
    place, inside = _tile(tl.program_id(0), points, OUT, Q, C)
    tl.store(Y + place, y, mask=inside)


@triton.jit
def _perceptron_backward(
    X, W1, b1, W2, dY, dX, parts, part_stride, samples, points, IN: tl.constexpr, HIDDEN: tl.constexpr,
    OUT: tl.constexpr, P: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, BIASES: tl.constexpr, SINE: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, OF_INPUT: tl.constexpr,
):  # fmt: skip
    w1, w2 = matrix_of(W1, HIDDEN, IN, H, P), matrix_of(W2, OUT, HIDDEN, Q, H)
    total1, total2 = tl.zeros((H, P), tl.float32), tl.zeros((Q, H), tl.float32)
    sums1, sums2 = tl.zeros((H,), tl.float32), tl.zeros((Q,), tl.float32)
    for number in range(tl.program_id(0), samples * tl.cdiv(points, C), tl.num_programs(0)):
        place, inside = _tile(number, points, IN, P, C)
        x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
        there, exists = _tile(number, points, OUT, Q, C)
        dy = tl.load(dY + there, mask=exists, other=0.0).to(tl.float32)
        h = product(w1, x, PRECISION)
        if BIASES:
            h += bias_column(b1, HIDDEN, H)
        value, slope = activation(h, SINE)
        total2 += product(dy, tl.trans(value), PRECISION)
        dh = product(tl.trans(w2), dy, PRECISION) * slope
        total1 += product(dh, tl.trans(x), PRECISION)
        if BIASES:
            sums1 += tl.sum(dh, 1)
            sums2 += tl.sum(dy, 1)
        if OF_INPUT:
            tl.store(dX + place, product(tl.trans(w1), dh, PRECISION), mask=inside)
    own = parts + tl.program_id(0) * part_stride
    store_part(own, total1, HIDDEN, IN, H, P)
    store_part(own + HIDDEN * IN, total2, OUT, HIDDEN, Q, H)
    if BIASES:
        store_sums(own + HIDDEN * (IN + OUT), sums1, HIDDEN, H)
        store_sums(own + HIDDEN * (IN + OUT + 1), sums2, OUT, Q)


@triton.jit
def _pointwise(
    S, V, W, b, P1, c1, P2, c2, Y, samples, points, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, P: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, PERCEPTRON: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    w = matrix_of(W, WIDTH, WIDTH, P, P)
    if PERCEPTRON:
        p1, p2 = matrix_of(P1, HIDDEN, WIDTH, H, P), matrix_of(P2, WIDTH, HIDDEN, P, H)
    for number in range(tl.program_id(0), samples * tl.cdiv(points, C), tl.num_programs(0)):
        place, inside = _tile(number, points, WIDTH, P, C)
        v = tl.load(V + place, mask=inside, other=0.0).to(tl.float32)
        z = product(w, v, PRECISION) + bias_column(b, WIDTH, P)
        y, _ = activation(z + tl.load(S + place, mask=inside, other=0.0).to(tl.float32), False)
        if PERCEPTRON:
            h, _ = activation(product(p1, y, PRECISION) + bias_column(c1, HIDDEN, H), False)
            y = product(p2, h, PRECISION) + bias_column(c2, WIDTH, P) + v
        tl.store(Y + place, y, mask=inside)


@triton.jit
def _pointwise_backward(
    S, V, W, b, P1, c1, P2, dY, dS, dV, parts, part_stride, samples, points, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    P: tl.constexpr, H: tl.constexpr, C: tl.constexpr, PERCEPTRON: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    w = matrix_of(W, WIDTH, WIDTH, P, P)
    if PERCEPTRON:
        p1, p2 = matrix_of(P1, HIDDEN, WIDTH, H, P), matrix_of(P2, WIDTH, HIDDEN, P, H)
    of_w, of_p1, of_p2 = tl.zeros((P, P), tl.float32), tl.zeros((H, P), tl.float32), tl.zeros((P, H), tl.float32)
    of_b, of_c1, of_c2 = tl.zeros((P,), tl.float32), tl.zeros((H,), tl.float32), tl.zeros((P,), tl.float32)
    for number in range(tl.program_id(0), samples * tl.cdiv(points, C), tl.num_programs(0)):
        place, inside = _tile(number, points, WIDTH, P, C)
        v = tl.load(V + place, mask=inside, other=0.0).to(tl.float32)
        z = product(w, v, PRECISION) + bias_column(b, WIDTH, P)
        u, slope = activation(z + tl.load(S + place, mask=inside, other=0.0).to(tl.float32), False)
        d = tl.load(dY + place, mask=inside, other=0.0).to(tl.float32)
        if PERCEPTRON:
            h, slope_h = activation(product(p1, u, PRECISION) + bias_column(c1, HIDDEN, H), False)
            of_c2 += tl.sum(d, 1)
            of_p2 += product(d, tl.trans(h), PRECISION)
            dh = product(tl.trans(p2), d, PRECISION) * slope_h
            of_c1 += tl.sum(dh, 1)
            of_p1 += product(dh, tl.trans(u), PRECISION)
            dz = tl.where(inside, product(tl.trans(p1), dh, PRECISION) * slope, 0.0)
        else:
            dz = d * slope
        of_b += tl.sum(dz, 1)
        of_w += product(dz, tl.trans(v), PRECISION)
        tl.store(dS + place, dz, mask=inside)
        dv = product(tl.trans(w), dz, PRECISION)
        if PERCEPTRON:
            dv += d
        tl.store(dV + place, dv, mask=inside)
    own = parts + tl.program_id(0) * part_stride
    store_part(own, of_w, WIDTH, WIDTH, P, P)
    own += WIDTH * WIDTH
    store_sums(own, of_b, WIDTH, P)
    if PERCEPTRON:
        own += WIDTH
        store_part(own, of_p1, HIDDEN, WIDTH, H, P)
        own += HIDDEN * WIDTH
        store_sums(own, of_c1, HIDDEN, H)
        own += HIDDEN
        store_part(own, of_p2, WIDTH, HIDDEN, P, H)
        own += WIDTH * HIDDEN
        store_sums(own, of_c2, WIDTH, P)


def fits(x: Tensor, *weights: Tensor) -> bool:
    """Whether these kernels are the fast way: channels that fit on the chip, in less than full float32."""
    channels = max([x.shape[1], *(weight.shape[0] for weight in weights[1:])])
    return channels <= MOST_CHANNELS and weights[0].shape[0] <= MOST_HIDDEN and precision_of(x) != "ieee"


def perceptron(
    x: Tensor, inner: Tensor, outer: Tensor, biases: tuple[Tensor, Tensor] | None, sine: bool, dtype: torch.dtype
) -> Tensor:
    """W₂ f(W₁ x + b₁) + b₂ of fields (samples, channels, *points), f a sine or a GELU, in the given dtype."""
    b1, b2 = biases or (None, None)
    y = _Perceptron.apply(x.flatten(2).contiguous(), inner.flatten(1), outer.flatten(1), b1, b2, sine, dtype)
    return y.unflatten(2, x.shape[2:])


def fno_pointwise(s: Tensor, v: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Of fields (samples, channels, *points), u = g(s + W v + b), or with six weights P₂ g(P₁ u + c₁) + c₂ + v.

    The weights are W, b, P₁, c₁, P₂, c₂, or the first two.
    """
    flat = [weight.flatten(1) if weight.ndim > 1 else weight for weight in weights]
    y = _Pointwise.apply(s.flatten(2).contiguous(), v.flatten(2).contiguous(), *flat)
    return y.unflatten(2, v.shape[2:])


class _Perceptron(torch.autograd.Function):
    """`perceptron` and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        inner: Tensor,
        outer: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
        sine: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        samples, channels, points = x.shape
        hidden, out = len(inner), len(outer)
        sizes = {"IN": channels, "HIDDEN": hidden, "OUT": out}
        sizes |= {"P": padded(channels), "H": padded(hidden), "Q": padded(out)}
        how = {"BIASES": b1 is not None, "SINE": sine, "C": POINTS, "PRECISION": precision_of(x), "num_warps": 8}
        ctx.options = {**sizes, **how}
        y = torch.empty(samples, out, points, device=x.device, dtype=dtype)
        _perceptron[(samples * triton.cdiv(points, POINTS),)](x, inner, b1, outer, b2, y, points, **ctx.options)
        ctx.save_for_backward(x, inner, outer, b1)
        return y

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, outer, b1 = ctx.saved_tensors
        samples, _, points = x.shape
        biases = [] if b1 is None else [(len(inner),), (len(outer),)]
        shapes = [inner.shape, outer.shape, *biases]
        dx = torch.empty_like(x)
        parts = parts_for(x, shapes)
        _perceptron_backward[(len(parts),)](
            *(x, inner, b1, outer, gradients[0].contiguous(), dx, parts, parts.stride(0), samples, points),
            **ctx.options,
            OF_INPUT=ctx.needs_input_grad[0],
            num_stages=1,
        )
        dinner, douter, *rest = summed(parts, shapes)
        db1, db2 = rest or (None, None)
        return dx if ctx.needs_input_grad[0] else None, dinner, douter, db1, db2, None, None


class _Pointwise(torch.autograd.Function):
    """`fno_pointwise` and its gradient."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        samples, width, points = v.shape
        hidden = len(weights[2]) if weights[2:] else 1
        sizes = {"WIDTH": width, "HIDDEN": hidden, "P": padded(width), "H": padded(hidden), "C": POINTS}
        how = {"PERCEPTRON": bool(weights[2:]), "PRECISION": precision_of(v), "num_warps": WARPS}
        ctx.options = {**sizes, **how}
        y = torch.empty_like(v)
        given = (*weights, *(None,) * (6 - len(weights)))
        programs = min(PROGRAMS * processors(v.device), samples * triton.cdiv(points, POINTS))
        _pointwise[(programs,)](s, v, *given, y, samples, points, **ctx.options)
        ctx.save_for_backward(s, v, *weights)
        return y

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        s, v, *weights = ctx.saved_tensors
        samples, _, points = v.shape
        shapes = [weight.shape for weight in weights]
        ds, dv, parts = torch.empty_like(s), torch.empty_like(v), parts_for(v, shapes)
        given = (*weights, *(None,) * (6 - len(weights)))
        _pointwise_backward[(len(parts),)](
            *(s, v, *given[:5], gradients[0].contiguous(), ds, dv, parts, parts.stride(0), samples, points),
            **ctx.options,
            num_stages=1,
        )
        return ds, dv, *summed(parts, shapes)


@triton.jit
def _sum(parts, total, count, size, R: tl.constexpr, C: tl.constexpr):
    """All rows at once: a program waits for memory once."""
    row, column = tl.arange(0, R)[:, None], tl.program_id(0) * C + tl.arange(0, C)
    some = tl.load(parts + row * size + column[None, :], mask=(row < count) & (column[None, :] < size), other=0.0)
    tl.store(total + column, tl.sum(some, 0), mask=column < size)


def parts_for(x: Tensor, shapes: Sequence[Sequence[int]]) -> Tensor:
    """Room for the part of every program, of all weights one after the other."""
    programs = min(2 * processors(x.device), x.shape[0] * triton.cdiv(x.shape[2], POINTS))
    size = sum(torch.Size(shape).numel() for shape in shapes)
    return torch.empty(programs, size, device=x.device, dtype=torch.float32)


def summed(parts: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The gradients of all weights from the parts of all programs."""
    (count, size), sizes = parts.shape, [torch.Size(shape).numel() for shape in shapes]
    total, rows = parts.new_empty(size), triton.next_power_of_2(count)
    _sum[(triton.cdiv(size, COLUMNS),)](parts, total, count, size, R=rows, C=COLUMNS, num_warps=8)
    return [part.view(*shape) for part, shape in zip(total.split(sizes), shapes, strict=True)]
