"""Points of a field that have no value, such as those inside an obstacle or over land: what to put there."""

import torch
from torch import Tensor

from transform_once.spectral.modes import blocks, double, grid_of
from transform_once.spectral.transforms import Modes, Transform, get_transform

ROUNDS = 8  # of conjugate gradients: more lower the tail by a few percent, and let values in wide holes grow


def fill(y: Tensor, missing: Tensor, modes: Modes, transform: str = "dct") -> Tensor:
    """The fields `y` (batch, channels, *grid) with values at missing points that the kept modes can hold.

    Zeros or a mean in a hole make a jump at its rim, which takes many modes. A model that keeps few of them predicts
    what is known far better if the hole goes on smoothly: these are the values that leave the least energy outside the
    kept modes, ‖y − T⁻¹S_mᵀS_mTy‖, found by a few rounds of conjugate gradients from the mean of the known points. Once
    filled, fields need no mask, so training can run on their kept modes; judge and use a prediction at known points
    alone, `prediction.masked_fill(missing, 0)`.

    Args:
        y: Fields; what they hold at missing points, NaN too, does not matter.
        missing: True at missing points; its batch and channels may be 1.
        modes: Kept modes: an int, one per axis, or a ModeSet. Good values: those of the model.
        transform: "dct", "fourier" or "dst".
    """
    T, size = get_transform(transform), grid_of(y)
    if T.is_complex:
        raise ValueError(
            "a truncated dft is no projection, so nothing can be filled for it: use fourier, its real form"
        )
    free = [m in (1, n) for m, n in zip(missing.shape[:2], y.shape[:2], strict=True)]
    if missing.dtype != torch.bool or missing.shape[2:] != size or not all(free):
        raise ValueError(
            f"expected booleans that fit fields of shape {tuple(y.shape)}, where batch and channels may be 1; "
            f"got {missing.dtype} of shape {tuple(missing.shape)}"
        )
    T.block(modes, size)  # says what is wrong with the modes, if anything
    parts = zip(blocks(y), blocks(missing.expand(y.shape)), strict=True)
    return torch.cat([_filled(values, hole, modes, T) for values, hole in parts])


def _filled(y: Tensor, hole: Tensor, modes: Modes, T: Transform) -> Tensor:
    """One block: minimises, over the values in the hole alone, the energy of the tail."""
    known = double(y).masked_fill(hole, 0)
    mean = _sum(known) / _sum(~hole).clamp_min(1)
    found = torch.where(hole, mean, known)

    def tail_in_hole(z: Tensor) -> Tensor:
        grid = z.shape[2:]
        kept = T.inverse(T.forward(z, len(grid), modes), len(grid), grid, modes)
        return (z - kept).masked_fill(~hole, 0)

    residual = -tail_in_hole(found)
    direction, energy = residual, _sum(residual.square())
    least = torch.finfo(found.dtype).eps ** 2 * _sum(found.square())  # below it there is nothing left but rounding
    for _ in range(ROUNDS):
        image = tail_in_hole(direction)
        curvature = _sum(direction * image)
        going = (energy > least) & (curvature > 0)
        step = torch.where(going, energy / curvature, 0)
        found = found + step * direction
        residual = residual - step * image
        new = _sum(residual.square())
        direction = residual + torch.where(going, new / energy, 0) * direction
        energy = new
    return torch.where(hole, found.to(y.dtype), y)


def _sum(z: Tensor) -> Tensor:
    """Over the grid, (batch, channels, 1, …)."""
    return z.sum(tuple(range(2, z.ndim)), keepdim=True)
