"""Predict with a model or an ensemble, and measure it on fields: numbers, and arrays for pictures, in one pass."""

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transform_once.data.arrays import Array
from transform_once.data.fields import Fields
from transform_once.evaluation.metrics import KSpaceError, Metrics, Scores, from_best_to_worst, mean_and_spread
from transform_once.evaluation.rollout import rollout
from transform_once.files import atomic_path
from transform_once.models.operator import Operator, SpectralOperator
from transform_once.processes import joined
from transform_once.spectral.transforms import Modes

Models = Operator | Sequence[Operator]
Device = torch.device | str

# A batch holds at most so many samples and about so many numbers, so that large fields and long rollouts fit.
BATCH_SAMPLES, BATCH_NUMBERS = 64, 2**22
# Pictures of a rollout show at most so many frames, fewer where all of them would have more numbers than this.
PICTURE_FRAMES, PICTURE_NUMBERS = 12, 2**24


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What one pass over the data gives: `numbers` for JSON (see `evaluate`), `arrays` for pictures (`examples`)."""

    numbers: dict[str, Any]
    arrays: dict[str, Array]


def predict(
    model: Models,
    x: Tensor | Array,
    batch_size: int | None = None,
    device: Device | None = None,
    size: int | Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Fields to fields in batches, on the CPU: (n, in_channels, *grid) to (n, out_channels, *grid).

    Args:
        model: A model, or the members of an ensemble: then the result is the mean and the spread, the standard
            deviation over the members (divided by their number less one). A sequence of one is that model.
        x: Fields in physical units and any real precision; the channel axis may be absent where the model has one.
        batch_size: Samples at a time; by default up to 64, fewer where fields are large.
        device: Where to compute; by default where the model is. The model is left as it was, in its former mode too.
        size: Grid of the output, for models that transform once (T1, T1Plus, T1Grid); by default the input's.
    """
    models = _members(model)
    x = _as_input(x, models[0])
    for one in models:
        if size is not None and not isinstance(one, SpectralOperator):
            raise ValueError(
                f"only models that transform once choose their output's grid; {type(one).__name__} keeps the input's: "
                "leave size out"
            )
        if one.dynamics is not None and one.dynamics.order > 0:
            raise ValueError(
                f"this {type(one).__name__} predicts the change from one frame to the next: use rollout instead"
            )
    parts = []
    with _ready(models, device):
        for batch in x.split(_batch_size(batch_size, x[0].numel() * len(models))):
            mean, spread = mean_and_spread([_forward(one, batch, size) for one in models])
            parts.append((mean.cpu(), None if spread is None else spread.cpu()))
    mean = torch.cat([part for part, _ in parts])
    spreads = [part for _, part in parts if part is not None]
    return (mean, torch.cat(spreads)) if spreads else mean


def evaluate(
    model: Models,
    fields: Fields,
    *,
    batch_size: int | None = None,
    device: Device | None = None,
    steps: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure a model, or an ensemble, on fields of any resolution, in physical units; the numbers are ready for JSON.

    Pairs: model(input) against target. Trajectories, for a model that steps in time: the first frames it needs are
    given, the next `steps` (default: all that follow) are rolled out. Masked points do not count.

    - the numbers of `Metrics`, with `per_channel` and, for trajectories, `per_step` and the `times` of the steps;
    - `kspace`: `J` and `R_o`, the error inside and outside the kept modes, see `KSpaceError`. The basis is the model's
      own if it transforms once; others are split in "fourier" for periodic fields on nodes, else "dct": models that
      keep wave numbers below m, such as FNO, at the 2m lowest real coefficients of each axis, models without modes,
      such as UNet, at half the coefficients of their grid. For these, and a T1 with local maps, R_o can be trained;
    - for ensembles these are of the mean prediction; `members` has the relative L2 of each, `calibration` says how well
      the spread matches the error, see `Calibration`.

    Inside a process group (torchrun) all processes must call this: each measures its share of the samples, and all get
    the same numbers, which are those of one process up to rounding.

    Args:
        model: A model, or the members of an ensemble; a sequence of one is that model.
        fields: Pairs with targets, or trajectories.
        batch_size: Samples at a time; by default up to 64, fewer where they are large.
        device: Where to compute; by default where the model is.
        steps: How far to roll out.
        progress: Show a bar on the terminal when it takes longer than a second.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "device": device, "steps": steps, "progress": progress}
    return full_evaluation(model, fields, count=0, **options).numbers


def examples(model: Models, fields: Fields, count: int = 4, **options: Any) -> dict[str, Array]:
    """A few samples and the spectra, for pictures; `options` are those of `evaluate`.

    - `input`, `target`, `prediction`, for ensembles `spread`, where there is one `mask`: `count` samples spread evenly
      over the sorted errors, from the best to the worst, with their `index` and `relative_l2`. Of rollouts at most 12
      frames (2 where fields are huge), the first and the last among them, (count, frames, c, *grid), at the `times`;
    - `error_spectrum` and `target_spectrum` (c, *spectrum): the RMS over all samples of each coefficient, in the basis
      of `evaluate`'s `kspace`, of the last step of a rollout. For a model that transforms once `kept`, True at its kept
      modes in that basis.
    """
    return full_evaluation(model, fields, count=count, **options).arrays


def full_evaluation(
    model: Models,
    fields: Fields,
    *,
    count: int = 4,
    batch_size: int | None = None,
    device: Device | None = None,
    steps: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """What `evaluate` and `examples` give, in one pass; then the `count` samples for pictures are predicted again."""
    task = _task(_members(model), fields, steps)
    models, place = task.models, joined(torch.device("cpu"))  # where all that we exchange lies
    metrics, kspace = Metrics(task.channels, task.steps), KSpaceError(*_basis(models[0], fields), fields.resolution)
    scores = Scores(metrics, kspace, len(models))
    with _ready(models, device):
        with place.together():
            share = task.fields[place.part(len(fields))]
            batches = share.batches(_batch_size(batch_size, task.numbers))
            for batch in _tracked(batches, len(share), progress and place.leads):
                case = task.case(batch)
                scores.add(case.predictions, case.target, case.mask)
        scores = place.collect(scores, Scores.merge)
        arrays = place.lead(lambda: _pictures(task, torch.cat(scores.errors), count))
    numbers = {**scores.result(), "resolution": list(fields.resolution)}
    if task.given:
        numbers["times"] = list(task.times)
    arrays["error_spectrum"], arrays["target_spectrum"] = scores.kspace.spectra()
    if isinstance(models[0], SpectralOperator):
        arrays["kept"] = scores.kspace.kept.numpy()
    return Evaluation(numbers, arrays)


def save_evaluation(folder: str | Path, evaluation: Evaluation) -> None:
    """Write `examples.npz` and then `metrics.json` into a folder that exists, each whole or not at all."""
    folder = Path(folder)
    with atomic_path(folder / "examples.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **evaluation.arrays)  # type: ignore[arg-type]
    with atomic_path(folder / "metrics.json") as temporary:
        temporary.write_text(json.dumps(evaluation.numbers, indent=2, allow_nan=False) + "\n", encoding="utf-8")


class _Case(NamedTuple):
    """One batch: fields, or frames (n, t, c, *grid), and what each model makes of them."""

    input: Tensor
    target: Tensor
    mask: Tensor | None
    predictions: list[Tensor]


@dataclass(frozen=True)
class _Task:
    """What is predicted from what: targets from inputs, or the frames that follow the first `given` ones."""

    models: tuple[Operator, ...]
    fields: Fields
    given: int  # 0 for pairs

    @property
    def steps(self) -> int | None:
        return self.fields.frames - self.given if self.given else None

    @property
    def times(self) -> tuple[float, ...]:
        return self.fields.metadata.times[self.given :]

    @property
    def channels(self) -> Sequence[str]:
        return self.fields.metadata.channels["trajectory" if self.given else "target"]

    @property
    def numbers(self) -> int:
        """How many numbers a sample has."""
        return sum(int(np.prod(shape[1:])) for shape in self.fields.shapes.values()) * len(self.models)

    def case(self, batch: Fields) -> _Case:
        mask = batch.mask
        if not self.given:
            size = batch.resolution
            predictions = [
                _forward(one, batch.input, size if isinstance(one, SpectralOperator) else None) for one in self.models
            ]
            return _Case(batch.input, batch.target, mask, predictions)
        first, target = batch.trajectory[:, : self.given], batch.trajectory[:, self.given :]
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, self.given :]
        predictions = [rollout(one, _placed(first, one), target.shape[1]) for one in self.models]
        return _Case(first, target, mask, predictions)


def _task(models: tuple[Operator, ...], fields: Fields, steps: int | None) -> _Task:
    """What is to be predicted, or one sentence about why it cannot be."""
    model = models[0]
    name, dynamics, channels = type(model).__name__, model.dynamics, (fields.in_channels, fields.out_channels)
    wanted = (model.in_channels, model.out_channels)
    if len(fields) == 0:
        raise ValueError("expected fields to evaluate on; got no samples")
    if fields.ndim != model.ndim:
        raise ValueError(f"this {name} is for {model.ndim} grid axes; these fields have {fields.ndim}")
    _warn_of_grid(model, fields)
    if fields.kind == "pairs":
        if "target" not in fields.shapes:
            raise ValueError("these fields hold inputs only, nothing to compare with: give targets, or use predict")
        if dynamics is not None and dynamics.order > 0:
            raise ValueError(f"this {name} predicts the change from frame to frame: give trajectories instead of pairs")
        if steps is not None:
            raise ValueError(f"steps are for trajectories; these fields are pairs: leave steps={steps} out")
        if channels != wanted:
            raise ValueError(f"this {name} has {wanted} channels in and out; these fields have {channels}")
        return _Task(models, fields, 0)
    if dynamics is None:
        raise ValueError(
            f"this {name} was not trained to step in time, and these are trajectories of {fields.frames} frames: "
            "give pairs, such as fields.pairs(0, -1)"
        )
    if wanted != ((dynamics.history + 1) * channels[0], channels[0]):
        raise ValueError(
            f"this {name} takes {wanted[0]} channels from {dynamics.history + 1} frames and gives {wanted[1]}; "
            f"the frames of these fields have {channels[0]}"
        )
    following = fields.frames - dynamics.frames
    if following < 1:
        raise ValueError(
            f"this {name} starts from {dynamics.frames} frames; trajectories of {fields.frames} leave none to compare"
        )
    if steps is not None and not 1 <= steps <= following:
        raise ValueError(f"steps must lie between 1 and the {following} frames that follow the first; got {steps}")
    end = dynamics.frames + (steps or following)
    return _Task(models, fields.select(frames=slice(0, end)), dynamics.frames)


def _warn_of_grid(model: Operator, fields: Fields) -> None:
    if not isinstance(model, SpectralOperator) or fields.resolution == model.resolution:
        return
    metadata, transform = fields.metadata, model.transform.name
    on_cells, on_nodes = metadata.grid == "cell", metadata.grid == "node" and all(metadata.periodic)
    if not (on_cells if transform == "dct" else on_nodes):
        warnings.warn(
            f"this model was trained on a grid of {model.resolution} and its {transform} moves to {fields.resolution} "
            f"only roughly: fields here lie on {metadata.grid}s, periodic={metadata.periodic}, and exact are dct on "
            "cells and fourier on periodic nodes",
            stacklevel=4,
        )


def _basis(model: Operator, fields: Fields) -> tuple[str, Modes]:
    """The transform and the modes by which errors are split: the rule that `evaluate` states."""
    if isinstance(model, SpectralOperator):
        return model.out_transform.name, model.modes
    metadata = fields.metadata
    transform = "fourier" if metadata.grid == "node" and all(metadata.periodic) else "dct"
    waves = model.config.get("modes", [max(1, n // 4) for n in model.resolution])
    waves = [waves] * model.ndim if isinstance(waves, int) else waves
    return transform, tuple(min(2 * m, n) for m, n in zip(waves, fields.resolution, strict=True))


def _pictures(task: _Task, errors: Tensor, count: int) -> dict[str, Array]:
    """Some samples from the best to the worst, each predicted again."""
    index = from_best_to_worst(errors, count)
    arrays: dict[str, list[Tensor]] = {}
    room = PICTURE_NUMBERS // (max(1, len(index)) * task.numbers // task.fields.frames)
    shown_frames = min(PICTURE_FRAMES, max(2, room))
    frames = np.unique(np.linspace(0, (task.steps or 1) - 1, shown_frames).round().astype(int))
    for sample in index:
        case = task.case(task.fields[[sample]].load())
        mean, spread = mean_and_spread(case.predictions)
        shown = {"target": case.target, "prediction": mean, "spread": spread}
        if case.mask is not None:
            shown["mask"] = case.mask.expand_as(case.target)
        for name, values in shown.items():
            if values is not None:
                arrays.setdefault(name, []).append(values[:, frames] if task.given else values)
        arrays.setdefault("input", []).append(case.input)
    joined = {name: torch.cat([part.cpu() for part in parts]) for name, parts in arrays.items()}
    pictures = {name: (v if v.dtype == torch.bool else v.float()).numpy() for name, v in joined.items()}
    pictures |= {"index": np.array(index, dtype=np.int64), "relative_l2": errors[index].numpy()}
    if task.given:
        pictures["times"] = np.array(task.times)[frames]
    return pictures


def _members(model: Models) -> tuple[Operator, ...]:
    models = (model,) if isinstance(model, Operator) else tuple(model)
    shapes = {(one.in_channels, one.out_channels, one.ndim, one.dynamics) for one in models}
    if len(shapes) != 1:
        raise ValueError(
            "expected a model, or members of an ensemble with the same channels, axes and dynamics; "
            f"got {len(models)} models of {len(shapes)} kinds"
        )
    return models


def _as_input(x: Tensor | Array, model: Operator) -> Tensor:
    """The fields (n, c, *grid), checked to be finite numbers."""
    tensor = x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))
    if tensor.is_complex() or tensor.ndim not in (1 + model.ndim, 2 + model.ndim) or len(tensor) == 0:
        axes = ", ".join(["samples", str(model.in_channels), *["grid"] * model.ndim])
        raise ValueError(f"expected real fields of shape ({axes}); got {tensor.dtype} of {tuple(tensor.shape)}")
    if tensor.ndim == 1 + model.ndim and model.in_channels == 1:
        tensor = tensor.unsqueeze(1)
    bad = (~tensor.isfinite()).flatten(1).any(1).nonzero()
    if len(bad):
        raise ValueError(f"sample {int(bad[0])} of the input holds NaN or Inf: repair or leave out that sample")
    return tensor


def _forward(model: Operator, x: Tensor, size: int | Sequence[int] | None) -> Tensor:
    return model(_placed(x, model)) if size is None else model(_placed(x, model), size=size)


def _placed(x: Tensor, model: Operator) -> Tensor:
    """The fields on the device of the model and in its precision."""
    held = next((v for v in chain(model.parameters(), model.buffers()) if v.is_floating_point()), torch.zeros(()))
    return x.to(held.device, held.dtype)


@contextmanager
def _ready(models: Sequence[Operator], device: Device | None) -> Iterator[None]:
    """The models on the device and in eval mode, without gradients; afterwards everything is as it was."""
    training = [(module, module.training) for one in models for module in one.modules()]
    homes = [_placed(torch.zeros(()), one).device for one in models]
    try:
        for one in models:
            one.eval()
            if device is not None:
                one.to(device)
        with torch.no_grad():
            yield
    finally:
        for module, mode in training:
            module.training = mode
        if device is not None:
            for one, home in zip(models, homes, strict=True):
                one.to(home)


def _batch_size(wanted: int | None, numbers: int) -> int:
    """How many samples of that many numbers go through at a time."""
    if wanted is not None and wanted < 1:
        raise ValueError(f"batch_size must be at least 1; got {wanted}")
    return wanted or max(1, min(BATCH_SAMPLES, BATCH_NUMBERS // numbers))


def _tracked(batches: Iterator[Fields], samples: int, show: bool) -> Iterator[Fields]:
    """The batches, with a bar on the terminal once they have taken longer than a second."""
    from rich.console import Console
    from rich.progress import Progress

    console, began = Console(stderr=True), time.monotonic()
    bar = Progress(console=console, transient=True, disable=not (show and console.is_terminal))
    task = bar.add_task("evaluate", total=samples)
    try:
        for batch in batches:
            yield batch
            bar.advance(task, len(batch))
            if time.monotonic() - began > 1:
                bar.start()
    finally:
        if bar.live.is_started:
            bar.stop()
