"""A step of Muon for many small matrices in one kernel: momentum, orthogonalisation and update, one program each.

The matrix stays on the chip through all Newton-Schulz rounds, so that the step moves no more bytes than one of AdamW.
A complex matrix A + iB is the real one of twice the side, [[A, −B], [B, A]], which keeps its form through the rounds.
See `training.optimizers.Muon` for the equations.
"""

import triton
import triton.language as tl
from torch import Tensor

from transform_once.kernels.layer import padded, product

LARGEST = 128  # rows of a real matrix that a program can hold, with as many columns or fewer rows and more columns
WARPS = {256: 2, 512: 2, 1024: 2, 2048: 4, 4096: 4}  # by entries of the tile that holds it; larger ones 8


@triton.jit
def _update(
    W, G, M, rate, momentum, decay, size, a, b, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, ROUNDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, P)[:, None], tl.arange(0, Q)[None, :]
    if PAIRS:
        place = ((i % ROWS) * COLUMNS + j % COLUMNS) * 2 + ((i >= ROWS) != (j >= COLUMNS)).to(tl.int32)
        place += tl.program_id(0).to(tl.int64) * (2 * ROWS * COLUMNS)
        inside = (i < 2 * ROWS) & (j < 2 * COLUMNS)
        sign, own = tl.where((i < ROWS) & (j >= COLUMNS), -1.0, 1.0), inside & (j < COLUMNS)
    else:
        place = tl.program_id(0).to(tl.int64) * ROWS * COLUMNS + i * COLUMNS + j
        inside = (i < ROWS) & (j < COLUMNS)
        sign, own = 1.0, inside
    g = tl.load(G + place, mask=inside, other=0.0)
    m = tl.load(M + place, mask=inside, other=0.0)
    m += (1.0 - momentum) * (g - m)
    x = (g + momentum * (m - g)) * sign
    tl.debug_barrier()  # of a pair both places have been read before one is written
    tl.store(M + place, m, mask=own)
    x = x / tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)  # or squares of small numbers would vanish
    x = x / tl.maximum(tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) * (0.5 if PAIRS else 1.0)), 1e-20)
    for _ in tl.static_range(ROUNDS):
        p = product(x, tl.trans(x), PRECISION)
        p = b * p + c * product(p, p, PRECISION)
        x = a * x + product(p, x, PRECISION)
    eta = tl.load(rate)
    w = tl.load(W + place, mask=own, other=0.0)
    tl.store(W + place, w * (1.0 - eta * decay) - eta * size * x, mask=own)


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
    P, Q = padded(rows * (1 + pairs)), padded(columns * (1 + pairs))
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
