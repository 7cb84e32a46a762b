"""Few waves of fields in Triton: their coefficients, and a complex matrix of channels on each, for layers of T1Grid.

    Z = A Vᵀ,    Y_k = K_k Z_k or, going back, K_kᴴ Z_k

Fields V are (samples, channels, points); A has a row for the real part of each wave, then one for each imaginary part,
and coefficients, (samples, rows, channels), are in float32. What comes of them on the points is for the kernels that
need it (`kernels.neighbours`): waves that are few are made again faster than fields are read. The transpose of a map
from waves to points is of the first kind, too, so the way back uses the same kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once.kernels.layer import padded, product

POINTS = {"bfloat16": 512, "tf32": 256, "ieee": 256}  # of a program at a time
ENTRIES = 128  # coefficients of a program: whose matrices fit on the chip
SAMPLES = 64
MOST_ROWS = 64  # real and imaginary parts of waves


@triton.jit
def of_waves(
    Z, B, sample, point, points, ROWS: tl.constexpr, Q: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The coefficients of a sample's waves, and the waves on some points."""
    channel, row = tl.arange(0, P)[:, None], tl.arange(0, Q)
    here, there = (channel < WIDTH) & (row[None, :] < ROWS), (row[:, None] < ROWS) & (point[None, :] < points)
    z = tl.load(Z + (sample * ROWS + row[None, :]) * WIDTH + channel, mask=here, other=0.0)
    return z, tl.load(B + row[:, None] * points + point[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _mixed(
    V, A, K, Z, Y, T, points, WIDTH: tl.constexpr, P: tl.constexpr, WAVES: tl.constexpr, COUNT: tl.constexpr,
    Q: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Coefficients of COUNT waves of a sample, and what their matrices make of them; T is to have the turned field."""
    sample, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COUNT
    channel, row, number = tl.arange(0, P), tl.arange(0, Q), first + tl.arange(0, COUNT)
    out = number[:, None, None] * WIDTH + channel[None, :, None]
    inner = tl.arange(0, 2 * P)[None, None, :]
    given = (number[:, None, None] < WAVES) & (channel[None, :, None] < WIDTH) & (inner < 2 * WIDTH)
    pairs = tl.load(K + out * (2 * WIDTH) + inner, mask=given, other=0.0)  # early, to be there when it is needed
    wave, exists = first + row % COUNT, (row < 2 * COUNT) & (first + row % COUNT < WAVES)
    place = tl.where(row < COUNT, wave, wave + WAVES)
    total = tl.zeros((Q, P), tl.float32)
    for start in range(0, points, C):
        point = start + tl.arange(0, C)
        inside = (channel[:, None] < WIDTH) & (point[None, :] < points)
        v = tl.load(V + (sample * WIDTH + channel[:, None]) * points + point[None, :], mask=inside, other=0.0)
        known = exists[:, None] & (point[None, :] < points)
        a = tl.load(A + place[:, None] * points + point[None, :], mask=known, other=0.0)
        turned = tl.trans(v)
        total += product(a.to(tl.float32), turned.to(tl.float32), PRECISION)
        if not BACK:
            own = (point[:, None] < tl.where(first == 0, points, 0)) & (channel[None, :] < WIDTH)
            tl.store(T + (sample * points + point[:, None]) * WIDTH + channel[None, :], turned, mask=own)
    Z += sample * 2 * WAVES * WIDTH
    Y += sample * 2 * WAVES * WIDTH
    tl.store(Z + place[:, None] * WIDTH + channel[None, :], total, mask=exists[:, None] & (channel[None, :] < WIDTH))
    tl.debug_barrier()  # all of it is there before it is read by another thread
    real, here = number[:, None] * WIDTH + channel[None, :], (number[:, None] < WAVES) & (channel[None, :] < WIDTH)
    x = tl.load(Z + real, mask=here, other=0.0)
    y = tl.load(Z + WAVES * WIDTH + real, mask=here, other=0.0)
    a, b = tl.split(tl.reshape(pairs, (COUNT, P, P, 2)))
    if BACK:
        x, y = x[:, :, None], y[:, :, None]
        tl.store(Y + real, tl.sum(a * x + b * y, 1), mask=here)
        tl.store(Y + WAVES * WIDTH + real, tl.sum(a * y - b * x, 1), mask=here)
    else:
        x, y = x[:, None, :], y[:, None, :]
        tl.store(Y + real, tl.sum(a * x - b * y, 2), mask=here)
        tl.store(Y + WAVES * WIDTH + real, tl.sum(a * y + b * x, 2), mask=here)


@triton.jit
def _parts(Z, sample, samples, wave, WIDTH: tl.constexpr, P: tl.constexpr, WAVES: tl.constexpr):
    """Real and imaginary parts of a wave, one sample a row."""
    channel = tl.arange(0, P)[None, :]
    place = (sample[:, None].to(tl.int64) * (2 * WAVES) + wave) * WIDTH + channel
    inside = (sample[:, None] < samples) & (channel < WIDTH)
    return tl.load(Z + place, mask=inside, other=0.0), tl.load(Z + place + WAVES * WIDTH, mask=inside, other=0.0)


@triton.jit
def _of_matrices(
    Z, dY, dK, samples, WIDTH: tl.constexpr, P: tl.constexpr, WAVES: tl.constexpr, S: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a wave's matrix."""
    wave = tl.program_id(0)
    real, imaginary = tl.zeros((P, P), tl.float32), tl.zeros((P, P), tl.float32)
    for start in range(0, samples, S):
        sample = start + tl.arange(0, S)
        x, y = _parts(Z, sample, samples, wave, WIDTH, P, WAVES)
        dx, dy = _parts(dY, sample, samples, wave, WIDTH, P, WAVES)
        dx, dy = tl.trans(dx), tl.trans(dy)
        real += product(dx, x, PRECISION) + product(dy, y, PRECISION)
        imaginary += product(dy, x, PRECISION) - product(dx, y, PRECISION)
    out, given = tl.arange(0, P)[:, None], tl.arange(0, 2 * P)[None, :]
    pairs = tl.reshape(tl.join(real, imaginary), (P, 2 * P))
    tl.store(dK + (wave * WIDTH + out) * (2 * WIDTH) + given, pairs, mask=(out < WIDTH) & (given < 2 * WIDTH))


def mixed(v: Tensor, rows: Tensor, K: Tensor, precision: str, turned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Coefficients of fields (samples, channels, points), and these times K, which is (waves, out, in, 2).

    `turned`, (samples, points, channels), is filled with the fields; without it the way is back, by Kᴴ.
    """
    samples, width, points = v.shape
    waves, count = len(K), ENTRIES // padded(width)
    Z, Y = (torch.empty(samples, 2 * waves, width, device=v.device, dtype=torch.float32) for _ in range(2))
    sizes = (width, padded(width), waves, count, padded(2 * count), POINTS[precision])
    _mixed[(samples, triton.cdiv(waves, count))](
        *(v, rows, K, Z, Y, turned, points, *sizes), BACK=turned is None, PRECISION=precision, num_warps=8, num_stages=1
    )
    return Z, Y


def of_matrices(Z: Tensor, dY: Tensor, K: Tensor, precision: str) -> Tensor:
    """The gradient of K where Z are the coefficients and dY the gradients of those times K."""
    (samples, _, width), dK = Z.shape, torch.empty_like(K)
    sizes = (samples, width, padded(width), len(K), SAMPLES)
    _of_matrices[(len(K),)](Z, dY, dK, *sizes, PRECISION=precision, num_warps=4, num_stages=1)
    return dK
