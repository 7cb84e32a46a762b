"""One long table of results for each figure of the paper: the same rows are drawn, printed and written as CSV."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from transform_once.files import atomic_path, write_rows
from transform_once.reports.curves import STYLE
from transform_once.reports.figures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from transform_once.reports.panels import Scale

Array = NDArray[Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class PaperFigure:
    """A figure of the paper remade.

    name       stem of its files
    pictures   matplotlib figures by what is added to the stem, "" for the only one
    rows       every number of its curves, bars and maps: figure, series, x, y, and what else the figure has
    summary    the few of them to print
    sentences  what to know about them
    images     the arrays behind its image panels, whose pixels would make a table of millions of rows
    line_art   whether to write it as SVG too
    """

    name: str
    pictures: Mapping[str, "Figure"]
    rows: Sequence[Row]
    summary: Sequence[Row]
    sentences: Sequence[str] = ()
    images: Mapping[str, Array] = field(default_factory=dict)
    line_art: bool = False

    def save(self, folder: str | Path) -> list[Path]:
        """Write NAME.csv, NAME.png, for line art NAME.svg, and for image panels NAME.npz; returns their paths."""
        from matplotlib import rc_context

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [write_rows(folder / f"{self.name}.csv", self.rows)]
        with rc_context(STYLE):
            for added, figure in self.pictures.items():
                endings = ("png", "svg") if self.line_art else ("png",)
                paths += [save_figure(figure, folder / f"{self.name}{added}.{ending}") for ending in endings]
        if self.images:
            paths.append(folder / f"{self.name}.npz")
            with atomic_path(paths[-1]) as temporary, temporary.open("wb") as file:
                np.savez_compressed(file, **self.images)  # type: ignore[arg-type]
        return paths

    def show(self) -> None:
        """Print the summary as a table, then the sentences."""
        from rich.console import Console
        from rich.table import Table

        console, columns = Console(highlight=False), list(dict.fromkeys(name for row in self.summary for name in row))
        table = Table(*columns)
        for row in self.summary:
            table.add_row(*(_printed(row.get(name)) for name in columns))
        console.print(table)
        for sentence in self.sentences:
            console.print(sentence, markup=False)


def _printed(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_image(axes: "Axes", values: Array, scale: "Scale", title: str) -> "AxesImage":
    """A picture (rows, columns) in the colours of a scale; logarithmic scales show log₁₀ of magnitudes."""
    shown = np.asarray(values, dtype=float)
    if scale.logarithmic:
        with np.errstate(divide="ignore"):
            shown = np.maximum(np.log10(np.abs(shown)), scale.low)
    low, high = (scale.low, scale.high) if scale.high > scale.low else (scale.low - 0.5, scale.high + 0.5)
    image = axes.imshow(shown, cmap=scale.colours, vmin=low, vmax=high, interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    return image


def picture_size(shape: Sequence[int], longest: float = 3.0) -> tuple[float, float]:
    """Width and height in inches of a panel for a picture (rows, columns)."""
    rows, columns = shape
    scale = longest / max(rows, columns)
    return max(1.2, columns * scale), max(1.0, rows * scale)
