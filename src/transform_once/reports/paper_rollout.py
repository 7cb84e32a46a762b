"""The paper's rollouts: frames of each model against the truth, and the error against time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from transform_once.data.fields import Fields
from transform_once.reports.curves import STYLE, colour_of
from transform_once.reports.panels import field_scale
from transform_once.reports.paper_data import picture
from transform_once.reports.paper_runs import DRAWN, Predicted, labels, predicted
from transform_once.reports.paper_table import Array, PaperFigure, Row, draw_image, picture_size
from transform_once.reports.runs import Group, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAMES = 6  # shown at most


def step_errors(run: Run) -> tuple[Array, Array]:
    """Times and relative L2 of each step, from metrics.json; nan where an error is not finite."""
    found = (run.metrics.get("per_step") or {}).get("relative_l2")
    if not found:
        raise ValueError(
            f"{run.name} has no errors by step: a rollout needs runs trained on trajectories and evaluated"
        )
    errors = np.array([np.nan if value is None else value for value in found], dtype=float)
    times = np.array(run.metrics.get("times") or range(1, len(errors) + 1), dtype=float)
    if len(times) != len(errors) or not np.isfinite(errors).any():
        raise ValueError(
            f"the errors by step of {run.name} are not finite, or do not match its times: evaluate it again"
        )
    return times, errors


def rollout_figure(
    groups: Sequence[Group], fields: Fields | None, sample: int | None, channel: int, device: torch.device
) -> PaperFigure:
    """Frames of one trajectory, truth above the runs, and the error of all groups against time."""
    names, runs = labels(groups, 18), [group.runs[0] for group in groups][:DRAWN]
    curves = {name: _curve(group) for name, group in zip(names, groups, strict=True)}
    found = predicted(runs, fields, sample, device)
    for run, one in zip(runs, found, strict=True):
        if one.truth.ndim < 4:
            raise ValueError(f"{run.name} has no frames of two or three axes: this figure shows pictures of rollouts")
        if not 0 <= channel < one.truth.shape[1]:
            raise ValueError(f"{run.name} predicts {one.truth.shape[1]} channels, from 0 on; got channel {channel}")
    rows: list[Row] = []
    summary: list[Row] = []
    for name, (times, mean, deviation) in curves.items():
        about = {"figure": "rollout", "series": name.replace("\n", " ")}
        for step, (x, y, spread) in enumerate(zip(times, mean, deviation, strict=True), start=1):
            rows.append(
                {
                    **about,
                    "x": float(x),
                    "y": float(y),
                    "quantity": "relative L2",
                    "deviation": float(spread),
                    "step": step,
                }
            )
        ends = {"first step": float(mean[0]), "last step": float(mean[-1]), "mean": float(np.nanmean(mean))}
        summary.append({"model": name.replace("\n", " "), "steps": len(times), **ends})
    for name, one in zip(names, found, strict=False):
        about = {"figure": "rollout", "series": name.replace("\n", " "), "quantity": "relative L2 of the frame shown"}
        for place in _places(one):
            truth, prediction = one.truth[place], one.prediction[place]
            seen = np.isfinite(truth)
            y = float(np.linalg.norm((prediction - truth)[seen]) / (np.linalg.norm(truth[seen]) or 1))
            rows.append({**about, "x": one.times[place] if one.times else place + 1, "y": y, "sample": one.number})
    figure = _draw([name for name, _ in zip(names, found, strict=False)], found, channel, curves, runs[0].source)
    images = {
        f"{kind}_{i}": getattr(one, kind)[:, channel] for i, one in enumerate(found) for kind in ("truth", "prediction")
    }
    sentences = ["The errors are over all test trajectories; for several runs of a kind their mean ± deviation."]
    if len(groups) > DRAWN:
        sentences.append(f"The first {DRAWN} of {len(groups)} kinds of runs are drawn as frames; the table has all.")
    return PaperFigure("rollout", {"": figure}, rows, summary, sentences, images)


def _curve(group: Group) -> tuple[Array, Array, Array]:
    found = [step_errors(run) for run in group.runs]
    steps = min(len(times) for times, _ in found)
    errors = np.stack([values[:steps] for _, values in found])
    deviation = errors.std(0, ddof=1) if len(errors) > 1 else np.zeros(steps)
    return found[0][0][:steps], errors.mean(0), deviation


def _places(one: Predicted) -> list[int]:
    count = len(one.truth)
    return np.unique(np.linspace(0, count - 1, min(FRAMES, count)).round().astype(int)).tolist()


def _draw(
    names: Sequence[str],
    found: Sequence[Predicted],
    channel: int,
    curves: dict[str, tuple[Array, Array, Array]],
    source: str,
) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shared = len({(one.number, one.truth.shape) for one in found}) == 1
    lines: list[tuple[str, Predicted, str]] = []
    for name, one in zip(names, found, strict=True):
        if not lines or not shared:
            lines.append((f"truth,\ntest sample {one.number}", one, "truth"))
        lines.append((name, one, "prediction"))
    truths, predictions = (
        np.concatenate([getattr(one, kind)[:, channel].ravel() for one in found]) for kind in ("truth", "prediction")
    )
    places = _places(found[0])
    scale = field_scale(truths, np.clip(predictions, *_twice(truths)))  # one that blows up must not hide the others
    width, height = picture_size(picture(found[0].truth[0, channel]).shape, 1.9)
    with rc_context(STYLE):
        size = (max(7.5, len(places) * (width + 0.1) + 2.2), len(lines) * (height + 0.3) + 3.6)
        figure = Figure(figsize=size, layout="constrained")
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(size[1] - 3.2, 3.2))[:, 0]
        panels = upper.subplots(len(lines), len(places), squeeze=False)
        for line, (name, one, kind) in zip(panels, lines, strict=True):
            for axes, place in zip(line, _places(one), strict=False):
                when = f"t = {one.times[place]:.3g}" if one.times else f"step {place + 1}"
                image = draw_image(
                    axes, picture(getattr(one, kind)[place, channel]), scale, when if kind == "truth" else ""
                )
            line[0].set_ylabel(name, fontsize=8)
        upper.colorbar(image, ax=panels, shrink=min(1.0, 2 / len(lines)), pad=0.01, extend="both")
        upper.suptitle(f"{source}, one trajectory, one colour scale", fontsize=10)
        axes = lower.subplots()
        for number, (name, (times, mean, deviation)) in enumerate(curves.items()):
            colour, style = colour_of(number)
            marker = "o" if len(times) < 16 else ""
            axes.plot(times, mean, style, color=colour, marker=marker, markersize=3, label=name.replace("\n", " "))
            axes.fill_between(times, mean - deviation, mean + deviation, color=colour, alpha=0.2, lw=0)
        axes.set(xlabel="time", ylabel="relative L2, all test trajectories", ylim=(0, None))
        axes.legend()
    return figure


def _twice(values: Array) -> tuple[float, float]:
    """The range of the values, half as far again on both sides."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return low - 0.5 * (high - low), high + 0.5 * (high - low)
