"""What a run predicts, in pictures: samples, rollouts with a slider, and errors in k-space."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transform_once.reports.curves import line_plot, shell_plot
from transform_once.reports.panels import (
    Scale,
    arrows,
    error_scale,
    field_scale,
    figure_row,
    outline,
    panel,
    pixels_a_side,
    plane,
    spectrum_scale,
)
from transform_once.reports.runs import Run, figures

Array = NDArray[Any]

SAMPLES, FRAMES, CHANNELS = 3, 12, 4  # shown at most, of a run
VELOCITY = ("velocity_x", "velocity_y")
EVALUATE = "Run <code>t1 evaluate</code> on this folder and make the report again."


@dataclass(frozen=True)
class Sample:
    """Fields to show, (c, *grid) each, of one sample and one time."""

    title: str
    truth: Array
    prediction: Array
    spread: Array | None = None

    @property
    def error(self) -> Array:
        """Prediction minus truth."""
        return self.prediction - self.truth

    @property
    def relative_l2(self) -> float | None:
        """‖prediction − truth‖/‖truth‖ over all channels and points but masked ones; None for a truth of zero."""
        seen = ~np.isnan(self.truth)
        norm = float(np.linalg.norm(self.truth[seen]))
        return float(np.linalg.norm(self.error[seen])) / norm if norm else None


class Pictures:
    """The pictures of one run, in as many pixels as its share of the page allows."""

    def __init__(self, run: Run, bytes_allowed: float) -> None:
        self.run, self.examples = run, run.examples
        self.target, self.mask = self.examples.get("target"), self.examples.get("mask")
        self.ndim = len(run.part("data").get("resolution") or ()) or self._axes()
        self.is_sequence = self.target is not None and self.target.ndim == self.ndim + 3
        self.names = self._names("target", self._count("target"))
        inputs = self._names("input", self._count("input"))
        self.inputs = inputs[-CHANNELS:] if self.is_sequence else inputs[:CHANNELS]
        # Solvers of flows store [x, y]; such pictures are turned so that x runs to the right and y up.
        self.upright = set(VELOCITY) <= set(self.names) and self.ndim == 2
        channels = min(len(self.names), CHANNELS)
        pictures = (2 + 3 * (FRAMES if self.is_sequence else SAMPLES)) * channels + SAMPLES * len(self.inputs)
        self.side = pixels_a_side(pictures, bytes_allowed)

    def _axes(self) -> int:
        spectrum = self.examples.get("target_spectrum")
        if spectrum is not None:
            return spectrum.ndim - 1
        return 2 if self.target is None else max(1, self.target.ndim - 2 - ("times" in self.examples))

    def _count(self, array: str) -> int:
        values = self.examples.get(array)
        return 0 if values is None else values.shape[-self.ndim - 1]

    def _names(self, array: str, count: int) -> list[str]:
        known = self.run.part("data").get("channels") or {}
        names = known.get(array) or known.get("trajectory") or known.get("input") or ()
        if array == "input" and count > len(names) > 0 and count % len(names) == 0:
            names = list(names) * (count // len(names))  # several frames of history
        return [str(name) for name in names] if len(names) == count else [f"channel_{i}" for i in range(count)]

    def unit(self, channel: str) -> str:
        """The channel with its unit, as in "pressure in Pa"."""
        unit = (self.run.part("data").get("units") or {}).get(channel)
        return f"{channel} in {unit}" if unit else channel

    def samples(self) -> str:
        """Input, truth, prediction and error of a few samples of the test data."""
        if self.target is None or "prediction" not in self.examples or not len(self.target):
            return f"<p>There are no predictions to show: the run was not evaluated. {EVALUATE}</p>"
        notes = ["Truth and prediction of a channel share one plot; the error (prediction − truth) has its own."]
        if self.ndim > 1:
            notes = [
                "Truth and prediction of a channel share one colour scale; that of the error (prediction − truth) is "
                "symmetric around zero."
            ]
        errors = self.examples.get("relative_l2")
        if not self.is_sequence and errors is not None and len(errors) > 1 and (np.diff(errors) >= 0).all():
            notes.append("The samples run from a small error to a large one.")
        if self.ndim == 3:
            notes.append(f"Of three axes the middle is shown: {plane(self.target.reshape(-1, *self._grid)[0])[1]}.")
        if len(self.names) > CHANNELS:
            notes.append(f"The first {CHANNELS} of {len(self.names)} channels are shown.")
        if self.upright and "pressure" in self.names:
            notes.append("Arrows on the pressure are the velocity.")
        chosen = np.linspace(0, len(self.target) - 1, min(SAMPLES, len(self.target))).round().astype(int)
        shown = self._film(len(self.target) // 2) if self.is_sequence else "".join(map(self._pair, chosen.tolist()))
        return f"<p>{' '.join(notes)}</p>{shown}"

    @property
    def _grid(self) -> tuple[int, ...]:
        return () if self.target is None else self.target.shape[-self.ndim :]

    def _title(self, number: int) -> str:
        index, errors = self.examples.get("index"), self.examples.get("relative_l2")
        title = f"Test sample {number if index is None else int(index[number])}"
        return title if errors is None else f"{title}: relative L2 {figures(float(errors[number]))}"

    def _sample(self, number: int) -> Sample:
        shown = {
            name: self.examples[name][number] for name in ("target", "prediction", "spread") if name in self.examples
        }
        if self.mask is not None:
            shown = {name: np.where(self.mask[number], np.nan, values) for name, values in shown.items()}
        return Sample(self._title(number), shown["target"], shown["prediction"], shown.get("spread"))

    def _pair(self, number: int) -> str:
        sample, given = self._sample(number), self.examples.get("input")
        first = None if given is None else given[number]
        if self.ndim == 1:
            return f"<h4>{escape(sample.title)}</h4>{self._lines(sample, first)}"
        inputs = [] if first is None else self._inputs(first, sample.title)
        rows = self._rows(sample, _scales(sample.truth, sample.prediction))
        if len(inputs) == len(rows) == 1:
            rows = [[*inputs, *rows[0]]]
        elif inputs:
            rows = [inputs, *rows]
        return f"<h4>{escape(sample.title)}</h4>{''.join(map(figure_row, rows))}"

    def _inputs(self, given: Array, title: str) -> list[str]:
        """Panels of the inputs (c, *grid), or of the last frame of (t, c, *grid)."""
        shown = given.reshape(-1, *given.shape[-self.ndim :])
        shown = shown[-len(self.inputs) :] if self.is_sequence else shown[: len(self.inputs)]
        return [
            panel(
                f"input: {self.unit(name)}",
                self._picture(values),
                field_scale(values, values),
                self.side,
                f"input {name}, {title}",
            )
            for name, values in zip(self.inputs, shown, strict=True)
        ]

    def _picture(self, values: Array) -> Array:
        picture = plane(values)[0]
        return picture.T[::-1] if self.upright else picture

    def _rows(self, sample: Sample, scales: Sequence[tuple[Scale, Scale]]) -> list[list[str]]:
        """For every channel truth, prediction and error, and the spread of an ensemble."""
        rows = []
        for c, (name, (scale, symmetric)) in enumerate(zip(self.names, scales, strict=False)):
            shown = [("truth", sample.truth, scale), ("prediction", sample.prediction, scale)]
            shown.append(("error", sample.error, symmetric))
            if sample.spread is not None:
                shown.append(("spread of the ensemble", sample.spread, _from_zero(sample.spread[c])))
            rows.append(
                [
                    panel(
                        f"{what}: {self.unit(name)}",
                        self._picture(values[c]),
                        colours,
                        self.side,
                        f"{what} of {name}, {sample.title}",
                        self._arrows(values, sample.truth) if name == "pressure" and scale is colours else "",
                        "not finite" if self.mask is None else "masked",
                    )
                    for what, values, colours in shown
                ]
            )
        return rows

    def _arrows(self, values: Array, truth: Array) -> str:
        if not self.upright:
            return ""
        along, up = (self.names.index(name) for name in VELOCITY)
        speed = np.hypot(truth[along], truth[up])
        fastest = float(speed[np.isfinite(speed)].max(initial=0))
        return arrows(self._picture(values[along]), -self._picture(values[up]), fastest)

    def _lines(self, sample: Sample, given: Array | None) -> str:
        """Fields along one axis: truth and prediction in one plot, the error in another."""
        plots = []
        for c, name in enumerate(self.names[:CHANNELS]):
            x = np.arange(self._grid[0])
            both = {"truth": (x, sample.truth[c]), "prediction": (x, sample.prediction[c])}
            if given is not None and self.inputs == self.names:
                both["input"] = (x, given.reshape(-1, len(x))[c - len(self.names)])
            styles = [("#555555", "-"), ("#c8442b", "--"), ("#1f5fa8", ":")]
            axes = ("grid point", self.unit(name))
            plots.append(line_plot(both, axes, f"truth and prediction of {name}, {sample.title}", False, styles))
            error, axes = {"error": (x, sample.error[c])}, ("grid point", f"error of {self.unit(name)}")
            plots.append(line_plot(error, axes, f"error of {name}, {sample.title}", False, [("#c8442b", "-")]))
        shown = "".join(filter(None, plots))
        return f'<div class="plots">{shown}</div>' if shown else "<p>None of its numbers is finite.</p>"

    def _film(self, number: int) -> str:
        """A rollout, truth, prediction and error of a sample over time, with a slider."""
        whole, times = self._sample(number), self.examples.get("times")
        steps = len(whole.truth)
        most = FRAMES // 2 if self.ndim == 1 else FRAMES  # lines are slower to draw, and change less
        chosen = np.unique(np.linspace(0, steps - 1, min(most, steps)).round().astype(int)).tolist()
        scales = _scales(np.moveaxis(whole.truth, 1, 0), np.moveaxis(whole.prediction, 1, 0))
        ends = {steps - 1: " last", 0: " first"}  # what a print shows
        frames = []
        for step in chosen:
            spread = None if whole.spread is None else whole.spread[step]
            frame = replace(whole, truth=whole.truth[step], prediction=whole.prediction[step], spread=spread)
            when = f"frame {step + 1} of {steps}"
            if times is not None and len(times) == steps:
                when = f"t = {figures(float(times[step]), 3)}"
            caption = f"{when}: relative L2 {figures(frame.relative_l2)}"
            rows = self._lines(frame, None) if self.ndim == 1 else "".join(map(figure_row, self._rows(frame, scales)))
            frames.append(
                f'<div class="frame{ends.get(step, "")}" data-caption="{escape(caption)}"{" hidden" if step else ""}>'
                f'<p class="when">{escape(caption)}</p>{rows}</div>'
            )
        given = self.examples.get("input")
        shown = [] if given is None or self.ndim == 1 else self._inputs(given[number], whole.title)
        start = f'<div class="start">{"".join(figure_row([one]) for one in shown)}</div>' if shown else ""
        return (
            f'<h4>{escape(whole.title)}</h4><div class="film"><label class="slider"><span>time</span>'
            f'<input type="range" min="0" max="{len(frames) - 1}" value="0"><output></output></label>'
            f'<div class="stage">{start}<div class="frames">{"".join(frames)}</div></div></div>'
        )

    def spectra(self) -> str:
        """Target and error in k-space, as maps with the kept modes outlined, and by wave number."""
        target, error = self.examples.get("target_spectrum"), self.examples.get("error_spectrum")
        if target is None or error is None:
            return f"<p>There is no spectrum of the error: the run was not evaluated. {EVALUATE}</p>"
        kept, transform = self.examples.get("kept"), self.run.transform
        parts = []
        for c, name in enumerate(self.names or [f"channel_{i}" for i in range(len(target))]):
            if c == min(CHANNELS, len(target)):
                break
            own = kept[c] if kept is not None and kept.ndim == target.ndim else kept
            curve = shell_plot(target[c], error[c], own, transform, name)
            maps = [] if self.ndim == 1 else self._maps(target[c], error[c], own, transform, name)
            parts.append(figure_row([*maps, curve] if curve else maps, self.unit(name) if len(target) > 1 else ""))
        return f"<p>{self._legend(kept, transform)}</p>{''.join(parts)}"

    def _legend(self, kept: Array | None, transform: str) -> str:
        words = "Root mean square coefficients over the test samples"
        words += ", at the last step of the rollout." if self.is_sequence else "."
        basis = {
            "dct": "half-waves of the DCT",
            "dst": "half-waves of the DST",
            "fourier": "modes of the real Fourier basis",
        }.get(transform, "wave numbers of the DFT, the first axis with zero in its middle")
        if self.ndim > 1:
            words += f" In the maps the last axis runs to the right and the one before it down, in {basis}"
            words += ", for wave number zero of the first of three axes." if self.ndim == 3 else "."
        if kept is None:
            return words + " The model is not confined to a set of modes, so that nothing is outlined."
        holds = "The outline holds the kept modes," if self.ndim > 1 else "Kept are"
        return (
            f"{words} {holds} {figures(int(kept.sum()))} of {figures(kept.size)} coefficients. On the others the error "
            "of a model that predicts only those is the target itself, the irreducible floor."
        )

    def _maps(self, target: Array, error: Array, kept: Array | None, transform: str, name: str) -> list[str]:
        scale = spectrum_scale(target)
        shown = [np.fft.fftshift(a, axes=range(a.ndim - 1)) if transform == "dft" else a for a in (target, error)]
        if kept is not None and transform == "dft":
            kept = np.fft.fftshift(kept, axes=range(kept.ndim - 1))
        middle = transform == "dft"
        lines = "" if kept is None else outline(plane(kept, first=not middle)[0])
        titles = (f"target: spectrum of {name}", f"error: spectrum of {name}")
        return [
            panel(title, plane(values, first=not middle)[0], scale, self.side, f"{title}, logarithmic", lines)
            for title, values in zip(titles, shown, strict=True)
        ]


def _scales(truth: Array, prediction: Array) -> list[tuple[Scale, Scale]]:
    """For every channel, the first axis of both, a scale of the field and one of the error."""
    pairs = list(zip(truth, prediction, strict=True))[:CHANNELS]
    return [(field_scale(t, p), error_scale(p - t)) for t, p in pairs]


def _from_zero(values: Array) -> Scale:
    return replace(field_scale(values, values), low=0.0, colours="viridis")
