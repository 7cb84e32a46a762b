"""What the benchmarks of accuracy share: runs with a budget of seconds, rows kept in a CSV file, tables of a page."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import datetime
from functools import partial
from multiprocessing import get_context
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
    table: Table,
    jobs: Iterable[Row],
    work: Callable[[Row], Row],
    deadline: Deadline,
    device: torch.device,
    together: int = 1,
) -> int:
    """Do the jobs whose rows are not finished; a failure is the row's own. Returns how many are left.

    A job has the key of its row and its `budget`; `work` gives the other columns. With `together` above 1 so many
    processes share the device, and `work` must be one that can be sent to them.
    """
    waiting = [job for job in jobs if not table.finished(job)]
    attempt = partial(_attempt, work, device)
    done = (
        _one_by_one(waiting, attempt, deadline)
        if together == 1
        else _side_by_side(waiting, attempt, deadline, together)
    )
    count = 0
    for row in done:
        count += 1
        table.put(row)
        said = {name: text(value) for name, value in row.items() if name not in UNSAID}
        print(", ".join(f"{name} {value}" for name, value in said.items() if value), flush=True)
    return len(waiting) - count


def _attempt(work: Callable[[Row], Row], device: torch.device, job: Row) -> Row:
    """The job's whole row, whether it failed or not."""
    found = {"failed": ""}
    try:
        found |= work(job)
    except Exception as error:  # one run must not cost the others
        found["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    now = datetime.now().isoformat(timespec="seconds")
    about = {"date": now, "hardware": hardware(device.type), "torch": torch.__version__.split("+")[0]}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()  # a device that is lost ends the call here, before it spoils further rows
        torch.cuda.empty_cache()
    return {**job, **found, **about}


def _one_by_one(jobs: Sequence[Row], attempt: Callable[[Row], Row], deadline: Deadline) -> Iterator[Row]:
    for job in jobs:
        if deadline.fits(job["budget"]):
            began = time.monotonic()
            yield attempt(job)
            deadline.overhead = max(deadline.overhead, time.monotonic() - began - job["budget"])


def _side_by_side(
    jobs: Sequence[Row], attempt: Callable[[Row], Row], deadline: Deadline, together: int
) -> Iterator[Row]:
    """Rows in the order in which their processes end, the longest begun first."""
    waiting = sorted(jobs, key=lambda job: -float(job["budget"]))
    stretches: list[float] = []  # how many times its budget a run took
    running: dict[Future[Row], tuple[Row, float]] = {}
    with ProcessPoolExecutor(together, mp_context=get_context("spawn")) as pool:
        while True:
            while len(running) < together:
                most = max(stretches, default=together / 2)
                job = next((job for job in waiting if deadline.fits(most * job["budget"])), None)
                if job is None:
                    break
                waiting.remove(job)
                running[pool.submit(attempt, job)] = (job, time.monotonic())
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, began = running.pop(future)
                stretches.append((time.monotonic() - began) / job["budget"])
                yield future.result()


def train_for(
    seconds: float,
    make: Callable[[], Operator],
    data: t1.Fields,
    validation: t1.Fields | None,
    settings: Mapping[str, Any],
    device: torch.device,
    pace: float | None = None,
) -> tuple[Operator, Row]:
    """A model trained for so many seconds, and what its row tells.

    The seconds are of training alone: `set_up_seconds` are all others, for making the model and the spectra, compiling
    and capturing the step, and validation where there is any. With a `pace`, in steps a second, the clock is not read:
    the run has the whole epochs that the seconds would hold at this pace.
    """
    began = time.monotonic()
    length: dict[str, Any] = {"seconds": seconds}
    if pace is not None:
        length = {"epochs": max(1, round(seconds * pace / math.ceil(len(data) / settings["batch_size"])))}
    run = t1.train(make(), data, validation, progress=False, device=str(device), **length, **settings)
    wall = time.monotonic() - began
    if not run.finished:
        raise KeyboardInterrupt
    trained = run.description["seconds"]
    return run.model, {
        "seconds": trained if pace is None else run.history[-1]["step"] / pace,
        "shared_seconds": None if pace is None else trained,
        "set_up_seconds": wall - trained,
        "steps": run.history[-1]["step"],
        "parameters": run.description["model"]["parameters"],
        "space": run.description["space"],
        "captured": run.description["captured"],
        "setbacks": len(run.description["setbacks"]),
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
