"""Look before you train: what the spectra of some fields say about transform, kept modes, cache and speed.

One pass over the data, in float64. A *field* here is one sample, or one frame of a trajectory, with all its channels.
With y a target (a frame of a trajectory, an input where there is nothing else), ȳ the mean of each of its channels and
P the projection on the kept modes, all errors are

    ‖y − Py‖ / ‖y − ȳ‖,    mean over the fields that are not constant,

the irreducible relative L2 of `spectral.modes` with the mean of each field taken out of the norm. So a tolerance does
not depend on an offset (Kelvin or Celsius), and it is the strictest one: no other shift has a smaller norm.

Transforms are compared at equal cost, the real numbers stored per channel: of a low-pass of m modes an axis m^d for
"dct" and "fourier", 2^d·m^d for the complex "dft", where d is the number of grid axes.
"""

import bisect
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.metadata import Metadata
from transform_once.data.spectra import BLOCK_MEGABYTES
from transform_once.evaluation import rates as costs
from transform_once.evaluation.coherence import coherence
from transform_once.evaluation.rates import LOW_PASS, PER_FIELD, TOP, Curve, Rates, Recommendation, in_words, short
from transform_once.spectral.modes import ModeSet
from transform_once.spectral.transforms import get_transform

BASES = ("dct", "fourier", "dft")
# A spectrum that nowhere exceeds the energy of a lower shell by more than this factor counts as monotone.
RISE = 2.0
# The top-m curves need the energies of single fields: of evenly spread ones at most these many numbers, 32 MiB a basis.
HELD_NUMBERS = 2**23
# A field that varies by less than this part of its size is constant.
ROUNDING = 1e-9
POINTS = 200  # of a top-m curve, in equal ratios


class Channel(NamedTuple):
    """A channel, its mean, the RMS of its deviation from field means, and the low-pass of its own that it needs.

    `modes` is None where the channel is constant in every field.
    """

    array: str
    name: str
    unit: str
    mean: float
    deviation: float
    modes: int | tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Basis:
    """What one basis makes of the fields.

    boxes     the low-passes, modes of each axis: the same number on all, as far as an axis has that many
    low_pass  the curve of the boxes by array
    top       the curve of one shared set of the modes of largest energy, as `TopM(count)` chooses it, for the target
    needed    real numbers per channel for the tolerance: "low-pass", "shared top-m", "top-m per field" (on average)
    energy    mean energy of every coefficient by array, (channels, *spectrum); not in `to_dict`
    shells    the same, mean over the coefficients that each box adds, (channels, boxes)
    rises_at  the first box whose coefficients have over twice the energy of lower ones; None: the spectrum is monotone
    """

    boxes: list[tuple[int, ...]]
    low_pass: dict[str, Curve]
    top: Curve
    needed: dict[str, float]
    channels: list[Channel]
    energy: dict[str, Tensor]
    shells: dict[str, Tensor]
    rises_at: tuple[int, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "boxes": self.boxes,
            "low_pass": {name: curve._asdict() for name, curve in self.low_pass.items()},
            "top_m": self.top._asdict(),
            "coefficients_needed": self.needed,
            "channels": [channel._asdict() for channel in self.channels],
            "energy_per_mode": {name: shells.tolist() for name, shells in self.shells.items()},
            "monotone": self.rises_at is None,
            "rises_at": self.rises_at,
        }


@dataclass(frozen=True, eq=False)
class Analysis:
    """What `analyze` found; `to_dict` for JSON, `table` for the terminal, `reports.analysis_figures` for pictures."""

    kind: str
    shapes: dict[str, tuple[int, ...]]
    metadata: Metadata
    tolerance: float
    fields_analysed: int
    fields_held: int
    bases: dict[str, Basis]
    recommendation: Recommendation
    cache: dict[str, float]
    rates: Rates | None
    notes: list[str]

    @property
    def judged(self) -> str:
        """The array whose error is meant: "target", "trajectory" or, where it is alone, "input"."""
        return list(self.shapes)[-1]

    @property
    def resolution(self) -> tuple[int, ...]:
        """The size of every grid axis."""
        return self.shapes[self.judged][-len(self.metadata.periodic) :]

    @property
    def basis(self) -> Basis:
        """The recommended basis."""
        return self.bases[self.recommendation.transform]

    @property
    def monotone(self) -> bool:
        """Whether energy falls with the wave number in the recommended basis, down to what the tolerance can see."""
        return self.basis.rises_at is None

    @property
    def modes(self) -> int | tuple[int, ...] | ModeSet:
        """The recommended modes, as models and `spectra` take them."""
        return self.recommendation.mode_set(self.basis.energy[self.judged], self.resolution)

    @property
    def coefficients_needed(self) -> dict[str, float]:
        """Real numbers per channel for the tolerance in the recommended basis, by how modes are selected."""
        return self.basis.needed

    def equal_cost(self) -> list[dict[str, float | None]]:
        """The share of energy that a low-pass leaves out in each basis at costs of 2^d, 4^d, 8^d, … real numbers.

        None where a basis has no low-pass that small: the smallest of the dft costs 2^d.
        """
        ndim, points, rows = len(self.resolution), math.prod(self.resolution), []
        for cost in (2 ** (i * ndim) for i in range(1, 32) if i == 1 or 2 ** (i * ndim) < points):
            row: dict[str, float | None] = {"cost": cost}
            for name, basis in self.bases.items():
                curve = basis.low_pass[self.judged]
                number = bisect.bisect_right(curve.cost, cost)
                row[name] = curve.left_out[number - 1] if number else None
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything but the maps of every coefficient, for JSON."""
        same = ("kind", "shapes", "tolerance", "fields_analysed", "fields_held", "monotone", "coefficients_needed")
        return {
            "format": "transform-once analysis 1",
            **{name: getattr(self, name) for name in (*same, "cache", "notes")},
            **{name: getattr(self.metadata, name) for name in ("source", "grid", "periodic")},
            "recommendation": asdict(self.recommendation),
            "energy_left_out_at_equal_cost": self.equal_cost(),
            "rates": None if self.rates is None else self.rates._asdict(),
            "bases": {name: basis.to_dict() for name, basis in self.bases.items()},
        }

    def table(self) -> Any:
        """The findings as tables and sentences, for `rich.print`."""
        from rich.console import Group
        from rich.table import Table

        channels = Table("array", "channel", "unit", "mean", "deviation", f"own low-pass for {self.tolerance:.3g}")
        for one in self.basis.channels:
            needs = "constant" if one.modes is None else in_words(one.modes)
            channels.add_row(one.array, one.name, one.unit, f"{one.mean:.4g}", f"{one.deviation:.4g}", needs)
        equal = Table("numbers a channel", *BASES, title=f"energy a low-pass leaves out of the {self.judged}")
        for row in self.equal_cost():
            equal.add_row(f"{row['cost']:,}", *("" if row[name] is None else f"{row[name]:.2e}" for name in BASES))
        needed = Table("basis", *self.coefficients_needed, title=f"numbers for a mean error of {self.tolerance:.3g}")
        for name, basis in self.bases.items():
            needed.add_row(name, *(f"{number:,.0f}" for number in basis.needed.values()))
        rises = "" if self.basis.rises_at is None else f": it rises at m = {in_words(short(self.basis.rises_at))}"
        lines = [
            f"{self.recommendation.reason}\n{self.recommendation.meaning}",
            f"The spectrum is {'' if self.monotone else 'not '}monotone in this basis{rises}.",
            "The cache of all spectra will weigh {bytes:,.0f} bytes, {ratio:.1%} of the fields.".format(**self.cache),
        ]
        lines += [self.rates.sentence] if self.rates is not None else []
        return Group(channels, equal, needed, "\n".join([*lines, *self.notes]))


def analyze(
    fields: Fields,
    *,
    tolerance: float = 0.01,
    samples: int | None = None,
    progress: bool = True,
    rates: bool = True,
    device: torch.device | str = "cpu",
) -> Analysis:
    """What to know before training: energy per mode, irreducible error, transform and modes, cache and speed-up.

    tolerance  the mean relative error that truncation may cost, in (0, 1); good values: a tenth of the error hoped for
    samples    how many samples to look at, evenly spread; by default all
    progress   show a bar on the terminal when the work takes longer than a second
    rates      measure the speed-up over an FNO, and what linear maps explain, about a second
    device     where transforms and measurements run

    One streamed pass; memory is bounded whatever the number of samples. The error of a top-m set is the mean over all
    fields as long as their spectra fit `HELD_NUMBERS`, and over evenly spread ones beyond; which modes are in the set
    follows from all.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is a relative error between 0 and 1, such as 0.01; got {tolerance}")
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be at least 1, or None for all; got {samples}")
    if math.prod(fields.resolution) == 1:
        raise ValueError("these fields have a single grid point, so a single mode: there is no spectrum to analyse")
    where = torch.device("cpu" if torch.device(device).type == "mps" else device)  # that device has no float64
    part = fields
    if samples is not None and samples < len(fields):
        part = fields[np.linspace(0, len(fields) - 1, samples).round().astype(int).tolist()]
    sums = {name: _Sums(part, name) for name in BASES}
    for block in _tracked(part, progress):
        given = {"input": block.input.to(where, torch.float64)} if list(part.shapes) == ["input", "target"] else {}
        for array, y in {**given, list(part.shapes)[-1]: costs.judged_values(block, where)}.items():
            for one in sums.values():
                one.add(array, y)
    return _conclude(fields, part, sums, tolerance, str(device) if rates else None)


def _conclude(fields: Fields, part: Fields, sums: dict[str, "_Sums"], tolerance: float, device: str | None) -> Analysis:
    """The analysis from what the pass gathered."""
    judged, gathered = list(part.shapes)[-1], sums["dct"]
    if not gathered.varying[judged]:
        raise ValueError(f"every {judged} field is constant: there is no spectrum to analyse; check the data")
    bases = {name: one.finish(tolerance) for name, one in sums.items()}
    found, notes = costs.recommend(bases, judged, part.metadata)
    basis, held, varying = bases[found.transform], sum(len(rows) for rows, _ in gathered.held), gathered.varying[judged]
    modes = found.mode_set(basis.energy[judged], part.resolution)
    rates = costs.measure_rates(part, found.transform, modes, device) if device else None
    notes += costs.remarks(part, found, varying, held, basis)
    if device and judged != "input" and (linear := coherence(part)):
        notes.append(linear.in_words("the target" if judged == "target" else "the change between frames"))
    cache, units = costs.cache_weight(fields, found.coefficients), len(part) * part.frames
    facts = (fields.kind, fields.shapes, part.metadata, tolerance, units, held)
    return Analysis(*facts, bases, found, cache, rates, notes)


class _Sums:
    """What the pass gathers in one basis; arrays by name, energies summed over fields."""

    def __init__(self, fields: Fields, name: str) -> None:
        self.fields, self.T, size = fields, get_transform(name), fields.resolution
        limits, spectrum = self.T.max_modes(size), self.T.block(None, size)
        boxes = [tuple(min(m, limit) for limit in limits) for m in range(1, max(limits) + 1)]
        blocks = [self.T.block(box, size) for box in boxes]
        sides = [m for m in range(1, len(boxes) + 1) if m == 1 or blocks[m - 1] != blocks[m - 2]]
        self.boxes = [boxes[m - 1] for m in sides]
        self.cost = [(1 + self.T.is_complex) * math.prod(blocks[m - 1]) for m in sides]
        reach = torch.zeros(spectrum, dtype=torch.long)
        for axis, values in enumerate(self.T.reach(size)):
            reach = torch.maximum(reach, values.reshape([-1 if a == axis else 1 for a in range(len(size))]))
        self.shell = torch.searchsorted(torch.tensor(sides), reach.flatten())  # the box that first keeps a mode
        channels = {array: shape[-len(size) - 1] for array, shape in fields.shapes.items()}
        zeros = functools.partial(torch.zeros, dtype=torch.float64)
        self.energy = {array: zeros(count, *spectrum) for array, count in channels.items()}
        self.curves = {array: zeros(3, len(sides)) for array in channels}  # error, with_mean, left_out
        self.varying = dict.fromkeys(channels, 0)
        self.own = {array: zeros(count, len(sides)) for array, count in channels.items()}  # errors of single channels
        self.own_varying = {array: zeros(count) for array, count in channels.items()}
        self.moments = {array: zeros(2, count) for array, count in channels.items()}  # mean, squared deviation
        self.relative = zeros(math.prod(spectrum))
        units = len(fields) * fields.frames
        self.stride = -(-units * math.prod(spectrum) // HELD_NUMBERS)
        self.held: list[tuple[Tensor, Tensor]] = []  # energy of each mode / ‖y − ȳ‖² in float32, ‖y − ȳ‖/‖y‖

    def add(self, array: str, y: Tensor) -> None:
        """Take in fields (units, channels, *grid)."""
        ndim = self.fields.ndim
        energy = self.T.energy(self.T.forward(y, ndim), ndim, self.fields.resolution)
        flat = y.flatten(2)
        mean, total = flat.mean(2), flat.square().sum(2)
        deviation = (flat - mean[..., None]).square().sum(2)
        self.energy[array] += energy.sum(0).cpu()
        self.moments[array] += torch.stack([mean.sum(0), deviation.sum(0) / flat.shape[2]]).cpu()
        tail = energy.new_zeros(*energy.shape[:2], len(self.boxes) + 1)
        tail.index_add_(2, self.shell.to(y.device), energy.flatten(2))
        tail = tail.flip(2).cumsum(2).flip(2)[..., 1:]  # summed from the smallest up: no cancellation
        weight, varies = _inverse(deviation, total)
        self.own[array] += (tail * weight[..., None]).sqrt().sum(0).cpu()
        self.own_varying[array] += varies.sum(0).cpu()
        weight, varies = _inverse(deviation.sum(1), total.sum(1))
        left_out = tail.sum(1) * weight[:, None]
        part = (weight * total.sum(1)).clamp_min(1).rsqrt()  # ‖y − ȳ‖/‖y‖
        rows = left_out.sqrt().sum(0), (left_out.sqrt() * part[:, None]).sum(0), left_out.sum(0)
        self.curves[array] += torch.stack(rows).cpu()
        if array == list(self.energy)[-1]:
            relative = energy.sum(1).flatten(1) * weight[:, None]
            self.relative += relative.sum(0).cpu()
            taken = varies & ((varies.cumsum(0) - 1 + self.varying[array]) % self.stride == 0)
            self.held.append((relative[taken].float().cpu(), part[taken].cpu()))
        self.varying[array] += int(varies.sum())

    def finish(self, tolerance: float) -> Basis:
        """What was gathered, as means and curves."""
        judged, units = list(self.energy)[-1], len(self.fields) * self.fields.frames
        low_pass = {a: Curve(self.cost, *(self.curves[a] / max(1, self.varying[a])).tolist()) for a in self.energy}
        energy = {array: values / units for array, values in self.energy.items()}
        shells = {array: self._per_shell(values.flatten(1)) for array, values in energy.items()}
        top, needed = self._top(energy[judged].sum(0).flatten(), tolerance)
        needed = {LOW_PASS: low_pass[judged].cost[_first(low_pass[judged].error, tolerance)]} | needed
        rises_at = self._rise(low_pass[judged].left_out, tolerance)
        return Basis(self.boxes, low_pass, top, needed, self._channels(tolerance, units), energy, shells, rises_at)

    def _per_shell(self, energy: Tensor) -> Tensor:
        """Mean over the modes that each box adds."""
        zeros = energy.new_zeros(*energy.shape[:-1], len(self.boxes))
        return zeros.index_add(-1, self.shell, energy) / self.shell.bincount(minlength=len(self.boxes))

    def _top(self, energy: Tensor, tolerance: float) -> tuple[Curve, dict[str, float]]:
        """The curve of the shared set, and the numbers that it and sets chosen per field need for the tolerance."""
        order = energy.sort(stable=True, descending=True).indices
        sums, single, count = energy.new_zeros(2, len(order) + 1), 0.0, 0
        few = max(1, 2**20 // len(order))  # rows at a time
        for relative, part in self.held:
            for rows, parts in zip(relative.split(few), part.split(few), strict=True):
                errors = rows[:, order].double().flip(1).cumsum(1).flip(1).sqrt()
                sums[:, :-1] += torch.stack([errors.sum(0), parts @ errors])
                single += float((rows.double().sort(1).values.cumsum(1) > tolerance**2).sum())
                count += len(rows)
        error, with_mean = sums / count
        relative = self.relative / self.varying[list(self.energy)[-1]]
        left_out = torch.cat([relative[order].flip(0).cumsum(0).flip(0), relative.new_zeros(1)])
        real, shared = 1 + self.T.is_complex, _first(error.tolist(), tolerance)
        counts = sorted({*np.geomspace(1, len(order), POINTS).astype(int).tolist(), shared})
        points = (values[counts].tolist() for values in (error, with_mean, left_out))
        curve = Curve([real * number for number in counts], *points)
        return curve, {TOP: real * shared, PER_FIELD: real * single / count}

    def _rise(self, left_out: list[float], tolerance: float) -> tuple[int, ...] | None:
        """The first box at which energy rises, among those that still matter to the tolerance."""
        energy = self._per_shell(self.relative).tolist()
        lowest = math.inf
        for number in range(1, len(energy)):
            if left_out[number - 1] <= tolerance**2:
                break
            if energy[number] > RISE * lowest:
                return self.boxes[number]
            lowest = min(lowest, energy[number])
        return None

    def _channels(self, tolerance: float, units: int) -> list[Channel]:
        rows, metadata = [], self.fields.metadata
        for array, names in metadata.channels.items():
            for i, name in enumerate(names):
                varying = self.own_varying[array][i].item()
                errors = (self.own[array][i] / max(varying, 1)).tolist()
                modes = short(self.boxes[_first(errors, tolerance)]) if varying else None
                mean, square = (self.moments[array][:, i] / units).tolist()
                rows.append(Channel(array, name, metadata.units.get(name, ""), mean, math.sqrt(square), modes))
        return rows


def _inverse(deviation: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """1/‖y − ȳ‖², or 0 where a field is constant, and whether it is not."""
    varies = deviation > ROUNDING**2 * total
    return torch.where(varies, 1 / deviation, 0.0), varies


def _first(errors: list[float], tolerance: float) -> int:
    """The number of the first error within the tolerance; the last one, of all modes, is nothing but rounding."""
    return next((number for number, error in enumerate(errors) if error <= tolerance), len(errors) - 1)


def _tracked(fields: Fields, show: bool) -> Iterator[Fields]:
    """Blocks of fields, with a bar on the terminal once they have taken longer than a second."""
    from rich.console import Console
    from rich.progress import Progress

    console, began = Console(stderr=True), time.monotonic()
    bar = Progress(console=console, transient=True, disable=not (show and console.is_terminal))
    task = bar.add_task("analyze", total=len(fields) * fields.frames)
    try:
        for samples, frames, block in fields.blocks(BLOCK_MEGABYTES):
            yield block
            bar.update(task, completed=(samples.stop - 1) * fields.frames + frames.stop)
            if time.monotonic() - began > 1:
                bar.start()
    finally:
        if bar.live.is_started:
            bar.stop()
