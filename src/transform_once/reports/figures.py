"""Pictures of fields and spectra. Each function returns a matplotlib figure; `save_figure` writes it."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from transform_once.files import atomic_path
from transform_once.spectral.modes import TopM, irreducible_curve, irreducible_loss
from transform_once.spectral.transforms import dct, get_transform, idct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Write the figure (PNG, PDF or SVG by the ending) and return its path."""
    path = Path(path)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=150)
    return path


def compaction_figure(field: Tensor, modes: int) -> "Figure":
    """A field (1, 1, rows, columns), its DCT, what `modes` of each axis keep of it, and the irreducible loss.

    Transforms are compared at equal numbers of real coefficients, since they mean different things by `modes`.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Rectangle

    size = tuple(field.shape[2:])
    rebuilt = idct(dct(field, 2, modes), 2, size)
    figure = Figure(figsize=(13, 7.2), layout=ConstrainedLayoutEngine(wspace=0.1))
    grid = figure.add_gridspec(2, 6, height_ratios=(1, 1.05))
    limit = field.abs().max().item()
    panels: list[Axes] = [figure.add_subplot(grid[0, 2 * i : 2 * i + 2]) for i in range(3)]
    for axes, values, title in (
        (panels[0], field, f"field, {size[0]}×{size[1]} cells"),
        (panels[1], rebuilt, f"rebuilt from {modes}² of {math.prod(size)} modes"),
        (panels[2], rebuilt - field, f"what is lost: {irreducible_loss(field, modes):.2%} (relative L2)"),
    ):
        bound = values.abs().max().item() if axes is panels[2] else limit
        image = axes.imshow(values[0, 0], cmap="RdBu_r", vmin=-bound, vmax=bound)
        axes.set(title=title, xlabel="column", ylabel="row")
        figure.colorbar(image, ax=axes, shrink=0.85)
    spectrum = figure.add_subplot(grid[1, :3])
    magnitude = dct(field, 2)[0, 0].abs().clamp_min(1e-12).log10()
    image = spectrum.imshow(magnitude, cmap="magma", vmin=magnitude.max().item() - 7)
    spectrum.add_patch(Rectangle((-0.5, -0.5), modes, modes, fill=False, edgecolor="white", linewidth=1.5))
    spectrum.set(title="its DCT; the box is kept", xlabel="column half-waves", ylabel="row half-waves")
    figure.colorbar(image, ax=spectrum, label="log₁₀ |coefficient|", shrink=0.85)
    _draw_irreducible_loss(figure.add_subplot(grid[1, 3:]), field, modes)
    return figure


def _draw_irreducible_loss(axes: "Axes", field: Tensor, modes: int) -> None:
    size = tuple(field.shape[2:])
    for name, style in (("dct", "-"), ("fourier", "--"), ("dft", ":")):
        T = get_transform(name)
        boxes, losses = irreducible_curve(field, name)
        numbers = [math.prod(T.block(box, size)) * (1 + T.is_complex) for box in boxes]
        shown = losses > 1e-7
        axes.plot(np.array(numbers)[shown], losses[shown], style, label=f"low-pass, {name}")
    counts = np.unique(np.geomspace(4, 0.9 * math.prod(size), 25).astype(int))
    best = [irreducible_loss(field, TopM(int(count)).fit(field)) for count in counts]
    axes.plot(counts, best, color="black", linewidth=1, label="top-m, dct")
    axes.axvline(modes * modes, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        title="irreducible loss",
        xlabel="kept real coefficients",
        ylabel="relative L2",
    )
    axes.legend(frameon=False)
