"""The relative L2 error of kept modes in one kernel each way.

    loss_i = √( Σ_r s_r² (‖Ŷ_ir − Y_ir‖² + tail_ir) / E_i ),   dŶ_ir = dloss_i / loss_i · s_r² / E_i · (Ŷ_ir − Y_ir)

with r over the frames and channels of a sample, s_r² the squared scale of the channel and E_i the sum of energies.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transform_once import kernels

BLOCK = 1024  # modes that a program reads at a time


@triton.jit
def _energy(energy, sample, rows):
    total = tl.load(energy + sample * rows)
    for row in range(1, rows):
        total += tl.load(energy + sample * rows + row)
    return total


@triton.jit
def _forward(
    prediction, target, tail, energy, scales, loss, rows, channels, modes, p_sample, p_row, p_mode, BLOCK: tl.constexpr
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    whole = _energy(energy, sample, rows)
    total = 0.0
    for row in range(rows):
        squares = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, modes, BLOCK):
            mode = first + tl.arange(0, BLOCK)
            inside = mode < modes
            y = tl.load(target + (sample * rows + row) * modes + mode, mask=inside, other=0.0).to(tl.float32)
            place = prediction + sample * p_sample + row * p_row + mode * p_mode
            error = tl.load(place, mask=inside, other=0.0).to(tl.float32) - y
            squares += error * error
        # The ratio is taken before it is rounded: physical units can be of any size.
        weight = (tl.load(scales + row % channels) / whole).to(tl.float32)
        total += weight * (tl.sum(squares, 0) + tl.load(tail + sample * rows + row).to(tl.float32))
    least = tl.maximum(total, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
    tl.store(loss + sample, tl.sqrt(least))


@triton.jit
def _backward(
    prediction, target, energy, scales, loss, gradient, g_sample, result, rows, channels, modes, p_sample, p_row,
    p_mode, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weight = (tl.load(scales + row % channels) / _energy(energy, sample, rows)).to(tl.float32)
    weight *= tl.load(gradient + sample * g_sample) / tl.load(loss + sample)
    mode = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = mode < modes
    y = tl.load(target + (sample * rows + row) * modes + mode, mask=inside, other=0.0).to(tl.float32)
    place = sample * p_sample + row * p_row + mode * p_mode
    error = tl.load(prediction + place, mask=inside, other=0.0).to(tl.float32) - y
    tl.store(result + place, weight * error, mask=inside)


def relative_l2(prediction: Tensor, target: Tensor, tail: Tensor, energy: Tensor, scales: Tensor) -> Tensor:
    """Prediction and target (batch, frames, channels, modes), tail and energy (batch, frames, channels) to (batch,).

    `scales` are the squared scales of the channels; energies and scales are best in float64.
    """
    return RelativeL2.apply(prediction, target, tail, energy, scales)


class RelativeL2(torch.autograd.Function):
    """`relative_l2` and its gradient. A prediction may lie in memory in any order of batch, channels and modes."""

    @staticmethod
    def forward(ctx: Any, prediction: Tensor, target: Tensor, tail: Tensor, energy: Tensor, scales: Tensor) -> Tensor:
        """The relative error of each sample."""
        batch, frames, channels, modes = target.shape
        if frames > 1 and prediction.stride(1) != channels * prediction.stride(2):
            prediction = prediction.contiguous()
        target, tail, energy = target.contiguous(), tail.contiguous(), energy.contiguous()
        loss = torch.empty(batch, device=target.device, dtype=torch.float32)
        ctx.shape = (frames * channels, channels, modes, *(prediction.stride(axis) for axis in (0, 2, 3)))
        _forward[(batch,)](prediction, target, tail, energy, scales, loss, *ctx.shape, BLOCK=BLOCK)
        ctx.save_for_backward(prediction, target, energy, scales, loss)
        return loss

    @staticmethod
    @kernels.once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of the prediction."""
        prediction, target, energy, scales, loss = ctx.saved_tensors
        result = torch.empty_like(prediction)  # keeps the strides
        rows, _, modes = ctx.shape[:3]
        grid = (len(target), rows, triton.cdiv(modes, BLOCK))
        _backward[grid](
            *(prediction, target, energy, scales, loss, gradients[0], gradients[0].stride(0), result, *ctx.shape),
            BLOCK=BLOCK,
        )
        return result, None, None, None, None
