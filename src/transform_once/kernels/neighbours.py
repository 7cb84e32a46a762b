"""A layer of T1Grid but for its transforms, in Triton: maps of channels and of their differences to neighbours.

    u = s + Σ_j W_j v_j + b,    y = P₂ (4 q(u / 4) ⊙ q(P₁ u + c₁)) + c₂ + v,    q(z) = z / √(1 + z²)

Fields are (samples, channels, points), the points those of a grid of one to three axes, row by row. v_0 is v, v_1 and
v_2 are its first and second differences along the first axis, (right − left) / 2 and (right + left) / 2 − v, and so on:
around the end where the field is periodic, otherwise the last point has itself for a neighbour.
`models.t1_grid.GridLayer` computes the same in torch.

s is what the waves give: a field, or, where they are few, coefficients whose field is made where it is needed
(`kernels.waves`).

Neighbours are read from a turned copy, (samples, points, channels), where a point's channels lie side by side: a row of
points that begins anywhere cannot be read in whole words. Going there, u is kept. Going back, the first kernel comes to
the gradient of u, which is that of s too, and of the weights behind it; the others, for which all of it must be there,
to those of W and of v. Whatever a program needs is read before its first product, so that it waits for memory once;
matrices are named one by one, 5 and 6 for the last axis, since Triton has no lists. Sums have a fixed order, so runs
repeat bit by bit.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once import kernels
from transform_once.kernels.layer import padded, precision_of, processors, product
from transform_once.kernels.layout import permuted
from transform_once.kernels.perceptron import bias_column, matrix_of, parts_for, store_part, store_sums, summed
from transform_once.kernels.waves import MOST_ROWS, mixed, of_matrices, of_waves

POINTS = 64  # of a program at a time
WARPS = 4
PROGRAMS = 4  # of a processor, on the way there
MOST_CHANNELS = {"bfloat16": 64, "tf32": 32, "ieee": 0}  # that fit on the chip, where this is the fast way


@triton.jit
def _bounded(z, MOST: tl.constexpr):
    """z / √(1 + (z / MOST)²) and its slope; beyond 1e9, where squares may overflow, it is ± MOST and stays so."""
    z = tl.maximum(z, -1e9, propagate_nan=tl.PropagateNan.ALL)
    z = tl.minimum(z, 1e9, propagate_nan=tl.PropagateNan.ALL)
    part = z * (1.0 / MOST)
    root = tl.rsqrt(1.0 + part * part)
    return z * root, root * root * root


@triton.jit
def _where(number, points, C: tl.constexpr):
    """Sample and points of a tile."""
    tiles = tl.cdiv(points, C)
    return (number // tiles).to(tl.int64), (number % tiles) * C + tl.arange(0, C)


@triton.jit
def _tile(sample, point, points, WIDTH: tl.constexpr, P: tl.constexpr):
    """Where all channels of some points lie in fields, and what of it exists."""
    channel = tl.arange(0, P)[:, None]
    return sample * WIDTH * points + (channel * points + point[None, :]), (channel < WIDTH) & (point[None, :] < points)


@triton.jit
def _rows(sample, point, points, exists, WIDTH: tl.constexpr, P: tl.constexpr):
    """The same in turned fields, (samples, points, channels), for the points that exist."""
    channel = tl.arange(0, P)[None, :]
    return sample * WIDTH * points + (point[:, None] * WIDTH + channel), (channel < WIDTH) & exists[:, None]


@triton.jit
def _load(X, sample, point, points, WIDTH: tl.constexpr, P: tl.constexpr):
    place, inside = _tile(sample, point, points, WIDTH, P)
    return tl.load(X + place, mask=inside, other=0.0)


@triton.jit
def _store(X, value, sample, point, points, WIDTH: tl.constexpr, P: tl.constexpr):
    place, inside = _tile(sample, point, points, WIDTH, P)
    tl.store(X + place, value, mask=inside)


@triton.jit
def _load_rows(X, sample, point, points, exists, WIDTH: tl.constexpr, P: tl.constexpr):
    place, inside = _rows(sample, point, points, exists, WIDTH, P)
    return tl.load(X + place, mask=inside, other=0.0)


@triton.jit
def _near(
    point, STEP: tl.constexpr, AXIS: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    PERIODIC: tl.constexpr,
):  # fmt: skip
    """The point before (STEP −1) or after (STEP 1) on an axis, and whether this one is the first or last there."""
    SIZE: tl.constexpr = N1 if AXIS == 0 else (N2 if AXIS == 1 else N3)
    STRIDE: tl.constexpr = N2 * N3 if AXIS == 0 else (N3 if AXIS == 1 else 1)
    here = point // STRIDE if N1 * N2 * N3 == SIZE * STRIDE else (point // STRIDE) % SIZE
    edge = here == (SIZE - 1 if STEP > 0 else 0)
    near = tl.where(edge, point + STEP * (STRIDE - SIZE * STRIDE) if PERIODIC else point, point + STEP * STRIDE)
    return near, edge


@triton.jit
def _sides(
    X, here, sample, point, points, AXIS: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, N1: tl.constexpr,
    N2: tl.constexpr, N3: tl.constexpr, PERIODIC: tl.constexpr,
):  # fmt: skip
    """First and second differences along an axis, one point a row; `here` has the points themselves."""
    before, _ = _near(point, -1, AXIS, N1, N2, N3, PERIODIC)
    after, _ = _near(point, 1, AXIS, N1, N2, N3, PERIODIC)
    x = _load_rows(X, sample, before, points, point < points, WIDTH, P).to(tl.float32)
    y = _load_rows(X, sample, after, points, point < points, WIDTH, P).to(tl.float32)
    return 0.5 * (y - x), 0.5 * (x + y) - here.to(tl.float32)


@triton.jit
def _sides_transposed(
    X, here, sample, point, points, AXIS: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, N1: tl.constexpr,
    N2: tl.constexpr, N3: tl.constexpr, PERIODIC: tl.constexpr,
):  # fmt: skip
    """The transposes of both differences: the points that have this one before or after them take their parts."""
    before, first = _near(point, -1, AXIS, N1, N2, N3, PERIODIC)
    after, last = _near(point, 1, AXIS, N1, N2, N3, PERIODIC)
    own = here.to(tl.float32)
    if PERIODIC:
        x = _load_rows(X, sample, before, points, point < points, WIDTH, P).to(tl.float32)
        y = _load_rows(X, sample, after, points, point < points, WIDTH, P).to(tl.float32)
    else:  # a first or last point is its own neighbour, and nobody's from beyond
        x = _load_rows(X, sample, before, points, (point < points) & ~first, WIDTH, P).to(tl.float32)
        y = _load_rows(X, sample, after, points, (point < points) & ~last, WIDTH, P).to(tl.float32)
        x += tl.where(last[:, None], own, 0.0)
        y += tl.where(first[:, None], own, 0.0)
    return 0.5 * (x - y), 0.5 * (x + y) - own


@triton.jit
def _block(W, j, WIDTH: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The j-th of the square matrices that lie side by side in W, filled up with zeros."""
    first, second = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    row, column = (second, first) if TRANSPOSED else (first, second)
    place = row * (COUNT * WIDTH) + j * WIDTH + column
    return tl.load(W + place, mask=(row < WIDTH) & (column < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _forward(
    S, B, V, T, W, b, P1, c1, P2, c2, U, Y, samples, points, WIDTH: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, Q: tl.constexpr, AXES: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    PERIODIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = 2 * AXES + 1
    w0 = _block(W, 0, WIDTH, COUNT, P, False)
    if AXES > 0:
        w5, w6 = _block(W, COUNT - 2, WIDTH, COUNT, P, False), _block(W, COUNT - 1, WIDTH, COUNT, P, False)
    if AXES > 1:
        w3, w4 = _block(W, COUNT - 4, WIDTH, COUNT, P, False), _block(W, COUNT - 3, WIDTH, COUNT, P, False)
    if AXES > 2:
        w1, w2 = _block(W, COUNT - 6, WIDTH, COUNT, P, False), _block(W, COUNT - 5, WIDTH, COUNT, P, False)
    p1, p2 = matrix_of(P1, WIDTH, WIDTH, P, P), matrix_of(P2, WIDTH, WIDTH, P, P)
    bias, bias1, bias2 = bias_column(b, WIDTH, P), bias_column(c1, WIDTH, P), bias_column(c2, WIDTH, P)
    for number in range(tl.program_id(0), samples * tl.cdiv(points, C), tl.num_programs(0)):
        sample, point = _where(number, points, C)
        v = _load(V, sample, point, points, WIDTH, P)
        if ROWS > 0:
            z, waves = of_waves(S, B, sample, point, points, ROWS, Q, WIDTH, P)
        else:
            s = _load(S, sample, point, points, WIDTH, P).to(tl.float32)
        v0 = _load_rows(T, sample, point, points, point < points, WIDTH, P)
        if AXES > 0:
            v5, v6 = _sides(T, v0, sample, point, points, 2, WIDTH, P, N1, N2, N3, PERIODIC)
        if AXES > 1:
            v3, v4 = _sides(T, v0, sample, point, points, 1, WIDTH, P, N1, N2, N3, PERIODIC)
        if AXES > 2:
            v1, v2 = _sides(T, v0, sample, point, points, 0, WIDTH, P, N1, N2, N3, PERIODIC)
        if ROWS > 0:
            s = product(z, waves, PRECISION)
        u = s + product(w0, tl.trans(v0), PRECISION)
        if AXES > 0:
            u += product(w5, tl.trans(v5), PRECISION) + product(w6, tl.trans(v6), PRECISION)
        if AXES > 1:
            u += product(w3, tl.trans(v3), PRECISION) + product(w4, tl.trans(v4), PRECISION)
        if AXES > 2:
            u += product(w1, tl.trans(v1), PRECISION) + product(w2, tl.trans(v2), PRECISION)
        u += bias
        _store(U, u, sample, point, points, WIDTH, P)
        gate, _ = _bounded(product(p1, u, PRECISION) + bias1, 1.0)
        term, _ = _bounded(u, 4.0)
        y = product(p2, term * gate, PRECISION) + bias2 + v.to(tl.float32)
        _store(Y, y, sample, point, points, WIDTH, P)


@triton.jit
def _backward_gate(
    U, P1, c1, P2, dY, dU, dT, parts, part_stride, samples, points, WIDTH: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of u and of all weights behind it."""
    p1, p2, bias = matrix_of(P1, WIDTH, WIDTH, P, P), matrix_of(P2, WIDTH, WIDTH, P, P), bias_column(c1, WIDTH, P)
    of_p1, of_p2 = tl.zeros((P, P), tl.float32), tl.zeros((P, P), tl.float32)
    of_b, of_c1, of_c2 = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32)
    for number in range(tl.program_id(0), samples * tl.cdiv(points, C), tl.num_programs(0)):
        sample, point = _where(number, points, C)
        u = _load(U, sample, point, points, WIDTH, P).to(tl.float32)
        dy = _load(dY, sample, point, points, WIDTH, P).to(tl.float32)
        gate, slope = _bounded(product(p1, u, PRECISION) + bias, 1.0)
        term, steep = _bounded(u, 4.0)
        of_c2 += tl.sum(dy, 1)
        of_p2 += product(dy, tl.trans(term * gate), PRECISION)
        dh = product(tl.trans(p2), dy, PRECISION)
        dz = dh * term * slope
        of_c1 += tl.sum(dz, 1)
        of_p1 += product(dz, tl.trans(u), PRECISION)
        du = product(tl.trans(p1), dz, PRECISION) + dh * gate * steep
        of_b += tl.sum(du, 1)
        _store(dU, du, sample, point, points, WIDTH, P)
        place, inside = _rows(sample, point, points, point < points, WIDTH, P)
        tl.store(dT + place, tl.trans(du), mask=inside)
    own = parts + tl.program_id(0) * part_stride
    store_sums(own, of_b, WIDTH, P)
    store_part(own + WIDTH, of_p1, WIDTH, WIDTH, P, P)
    store_sums(own + WIDTH * (WIDTH + 1), of_c1, WIDTH, P)
    store_part(own + WIDTH * (WIDTH + 2), of_p2, WIDTH, WIDTH, P, P)
    store_sums(own + WIDTH * (2 * WIDTH + 2), of_c2, WIDTH, P)


@triton.jit
def _backward_maps(
    T, dU, parts, part_stride, samples, points, WIDTH: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    AXES: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, PERIODIC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one W_j, by the second index of the program."""
    COUNT: tl.constexpr = 2 * AXES + 1
    j = tl.program_id(1)
    total = tl.zeros((P, P), tl.float32)
    for number in range(tl.program_id(0), samples * tl.cdiv(points, C), tl.num_programs(0)):
        sample, point = _where(number, points, C)
        du = _load(dU, sample, point, points, WIDTH, P)
        v = _load_rows(T, sample, point, points, point < points, WIDTH, P).to(tl.float32)
        if AXES > 0:
            if j >= COUNT - 2:
                first, second = _sides(T, v, sample, point, points, 2, WIDTH, P, N1, N2, N3, PERIODIC)
                v = tl.where(j == COUNT - 2, first, second)
            elif j >= COUNT - 4 and j > 0:
                first, second = _sides(T, v, sample, point, points, 1, WIDTH, P, N1, N2, N3, PERIODIC)
                v = tl.where(j == COUNT - 4, first, second)
            elif j > 0:
                first, second = _sides(T, v, sample, point, points, 0, WIDTH, P, N1, N2, N3, PERIODIC)
                v = tl.where(j == COUNT - 6, first, second)
        total += product(du, v, PRECISION)
    row, column = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    own = parts + tl.program_id(0) * part_stride + row * (COUNT * WIDTH) + j * WIDTH + column
    tl.store(own, total, mask=(row < WIDTH) & (column < WIDTH))


@triton.jit
def _backward_input(
    W, dT, dY, dZ, A, dV, samples, points, WIDTH: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    Q: tl.constexpr, AXES: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, PERIODIC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of v."""
    COUNT: tl.constexpr = 2 * AXES + 1
    w0 = _block(W, 0, WIDTH, COUNT, P, True)
    if AXES > 0:
        w5, w6 = _block(W, COUNT - 2, WIDTH, COUNT, P, True), _block(W, COUNT - 1, WIDTH, COUNT, P, True)
    if AXES > 1:
        w3, w4 = _block(W, COUNT - 4, WIDTH, COUNT, P, True), _block(W, COUNT - 3, WIDTH, COUNT, P, True)
    if AXES > 2:
        w1, w2 = _block(W, COUNT - 6, WIDTH, COUNT, P, True), _block(W, COUNT - 5, WIDTH, COUNT, P, True)
    for number in range(tl.program_id(0), samples * tl.cdiv(points, C), tl.num_programs(0)):
        sample, point = _where(number, points, C)
        d = _load_rows(dT, sample, point, points, point < points, WIDTH, P)
        dy = _load(dY, sample, point, points, WIDTH, P)
        if ROWS > 0:
            z, waves = of_waves(dZ, A, sample, point, points, ROWS, Q, WIDTH, P)
        if AXES > 0:
            d5, d6 = _sides_transposed(dT, d, sample, point, points, 2, WIDTH, P, N1, N2, N3, PERIODIC)
        if AXES > 1:
            d3, d4 = _sides_transposed(dT, d, sample, point, points, 1, WIDTH, P, N1, N2, N3, PERIODIC)
        if AXES > 2:
            d1, d2 = _sides_transposed(dT, d, sample, point, points, 0, WIDTH, P, N1, N2, N3, PERIODIC)
        dv = product(w0, tl.trans(d), PRECISION)
        if ROWS > 0:
            dv += product(z, waves, PRECISION)
        if AXES > 0:
            dv += product(w5, tl.trans(d5), PRECISION) + product(w6, tl.trans(d6), PRECISION)
        if AXES > 1:
            dv += product(w3, tl.trans(d3), PRECISION) + product(w4, tl.trans(d4), PRECISION)
        if AXES > 2:
            dv += product(w1, tl.trans(d1), PRECISION) + product(w2, tl.trans(d2), PRECISION)
        _store(dV, dv + dy.to(tl.float32), sample, point, points, WIDTH, P)


def fits(v: Tensor) -> bool:
    """Whether these kernels are the fast way for such fields."""
    return v.shape[1] <= MOST_CHANNELS[precision_of(v)]


def few(waves: Sequence[int], v: Tensor) -> bool:
    """Whether waves of such a block are so few that their fields are made where they are needed."""
    return 2 * math.prod(waves) <= MOST_ROWS and all(m <= n for m, n in zip(waves, v.shape[2:], strict=True))


def grid_layer(
    s: Tensor | None,
    v: Tensor,
    weights: Sequence[Tensor],
    periodic: bool,
    waves: Sequence[Tensor] = (),
) -> Tensor:
    """y of fields (samples, channels, *points) with the weights [W_0, W_1, …] or W_0, then b, P₁, c₁, P₂, c₂.

    s is a field, or None where `few` waves give it: then `waves` are their matrices K, the rows that take them from a
    field, real parts before imaginary ones, and the rows that make one of them.
    """
    flat = [weight.flatten(1) if weight.ndim > 1 else weight for weight in weights]
    given = s.flatten(2).contiguous() if s is not None else None
    K, there, back = waves or (None, None, None)
    y = _GridLayer.apply(given, K, v.flatten(2).contiguous(), tuple(v.shape[2:]), there, back, periodic, *flat)
    return y.unflatten(2, v.shape[2:])


class _GridLayer(torch.autograd.Function):
    """`grid_layer` and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        s: Tensor | None,
        K: Tensor | None,
        v: Tensor,
        grid: tuple[int, ...],
        there: Tensor | None,
        back: Tensor | None,
        periodic: bool,
        *weights: Tensor,
    ) -> Tensor:
        samples, width, points = v.shape
        ctx.precision = precision_of(v)
        ctx.sizes = {"WIDTH": width, "P": padded(width), "C": POINTS, "PRECISION": ctx.precision, "num_warps": WARPS}
        n = (*(1,) * (3 - len(grid)), *grid)
        axes = len(grid) if weights[0].shape[1] > width else 0  # without neighbours there is one map
        ctx.grid = {"AXES": axes, "N1": n[0], "N2": n[1], "N3": n[2], "PERIODIC": periodic}
        rows = 0 if K is None else 2 * len(K)
        ctx.waves = {"ROWS": rows, "Q": padded(rows)}
        Z = None
        if K is None or there is None:
            turned = permuted(v[None, None], (0, 1, 2, 4, 3))[0, 0]
        else:
            turned = v.new_empty(samples, points, width)
            Z, s = mixed(v, there, K, ctx.precision, turned)
        u, y = torch.empty_like(v), torch.empty_like(v)
        programs = min(PROGRAMS * processors(v.device), samples * triton.cdiv(points, POINTS))
        options = {**ctx.sizes, **ctx.waves, **ctx.grid, "num_stages": 1}
        _forward[(programs,)](s, back, v, turned, *weights, u, y, samples, points, **options)
        ctx.save_for_backward(u, turned, Z, K, there, back, *weights)
        return y

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        u, turned, Z, K, there, back, W, _, P1, c1, P2, _ = ctx.saved_tensors
        samples, width, points = u.shape
        dy, du, dv, dt = gradients[0].contiguous(), *(torch.empty_like(x) for x in (u, u, turned))
        shapes = [W.shape, (width,), (width, width), (width,), (width, width), (width,)]
        parts, tiles = parts_for(u, shapes), samples * triton.cdiv(points, POINTS)
        gates, maps = parts[:, W.numel() :], (parts, parts.stride(0), samples, points)
        _backward_gate[(len(parts),)](
            *(u, P1, c1, P2, dy, du, dt, gates, parts.stride(0), samples, points), **ctx.sizes, num_stages=1
        )
        options = {**ctx.sizes, **ctx.grid, "num_stages": 1}
        programs = min(PROGRAMS * processors(u.device), tiles)
        of_weights: list[Tensor] = []
        of_K: list[Tensor] = []

        def of_input() -> None:
            dz = None
            if K is not None:
                of_coefficients, dz = mixed(du, back, K, ctx.precision)
            _backward_input[(programs,)](W, dt, dy, dz, there, dv, samples, points, **ctx.waves, **options)
            if K is not None:
                of_K.append(of_matrices(Z, of_coefficients, K, ctx.precision))

        def of_maps() -> None:
            _backward_maps[(len(parts), 2 * ctx.grid["AXES"] + 1)](turned, du, *maps, **options)
            of_weights[:] = summed(parts, shapes)

        kernels.side_by_side([of_maps, of_input])
        return *((du, None) if K is None else (None, *of_K)), dv, None, None, None, None, *of_weights
