"""`train`: a model, data and settings become a run."""

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from transform_once.data.fields import Fields
from transform_once.data.spectra import Spectra
from transform_once.files import held, remove_partial
from transform_once.models.operator import Operator, load_weights
from transform_once.processes import World, world
from transform_once.training import run as folders
from transform_once.training.loop import Trainer
from transform_once.training.plan import make_plan
from transform_once.training.progress import Progress, loggers
from transform_once.training.run import Run
from transform_once.training.settings import Training, settings_from


def train(
    model: Operator,
    data: Fields | Spectra,
    validation: Fields | Spectra | None = None,
    *,
    output: str | Path | None = None,
    again: bool = False,
    log: Sequence[str] = (),
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train a model on pairs or trajectories; returns the models with their best weights, and the history.

    ```python
    run = t1.train(t1.T1(1, 1, (64, 64), modes=24), t1.read("flow.h5")[:1000], epochs=500, output="runs/flow")
    ```

    model       trained in place; a model that transforms once is trained on kept modes, which are made once.
    data        `Fields`, or `Spectra` that were made before.
    validation  other samples: the weights with the lowest error on them are kept.
    output      the run folder, see `training.run`. A run that was interrupted continues there, to the same weights; one
                that is finished is not run again, unless `again`.
    log         "tensorboard" and "wandb", besides history.csv.
    settings    of `Training`, such as epochs, batch_size, learning_rate.

    SIGTERM and Ctrl-C save and end the run. A loss that runs away sends it back to weights from before, with half the
    rate; where that does not help, a loss that is not finite raises FloatingPointError and keeps the last checkpoint.
    """
    chosen = settings_from(settings)
    if chosen.patience is not None and validation is None:
        raise ValueError("patience counts validations without a better error: give validation data, or no patience")
    folder = None if output is None else Path(output)
    continues = folder is not None and (folder / "run.json").exists()
    if chosen.ensemble > 1 and model.input_scale is not None and not continues:
        raise ValueError(
            "the model has been trained, other members of an ensemble would begin anew: train them one by one"
        )
    with world(chosen.device) as place, contextlib.ExitStack() as held_folder:
        if not place.leads:  # one process makes the cache of spectra, then the others read it
            place.wait()
        plan = make_plan(model, data, validation, chosen, progress and place.leads)
        if place.leads:
            place.wait()
        source = plan.source(place.device)
        chosen = chosen.resolved(len(source), place.device, next(model.parameters()).dtype, model.ndim)
        plan = dataclasses.replace(plan, settings=chosen)
        models = _members(model, chosen)
        for one in models:
            plan.prepare(one)
            one.to(place.device).train()
        facts = {
            "command": _command(),
            "space": plan.space,
            "reason": plan.reason,
            "training": chosen.to_dict(),
            "seeds": [chosen.seed + number for number in range(len(models))],
            "environment": folders.environment(place.device),
            "status": "running",
        }
        description = folders.describe(models, facts, data, validation)
        if folder is not None:
            done = _opened(folder, models, description, again, place, held_folder)
            if done is not None:
                return done
        trainer = Trainer(models, plan, source, description, folder, place)
        with Progress(progress and place.leads, f"{type(model).__name__} on {plan.space}") as bar:
            trainer.run(bar, loggers(log, folder, description) if place.leads else [])
        return Run(models, trainer.state.history, description, folder)


def _members(model: Operator, settings: Training) -> list[Operator]:
    """The given model, and further ones of its kind with weights of their own."""
    if any(isinstance(value, nn.Module) for value in model.config.values()) and settings.ensemble > 1:
        raise ValueError("a model with a module given by hand cannot be made again: train its ensemble one by one")
    models = [model]
    for number in range(1, settings.ensemble):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed + number)
            models.append(type(model)(**model.config).to(next(model.parameters()).dtype))
    return models


def _opened(
    folder: Path,
    models: list[Operator],
    description: dict[str, Any],
    again: bool,
    place: World,
    stack: contextlib.ExitStack,
) -> Run | None:
    """Make the folder ready and hold it; the run that is finished there, if it is the same, with its weights."""
    if (folder / "run.json").exists() and not again:
        old = folders.read_run(folder)
        other = folders.differences(old, description)
        if other:
            raise ValueError(
                f"{folder} holds another run, it differs in {', '.join(other)}: choose another output, or again=True"
            )
        if old["status"] == "finished":
            for number, model in enumerate(models):
                path = folders.weights_path(folder, "model", number, len(models))
                load_weights(model, load_file(path), path)
            return Run(models, folders.read_history(folder), old, folder)
    place.wait()
    if place.leads:
        if again and folder.exists():
            folders.read_run(folder)  # only a run folder is ever removed
            with held(folder):
                shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(held(folder))
        remove_partial(folder)  # of a run that was killed while it wrote
        folders.write_description(folder, description)
    place.wait()
    return None


def _command() -> str:
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
    return " ".join(words)
