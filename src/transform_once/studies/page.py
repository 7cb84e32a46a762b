"""Sections of the page of reproductions, between two comments, and the words and numbers in their tables.

Every sentence is built from the numbers of its row; the paper's stand beside ours where it has any.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from transform_once.files import atomic_path
from transform_once.reports.runs import figures, mean_and_deviation
from transform_once.studies.study import Results, Row

AIM_ERROR, AIM_TIME = 1.05, 0.25  # of T1+vp: error against the best baseline's, training time against FNO's


class Paper(NamedTuple):
    """A line of the paper's tables: relative L2 (there called N-MSE), its deviation over 5 runs, hours of training."""

    error: float
    deviation: float | None
    hours: float

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:g}"
        return f"{self.error:.3f}{spread}, {self.hours:g} h"


def write_study(
    study: str, title: str, table: Path, page: Path, paragraphs: Callable[[Sequence[Row]], Iterable[str]]
) -> None:
    """Write the section of a study: what `paragraphs` says of the rows of a table, and the pictures beside the page."""
    command = f"`t1 reproduce {study} --data FOLDER`"
    rows = Results(table).rows
    if rows:
        source = os.path.relpath(table, page.parent)
        body = [*paragraphs(rows), f"Every number: [{table.name}]({source}), made by {command}."]
        pictures = sorted((page.parent / "figures").glob(f"{study}-[!q]*.png"))
        body += [f"![{path.stem}](figures/{path.name})" for path in pictures]
        report = table.parent / f"{study}.html"
        if report.exists():
            body.append(f"The runs side by side: [{report.name}]({os.path.relpath(report, page.parent)}).")
    else:
        body = [f"Not run yet: {table.name} is missing. To make it: {command}."]
    put_section(page, study, [f"## {title}", *body])


def put_section(page: Path, study: str, paragraphs: Iterable[str]) -> None:
    """Write the section of a study into a page, between two comments.

    The page and the section are begun where they are missing; what stands outside the comments is left alone.
    """
    begin, end = f"<!-- {study}: begin, written by t1 reproduce {study} -->", f"<!-- {study}: end -->"
    page.parent.mkdir(parents=True, exist_ok=True)
    text = page.read_text(encoding="utf-8") if page.exists() else "# Reproduction\n"
    if (begin in text) != (end in text) or text.find(begin) > text.find(end):
        raise ValueError(f"{page} has only one of the comments {begin} and {end}, or in the wrong order: repair it")
    made = "\n\n".join([begin, *paragraphs, end])
    before, _, rest = text.partition(begin)
    text = before + made + rest.partition(end)[2] if rest else f"{text.rstrip()}\n\n{made}\n"
    with atomic_path(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def markdown(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def labels(rows: Sequence[Row]) -> list[str]:
    """The labels in their order, once each."""
    return list(dict.fromkeys(row["label"] for row in rows))


def values(rows: Sequence[Row], column: str) -> list[float]:
    """The numbers in a column, where there are any."""
    return [float(row[column]) for row in rows if row.get(column)]


def finite(rows: Sequence[Row], column: str) -> float | None:
    """The mean, if there are numbers and all are finite."""
    found = values(rows, column)
    return statistics.fmean(found) if found and all(map(math.isfinite, found)) else None


def spread(rows: Sequence[Row], column: str) -> str:
    """Mean ± standard deviation, and the number of seeds."""
    found = values(rows, column)
    return f"{mean_and_deviation(found)} ({len(found)})" if len(found) > 1 else mean_and_deviation(found)


def mean(rows: Sequence[Row], column: str) -> str:
    """The mean, or a dash where there are no numbers."""
    found = values(rows, column)
    average = statistics.fmean(found) if found else math.nan
    return "–" if not found else f"{average:.3g}" if average < 1000 else figures(float(round(average)))


def against(error: float, other: float) -> str:
    """How an error compares with another one, in front of its name."""
    change = error / other - 1
    return f"{abs(change):.0%} {'worse' if change > 0 else 'better'} than"


def aimed(error: float, seconds: float, best: str) -> str:
    """A sentence on what a T1 should reach, from ratios to the best baseline's error and to FNO's time."""
    in_time = round(seconds, 2) <= AIM_TIME  # as printed: a run ends with the step in which its budget does
    met = "met" if error <= AIM_ERROR and in_time else "not met"
    return (
        f"{error:.3f} times the error of {best}, the best baseline, in {seconds:.2f} of FNO's training time: the aim "
        f"(at most {AIM_ERROR} and {AIM_TIME}) is {met}."
    )


def hardware(rows: Sequence[Row]) -> str:
    """A sentence on the machines."""
    return (
        f"Measured on {', '.join(sorted({row['hardware'] for row in rows if row.get('hardware')})) or 'nothing yet'}."
    )
