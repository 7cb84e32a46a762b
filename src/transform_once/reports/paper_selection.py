"""The paper's reconstructions after low-pass and top-m selection of DCT modes, at equal numbers of coefficients."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transform_once.reports.curves import COLOURS, STYLE
from transform_once.reports.panels import error_scale, field_scale
from transform_once.reports.paper_data import Shown, picture, varying
from transform_once.reports.paper_table import Array, PaperFigure, Row, draw_image, picture_size
from transform_once.spectral.modes import LowPass, TopM, irreducible_loss
from transform_once.spectral.transforms import dct, idct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 40  # of a curve
SERIES = ("low-pass", "one shared top-m set", "top-m chosen per field")
PANEL_ERROR = 0.1  # by default the low-pass of the panels is the smallest that stays under it
TOLERANCE = 0.01  # the error for which coefficients are counted
LEAST = 1e-9  # errors below are those of rounding: they are drawn there


class Curves(NamedTuple):
    """Mean relative errors of fields by the number of kept coefficients, and how many each selection needs for 1%.

    `boxes` are the low-passes that are drawn, the same number of modes along every axis as far as it has them; the
    errors of the other selections are those of as many coefficients. `needed` of modes chosen per field is the mean
    over the fields of what each of them needs.
    """

    boxes: list[tuple[int, ...]]
    errors: dict[str, list[float]]
    needed: dict[str, float]


def selection_curves(fields: Tensor) -> Curves:
    """The curves of fields (n, *grid) that vary and have mean zero."""
    size = tuple(fields.shape[1:])
    energy = dct(fields, len(size)).square()
    relative = (energy / energy.flatten(1).sum(1).reshape(-1, *(1,) * len(size))).flatten(1)
    boxes = [tuple(min(m, n) for n in size) for m in range(1, max(size) + 1)]
    shell = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij")).amax(0).flatten()
    per_shell = relative.new_zeros(len(fields), len(boxes)).index_add(1, shell, relative)
    shared = relative[:, energy.sum(0).flatten().sort(stable=True, descending=True).indices]
    single = _left_out(relative.sort(1, descending=True).values)
    low_pass, top = _left_out(per_shell)[:, 1:].mean(0), _left_out(shared).mean(0)
    costs = [prod(box) for box in boxes]
    needed = (
        costs[int((low_pass <= TOLERANCE).nonzero()[0])],
        int((top <= TOLERANCE).nonzero()[0]),
        (single > TOLERANCE).sum(1).double().mean().item(),
    )
    chosen = np.unique(np.geomspace(1, len(boxes), POINTS).round().astype(int) - 1).tolist()
    counts = [costs[i] for i in chosen]
    errors = (low_pass[chosen], top[counts], single.mean(0)[counts])
    named = {name: values.tolist() for name, values in zip(SERIES, errors, strict=True)}
    return Curves([boxes[i] for i in chosen], named, dict(zip(SERIES, map(float, needed), strict=True)))


def _left_out(energy: Tensor) -> Tensor:
    """√ of what is left out by keeping the first 0, 1, … of shares of the energy (n, M): (n, M + 1).

    Summed from the last up: no cancellation.
    """
    tails = energy.flip(1).cumsum(1).flip(1)
    return torch.cat([tails, tails.new_zeros(len(tails), 1)], 1).sqrt()


def selection_figure(
    data: Shown, pictured: Shown, number: int, channel: int = 0, modes: int | None = None
) -> PaperFigure:
    """One field, what low-pass and top-m keep of it, their errors, and the curves of all fields and channels of `data`.

    `pictured` holds the sample of that number. `modes` is the low-pass of the panels, of each axis; the top-m set has
    as many modes. Field means are aside.
    """
    if not 0 <= channel < len(data.channels):
        raise ValueError(f"there are the channels {', '.join(data.channels)}, from 0 on; got channel {channel}")
    one = varying(pictured.values[0, channel][None])
    fields = varying(data.values.flatten(0, 1))
    boxes, errors, needed = selection_curves(fields)
    box = _panel_box(one, modes)
    count, size = prod(box), tuple(one.shape[1:])
    mean = float(pictured.values[0, channel].mean())
    rebuilt, lost = {}, {}
    for name, chosen in (("low-pass", LowPass(box).fit(one[:, None])), ("top-m", TopM(count).fit(one[:, None]))):
        kept = chosen.select(dct(one[:, None], len(size)))
        rebuilt[name] = (idct(chosen.scatter(kept), len(size), size)[0, 0] + mean).numpy()
        lost[name] = irreducible_loss(one[:, None], chosen)
    rows: list[Row] = [
        {"figure": "selection", "series": name, "x": prod(b), "y": y, "quantity": "mean relative L2", "box": str(b)}
        for name, values in errors.items()
        for b, y in zip(boxes, values, strict=True)
    ]
    about = {"figure": "selection", "x": count, "quantity": "relative L2 of the panel", "box": str(box)}
    rows += [{**about, "series": f"panel, {name}", "y": value} for name, value in lost.items()]
    truth = pictured.values[0, channel].numpy()
    title = f"{data.source}, sample {number}: {data.label(channel)}"
    figure = _draw(data.upright, truth, rebuilt, lost, count, (title, data.label(channel)), boxes, errors)
    summary = [{"selection": name, "coefficients": count, "relative L2": value} for name, value in lost.items()]
    sentences = [
        f"Errors are means over {len(fields)} fields, in the norm of the field less its mean.",
        f"For {TOLERANCE:.0%}: {', '.join(f'{name} {count:,.0f}' for name, count in needed.items())} coefficients.",
    ]
    about = {"figure": "selection", "quantity": "coefficients for a mean relative L2 of 1%", "y": TOLERANCE}
    rows += [{**about, "series": name, "x": x} for name, x in needed.items()]
    images = {"original": truth, **{name.replace("-", "_"): values for name, values in rebuilt.items()}}
    return PaperFigure("selection", {"": figure}, rows, summary, sentences, images)


def _panel_box(one: Tensor, modes: int | None) -> tuple[int, ...]:
    size = tuple(one.shape[1:])
    if modes is None:
        boxes, errors, _ = selection_curves(one)
        return next(box for box, error in zip(boxes, errors[SERIES[0]], strict=True) if error <= PANEL_ERROR)
    if not 1 <= modes <= max(size):
        raise ValueError(f"modes must lie between 1 and {max(size)} on a grid of {size}; got {modes}")
    return tuple(min(modes, n) for n in size)


def _draw(
    upright: bool,
    truth: Array,
    rebuilt: dict[str, Array],
    lost: dict[str, float],
    count: int,
    titles: tuple[str, str],
    boxes: Sequence[tuple[int, ...]],
    errors: dict[str, list[float]],
) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    whole = picture(truth, upright)
    scale, symmetric = field_scale(truth, truth), error_scale(np.stack([r - truth for r in rebuilt.values()]))
    width, height = picture_size(whole.shape, 3.4)
    height = max(height, 1.8)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(11.0, 3 * width + 1.6), 2 * height + 1.7), layout="constrained")
        panels = figure.subplots(2, 3)
        image = draw_image(panels[0, 0], whole, scale, f"original, {' × '.join(map(str, truth.shape))}")
        for column, (name, values) in enumerate(rebuilt.items(), start=1):
            draw_image(panels[0, column], picture(values, upright), scale, f"{name}, {count:,} coefficients")
            heading = f"error of {name}: relative L2 {lost[name]:.2g}"
            wrong = draw_image(panels[1, column], picture(values - truth, upright), symmetric, heading)
        figure.colorbar(image, ax=panels[0, :], shrink=0.9, pad=0.01, label=titles[1])
        figure.colorbar(wrong, ax=panels[1, 1:], shrink=0.9, pad=0.01, label=f"error of {titles[1]}")
        _draw_curves(panels[1, 0], boxes, errors, count)
        figure.suptitle(titles[0], fontsize=10)
    return figure


def _draw_curves(axes: "Axes", boxes: Sequence[tuple[int, ...]], errors: dict[str, list[float]], count: int) -> None:
    counts = [prod(box) for box in boxes]
    for (name, values), colour, style in zip(errors.items(), COLOURS, ("-", "--", ":"), strict=False):
        axes.plot(
            counts, np.maximum(values, LEAST), style, color=colour, marker="." if len(counts) < 16 else "", label=name
        )
    axes.axvline(count, color="#888888", lw=0.8)
    top = max(max(values) for values in errors.values())
    # Down to a hundred-thousandth: the last boxes keep nearly everything, and rounding takes over.
    axes.set(xscale="log", yscale="log", xlabel="coefficients kept of a field (grey: panels)")
    axes.set(ylabel="mean relative L2", ylim=(max(1e-5 * top, 0.5 * LEAST), 2 * max(top, 2 * LEAST)))
    axes.legend(loc="lower left")
