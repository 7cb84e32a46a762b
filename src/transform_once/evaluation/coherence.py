"""Which waves of a target follow from the same waves of the input: the waves that a linear layer has to act on.

Of every wave number k the coherence is the share of the target's energy that the best linear map of the input's
channels at k explains. It is 1 where waves are only damped and turned (diffusion, advection by a constant), and 0 where
a wave of the target comes from products of others, as the small scales of a flow do once it has turned over. Where
coherence ends, a layer that mixes channels wave by wave has nothing to learn; products and neighbours do the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.spectra import BLOCK_MEGABYTES
from transform_once.evaluation.rates import judged_values
from transform_once.spectral.transforms import get_transform

DOUBT = 4.0  # standard deviations of what chance explains, below which a shell counts as incoherent
ROUNDING = 1e-10  # of the whole: what is smaller is none
LITTLE = 0.01  # of what linear maps do not explain: what they explain may be left out
MOST = {1: 512, 2: 64, 3: 16}  # wave numbers of an axis that are looked at, by number of axes


@dataclass(frozen=True)
class Coherence:
    """Shell by shell, all wave vectors whose largest entry is 0, 1, 2, …: shares of the target's whole energy.

    Every channel is in units of its own deviation.
    """

    energy: tuple[float, ...]
    explained: tuple[float, ...]  # by linear maps, wave by wave; what chance explains is taken off

    def waves(self, tolerance: float = LITTLE) -> int:
        """The fewest wave numbers, 0 ≤ k < waves, that linear maps need.

        What such maps explain beyond is at most this part of what they explain nowhere.
        """
        left = sum(self.explained)
        most = tolerance * max(0.0, 1 - left)
        for number, share in enumerate(self.explained):
            if left <= most + ROUNDING:
                return number
            left -= share
        return len(self.explained)

    def in_words(self, what: str) -> str:
        """One sentence on `what` was explained."""
        linear = sum(self.explained)
        if linear < LITTLE:
            return f"No wave of {what} follows linearly from the same wave of the input: products of waves make it."
        if linear > 1 - LITTLE:
            return f"{what.capitalize()} follows from the input wave by wave: a linear map explains {linear:.2%} of it."
        until = f"up to wave number {self.waves() - 1}" if self.waves() < len(self.explained) else "at all wave numbers"
        return f"Linear maps, wave by wave, explain {linear:.0%} of the variance of {what}, {until}; products the rest."


def coherence(fields: Fields, most: int | None = None, history: int = 0, samples: int = 128) -> Coherence | None:
    """Coherence of input and target; of a trajectory's last frames, `history` + 1, and the change to the next.

    Looks at waves below `most`, by default all up to 512, 64 or 16 in one, two and three dimensions, and at so many
    samples, or frames, evenly spread. None where they are fewer than twice the input's channels, too few to tell
    coherence from chance, or where the target does not vary.
    """
    waves, sums = _Waves(fields.resolution, most or MOST[fields.ndim]), None
    for x, y in _pairs(fields, history, samples):
        sums = sums or _Sums(waves, x.shape[1], y.shape[1])
        sums.add(waves.of(x), waves.of(y))
    return sums.finish() if sums else None


class _Waves:
    """The waves below `most` of every axis of a grid; of a wave and its mirror one, where the last axis tells them."""

    def __init__(self, grid: Sequence[int], most: int) -> None:
        self.modes = tuple(min(most, (n + 1) // 2) for n in grid)
        held = get_transform("dft").block(self.modes, grid)
        lines = [torch.cat([torch.arange(m), torch.arange(m - n, 0)]) for m, n in zip(self.modes, held, strict=True)]
        k = torch.stack(torch.meshgrid(*lines, indexing="ij")).flatten(1)
        self.inside = (k.abs() < torch.tensor(self.modes)[:, None]).all(0)
        self.shell = k[:, self.inside].abs().amax(0)
        self.count = 1 + (k[-1, self.inside] > 0).double()  # how many waves one stands for

    def of(self, x: Tensor) -> Tensor:
        """Coefficients, (waves, channels, samples)."""
        X = get_transform("dft").forward(x, len(self.modes), self.modes).flatten(2)
        return X[:, :, self.inside].permute(2, 1, 0)


class _Sums:
    """Second moments of input and target, wave by wave."""

    def __init__(self, waves: _Waves, given: int, wanted: int) -> None:
        self.waves, self.given, self.count = waves, given, 0
        kept = len(waves.shell)
        self.mean = torch.zeros(kept, given + wanted, dtype=torch.complex128)
        self.moments = torch.zeros(kept, given + wanted, given + wanted, dtype=torch.complex128)

    def add(self, X: Tensor, Y: Tensor) -> None:
        both = torch.cat([X, Y], 1)
        if not self.count:
            self.origin = both[:, :, :1].clone()  # far offsets would leave nothing but rounding in the differences
        both = both - self.origin
        self.count += both.shape[2]
        self.mean += both.sum(2)
        self.moments += both @ both.mH

    def finish(self) -> Coherence | None:
        n, C = self.count, self.given
        mean = self.mean / n
        covariance = self.moments / n - mean[:, :, None] * mean[:, None, :].conj()
        variances = covariance.diagonal(dim1=1, dim2=2).real.clamp_min(0)
        units, offsets = (self.waves.count @ of_waves for of_waves in (variances, self.origin[:, :, 0].abs().square()))
        varying = units > ROUNDING * (units + offsets)
        if n <= 2 * C or not varying[C:].any():
            return None
        scale = units.rsqrt().where(varying, 0.0)
        covariance = scale[:, None] * covariance * scale
        variance, whole = (variances * scale.square())[:, C:].sum(1), float(varying[C:].sum())
        values, vectors = torch.linalg.eigh(covariance[:, :C, :C])
        independent = values > ROUNDING * values.amax()
        along = (vectors.mH @ covariance[:, :C, C:]).abs().square().sum(2)
        explained = (along / values.where(independent, torch.inf)).sum(1)
        inputs = independent.sum(1)
        by_chance = variance * inputs / (n - 1)  # what as many unrelated inputs explain on average
        spread = 2 * inputs * (variance / (n - 1)).square()  # a wave and its mirror are one
        per_shell = torch.zeros(4, int(self.waves.shell.max()) + 1, dtype=torch.float64)
        each = torch.stack([variance, explained, by_chance, spread])
        per_shell.index_add_(1, self.waves.shell, self.waves.count * each)
        variance, explained, by_chance, spread = per_shell
        beyond = explained - by_chance
        certain = beyond > DOUBT * spread.sqrt() + ROUNDING * whole
        share = beyond / (1 - by_chance / variance)
        return Coherence(tuple((variance / whole).tolist()), tuple((share / whole).where(certain, 0.0).tolist()))


def _pairs(fields: Fields, history: int, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, (samples, channels, *grid) in float64."""
    if fields.kind == "pairs":
        part = fields[_spread(len(fields), samples)]
        for _, _, block in part.blocks(BLOCK_MEGABYTES):
            yield block.input.double(), judged_values(block)
        return
    starts = max(0, fields.frames - history - 1)
    for number in _spread(len(fields) * starts, samples):
        sample, start = divmod(number, starts)
        frames = fields[sample : sample + 1].select(frames=slice(start, start + history + 2)).trajectory.double()
        yield frames[:, :-1].flatten(1, 2), frames[:, -1] - frames[:, -2]


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, in equal steps."""
    numbers: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return numbers
