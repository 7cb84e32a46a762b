"""The speedrun's rows as tables of a page and as a picture."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from timed_runs import DIVERGED, Row, fill, markdown, text

from transform_once.reports.curves import COLOURS, STYLE, logarithmic
from transform_once.reports.figures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from speedrun import Protocol

NAMES = {"T1Plus": "T1+"}
PICTURE = "speedrun.png"
PACE = "pace of "  # before the change in rows that are there for their steps a second alone


@dataclass(frozen=True)
class Group:
    """The seeds of one model with one budget under one change of the code."""

    flow: str
    model: str
    change: str
    budget: float
    rows: Sequence[Row]  # of seeds that did not diverge
    diverged: int

    def mean(self, column: str) -> float:
        return statistics.fmean(self.numbers(column))

    def numbers(self, column: str) -> list[float]:
        return [float(row[column]) for row in self.rows]

    def cell(self, column: str) -> str:
        """Mean and spread over the seeds, and what is missing."""
        values = self.numbers(column)
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else f" ({len(values)} seed)"
        return f"{statistics.fmean(values):.4f}{spread}" + (f", {self.diverged} diverged" if self.diverged else "")


def groups_of(protocol: "Protocol", rows: Iterable[Row]) -> list[Group]:
    """The rows of the protocol's data by flow, model, change and budget, in the order of their dates."""
    found: dict[tuple[str, str, str, float], list[Row]] = {}
    for row in rows:
        same = (row["resolution"], row["train"]) == (text(protocol.resolution), text(protocol.train))
        if same and (row.get("test") or row["failed"].startswith(DIVERGED)):
            found.setdefault((row["flow"], row["model"], row["change"], float(row["budget"])), []).append(row)
    groups = []
    for key, all_rows in found.items():
        good = [row for row in all_rows if row.get("test")]
        if good:
            groups.append(Group(*key, good, len(all_rows) - len(good)))
    return sorted(groups, key=lambda group: max(row["date"] for row in group.rows))


def best(groups: Iterable[Group], flow: str, model: str, budget: float) -> Group | None:
    """The lowest mean test error of a model within a budget, of runs that all came to their end where there are such.

    None where it was not run with this budget yet.
    """
    able = [group for group in groups if (group.flow, group.model) == (flow, model) and group.budget <= budget]
    if all(group.budget < budget for group in able):
        return None
    return min(able, key=lambda group: (bool(group.diverged), group.mean("test")))


def curve_table(protocol: "Protocol", groups: Sequence[Group], flow: str) -> str:
    """Budgets down, models across: the best error at or below each budget, and apart that of the orbit's average."""
    about = protocol.flows[flow]
    columns = ["seconds", *(NAMES.get(model, model) for model in about.candidates)]
    columns += [f"{NAMES.get(model, model)}, orbit" for model in about.candidates]
    lines = []
    for budget in _budgets(protocol, groups, flow):
        chosen = [best(groups, flow, model, budget) for model in about.candidates]
        cells = [group.cell("test") if group else "" for group in chosen]
        cells += [group.cell("test_orbit") if group else "" for group in chosen]
        lines.append([f"{budget:g}", *cells])
        if about.targets:
            target = about.targets.get(budget)
            lines[-1].append(f"{target:.3f}" if target else "")
    return markdown([*columns, *(["T1's target"] if about.targets else [])], lines)


def record_table(protocol: "Protocol", groups: Sequence[Group]) -> str:
    """One dated line for each change of the code that beat all before it at a flow and budget, or within less."""
    whole = [group for group in groups if not group.diverged and len(group.rows) >= len(protocol.seeds)]
    lines: list[list[str]] = []
    known: list[Group] = []
    for change, flow, budget in dict.fromkeys((group.change, group.flow, group.budget) for group in whole):
        rivals = [group for group in whole if (group.change, group.flow, group.budget) == (change, flow, budget)]
        group = min(rivals, key=lambda one: one.mean("test"))
        before = [other.mean("test") for other in known if other.flow == flow and other.budget <= budget]
        known += rivals
        if min(before, default=float("inf")) <= group.mean("test"):
            continue
        row = group.rows[0]
        lines.append(
            [
                max(one["date"] for one in group.rows)[:10],
                f"{protocol.flows[group.flow].viscosity:g}",
                f"{group.mean('seconds'):.1f}",
                f"{group.mean('set_up_seconds'):.1f}",
                NAMES.get(group.model, group.model),
                group.cell("test"),
                f"{group.mean('test_orbit'):.4f}",
                _words(row),
                group.change,
            ]
        )
    columns = ["date", "ν", "seconds", "set-up", "model", "relative L2", "orbit", "configuration", "what brought it"]
    return markdown(columns, lines)


def search_table(protocol: "Protocol", rows: Iterable[Row]) -> str:
    """What was tried: candidates from best to worst for each flow and model."""
    size = (str(protocol.resolution), str(protocol.train))
    kept = [row for row in rows if (row["resolution"], row["train"]) == size and not row["change"].startswith(PACE)]
    order = {name: number for number, name in enumerate(protocol.flows)}
    kept.sort(key=lambda row: (order.get(row["flow"], 99), row["model"], float(row["budget"]), _validation(row)))
    lines = [
        [
            row["flow"],
            NAMES.get(row["model"], row["model"]),
            row["candidate"],
            row["change"],
            row["budget"],
            f"{float(row['validation']):.4f}" if row.get("validation") else row["failed"].partition(":")[0],
            row.get("steps", ""),
            f"{float(row['set_up_seconds']):.1f}" if row.get("set_up_seconds") else "",
            f"{int(row['parameters']):,}" if row.get("parameters") else "",
        ]
        for row in kept
    ]
    columns = ["flow", "model", "candidate", "change", "seconds", "validation", "steps", "set-up", "parameters"]
    return markdown(columns, lines)


def write_records(
    protocol: "Protocol", searched: Sequence[Row], finals: Sequence[Row], figures: Path, page: Path | None
) -> str:
    """Draw the curves, fill the tables of the page, and return the tables."""
    groups = groups_of(protocol, finals)
    tables = {f"speedrun-{flow}": curve_table(protocol, groups, flow) for flow in protocol.flows}
    tables["speedrun-records"] = record_table(protocol, groups)
    tables["speedrun-search"] = search_table(protocol, searched)
    tables["speedrun-picture"] = ""
    if groups:
        figures.mkdir(parents=True, exist_ok=True)
        print(draw(protocol, groups, figures / PICTURE))
        tables["speedrun-picture"] = f"![Error against seconds of training](figures/{PICTURE})"
    if page is not None:
        for name, table in tables.items():
            fill(page, name, table)
    return "\n\n".join(f"{name}\n\n{table}" for name, table in tables.items())


def draw(protocol: "Protocol", groups: Sequence[Group], path: Path) -> Path:
    """Error against seconds, a panel for each viscosity, both axes logarithmic; every seed a dot."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    flows = [name for name, flow in protocol.flows.items() if not flow.frames]
    with rc_context(STYLE):
        figure = Figure(figsize=(4 * len(flows) + 2, 3.4), layout="constrained")
        for axes, flow in zip(figure.subplots(1, len(flows), squeeze=False)[0], flows, strict=True):
            _draw_panel(axes, protocol, groups, flow)
        named = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(named.values(), named.keys(), loc="outside right upper")
        return save_figure(figure, path)


def _draw_panel(axes: "Axes", protocol: "Protocol", groups: Sequence[Group], flow: str) -> None:
    about = protocol.flows[flow]
    for colour, model in zip(COLOURS, about.candidates, strict=False):
        at = [_at(groups, flow, model, budget) for budget in _budgets(protocol, groups, flow)]
        line = [group for group in at if group]
        if not line:
            continue
        seconds = [group.mean("seconds") for group in line]
        name = NAMES.get(model, model)
        axes.plot(seconds, [group.mean("test") for group in line], color=colour, label=name)
        orbit = [group.mean("test_orbit") for group in line]
        axes.plot(seconds, orbit, ":", color=colour, lw=1.0, label=f"{name}, orbit average")
        for group in line:
            axes.plot(group.numbers("seconds"), group.numbers("test"), "o", color=colour, markersize=2.5)
    targets = about.targets.items()
    axes.plot(*zip(*targets, strict=True), "v", color="#222222", markersize=5, ls="", label="target of T1")
    logarithmic(axes.xaxis, axes.yaxis)
    axes.set(title=f"ν = {about.viscosity:g}, T = {about.time:g}")
    axes.set(xlabel="seconds of training", ylabel="relative L2, test pairs")


def _at(groups: Iterable[Group], flow: str, model: str, budget: float) -> Group | None:
    """The best of a model with exactly this budget."""
    return best((group for group in groups if group.budget == budget), flow, model, budget)


def _budgets(protocol: "Protocol", groups: Iterable[Group], flow: str) -> list[float]:
    found = {group.budget for group in groups if group.flow == flow}
    return sorted({float(budget) for budget in protocol.flows[flow].budgets} | found)


def _validation(row: Mapping[str, str]) -> float:
    return float(row["validation"]) if row.get("validation") else float("inf")


def _words(row: Mapping[str, str]) -> str:
    """A configuration in words: the candidate's name and all that it sets."""
    parts = json.loads(row["configuration"])
    words = [f"{name} {value}" for part in ("model", "train") for name, value in parts[part].items() if name != "name"]
    return f"{row['candidate']}: {', '.join(words)}"
