"""The paper's maps of the speed-up of T1 over an FNO, resolution × width and resolution × depth, measured here."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from transform_once.evaluation.speed import EXECUTIONS, OPPONENTS, TASKS, Case, Timing, measure
from transform_once.files import as_text, read_rows, write_rows
from transform_once.reports.curves import STYLE
from transform_once.reports.paper_table import PaperFigure, Row
from transform_once.training.run import environment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"paper": "an FNO with the paper's layer", "FNO": "this library's FNO"}


@dataclass(frozen=True)
class Plan:
    """Which cases to measure: resolutions × widths at one depth, resolutions × depths at one width."""

    resolutions: Sequence[int]
    widths: Sequence[int]
    depths: Sequence[int]
    width: int = 32
    depth: int = 6
    modes: int = 24
    transform: str = "dct"
    opponent: str = "paper"

    def __post_init__(self) -> None:
        numbers = (*self.resolutions, *self.widths, *self.depths, self.width, self.depth, self.modes)
        if not (self.resolutions and self.widths and self.depths) or min(numbers) < 1 or min(self.resolutions) < 4:
            raise ValueError(
                "a speed map needs resolutions of at least 4, and widths, depths and modes of at least 1; got "
                f"resolutions {list(self.resolutions)}, widths {list(self.widths)}, depths {list(self.depths)} and "
                f"modes {self.modes}"
            )
        if self.opponent not in OPPONENTS:
            raise ValueError(f"the opponent is one of {', '.join(OPPONENTS)}; got {self.opponent!r}")

    @classmethod
    def default(cls, device: torch.device, **given: Any) -> "Plan":
        """Sizes that this device does in minutes, where they are not given."""
        large = device.type == "cuda"
        sizes: dict[str, Any] = {
            "resolutions": [64, 128, 256, 512, 1024] if large else [64, 128],
            "widths": [16, 32, 64, 128] if large else [16, 32],
            "depths": [1, 2, 4, 8] if large else [1, 2, 4],
        }
        return cls(**sizes | {name: value for name, value in given.items() if value is not None})

    def cases(self) -> list[Case]:
        """All cases once, the cheapest first."""
        cells = {(r, w, self.depth) for r in self.resolutions for w in self.widths}
        cells |= {(r, self.width, d) for r in self.resolutions for d in self.depths}
        ordered = sorted(cells, key=lambda cell: (cell[0] ** 2 * cell[1] * cell[2], cell))
        return [Case(*cell, self.modes, self.transform, self.opponent) for cell in ordered]


def speed_map(plan: Plan, folder: Path, device: torch.device, seconds: float) -> PaperFigure:
    """Measure the cases of a plan that the table in `folder` does not have yet, and draw all of them.

    The table is written after every case. After the first, no case is begun once `seconds` have passed; the next call
    goes on.
    """
    facts = environment(device)
    versions = f"torch {facts['torch']}, transform-once {facts['transform_once']}, Python {facts['python']}"
    threads = f", {facts['threads']} threads" if device.type == "cpu" else ""
    # Only rows that agree in all of this stand in one map.
    about = {"hardware": facts["hardware"] + threads, "versions": versions}
    about |= {"opponent": plan.opponent, "transform": plan.transform, "modes": plan.modes}
    name = f"speed-map-{device.type}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    rows: list[Row] = list(read_rows(path))
    executions = EXECUTIONS if device.type == "cuda" else EXECUTIONS[:1]
    began, done, left = time.monotonic(), 0, 0
    for case, execution in _tracked([(case, execution) for case in plan.cases() for execution in executions]):
        if _rows_of(rows, about | _cell(case, execution)):
            continue
        if done and time.monotonic() - began > seconds:
            left += 1
            continue
        done += 1
        rows += [_row(timing, about) for timing in measure(case, device, execution)]
        write_rows(path, rows)
    shown = [row for case in plan.cases() for e in executions for row in _rows_of(rows, about | _cell(case, e))]
    sentences = [
        f"{NAMES[plan.opponent]} against T1 on {about['hardware']}, {versions}; medians of interleaved rounds."
    ]
    if left:
        sentences.append(f"{left} cells are not measured yet: {seconds:g} s were used up; the same command continues.")
    if any(row["note"] for row in shown):
        sentences.append("Hatched cells do not fit in memory.")
    sizes = f"{plan.modes} modes, transform {plan.transform}"
    title = f"T1 against {NAMES[plan.opponent]}, {sizes}\n{about['hardware']}, torch {facts['torch']}"
    pictures = {}
    for execution in executions:
        of_execution = [row for row in shown if row["execution"] == execution]
        if of_execution:
            added = "" if execution == "eager" else "-graph"
            pictures[added] = _draw(plan, of_execution, f"{title}, {execution}")
    return PaperFigure(name, pictures, rows, _summary(shown), sentences, line_art=True)


def _cell(case: Case, execution: str) -> dict[str, Any]:
    return {"resolution": case.resolution, "width": case.width, "depth": case.depth, "execution": execution}


def _rows_of(rows: Sequence[Row], wanted: Mapping[str, Any]) -> list[Row]:
    """The rows that agree with all wanted values, as the table writes them."""
    text = {name: as_text(value) for name, value in wanted.items()}
    return [row for row in rows if all(as_text(row.get(name)) == value for name, value in text.items())]


def _row(timing: Timing, about: Mapping[str, Any]) -> dict[str, Any]:
    """A timing as it stands in the table; milliseconds."""
    case, task = timing.case, timing.task
    return {
        "figure": "speed-map",
        "series": f"{task.name}, {timing.ends}, {timing.execution}",
        "x": case.resolution,
        "y": timing.speed_up,
        **_cell(case, timing.execution),
        "task": task.name,
        "ends": timing.ends,
        "kept": case.kept,
        "t1_ms": 1e3 * timing.t1,
        "fno_ms": 1e3 * timing.fno,
        "t1_range_ms": 1e3 * timing.t1_spread,
        "fno_range_ms": 1e3 * timing.fno_spread,
        "note": timing.note,
        **about,
    }


def _summary(rows: Sequence[Row]) -> list[Row]:
    """The least, median and largest speed-up of each series."""
    found: list[Row] = []
    for series in dict.fromkeys(str(row["series"]) for row in rows):
        values = np.array([float(row["y"]) for row in rows if row["series"] == series])
        measured = values[np.isfinite(values)]
        numbers = [float(f(measured)) if measured.size else math.nan for f in (np.min, np.median, np.max)]
        names = ("least speed-up", "median", "largest")
        found.append({"series": series, "cells": len(values), **dict(zip(names, numbers, strict=True))})
    return found


def _draw(plan: Plan, rows: Sequence[Row], title: str) -> "Figure":
    """Tasks down; T1 by its ends, and both maps of each, across; that of depths where there are several."""
    from matplotlib import rc_context
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    values = np.array([float(row["y"]) for row in rows])
    values = values[np.isfinite(values)]
    bound = max(2.0, float(np.maximum(values, 1 / values).max(initial=1.0)))
    norm, width = LogNorm(1 / bound, bound), 0.62 * len(plan.resolutions) + 1.3
    tall = max(len(plan.widths), len(plan.depths))
    maps = ("width", "depth") if len(set(plan.depths)) > 1 else ("width",)
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(
            figsize=(2 * len(maps) * width + 1.2, len(TASKS) * (0.42 * tall + 1.3) + 0.8), layout="constrained"
        )
        panels = figure.subplots(len(TASKS), 2 * len(maps), squeeze=False)
        for line, task in zip(panels, TASKS, strict=True):
            for axes, (ends, along) in zip(line, [(e, a) for e in task.ends for a in maps], strict=True):
                own = [row for row in rows if (row["task"], row["ends"]) == (task.name, ends)]
                _draw_map(axes, plan, own, along, norm)
                axes.set_title(f"{task.name}\nT1 {ends}", fontsize=8)
        colours = ScalarMappable(norm, "RdBu")
        bar = figure.colorbar(colours, ax=panels, shrink=0.5, label="FNO's time / T1's time (blue: T1 is faster)")
        ticks = [
            tick
            for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000)
            if 1 / bound <= tick <= bound
        ]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
        figure.suptitle(title, fontsize=10)
    return figure


def _draw_map(axes: "Axes", plan: Plan, rows: Sequence[Row], along: str, norm: Any) -> None:
    from matplotlib.patches import Rectangle

    fixed = ("depth", plan.depth) if along == "width" else ("width", plan.width)
    levels, columns = sorted(set(getattr(plan, f"{along}s"))), sorted(set(plan.resolutions))
    table, too_large = np.full((len(levels), len(columns)), math.nan), set()
    for row in rows:
        place = int(row[along]), int(row["resolution"])
        if int(row[fixed[0]]) != fixed[1] or place[0] not in levels or place[1] not in columns:
            continue
        i, j = levels.index(place[0]), columns.index(place[1])
        table[i, j] = float(row["y"])
        if row["note"]:
            too_large.add((i, j))
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="///", edgecolor="#888888", lw=0))
    axes.imshow(table, cmap="RdBu", norm=norm, aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(table):
        if not math.isfinite(value) and (i, j) not in too_large:
            axes.text(j, i, "not\nmeasured", ha="center", va="center", fontsize=5, color="#666666")
        if math.isfinite(value):
            dark = abs(2 * float(norm(value)) - 1) > 0.55
            axes.text(
                j,
                i,
                f"{value:.2g}" if value < 99.5 else f"{value:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    axes.set_xticks(range(len(columns)), [str(n) for n in columns])
    axes.set_yticks(range(len(levels)), [str(n) for n in levels])
    axes.set(xlabel=f"resolution ({fixed[0]} {fixed[1]})", ylabel=along)


def _tracked(items: list[tuple[Case, str]]) -> Iterator[tuple[Case, str]]:
    """The items, with a bar on the terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(items, description="speed map")
