"""The paper's picture of a sample in n-space and in k-space, log |DCT|, with all its channels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from transform_once.reports.curves import COLOURS, STYLE, shells
from transform_once.reports.panels import field_scale, spectrum_scale
from transform_once.reports.paper_data import Shown, picture
from transform_once.reports.paper_table import Array, PaperFigure, Row, draw_image, picture_size
from transform_once.spectral.transforms import dct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 8  # channels of a figure
LEAST = 1e-12  # of the largest coefficient: smaller ones are those of rounding and are drawn there


def spectrum_figure(arrays: Sequence[tuple[str, Shown]], number: int) -> PaperFigure:
    """One sample (the first of each array) in n-space above its k-space, and its coefficients by wave number below."""
    fields: dict[str, Array] = {}
    spectra: dict[str, Array] = {}
    upright = any(data.upright for _, data in arrays)
    for array, data in arrays:
        picture(data.values[0, 0].numpy())  # complains about one axis
        found = dct(data.values[:1], len(data.grid))[0].numpy()
        for c in range(len(data.channels)):
            title = f"{array}: {data.label(c)}"
            fields[title], spectra[title] = data.values[0, c].numpy(), found[c]
    rows: list[Row] = []
    summary: list[Row] = []
    for title, X in spectra.items():
        about = {"figure": "spectrum", "series": title}
        rows += [
            {**about, "x": k, "y": float(y), "quantity": "RMS coefficient by half-waves"}
            for k, y in enumerate(shells(X, "dct"))
            if np.isfinite(y)
        ]
        energy = np.square(X)
        half = tuple(slice(0, -(-n // 2)) for n in X.shape)
        inside = float(energy[half].sum() / energy.sum()) if energy.any() else 1.0
        summary.append(
            {"channel": title, "largest |coefficient|": float(np.abs(X).max()), "energy, lower half": inside}
        )
        rows.append({**about, "x": None, "y": inside, "quantity": "share of the energy in the lower half of each axis"})
    sentences = [f"The first {MOST} of {len(fields)} channels are drawn."] if len(fields) > MOST else []
    source = arrays[0][1].source
    figure = _draw(dict(list(fields.items())[:MOST]), spectra, upright, f"{source}, sample {number}")
    images = {
        f"{kind}_{i}": a
        for kind, held in (("field", fields), ("spectrum", spectra))
        for i, a in enumerate(held.values())
    }
    return PaperFigure("spectrum", {"": figure}, rows, summary, sentences, images)


def _draw(fields: dict[str, Array], spectra: dict[str, Array], upright: bool, title: str) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = picture_size(picture(next(iter(fields.values())), upright).shape, 2.6)
    width = max(width, 2.2)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(6.0, len(fields) * (width + 1.0)), 2 * height + 3.6), layout="constrained")
        panels = figure.subplots(3, len(fields), squeeze=False, height_ratios=(height, height, 1.7))
        for column, (name, values) in enumerate(fields.items()):
            X = spectra[name]
            constant = " (constant)" if np.ptp(values) == 0 else ""
            image = draw_image(
                panels[0, column], picture(values, upright), field_scale(values, values), name + constant
            )
            figure.colorbar(image, ax=panels[0, column], shrink=0.8)
            _draw_spectrum(panels[1, column], X, upright)
            _draw_shells(panels[2, column], X)
        figure.suptitle(title, fontsize=10)
    return figure


def _draw_spectrum(axes: "Axes", X: Array, upright: bool) -> None:
    plane = X[0] if X.ndim == 3 else X.T if upright else X
    image = draw_image(axes, plane, spectrum_scale(X), "")
    across, down = ("x", "y") if upright else ("column", "row")
    axes.set(xlabel=f"{across} half-waves", ylabel=f"{down} half-waves")
    axes.set_xticks([0, plane.shape[1] - 1])
    axes.set_yticks([0, plane.shape[0] - 1])
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label="log₁₀ |DCT|")


def _draw_shells(axes: "Axes", X: Array) -> None:
    y = shells(X, "dct")
    largest = float(np.nanmax(y)) or 1.0
    axes.plot(np.arange(len(y)), np.maximum(y, LEAST * largest), color=COLOURS[0], lw=1)
    axes.set(yscale="log", xlabel="half-waves (length of k)", ylabel="RMS |DCT|")
