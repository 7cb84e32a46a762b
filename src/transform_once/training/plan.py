"""What a training run does with its data: on kept modes or on fields, and in which units."""

import dataclasses
import errno
import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from transform_once.data.fields import Fields
from transform_once.data.normalization import Normalization
from transform_once.data.spectra import Pair, Spectra, spectra
from transform_once.data.symmetries import Symmetry, why_not_on_modes
from transform_once.models.operator import Dynamics, Operator, SpectralOperator
from transform_once.models.t1 import T1
from transform_once.spectral.modes import ModeSet
from transform_once.spectral.transforms import get_transform
from transform_once.training.batches import Source
from transform_once.training.loss import FieldObjective, KSpaceObjective, Objective
from transform_once.training.settings import Training

WINDOWS = 64  # of frames, from which the size of changes is taken
FILMS = 16  # trajectories from which a memory is taken where none is transformed for training


@dataclass(frozen=True)
class Plan:
    """The decisions, made before the first step and written into the run folder."""

    space: str  # "k-space" or "fields"
    reason: str
    train: Spectra | Fields
    validation: Spectra | Fields | None
    normalization: Pair
    symmetries: tuple[Symmetry, ...]
    dynamics: Dynamics | None
    settings: Training
    changes: torch.Tensor | float = 1.0  # size of what a model adds to a frame, per channel, in units of the frames
    memory: torch.Tensor | None = None  # of what frames have outside the kept modes

    def prepare(self, model: Operator) -> None:
        """Give the model its units, its way of stepping in time and its memory."""
        model.dynamics = self.dynamics
        first, last = (tuple(v.flatten().float() for v in (one.shift, one.scale)) for one in self.normalization)
        if self.dynamics is not None:
            first = tuple(values.repeat(self.dynamics.history + 1) for values in first)
            if self.dynamics.order > 0:  # a difference of frames has no shift, and a size of its own
                last = (torch.zeros_like(last[0]), last[1] * self.changes)
        model.set_normalization(*first, *last)
        if isinstance(model, SpectralOperator):
            model.memory = None if self.memory is None else self.memory.to(next(model.parameters()))

    def objective(self, model: Operator) -> Objective:
        """The model with its error."""
        precision, steps = self.settings.precision or "float32", self.settings.steps
        if isinstance(self.train, Spectra):
            assert isinstance(model, SpectralOperator)  # told to the type checker
            return KSpaceObjective(model, self.train, self.symmetries, precision, steps)
        return FieldObjective(model, self.train, self.symmetries, precision, steps)

    def source(self, device: torch.device, validation: bool = False) -> Source:
        """Where batches come from."""
        data = self.validation if validation else self.train
        assert data is not None
        frames = self.dynamics.frames if self.dynamics else 0
        return Source(data, device, frames + self.settings.steps, self.settings.steps)


def make_plan(
    model: Operator,
    data: Fields | Spectra,
    validation: Fields | Spectra | None,
    settings: Training,
    progress: bool = True,
) -> Plan:
    """Decide, check that model and data fit, and transform once.

    A model that transforms once is trained on kept modes, unless the data have a mask, its local maps need fields, or
    the data set declares symmetries that act on fields only (`why_not_on_modes`). A model that
    already has a normalisation keeps it.
    """
    dynamics = Dynamics(settings.order, settings.history) if data.kind == "trajectories" else None
    _check(model, data, dynamics)
    symmetries = tuple(Symmetry.from_dict(known) for known in data.metadata.symmetries) if settings.symmetries else ()
    reason = _why_fields(model, data, symmetries)
    if isinstance(data, Spectra):
        if _why_fields(model, data, ()):
            raise ValueError(f"these data are spectra, but {reason}: train on fields")
        if reason:  # spectra were given that the symmetries of the data set cannot move: train without them
            symmetries, reason = (), None
        _check_spectra(model, data, _kept_units(model, dynamics) or data.normalization)
        made: Spectra | Fields = data
        pair = data.normalization
    else:
        pair = _kept_units(model, dynamics) or _fitted(model, data, settings.normalization)
        made = data if reason else _spectra(model, data, pair, progress)
    if isinstance(made, Spectra) and validation is not None:
        if validation.resolution != made.resolution:
            raise ValueError(
                f"the validation data lie on a grid of {validation.resolution} points, those to train on of "
                f"{made.resolution}: give both on one grid"
            )
        if isinstance(validation, Fields):
            validation = _spectra(model, validation, pair, progress)
        _check_spectra(model, validation, pair)
    if isinstance(made, Fields) and isinstance(validation, Spectra):
        raise ValueError("the training data are fields and the validation data spectra: give fields for both")
    space = "k-space" if isinstance(made, Spectra) else "fields"
    why = reason or "the model transforms once, so its data are transformed once"
    memory = made.memory() if isinstance(made, Spectra) else _memory(model, made, pair)
    plan = Plan(space, why, made, validation, pair, symmetries, dynamics, settings, memory=memory)
    return plan if dynamics is None else dataclasses.replace(plan, changes=_changes(model, plan))


def _why_fields(model: Operator, data: Fields | Spectra, symmetries: tuple[Symmetry, ...]) -> str | None:
    """Why training cannot stay on kept modes, or None."""
    if not isinstance(model, SpectralOperator):
        return f"{type(model).__name__} maps fields"
    if getattr(model, "local", None):
        return "its local maps are maps of fields"
    if isinstance(data, Fields) and (data.metadata.missing is not None or data[:1].mask is not None):
        return "a mask is a matter of fields"
    if symmetries and isinstance(model.modes, ModeSet):
        return "the symmetries of the data set act on fields, not on a set of modes"
    about = data.metadata
    for name in (model.transform.name, model.out_transform.name) if symmetries else ():
        if why := why_not_on_modes(symmetries, name, model.block, about.grid, about.periodic):
            return f"the symmetries of the data set {why}"
    if any(abs(factor) != 1 for one in symmetries for factor in (*one.factors, *one.input_factors)):
        return "the symmetries of the data set change the size of fields"
    return None


def _check(model: Operator, data: Fields | Spectra, dynamics: Dynamics | None) -> None:
    shapes = {name: tuple(t.shape) for name, t in data.tensors.items()} if isinstance(data, Spectra) else data.shapes
    ndim = len(data.resolution)
    if ndim != model.ndim:
        raise ValueError(f"the model is for {model.ndim} grid axes, the data have {ndim}")
    if dynamics is not None:
        channels = shapes["trajectory"][2]
        wanted = ((dynamics.history + 1) * channels, channels)
    elif "target" in shapes:
        wanted = (shapes["input"][1], shapes["target"][1])
    else:
        raise ValueError("training needs pairs or trajectories; these fields hold inputs only: give targets too")
    if dynamics is not None and isinstance(model, SpectralOperator) and model.out_resolution != model.resolution:
        raise ValueError("a model that steps in time gives frames like those that it takes: leave out_resolution out")
    if dynamics is not None and isinstance(model, SpectralOperator) and model.out_transform is not model.transform:
        raise ValueError("a model that steps in time gives frames like those that it takes: leave out_transform out")
    if (model.in_channels, model.out_channels) != wanted:
        raise ValueError(
            f"the data have {wanted[0]} channels in (with history) and {wanted[1]} out, the model "
            f"{model.in_channels} and {model.out_channels}"
        )


def _check_spectra(model: Operator, data: Spectra, units: Pair) -> None:
    assert isinstance(model, SpectralOperator)  # told to the type checker
    block = model.transform.block(data.modes, data.resolution)
    same_set = not isinstance(model.modes, ModeSet) or (
        isinstance(data.modes, ModeSet) and torch.equal(model.modes.indices, data.modes.indices)
    )
    kinds = (data.transform, data.out_transform or data.transform), (model.transform.name, model.out_transform.name)
    if kinds[0] != kinds[1] or block != model.block or not same_set:
        found, own = (" and ".join(dict.fromkeys(names)) for names in kinds)
        raise ValueError(
            f"the spectra keep {block} modes of the {found} basis, the model {model.block} of the {own} basis"
        )
    for ours, theirs in zip(units, data.normalization, strict=True):
        if not (torch.allclose(ours.shift, theirs.shift) and torch.allclose(ours.scale, theirs.scale)):
            raise ValueError("the spectra are in other units than the model or the training data: give fields instead")


def _spectra(model: Operator, fields: Fields, pair: Pair, progress: bool, cache: bool = True) -> Spectra:
    assert isinstance(model, SpectralOperator)  # told to the type checker
    out = None if model.out_transform is model.transform else model.out_transform.name
    options: dict[str, Any] = {"out_transform": out, "normalization": pair, "cache": cache, "progress": progress}
    recipe = partial(spectra, fields, model.transform.name, model.modes, **options)
    with warnings.catch_warnings():
        # Another basis than that of the grid matters when a model moves to another resolution: evaluation warns then.
        warnings.filterwarnings("ignore", message="these fields lie on")
        try:
            return recipe()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise
            return recipe(cache=False)  # there is no room for a cache beside the data: the spectra stay in memory


def _memory(model: Operator, fields: Fields, pair: Pair) -> torch.Tensor | None:
    """The memory of a model that is trained on fields and rolled out on its kept modes."""
    if fields.kind == "pairs" or not isinstance(model, SpectralOperator) or _why_fields(model, fields, ()):
        return None
    some = torch.linspace(0, len(fields) - 1, min(FILMS, len(fields))).long().tolist()
    return _spectra(model, fields[some], pair, progress=False, cache=False).memory()


def _fitted(model: Operator, fields: Fields, kind: str) -> Pair:
    """Units in which fields have variance 1; for a T1 its kept modes, on which its activations act.

    Fields of variance 1 on N points have modes of the size √(N/M) where M are kept.
    """
    maps = [Normalization.fit(fields, name, kind) for name in fields.shapes]
    if kind == "standard" and isinstance(model, T1) and not model.local:
        size = math.sqrt(math.prod(model.resolution) / math.prod(model.kept_shape))
        maps = [dataclasses.replace(one, scale=size * one.scale) for one in maps]
    sines = isinstance(model, SpectralOperator) and model.out_transform.name == "dst"
    return maps[0], (maps[-1].without_shift() if sines else maps[-1])


def _changes(model: Operator, plan: Plan) -> torch.Tensor | float:
    """Root mean square of what is added to a frame, or of the change of that at order 2, in units of the frames.

    A model that has units already keeps them, and data that are not normalised have none.
    """
    assert plan.dynamics is not None  # told to the type checker
    order, (unit, _) = plan.dynamics.order, plan.normalization
    if order == 0 or unit.kind == "none":
        return 1.0
    if model.input_scale is not None and model.output_scale is not None:
        return (model.output_scale / model.input_scale[-model.out_channels :]).float().cpu()
    squares = [_squared_change(plan.train, *window, order) for window in _windows(plan.train, order)]
    if not squares:  # too few frames, which is said where samples are made of them
        return 1.0
    found = torch.stack(squares).mean(0).sqrt()
    if isinstance(plan.train, Fields):
        found = found / unit.scale.flatten()
    return torch.where(found > 0, found, 1.0).float()


def _windows(data: Spectra | Fields, order: int) -> list[tuple[int, int]]:
    """Trajectories and first frames of order + 1 frames each, evenly over the data."""
    shape = data.tensors["trajectory"].shape if isinstance(data, Spectra) else data.shapes["trajectory"]
    starts = shape[1] - order
    count = len(data) * max(0, starts)
    chosen = torch.linspace(0, count - 1, min(WINDOWS, count)).long().unique().tolist()
    return [divmod(number, starts) for number in chosen]


def _squared_change(data: Spectra | Fields, sample: int, first: int, order: int) -> torch.Tensor:
    """Mean square over the points of a difference of frames, per channel."""
    if isinstance(data, Spectra):
        Z = data.tensors["trajectory"][sample, first : first + order + 1]
        before = Z[-2] if order == 1 else 2 * Z[-2] - Z[-3]
        T, size = get_transform(data.transform), data.resolution
        energy = T.energy(Z[-1] - before, len(size), size)
        return energy.flatten(1).sum(1).double() / math.prod(size)
    window = data[sample : sample + 1].select(frames=slice(first, first + order + 1)).load()
    change = window.trajectory[0].double().diff(n=order, dim=0)[-1].flatten(1)
    if window.mask is None:
        return change.square().mean(1)
    seen = ~window.mask.expand(window.trajectory.shape)[0, -1].flatten(1)
    return (change.square() * seen).sum(1) / seen.sum(1).clamp(min=1)


def _kept_units(model: Operator, dynamics: Dynamics | None) -> Pair | None:
    """The normalisation that the model has already, of input and target, or of a frame twice."""
    if model.input_shift is None or model.input_scale is None:
        return None
    assert model.output_shift is not None
    assert model.output_scale is not None
    ones = (1,) * model.ndim
    channels = model.out_channels if dynamics is not None else model.in_channels
    shift, scale = model.input_shift[-channels:], model.input_scale[-channels:]
    first = Normalization("standard", shift.double().cpu().reshape(-1, *ones), scale.double().cpu().reshape(-1, *ones))
    if dynamics is not None:
        return first, first
    shift, scale = model.output_shift, model.output_scale
    last = Normalization("standard", shift.double().cpu().reshape(-1, *ones), scale.double().cpu().reshape(-1, *ones))
    return first, last
