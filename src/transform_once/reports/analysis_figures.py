"""`t1 analyze`: the findings of `evaluation.analysis` as tables, JSON and pictures."""

import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from transform_once.data.options import ReadOptions
from transform_once.evaluation.analysis import BASES, Analysis, analyze
from transform_once.evaluation.rates import CANDIDATES, LOW_PASS, in_words
from transform_once.files import atomic_path
from transform_once.reports import curves
from transform_once.reports.figures import save_figure
from transform_once.spectral.modes import ModeSet, kept_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = dict(zip(BASES, (curves.COLOURS[0], curves.COLOURS[1], curves.COLOURS[7]), strict=True))
DECADES = 10  # of a map's colours, below its largest value
MAPS = 4  # channels of an array that are drawn


def analyze_verb(
    data: Path,
    output: Path | None = None,
    tolerance: float = 0.01,
    samples: int | None = None,
    json: bool = False,
    device: str = "cpu",
    rates: bool = True,
    read: ReadOptions = ReadOptions(),  # noqa: B008
) -> None:
    """Look at fields before training: energy per mode, irreducible error, which transform and modes, at what cost.

    Args:
        data: A file or folder of fields, in any format that `t1 import` reads.
        output: Folder for analysis.json and the pictures energy.png, compaction.png and irreducible.png.
        tolerance: The mean relative error that dropping modes may cost, between 0 and 1; a tenth of what you hope for.
        samples: How many samples to look at, evenly spread; by default all.
        json: Print one JSON object instead of tables.
        device: Where transforms and measurements run, such as cpu or cuda.
        rates: Measure the speed-up over an FNO on this machine, which takes about a second.
        read: How to read the data.
    """
    from transform_once.data import formats

    fields = formats.read(data, **read.given())
    analysis = analyze(fields, tolerance=tolerance, samples=samples, rates=rates, device=device)
    text = dumps(analysis.to_dict(), allow_nan=False, ensure_ascii=False)
    if output is not None:
        save_analysis(analysis, output)
    if json:
        sys.stdout.write(text + "\n")
        return
    from rich.console import Console

    Console().print(analysis.table())
    if output is not None:
        print(f"analysis.json and pictures: {output}")


def save_analysis(analysis: Analysis, output: str | Path) -> list[Path]:
    """Write analysis.json and the three pictures into a folder, made where it is not there; returns their paths."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "analysis.json"
    with atomic_path(report) as temporary:
        temporary.write_text(dumps(analysis.to_dict(), allow_nan=False, ensure_ascii=False), encoding="utf-8")
    figures = {"energy": energy_figure, "compaction": compaction_figure, "irreducible": irreducible_figure}
    from matplotlib import rc_context

    with rc_context({**curves.STYLE, "axes.grid": False}):  # most are maps
        return [report, *(save_figure(draw(analysis), folder / f"{name}.png") for name, draw in figures.items())]


def energy_figure(analysis: Analysis) -> "Figure":
    """The mean energy of every mode in the recommended basis, one panel per channel, one row per array.

    Maps in two dimensions; in three the energy is summed over the first axis; in one a line per channel.
    """
    from matplotlib.figure import Figure

    energy = {array: values[:MAPS] for array, values in analysis.basis.energy.items()}
    ndim, most = len(analysis.resolution), max(len(values) for values in energy.values())
    columns, width = (1, 7.0) if ndim == 1 else (most, 4.6)
    figure = Figure(figsize=(max(width * columns, 5.2), 4.2 * len(energy) + 0.6), layout="constrained")
    panels = figure.subplots(len(energy), columns, squeeze=False)
    for row, (array, values) in zip(panels, energy.items(), strict=True):
        labels = [_label(analysis, array, name) for name in analysis.metadata.channels[array][: len(values)]]
        if ndim == 1:
            _draw_lines(row[0], analysis, values, labels)
            row[0].set_title(array)
            continue
        for axes, one, (name, unit) in zip(row, values, labels, strict=False):
            image = _draw_map(axes, analysis, one)
            axes.set_title(f"{array}: {name}")
            figure.colorbar(image, ax=axes, label=f"log₁₀ mean energy{unit}", extend="min")
        for axes in row[len(values) :]:
            axes.set_axis_off()
    found = analysis.recommendation
    kept = (
        f"{in_words(found.modes)} modes of each axis" if found.selection == LOW_PASS else f"top {found.modes:,} modes"
    )
    first = f", first {MAPS} channels" if len(analysis.basis.energy[analysis.judged]) > MAPS else ""
    summed = ", summed over the first axis" if ndim == 3 else ""
    marked = "dots" if ndim == 1 else "outline"
    title = f"mean energy per mode, {found.transform}{summed}{first}\n{marked}: the recommended {kept}"
    figure.suptitle(title, fontsize=11)
    return figure


def compaction_figure(analysis: Analysis) -> "Figure":
    """The share of energy left out against cost, for the three bases: low-pass solid, the largest modes dashed."""
    figure, axes = _curves_figure(
        f"energy compaction of the {analysis.judged} at equal cost",
        "share of the energy left out (field means aside)",
        analysis.tolerance**2,
        "tolerance²",
    )
    for name, basis in analysis.bases.items():
        low_pass = basis.low_pass[analysis.judged]
        _draw_curve(axes, low_pass.cost, low_pass.left_out, "-", COLOURS[name], f"{name}, low-pass")
        _draw_curve(axes, basis.top.cost, basis.top.left_out, "--", COLOURS[name], f"{name}, largest modes")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def irreducible_figure(analysis: Analysis) -> "Figure":
    """The irreducible relative L2 against the number of kept coefficients, with the recommendation marked."""
    figure, axes = _curves_figure(
        f"irreducible error of the {analysis.judged}",
        "mean relative L2 (field means aside)",
        analysis.tolerance,
        "tolerance",
    )
    found = analysis.recommendation
    for name in CANDIDATES:
        basis, width = analysis.bases[name], 2.2 if name == found.transform else 1.0
        low_pass = basis.low_pass[analysis.judged]
        _draw_curve(axes, low_pass.cost, low_pass.error, "-", COLOURS[name], f"{name}, low-pass", width)
        _draw_curve(axes, basis.top.cost, basis.top.error, "--", COLOURS[name], f"{name}, one shared top-m set", width)
    kept = f" of {in_words(found.modes)} modes" if found.selection == LOW_PASS else ""
    label = (
        f"recommended: {found.transform}, {found.selection}{kept}, {found.coefficients:,} numbers, {found.error:.2g}"
    )
    bottom = axes.get_ylim()[0]
    axes.axvline(found.coefficients, color="black", lw=0.8, linestyle=":")
    axes.plot([found.coefficients], [max(found.error, bottom)], "ko", markersize=7, label=label, clip_on=False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _curves_figure(title: str, ylabel: str, level: float, name: str) -> "tuple[Figure, Axes]":
    """Logarithmic axes down to a ten-thousandth of a level, which is marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", title=title, xlabel="cost: real numbers kept per channel", ylabel=ylabel)
    axes.set_ylim(1e-4 * level, 2)
    axes.axhline(level, color="black", lw=0.8, linestyle=":", label=f"{name} {level:.3g}")
    return figure, axes


def _draw_curve(
    axes: "Axes", cost: Sequence[int], values: Sequence[float], style: str, colour: str, label: str, width: float = 1.5
) -> None:
    """A curve down to the bottom of the axes; where it has few points they are marked."""
    bottom = axes.get_ylim()[0]
    number = next((i + 1 for i, value in enumerate(values) if value <= bottom), len(values))
    marker = "." if number < 12 else ""
    inside = [max(value, bottom) for value in values[:number]]
    axes.plot(cost[:number], inside, style, color=colour, label=label, lw=width, marker=marker)


def _label(analysis: Analysis, array: str, channel: str) -> tuple[str, str]:
    """The name of a channel, saying so if it never varies, and the unit of its energy."""
    constant = any((one.array, one.name, one.modes) == (array, channel, None) for one in analysis.basis.channels)
    unit = analysis.metadata.units.get(channel, "")
    return channel + (" (constant)" if constant else ""), f" / ({unit})²" if unit else ""


def _draw_map(axes: "Axes", analysis: Analysis, energy: Tensor) -> "AxesImage":
    kept = _kept_mask(analysis)
    if energy.ndim == 3:
        energy, kept = energy.sum(0), kept.any(0)
    logarithm = energy.clamp_min(torch.finfo(torch.float64).tiny).log10().numpy()
    top = float(logarithm.max())
    image = axes.imshow(logarithm, cmap="magma", vmin=top - DECADES, vmax=top, aspect="auto")
    if not kept.all():
        # Each mode is a square of the picture: the outline runs along the edges of the kept ones.
        fine = kept.repeat_interleave(4, 0).repeat_interleave(4, 1).float().numpy()
        rows, columns = ((np.arange(4 * n) + 0.5) / 4 - 0.5 for n in kept.shape)
        axes.contour(columns, rows, fine, levels=[0.5], colors="white", linewidths=1.0)
    axes.set(xlabel=f"column {_wave(analysis)}", ylabel=f"row {_wave(analysis)}")
    return image


def _draw_lines(axes: "Axes", analysis: Analysis, energy: Tensor, labels: list[tuple[str, str]]) -> None:
    kept, bottom = _kept_mask(analysis).numpy(), energy.max().item() * 10.0**-DECADES
    numbers = np.arange(energy.shape[1])
    for values, (name, unit) in zip(energy.clamp_min(bottom).numpy(), labels, strict=True):
        (line,) = axes.plot(numbers, values, lw=1, label=name + unit)
        axes.plot(numbers[kept], values[kept], ".", color=line.get_color())
    axes.set(yscale="log", xlabel=_wave(analysis), ylabel="mean energy")
    axes.legend(frameon=False, fontsize=9)


def _wave(analysis: Analysis) -> str:
    return "half-waves" if analysis.recommendation.transform == "dct" else "coefficient (1, cos 1, sin 1, …)"


def _kept_mask(analysis: Analysis) -> Tensor:
    """True at the recommended modes of the full spectrum."""
    modes = analysis.modes
    if isinstance(modes, ModeSet):
        return modes.mask(analysis.resolution)
    return kept_mask(modes, torch.empty(1, 1, *analysis.resolution), analysis.recommendation.transform)
