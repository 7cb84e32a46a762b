"""Line plots: of the report, as SVG inside the page, and of studies."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from transform_once.reports.panels import data_uri
from transform_once.reports.runs import Run

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Array = NDArray[Any]

# Dark enough on white, and told apart by people who see few colours; after the last they begin again, dashed.
COLOURS = ("#1f5fa8", "#c8442b", "#2b8a4b", "#8a4bb0", "#a66a00", "#00848c", "#b8336a", "#555555")
# Numbers at a log axis between the powers of ten, for axes that span less than so many times their lower end.
BETWEEN = ((10.0, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)), (300.0, (1.0, 2.0, 5.0)))
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "transform-once",  # the same runs give the same page
    "svg.fonttype": "none",  # letters stay text, a quarter of the size of their outlines
    "path.simplify_threshold": 0.5,  # in points: long histories stay small
    "font.size": 9,
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.labelcolor": "#222222",
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def colour_of(group: int) -> tuple[str, str]:
    """Colour and line style of a group of runs by its number."""
    return COLOURS[group % len(COLOURS)], ("-", "--", "-.", ":")[group // len(COLOURS) % 4]


def drawn(figure: "Figure", alt: str) -> str:
    """The figure as an image of the page, on a white card in the light and in the dark."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f'<figure class="plot"><img src="{data_uri(file.getvalue(), "image/svg+xml")}" alt="{escape(alt)}"></figure>'


def line_plot(
    lines: Mapping[str, tuple[Array, Array]],
    labels: tuple[str, str],
    alt: str,
    log: bool = True,
    styles: Sequence[tuple[str, str]] = (),
) -> str:
    """Named lines (x, y) in one plot, with markers where there are few points; "" where no number can be drawn."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawable = {name: (x, _positive(y) if log else y) for name, (x, y) in lines.items()}
    if not any(np.isfinite(y).any() for _, y in drawable.values()):
        return ""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.8), layout="constrained")
        axes = figure.subplots()
        for number, (name, (x, y)) in enumerate(drawable.items()):
            colour, style = styles[number] if styles else colour_of(number)
            axes.plot(x, y, style, color=colour, marker="o" if len(x) < 16 else "", markersize=3, label=name)
        if log:
            logarithmic(axes.yaxis)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        if len(drawable) > 1:
            axes.legend()
        return drawn(figure, alt)


def logarithmic(*axes: "Axis") -> None:
    """Make axes logarithmic, with plain numbers: as many between the powers of ten as there is room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis in axes:
        axis.axes.set(**{"xscale" if axis is axis.axes.xaxis else "yscale": "log"})
        low, high = axis.get_view_interval()
        between = next((subs for span, subs in BETWEEN if high < span * low), (1.0,))
        axis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)) if high < 4 * low else LogLocator(subs=between))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _positive(values: Array) -> Array:
    return np.where(values > 0, values, np.nan)


def learning_curves(groups: Sequence[Sequence[Run]], against: str) -> str:
    """Loss (thin) and validation (thick) of all runs against "epoch" or "seconds"; "" where nothing can be drawn."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    some = False
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axes = figure.subplots()
        for number, group in enumerate(groups):
            colour, style = colour_of(number)
            for history in (history for run in group for history in run.history.values()):
                for column, width, strength in (("loss", 0.8, 0.55), ("validation", 1.7, 1.0)):
                    y = _positive(history[column])
                    shown = np.isfinite(y) & np.isfinite(history[against])
                    some |= bool(shown.any())
                    marker = "o" if shown.sum() < 3 else ""
                    # Validation is measured now and then: its points are joined across the epochs between.
                    x, y = (history[against][shown], y[shown]) if column == "validation" else (history[against], y)
                    axes.plot(x, y, style, color=colour, lw=width, alpha=strength, marker=marker, markersize=3)
        logarithmic(axes.yaxis)
        axes.set(ylabel="relative L2", xlabel={"epoch": "epochs", "seconds": "seconds of training"}[against])
        thick, thin = Line2D([], [], color="#333333", lw=1.7), Line2D([], [], color="#333333", lw=0.8, alpha=0.55)
        axes.legend([thick, thin], ["validation", "training loss"])
        return drawn(figure, f"training loss and validation error of every run against {against}") if some else ""


def wave_lengths(shape: Sequence[int], transform: str) -> Array:
    """The length of the wave vector of every mode of a spectrum of that shape.

    Mode i of an axis has i half-waves for the dct, i + 1 for the dst, (i+1)//2 waves for fourier, and for the dft the
    wave numbers of an FFT, of an rfft along the last axis.
    """
    last = len(shape) - 1
    numbers = [
        np.arange(n)
        if transform == "dct" or (transform == "dft" and axis == last)
        else np.arange(n) + 1
        if transform == "dst"
        else (np.arange(n) + 1) // 2
        if transform == "fourier"
        else np.fft.fftfreq(n, 1 / n)
        for axis, n in enumerate(shape)
    ]
    grids = np.meshgrid(*numbers, indexing="ij", sparse=True)
    return np.sqrt(sum((np.square(k, dtype=float) for k in grids), np.zeros(tuple(shape))))


def shells(spectrum: Array, transform: str) -> Array:
    """Root mean square (shells,) of a spectrum (*grid) over all modes of about equal wave number.

    Shell k holds the wave vectors of lengths from k − ½ to k + ½; one without modes is nan.
    """
    shell = np.rint(wave_lengths(spectrum.shape, transform)).astype(int).ravel()
    energy = np.bincount(shell, np.square(np.abs(spectrum), dtype=float).ravel())
    count = np.bincount(shell)
    return np.sqrt(np.divide(energy, count, out=np.full(energy.shape, np.nan), where=count > 0))


def shell_plot(target: Array, error: Array, kept: Array | None, transform: str, channel: str) -> str:
    """Target, error and floor (what the target has on modes that are not kept) against the wave number."""
    number = np.arange(len(shells(target, transform)))
    lines = {"target": (number, shells(target, transform)), "error": (number, shells(error, transform))}
    if kept is not None and not kept.all():
        lines["irreducible floor"] = (number, shells(np.where(kept, 0, target), transform))
    waves = "half-waves" if transform in ("dct", "dst") else "waves"
    alt = f"coefficients of target and error of {channel} by wave number, and the irreducible floor"
    styles = [("#555555", "-"), ("#c8442b", "-"), ("#1f5fa8", "--")]
    return line_plot(lines, (f"wave number ({waves} across the grid)", "RMS coefficient"), alt, styles=styles)


def line_figure(
    rows: Sequence[Mapping[str, Any]], x: str, y: str, titles: tuple[str, str], scales: tuple[str, str] = ("log", "log")
) -> "Figure":
    """Mean and standard deviation over rows that share label and `x`, a line for each label; finite numbers alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.8), layout="constrained")
        axes = figure.subplots()
        for number, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
            found: dict[float, list[float]] = {}
            for row in (row for row in rows if row["label"] == label and math.isfinite(float(row[y]))):
                found.setdefault(float(row[x]), []).append(float(row[y]))
            means = [statistics.fmean(found[at]) for at in sorted(found)]
            spread = [statistics.stdev(found[at]) if len(found[at]) > 1 else 0.0 for at in sorted(found)]
            colour, style = colour_of(number)
            marker = "o" if len(found) < 16 else ""
            axes.errorbar(sorted(found), means, spread, color=colour, ls=style, marker=marker, ms=3, label=label)
        logarithmic(*(axis for axis, scale in zip((axes.xaxis, axes.yaxis), scales, strict=True) if scale == "log"))
        axes.set(xlabel=titles[0], ylabel=titles[1])
        axes.legend()
    return figure
