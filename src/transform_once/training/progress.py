"""What a run says while it runs: a line or a bar on the terminal, and rows for TensorBoard and Weights & Biases."""

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LOGGERS = ("tensorboard", "wandb")
LINES = 10  # in a run, where there is no terminal to draw a bar on

Log = Callable[[dict[str, float], int], None]


class Progress:
    """Loss, error, rate and time left of a run; a bar on a terminal, some lines elsewhere, nothing if not `show`."""

    def __init__(self, show: bool, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = Console(stderr=True, quiet=not show)
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[says]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (show and self.console.is_terminal),
            transient=True,
        )
        self.task = self.bar.add_task(title, total=1.0, says="")
        self.spoke = 0.0
        self.began = time.monotonic()

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, sentence: str) -> None:
        """One line, above the bar."""
        self.console.print(sentence, highlight=False, markup=False)

    def update(self, fraction: float, epoch: int, loss: float, validation: float | None, rate: float) -> None:
        """After an epoch: how far, and how well."""
        error = "" if validation is None else f"  validation {validation:.4f}"
        says = f"epoch {epoch}  loss {loss:.4f}{error}  rate {rate:.1e}"
        self.bar.update(self.task, completed=fraction, says=says)
        if not self.console.is_terminal and (fraction >= 1 or fraction - self.spoke >= 1 / LINES):
            self.spoke = fraction
            spent = time.monotonic() - self.began
            left = spent / max(fraction, 1e-9) - spent
            self.say(f"{100 * fraction:3.0f}%  {says}  {spent:.0f} s, {left:.0f} s left")


def loggers(names: Sequence[str], folder: Path | None, config: dict[str, Any]) -> list[Log]:
    """A function for each logger that takes values by name and the epoch."""
    made: list[Log] = []
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"log is any of {', '.join(LOGGERS)}; got {name!r}")
        if folder is None:
            raise ValueError(f"{name} writes into the run folder: give output too")
        try:
            made.append(_tensorboard(folder) if name == "tensorboard" else _wandb(folder, config))
        except ImportError:
            raise ImportError(f"{name} is not installed: pip install 'transform-once[logging]'") from None
    return made


def _tensorboard(folder: Path) -> Log:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log(values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()

    return log


def _wandb(folder: Path, config: dict[str, Any]) -> Log:
    run = importlib.import_module("wandb").init(dir=str(folder), name=folder.name, config=config, resume="allow")
    return lambda values, epoch: run.log(values, step=epoch)
