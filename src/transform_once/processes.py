"""Several processes: who we are under torchrun, sums over all of us, and work in shares that the leader collects."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")
Value = TypeVar("Value")
Arrays = Mapping[str, Any]  # tensors by name

# A process without a share of the last round waits for those that have one, such as a plume of smoke: long, not for
# ever. A process that dies is noticed at once, by its connection or by torchrun.
PATIENCE = timedelta(days=1)


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

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All processes leave this block together; an error inside one of them is an error in all.

        Inside, processes must not wait for one another.
        """
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # whatever it is: the others wait below
            error = caught
        sentences: list[Any] = [None] * self.size
        dist.all_gather_object(sentences, None if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        for rank, sentence in enumerate(sentences):
            if sentence is not None:
                raise OSError(f"process {rank} gave up, and so do the others: {sentence}")

    def lead(self, call: Callable[[], Value]) -> Value:
        """What the call gives in the leader, which alone makes it, in every process."""
        result: list[Any] = [None]
        with self.together():
            if self.leads:
                result = [call()]
        if self.size > 1:
            dist.broadcast_object_list(result, 0)
        return result[0]

    def part(self, count: int) -> slice:
        """The share of this process in so many samples: consecutive, in the order of the processes, maybe none."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def to_leader(self, value: Value, source: int) -> Value:
        """The value of the process `source`, in the leader; in the others their own. All on the CPU."""
        parcel: list[Any] = [value]
        if source != 0 and self.leads:
            dist.recv_object_list(parcel, source)
        elif source != 0 and self.rank == source:
            dist.send_object_list(parcel, 0)
        return parcel[0]

    def collect(self, value: Value, merge: Callable[[Value, Value], None]) -> Value:
        """The values of all processes, merged by the leader into its own, one after the other, and given to all."""
        for source in range(1, self.size):
            other = self.to_leader(value, source)
            if self.leads:
                merge(value, other)
        return self.lead(lambda: value)

    def in_turns(
        self, items: Sequence[Item], work: Callable[[Item], Iterable[Arrays]], write: Callable[[Arrays], None]
    ) -> None:
        """Work on all items; the leader writes the arrays that come of them in the order of the items.

        Alone, arrays are written as they come. Of several processes each takes one item at a time and holds all its
        arrays in memory, on the CPU, until the leader has taken them one by one.
        """
        if self.size == 1:
            for item in items:
                for arrays in work(item):
                    write(arrays)
            return
        for start in range(0, len(items), self.size):
            self._round(items[start : start + self.size], work, write)

    def _round(
        self, items: Sequence[Item], work: Callable[[Item], Iterable[Arrays]], write: Callable[[Arrays], None]
    ) -> None:
        """At most one item for each process."""
        mine = items[self.rank : self.rank + 1]
        with self.together():
            held = [{name: array.cpu() for name, array in arrays.items()} for item in mine for arrays in work(item)]
        counts: list[Any] = [None] * self.size
        dist.all_gather_object(counts, len(held))
        for source, count in enumerate(counts):
            for number in range(count):
                arrays = self.to_leader(held[number] if source == self.rank else {}, source)
                with self.together():
                    if self.leads:
                        write(arrays)


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
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        yield joined(device)
        if joins:
            dist.barrier()  # one that leaves earlier can take the others down
    finally:
        if joins:
            dist.destroy_process_group()


def joined(device: torch.device) -> World:
    """This process among those that have joined a process group; alone where there is none."""
    known = dist.is_available() and dist.is_initialized()
    return World(dist.get_rank() if known else 0, dist.get_world_size() if known else 1, device)
