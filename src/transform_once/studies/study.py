"""A study: a list of cases with names of their own; finished ones are rows of a table and are not run again."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transform_once.files import as_text, read_rows, write_rows

Row = dict[str, Any]

DIGITS = 6  # of the numbers in a table of results


@dataclass(frozen=True)
class Case:
    """One line of a study: what is trained on what. Cases that are equal have the same name on every machine.

    `options` is everything that changes the result: the data, the model, the training, the seeds.
    """

    study: str
    table: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Study, table, label and the options that differ from case to case, readable and unique."""
        return json.dumps(asdict(self), sort_keys=True, default=str)

    def folder(self, runs: Path, *prefix: str) -> Path:
        """Its run folder; cases of two tables that are trained alike share it, and are trained once."""
        words = "-".join([*prefix, self.label, "seed", str(self.options["seed"])])
        options = json.dumps(dict(self.options), sort_keys=True)
        plain = re.sub(r"[^A-Za-z0-9+]+", "-", words)
        return runs / f"{plain}-{hashlib.sha256(options.encode()).hexdigest()[:6]}"


class Results:
    """The rows of a study in one CSV file, the finished cases among them; written after every case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path)

    def of(self, case: Case) -> list[Row]:
        """The rows of a case."""
        return [row for row in self.rows if row["case"] == case.name]

    def add(self, case: Case, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of a case that is finished, and write the file."""
        about = {"case": case.name, "study": case.study, "table": case.table, "label": case.label}
        self.rows += [{**about, **{key: as_text(value, DIGITS) for key, value in row.items()}} for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(self.path, self.rows)


def run_study(
    cases: Sequence[Case],
    results: Results,
    work: Callable[[Case], Iterable[Mapping[str, Any]]],
    *,
    seconds: float | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Run the cases that have no rows yet, and say of the others where and on what they ran. Returns how many are left.

    With `seconds`, none is begun that would not be over by then if it took as long as the one before.
    """
    finished = [rows for case in cases if (rows := results.of(case))]
    if finished:
        hardware = sorted({row["hardware"] for rows in finished for row in rows if row.get("hardware")})
        measured = f", measured on {' and '.join(hardware)}" if hardware else ""
        where = f"{results.path}{measured}"
        say(f"{len(finished)} of {len(cases)} cases are in {where}; for all anew give another --output and --runs")
    began, last, left = time.monotonic(), 0.0, 0
    for number, case in enumerate(cases, start=1):
        if results.of(case):
            continue
        now = time.monotonic()
        if seconds is not None and now - began + last > seconds:
            left += 1
            continue
        say(f"[{number}/{len(cases)}] {case.table}: {case.label}")
        results.add(case, work(case))
        last = time.monotonic() - now
    return left
