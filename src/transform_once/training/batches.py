"""Batches: samples by number, from memory of the device where they fit, and otherwise read while the last step runs."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.spectra import Spectra

Batch = dict[str, Tensor]
SHARE = 0.4  # of the free memory of a device that data may take


class Source:
    """Samples of spectra or fields: pairs, or windows of `window` frames of trajectories.

    Windows begin at every frame that leaves room. Where targets, or judged frames, are zero at all points that count,
    there is no relative error: such samples are left out.
    """

    def __init__(
        self, data: Spectra | Fields, device: torch.device, window: int = 1, judged: int = 1, stream: bool | None = None
    ) -> None:
        self.device, self.window = device, window
        self.data: Spectra | Fields = data
        self.streams = _bytes(data) > SHARE * _free(device) if stream is None else stream
        if isinstance(data, Fields):
            self.tensors = {} if self.streams else _tensors(data, device)
        else:
            self.tensors = data.tensors if self.streams else data.load(device).tensors
        energy = _energy(data)
        self.windows = self._windows(energy, judged) if data.kind == "trajectories" else None
        self.chosen = None if self.windows is not None or energy.all() else energy.nonzero()[:, 0]
        if len(self) == 0:
            raise ValueError(f"no sample is left to learn from: {len(data)} were given, window {window}, all zero?")

    def __len__(self) -> int:
        return len(next((some for some in (self.windows, self.chosen) if some is not None), self.data))

    def batch(self, index: Tensor) -> Batch:
        """The samples of these numbers, on the device."""
        index = index if self.chosen is None else self.chosen[index.cpu()]
        if not self.streams:
            return self._take(self.tensors, index.to(self.device))
        index = index.cpu()
        if isinstance(self.data, Spectra):
            host = self._take(self.tensors, index)
        elif self.windows is None:
            host = _tensors(self.data[index.tolist()], torch.device("cpu"))
        else:
            parts = [_tensors(self._window(*pair), torch.device("cpu")) for pair in self.windows[index].tolist()]
            host = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self.device.type == "cuda":
            host = {name: tensor.pin_memory() for name, tensor in host.items()}
        return {name: _real(tensor, self.device) for name, tensor in host.items()}

    def batches(self, indices: Sequence[Tensor]) -> Iterator[Batch]:
        """Batches in turn; streamed ones are read one ahead, in a thread."""
        if not self.streams:
            yield from map(self.batch, indices)
            return
        with ThreadPoolExecutor(1) as reader:
            ahead = None
            for index in indices:
                following = reader.submit(self.batch, index)
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()

    def _take(self, tensors: Batch, index: Tensor) -> Batch:
        if self.windows is None:
            return {name: tensor[index] for name, tensor in tensors.items()}
        self.windows = self.windows.to(index.device)
        sample, start = self.windows[index].unbind(1)
        frames = start[:, None] + torch.arange(self.window, device=index.device)
        fixed = {name: tensor[sample] for name, tensor in tensors.items() if tensor.shape[1] == 1 != self.window}
        return {name: tensor[sample[:, None], frames] for name, tensor in tensors.items() if name not in fixed} | fixed

    def _window(self, sample: int, start: int) -> Fields:
        fields = self.data
        assert isinstance(fields, Fields)
        return fields[sample].select(frames=slice(start, start + self.window))

    def _windows(self, energy: Tensor, judged: int) -> Tensor:
        samples, frames = energy.shape
        if frames < self.window:
            raise ValueError(
                f"trajectories of {frames} frames are too short: a sample needs {self.window}, the first frames and "
                "the steps of the rollout; use fewer steps or less history"
            )
        starts = torch.arange(frames - self.window + 1)
        pairs = torch.cartesian_prod(torch.arange(samples), starts)
        judged_energy = energy.unfold(1, self.window, 1)[..., -judged:].sum(-1).flatten()
        return pairs[judged_energy > 0]


def _energy(data: Spectra | Fields) -> Tensor:
    """The energy of every target, (n,), or frame, (n, t), without masked points."""
    if isinstance(data, Spectra):
        return data.tensors["energy"].sum(-1).cpu()
    in_time = data.kind == "trajectories"
    lengths = (len(data), data.frames) if in_time else (len(data),)
    energy = torch.zeros(lengths, dtype=torch.float64)
    for samples, frames, part in data.blocks():
        judged, mask = part.counted("trajectory" if in_time else "target")
        seen = judged.double() if mask is None else judged.double().masked_fill(mask, 0)
        energy[(samples, frames)[: len(lengths)]] = seen.flatten(len(lengths)).square().sum(-1)
    return energy


def _tensors(fields: Fields, device: torch.device) -> Batch:
    loaded = fields.load()
    names = [*loaded.shapes, *(["mask"] if loaded.mask is not None else [])]
    tensors = {name: _real(getattr(loaded, name), device) for name in names}
    if "mask" in tensors:
        tensors["mask"] = tensors["mask"].expand(len(loaded), *tensors["mask"].shape[1:])
    return tensors


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, in float32 where that has no float64."""
    lacking = device.type == "mps" and tensor.dtype == torch.float64
    return tensor.to(device, torch.float32 if lacking else tensor.dtype, non_blocking=True)


def _bytes(data: Spectra | Fields) -> int:
    if isinstance(data, Spectra):
        return sum(tensor.nbytes for tensor in data.tensors.values())
    size = 8 if data.metadata.dtype == "float64" else 4
    return sum(size * torch.Size(shape).numel() for shape in data.shapes.values())


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return 1024 * int(meminfo.read_text().split("MemAvailable:")[1].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
