"""What the benchmark scripts share: hardware and versions, interleaved timing, tables as text and CSV."""

import csv
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


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
    path = results_folder(device) / f"{name}.csv"
    temporary = path.with_suffix(".partial")
    with temporary.open("w", newline="") as file:
        file.write(f"# {describe(device)}\n")
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)
