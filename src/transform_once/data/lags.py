"""What frames of trajectories have outside the kept modes: its products from frame to frame, and what is remembered."""

import torch
from torch import Tensor

LAGS = 16  # frames back to which products are known
NOTHING = 1e-12  # of the energy: what is less outside is rounding


class Lags:
    """Products of what frames have outside the kept modes with those before, of blocks of frames in their order."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []

    def products(self, z: Tensor, Z: Tensor, samples: int, follows: bool) -> Tensor:
        """Of normalised frames (units, c, *grid) and their kept modes: (samples, frames, LAGS, c).

        Parseval: what is inside has as products those of the kept modes. `follows` says that the frames before these
        were those of the last call.
        """
        own = [v.flatten(2).unflatten(0, (samples, -1)).transpose(1, 2) for v in (z, Z)]  # (samples, c, frames, points)
        all_of = [torch.cat(pair, 2) for pair in zip(self.before, own, strict=True)] if follows else own
        whole, kept = (v @ w.mT for v, w in zip(own, all_of, strict=True))
        frames, known = whole.shape[2:]
        place = torch.arange(known - frames, known)[:, None] - torch.arange(1, LAGS + 1)
        place = place.to(z.device)
        found = (whole - kept).gather(3, place.clamp_min(0).expand(*whole.shape[:2], -1, -1))
        self.before = [v[:, :, -LAGS:] for v in all_of]
        return found.masked_fill(place < 0, 0.0).permute(0, 2, 3, 1)


def memory_of(tail: Tensor, energy: Tensor, lagged: Tensor, scale: Tensor) -> Tensor | None:
    """How much of what a frame has outside the frames 1, 2, … later still have: factors of least squares (lags, c).

    They lie between −1 and 1. `tail` (n, t, c) are energies outside, `lagged` (n, t, LAGS, c) the products, both of
    frames that were divided by `scale` (c,), `energy` (n, t, c) those of whole frames that were not. None where nothing
    lies outside.
    """
    frames = tail.shape[1]
    found = torch.zeros(min(lagged.shape[2], frames - 1), tail.shape[2], dtype=torch.float64)
    rounding = NOTHING * energy.sum((0, 1)) / scale.square()
    for lag in range(1, len(found) + 1):
        before = tail[:, : frames - lag].sum((0, 1))
        factor = lagged[:, lag:, lag - 1].sum((0, 1)) / before
        found[lag - 1] = factor.clamp(-1, 1).where(before > rounding, 0.0)
    return found.float() if found.any() else None
