"""A real matrix applied along one axis of a field in Triton, in full float32 by three products of tensor cores.

A number is split into two of tf32, and of the four products the smallest is left out: what is lost is of the order of
float32's own rounding, at several times its speed. See `spectral.transforms`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64  # rows of the matrix that a program holds
# Lines along the axis of a program, entries of the axis that it takes at a time, and its warps: the fastest on an H200.
LAST = {"C": 128, "STEP": 64, "num_warps": 4}
INNER = {"C": 64, "STEP": 32, "num_warps": 2}


@triton.jit
def _inner(
    A, X, Y, right, N: tl.constexpr, M: tl.constexpr, TRANSPOSED: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Y[l, k, r] = Σ_j A[k, j] X[l, j, r]."""
    field = tl.program_id(0).to(tl.int64)
    k = tl.program_id(2) * P + tl.arange(0, P)[:, None]
    r = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    total = tl.zeros((P, C), tl.float32)
    for first in range(0, N, STEP):
        j = first + tl.arange(0, STEP)
        place = j[None, :] * M + k if TRANSPOSED else k * N + j[None, :]
        a = tl.load(A + place, mask=(k < M) & (j[None, :] < N), other=0.0)
        x = tl.load(X + (field * N + j[:, None]) * right + r, mask=(j[:, None] < N) & (r < right), other=0.0)
        x = x.to(tl.float32)
        total += tl.dot(a, x, input_precision="tf32x3")
    tl.store(Y + (field * M + k) * right + r, total, mask=(k < M) & (r < right))


@triton.jit
def _last(
    A, X, Y, rows, N: tl.constexpr, M: tl.constexpr, TRANSPOSED: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Y[l, k] = Σ_j X[l, j] A[k, j]."""
    line = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)[:, None]
    k = tl.program_id(1) * P + tl.arange(0, P)[None, :]
    total = tl.zeros((C, P), tl.float32)
    for first in range(0, N, STEP):
        j = first + tl.arange(0, STEP)
        place = j[:, None] * M + k if TRANSPOSED else k * N + j[:, None]
        a = tl.load(A + place, mask=(k < M) & (j[:, None] < N), other=0.0)
        x = tl.load(X + line * N + j[None, :], mask=(line < rows) & (j[None, :] < N), other=0.0).to(tl.float32)
        total += tl.dot(x, a, input_precision="tf32x3")
    tl.store(Y + line * M + k, total, mask=(line < rows) & (k < M))


def along(A: Tensor, x: Tensor, axis: int) -> Tensor:
    """The product of a contiguous matrix (m, n), or of the transpose of one, with `x` along an axis of length n.

    It is summed in float32 and given in `dtype`; the field may be of less precision.
    """
    transposed = not A.is_contiguous()
    return _Along.apply(A.T if transposed else A, transposed, x, axis % x.ndim)


class _Along(torch.autograd.Function):
    """`along` and its gradient, which is the product with the transposed matrix."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, transposed: bool, x: Tensor, axis: int) -> Tensor:
        ctx.save_for_backward(A)
        ctx.transposed, ctx.axis = transposed, axis
        return _product(A, transposed, x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (A,) = ctx.saved_tensors
        return None, None, _Along.apply(A, not ctx.transposed, gradients[0], ctx.axis), None


def _product(A: Tensor, transposed: bool, x: Tensor, axis: int) -> Tensor:
    x = x.contiguous()
    m, n = A.shape[::-1] if transposed else A.shape
    left, right = x.shape[:axis].numel(), x.shape[axis + 1 :].numel()
    y = torch.empty(*x.shape[:axis], m, *x.shape[axis + 1 :], device=x.device)
    P = min(MOST_ROWS, max(16, triton.next_power_of_2(m)))
    options = {"N": n, "M": m, "TRANSPOSED": transposed, "P": P, **(LAST if right == 1 else INNER)}
    if right == 1:
        _last[(triton.cdiv(left, options["C"]), triton.cdiv(m, P))](A, x, y, left, **options)
    else:
        _inner[(left, triton.cdiv(right, options["C"]), triton.cdiv(m, P))](A, x, y, right, **options)
    return y
