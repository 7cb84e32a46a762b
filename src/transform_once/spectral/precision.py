"""Precision of matrix products: of the transforms always that of their operands, of a model what is asked for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of the operands of products on the device of `x`; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def in_full(x: Tensor) -> AbstractContextManager[Any]:
    """Within, products keep the precision of their operands: neither autocast nor tf32 applies."""
    kind = x.device.type
    if autocast_dtype(x):
        return torch.autocast(kind, enabled=False)
    if kind == "cuda" and not torch.compiler.is_compiling() and torch.get_float32_matmul_precision() != "highest":
        return matmul_precision("highest")
    return nullcontext()


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Within, torch.get_float32_matmul_precision() is this name."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
