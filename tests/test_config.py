"""Configurations: the paper's experiments load strictly and run, unknown keys name their nearest, splits add up."""

import numpy as np
import pytest
import torch
import yaml

import transform_once as t1
from transform_once.config import EXPERIMENTS, Data, Model, find_config
from transform_once.training.run import load_models, read_run
from transform_once.training.settings import Training
from transform_once.verbs import train

NAMES = sorted(str(path.relative_to(EXPERIMENTS)) for path in EXPERIMENTS.rglob("*.yaml"))

# What the paper's appendix prints: folder, model, modes, width, depth.
PUBLISHED = {
    "navier_stokes/fno.yaml": ("ReleasedFNO", 24, 32, 6),
    "navier_stokes/t1_vp.yaml": ("T1", 24, 48, 6),
    "navier_stokes/ffno.yaml": ("FFNO", 32, 82, 10),
    "navier_stokes/t1_plus_vp.yaml": ("T1Plus", 24, 2**6, None),
    "airfoils/fno.yaml": ("FNO", 24, 48, 6),
    "airfoils/dfpnet.yaml": ("UNet", None, 2**6, None),
    "airfoils/t1_plus_vp.yaml": ("T1Plus", 100, 2**5, None),
    "smoke/fno.yaml": ("FNO", 48, 48, 4),
    "smoke/t1.yaml": ("T1", 512, 8, 4),
    "smoke/t1_plus_vp.yaml": ("T1Plus", 224, 2**7, None),
}


def parsed(name):
    stored = yaml.safe_load((EXPERIMENTS / name).read_text())
    assert set(stored) == {"data", "model", "train"}
    return Data(**stored["data"]), Model(**stored["model"]), Training(**stored["train"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_experiments_are_those_of_the_appendix(name):
    data, model, settings = parsed(name)
    assert (model.name, model.modes, model.width, model.depth) == PUBLISHED[name]
    assert (settings.optimizer, settings.learning_rate, settings.weight_decay) == ("adamw", 1e-3, 1e-4)
    if name.startswith("navier_stokes"):
        assert (data.train, data.test, settings.batch_size, settings.epochs) == (1000, 200, 64, 500)
        assert (settings.schedule, settings.step_size, settings.gamma) == ("step", 100, 0.5)
    elif name.startswith("airfoils"):
        assert (data.train, data.validation, data.test, settings.batch_size) == (8000, 2000, 1000, 64)
        assert (settings.schedule, settings.step_size, settings.gamma) == ("step", 100, 0.6)
    else:
        assert (data.train, data.validation, data.test, settings.batch_size) == (64, 20, 20, 1)
        assert (settings.schedule, settings.period) == ("restarts", 32)
        assert (settings.order, settings.history, settings.steps) == (1, 1, 3)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_runs_three_steps_at_reduced_size(name, tmp_path):
    """The configuration through the command's own parser, with overrides for the size."""
    generator = np.random.default_rng(0)
    grid = (20, 16) if name.startswith("smoke") else (16, 16)
    channels = 3 if name.startswith("airfoils") else 1
    if name.startswith("smoke"):
        np.savez(tmp_path / "data.npz", trajectory=generator.random((4, 5, 1, *grid), np.float32))
    else:
        arrays = generator.random((2, 8, channels, *grid), np.float32)
        np.savez(tmp_path / "data.npz", input=arrays[0], target=arrays[1])
    small = ["--model.modes", "8"] if "modes" in (EXPERIMENTS / name).read_text() else []
    if "depth" in (EXPERIMENTS / name).read_text():
        small += ["--model.depth", "2"]
    sizes = ["--data.train", "3", "--data.validation", "0", "--data.test", "1", "--model.width", "4"]
    run_cli(
        *("train", "--config", name, "--data", str(tmp_path / "data.npz"), "--output", str(tmp_path / "run")),
        *(*sizes, *small, "--train.epochs", "1", "--train.batch_size", "1", "--device", "cpu"),
    )
    told = read_run(tmp_path / "run")
    assert told["status"] == "finished"
    _, model, settings = parsed(name)
    assert told["model"]["class"] == model.name
    assert told["training"]["schedule"] == settings.schedule
    with (tmp_path / "run" / "history.csv").open() as file:
        assert int(file.read().splitlines()[-1].split(",")[2]) == 3
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "metrics.json").exists()


def run_cli(*words):
    """The command in this process, which saves the second that an interpreter takes to start."""
    import sys
    from unittest import mock

    from transform_once import cli

    with mock.patch.object(sys, "argv", ["t1", *words]):
        cli.main()


def test_a_run_can_be_remade_from_its_configuration(tmp_path):
    x, y, _ = t1_pairs()
    np.savez(tmp_path / "data.npz", input=x, target=y)
    data, model = Data(path=tmp_path / "data.npz", test=4), Model(modes=5, width=6, depth=1)
    train(data, model, Training(epochs=2, batch_size=8, device="cpu"), tmp_path / "first")
    run_cli("train", "--config", str(tmp_path / "first" / "config.yaml"), "--output", str(tmp_path / "second"))
    first, second = (load_models(tmp_path / name)[0].state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def t1_pairs():
    from transform_once.solvers.navier_stokes import generate

    x, y, settings = generate(30, 1e-3, 1.0, 16)
    return x.numpy(), y.numpy(), settings


def test_numbers_of_each_axis_reach_the_model():
    fields = t1.Fields(input=torch.randn(2, 1, 16, 12), target=torch.randn(2, 1, 16, 12))
    model, _ = Model("T1Grid", modes=[8, 6], waves=[3, 2], width=4, depth=1, transform="dct").build(fields, 0, 0)
    assert model.config["modes"] == (8, 6)
    assert model.config["waves"] == (3, 2)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, (90, 10, 0)),
        ({"test": 20}, (72, 8, 20)),
        ({"train": 50}, (50, 0, 0)),
        ({"train": 50, "validation": 5, "test": 5}, (50, 5, 5)),
        ({"validation": 0}, (100, 0, 0)),
    ],
)
def test_samples_are_split_in_order(tmp_path, given, parts):
    numbers = np.arange(100, dtype=np.float32)[:, None, None] * np.ones((100, 1, 4), np.float32)
    np.savez(tmp_path / "data.npz", input=numbers, target=numbers)
    found = Data(path=tmp_path / "data.npz", **given).parts()
    assert tuple(0 if part is None else len(part) for part in found) == parts
    seen = torch.cat([part.input[:, 0, 0] for part in found if part is not None])
    assert seen.tolist() == list(range(len(seen)))


def test_of_few_films_the_last_frames_are_for_validation(tmp_path):
    films = np.arange(40, dtype=np.float32)[None, :, None, None] * np.ones((2, 40, 1, 4), np.float32)
    np.savez(tmp_path / "data.npz", trajectory=films)
    data = Data(path=tmp_path / "data.npz")
    train, held, test = data.parts(3)
    assert (train.frames, held.frames, test) == (36, 4, None)
    assert held.trajectory[:, :, 0, 0].tolist() == [[36, 37, 38, 39]] * 2
    assert data.parts(30)[1] is None  # a window would not fit
    assert Data(path=tmp_path / "data.npz", validation=0).parts(3)[1] is None
    assert [len(part) for part in Data(path=tmp_path / "data.npz", validation=1).parts(3)[:2]] == [1, 1]


def test_bad_splits_and_names_are_one_sentence(tmp_path):
    np.savez(tmp_path / "data.npz", input=np.ones((5, 1, 4), np.float32), target=np.ones((5, 1, 4), np.float32))
    with pytest.raises(ValueError, match="holds 5 samples, too few for 4 to train, 0 to validate and 2 to test"):
        Data(path=tmp_path / "data.npz", train=4, test=2).parts()
    with pytest.raises(ValueError, match=r"no configuration navier_stokes/t3.yaml.*did you mean navier_stokes/t1"):
        find_config("navier_stokes/t3.yaml")
    with pytest.raises(ValueError, match="UNet has no option 'modes'; it has init, width"):
        Model("UNet", modes=3).build(t1.Fields(input=torch.randn(2, 1, 8, 8), target=torch.randn(2, 1, 8, 8)), 0, 0)
