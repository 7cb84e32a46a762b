"""Writing files so that nothing half-written is ever taken for whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
