"""Words of messages."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence on which known names are meant."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 3, 0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"


def counted(number: int, noun: str) -> str:
    """A number of things: 1 epoch, 2 epochs."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
