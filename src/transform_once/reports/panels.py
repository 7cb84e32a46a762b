"""Pictures of fields and spectra, as HTML: palette PNGs inside the page, with text and colour bars around them.

The numbers stand in the page as text, not in the image, so that they stay readable on a phone and in the dark, and a
panel costs a few kilobytes and a few milliseconds.
"""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transform_once.reports.runs import figures

Array = NDArray[Any]

TALLEST = 24  # of a panel, in rem: a grid much taller than wide becomes narrow instead
DECADES = 7  # of a spectrum that are shown, below its largest coefficient
ARROWS = 18  # along the longer side of a picture


@dataclass(frozen=True)
class Scale:
    """Numbers to colours: from `low` to `high` along a colour map of matplotlib; `logarithmic` shows log₁₀."""

    low: float
    high: float
    colours: str
    logarithmic: bool = False

    def labels(self) -> tuple[str, ...]:
        """What stands under the colour bar: both ends, and the zero of a symmetric one."""
        if self.logarithmic:
            return _power(self.low), _power(self.high)
        if self.low == self.high:
            return (f"{_signed(self.low)} everywhere",)
        middle = ("0",) if self.low == -self.high else ()
        return (_signed(self.low), *middle, _signed(self.high))


def _signed(value: float) -> str:
    return ("−" if value < 0 else "") + figures(abs(value), 3)


def _power(exponent: float) -> str:
    return "10" + f"{exponent:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def field_scale(truth: Array, prediction: Array) -> Scale:
    """One scale for both: around zero where the truth takes both signs, from least to largest otherwise."""
    low, high = _range(truth, prediction)
    least, largest = _range(truth)
    if least < 0 < largest and min(-least, largest) > 0.1 * max(-least, largest):
        bound = max(-low, high)
        return Scale(-bound, bound, "RdBu_r")
    return Scale(low, high, "viridis")


def error_scale(error: Array) -> Scale:
    """A scale symmetric around zero."""
    bound = max(map(abs, _range(error)))
    return Scale(-bound, bound, "PuOr_r")


def spectrum_scale(*spectra: Array) -> Scale:
    """One logarithmic scale for magnitudes, `DECADES` below the largest at most; whole powers of ten."""
    sizes = np.concatenate([np.ravel(np.abs(s)) for s in spectra])
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not sizes.size:
        return Scale(0.0, 1.0, "magma", True)
    high = math.ceil(math.log10(sizes.max()))
    return Scale(max(math.floor(math.log10(sizes.min())), high - DECADES), high, "magma", True)


def _range(*fields: Array) -> tuple[float, float]:
    finite = np.concatenate([np.ravel(f)[np.isfinite(np.ravel(f))] for f in fields])
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def panel(
    title: str, values: Array, scale: Scale, side: int, alt: str, overlay: str = "", grey: str = "not finite"
) -> str:
    """A picture (rows, columns) of at most `side` pixels with its title, colour bar, and an SVG `overlay` on top.

    Points that are not finite are grey, and the title says how many they are and why (`grey`). The overlay
    draws in grid points, from (0, 0) at the upper left corner of the first to (columns, rows).
    """
    rows, columns = values.shape
    lost = int(values.size - np.isfinite(values).sum())
    title += f" ({lost} of {values.size} points are {grey}: grey)" if lost else ""
    if scale.logarithmic:
        with np.errstate(divide="ignore"):
            pixels = np.log10(np.sqrt(shrink(np.square(np.asarray(values, dtype=float)), side)))
        pixels = np.where(np.isneginf(pixels), scale.low, pixels)
    else:
        pixels = shrink(values, side)
    over = f'<svg viewBox="0 0 {columns} {rows}" aria-hidden="true">{overlay}</svg>' if overlay else ""
    width = f"min(100%, {TALLEST * columns / rows:.2f}rem)"
    sharp = ' class="sharp"' if max(rows, columns) <= 160 else ""
    labels = "".join(f"<span>{label}</span>" for label in scale.labels())
    return (
        f'<figure class="panel"><figcaption>{escape(title)}</figcaption>'
        f'<div class="canvas" style="width:{width}"><img{sharp} width="{columns}" height="{rows}" '
        f'src="{_png(pixels, scale)}" alt="{escape(alt)}">{over}</div>'
        f'<div class="bar" style="width:{width}"><img width="128" height="1" src="{_bar(scale)}" alt="colour bar">'
        f"<div>{labels}</div></div></figure>"
    )


def shrink(values: Array, side: int) -> Array:
    """Means over squares of grid points, as small as brings the longer side to at most `side`."""
    factor = math.ceil(max(values.shape) / side)
    values = np.asarray(values, dtype=np.float64)
    for axis in range(2) if factor > 1 else ():
        starts = np.arange(0, values.shape[axis], factor)
        counts = np.diff(np.append(starts, values.shape[axis])).reshape((-1, 1) if axis == 0 else (1, -1))
        values = np.add.reduceat(values, starts, axis) / counts
    return values


def _png(values: Array, scale: Scale) -> str:
    """A palette image as a data URI; colour 255 is the grey of what is not finite."""
    from matplotlib import colormaps
    from PIL import Image

    reach = scale.high - scale.low
    share = (values - scale.low) / reach if reach else np.where(np.isfinite(values), 0.5, values)
    finite = np.isfinite(share)
    index = np.where(finite, np.rint(254 * np.clip(np.where(finite, share, 0), 0, 1)), 255).astype(np.uint8)
    palette = (255 * colormaps[scale.colours](np.linspace(0, 1, 255))[:, :3]).round().astype(np.uint8)
    image = Image.fromarray(index)
    image.putpalette([*palette.ravel().tolist(), 128, 128, 128])
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return data_uri(file.getvalue(), "image/png")


def _bar(scale: Scale) -> str:
    same = scale.low == scale.high
    values = np.full((1, 128), scale.low) if same else np.linspace(scale.low, scale.high, 128)[None]
    return _png(values, scale)


def data_uri(content: bytes, kind: str) -> str:
    """The content as an address that needs no file."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def plane(values: Array, first: bool = False) -> tuple[Array, str]:
    """A picture (rows, columns) of a field of two or three axes, and a word on what it shows of three.

    That is the middle plane of the first axis; the first one for spectra, which have their largest values there.
    """
    if values.ndim == 2:
        return values, ""
    number = 0 if first else values.shape[0] // 2
    return values[number], f"plane {number} of {values.shape[0]} along the first axis"


def arrows(along: Array, down: Array, fastest: float) -> str:
    """SVG arrows of a velocity, (rows, columns) each: `along` the columns and `down` the rows of the picture.

    An arrow of the speed `fastest` is as long as arrows lie apart.
    """
    rows, columns = along.shape
    apart = max(1, round(max(rows, columns) / ARROWS))
    parts = []
    for row in range(apart // 2, rows, apart):
        for column in range(apart // 2, columns, apart):
            dx, dy = (0.95 * apart / (fastest or 1) * float(v[row, column]) for v in (along, down))
            if not math.isfinite(dx + dy) or math.hypot(dx, dy) < 0.08 * apart:
                continue  # a dot would say nothing
            x, y = column + 0.5 - dx / 2, row + 0.5 - dy / 2
            head = "".join(
                f"M{x + dx:.2f} {y + dy:.2f}l{-0.3 * dx + turn * dy:.2f} {-0.3 * dy - turn * dx:.2f}"
                for turn in (0.18, -0.18)
            )
            parts.append(f"M{x:.2f} {y:.2f}l{dx:.2f} {dy:.2f}{head}")
    return f'<path class="arrows" d="{"".join(parts)}"/>'


def outline(kept: Array) -> str:
    """SVG lines around the kept modes, a boolean (rows, columns)."""
    padded = np.pad(np.asarray(kept, dtype=bool), 1)
    steps = [f"M{c} {r}h{n}" for r, c, n in _stretches(padded[1:, 1:-1] != padded[:-1, 1:-1])]
    steps += [f"M{c} {r}v{n}" for c, r, n in _stretches((padded[1:-1, 1:] != padded[1:-1, :-1]).T)]
    d = "".join(steps)
    return f'<path class="halo" d="{d}"/><path class="kept" d="{d}"/>'


def _stretches(edges: Array) -> list[tuple[int, int, int]]:
    """(line, start, length) of every stretch of true values along the lines of a boolean matrix."""
    changes = np.diff(np.pad(edges, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    lines, starts = np.nonzero(changes == 1)
    _, ends = np.nonzero(changes == -1)
    return list(zip(lines.tolist(), starts.tolist(), (ends - starts).tolist(), strict=True))


def pixels_a_side(pictures: int, bytes_allowed: float) -> int:
    """The longer side that keeps so many pictures under so many bytes: a smooth one takes about 0.8 byte a pixel."""
    return int(np.clip(math.sqrt(bytes_allowed / max(pictures, 1) / 0.8), 48, 256))


def figure_row(panels: Sequence[str], title: str = "") -> str:
    """Panels side by side, as many as fit."""
    heading = f"<h5>{escape(title)}</h5>" if title else ""
    return f'{heading}<div class="panels">{"".join(panels)}</div>'
