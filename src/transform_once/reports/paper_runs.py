"""What figures of the paper take from run folders: a sample that all runs predict, and their errors by mode."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from transform_once.data.fields import Fields
from transform_once.reports.paper_table import Array
from transform_once.reports.runs import Group, Run, group_runs, read_runs
from transform_once.spectral.transforms import get_transform

DRAWN = 5  # runs side by side
FOLLOWING = ("train", "validation", "fingerprint", "epochs", "seconds", "batch_size")  # the number of samples


def read_groups(folders: Sequence[Path] | None, figure: str, sizes_apart: bool = True) -> list[Group]:
    """Runs that differ in the seed only, and without `sizes_apart` in the number of samples, group by group."""
    if not folders:
        raise ValueError(f"the figure {figure} shows trained models: give run folders with --runs")
    runs = read_runs(list(folders))
    stale = [run.name for run in runs if not run.metrics]
    if stale:
        raise ValueError(f"{stale[0]} has no metrics.json: run `t1 evaluate` on it, or leave it out")
    if sizes_apart:
        return group_runs(runs)
    by_name = {run.name: run for run in runs}
    alike = [replace(run, about=_without(run.about, FOLLOWING)) for run in runs]
    return [Group(group.label, [by_name[run.name] for run in group.runs]) for group in group_runs(alike)]


def _without(about: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A description less these entries of its parts."""
    parts = {name: dict(value) if isinstance(value, Mapping) else value for name, value in about.items()}
    for name in ("data", "training"):
        if isinstance(parts.get(name), dict):
            parts[name] = {key: value for key, value in parts[name].items() if key not in names}
    return parts


def labels(groups: Sequence[Group], width: int = 26) -> list[str]:
    """A name for each group that fits above a picture; the folder's where labels are the same."""
    found = [group.label for group in groups]
    found = [name if found.count(name) == 1 else group.runs[0].name for name, group in zip(found, groups, strict=True)]
    return [textwrap.fill(textwrap.shorten(name, 3 * width, placeholder="…"), width) for name in found]


@dataclass(frozen=True, eq=False)
class Predicted:
    """A sample: truth and prediction (c, *grid), or frames (t, c, *grid) at `times`; masked points are nan."""

    number: int
    truth: Array
    prediction: Array
    times: tuple[float, ...] = ()


def predicted(runs: Sequence[Run], fields: Fields | None, sample: int | None, device: torch.device) -> list[Predicted]:
    """One sample for each run: that number of the fields given, else one that the examples of all runs have.

    Where they have none in common, each run shows one of its own.
    """
    if fields is not None:
        return [_again(run, fields, sample or 0, device) for run in runs]
    for run in runs:
        if "target" not in run.examples or "prediction" not in run.examples:
            raise ValueError(f"{run.name} has no examples.npz with predictions: run `t1 evaluate` on it")
    indices = [np.asarray(run.examples.get("index", range(len(run.examples["target"])))).tolist() for run in runs]
    common = [number for number in indices[0] if all(number in others for others in indices)]
    if sample is not None and sample not in common:
        raise ValueError(
            f"test sample {sample} is not among the examples of all runs, which share {common or 'none'}: give the "
            "test data with --data, and every run predicts it"
        )
    chosen = sample if sample is not None else common[len(common) // 2] if common else None
    return [
        _example(run, own.index(chosen) if chosen is not None else len(own) // 2, own)
        for run, own in zip(runs, indices, strict=True)
    ]


def _example(run: Run, place: int, indices: Sequence[int]) -> Predicted:
    truth, prediction = (np.asarray(run.examples[name][place], float) for name in ("target", "prediction"))
    if "mask" in run.examples:
        hidden = run.examples["mask"][place]
        truth, prediction = (np.where(hidden, np.nan, values) for values in (truth, prediction))
    times = tuple(np.asarray(run.examples.get("times", ())).tolist())
    return Predicted(int(indices[place]), truth, prediction, times)


def _again(run: Run, fields: Fields, sample: int, device: torch.device) -> Predicted:
    """The sample, predicted by the weights of the run."""
    from transform_once.evaluation.evaluate import full_evaluation
    from transform_once.training.run import load_models

    if not 0 <= sample < len(fields):
        raise ValueError(f"the data hold {len(fields)} samples, numbered from 0; asked for {sample}")
    found = full_evaluation(load_models(run.folder), fields[[sample]], count=1, device=device, progress=False)
    return replace(_example(replace(run, examples=found.arrays), 0, [0]), number=sample)


class Tails(NamedTuple):
    """Errors outside the lowest modes: of a run, and of a prediction that is zero there (R_o); over all test samples.

    cost     real numbers that the low-passes keep per channel
    error    √(energy of the error outside / energy of the targets)
    floor    √(energy of the targets outside / energy of the targets)
    kept     (numbers, error, floor) for the modes that the model keeps, or by which its errors were split
    """

    transform: str
    cost: list[int]
    error: list[float]
    floor: list[float]
    kept: tuple[int, float, float]


def tails(run: Run) -> Tails:
    """What error_spectrum and target_spectrum of the examples say about the modes outside."""
    error, target = run.examples.get("error_spectrum"), run.examples.get("target_spectrum")
    if error is None or target is None:
        raise ValueError(f"{run.name} has no spectra of the error in examples.npz: run `t1 evaluate` on it")
    T, size = get_transform(run.transform), _grid(run, target)
    energies = [np.square(spectrum, dtype=float).sum(0) for spectrum in (error, target)]
    total = energies[1].sum()
    if not total > 0 or not np.isfinite(energies[0]).all():
        raise ValueError(f"the errors of {run.name} are not finite, or its targets are zero: there is nothing to show")
    boxes = [tuple(min(m, n) for n in T.max_modes(size)) for m in range(1, max(T.max_modes(size)) + 1)]
    reach = np.zeros(T.block(None, size), dtype=int)
    for axis, values in enumerate(T.reach(size)):
        reach = np.maximum(reach, values.numpy().reshape([-1 if a == axis else 1 for a in range(len(size))]))
    shares = [np.bincount(reach.ravel(), e.ravel(), len(boxes) + 1)[1:] / total for e in energies]
    outside = [np.sqrt(np.append(s[::-1].cumsum()[::-1][1:], 0.0)).tolist() for s in shares]
    real = 1 + T.is_complex
    kept = _kept(run, target.shape[1:])
    error_there, floor_there = (float(np.sqrt(np.where(kept, 0, e).sum() / total)) for e in energies)
    numbers = [real * prod(T.block(box, size)) for box in boxes]
    at_kept = real * int(kept.sum()), error_there, floor_there
    return Tails(run.transform, numbers, outside[0], outside[1], at_kept)


def _grid(run: Run, target: Array) -> tuple[int, ...]:
    if run.transform != "dft":
        return tuple(target.shape[1:])
    size = run.metrics.get("resolution") or run.part("data").get("resolution") or ()
    if len(size) != target.ndim - 1:
        raise ValueError(f"{run.name} does not say on which grid it was evaluated: run `t1 evaluate` on it")
    return tuple(size)


def _kept(run: Run, spectrum: tuple[int, ...]) -> Array:
    """True at the modes by which the errors of the run are split."""
    held = run.examples.get("kept")
    if held is not None:
        kept: Array = np.asarray(held, dtype=bool).reshape(-1, *spectrum)  # one set, or one for each channel
        return np.logical_or.reduce(kept, axis=0)
    inside = np.zeros(spectrum, dtype=bool)
    block = (run.metrics.get("kspace") or {}).get("modes") or spectrum
    inside[tuple(slice(0, m) for m in block)] = True
    return inside
