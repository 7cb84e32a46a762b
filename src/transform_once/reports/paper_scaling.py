"""The paper's scaling laws: test error against the number of training samples, mean and deviation over seeds."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transform_once.reports.curves import STYLE, colour_of, logarithmic
from transform_once.reports.paper_runs import labels
from transform_once.reports.paper_table import PaperFigure, Row
from transform_once.reports.runs import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Law(NamedTuple):
    """Errors by the number of samples, and error ≈ factor · samples^exponent by least squares of the logarithms."""

    samples: list[int]
    mean: list[float]
    deviation: list[float]
    runs: list[int]
    factor: float
    exponent: float


def scaling_law(group: Group) -> Law | None:
    """The law of a group; None where its runs have a single number of samples."""
    errors: dict[int, list[float]] = {}
    for run in group.runs:
        count = run.part("data").get("train")
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{run.name} does not say how many samples it was trained on: leave it out")
        finite = [error for error in run.numbers("relative_l2") if np.isfinite(error) and error > 0]
        if not finite:
            raise ValueError(f"{run.name} has no finite relative L2 above zero in metrics.json: leave it out")
        errors.setdefault(count, []).extend(finite)
    if len(errors) < 2:
        return None
    samples = sorted(errors)
    means = [fmean(errors[n]) for n in samples]
    exponent, offset = np.polyfit(np.log(samples), np.log(means), 1)
    deviations = [stdev(errors[n]) if len(errors[n]) > 1 else 0.0 for n in samples]
    counts = [len(errors[n]) for n in samples]
    return Law(samples, means, deviations, counts, float(np.exp(offset)), float(exponent))


def scaling_figure(groups: Sequence[Group]) -> PaperFigure:
    """A line for each group that has runs with at least two numbers of samples."""
    names = [name.replace("\n", " ") for name in labels(groups, 60)]
    laws = {name: law for name, group in zip(names, groups, strict=True) if (law := scaling_law(group)) is not None}
    if not laws:
        sizes = sorted({int(run.part("data")["train"]) for group in groups for run in group.runs})
        raise ValueError(
            "a scaling law needs runs of one model with at least two different numbers of training samples; these "
            f"were trained on {', '.join(map(str, sizes))}"
        )
    rows: list[Row] = []
    summary: list[Row] = []
    for name, law in laws.items():
        about = {"figure": "scaling", "series": name}
        for n, mean, deviation, count in zip(law.samples, law.mean, law.deviation, law.runs, strict=True):
            rows.append({**about, "x": n, "y": mean, "quantity": "relative L2", "deviation": deviation, "runs": count})
            summary.append(
                {
                    "model": name,
                    "samples": n,
                    "runs": count,
                    "relative L2": mean,
                    "deviation": deviation,
                    "exponent": law.exponent,
                }
            )
        rows.append({**about, "y": law.exponent, "quantity": "exponent"})
        rows.append({**about, "y": law.factor, "quantity": "factor"})
    sentences = ["The exponents are least squares of log error against log samples, each number of samples once."]
    left = len(groups) - len(laws)
    if left:
        sentences.append(f"{left} kinds of runs have a single number of samples and are left out.")
    return PaperFigure("scaling", {"": _draw(laws)}, rows, summary, sentences, line_art=True)


def _draw(laws: dict[str, Law]) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.subplots()
        for number, (name, law) in enumerate(laws.items()):
            colour, style = colour_of(number)
            lower = np.minimum(law.deviation, 0.9 * np.array(law.mean))  # a log axis has no zero
            bars = np.stack([lower, law.deviation])
            axes.errorbar(law.samples, law.mean, bars, fmt="o", color=colour, capsize=3, markersize=4)
            x = np.array([law.samples[0], law.samples[-1]])
            label = f"{name}: samples^{law.exponent:.2f}".replace("-", "−")
            axes.plot(x, law.factor * x**law.exponent, style, color=colour, label=label)
        logarithmic(axes.xaxis, axes.yaxis)
        axes.set(xlabel="training samples")
        axes.set_ylabel("test relative L2, mean ± deviation over seeds")
        sizes = sorted({n for law in laws.values() for n in law.samples})
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend()
    return figure
