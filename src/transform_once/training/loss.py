"""Objectives: the relative L2 error of every sample, in physical units, on kept modes or on fields.

On kept modes it is exact (Parseval): with s_c the scale of the normalisation of channel c,

    ‖y − ŷ‖² = Σ_c s_c² (‖Y_c − Ŷ_c‖² + tail_c).

For rollouts numerator and denominator are summed over all steps of the rollout, and the tail is that of what a model
with a memory leaves outside its kept modes (`evaluation.rollout`).
"""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from transform_once import kernels
from transform_once.data.fields import Fields
from transform_once.data.metadata import Metadata
from transform_once.data.spectra import Spectra
from transform_once.data.symmetries import Symmetry, draw
from transform_once.evaluation.rollout import kspace_rollout, remembered, rollout_through, steps_in_kspace
from transform_once.models.operator import Operator, SpectralOperator

Batch = dict[str, Tensor]


class Objective(nn.Module):
    """A model and its error: a batch to the relative L2 of each sample, (n,). The model is what has parameters.

    In training mode each sample is moved by a random product of the symmetries first.
    """

    def __init__(self, model: Operator, symmetries: tuple[Symmetry, ...], precision: str, steps: int) -> None:
        super().__init__()
        self.model, self.symmetries, self.precision, self.steps = model, symmetries, precision, steps

    @abstractmethod
    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """The relative L2 of each sample."""

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if self.precision != "bfloat16":
            return contextlib.nullcontext()
        # The cache of cast weights would outlive a captured step.
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)

    @property
    def _moves(self) -> bool:
        return self.training and bool(self.symmetries)

    def _in_its_precision(self, batch: Batch) -> Batch:
        """Fields or modes in the precision of the weights; energies stay as they are."""
        real = next(self.model.parameters()).dtype
        names = [name for name in ("input", "target", "trajectory") if name in batch]
        return batch | {n: batch[n].to(real.to_complex() if batch[n].is_complex() else real) for n in names}


class KSpaceObjective(Objective):
    """On spectra made once: nothing is transformed. Symmetries act on the modes."""

    model: SpectralOperator

    def __init__(
        self,
        model: SpectralOperator,
        spectra: Spectra,
        symmetries: tuple[Symmetry, ...] = (),
        precision: str = "float32",
        steps: int = 1,
    ) -> None:
        super().__init__(model, symmetries, precision, steps)
        self.spectra = spectra
        self.scales = [one.scale.flatten() for one in spectra.normalization]
        # A symmetry may flip signs, and then the shift of the normalisation, which sits in the constant mode, must not
        # take part: √N · shift / scale is added before and taken away after.
        points = math.sqrt(math.prod(spectra.resolution))
        self.constants = [(one.shift.flatten() / one.scale.flatten()) * points for one in spectra.normalization]
        self.moved_shift = [bool(constant.any()) for constant in self.constants]
        if self.moved_shift[1] and model.out_transform.name == "dst":
            raise ValueError("sines have no constant mode: give outputs in the dst a normalisation without a shift")
        self.factors = None if model.memory is None else remembered(model.memory, steps)
        self._cached: dict[torch.device, list[Tensor]] = {}

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """The relative L2 of each sample, from kept modes, tails and energies."""
        batch = self._in_its_precision(batch)
        if "trajectory" in batch:
            return self._rolled(batch, generator)
        X, Y = batch["input"], batch["target"]
        if self._moves:
            motion = draw(self.symmetries, len(X), X.device, generator)
            X = motion.modes(X, self.model.transform.name, inputs=True, constants=self._constants(X, 0))
            Y = motion.modes(Y, self.model.out_transform.name, constants=self._constants(Y, 1))
        with self._autocast(X.device):
            prediction = self.model.kspace(self._resized(X, self.model.resolution, 1)).to(Y.dtype)
        prediction = self._resized(prediction, self.model.out_resolution, -1)
        return self._relative(prediction[:, None], Y[:, None], batch["tail"][:, None], batch["energy"][:, None])

    def _rolled(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        Z, first = batch["trajectory"], batch["trajectory"].shape[1] - self.steps
        if self._moves:
            motion = draw(self.symmetries, len(Z), Z.device, generator)
            Z = motion.modes(Z, self.model.transform.name, constants=self._constants(Z, 0))
        with self._autocast(Z.device):
            known = self._resized(Z[:, :first], self.model.resolution, 1)
            prediction = kspace_rollout(self.model, known, self.steps).to(Z.dtype)
        prediction = self._resized(prediction, self.model.resolution, -1)
        return self._relative(prediction, Z[:, first:], self._left(batch, first), batch["energy"][:, first:])

    def _left(self, batch: Batch, first: int) -> Tensor:
        """‖t_s − a_s t_0‖², (n, steps, c), of what frames have outside: t_0 the last known one, a_s the memory.

        Beyond the lags that products are known of, ⟨t_s, t_0⟩ is taken as a_s ‖t_0‖², as least squares has it.
        """
        tail = batch["tail"]
        if self.factors is None:
            return tail[:, first:]
        a, start = self._on(tail.device)[3], tail[:, first - 1 : first]
        known = min(self.steps, batch["lagged"].shape[2])
        product = batch["lagged"][:, first : first + known, :known].diagonal(dim1=1, dim2=2).mT
        product = torch.cat([product, a[known:] * start.expand(-1, self.steps - known, -1)], 1)
        return (tail[:, first:] - 2 * a * product + a.square() * start).clamp_min(0)

    def _relative(self, prediction: Tensor, target: Tensor, tail: Tensor, energy: Tensor) -> Tensor:
        """(n, steps, c, *kept) to (n,)."""
        if kernels.can_run(prediction, target):
            from transform_once.kernels import loss

            return loss.relative_l2(prediction.flatten(3), target.flatten(3), tail, energy, self._on(tail.device)[2])
        error = self.spectra.squared_error(prediction, target, tail)
        squared_scale = self._on(tail.device)[2]
        # The ratio is taken before it is rounded to the precision of the modes: physical units can be of any size.
        weight = squared_scale / energy.sum((1, 2), keepdim=True)
        squared = (weight.to(error.dtype) * error).sum((1, 2))
        return squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()

    def _resized(self, Z: Tensor, grid: Sequence[int], power: int) -> Tensor:
        """From the grid of the data to one that the model was made for (power 1), or back (−1)."""
        if tuple(grid) == self.spectra.resolution:
            return Z
        return Z * math.sqrt(math.prod(grid) / math.prod(self.spectra.resolution)) ** power

    def _constants(self, Z: Tensor, which: int) -> Tensor | None:
        """What the shift of the normalisation took off the constant mode, which a change of sign must see."""
        return self._on(Z.device)[which] if self.moved_shift[which] else None

    def _on(self, device: torch.device) -> list[Tensor]:
        """Constants on a device, put there once, so that a captured step finds them."""
        if device not in self._cached:
            wanted = [*self.constants, self.scales[1].square(), *([] if self.factors is None else [self.factors])]
            real = torch.float32 if device.type == "mps" else torch.float64
            self._cached[device] = [values.to(device, real) for values in wanted]
        return self._cached[device]


class FieldObjective(Objective):
    """On fields in physical units, for any model, with masks; symmetries act on the fields."""

    def __init__(
        self,
        model: Operator,
        fields: Fields,
        symmetries: tuple[Symmetry, ...] = (),
        precision: str = "float32",
        steps: int = 1,
    ) -> None:
        super().__init__(model, symmetries, precision, steps)
        self.metadata: Metadata = fields.metadata
        self.in_kspace = model.dynamics is not None and steps_in_kspace(model)  # a captured step cannot ask
        if symmetries and fields[:1].mask is not None and not _by_whole_steps(symmetries, fields):
            raise ValueError("fields with a mask cannot be shifted by fractions of a grid step: set symmetries=False")

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """The relative L2 of each sample."""
        batch = self._in_its_precision(batch)
        batch = self._moved(batch, generator) if self._moves else batch
        device = next(iter(batch.values())).device
        if "trajectory" in batch:
            frames = batch["trajectory"]
            first = frames.shape[1] - self.steps
            with self._autocast(device):
                prediction = rollout_through(self.model, frames[:, :first], self.steps, self.in_kspace)
            mask = batch.get("mask")
            mask = mask[:, first:] if mask is not None and mask.shape[1] > 1 else mask
            return relative_l2(prediction, frames[:, first:], mask)
        with self._autocast(device):
            prediction = self.model(batch["input"])
        return relative_l2(prediction, batch["target"], batch.get("mask"))

    def _moved(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        anyone = next(iter(batch.values()))
        motion = draw(self.symmetries, len(anyone), anyone.device, generator)
        grid, periodic = self.metadata.grid, self.metadata.periodic
        moved = {
            name: motion.fields(x, grid=grid, periodic=periodic, inputs=name == "input")
            for name, x in batch.items()
            if name != "mask"
        }
        if "mask" in batch:  # a mask is moved like a field, and never changes its sign
            judged = batch.get("target", anyone)
            wide = batch["mask"].expand_as(judged).to(judged.dtype)
            moved["mask"] = motion.fields(wide, grid=grid, periodic=periodic).abs() > 0.5
        return moved


def _by_whole_steps(symmetries: tuple[Symmetry, ...], fields: Fields) -> bool:
    """Whether the symmetries take grid points to grid points."""
    table = draw(symmetries, 1, generator=torch.Generator()).table
    halves = [0.0 if fields.metadata.grid == "node" and around else 0.5 for around in fields.metadata.periodic]
    return all(table.aligned(axis, n, halves[axis]) for axis, n in enumerate(fields.resolution))


def relative_l2(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖(ŷ − y)∘w‖/‖y∘w‖ of each sample, over all axes but the first; w is 0 where the mask is True."""
    error = prediction.to(target.dtype) - target
    if mask is not None:
        error, target = error.masked_fill(mask, 0), target.masked_fill(mask, 0)
    squared = error.flatten(1).square().sum(1) / target.flatten(1).square().sum(1)
    return squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
