"""The verbs of the command `t1`: typed functions; options, help and YAML come from their signatures."""

import dataclasses
import hashlib
import json as json_module
import math
from pathlib import Path
from typing import Any, Literal

from transform_once.config import Data, Model
from transform_once.data.options import ReadOptions
from transform_once.messages import counted
from transform_once.training.settings import Training


def train(
    data: Data,
    model: Model = Model(),  # noqa: B008  frozen
    train: Training = Training(),  # noqa: B008
    output: Path | None = None,
    init_from: Path | None = None,
    again: bool = False,
    log: str = "",
    device: str = "auto",
) -> None:
    """Train a model on your data; what is not given is chosen for the data by stated rules.

    Args:
        data: The data.
        model: The model.
        train: The training.
        output: The run folder, where an interrupted run continues; by default runs/<data>-<model>-<hash of options>.
        init_from: A run folder or weights file of one model to start from instead of new weights; its model is taken.
        again: Whether to train again what is finished.
        log: Loggers besides history.csv: tensorboard, wandb, or both joined by a comma.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1 or mps.
    """
    from rich.console import Console

    from transform_once.evaluation.evaluate import full_evaluation, save_evaluation
    from transform_once.processes import world
    from transform_once.training.train import train as run_training

    settings = train if device == "auto" else dataclasses.replace(train, device=device)
    with world(settings.device) as place:
        console = Console(quiet=not place.leads, highlight=False)
        to_train, held, test = data.parts(settings.window)
        if init_from is not None:
            operator, chosen = _only_model(init_from), [f"model and weights of {init_from}"]
        else:
            operator, chosen = model.build(to_train, settings.history, settings.seed, settings.device)
        if held is not None and held.kind == "trajectories" and held.frames < to_train.frames:
            chosen = [f"the last {held.frames} frames are held out: ten trajectories or more would be split", *chosen]
        console.print("\n".join(chosen), markup=False)
        config: dict[str, Any] = {"data": _plain(data), "model": _plain(model), "train": settings.to_dict()}
        if init_from is not None:
            config |= {"model": None, "init_from": str(init_from)}
        folder = output or _default_folder(data.path, type(operator).__name__, config)
        run = run_training(operator, to_train, held, output=folder, again=again, log=_names(log), **settings.to_dict())
        if not run.finished:
            console.print(f"Stopped; the same command continues: {folder}", markup=False)
            raise SystemExit(130)
        judged = test if test is not None else held
        if place.leads:
            _write_config(folder, config)
        if judged is None:
            console.print("No samples were held out, so there is nothing to test on: give data.test.", markup=False)
            return
        evaluation = full_evaluation(run.models, judged, device=place.device)
        evaluation.numbers["on"] = "test" if test is not None else "validation"
        if place.leads:
            save_evaluation(folder, evaluation)
            _show(console, evaluation.numbers)
            _report([folder], folder / "report.html", console)


def evaluate(
    run: Path,
    data: Data | None = None,
    steps: int | None = None,
    weights: Literal["best", "last"] = "best",
    json: bool = False,
    device: str = "auto",
) -> None:
    """Measure a trained model, or an ensemble, on data of any resolution.

    Args:
        run: A run folder, or a weights file.
        data: The data; by default the test samples that the run was given.
        steps: How far to roll out; by default as far as the data go.
        weights: Those with the lowest validation error, or the last.
        json: Whether to print one JSON object instead of a table.
        device: auto, cpu, cuda, cuda:1 or mps.
    """
    from rich.console import Console

    from transform_once.evaluation.evaluate import full_evaluation, save_evaluation
    from transform_once.processes import world
    from transform_once.training.run import load_models

    models = load_models(run, "last" if weights == "last" else "model")
    own = data is None
    data = data or _own_data(run)
    fields = data.parts()[2] if data.test else data.read()
    assert fields is not None  # told to the type checker
    with world(device) as place:
        for model in models:
            model.to(place.device)
        evaluation = full_evaluation(models, fields, steps=steps, progress=not json)
        if not place.leads:
            return
        evaluation.numbers["on"] = "test" if own else str(data.path)
        if own and weights == "best" and run.is_dir():
            save_evaluation(run, evaluation)
        if json:
            print(json_module.dumps(evaluation.numbers))
        else:
            _show(Console(highlight=False), evaluation.numbers)


def predict(
    run: Path,
    input: Path | None = None,  # noqa: A002
    output: Path | None = None,
    size: list[int] | None = None,
    device: str = "auto",
    read: ReadOptions = ReadOptions(),  # noqa: B008
) -> None:
    """Apply a trained model to fields; of an ensemble the mean, and the spread of its members beside it.

    Args:
        run: A run folder, or a weights file.
        input: A .npy array (samples, channels, *grid), without the channel axis where there is one channel; or any file
            that `t1 import` reads, of which the inputs are taken.
        output: The .npy file to write; the spread of an ensemble goes to <output>.spread.npy.
        size: Grid points of the output along each axis, for models that transform once; by default the input's.
        device: auto, cpu, cuda, cuda:1 or mps.
        read: How to read the input.
    """
    import numpy as np

    from transform_once.data import formats
    from transform_once.evaluation.evaluate import predict as apply
    from transform_once.files import atomic_path
    from transform_once.processes import choose_device
    from transform_once.training.run import load_models

    if input is None or output is None:
        raise ValueError("predict needs fields to read and a file to write: give --input a.npy --output b.npy")
    if output.suffix != ".npy":
        raise ValueError(f"predictions are written to a file that ends in .npy; got {output}")
    models = load_models(run)
    if input.suffix == ".npy" and not read.given():
        x: Any = np.load(input, allow_pickle=False)
        x = x.astype(x.dtype.newbyteorder("="), copy=False)  # torch knows no other order of bytes
    else:
        x = formats.read(input, **read.given()).input
    bare = x.ndim == models[0].ndim + 1
    found = apply(models, x, device=choose_device(device), size=size)
    mean, spread = found if isinstance(found, tuple) else (found, None)
    for path, values in ((output, mean), (output.with_suffix(".spread.npy"), spread)):
        if values is None:
            continue
        array = values.squeeze(1).numpy() if bare and models[0].out_channels == 1 else values.numpy()
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.save(file, array)
        print(f"{path}: {tuple(array.shape)}")


def rollout(
    run: Path,
    data: Data,
    output: Path | None = None,
    steps: int = 10,
    frames: list[int] | None = None,
    json: bool = False,
    device: str = "auto",
) -> None:
    """Let a model that was trained on trajectories run ahead from the first frames of others.

    Args:
        run: A run folder, or a weights file.
        data: Trajectories, of which the first frames that the model needs are taken; further ones are the truth.
        output: A file of fields (.h5) for the predicted frames; nothing is written by default.
        steps: How many frames to predict.
        frames: Which of these to keep, counted from 1; by default all.
        json: Whether to print the errors against the truth as one JSON object.
        device: auto, cpu, cuda, cuda:1 or mps.
    """
    import torch
    from rich.console import Console

    from transform_once.data.fields import Fields
    from transform_once.evaluation.evaluate import evaluate as measure
    from transform_once.evaluation.rollout import dynamics_of
    from transform_once.evaluation.rollout import rollout as run_ahead
    from transform_once.processes import choose_device
    from transform_once.training.run import load_models

    models = [model.to(choose_device(device)).eval() for model in load_models(run)]
    fields = data.read()
    if fields.kind != "trajectories":
        raise ValueError(f"a rollout starts from trajectories; {data.path} holds pairs")
    first = dynamics_of(models[0]).frames
    judged = fields.frames >= first + steps
    if output is None and not judged:
        raise ValueError(f"{data.path} has too few frames to judge {steps} steps: give fewer --steps, or an --output")
    if output is not None:
        wanted = frames or list(range(1, steps + 1))
        start, interval = fields.metadata.times[first - 1], fields.metadata.dt
        made = []
        with torch.no_grad():
            for batch in fields.select(frames=slice(0, first)).batches(4):
                x = batch.trajectory.to(next(models[0].parameters()).device)
                made.append(torch.stack([run_ahead(m, x, steps, frames=wanted).cpu() for m in models]).mean(0))
        facts = dataclasses.replace(fields.metadata, times=tuple(start + interval * step for step in wanted))
        Fields(trajectory=torch.cat(made), metadata=facts).save(output)
        if not json:
            print(f"{output}: {len(fields)} trajectories of frames {', '.join(map(str, wanted))}")
    if judged:
        numbers = measure(models, fields, steps=steps, progress=not json)
        if json:
            print(json_module.dumps(numbers))
        else:
            _show(Console(highlight=False), numbers)


def compare(
    data: Data,
    budget: float = 120.0,
    models: str = "",
    train: Training = Training(),  # noqa: B008
    output: Path = Path("compare"),
    device: str = "auto",
) -> None:
    """Train several models on your data for the same seconds each, and say which to use and why.

    Args:
        data: The data; to choose by and to test on, a tenth each is held out where no number of samples is given.
        budget: Seconds of training for each model, two short trials of its learning rate included.
        models: Which, joined by commas, such as T1,FNO; by default T1,T1Plus,T1Grid,FNO,UNet.
        train: The training, the same for all; its learning rate and seconds are set here.
        output: Folder for the runs and the page.
        device: auto, cpu, cuda, cuda:1 or mps.
    """
    from rich.console import Console

    from transform_once.training.compare import NAMES
    from transform_once.training.compare import compare as run_comparison

    console = Console(highlight=False)
    settings = train if device == "auto" else dataclasses.replace(train, device=device)
    given = data.train or data.validation or data.test
    fields, validation, test = data.parts(settings.window) if given else (data.read(), None, None)
    names = _names(models) or (NAMES if fields.ndim > 1 else ("T1", "T1Grid", "FNO"))
    console.print(f"{', '.join(names)}: {budget:g} s of training each", markup=False)
    options = {k: v for k, v in settings.to_dict().items() if k not in ("learning_rate", "seconds")}
    found = run_comparison(fields, budget, models=names, output=output, validation=validation, test=test, **options)
    _table(
        console,
        [{**row, "million_weights": row["parameters"] / 1e6} if "parameters" in row else row for row in found.rows],
        {
            "model": "{}",
            "relative_l2": "{:.4f}",
            "J": "{:.4f}",
            "R_o": "{:.4f}",
            "learning_rate": "{:g}",
            "million_weights": "{:.2f}",
            "steps": "{}",
            "ms_per_step": "{:.1f}",
        },
    )
    for row in found.rows:
        if "diverged" in row:
            console.print(f"{row['model']} diverged: {row['diverged']}", markup=False)
    console.print(found.advice, markup=False)
    from transform_once.files import atomic_path

    with atomic_path(output / "comparison.json") as temporary:
        temporary.write_text(json_module.dumps({"rows": found.rows, "advice": found.advice}, indent=1) + "\n")
    if found.runs:
        _report([run.folder for run in found.runs if run.folder], output / "report.html", console)


def import_(source: Path, output: Path, read: ReadOptions = ReadOptions()) -> None:  # noqa: B008
    """Turn a file or folder of fields in any known format into a file of our own.

    Args:
        source: .npz, .npy, .pt, .mat, .h5 (also PDEBench and The Well), .nc, .zarr, .mp4, or a folder of airfoils or of
            ScalarFlow recordings.
        output: The file of fields to write (.h5); an import that was killed continues.
        read: How to read the source.
    """
    from transform_once.data.formats import convert

    print(convert(source, output, **read.given()))


def export(model: Path, output: Path) -> None:
    """Write a saved model as ONNX, for any batch size, to run without PyTorch.

    Args:
        model: A run folder, or a weights file.
        output: The `.onnx` file to write.
    """
    from transform_once.models.export import export as export_model

    path = export_model(_only_model(model), output)
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def _only_model(path: Path) -> Any:
    """The one model of a run folder or a weights file."""
    from transform_once.training.run import load_models

    models = load_models(path)
    if len(models) > 1:
        raise ValueError(f"{path} holds {len(models)} members: give the weights of one, {path}/model-00.safetensors")
    return models[0]


def _names(text: str) -> tuple[str, ...]:
    """Names joined by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON and YAML have it."""
    return dict(json_module.loads(json_module.dumps(dataclasses.asdict(config), default=str)))


def _default_folder(data: Path, name: str, config: dict[str, Any]) -> Path:
    free = ("device", "capture", "sharding")
    settings = {key: value for key, value in config["train"].items() if key not in free}
    text = json_module.dumps({**config, "train": settings}, sort_keys=True)
    return Path("runs") / f"{data.stem}-{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    import yaml

    from transform_once.files import atomic_path

    known = {key: value for key, value in config.items() if value is not None}
    with atomic_path(folder / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(known, sort_keys=False))


def _own_data(run: Path) -> Data:
    """The data of a run, of which the test samples are meant."""
    import yaml

    path = run / "config.yaml"
    if not path.exists():
        raise ValueError(f"{run} does not say which data it was trained on: give --data")
    stored = dict(yaml.safe_load(path.read_text())["data"])
    if not stored.get("test"):
        raise ValueError(f"{run} was given no test samples: give --data")
    stored["path"] = Path(stored["path"])
    return Data(**stored)


def _show(console: Any, numbers: dict[str, Any]) -> None:
    """The metrics as a table: all channels, then each, and the split in k-space."""
    names = ("relative_l2", "mse", "mae", "psnr", "smape")
    rows = [{"channel": "all", **numbers}]
    if len(numbers["per_channel"]) > 1:
        rows += [{"channel": channel, **values} for channel, values in numbers["per_channel"].items()]
    _table(console, rows, {"channel": "{}", **dict.fromkeys(names, "{:.4g}")})
    split = numbers["kspace"]
    if split["J"] is not None:
        console.print(
            f"root mean square of the relative L2, L² = J² + R_o²: {math.hypot(split['J'], split['R_o']):.4g}, of it "
            f"{split['J']:.4g} in the kept modes, {split['R_o']:.4g} outside "
            f"({counted(numbers['samples'], 'sample')}, {split['transform']})"
        )
    if "calibration" in numbers:
        found = numbers["calibration"]
        console.print(
            f"{len(numbers['members'])} members; spread / error {found['spread_to_error']:.2f} (1 is right), within "
            f"two spreads {100 * found['coverage_2sigma']:.0f}% of the points "
            f"({100 * found['coverage_expected']:.0f}% is right)"
        )


def _table(console: Any, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    from rich.table import Table

    table = Table()
    for name in columns:  # on a narrow terminal lines break, and nothing is cut off
        table.add_column(name if name == "R_o" else name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(form.format(row[name]) if row.get(name) is not None else "–" for name, form in columns.items()))
    console.print(table)


def _report(runs: list[Path], output: Path, console: Any) -> None:
    from transform_once.reports.page import report

    console.print(f"Page: {report(runs, output)}", markup=False)
