"""What the benchmarks of accuracy share: runs with a budget of seconds, rows kept in a CSV file, tables of a page."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from common import hardware

import transform_once as t1
from transform_once.files import as_text, atomic_path, read_rows, write_rows
from transform_once.models.operator import Operator

Row = dict[str, Any]
UNSAID = (
    "configuration",
    "change",
    "resolution",
    "train",
    "space",
    "chosen",
    "date",
    "hardware",
    "torch",
)  # too long to print
DIVERGED = "FloatingPointError"  # a result of its own; a run that failed otherwise is tried again


class Table:
    """Rows in one CSV file, which is written after every row; a row is known by the columns of `key`."""

    def __init__(self, path: Path, key: Sequence[str]) -> None:
        self.path, self.key = path, tuple(key)
        self.rows: list[Row] = [*read_rows(path)]

    def find(self, row: Mapping[str, Any]) -> Row | None:
        """The row with this key, all values as text."""
        wanted = [text(row[name]) for name in self.key]
        return next((old for old in self.rows if [old[name] for name in self.key] == wanted), None)

    def finished(self, row: Mapping[str, Any]) -> bool:
        """Whether this row is there and need not be tried again."""
        found = self.find(row)
        return found is not None and (not found["failed"] or found["failed"].startswith(DIVERGED))

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row, or replace the one with its key; write the file."""
        made = {name: text(value) for name, value in row.items()}
        old = self.find(row)
        self.rows = [*(one for one in self.rows if one is not old), made]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(self.path, self.rows)


def text(value: Any) -> str:
    """A value as it stands in the file; what is absent is empty."""
    return as_text(value, 6)


class Deadline:
    """Wall-clock seconds for a call of a script: what would not fit into the rest is not begun."""

    def __init__(self, seconds: float | None) -> None:
        self.began, self.seconds = time.monotonic(), seconds
        self.overhead = 10.0  # of a run besides its budget: the longest seen, and this before the first

    def fits(self, budget: float) -> bool:
        """Whether a run with this budget would be over in time."""
        left = float("inf") if self.seconds is None else self.seconds - (time.monotonic() - self.began)
        return budget + self.overhead <= left


def run_rows(
    table: Table, jobs: Iterable[Row], work: Callable[[Row], Row], deadline: Deadline, device: torch.device
) -> int:
    """Do the jobs whose rows are not finished; a failure is the row's own. Returns how many are left.

    A job has the key of its row and its `budget`; `work` gives the other columns.
    """
    left = 0
    for job in jobs:
        if table.finished(job):
            continue
        if not deadline.fits(job["budget"]):
            left += 1
            continue
        began, found = time.monotonic(), {"failed": ""}
        try:
            found |= work(job)
        except Exception as error:  # one run must not cost the others
            found["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        now = datetime.now().isoformat(timespec="seconds")
        about = {"date": now, "hardware": hardware(device.type), "torch": torch.__version__.split("+")[0]}
        row = {**job, **found, **about}
        table.put(row)
        said = {name: text(value) for name, value in row.items() if name not in UNSAID}
        print(", ".join(f"{name} {value}" for name, value in said.items() if value), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()  # a device that is lost ends the call here, before it spoils further rows
            torch.cuda.empty_cache()
        deadline.overhead = max(deadline.overhead, time.monotonic() - began - job["budget"])
    return left


def train_for(
    seconds: float,
    make: Callable[[], Operator],
    data: t1.Fields,
    validation: t1.Fields | None,
    settings: Mapping[str, Any],
    device: torch.device,
) -> tuple[Operator, Row]:
    """A model trained for so many seconds, and what its row tells.

    The seconds are of training alone: `set_up_seconds` are all others, for making the model and the spectra, compiling
    and capturing the step, and validation where there is any.
    """
    began = time.monotonic()
    run = t1.train(make(), data, validation, seconds=seconds, progress=False, device=str(device), **settings)
    wall = time.monotonic() - began
    if not run.finished:
        raise KeyboardInterrupt
    trained = run.description["seconds"]
    return run.model, {
        "seconds": trained,
        "set_up_seconds": wall - trained,
        "steps": run.history[-1]["step"],
        "parameters": run.description["model"]["parameters"],
        "space": run.description["space"],
        "captured": run.description["captured"],
        "loss": run.history[-1]["loss"],
    }


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a Markdown page."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(page: Path, name: str, content: str) -> None:
    """Put the content between the marks of that name on a page: lines <!-- name --> and <!-- /name -->."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no place for {name}: write a line {begin} and a line {end}")
    with atomic_path(page) as temporary:
        temporary.write_text(f"{before}{begin}\n{content}\n{end}{after}")
