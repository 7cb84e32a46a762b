"""Triton kernels for NVIDIA GPUs. Each has a twin in plain torch, which is the reference and runs everywhere else."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

REAL = (torch.float32, torch.bfloat16)
SMALL = 2**21  # numbers; with fewer, Python takes longer to launch a kernel of Triton than torch for all it replaces
BRANCHES = 8  # of a CUDA graph, for kernels side by side
_launching = [True]  # whether Python launches kernels, or is about to record them


def can_run(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these tensors: on an NVIDIA GPU since Ampere, and not while torch looks on."""
    first = tensors[0]
    if not first.is_cuda or watched():
        return False
    return all(tensor.is_cuda and tensor.dtype in REAL for tensor in tensors) and _present(first.get_device())


def watched() -> bool:
    """Whether torch looks on: what is compiled, exported or traced, or goes through torch.func, takes the plain way."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def pays(numbers: int) -> bool:
    """Whether so much work is worth a launch from Python; recorded in a CUDA graph, any is."""
    return numbers >= SMALL or not _launching[-1]


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """For the calls that are recorded in a CUDA graph, and for those before that warm up."""
    _launching.append(False)
    try:
        yield
    finally:
        _launching.pop()


def side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Launch kernels that do not depend on each other: recorded in a CUDA graph, they may run at the same time."""
    if len(calls) < 2 or not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        for call in calls:
            call()
        return
    here = torch.cuda.current_stream()
    streams = _streams(here.device)[: len(calls)]
    for stream in streams:
        stream.wait_stream(here)
    for number, call in enumerate(calls):
        with torch.cuda.stream(streams[number % len(streams)]):
            call()
    for stream in streams:
        here.wait_stream(stream)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the way back of a kernel, which torch cannot follow: a second derivative is refused, not silently wrong."""

    @wraps(backward)
    def checked(*arguments: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph was asked for
            raise RuntimeError("kernels have no second derivative: use float64 or torch.func, which take the plain way")
        return backward(*arguments)

    return checked


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES)]


@cache
def _present(device: int) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
