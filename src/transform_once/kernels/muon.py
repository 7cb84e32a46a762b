"""A step of Muon for many small matrices in one kernel: momentum, orthogonalisation and update, one program each.

The matrix stays on the chip through all Newton-Schulz rounds, so that the step moves no more bytes than one of AdamW.
See `training.optimizers.Muon` for the equations.
"""

import triton
import triton.language as tl
from torch import Tensor

from transform_once.kernels.layer import padded, product

LARGEST = 128  # rows of a real matrix that a program can hold, with as many columns or fewer rows and more columns
# By entries of the tile that holds it, or its real parts; larger ones 8.
WARPS = {256: 2, 512: 2, 1024: 2, 2048: 4, 4096: 4}


@triton.jit
def _orthogonal(x, a, b, c, ROUNDS: tl.constexpr, PRECISION: tl.constexpr):
    """Rounds of x ← ax + (bp + cp²)x with p = xxᵀ."""
    for _ in range(ROUNDS):
        p = product(x, tl.trans(x), PRECISION)
        p = b * p + c * product(p, p, PRECISION)
        x = a * x + product(p, x, PRECISION)
    return x


@triton.jit
def _unitary(x, y, a, b, c, ROUNDS: tl.constexpr, PRECISION: tl.constexpr):
    """The same of x + iy; p + iq is its product with its adjoint."""
    for _ in range(ROUNDS):
        p = product(x, tl.trans(x), PRECISION) + product(y, tl.trans(y), PRECISION)
        q = product(y, tl.trans(x), PRECISION)
        q -= tl.trans(q)
        square = product(p, p, PRECISION) - product(q, q, PRECISION)
        turn = product(p, q, PRECISION) + product(q, p, PRECISION)
        p, q = b * p + c * square, b * q + c * turn
        real = product(p, x, PRECISION) - product(q, y, PRECISION)
        y = a * y + product(p, y, PRECISION) + product(q, x, PRECISION)
        x = a * x + real
    return x, y


@triton.jit
def _update(
    W, G, M, rate, momentum, decay, size, a, b, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, ROUNDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    NUMBERS: tl.constexpr = 2 if PAIRS else 1
    i, j = tl.arange(0, P)[:, None], tl.arange(0, NUMBERS * Q)[None, :]
    place = (tl.program_id(0).to(tl.int64) * ROWS + i) * (NUMBERS * COLUMNS) + j
    inside = (i < ROWS) & (j < NUMBERS * COLUMNS)
    g = tl.load(G + place, mask=inside, other=0.0)
    m = tl.load(M + place, mask=inside, other=0.0)
    w = tl.load(W + place, mask=inside, other=0.0)
    eta = tl.load(rate)
    m += (1.0 - momentum) * (g - m)
    tl.store(M + place, m, mask=inside)
    x = g + momentum * (m - g)
    x = x / tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)  # or squares of small numbers would vanish
    x = x / tl.maximum(tl.sqrt(tl.sum(tl.sum(x * x, 1), 0)), 1e-20)
    if PAIRS:
        real, imaginary = tl.split(tl.reshape(x, (P, Q, 2)))
        real, imaginary = _unitary(real, imaginary, a, b, c, ROUNDS, PRECISION)
        x = tl.reshape(tl.join(real, imaginary), (P, 2 * Q))
    else:
        x = _orthogonal(x, a, b, c, ROUNDS, PRECISION)
    tl.store(W + place, w * (1.0 - eta * decay) - eta * size * x, mask=inside)


def fits(rows: int, columns: int) -> bool:
    """Whether a program can hold a real matrix of this size."""
    return rows <= LARGEST and padded(rows) * padded(columns) <= LARGEST**2


def muon_step(
    weights: Tensor,
    gradients: Tensor,
    momenta: Tensor,
    rate: Tensor,
    momentum: float,
    decay: float,
    size: float,
    coefficients: tuple[float, float, float],
    rounds: int,
    pairs: bool = False,
) -> None:
    """Update weights and momenta (batch, rows, columns), contiguous, in place; `size` is that of a step of rate 1.

    With `pairs` a last axis holds real and imaginary parts.
    """
    rows, columns = weights.shape[1:3]
    P, Q = padded(rows), padded(columns)
    _update[(len(weights),)](
        *(weights, gradients, momenta, rate, momentum, decay, size, *coefficients),
        ROWS=rows,
        COLUMNS=columns,
        PAIRS=pairs,
        P=P,
        Q=Q,
        ROUNDS=rounds,
        PRECISION="bfloat16" if weights.is_cuda else "ieee",
        num_warps=WARPS.get(P * Q, 8),
    )
