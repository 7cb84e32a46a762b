"""Several processes: who we are under torchrun, and sums over all of us."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process among all; `torchrun --nproc-per-node K -m transform_once train …` makes K."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of these values over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.total(torch.tensor(float(flag), device=self.device)) > 0) if self.size > 1 else flag

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.size > 1:
            dist.barrier()


def choose_device(name: str) -> torch.device:
    """The device of that name, "auto" for a GPU where there is one; under torchrun each process takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is auto, cpu, cuda, cuda:1 or mps; got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name} was asked for, but no CUDA GPU is to be seen: use --device cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device mps was asked for, but this machine has none: use --device cpu")
    if device.type == "cuda":
        number = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise ValueError(f"GPU number {number} was asked for, but there are {torch.cuda.device_count()}")
        return torch.device("cuda", number)
    return device


@contextlib.contextmanager
def world(device_name: str) -> Iterator[World]:
    """This process's place; joins the others under torchrun, unless a process group is there already."""
    device = choose_device(device_name)
    joins = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        known = dist.is_initialized()
        yield World(dist.get_rank() if known else 0, dist.get_world_size() if known else 1, device)
    finally:
        if joins:
            dist.destroy_process_group()
