"""The head of T1 in Triton: two maps of the channels with a sine between them, for every mode and sample.

    forward    y = W₂ sin(W₁ z)
    backward   dh = (W₂ᵀ dy) ∘ cos(W₁ z),   dz = W₁ᵀ dh,   dW₁ = Σ dh zᵀ,   dW₂ = Σ dy sin(W₁ z)ᵀ

The hidden channels, more than twice the state, never leave the chip; they are computed again on the way back.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once.kernels.layer import MOST_CHANNELS, padded, precision_of, processors, product, sine

COLUMNS = 64  # modes and samples of a program at a time
MOST_OUTPUTS = 16


@triton.jit
def _load(pointer, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A matrix, filled up with zeros."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointer + i * columns + j, mask=(i < rows) & (j < columns), other=0.0).to(tl.float32)


@triton.jit
def _forward(
    Z, W1, W2, Y, columns, WIDTH: tl.constexpr, OUT: tl.constexpr, HIDDEN: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)[None, :]
    channel, out = tl.arange(0, P)[:, None], tl.arange(0, Q)[:, None]
    z = tl.load(Z + channel * columns + column, mask=(channel < WIDTH) & (column < columns), other=0.0).to(tl.float32)
    h = sine(product(_load(W1, HIDDEN, WIDTH, HIDDEN, P), z, PRECISION))
    y = tl.dot(_load(W2, OUT, HIDDEN, Q, HIDDEN), h, input_precision="tf32" if PRECISION == "bfloat16" else PRECISION)
    tl.store(Y + out * columns + column, y, mask=(out < OUT) & (column < columns))


@triton.jit
def _backward(
    Z, W1, W2, dY, dZ, parts1, parts2, columns, WIDTH: tl.constexpr, OUT: tl.constexpr, HIDDEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    w1, w2 = _load(W1, HIDDEN, WIDTH, HIDDEN, P), _load(W2, OUT, HIDDEN, Q, HIDDEN)
    channel, out = tl.arange(0, P)[:, None], tl.arange(0, Q)[:, None]
    total1, total2 = tl.zeros((HIDDEN, P), tl.float32), tl.zeros((Q, HIDDEN), tl.float32)
    for first in range(tl.program_id(0) * C, columns, tl.num_programs(0) * C):
        column = first + tl.arange(0, C)[None, :]
        place, inside = channel * columns + column, (channel < WIDTH) & (column < columns)
        z = tl.load(Z + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dY + out * columns + column, mask=(out < OUT) & (column < columns), other=0.0).to(tl.float32)
        h = product(w1, z, PRECISION)
        total2 += product(dy, tl.trans(sine(h)), PRECISION)
        dh = product(tl.trans(w2), dy, PRECISION) * sine(h + 1.5707963267948966)
        total1 += product(dh, tl.trans(z), PRECISION)
        tl.store(dZ + place, product(tl.trans(w1), dh, PRECISION), mask=inside)
    program, i = tl.program_id(0), tl.arange(0, HIDDEN)[:, None]
    j = tl.arange(0, P)[None, :]
    tl.store(parts1 + (program * HIDDEN + i) * WIDTH + j, total1, mask=j < WIDTH)
    j = tl.arange(0, HIDDEN)[None, :]
    tl.store(parts2 + (program * OUT + out) * HIDDEN + j, total2, mask=out < OUT)


def fused_head(Z: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """W₂ sin(W₁ z) of a state (channels, modes, batch), to (outputs, modes, batch) in float32."""
    return FusedHead.apply(Z.contiguous(), inner, outer)


def fits(Z: Tensor, outer: Tensor) -> bool:
    """Whether `fused_head` is the fast way: few outputs, in less than full float32."""
    return len(outer) <= MOST_OUTPUTS and len(Z) <= MOST_CHANNELS and precision_of(Z) != "ieee"


class FusedHead(torch.autograd.Function):
    """`fused_head` of a contiguous state, and its gradient."""

    @staticmethod
    def forward(ctx: Any, Z: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        """The outputs."""
        columns = Z.shape[1] * Z.shape[2]
        Y = torch.empty(len(outer), *Z.shape[1:], device=Z.device, dtype=torch.float32)
        ctx.options = _options(inner, outer, precision_of(Z))
        _forward[(triton.cdiv(columns, COLUMNS),)](Z, inner, outer, Y, columns, **ctx.options)
        ctx.save_for_backward(Z, inner, outer)
        return Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Of the state and of the two maps."""
        Z, inner, outer = ctx.saved_tensors
        columns = Z.shape[1] * Z.shape[2]
        programs = min(processors(Z.device), triton.cdiv(columns, COLUMNS))
        parts1 = torch.empty(programs, *inner.shape, device=Z.device, dtype=torch.float32)
        parts2 = torch.empty(programs, *outer.shape, device=Z.device, dtype=torch.float32)
        dY, dZ = gradients[0].contiguous(), torch.empty_like(Z)
        _backward[(programs,)](Z, inner, outer, dY, dZ, parts1, parts2, columns, **ctx.options, num_stages=1)
        return dZ, parts1.sum(0), parts2.sum(0)


def _options(inner: Tensor, outer: Tensor, precision: str) -> dict[str, Any]:
    hidden, width = inner.shape
    sizes = {"WIDTH": width, "OUT": len(outer), "HIDDEN": hidden, "P": padded(width), "Q": padded(len(outer))}
    return {**sizes, "C": COLUMNS, "PRECISION": precision, "num_warps": 8}
