"""Results of the Navier-Stokes study: its rows by model with the numbers of the paper, and the figures made of them."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from transform_once.reports.runs import Group, Run
from transform_once.studies.navier_stokes_protocol import FLOOR, STUDY, Protocol
from transform_once.studies.study import Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from transform_once.reports.paper_scaling import Law

NAMES = {"high": "high ν", "low": "low ν"}

# The paper's N-MSE (mean, deviation over 20 runs) at high and at low viscosity: its table of benchmarks.
PAPER: dict[str, dict[str, tuple[float, float | None]]] = {
    "FFNO": {"high": (0.997, 0.003), "low": (1.016, 0.010)},
    "FNO": {"high": (0.379, 0.006), "low": (0.328, 0.004)},
    "FNOvp": {"high": (0.351, 0.003), "low": (0.315, 0.006)},
    "T1+vp": {"high": (0.257, 0.007), "low": (0.240, 0.004)},
    # Its table of ablations, without deviations.
    "T1": {"high": (0.491, None), "low": (0.449, None)},
    "T1vp": {"high": (0.304, None), "low": (0.280, None)},
    "T1+": {"high": (0.295, None), "low": (0.260, None)},
}
# Lines that answer to the same number of the paper under another name.
PAPER |= {
    "FFNO, as released": PAPER["FFNO"],
    "FFNO, coordinates": PAPER["FFNO"],
    "FNO, phase-blind as released": PAPER["FNO"],
    "FNOvp, phase-blind": PAPER["FNOvp"],
}
# Million parameters, MB and ms a step in the paper, on an A100.
PAPER_COST = {"FFNO": "8.9, 35, 294", "FNO": "14.2, 56, 31", "FNOvp": "14.2, 56, 32", "T1+vp": "10.2, 40, 19"}

PICTURED = ("FNO, phase-blind as released", "FNO", "FNO, modern", "T1vp", "T1+vp", "T1Grid")


class Section:
    """The finished rows of a study by label, data set and number of pairs."""

    def __init__(self, results: Results, protocol: Protocol) -> None:
        self.protocol = protocol
        self.jobs = protocol.jobs()
        self.rows = {job.case.name: results.of(job.case) for job in self.jobs}
        self.missing = [job for job in self.jobs if not self.rows[job.case.name]]

    def of(self, label: str, data: str, pairs: int | None = None) -> list[Row]:
        """The rows of a line on a data set, one for each seed; by default on as many pairs as the first table's."""
        pairs = self.usual if pairs is None else pairs
        jobs = [job for job in self.jobs if (job.label, job.data, job.pairs) == (label, data, pairs)]
        return [row for job in jobs for row in self.rows[job.case.name]]

    def numbers(self, column: str, label: str, data: str, pairs: int | None = None) -> list[float]:
        """A column of these rows; seeds that failed have none."""
        return [float(row[column]) for row in self.of(label, data, pairs) if row.get(column)]

    def mean(self, column: str, label: str, data: str, pairs: int | None = None) -> float | None:
        """The mean over the seeds, None where there are none."""
        values = self.numbers(column, label, data, pairs)
        return statistics.fmean(values) if values else None

    def floor(self, data: str, transform: str, modes: str, column: str = "R_o") -> float | None:
        """The irreducible floor of these kept modes: R_o, or the column relative_l2 or coefficients."""
        rows = [row for row in self.of(FLOOR, data, 0) if (row["transform"], row["modes"]) == (transform, modes)]
        return float(rows[0][column]) if rows else None

    def law(self, label: str, data: str, sizes: Sequence[int]) -> "Law | None":
        """The scaling law of a line; None where fewer than two numbers of pairs have been run."""
        from transform_once.reports.paper_scaling import scaling_law

        group = self.group(label, data, sizes)
        return scaling_law(group) if group.runs else None

    def group(self, label: str, data: str, sizes: Sequence[int]) -> Group:
        """The rows of a line as runs, as the figures of the paper want them."""
        rows = [row for pairs in sizes for row in self.of(label, data, pairs) if row.get("relative_l2")]
        return Group(label, [_run(label, row) for row in rows])

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all cases."""
        return [row for rows in self.rows.values() for row in rows]

    @property
    def usual(self) -> int:
        """The number of pairs of the first table."""
        return next(iter(self.protocol.tables.values()))[0].pairs[0]

    def title(self, data: str) -> str:
        """A data set in words."""
        return NAMES.get(data, data)

    @property
    def data(self) -> list[str]:
        """The data sets by name."""
        return list(self.protocol.data)

    def labels(self, table: str) -> list[str]:
        """The lines of a table."""
        return list(dict.fromkeys(entry.label for entry in self.protocol.tables.get(table, ())))


def draw_all(section: Section, results: Path, folder: Path) -> dict[str, Path]:
    """Draw every figure that has rows; their paths by name."""
    from matplotlib import rc_context

    from transform_once.reports.curves import STYLE
    from transform_once.reports.figures import save_figure

    drawn: dict[str, Figure | None] = {"table": _errors(section)}
    drawn |= {f"table-predictions-{data}": _predictions(section, data, results) for data in section.data}
    drawn |= {"scaling": _scaling(section), "modes": _modes(section)}
    paths = {}
    for name, figure in drawn.items():
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with rc_context(STYLE):
                paths[name] = save_figure(figure, folder / f"navier-stokes-{name}.png")
    return paths


def _errors(section: Section) -> "Figure | None":
    """The error of every seed, mean and deviation, and the paper's number, by model."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from transform_once.reports.curves import STYLE

    labels = [
        one for one in section.labels("table") if any(section.numbers("relative_l2", one, d) for d in section.data)
    ]
    if not labels:
        return None
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(section.data) + 1.5, 0.34 * len(labels) + 1.2), layout="constrained")
        panels = figure.subplots(1, len(section.data), squeeze=False, sharey=True)[0]
        for axes, data in zip(panels, section.data, strict=True):
            for place, label in enumerate(reversed(labels)):
                values = section.numbers("relative_l2", label, data)
                if values:
                    spread = statistics.stdev(values) if len(values) > 1 else 0.0
                    axes.plot(values, [place] * len(values), "o", color="#9dbbe0", markersize=3)
                    mean = statistics.fmean(values)
                    axes.errorbar(mean, place, xerr=spread, fmt="o", color="#1f5fa8", capsize=3, markersize=4)
                if data in PAPER.get(label, {}):
                    axes.plot(PAPER[label][data][0], place, "D", color="#c8442b", markersize=5, fillstyle="none")
            axes.set(title=section.title(data), xlabel="test relative L2", yticks=range(len(labels)), xlim=(0, None))
            axes.set_yticklabels(list(reversed(labels)))
        panels[0].plot([], [], "o", color="#1f5fa8", label="ours, mean ± deviation over seeds")
        panels[0].plot([], [], "D", color="#c8442b", fillstyle="none", label="paper")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _scaling(section: Section) -> "Figure | None":
    from transform_once.reports.paper_scaling import scaling_figure

    entries = section.protocol.tables.get("scaling", ())
    groups = [section.group(entry.label, entry.data[0], entry.pairs) for entry in entries]
    laws = [section.law(entry.label, entry.data[0], entry.pairs) for entry in entries]
    groups = [group for group, law in zip(groups, laws, strict=True) if law is not None]
    return scaling_figure(groups).pictures[""] if groups else None


def _modes(section: Section) -> "Figure | None":
    """T1's error and its irreducible floor against m, and the FNO's error outside the m lowest DCT modes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from transform_once.reports.curves import STYLE

    kept = {}
    for entry in section.protocol.tables.get("modes", ()):
        model, _ = entry.configuration()
        if isinstance(model.modes, int) and model.transform == "dct":
            kept[entry.label] = model.modes
    splits = section.protocol.splits
    if not any(section.of(FLOOR, data, 0) for data in section.data):
        return None
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(section.data), 3.4), layout="constrained")
        for axes, data in zip(figure.subplots(1, len(section.data), squeeze=False)[0], section.data, strict=True):
            curves = {
                "T1vp": [(m, section.mean("relative_l2", label, data)) for label, m in kept.items()],
                "R_o, the floor of T1": [(m, section.floor(data, "dct", str(m))) for m in splits],
                "FNO outside the m lowest": [(m, section.mean(f"outside_{m}", "FNO", data)) for m in splits],
            }
            for (name, points), style in zip(curves.items(), ("o-", "s--", "^:"), strict=True):
                known = sorted((m, y) for m, y in points if y)
                if known:
                    axes.plot(*zip(*known, strict=True), style, label=name, markersize=4)
            axes.set(
                yscale="log", xlabel="m, kept DCT modes of each axis", ylabel="relative L2", title=section.title(data)
            )
            axes.legend()
    return figure


def _predictions(section: Section, data: str, results: Path) -> "Figure | None":
    """Truth, predictions, errors and their spectra for one seed of some models, and what lies outside the modes."""
    import torch

    from transform_once.reports.paper_predictions import predictions_figure

    groups = []
    for job in section.jobs:
        path = job.examples(results)
        rows = [row for row in section.of(job.label, data) if row.get("relative_l2")]
        if path is None or job.data != data or job.label not in PICTURED or not path.exists() or not rows:
            continue
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        split = section.protocol.splits[-2]  # the paper's 24 of 8, 12, 16, 24 and 32
        groups.append(Group(job.label, [_run(job.label, rows[0], section.title(data), arrays, split)]))
    if not groups:
        return None
    groups.sort(key=lambda group: PICTURED.index(group.label))
    return predictions_figure(groups, None, None, 0, torch.device("cpu")).pictures[""]


def _run(label: str, row: Row, source: str = "", examples: dict[str, np.ndarray] | None = None, modes: int = 0) -> Run:
    """A row as the figures of the paper want it."""
    facts = {"source": f"Navier-Stokes, {source}", "train": int(row["pairs"]), "channels": {"target": ["vorticity"]}}
    metrics = {"relative_l2": float(row["relative_l2"]), "kspace": {"transform": "dct", "modes": [modes, modes]}}
    return Run(Path(STUDY), label, {"model": {"class": label}, "data": facts}, {}, metrics, examples or {})
