"""Copies between fields whose samples lie apart and modes whose samples lie side by side, in Triton.

A tile is read along one of the two axes that change places and written along the other, both whole lines of memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # at most, of each of the two axes


@triton.jit
def _copy(
    X, Y, seconds, thirds, rows, columns, x_first, x_second, x_third, x_row, x_column, y_first, y_second, y_third,
    y_row, y_column, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    outer = tl.program_id(0).to(tl.int64)
    first, second, third = outer // (seconds * thirds), (outer // thirds) % seconds, outer % thirds
    r, c = tl.program_id(1) * R + tl.arange(0, R)[:, None], tl.program_id(2) * C + tl.arange(0, C)[None, :]
    inside = (r < rows) & (c < columns)
    x = tl.load(X + first * x_first + second * x_second + third * x_third + r * x_row + c * x_column, mask=inside)
    tl.store(Y + first * y_first + second * y_second + third * y_third + r * y_row + c * y_column, x, mask=inside)


def _launch(X: Tensor, Y: Tensor, row: int, column: int) -> None:
    """Copy X into Y, of the same shape, in tiles of these two of their five axes."""
    order = (*(axis for axis in range(5) if axis not in (row, column)), row, column)
    first, seconds, thirds, rows, columns = (X.shape[axis] for axis in order)
    R, C = (min(TILE, triton.next_power_of_2(size)) for size in (rows, columns))
    grid = (first * seconds * thirds, triton.cdiv(rows, R), triton.cdiv(columns, C))
    strides = [tensor.stride(axis) for tensor in (X, Y) for axis in order]
    _copy[grid](X, Y, seconds, thirds, rows, columns, *strides, R=R, C=C, num_warps=4)


def permuted(X: Tensor, order: tuple[int, ...]) -> Tensor:
    """`X`, of five axes, with its axes in that order, contiguous."""
    y: Tensor = _Permuted.apply(X, order)
    return y


class _Permuted(torch.autograd.Function):
    """`permuted` and its gradient, the same the other way round."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.back = tuple(order.index(axis) for axis in range(X.ndim))
        Y = torch.empty([X.shape[axis] for axis in order], device=X.device, dtype=X.dtype)
        if X.numel():
            _launch(X, Y.permute(ctx.back), order[-1], 4)
        return Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Permuted.apply(gradients[0], ctx.back), None
