"""The paper's predictions of each model and their errors in k-space, also outside the kept modes, where R_o is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from transform_once.data.fields import Fields
from transform_once.reports.curves import STYLE, colour_of
from transform_once.reports.panels import Scale, error_scale, field_scale, spectrum_scale
from transform_once.reports.paper_data import VELOCITY, picture
from transform_once.reports.paper_runs import DRAWN, Predicted, Tails, labels, predicted, tails
from transform_once.reports.paper_table import Array, PaperFigure, Row, draw_image, picture_size
from transform_once.reports.runs import Group, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 1e-9  # errors below are those of rounding: they are drawn there


class Panel(NamedTuple):
    """A picture of the figure."""

    title: str
    values: Array
    scale: Scale


def predictions_figure(
    groups: Sequence[Group], fields: Fields | None, sample: int | None, channel: int, device: torch.device
) -> PaperFigure:
    """Truth, prediction, error and the spectrum of the error for one run of each group, and what lies outside."""
    runs = [group.runs[0] for group in groups]
    drawn, names = runs[:DRAWN], labels(groups)
    found = predicted(drawn, fields, sample, device)
    for run, one in zip(drawn, found, strict=True):
        if one.times or one.truth.ndim < 3:
            raise ValueError(
                f"{run.name} predicts {'rollouts' if one.times else 'fields of one axis'}: this figure "
                "shows pairs of pictures; for trajectories use the figure rollout"
            )
        if not 0 <= channel < len(one.truth):
            raise ValueError(f"{run.name} predicts {len(one.truth)} channels, numbered from 0; got channel {channel}")
    outside = {name: tails(run) for name, run in zip(names, runs, strict=True)}
    rows = _rows(groups, names, outside)
    summary = _summary(groups, names, outside)
    grid = _grid(drawn, names, found, channel)
    images = {
        f"{kind}_{i}": values[channel]
        for i, one in enumerate(found)
        for kind, values in (("truth", one.truth), ("prediction", one.prediction))
    }
    sentences = [
        "R_o is what a model that predicts zero outside the kept modes has there; a model that predicts them too can "
        "be better or worse. Both are over all test samples, √(energy outside / energy of the targets)."
    ]
    if len(runs) > DRAWN:
        sentences.append(f"The first {DRAWN} of {len(runs)} kinds of runs are drawn; the table has all.")
    if len({one.number for one in found}) > 1:
        sentences.append("The runs' examples share no test sample, so each shows its own: give --data to change that.")
    figure = _draw(grid, outside, drawn[0].source, _channel(drawn[0], channel))
    return PaperFigure("predictions", {"": figure}, rows, summary, sentences, images)


def _rows(groups: Sequence[Group], names: Sequence[str], outside: dict[str, Tails]) -> list[Row]:
    rows: list[Row] = []
    for group, name in zip(groups, names, strict=True):
        own, series = outside[name], name.replace("\n", " ")
        for quantity, values in (("error outside the lowest modes", own.error), ("R_o", own.floor)):
            about = {"figure": "predictions", "series": series, "quantity": quantity, "transform": own.transform}
            rows += [{**about, "x": x, "y": y} for x, y in zip(own.cost, values, strict=True)]
        numbers, error, floor = own.kept
        at_kept: Row = {"figure": "predictions", "series": series, "transform": own.transform, "x": numbers}
        rows.append({**at_kept, "y": error, "quantity": "error outside the kept modes"})
        rows.append({**at_kept, "y": floor, "quantity": "R_o of the kept modes"})
        for run in group.runs:
            for words, path in (("relative L2", ("relative_l2",)), ("J", ("kspace", "J")), ("R_o", ("kspace", "R_o"))):
                about = {"figure": "predictions", "series": series, "quantity": f"{words} of the run {run.name}"}
                rows.append({**about, "y": run.number(*path)})
    return rows


def _summary(groups: Sequence[Group], names: Sequence[str], outside: dict[str, Tails]) -> list[Row]:
    from transform_once.reports.runs import mean_and_deviation

    summary: list[Row] = []
    for group, name in zip(groups, names, strict=True):
        numbers, error, floor = outside[name].kept
        summary.append(
            {
                "model": name.replace("\n", " "),
                "runs": len(group.runs),
                "relative L2": mean_and_deviation(group.numbers("relative_l2")),
                "kept numbers": numbers,
                "error outside": error,
                "R_o": floor,
            }
        )
    return summary


def _channel(run: Run, channel: int) -> str:
    known = run.part("data").get("channels") or {}
    names = known.get("target") or known.get("input") or ()
    name = names[channel] if channel < len(names) else f"channel {channel}"
    unit = (run.part("data").get("units") or {}).get(name)
    return f"{name} in {unit}" if unit else str(name)


def _grid(
    runs: Sequence[Run], names: Sequence[str], found: Sequence[Predicted], channel: int
) -> list[list[Panel | None]]:
    """Rows of panels: fields, errors, spectra; the truth comes first where all share it, else above each prediction."""
    known = (runs[0].part("data").get("channels") or {}).get("target") or ()
    upright = set(VELOCITY) <= set(known)
    truths, predictions = (
        [picture(getattr(one, kind)[channel], upright) for one in found] for kind in ("truth", "prediction")
    )
    scale = field_scale(np.concatenate([t.ravel() for t in truths]), np.concatenate([p.ravel() for p in predictions]))
    errors = [p - t for p, t in zip(predictions, truths, strict=True)]
    symmetric = error_scale(np.concatenate([e.ravel() for e in errors]))
    spectra = [np.abs(run.examples["error_spectrum"][channel]) for run in runs]
    targets = [np.abs(run.examples["target_spectrum"][channel]) for run in runs]
    maps = spectrum_scale(*targets)
    lines: list[list[Panel | None]] = [
        [Panel(f"{name}\nprediction", p, scale) for name, p in zip(names, predictions, strict=False)],
        [Panel(f"error, relative L2 {_relative(e, t):.3g}", e, symmetric) for e, t in zip(errors, truths, strict=True)],
        [Panel(f"error in k-space ({run.transform})", _plane(s), maps) for run, s in zip(runs, spectra, strict=True)],
    ]
    shared = (
        len(
            {
                (one.number, run.part("data").get("source"), one.truth.shape)
                for one, run in zip(found, runs, strict=True)
            }
        )
        == 1
    )
    if shared:
        whole = Panel(f"truth, test sample {found[0].number}", truths[0], scale)
        target = Panel(f"target in k-space ({runs[0].transform})", _plane(targets[0]), maps)
        return [[whole, *lines[0]], [None, *lines[1]], [target, *lines[2]]]
    above: list[Panel | None] = [
        Panel(f"truth, test sample {one.number}", t, scale) for one, t in zip(found, truths, strict=True)
    ]
    return [above, *lines]


def _plane(spectrum: Array) -> Array:
    return spectrum[0] if spectrum.ndim == 3 else spectrum


def _relative(error: Array, truth: Array) -> float:
    seen = np.isfinite(truth)
    return float(np.linalg.norm(error[seen]) / (np.linalg.norm(truth[seen]) or 1))


def _draw(grid: list[list[Panel | None]], outside: dict[str, Tails], source: str, channel: str) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    first = next(panel for panel in grid[0] if panel is not None)
    width, height = picture_size(first.values.shape, 2.3)
    width, columns = max(width, 1.9), len(grid[0])
    with rc_context(STYLE):
        size = (max(7.5, columns * (width + 0.25) + 1.0), len(grid) * (height + 0.45) + 3.9)
        figure = Figure(figsize=size, layout="constrained")
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(size[1] - 3.4, 3.4))[:, 0]
        panels = upper.subplots(len(grid), columns, squeeze=False)
        for line, axes_of_line in zip(grid, panels, strict=True):
            for panel, axes in zip(line, axes_of_line, strict=True):
                if panel is None:
                    axes.set_axis_off()
                    continue
                image = draw_image(axes, panel.values, panel.scale, panel.title)
            logarithmic = any(panel is not None and panel.scale.logarithmic for panel in line)
            label, extend = ("log₁₀ RMS coefficient", "min") if logarithmic else (channel, "neither")
            upper.colorbar(image, ax=axes_of_line, shrink=0.85, pad=0.02, label=label, extend=extend)
        upper.suptitle(source, fontsize=10)
        _draw_tails(lower.subplots(), outside)
    return figure


def _draw_tails(axes: "Axes", outside: dict[str, Tails]) -> None:
    floors: set[str] = set()
    for number, (name, own) in enumerate(outside.items()):
        colour, style = colour_of(number)
        axes.plot(own.cost, np.maximum(own.error, LEAST), style, color=colour, label=name.replace("\n", " "))
        axes.plot([own.kept[0]], [max(own.kept[1], LEAST)], "o", color=colour, markersize=5)
        if own.transform not in floors:
            floors.add(own.transform)
            style = "--" if len(floors) == 1 else ":"
            axes.plot(
                own.cost,
                np.maximum(own.floor, LEAST),
                color="#555555",
                lw=1,
                ls=style,
                label=f"R_o: zero is predicted there ({own.transform})",
            )
    top = max(max(own.error) for own in outside.values())
    least = max(min(own.kept[1] for own in outside.values()) / 30, LEAST)
    axes.set(xscale="log", yscale="log", ylim=(min(least, top / 10), 3 * max(top, 1)))
    axes.set(xlabel="numbers kept by a low-pass (dots: the modes of the model)", ylabel="relative error outside")
    axes.legend(loc="lower left")
