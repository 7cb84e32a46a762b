"""Streaming metrics: batches go in one by one, plain numbers come out, memory does not grow with the number of points.

Predictions ŷ and targets y are fields (n, c, *grid) or sequences (n, t, c, *grid), in physical units. A mask is True at
points that leave the metric; it fits the target, where samples, steps and channels may be 1, as `Fields.mask` does. All
sums are taken in float64, whatever the precision of the fields, one time step after another.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transform_once.data.arrays import Array
from transform_once.spectral.modes import kept_mask
from transform_once.spectral.transforms import Modes, get_transform

NAMES = ("relative_l2", "relative_l2_std", "mse", "mae", "psnr", "smape", "undefined")


class Metrics:
    """The usual errors, over everything, per channel and, for sequences, per time step.

    relative_l2      mean over samples of ‖ŷ−y‖₂/‖y‖₂ over channels, grid and, for sequences, all steps jointly
    relative_l2_std  its standard deviation over samples (divided by n), so that the mean square is the sum of both
                     squares
    mse, mae         mean over points of (ŷ−y)² and |ŷ−y|
    psnr             10 log₁₀(peak²/mse) in decibels; the peak is the range max y − min y of all targets, of a channel
                     the range of that channel, and of a time step that of all steps, so that steps compare
    smape            mean over points of 2|ŷ−y|/(|ŷ|+|y|), from 0 to 2; a point where both are zero counts 0
    undefined        samples with ‖y‖ = 0, which are left out of relative_l2

    A number that is not finite is None: the psnr of a perfect prediction or of a constant target, every error of a
    prediction that blew up, and the errors of no points at all.

    Args:
        channels: Names of the channels.
        steps: Number of time steps of sequences; None for fields without a time axis.
    """

    def __init__(self, channels: Sequence[str], steps: int | None = None) -> None:
        if len(set(channels)) != len(channels) or not channels:
            raise ValueError(f"expected one or more channel names, all different; got {', '.join(channels) or 'none'}")
        self.channels, self.steps = tuple(channels), steps
        # One number per group of points: all of them, each channel, each step.
        groups = 1 + len(self.channels) + (steps or 0)
        self.samples = 0
        self._sums = torch.zeros(4, groups, dtype=torch.float64)  # points, squared, absolute, symmetric
        self._low, self._high = torch.full((2, groups), torch.inf, dtype=torch.float64) * torch.tensor([[1.0], [-1.0]])
        self._defined, self._mean, self._deviation = torch.zeros(3, groups, dtype=torch.float64)

    def add(self, prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Count a batch in; returns the relative L2 of each sample (n,), NaN where it is undefined."""
        if self.steps is None:
            prediction, target = prediction.unsqueeze(1), target.unsqueeze(1)
            mask = None if mask is None else mask.unsqueeze(1)
        _check(prediction, target, mask)
        if tuple(target.shape[1:3]) != (self.steps or 1, len(self.channels)):
            raise ValueError(
                f"expected {self.steps or 1} time steps of {len(self.channels)} channels; "
                f"got {target.shape[1]} of {target.shape[2]}"
            )
        table = torch.stack([_step_table(*parts) for parts in _each_step(prediction, target, mask)], 2)
        sums, low, high = table[:5], table[5], table[6]
        points, squared, absolute, symmetric, energy = self._groups(sums, torch.sum)
        self._sums += torch.stack([points, squared, absolute, symmetric]).sum(1)
        self._low = torch.minimum(self._low, self._groups(low, torch.amin).amin(0))
        self._high = torch.maximum(self._high, self._groups(high, torch.amax).amax(0))
        self.samples += len(target)
        # A prediction that blew up to NaN is as wrong as can be; NaN itself means undefined.
        relative = squared.where(~squared.isnan(), torch.inf).sqrt() / energy.sqrt()
        relative = relative.where(energy > 0, torch.nan)
        defined = (~relative.isnan()).sum(0).double()
        mean = relative.nansum(0) / defined.clamp_min(1)
        self._join(defined, mean, (relative - mean).square().nansum(0).where(mean.isfinite(), torch.inf))
        return relative[:, 0]

    def merge(self, other: "Metrics") -> None:
        """Count in all that another one of the same kind has counted."""
        if (self.channels, self.steps) != (other.channels, other.steps):
            raise ValueError(
                f"only metrics of the same channels and steps merge; got {self.channels} and {self.steps} steps, "
                f"{other.channels} and {other.steps} steps"
            )
        self.samples += other.samples
        self._sums += other._sums
        self._low = torch.minimum(self._low, other._low)
        self._high = torch.maximum(self._high, other._high)
        self._join(other._defined, other._mean, other._deviation)

    def result(self) -> dict[str, Any]:
        """The numbers, ready for JSON; those of channels in `per_channel`, of steps as lists in `per_step`."""
        points, squared, absolute, symmetric = self._sums
        mse = squared / points
        peak = (self._high - self._low).clone()
        peak[1 + len(self.channels) :] = peak[0]
        psnr = 10 * (peak.square() / mse).log10()
        spread = (self._deviation / self._defined).sqrt()
        relative = self._mean.where(self._defined > 0, torch.nan)
        rows = (relative, spread, mse, absolute / points, psnr, symmetric / points)
        values = {name: [finite(value) for value in row.tolist()] for name, row in zip(NAMES, rows, strict=False)}
        columns: dict[str, list[Any]] = {**values, "undefined": (self.samples - self._defined).int().tolist()}
        result: dict[str, Any] = {"samples": self.samples, **{name: column[0] for name, column in columns.items()}}
        result["per_channel"] = {
            channel: {name: column[number] for name, column in columns.items()}
            for number, channel in enumerate(self.channels, start=1)
        }
        if self.steps is not None:
            result["per_step"] = {name: column[1 + len(self.channels) :] for name, column in columns.items()}
        return result

    def _groups(self, table: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
        """(…, t, c) to (…, groups)."""
        steps = [] if self.steps is None else [reduce(table, -1)]
        return torch.cat([reduce(table, (-2, -1)).unsqueeze(-1), reduce(table, -2), *steps], -1)

    def _join(self, defined: Tensor, mean: Tensor, deviation: Tensor) -> None:
        """Join further samples to mean and squared deviations without taking the difference of large sums."""
        total = (self._defined + defined).clamp_min(1)
        difference = mean - self._mean
        self._deviation += deviation + difference.square() * self._defined * defined / total
        self._mean += difference * defined / total
        self._defined += defined


class KSpaceError:
    """The error split into kept and dropped modes of a transform, and the spectra of error and target.

    With E the spectrum of ŷ−y in an orthonormal basis and S the selection of kept modes, over channels and steps,

        J² = mean over samples of ‖S E‖²/‖y‖²,    R_o² = mean over samples of ‖E − SᵀS E‖²/‖y‖²,

    so that J² + R_o² is the mean square of the relative L2, which is relative_l2² + relative_l2_std² of `Metrics`. For
    a model that predicts the kept modes alone, R_o is what no training lowers. Masked points count as no error; samples
    with y = 0 are left out.

    Args:
        transform: "dct", "dst", "fourier" or "dft".
        modes: The kept modes, as everywhere: an int or one per axis, or a `ModeSet`.
        size: The grid of the fields.
    """

    def __init__(self, transform: str, modes: Modes, size: Sequence[int]) -> None:
        self.transform, self.size = get_transform(transform), tuple(size)
        self.block = self.transform.block(modes, self.size)
        self.kept = kept_mask(modes, torch.empty(1, 1, *size, device="meta"), transform)
        self._samples = self._defined = 0
        self._inside = self._outside = 0.0
        self._spectra = (torch.zeros(()), torch.zeros(()))

    def add(self, prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> None:
        """Count a batch in."""
        if target.ndim == 2 + len(self.size):
            prediction, target = prediction.unsqueeze(1), target.unsqueeze(1)
            mask = None if mask is None else mask.unsqueeze(1)
        _check(prediction, target, mask)
        inside, outside, norm = torch.zeros(3, len(target), dtype=torch.float64)
        for ours, true, hidden in _each_step(prediction, target, mask):
            error, kept = self._energy((ours - true).masked_fill(hidden, 0)), self.kept.to(true.device)
            inside += error.masked_fill(~kept, 0).flatten(1).sum(1).cpu()
            outside += error.masked_fill(kept, 0).flatten(1).sum(1).cpu()
            norm += true.masked_fill(hidden, 0).square().flatten(1).sum(1).cpu()
        defined = norm > 0
        self._inside += (inside / norm)[defined].sum().item()
        self._outside += (outside / norm)[defined].sum().item()
        self._defined += int(defined.sum())
        self._samples += len(target)
        of_error, of_target = self._spectra
        self._spectra = (of_error + error.sum(0).cpu(), of_target + self._energy(true).sum(0).cpu())

    def merge(self, other: "KSpaceError") -> None:
        """Count in all that another one of the same modes and grid has counted."""
        if self.transform.name != other.transform.name or not torch.equal(self.kept, other.kept):
            raise ValueError("only errors split at the same modes of the same transform and grid merge")
        self._inside += other._inside
        self._outside += other._outside
        self._defined += other._defined
        self._samples += other._samples
        self._spectra = (self._spectra[0] + other._spectra[0], self._spectra[1] + other._spectra[1])

    def result(self) -> dict[str, Any]:
        """J and R_o, the transform, the block of lowest modes that holds the kept ones, and how many are kept."""
        shares = (total / self._defined if self._defined else math.nan for total in (self._inside, self._outside))
        J, R_o = (finite(math.sqrt(share)) for share in shares)
        kept = int(self.kept.sum()) // math.prod(self.kept.shape[: -len(self.size)])
        return {"J": J, "R_o": R_o, "transform": self.transform.name, "modes": list(self.block), "kept": kept}

    def spectra(self) -> tuple[Array, Array]:
        """Of the last time step, √(mean over samples of the energy) of each coefficient (c, *spectrum): error, target.

        Masked points count as no error; the target is transformed as it is.
        """
        of_error, of_target = ((total / max(1, self._samples)).sqrt().float().numpy() for total in self._spectra)
        return of_error, of_target

    def _energy(self, y: Tensor) -> Tensor:
        ndim = len(self.size)
        return self.transform.energy(self.transform.forward(y, ndim), ndim, self.size)


class Calibration:
    """How well the spread of an ensemble of K members says how wrong their mean is.

    The spread s is the standard deviation over the members (divided by K−1), e the error of their mean. If the truth
    could as well be one more member, then E e² = (1 + 1/K) E s². Over all points:

    spread_to_error    √((1 + 1/K) Σs²/Σe²): 1 is right, less means too sure of itself
    coverage_2sigma    share of points with |e| ≤ 2s
    coverage_expected  that share for Gaussian members and truth, Student's t: 0.95 for many members, 0.86 for five
    correlation        over samples, of the RMS of s and the RMS of e; None where either is constant
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self._sums = torch.zeros(4, dtype=torch.float64)  # points, s², e², covered
        self._per_sample: list[Tensor] = []

    def add(self, mean: Tensor, spread: Tensor, target: Tensor, mask: Tensor | None = None) -> None:
        """Count a batch in."""
        _check(mean, target, mask)
        sums = torch.zeros(4, len(target), dtype=torch.float64)
        for (ours, true, hidden), wide in zip(_each_step(mean, target, mask), spread.unbind(1), strict=True):
            error, wide = (ours - true).abs(), _double(wide)
            parts = (torch.ones_like(error), wide.square(), error.square(), (error <= 2 * wide).double())
            sums += torch.stack([part.masked_fill(hidden, 0).flatten(1).sum(1) for part in parts]).cpu()
        self._sums += sums.sum(1)
        self._per_sample.append((sums[1:3] / sums[0]).sqrt())

    def merge(self, other: "Calibration") -> None:
        """Count in all that another one of as many members has counted."""
        if self.members != other.members:
            raise ValueError(f"only ensembles of the same size merge; got {self.members} and {other.members} members")
        self._sums += other._sums
        self._per_sample += other._per_sample

    def result(self) -> dict[str, Any]:
        """The numbers, ready for JSON; None where there is no number."""
        points, spread, error, covered = self._sums
        pairs = torch.cat(self._per_sample, 1)
        pairs = pairs[:, pairs.isfinite().all(0)]
        pairs = pairs - pairs.mean(1, keepdim=True)
        correlation = (pairs[0] * pairs[1]).sum() / pairs.square().sum(1).prod().sqrt()
        return {
            "spread_to_error": finite(((1 + 1 / self.members) * spread / error).sqrt().item()),
            "coverage_2sigma": finite((covered / points).item()),
            "coverage_expected": _student(2 / math.sqrt(1 + 1 / self.members), self.members - 1),
            "correlation": finite(correlation.item()),
        }


class Scores:
    """All that is measured of a model, or of an ensemble, in one pass over the samples.

    `metrics` and `kspace` are of the mean prediction; `members` and `calibration` count for ensembles alone. `errors`
    holds the relative L2 of each sample, in the order in which they came.
    """

    def __init__(self, metrics: Metrics, kspace: KSpaceError, members: int) -> None:
        self.metrics, self.kspace, self.calibration = metrics, kspace, Calibration(members)
        self.members = [Metrics(metrics.channels, metrics.steps) for _ in range(members)]
        self.errors: list[Tensor] = []

    def add(self, predictions: Sequence[Tensor], target: Tensor, mask: Tensor | None) -> None:
        """Count a batch in, as each member predicts it."""
        mean, spread = mean_and_spread(predictions)
        target = target.to(mean.device)
        self.errors.append(self.metrics.add(mean, target, mask))
        self.kspace.add(mean, target, mask)
        if spread is not None:
            self.calibration.add(mean, spread, target, mask)
            for one, prediction in zip(self.members, predictions, strict=True):
                one.add(prediction, target, mask)

    def merge(self, other: "Scores") -> None:
        """Count in all that another one has counted, of the samples that follow."""
        self.metrics.merge(other.metrics)
        self.kspace.merge(other.kspace)
        self.calibration.merge(other.calibration)
        for one, further in zip(self.members, other.members, strict=True):
            one.merge(further)
        self.errors += other.errors

    def result(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        numbers = {**self.metrics.result(), "kspace": self.kspace.result()}
        if len(self.members) > 1:
            numbers["members"] = [one.result()["relative_l2"] for one in self.members]
            numbers["calibration"] = self.calibration.result()
        return numbers


def mean_and_spread(predictions: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Mean and standard deviation (divided by K−1) over the predictions of K members; of one there is no spread."""
    first, count = predictions[0], len(predictions)
    if count == 1:
        return first, None
    # In float64, where there is one: members that agree have a spread of zero, not of rounding.
    precise = torch.float32 if first.device.type == "mps" else torch.float64
    mean, squares = torch.zeros((2, *first.shape), dtype=precise, device=first.device)
    for prediction in predictions:
        mean += prediction.to(mean)
    mean /= count
    for prediction in predictions:
        squares += (prediction.to(mean) - mean).square() / (count - 1)
    return mean.to(first.dtype), squares.sqrt().to(first.dtype)


def from_best_to_worst(errors: Tensor, count: int) -> list[int]:
    """The numbers of `count` samples at evenly spaced ranks of the error; undefined ones (NaN) only if all are."""
    candidates = (~errors.isnan()).nonzero().flatten()
    if not len(candidates):
        candidates = torch.arange(len(errors))
    ranked = candidates[errors[candidates].sort(stable=True).indices]
    ranks = np.linspace(0, len(ranked) - 1, min(count, len(ranked))).round().astype(int)
    return ranked[ranks].tolist()


def finite(value: float) -> float | None:
    """The number, or None where JSON has none for it."""
    return value if math.isfinite(value) else None


def _student(limit: float, freedom: int) -> float:
    """The probability that |t| ≤ limit for Student's t."""
    t = np.linspace(0, limit, 2001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    return float(limit * (density[1:] + density[:-1]).mean())


def _step_table(prediction: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """Of one time step, per sample and channel (7, n, c): points, squares, absolutes, smape, energy, low and high."""
    high = target.masked_fill(hidden, -torch.inf)
    low = target.masked_fill(hidden, torch.inf)
    prediction, target = prediction.masked_fill(hidden, 0), target.masked_fill(hidden, 0)
    error = (prediction - target).abs()
    # Where both are zero so is the error: any divisor but zero gives 0.
    size = (prediction.abs() + target.abs()).clamp_min(torch.finfo(error.dtype).tiny)
    parts = (~hidden, error.square(), error, 2 * error / size, target.square())
    sums = [part.double().flatten(2).sum(2) for part in parts]
    return torch.stack([*sums, low.flatten(2).amin(2), high.flatten(2).amax(2)]).cpu()


def _each_step(prediction: Tensor, target: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Prediction and target in float64, (n, c, *grid), and what is hidden, of each time step in turn."""
    for step in range(target.shape[1]):
        true = _double(target[:, step])
        hidden = torch.zeros((), dtype=torch.bool) if mask is None else mask[:, step if mask.shape[1] > 1 else 0]
        yield _double(prediction[:, step]).to(true.device), true, hidden.to(true.device).expand_as(true)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.device.type != "mps" else x.cpu().double()  # that device has no float64


def _check(prediction: Tensor, target: Tensor, mask: Tensor | None) -> None:
    if prediction.shape != target.shape:
        raise ValueError(
            f"expected a prediction of the target's shape {tuple(target.shape)}; got {tuple(prediction.shape)}"
        )
    if mask is None:
        return
    fits = mask.ndim == target.ndim and all(m in (1, n) for m, n in zip(mask.shape, target.shape, strict=True))
    if mask.dtype != torch.bool or not fits:
        raise ValueError(
            f"expected a mask of booleans that fits the target's shape {tuple(target.shape)}; "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
