"""A step of Muon for many small matrices in one kernel: momentum, orthogonalisation and update, one program each.

The matrix stays on the chip through all Newton-Schulz rounds, so that the step moves no more bytes than one of AdamW.
See `training.optimizers.Muon` for the equations.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

LARGEST = 64  # side of a matrix that a program can hold


@triton.jit
def _update(
    W, G, M, rate, momentum, decay, size, a, b, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    place = tl.program_id(0).to(tl.int64) * ROWS * COLUMNS + i * COLUMNS + j
    inside = (i < ROWS) & (j < COLUMNS)
    g = tl.load(G + place, mask=inside, other=0.0)
    m = tl.load(M + place, mask=inside, other=0.0)
    m += (1.0 - momentum) * (g - m)
    tl.store(M + place, m, mask=inside)
    x = g + momentum * (m - g)
    x = x / tl.maximum(tl.sqrt(tl.sum(tl.sum(x * x, 1), 0)), 1e-20)
    for _ in tl.static_range(ROUNDS):
        h = x.to(tl.bfloat16)
        p = tl.dot(h, tl.trans(h))
        q = p.to(tl.bfloat16)
        p = b * p + c * tl.dot(q, q)
        x = a * x + tl.dot(p.to(tl.bfloat16), h)
    eta = tl.load(rate)
    w = tl.load(W + place, mask=inside, other=0.0)
    tl.store(W + place, w * (1.0 - eta * decay) - eta * size * x, mask=inside)


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
) -> None:
    """Update weights and momenta (batch, rows, columns), contiguous, in place; `size` is that of a step of rate 1."""
    rows, columns = weights.shape[-2:]
    P = max(16, triton.next_power_of_2(max(rows, columns)))
    _update[(math.prod(weights.shape[:-2]),)](
        *(weights, gradients, momenta, rate, momentum, decay, size, *coefficients),
        ROWS=rows,
        COLUMNS=columns,
        P=P,
        ROUNDS=rounds,
        num_warps=4 if P > 32 else 2,
    )
