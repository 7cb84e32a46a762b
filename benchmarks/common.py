"""What the benchmark scripts share: hardware and versions, interleaved timing, tables that grow, bars."""

import argparse
import gc
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from transform_once.files import atomic_path, read_rows, write_rows

Row = dict[str, object]


def hardware(device: str = "cpu") -> str:
    """Name of the processor that runs the benchmark."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def describe(device: str = "cpu") -> str:
    """One line: hardware, threads, versions."""
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{hardware(device)}{threads}, Python {platform.python_version()}, torch {torch.__version__}"


def results_folder(device: str = "cpu") -> Path:
    """benchmarks/results/<hardware>-torch<version>, created if needed."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", hardware(device)).strip("-").lower()
    folder = Path(__file__).parent / "results" / f"{name}-torch{torch.__version__.split('+')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def interleaved(
    rivals: dict[str, Callable[[], object]], rounds: int = 15, device: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds of each call, round by round, so that all rivals meet the same load, after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(-2, rounds):
        for name, call in rivals.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def captured(
    step: Callable[[], None], parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """The step as one CUDA graph, with parameters and optimiser as they were before the warm-up it takes to record it.

    The optimiser must be capturable, its rate a tensor, and the gradients kept in place.
    """
    before = [parameter.detach().clone() for parameter in parameters]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for parameter, values in zip(parameters, before, strict=True):
            parameter.copy_(values)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    return graph.replay


def milliseconds(times: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range."""
    if len(times) < 2:
        return 1e3 * times[0], 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return 1e3 * statistics.median(times), 1e3 * (high - low)


def report(rows: list[dict[str, object]], name: str, device: str = "cpu") -> None:
    """Print the rows as a table and write them to <results folder>/<name>.csv with the hardware in a comment line."""
    columns = list(rows[0])
    cells = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(describe(device))
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    write_rows(results_folder(device) / f"{name}.csv", rows, comment=describe(device))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every script that fills a table over several calls."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, help="folder of the table; by default named after the hardware")
    parser.add_argument("--only", default="", help="measure only rows whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, help="begin no row after so many; the same command continues")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw the table in the output folder")
    return parser


class Table:
    """A CSV that is written after every row. What was measured is not measured again, what failed is."""

    def __init__(self, options: argparse.Namespace, name: str, keys: Sequence[str], values: Sequence[str]) -> None:
        folder: Path = options.output or results_folder(options.device)
        folder.mkdir(parents=True, exist_ok=True)
        self.options, self.keys, self.path = options, tuple(keys), folder / f"{name}.csv"
        self.columns = (*keys, *values, "error")
        self.rows: list[Row] = [*read_rows(self.path)]

    def find(self, job: Row) -> Row | None:
        """The row of a job, if it has been measured."""
        same = (row for row in self.rows if all(str(row[key]) == str(job[key]) for key in self.keys))
        return next((row for row in same if not row["error"]), None)

    def fill(self, jobs: Iterable[Row], work: Callable[[Row], Row]) -> None:
        """Measure the jobs that are missing, as far as the options ask for them; one that fails does not end it."""
        began = time.monotonic()
        for job in jobs:
            name = ", ".join(str(job[key]) for key in self.keys)
            if self.find(job) or not re.search(self.options.only, name):
                continue
            if self.options.seconds is not None and time.monotonic() - began > self.options.seconds:
                print(f"not begun: {name}", flush=True)
                continue
            try:
                values = work(job)
            except Exception as error:
                values = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            self._add({**dict.fromkeys(self.columns, ""), **job, **values})
            gc.collect()
            if self.options.device == "cuda":
                torch.cuda.synchronize()  # after an error that the device does not survive nothing can be measured
                torch.cuda.empty_cache()

    def _add(self, row: Row) -> None:
        self.rows = [old for old in self.rows if any(str(old[key]) != str(row[key]) for key in self.keys)] + [row]
        kept = [{name: old[name] for name in self.columns} for old in self.rows]
        write_rows(self.path, kept, comment=describe(self.options.device))
        print("  ".join(f"{key}={value}" for key, value in row.items() if value != ""), flush=True)

    def draw(self, label: Callable[[Row], str], group: str, value: str, floor: str, unit: str) -> None:
        """The measured rows as bars beside the table, with a line at the floor, coloured by the column `group`."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        from transform_once.reports.curves import COLOURS, STYLE

        rows = [row for row in self.rows if row[value]]
        if not rows:
            raise SystemExit(f"{self.path} has no rows to draw")
        groups = list(dict.fromkeys(str(row[group]) for row in rows))
        with rc_context(STYLE):
            figure = Figure(figsize=(8, 1 + 0.2 * len(rows)), layout="constrained")
            axes = figure.subplots()
            for number, row in enumerate(rows):
                length, colour = float(str(row[value])), COLOURS[groups.index(str(row[group])) % len(COLOURS)]
                axes.barh(number, length, color=colour, height=0.7)
                axes.text(
                    length, number, f" {length:.3g}" if length < 1000 else f" {length:,.0f}", va="center", fontsize=7
                )
                if row.get(floor):
                    axes.plot([float(str(row[floor]))] * 2, [number - 0.35, number + 0.35], color="black", lw=1.5)
            axes.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=7)
            axes.set(xscale="log", xlabel=f"{unit}; black: floor" if floor else unit, ylim=(len(rows) - 0.4, -0.6))
            axes.grid(axis="y", visible=False)
            with atomic_path(self.path.with_suffix(".png")) as temporary:
                figure.savefig(temporary, format="png", dpi=150)
        print(self.path.with_suffix(".png"))


def middle(times: Sequence[float]) -> tuple[float, float]:
    """Median and range of a few repeats."""
    return statistics.median(times), max(times) - min(times)


def step_milliseconds(history: Sequence[Mapping[str, float | int | None]]) -> float:
    """Of one step of all members in the second half of a run of `t1.train`, when steps are captured, caches warm."""
    rows = [row for row in history if row["member"] == 0]
    first, last = rows[(len(rows) - 1) // 2], rows[-1]
    if first is last:
        raise ValueError("one epoch has no second half: train for more")
    return 1e3 * (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
