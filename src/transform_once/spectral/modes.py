"""Which modes to keep, and what keeping only those must cost: the irreducible loss.

Everywhere in the library `modes` is an int or one int per axis (low-pass: the lowest modes of each axis) or a
`ModeSet`: any set of modes, such as the `TopM` of largest energy. Fields are `(batch, channels, *grid)`.

With Y the spectrum of a target, S_m the selection of kept modes and Ŷ the prediction on them, the relative L2 loss L of
the field splits exactly: L² = J² + R_o², J from the kept modes and R_o = ‖Y − S_mᵀS_mY‖/‖Y‖, which no training lowers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transform_once.files import atomic_path
from transform_once.spectral.transforms import Modes, Transform, get_transform

# Full spectra are made in blocks of samples of about this many numbers, so that memory does not grow with the data.
_BLOCK_NUMBERS = 2**24


@dataclass(frozen=True, eq=False)
class ModeSet:
    """Kept modes of one transform, stored as multi-indices, so that they name the same modes on every grid.

    `indices` is (..., M, ndim): one shared set (M, ndim), or one per channel or per field in front. `block` is the
    shape of the smallest block of lowest modes that holds them. The kept modes of a field are a vector of length M.
    """

    indices: Tensor
    block: tuple[int, ...]
    transform: str = "dct"
    # Positions by block and device, so that nothing is copied between devices twice (or inside a CUDA graph).
    _positions: dict[tuple[tuple[int, ...], torch.device], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return self.indices.shape[-2]

    def select(self, spectrum: Tensor) -> Tensor:
        """The kept modes (..., M) of a spectrum (..., *block) that holds at least the lowest modes `block`."""
        held = tuple(spectrum.shape[-len(self.block) :])
        if len(held) < len(self.block) or any(n < m for n, m in zip(held, self.block, strict=True)):
            raise ValueError(f"expected a spectrum of at least {self.block} modes; got shape {tuple(spectrum.shape)}")
        flat, index = spectrum.flatten(-len(held)), self._flat(held, spectrum.device)
        if index.ndim == 1:
            return flat.index_select(-1, index)
        return flat.gather(-1, index.expand(*flat.shape[:-1], -1))

    def scatter(self, kept: Tensor) -> Tensor:
        """The lowest modes (..., *block) with the kept modes (..., M) in place and zeros elsewhere."""
        if kept.shape[-1] != len(self):
            raise ValueError(f"expected {len(self)} kept modes on the last axis; got shape {tuple(kept.shape)}")
        index = self._flat(self.block, kept.device)
        zeros = kept.new_zeros(*kept.shape[:-1], math.prod(self.block))
        if index.ndim == 1:
            return zeros.index_copy(-1, index, kept).unflatten(-1, self.block)
        return zeros.scatter(-1, index.expand_as(kept), kept).unflatten(-1, self.block)

    def mask(self, size: Sequence[int]) -> Tensor:
        """True at the kept modes of the full spectrum (..., *spectrum) of a grid of `size` points."""
        full = get_transform(self.transform).block(None, size)
        index = self._flat(full, self.indices.device)
        return (
            torch.zeros(*index.shape[:-1], math.prod(full), dtype=torch.bool)
            .scatter(-1, index, True)
            .unflatten(-1, full)
        )

    def save(self, path: str | Path) -> None:
        """Write the set to a `.safetensors` file."""
        metadata = {"kind": "modes", "transform": self.transform, "block": ",".join(map(str, self.block))}
        with atomic_path(path) as temporary:
            save_file({"indices": self.indices.contiguous().cpu()}, temporary, metadata)

    @staticmethod
    def load(path: str | Path) -> "ModeSet":
        """Read a set written by `save`."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != "modes":
                    raise ValueError(f"expected a file written by ModeSet.save; {path} holds something else")
                block = tuple(map(int, metadata["block"].split(",")))
                return ModeSet(file.get_tensor("indices"), block, metadata["transform"])
        except SafetensorError as error:
            raise ValueError(
                f"expected a file of kept modes written by ModeSet.save; cannot read {path}: {error}"
            ) from None

    def _flat(self, block: tuple[int, ...], device: torch.device) -> Tensor:
        """Positions in the flattened block; negative wave numbers wrap to its end."""
        if (block, device) not in self._positions:
            flat = torch.zeros(self.indices.shape[:-1], dtype=torch.long)
            for axis, n in enumerate(block):
                flat = flat * n + self.indices[..., axis] % n
            self._positions[block, device] = flat.to(device)
        return self._positions[block, device]


@dataclass(frozen=True)
class LowPass:
    """The lowest `modes` of each axis (an int, or one per axis): what a plain number means wherever modes are given."""

    modes: int | tuple[int, ...]

    def fit(self, y: Tensor, transform: str = "dct") -> ModeSet:
        """These modes as a `ModeSet` for the grid of `y` (batch, channels, *grid)."""
        kept = kept_mask(self, y, transform)
        return _mode_set(get_transform(transform), kept.flatten().nonzero().squeeze(-1), grid_of(y))


@dataclass(frozen=True)
class TopM:
    """The `count` modes of largest energy.

    `per` says over what the energy is summed and so how many sets there are: "all" samples and channels (one shared
    set, what a model needs), each "channel" over the samples, or each "field" by itself (both for analysis).
    """

    count: int
    per: Literal["all", "channel", "field"] = "all"

    def fit(self, y: Tensor, transform: str = "dct") -> ModeSet:
        """The set for the fields `y` (batch, channels, *grid)."""
        if self.per not in ("all", "channel", "field"):
            raise ValueError(f'per must be "all", "channel" or "field"; got {self.per!r}')
        T, size = get_transform(transform), grid_of(y)
        if self.per == "field":
            energy = torch.cat(list(_energies(y, T)))
        else:
            energy = sum(block.sum(0) for block in _energies(y, T))  # type: ignore[assignment]
            energy = energy.sum(0) if self.per == "all" else energy
        return self.of_energy(energy, size, transform)

    def of_energy(self, energy: Tensor, size: Sequence[int], transform: str = "dct") -> ModeSet:
        """The set for a known energy per mode (..., *spectrum) of a grid of `size` points."""
        energy = energy.flatten(-len(size))
        if not 1 <= self.count <= energy.shape[-1]:
            raise ValueError(f"count must lie between 1 and the {energy.shape[-1]} modes of the grid; got {self.count}")
        # A stable sort: among equals the lower mode is kept, on every machine.
        order = energy.sort(stable=True, dim=-1, descending=True).indices[..., : self.count]
        return _mode_set(get_transform(transform), order.sort(-1).values, tuple(size))


class LossSplit(NamedTuple):
    """Relative L2 per sample, with total² = kept² + dropped²."""

    total: Tensor
    kept: Tensor
    dropped: Tensor


def split_loss(prediction: Tensor, target: Tensor, modes: Modes, transform: str = "dct") -> LossSplit:
    """Split the relative L2 error of fields (batch, channels, *grid) into kept and dropped modes, per sample (batch,).

    For a model that predicts the kept modes alone, `kept` is its J and `dropped` the irreducible R_o.
    """
    T, size = get_transform(transform), grid_of(target)
    if prediction.shape != target.shape:
        raise ValueError(f"expected a prediction of shape {tuple(target.shape)}; got {tuple(prediction.shape)}")
    error = double(prediction) - double(target)
    norm = double(target).flatten(1).norm(dim=1)
    dropped = _tail(error, modes, T, size).sum(1).sqrt() / norm
    total = error.flatten(1).norm(dim=1) / norm
    return LossSplit(total, (total.square() - dropped.square()).clamp_min(0).sqrt(), dropped)


def tail_energy(y: Tensor, modes: Modes, transform: str = "dct") -> Tensor:
    """Energy that the fields (batch, channels, *grid) hold outside the kept modes, per sample and channel.

    It is the energy of the residual y − T⁻¹S_mᵀS_mTy, since the difference of two nearly equal norms would be lost to
    rounding; for the dft, where the residual is not that of a projection, the float64 difference.
    """
    T, size = get_transform(transform), grid_of(y)
    return torch.cat([_tail(double(block), modes, T, size) for block in blocks(y)])


def irreducible_loss(y: Tensor, modes: Modes, transform: str = "dct") -> float:
    """The relative L2 error, mean over samples, that no model keeping these modes can beat on the targets `y`."""
    tail = tail_energy(y, modes, transform).sum(1)
    return (tail.sqrt() / _norms(y)).mean().item()


def irreducible_curve(y: Tensor, transform: str = "dct") -> tuple[list[tuple[int, ...]], Tensor]:
    """The irreducible loss of every low-pass that gives each axis the same share of its modes: (modes, losses).

    One pass over `y` (batch, channels, *grid): each mode belongs to the first low-pass that keeps it.
    """
    T, size = get_transform(transform), grid_of(y)
    limits = T.max_modes(size)
    steps = max(limits)
    boxes = [tuple(-(-step * limit // steps) for limit in limits) for step in range(1, steps + 1)]
    shell = torch.zeros(T.block(None, size), dtype=torch.long)
    for axis, reach in enumerate(T.reach(size)):
        first = torch.searchsorted(torch.tensor([box[axis] for box in boxes]), reach)
        shell = torch.maximum(shell, _on_axis(first, axis, len(size)))
    tails = []
    for energy in _energies(y, T):
        per_shell = energy.new_zeros(len(energy), steps + 1)
        per_shell.index_add_(1, shell.flatten().to(energy.device), energy.sum(1).flatten(1))
        # Summed from the smallest contributions up: no cancellation.
        tails.append(per_shell.flip(1).cumsum(1).flip(1)[:, 1:])
    return boxes, (torch.cat(tails).sqrt() / _norms(y)[:, None]).mean(0)


def choose_modes(y: Tensor, tolerance: float = 0.01, transform: str = "dct") -> int | tuple[int, ...]:
    """The smallest low-pass whose irreducible loss on `y` is at most `tolerance`: an int, or one int per axis.

    Good values: a tenth of the error you hope for. On a grid with unequal axes each keeps the same share of its modes,
    so that the shortest wave is equally long along all of them.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be above 0, such as 0.01; got {tolerance}")
    boxes, losses = irreducible_curve(y, transform)
    enough = (losses <= tolerance).nonzero()
    if not len(enough):
        raise ValueError(
            f"no low-pass of the {transform} transform reaches {tolerance}: all its modes leave {losses[-1].item():.3g}"
        )
    box = boxes[int(enough[0])]
    return box[0] if len(set(box)) == 1 else box


def kept_mask(modes: Modes, y: Tensor, transform: str = "dct") -> Tensor:
    """True at the kept coefficients of the full spectrum of fields like `y` (batch, channels, *grid)."""
    T, size = get_transform(transform), grid_of(y)
    block = T.block(modes, size)
    if isinstance(modes, ModeSet):
        return modes.mask(size)
    kept = torch.zeros(T.block(None, size), dtype=torch.bool)
    # The lowest modes of an axis are the first ones, and in the rows of an rfft also the last, of negative wave number.
    corner = [
        torch.arange(m) - (m // 2 if T.is_complex and axis < len(size) - 1 else 0) for axis, m in enumerate(block)
    ]
    kept[torch.meshgrid(*corner, indexing="ij")] = True
    return kept


def grid_of(y: Tensor) -> tuple[int, ...]:
    """Grid of the fields (batch, channels, *grid), one to three axes."""
    if not 3 <= y.ndim <= 5:
        raise ValueError(
            f"expected fields (batch, channels, *grid) with one to three grid axes; got shape {tuple(y.shape)}"
        )
    return tuple(y.shape[2:])


def _mode_set(T: Transform, flat: Tensor, size: tuple[int, ...]) -> ModeSet:
    """The set of these positions (..., M) in the flattened full spectrum of a grid."""
    indices = T.numbers(size).flatten(0, -2).to(flat.device)[flat]
    reach = torch.cartesian_prod(*T.reach(size)).reshape(-1, len(size)).to(flat.device)
    farthest = reach[flat].flatten(0, -2).amax(0).tolist()
    return ModeSet(indices.cpu(), T.block(farthest, size), T.name)


def _on_axis(values: Tensor, axis: int, ndim: int) -> Tensor:
    """Values along one axis, in a shape that broadcasts over the others."""
    return values.reshape([-1 if a == axis else 1 for a in range(ndim)])


def _tail(y: Tensor, modes: Modes, T: Transform, size: tuple[int, ...]) -> Tensor:
    kept = T.forward(y, len(size), modes)
    if T.is_complex:
        # A truncated rfft keeps the row −m but not m, so its real inverse is no projection: count what was dropped.
        held = modes.scatter(kept) if isinstance(modes, ModeSet) else kept
        return (y.flatten(2).square().sum(2) - T.energy(held, len(size), size).flatten(2).sum(2)).clamp_min(0)
    return (y - T.inverse(kept, len(size), size, modes)).flatten(2).square().sum(2)


def _energies(y: Tensor, T: Transform) -> Iterator[Tensor]:
    """Energy per mode (samples, channels, *spectrum) of successive blocks of samples, in float64."""
    size = grid_of(y)
    for block in blocks(y):
        yield T.energy(T.forward(double(block), len(size)), len(size), size)


def blocks(y: Tensor) -> Sequence[Tensor]:
    """Successive samples of fields, of about as many numbers as fit into memory a few times over."""
    return y.split(max(1, _BLOCK_NUMBERS // max(1, y[:1].numel())))


def double(x: Tensor) -> Tensor:
    """In the precision that sums of squares and residuals are taken in."""
    return x.double() if x.device.type != "mps" else x.float()  # that device has no float64


def _norms(y: Tensor) -> Tensor:
    return torch.cat([double(block).flatten(1).norm(dim=1) for block in blocks(y)])
