"""Writing files so that nothing half-written is ever taken for whole; tables of rows as CSV files."""

import csv
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DIGITS = 9  # of a number in a table: all that float32 has


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends well and removed when it does not."""
    final = Path(path)
    if not final.parent.is_dir():
        raise FileNotFoundError(f"the folder {final.parent} does not exist: create it first")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def held(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold a folder against others that would hold it, too: these wait, or are refused.

    Windows and some network file systems have no such locks; nothing is held there.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is at work in {folder}: wait for it, end it, or name another folder"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(opened)


def remove_partial(folder: Path) -> None:
    """Remove what writers that were killed left in a folder of which the caller is now the only writer."""
    for leftover in folder.glob(".*.partial"):
        leftover.unlink(missing_ok=True)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], comment: str = "") -> Path:
    """Write rows as CSV; the columns are those of all rows, in the order in which they come, after a comment line."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        if comment:
            file.write(f"# {comment}\n")
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({name: as_text(value) for name, value in row.items()} for row in rows)
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows as `write_rows` wrote them, all values as text; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        first = next(file, "")
        return list(csv.DictReader(file if first.startswith("# ") else itertools.chain([first], file)))


def as_text(value: Any, digits: int = DIGITS) -> str:
    """A value as it stands in a table: nothing for None, nan for what was not measured."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
