"""Writing pictures: every figure goes through `save_figure`."""

from pathlib import Path
from typing import TYPE_CHECKING

from transform_once.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Write the figure (PNG, PDF or SVG by the ending) and return its path."""
    path = Path(path)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=150)
    return path
