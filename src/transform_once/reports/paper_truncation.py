"""The paper's truncation errors: what the lowest modes of DCT and real FFT leave, at equal cost in real numbers."""

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from transform_once.evaluation.metrics import Metrics
from transform_once.reports.curves import COLOURS, STYLE
from transform_once.reports.paper_data import Shown, varying
from transform_once.reports.paper_table import PaperFigure, Row
from transform_once.spectral.transforms import get_transform

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 24
QUANTITIES = {"relative_l2": "relative L2", "mae": "mean absolute error", "psnr": "PSNR in dB"}
SERIES = {"dct": "DCT, m² numbers", "dft": "real FFT, 4m² numbers"}
LEAST = 1e-9  # of the largest error: smaller ones are those of rounding and are drawn there


def truncation_rows(data: Shown, points: int = POINTS) -> list[dict[str, Any]]:
    """Errors of truncated fields in the terms of `evaluation.metrics.Metrics`, row by row.

    The DFT with wave numbers below m on both sides costs ∏(2m) real numbers, as the DCT with 2m modes of each axis.
    """
    size = data.grid
    if min(size) < 2 or max(size) < 4:
        raise ValueError(f"a truncation needs two points along every axis and four along one; these fields have {size}")
    steps = max(size) // 2
    rows = []
    for step in np.unique(np.geomspace(1, max(1, steps - 1), points).round().astype(int)).tolist():
        waves = tuple(max(1, -(-step * (n // 2) // steps)) for n in size)
        for name in SERIES:
            T, modes = get_transform(name), waves if name == "dft" else tuple(2 * m for m in waves)
            metrics = Metrics(data.channels)
            for y in data.values.split(1):
                Y = T.forward(y, len(size), modes)
                metrics.add(T.inverse(Y, len(size), size), y)
            found, cost = metrics.result(), prod(T.block(modes, size)) * (1 + T.is_complex)
            about = {"figure": "truncation", "series": SERIES[name], "cost": cost, "modes": "×".join(map(str, modes))}
            rows += [
                {**about, "x": cost / prod(size), "y": found[quantity], "quantity": words}
                for quantity, words in QUANTITIES.items()
            ]
    return rows


def truncation_figure(data: Shown, modes: int | None = None) -> PaperFigure:
    """Relative L2, mean absolute error and PSNR against the normalised cost; `modes` marks a budget of DCT modes."""
    varying(data.values.flatten(0, 1))  # complains where nothing does
    rows = truncation_rows(data)
    budget = None
    if modes is not None:
        if not 1 <= modes <= min(data.grid):
            raise ValueError(f"modes must lie between 1 and {min(data.grid)} on a grid of {data.grid}; got {modes}")
        budget = modes ** len(data.grid) / prod(data.grid)
    summary = []
    for cost in sorted({row["cost"] for row in rows})[::4]:
        for name in SERIES.values():
            own = [row for row in rows if (row["cost"], row["series"]) == (cost, name)]
            numbers = {str(row["quantity"]): row["y"] for row in own}
            summary.append({"transform": name, "modes": own[0]["modes"], "numbers": cost, **numbers})
    channels = ", ".join(data.channels)
    title = f"{data.source}: {channels}, {' × '.join(map(str, data.grid))}, {len(data.values)} samples"
    sentence = (
        "The cost is the kept real numbers over the points of a field; errors are over all channels, as they are."
    )
    return PaperFigure("truncation", {"": _draw(rows, title, budget)}, rows, summary, [sentence], line_art=True)


def _draw(rows: list[dict[str, Any]], title: str, budget: float | None) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(12, 3.9), layout="constrained")
        for axes, words in zip(figure.subplots(1, 3), QUANTITIES.values(), strict=True):
            for name, colour, style in zip(SERIES.values(), COLOURS, ("-", "--"), strict=False):
                own: list[Row] = [row for row in rows if (row["series"], row["quantity"]) == (name, words)]
                x, y = (np.array([np.nan if row[c] is None else row[c] for row in own], float) for c in "xy")
                largest = np.nanmax(y) if np.isfinite(y).any() else 1.0
                y = y if "PSNR" in words else np.maximum(y, LEAST * (largest or 1.0))
                axes.plot(x, y, style, color=colour, marker=".", label=name)
            axes.set(xscale="log", xlabel="normalised cost: kept numbers / points", ylabel=words)
            if "PSNR" not in words:
                axes.set_yscale("log")
            if budget is not None:
                axes.axvline(budget, color="#888888", lw=0.8, label="marked budget")
            axes.legend()
        figure.suptitle(title, fontsize=10)
    return figure
