"""Triton kernels for NVIDIA GPUs. Each has a twin in plain torch, which is the reference and runs everywhere else."""

from functools import cache

import torch
from torch import Tensor

REAL = (torch.float32, torch.bfloat16)


def can_run(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these tensors: on an NVIDIA GPU since Ampere, and not while torch looks on.

    What is compiled, exported or traced, or goes through torch.func, takes the plain way, which torch can follow.
    """
    first = tensors[0]
    if not first.is_cuda or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return all(tensor.is_cuda and tensor.dtype in REAL for tensor in tensors) and _present(first.get_device())


@cache
def _present(device: int) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
