"""What to train with, and what it will cost: the recommended modes, their cache, and the speed-up measured here."""

import os
import platform
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.metadata import Metadata
from transform_once.models.fno import FNOLayer
from transform_once.models.layers import DENSE_MODES, RANK, T1Layer
from transform_once.spectral.holes import fill
from transform_once.spectral.modes import ModeSet, TopM, choose_modes
from transform_once.spectral.transforms import get_transform

if TYPE_CHECKING:
    from transform_once.evaluation.analysis import Basis

# A top-m set must be fitted and suits neither UNet nor symmetries: it must at least halve the work of a layer.
WORTH_A_SET = 0.5
# Two bases whose numbers of coefficients differ by less than this are equal: then the declared grid decides.
LEVEL = 1.1
# Fields are zero at the walls where the dst needs at most this part of the modes of the dct for this error.
WALLS, WALL_ERROR = 0.5, 0.01
TARGET_NUMBERS = 2**25  # that are looked at for it
FILLED = 4  # points that do not count get values that one in so many modes of each axis can hold
CANDIDATES = ("dct", "fourier")  # the real bases, in which the models work

DEFAULT_WIDTH = 48  # of T1
WIDTH, DEPTH, BATCH = 32, 4, 4  # of the models that are measured
# Measured models have at most about these many weights, and numbers of a field, in a layer: a second's work.
LAYER_WEIGHTS, LAYER_NUMBERS = 2**21, 2**20
SECONDS = 0.5
LOW_PASS, TOP, PER_FIELD = "low-pass", "shared top-m", "top-m per field"


class Curve(NamedTuple):
    """Errors against cost.

    cost       real numbers kept per channel
    error      mean relative error, field means aside
    with_mean  the same in the norm ‖y‖, as training reports it
    left_out   mean share of the energy ‖y − ȳ‖² that is left out: the square of the error before the mean is taken
    """

    cost: list[int]
    error: list[float]
    with_mean: list[float]
    left_out: list[float]


@dataclass(frozen=True)
class Recommendation:
    """What to train with; `modes` is the low-pass, or the number of modes of one shared top-m set.

    `error` is the mean relative error with field means aside, `error_with_mean` in the norm that training reports,
    `reason` says why, `meaning` what the numbers of coefficients needed mean for a model.
    """

    transform: str
    selection: str
    modes: int | tuple[int, ...]
    coefficients: int
    error: float
    error_with_mean: float
    reason: str
    meaning: str

    def mode_set(self, energy: Tensor, size: tuple[int, ...]) -> int | tuple[int, ...] | ModeSet:
        """The modes as models take them; `energy` (channels, *spectrum) says which ones a top-m set holds."""
        if self.selection == LOW_PASS:
            return self.modes
        return TopM(self.coefficients).of_energy(energy.sum(0), size, self.transform)


def recommend(bases: Mapping[str, "Basis"], judged: str, metadata: Metadata) -> tuple[Recommendation, list[str]]:
    """The basis and the selection that need fewest numbers, and a note where the declared grid contradicts them.

    A shared top-m set is taken where it halves the work of a layer against the low-pass. Of bases that are level the
    one of the declared grid is taken: "fourier" for periodic nodes, else "dct".
    """
    needed = {name: bases[name].needed for name in CANDIDATES}
    selections = {name: _selection(bases[name], judged) for name in CANDIDATES}
    numbers = {name: int(needed[name][selections[name]]) for name in CANDIDATES}
    declared = "fourier" if metadata.grid == "node" and all(metadata.periodic) else "dct"
    best, notes = min(CANDIDATES, key=lambda name: numbers[name]), []
    if numbers[declared] <= LEVEL * numbers[best]:
        best = declared
    else:
        notes.append(
            f"These fields are declared to lie on {metadata.grid}s, periodic={metadata.periodic}, for which one "
            f"expects {declared}, but {best} needs {numbers[best]:,} numbers where {declared} needs "
            f"{numbers[declared]:,}: check the declaration."
        )
    selection, count, other = selections[best], numbers[best], "fourier" if best == "dct" else "dct"
    curve = bases[best].low_pass[judged] if selection == LOW_PASS else bases[best].top
    number = curve.cost.index(count)
    modes = short(bases[best].boxes[number]) if selection == LOW_PASS else count
    level = ", about as many, so that the declared grid decides" if numbers[other] <= LEVEL * count else ""
    reason = (
        f'Use transform="{best}" with {_kept(selection, modes)}: {count:,} numbers a channel leave a mean relative '
        f"error of {curve.error[number]:.2g}, where {other} needs {numbers[other]:,} ({selections[other]}){level}, and "
        f"{_set_or_not(selection, int(needed[best][LOW_PASS]), int(needed[best][TOP]))}."
    )
    errors = curve.error[number], curve.with_mean[number]
    return Recommendation(best, selection, modes, count, *errors, reason, _meaning(needed[best])), notes


def sines_for_cosines(fields: Fields) -> tuple[int, int] | None:
    """How many modes of the dst, and of the dct, leave 1% of the targets, where these are zero at the walls, or None.

    That they are is told by the dst, which then needs at most half as many.
    """
    if fields.kind != "pairs" or "target" not in fields.shapes or fields.metadata.missing is not None:
        return None
    y, counts = targets(fields), []
    for name in ("dst", "dct"):
        modes = choose_modes(y, WALL_ERROR, name)
        counts.append(prod(modes if isinstance(modes, tuple) else (modes,) * fields.ndim))
    return (counts[0], counts[1]) if counts[0] <= WALLS * counts[1] else None


def targets(fields: Fields, most: int = 64) -> Tensor:
    """Some targets, evenly spread, in float64; of large fields fewer."""
    most = min(most, len(fields), max(4, TARGET_NUMBERS // prod(fields.shapes["target"][1:])))
    numbers = np.linspace(0, len(fields) - 1, most).round().astype(int).tolist()
    return judged_values(fields[numbers])


def judged_values(fields: Fields, device: torch.device | str = "cpu") -> Tensor:
    """What is judged of the fields, targets or frames, (units, channels, *grid) in float64.

    No model has to spend modes on points that do not count, so these go on smoothly here, whatever they hold.
    """
    values, hidden = fields.counted(list(fields.shapes)[-1])
    ndim = fields.ndim
    y = values.flatten(0, -ndim - 2).to(device, torch.float64)
    if hidden is None:
        return y
    hidden = hidden.expand(*values.shape[: -ndim - 1], *hidden.shape[-ndim - 1 :]).flatten(0, -ndim - 2)
    return fill(y, hidden.to(device), tuple(max(1, n // FILLED) for n in fields.resolution))


def remarks(fields: Fields, found: Recommendation, varying: int, held: int, basis: "Basis") -> list[str]:
    """What to keep in mind: how far the numbers carry, and what the kept modes lose of inputs and small channels."""
    judged, units, points = list(fields.shapes)[-1], len(fields) * fields.frames, prod(fields.resolution)
    low_pass, notes = basis.low_pass, []
    if units == 1:
        notes.append("Only one field was analysed: other fields may need other modes.")
    if varying < units:
        notes.append(f"{units - varying:,} of {units:,} {judged} fields are constant and left out of the errors.")
    if held < varying:
        notes.append(f"Errors of top-m sets are means over {held:,} evenly spread fields, all others over all.")
    if found.coefficients > points / 2:
        number = max(0, bisect_right(low_pass[judged].cost, points / 4) - 1)
        notes.append(
            f"More than half of the {points:,} modes are needed, so truncation saves little; a low-pass of "
            f"{low_pass[judged].cost[number]:,} would leave an error of {low_pass[judged].error[number]:.2g}."
        )
    if judged == "target" and found.selection == LOW_PASS and found.coefficients < points:
        lost = low_pass["input"].error[low_pass["input"].cost.index(found.coefficients)]
        notes.append(f"The same low-pass leaves out of the inputs, unseen by the model, a mean relative {lost:.2g}.")
    if found.transform == "dct" and (walls := sines_for_cosines(fields)):
        notes.append(f"Targets are zero at the walls: {walls[0]} sines do for {walls[1]} cosines (out_transform=dst).")
    own = {one.name: one.modes for one in basis.channels if one.array == judged and one.modes is not None}
    sides = {name: modes if isinstance(modes, tuple) else (modes,) * fields.ndim for name, modes in own.items()}
    worst = max(sides, key=lambda name: prod(sides[name]))
    if len(own) > 1 and prod(sides[worst]) > 2 * found.coefficients:
        notes.append(
            f"The error is that of all channels together, in their units: {worst} by itself would need a low-pass of "
            f"{in_words(own[worst])} modes."
        )
    if fields.metadata.missing is not None or fields[:1].mask is not None:
        notes.append(
            "Points that do not count hold values here that the lowest quarter of the modes of each axis can hold."
        )
    return notes


def short(box: tuple[int, ...]) -> int | tuple[int, ...]:
    """A low-pass as one number where all axes keep the same."""
    return box[0] if len(set(box)) == 1 else box


def in_words(modes: int | tuple[int, ...]) -> str:
    """A low-pass as text, such as 24 or 24×16."""
    return str(modes) if isinstance(modes, int) else "×".join(map(str, modes))


def _meaning(needed: Mapping[str, float]) -> str:
    low_pass, top, single = (f"{number:,.0f}" for number in needed.values())
    return (
        f"A model keeps one fixed set of modes, so it needs {low_pass} numbers a channel as a low-pass or {top} as one "
        f"shared top-m set; the {single} on average of modes chosen per field are out of its reach, since that choice "
        "needs the field it has yet to predict."
    )


def _kept(selection: str, modes: int | tuple[int, ...]) -> str:
    return f"a low-pass of {in_words(modes)} modes" if selection == LOW_PASS else f"one shared set of the top {modes:,}"


def _selection(basis: "Basis", judged: str) -> str:
    """Whether a low-pass or a set costs less work in a layer of T1: a channel matrix per mode, then the mixing."""
    box = basis.boxes[basis.low_pass[judged].cost.index(int(basis.needed[LOW_PASS]))]
    top = int(basis.needed[TOP])
    block = prod(box) * (DEFAULT_WIDTH + sum(box))  # mixed along each axis
    whole = top * (DEFAULT_WIDTH + (top if top <= DENSE_MODES else 2 * RANK))  # each mode with each
    return TOP if whole <= WORTH_A_SET * block else LOW_PASS


def _set_or_not(selection: str, low_pass: int, top: int) -> str:
    if selection == TOP:
        return f"a low-pass would need {low_pass:,} and twice the work or more"
    if top >= low_pass:
        return "no shared top-m set needs fewer"
    return f"one shared top-m set would need {top:,} but over half the work, since it is not mixed axis by axis"


def cache_weight(fields: Fields, coefficients: int) -> dict[str, float]:
    """Bytes of the spectra of all fields that keep these many real numbers a channel, and their ratio to the fields.

    Besides the modes, in the precision of the fields, the cache holds two float64 numbers per target and channel.
    """
    itemsize = np.dtype(fields.metadata.dtype).itemsize
    rows = [prod(shape[: -fields.ndim]) for shape in fields.shapes.values()]
    stored = itemsize * sum(rows) * prod(fields.resolution)
    weight = itemsize * sum(rows) * coefficients + 16 * rows[-1]
    return {"bytes": weight, "field_bytes": stored, "ratio": weight / stored}


class Rates(NamedTuple):
    """Measured seconds of forward and backward through the layers, as a training step runs them, and where.

    The layers of T1 work on kept modes alone, those of an FNO of the same width and depth on fields, keeping about as
    many real numbers. Both are narrow or few where the grid or the number of modes is large. Not in it are lift, head
    and the optimiser's update.
    """

    t1_seconds: float
    fno_seconds: float
    speed_up: float
    width: int
    depth: int
    batch: int
    fno_modes: tuple[int, ...]
    device: str
    threads: int

    @property
    def sentence(self) -> str:
        """What was measured, in words."""
        return (
            f"Measured on {self.device}, {self.threads} threads: forward and backward of a batch of {self.batch} "
            f"through {self.depth} layers, {self.width} wide, take {1e3 * self.t1_seconds:.3g} ms in T1 and "
            f"{1e3 * self.fno_seconds:.3g} ms in an FNO that keeps as many numbers: a speed-up of {self.speed_up:.2g}."
        )


def measure_rates(fields: Fields, transform: str, modes: int | tuple[int, ...] | ModeSet, device: str) -> Rates:
    """Time the layers of a T1 with these modes against those of an FNO on the grid of these fields."""
    size, ndim, where = fields.resolution, fields.ndim, torch.device(device)
    is_set = isinstance(modes, ModeSet)
    kept = (len(modes),) if isinstance(modes, ModeSet) else get_transform(transform).block(modes, size)
    # As many real numbers in a complex low-pass: half the modes of each axis, on both sides.
    sides = (round(kept[0] ** (1 / ndim)),) * ndim if is_set else kept
    limits = get_transform("dft").max_modes(size)
    fno_modes = tuple(min(max(1, -(-side // 2)), limit) for side, limit in zip(sides, limits, strict=True))
    width = WIDTH
    while width > 4 and prod(kept) * width**2 > LAYER_WEIGHTS:
        width //= 2
    batch = BATCH if prod(size) * width * BATCH <= LAYER_NUMBERS else 1
    large = prod(size) * width > LAYER_NUMBERS or (is_set and kept[0] > 1024)  # a set is mixed as a whole
    depth = 1 if large else DEPTH
    with torch.random.fork_rng(devices=[]):
        t1 = torch.nn.Sequential(*(T1Layer(width, kept, is_set) for _ in range(depth))).to(where)
        fno = torch.nn.Sequential(*(FNOLayer(width, fno_modes, ndim) for _ in range(depth))).to(where)
        Z = torch.randn(width, prod(kept), batch).to(where)
        v = torch.randn(batch, width, *size).to(where)
    seconds = _interleaved([lambda: _step(t1, Z), lambda: _step(fno, v)], where)
    name = f"{where.type} ({platform.machine()}, {os.cpu_count()} cores)"
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
    threads = torch.get_num_threads()
    return Rates(seconds[0], seconds[1], seconds[1] / seconds[0], width, depth, batch, fno_modes, name, threads)


def _step(layers: torch.nn.Module, x: Tensor) -> None:
    layers.zero_grad(set_to_none=True)
    layers(x).square().mean().backward()


def _interleaved(steps: list[Callable[[], None]], device: torch.device) -> list[float]:
    """Median seconds of each step, by turns, so that a busy moment of the machine meets all of them."""
    taken: list[list[float]] = [[] for _ in steps]
    began, turns = time.perf_counter(), 0
    while turns < 2 or (time.perf_counter() - began < SECONDS and turns < 50):
        for step, seconds in zip(steps, taken, strict=True):
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        turns += 1
    return [statistics.median(seconds[1:]) for seconds in taken]  # the first turn warms up
