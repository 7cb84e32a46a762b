"""The lift of T1 in Triton: a map of input, coordinate and constant channels, in k-space, in one kernel each way.

    forward    z = [W b] s,   dW and db = Σ dz sᵀ,   dx = W_inputᵀ dz

with s the spectra of the inputs (per sample), of the coordinates and of the constant 1 (the same for all samples).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once import kernels
from transform_once.kernels.layer import MOST_CHANNELS, padded, precision_of, processors, product

COLUMNS = 128  # modes and samples of a program at a time
ROWS = 16  # input, coordinate and constant channels together, at most


@triton.jit
def _channels(X, S, column, columns, batch, INPUTS: tl.constexpr, TOTAL: tl.constexpr, ROWS: tl.constexpr):
    """All channels that are mapped, (ROWS, columns)."""
    row = tl.arange(0, ROWS)[:, None]
    modes = columns // batch
    is_input = (row < INPUTS) & (column < columns)
    x = tl.load(X + row * columns + column, mask=is_input, other=0.0).to(tl.float32)
    is_fixed = (row >= INPUTS) & (row < TOTAL) & (column < columns)
    return x + tl.load(S + (row - INPUTS) * modes + column // batch, mask=is_fixed, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    X, S, W, b, Z, columns, batch, INPUTS: tl.constexpr, TOTAL: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    s = _channels(X, S, column, columns, batch, INPUTS, TOTAL, ROWS)
    channel, row = tl.arange(0, P)[:, None], tl.arange(0, ROWS)[None, :]
    w = tl.load(W + channel * (TOTAL - 1) + row, mask=(channel < WIDTH) & (row < TOTAL - 1), other=0.0)
    w += tl.load(b + channel + 0 * row, mask=(channel < WIDTH) & (row == TOTAL - 1), other=0.0)
    z = tl.dot(w, s, input_precision="tf32x3")
    place = channel.to(tl.int64) * columns + column
    tl.store(Z + place, z, mask=(channel < WIDTH) & (column < columns))


@triton.jit
def _backward(
    X, S, dZ, parts, columns, batch, INPUTS: tl.constexpr, TOTAL: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """This program's part of Σ dz sᵀ."""
    channel, row = tl.arange(0, P)[:, None], tl.arange(0, ROWS)[None, :]
    total = tl.zeros((P, ROWS), tl.float32)
    for first in range(tl.program_id(0) * C, columns, tl.num_programs(0) * C):
        column = first + tl.arange(0, C)[None, :]
        s = _channels(X, S, column, columns, batch, INPUTS, TOTAL, ROWS)
        place, inside = channel.to(tl.int64) * columns + column, (channel < WIDTH) & (column < columns)
        total += product(tl.load(dZ + place, mask=inside, other=0.0), tl.trans(s), "tf32")
    tl.store(parts + (tl.program_id(0) * WIDTH + channel) * ROWS + row, total, mask=channel < WIDTH)


def fits(X: Tensor, coordinates: Tensor, weight: Tensor) -> bool:
    """Whether `fused_lift` is the fast way: few channels, in less than full float32."""
    few = len(X) + len(coordinates) <= ROWS and len(weight) <= MOST_CHANNELS
    return few and precision_of(X) != "ieee"


def fused_lift(X: Tensor, coordinates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Inputs (channels, modes, batch) and coordinates (channels, modes), the constant 1 last, to (width, modes, batch).

    The state is bfloat16 where products are, and float32 otherwise.
    """
    return FusedLift.apply(X.contiguous(), coordinates, weight, bias)


class FusedLift(torch.autograd.Function):
    """`fused_lift` of contiguous inputs, and its gradient."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, coordinates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The first state."""
        inputs, modes, batch = X.shape
        width, columns = len(weight), modes * batch
        dtype = torch.bfloat16 if precision_of(X) == "bfloat16" else torch.float32
        Z = torch.empty(width, modes, batch, device=X.device, dtype=dtype)
        sizes = {"INPUTS": inputs, "TOTAL": inputs + len(coordinates), "WIDTH": width, "P": padded(width)}
        ctx.options = {**sizes, "C": COLUMNS, "ROWS": ROWS}
        _forward[(triton.cdiv(columns, COLUMNS),)](X, coordinates, weight, bias, Z, columns, batch, **ctx.options)
        ctx.save_for_backward(X, coordinates, weight)
        return Z

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of the inputs, where they need one, and of weight and bias."""
        X, coordinates, weight = ctx.saved_tensors
        dZ, columns = gradients[0].contiguous(), X.shape[1] * X.shape[2]
        programs = min(processors(X.device), triton.cdiv(columns, COLUMNS))
        parts = torch.empty(programs, len(weight), ROWS, device=X.device, dtype=torch.float32)
        _backward[(programs,)](X, coordinates, dZ, parts, columns, X.shape[2], **ctx.options)
        total, inputs = parts.sum(0), weight.shape[1]
        dX = None
        if ctx.needs_input_grad[0]:
            dX = (weight[:, : len(X)].T.to(dZ.dtype) @ dZ.flatten(1)).view_as(X).to(X.dtype)
        return dX, None, total[:, :inputs], total[:, inputs]
