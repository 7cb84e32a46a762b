"""Which model for these data? Each gets the same seconds, the same rules and the same search, and is measured."""

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transform_once.data.fields import Fields
from transform_once.evaluation.evaluate import full_evaluation, save_evaluation
from transform_once.models.operator import Operator
from transform_once.processes import choose_device
from transform_once.training.choose import choose_model
from transform_once.training.run import Run
from transform_once.training.settings import settings_from
from transform_once.training.train import train

RATES = (0.25, 1.0)  # learning rates that every model tries, in units of the usual one
TRIAL = 0.1  # share of the budget for each trial; the rest is for the model that is kept
LEVEL = 1.05  # errors within this factor are called level
SHAPES = ("in_channels", "out_channels", "resolution")  # the arguments of a model that the data give
NAMES = ("T1", "T1Plus", "T1Grid", "FNO", "UNet")


@dataclass(frozen=True)
class Comparison:
    """What was measured: one row per model, best first, and what to use.

    The row of a model whose training diverged says so under `diverged`; its `relative_l2` is None, and it has no run.
    """

    rows: list[dict[str, Any]]
    advice: str
    runs: list[Run]


def compare(
    fields: Fields,
    budget: float = 120.0,
    *,
    models: Sequence[str] = NAMES,
    output: str | Path = "compare",
    validation: Fields | None = None,
    test: Fields | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Train each model for `budget` seconds on the same samples, and say which to use and why.

    Of every model the usual learning rate and a quarter of it are tried for a tenth of the budget each; the one with
    the lower validation error is trained anew for the rest. Errors are those on the test samples, which nothing was
    chosen by. For `validation` and for `test`, where they are not given, a tenth of the samples is held out, of fewer
    than ten trajectories a tenth of the frames. `settings` are those of `Training`, the same for all.
    """
    if not budget > 0:
        raise ValueError(f"budget is the seconds that each model may train; got {budget}")
    given = settings_from(settings)
    fields, validation, test = _parts(fields, validation, test, given.window)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    runs: list[Run] = []
    usual = given.resolved(len(fields), choose_device(given.device)).learning_rate
    assert usual is not None  # resolved: told to the type checker
    for name in models:
        start = functools.partial(_run, name, fields, validation, settings=settings, progress=progress)
        try:
            trials, rate, run = _searched(start, folder / name, budget, usual)
        except FloatingPointError as error:
            rows.append({"model": name, "relative_l2": None, "diverged": str(error)})
            continue
        evaluation = full_evaluation(run.models, test, progress=progress)
        save_evaluation(folder / name, evaluation)
        runs.append(run)
        rows.append(_row(name, rate, trials, run, evaluation.numbers))
    rows.sort(key=lambda row: row["relative_l2"] if row["relative_l2"] is not None else torch.inf)
    return Comparison(rows, _advice(rows), runs)


def _parts(
    fields: Fields, validation: Fields | None, test: Fields | None, frames: int
) -> tuple[Fields, Fields, Fields]:
    """The samples to train on, to choose by and to test on; what is not given is held out, `frames` at least."""
    absent = (validation is None) + (test is None)
    fields, *parts = fields.hold_out(absent, frames)
    if len(parts) < absent:
        raise ValueError(
            "a comparison holds out a tenth each to choose by and to test on, so it needs 10 samples or more, or "
            f"trajectories of {(absent + 1) * frames} frames or more; got {fields!r}"
        )
    return fields, parts.pop(0) if validation is None else validation, parts.pop() if test is None else test


def _searched(
    start: Callable[[Path, float, float], Run], folder: Path, budget: float, usual: float
) -> tuple[dict[float, float | None], float, Run]:
    """The validation error of every rate that was tried, None where it is not finite; the best rate, and its run."""
    trials = {}
    for rate in (factor * usual for factor in RATES):
        place = folder.with_name(f"{folder.name}-trial-{rate:g}")
        try:
            error = start(place, TRIAL * budget, rate).description["best"][0]["validation"]
            trials[rate] = error if math.isfinite(error) else None
        except FloatingPointError:
            trials[rate] = None
        shutil.rmtree(place)
    finite = {rate: error for rate, error in trials.items() if error is not None}
    if not finite:
        tried = " and ".join(f"{rate:g}" for rate in trials)
        raise FloatingPointError(f"its errors were not finite at the learning rates {tried}: add warmup or clip")
    rate = min(finite, key=lambda one: finite[one])
    return trials, rate, start(folder, (1 - TRIAL * len(RATES)) * budget, rate)


def _run(
    name: str,
    fields: Fields,
    validation: Fields,
    folder: Path,
    seconds: float,
    rate: float,
    settings: dict[str, Any],
    progress: bool,
) -> Run:
    chosen = settings_from({**settings, "seconds": seconds, "learning_rate": rate})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chosen.seed)
        model, _ = choose_model(fields, name, chosen.history, device=chosen.device)
    options = {k: v for k, v in dataclasses.asdict(chosen).items() if v is not None}
    run = train(model, fields, validation, output=folder, again=folder.exists(), progress=progress, **options)
    if not run.finished:  # a signal to stop is for the whole comparison
        raise KeyboardInterrupt
    return run


def _row(
    name: str, rate: float, trials: dict[float, float | None], run: Run, numbers: dict[str, Any]
) -> dict[str, Any]:
    model: Operator = run.model
    return {
        "model": name,
        "relative_l2": numbers["relative_l2"],
        "relative_l2_std": numbers["relative_l2_std"],
        "J": numbers["kspace"]["J"],
        "R_o": numbers["kspace"]["R_o"],
        "validation": run.description["best"][0]["validation"],
        "learning_rate": rate,
        "trials": {f"{key:g}": value for key, value in trials.items()},
        "parameters": run.description["model"]["parameters"],
        "steps": run.history[-1]["step"],
        "ms_per_step": 1e3 * run.description["seconds_per_step"],
        "space": run.description["space"],
        "config": {k: repr(v) for k, v in model.config.items() if k not in SHAPES},
    }


def _advice(rows: list[dict[str, Any]]) -> str:
    """What to use, by the models whose error is finite; the others are named."""
    finite = [row for row in rows if row["relative_l2"] is not None and math.isfinite(row["relative_l2"])]
    if not finite:
        return "No model gave a finite error: check the data, or add warmup or clip."
    lost = " and ".join(row["model"] for row in rows if row not in finite)
    return _advice_of(finite) + (f" {lost} gave no finite error." if lost else "")


def _advice_of(rows: list[dict[str, Any]]) -> str:
    best, *others = rows
    if not others:
        return f"{best['model']} is the only one measured: relative L2 {best['relative_l2']:.4f}."
    level = [row for row in others if row["relative_l2"] <= LEVEL * best["relative_l2"]]
    second = others[0]
    if level:
        names = " and ".join(row["model"] for row in level)
        fastest = min([best, *level], key=lambda row: row["ms_per_step"])
        return (
            f"Use {fastest['model']}: {best['model']} ({best['relative_l2']:.4f}) and {names} are level within "
            f"{100 * (LEVEL - 1):.0f}% on the test samples, and {fastest['model']} has the fastest step, "
            f"{fastest['ms_per_step']:.1f} ms."
        )
    return (
        f"Use {best['model']}: its error on the test samples is {best['relative_l2']:.4f}, that of the next, "
        f"{second['model']}, {second['relative_l2']:.4f}, after the same seconds of training "
        f"({best['steps']} steps against {second['steps']})."
    )
