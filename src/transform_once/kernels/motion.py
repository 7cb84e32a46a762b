"""Random motions of kept modes in one kernel: what `data.symmetries.Motion.modes` does in a hundred steps.

In the Fourier basis, along an axis, with θ = 2π·(wave number)·offset, a coefficient is turned together with the other
one of its pair,

    cosine ← cos θ · cosine + sin θ · sine,   sine ← ±(cos θ · sine − sin θ · cosine),

so that in two dimensions a moved coefficient is a sum of four. Of cosines a mirror changes the sign of every second
one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # coefficients of a program


@triton.jit
def _turn(index, offset, sign):
    """What a coefficient is made of: its own factor, that of its partner, and where the partner is."""
    turns = ((index + 1) // 2).to(tl.float64) * offset
    angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
    is_sine = (index % 2 == 0) & (index > 0)
    own = tl.cos(angle) * tl.where(is_sine, sign, 1.0)
    other = tl.where(index == 0, 0.0, tl.sin(angle) * tl.where(is_sine, -sign, 1.0))
    return own, other, tl.where(index == 0, 0, tl.where(is_sine, index - 1, index + 1))


@triton.jit
def _move(
    X, Y, choice, shift, signs, offsets, directions, factors, swapped, constants, rows, channels, x_sample, x_row,
    y_sample, y_row, y_mode, M1: tl.constexpr, M2: tl.constexpr, COUNT: tl.constexpr, FACTORS: tl.constexpr,
    SWAPS: tl.constexpr, CONSTANTS: tl.constexpr, COSINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    pick = tl.load(choice + sample)
    first, second = tl.load(offsets + 2 * pick), tl.load(offsets + 2 * pick + 1)
    for number in tl.static_range(COUNT):
        s = tl.load(shift + sample * COUNT + number)
        first += s * tl.load(directions + 2 * pick * COUNT + number)
        second += s * tl.load(directions + (2 * pick + 1) * COUNT + number)
    mode = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = mode < M1 * M2
    i, j = mode // M2, mode % M2
    if SWAPS:
        flip = tl.load(swapped + pick) != 0
        i, j = tl.where(flip, j, i), tl.where(flip, i, j)
    sign1, sign2 = tl.load(signs + 2 * pick).to(tl.float32), tl.load(signs + 2 * pick + 1).to(tl.float32)
    base = X + sample.to(tl.int64) * x_sample + row * x_row
    here = tl.load(base + i * M2 + j, mask=inside, other=0.0)
    if COSINES:
        y = here * tl.where(i % 2 == 1, sign1, 1.0) * tl.where(j % 2 == 1, sign2, 1.0)
    else:
        own1, other1, partner1 = _turn(i, first, sign1)
        own2, other2, partner2 = _turn(j, second, sign2)
        y = own1 * own2 * here
        y += own1 * other2 * tl.load(base + i * M2 + partner2, mask=inside, other=0.0)
        y += other1 * own2 * tl.load(base + partner1 * M2 + j, mask=inside, other=0.0)
        y += other1 * other2 * tl.load(base + partner1 * M2 + partner2, mask=inside, other=0.0)
    channel = row % channels
    factor = tl.load(factors + pick * FACTORS + channel % FACTORS).to(tl.float32)
    y *= factor
    if CONSTANTS:
        y += tl.where(mode == 0, (factor - 1.0) * tl.load(constants + channel).to(tl.float32), 0.0)
    place = Y + sample.to(tl.int64) * y_sample + row * y_row + mode * y_mode
    tl.store(place, y, mask=inside)


def move_modes(
    X: Tensor,
    choice: Tensor,
    shift: Tensor,
    signs: Tensor,
    offsets: Tensor,
    directions: Tensor,
    factors: Tensor,
    swapped: Tensor | None,
    constants: Tensor | None,
    *,
    cosines: bool,
) -> Tensor:
    """Coefficients (batch, ..., channels, m₁, m₂) moved: `cosines`, or those of the Fourier basis.

    The tables are those of `data.symmetries`, a row per map. `constants` (channels,) are added to the constant modes
    before the motion and taken away after it. Of single frames the result lies in memory with the batch last, as models
    want it.
    """
    X = X.contiguous()
    batch, channels, (m1, m2) = len(X), X.shape[-3], X.shape[-2:]
    rows = X[0].numel() // (m1 * m2)
    if X.ndim == 4:
        Y = torch.empty(channels, m1, m2, batch, device=X.device, dtype=X.dtype).permute(3, 0, 1, 2)
        strides = (1, m1 * m2 * batch, batch)
    else:
        Y = torch.empty_like(X)
        strides = (rows * m1 * m2, m1 * m2, 1)
    _move[(batch * rows, triton.cdiv(m1 * m2, BLOCK))](
        *(X, Y, choice, shift, signs, offsets, directions, factors, swapped, constants),
        *(rows, channels, rows * m1 * m2, m1 * m2, *strides, m1, m2, shift.shape[1], factors.shape[1]),
        *(swapped is not None, constants is not None, cosines, BLOCK),
    )
    return Y
