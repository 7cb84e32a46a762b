"""How much faster T1 is than an FNO of the same depth, width and modes, measured on this machine.

The FNO transforms in every layer, T1 once, and its layers never see the grid. What is compared:

| task          | T1, its `ends`                                                                             |
|---------------|--------------------------------------------------------------------------------------------|
| forward       | "fields to fields", and "fields to modes", without the inverse transform, as the paper did |
| training step | "fields to fields", and "modes to modes", as it is trained, on spectra made before         |

The FNO always goes from fields to fields. A training step is forward, backward and AdamW, with products in bfloat16 on
GPUs that have it, as both are trained by default; forward alone is in float32. Rivals take turns, after a warm-up, and
every timing ends with a synchronisation; what is given is the median.
"""

import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from transform_once import kernels
from transform_once.models.fno import FNO, HEAD_WIDTH, ReleasedFNO
from transform_once.models.operator import Operator, check_choice
from transform_once.models.t1 import T1

OPPONENTS = ("paper", "FNO")  # ReleasedFNO with its whole spectrum, as the paper describes it, or this library's own
EXECUTIONS = ("eager", "CUDA graph")
FIELDS, TO_MODES, IN_MODES = "fields to fields", "fields to modes", "modes to modes"
SHORTEST, MOST_CALLS = 2e-3, 100  # seconds that one timing lasts at least, by as many calls
SECONDS, FEWEST, MOST = 0.25, 3, 30  # of timings by turns, and how many
MEMORY = "does not fit in memory"


class Case(NamedTuple):
    """Two models of equal depth, width and modes, on a grid of `resolution` points along both axes."""

    resolution: int
    width: int
    depth: int
    modes: int = 24
    transform: str = "dct"
    opponent: str = "paper"

    @property
    def kept(self) -> int:
        """The modes that are kept: as many as asked for, fewer where the grid does not have them on both sides."""
        return max(1, min(self.modes, self.resolution // 2))


class Task(NamedTuple):
    """One call, of so many samples."""

    batch: int
    training: bool

    @property
    def name(self) -> str:
        """In words."""
        return f"{'training step' if self.training else 'forward'}, batch {self.batch}"

    @property
    def ends(self) -> tuple[str, str]:
        """From what to what T1 goes: whole, and as the paper measures or trains it."""
        return FIELDS, IN_MODES if self.training else TO_MODES


TASKS = (Task(1, False), Task(16, False), Task(16, True))


class Timing(NamedTuple):
    """Median seconds of a call, the interquartile ranges, and why there are none where they are nan."""

    case: Case
    task: Task
    ends: str
    execution: str
    t1: float = math.nan
    fno: float = math.nan
    t1_spread: float = math.nan
    fno_spread: float = math.nan
    note: str = ""

    @property
    def speed_up(self) -> float:
        """How often T1 runs while the FNO runs once."""
        return self.fno / self.t1


def measure(case: Case, device: torch.device, execution: str = "eager", seconds: float = SECONDS) -> list[Timing]:
    """All tasks of a case, two timings each; nan for a task that does not fit in memory.

    Args:
        case: The models.
        device: Where they run.
        execution: "eager", or "CUDA graph", where each call is captured once and replayed.
        seconds: How long the rivals of a task take turns.
    """
    check_choice(execution, EXECUTIONS, "execution")
    if execution != "eager" and device.type != "cuda":
        raise ValueError(f"a CUDA graph needs a GPU; got the device {device}: use the eager execution")
    timings: list[Timing] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for task in TASKS:
            timings += _task(case, task, device, execution, seconds)
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    return timings


def _task(case: Case, task: Task, device: torch.device, execution: str, seconds: float) -> Iterator[Timing]:
    """The two timings of a task."""
    share = 0.8 if execution == "eager" else 0.4  # what a graph needs stays taken beside what the capture takes
    found: dict[str, tuple[float, float]] = {}
    if needed_bytes(case, task) <= share * free_bytes(device):
        try:
            rivals = make_rivals(case, task, device)
            if execution != "eager":
                rivals = {name: captured(call) for name, call in rivals.items()}
            found = interleaved(rivals, device, seconds)
        except torch.cuda.OutOfMemoryError:
            found = {}
    for ends in task.ends:
        timing = Timing(case, task, ends, execution, note=MEMORY)
        if found:
            (t1, t1_spread), (fno, fno_spread) = found[ends], found["FNO"]
            timing = timing._replace(t1=t1, fno=fno, t1_spread=t1_spread, fno_spread=fno_spread, note="")
        yield timing


def make_models(case: Case, device: torch.device) -> tuple[T1, Operator]:
    """T1 and its opponent, one channel in and out."""
    check_choice(case.opponent, OPPONENTS, "opponent")
    size, shape = (case.resolution,) * 2, (case.kept, case.width, case.depth)
    with device:  # drawn where they are used: large ones take seconds elsewhere
        t1 = T1(1, 1, size, *shape, transform=case.transform)
        fno = (
            ReleasedFNO(1, 1, size, *shape, phase_blind=False) if case.opponent == "paper" else FNO(1, 1, size, *shape)
        )
    return t1, fno


def make_rivals(case: Case, task: Task, device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls that are timed: T1 by its two ends, and the "FNO"."""
    t1, fno = make_models(case, device)
    x = torch.randn(task.batch, 1, case.resolution, case.resolution, device=device)
    X = t1.transform.forward(x, 2, t1.modes)
    if task.training:
        ours, theirs = _step(t1, device), _step(fno, device)
        return {
            FIELDS: lambda: ours(lambda: t1(x)),
            IN_MODES: lambda: ours(lambda: t1.kspace(X)),
            "FNO": lambda: theirs(lambda: fno(x)),
        }
    return {
        FIELDS: _without_gradients(lambda: t1(x)),
        TO_MODES: _without_gradients(lambda: t1.kspace(t1.transform.forward(x, 2, t1.modes))),
        "FNO": _without_gradients(lambda: fno(x)),
    }


def _step(model: torch.nn.Module, device: torch.device) -> Callable[[Callable[[], Tensor]], None]:
    """A training step of the model, given what computes its output."""
    on_gpu = device.type == "cuda"
    low = on_gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=on_gpu)

    def step(forward: Callable[[], Tensor]) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=low, cache_enabled=False):
            output = forward()
        square = torch.view_as_real(output).square() if output.is_complex() else output.float().square()
        square.mean().backward()
        optimizer.step()

    return step


def _without_gradients(call: Callable[[], Tensor]) -> Callable[[], object]:
    def run() -> Tensor:
        with torch.no_grad():
            return call()

    return run


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call as one CUDA graph: replaying it costs a single launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), kernels.recorded():
        for _ in range(3):  # caches and libraries are set up outside the graph
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), kernels.recorded():
        call()
    return graph.replay


def interleaved(
    rivals: Mapping[str, Callable[[], object]], device: torch.device, seconds: float = SECONDS
) -> dict[str, tuple[float, float]]:
    """Median and interquartile range of the seconds of each call, by turns, so that all meet the same load.

    Two calls of each warm up; a timing holds as many calls as last two milliseconds, so that the clock does not count.
    """
    calls = {}
    for name, call in rivals.items():
        _timed(call, 1, device)
        calls[name] = max(1, min(MOST_CALLS, math.ceil(SHORTEST / _timed(call, 1, device))))
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    began, turns = time.perf_counter(), 0
    while turns < FEWEST or (time.perf_counter() - began < seconds and turns < MOST):
        for name, call in rivals.items():
            taken[name].append(_timed(call, calls[name], device))
        turns += 1
    return {name: _median_and_range(times) for name, times in taken.items()}


def _timed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


def _median_and_range(times: list[float]) -> tuple[float, float]:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, high - low


def needed_bytes(case: Case, task: Task) -> float:
    """About what the FNO, the larger of the two, takes: for gradients the fields of every layer, else a few."""
    channels = 4 * case.width + 3 * HEAD_WIDTH
    if task.training:
        channels = 5 * case.depth * case.width + 4 * HEAD_WIDTH
    weights = 4 * case.depth * case.kept**2 * case.width**2 * (6 if task.training else 1)
    return 4.0 * (channels * task.batch * case.resolution**2 + weights)


def free_bytes(device: torch.device) -> float:
    """What is free on the device; infinite where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.exists() else None
    return 1024.0 * int(found[1]) if found else math.inf
