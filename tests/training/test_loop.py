import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
import types

import pytest
import torch

import transform_once as t1
from transform_once.files import held
from transform_once.training import loop
from transform_once.training.run import load_models, read_history, read_run
from transform_once.training.settings import Training
from transform_once.training.train import train

SMALL = {"modes": 7, "width": 6, "depth": 2, "transform": "fourier"}


def t1_model(seed=0, **changes):
    torch.manual_seed(seed)
    return t1.T1(1, 1, (16, 16), **{**SMALL, **changes})


def quiet(model, *data, **settings):
    return train(model, *data, progress=False, **{"epochs": 4, "batch_size": 8, "learning_rate": 1e-2, **settings})


def equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_training_lowers_the_error_and_keeps_the_best_weights(flow):
    train_data, held = flow.split(24, 6)
    run = quiet(t1_model(), train_data, held, epochs=30, validate_every=1)
    errors = [row["validation"] for row in run.history]
    assert errors[-1] < 0.5 * errors[0]
    assert run.finished
    assert run.description["best"][0]["validation"] == min(errors)
    exact = (run.model(held.input) - held.target).flatten(1).norm(dim=1) / held.target.flatten(1).norm(dim=1)
    assert exact.mean().item() == pytest.approx(min(errors), rel=1e-4)


MODELS = {
    "T1 fourier": lambda: t1_model(),
    "T1 dct": lambda: t1_model(transform="dct"),
    "T1 local": lambda: t1_model(local="pointwise"),
    "T1+": lambda: t1.T1Plus(1, 1, (16, 16), modes=8, width=4),
    "FNO": lambda: t1.FNO(1, 1, (16, 16), modes=4, width=6, depth=2),
    "UNet": lambda: t1.UNet(1, 1, (16, 16), width=4),
}


@pytest.mark.filterwarnings("ignore:these fields lie on nodes")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_model_trains_with_every_optimizer(flow, name, optimizer):
    torch.manual_seed(0)
    run = quiet(MODELS[name](), flow, optimizer=optimizer, epochs=6, average=0.5, clip=1.0, warmup=0.1)
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert run.description["space"] == ("k-space" if name == "T1 fourier" else "fields")


@pytest.mark.parametrize("model", ["T1", "FNO"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_trajectories_are_learned_by_rolling_out(film, model, order):
    torch.manual_seed(0)
    size = {"modes": 5, "width": 6, "depth": 2}
    made = t1.T1(2, 1, (12, 12), transform="fourier", **size) if model == "T1" else t1.FNO(2, 1, (12, 12), **size)
    run = quiet(made, film[:3], film[3:], order=order, history=1, steps=3, epochs=8)
    assert run.history[-1]["validation"] < run.history[0]["validation"] * 1.05
    assert run.model.dynamics.order == order
    assert run.model.dynamics.history == 1


STATES = {
    "adamw": {"average": 0.9, "schedule": "restarts", "period": 5},
    "muon": {"optimizer": "muon", "warmup": 0.2, "patience": 50},
    "ensemble": {"ensemble": 2, "clip": 0.5},
}


@pytest.mark.parametrize("extra", STATES.values(), ids=STATES)
def test_an_interrupted_run_ends_with_the_same_weights(flow, tmp_path, monkeypatch, extra):
    """Stopped by a signal after ten steps, in the middle of an epoch, and continued."""
    settings = {"epochs": 5, "validate_every": 1, **extra}
    whole = quiet(t1_model(), flow[:24], flow[24:], output=tmp_path / "whole", **settings)
    step, steps = loop.Member.step, []

    def counted(self, *arguments):
        steps.append(self)
        if len(steps) == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    monkeypatch.setattr(loop.Member, "step", counted)
    first = quiet(t1_model(), flow[:24], flow[24:], output=tmp_path / "cut", **settings)
    monkeypatch.undo()
    assert not first.finished
    assert read_run(tmp_path / "cut")["status"] == "stopped"
    second = quiet(t1_model(seed=9), flow[:24], flow[24:], output=tmp_path / "cut", **settings)
    assert second.finished
    for which in ("model", "last"):
        for ours, theirs in zip(
            load_models(tmp_path / "whole", which), load_models(tmp_path / "cut", which), strict=True
        ):
            assert equal(ours, theirs)
    assert all(equal(a, b) for a, b in zip(whole.models, second.models, strict=True))
    drop = {"seconds"}
    histories = [[{k: v for k, v in row.items() if k not in drop} for row in run.history] for run in (whole, second)]
    assert histories[0] == histories[1]


KILLED = """
import sys, time, torch, transform_once as t1
from transform_once.training import loop
from transform_once.training.train import train
from transform_once.solvers.navier_stokes import generate
loop.CHECKPOINT_SECONDS = 0
torch.set_num_threads(1)
write = loop.Trainer._write
loop.Trainer._write = lambda *a, **k: (write(*a, **k), time.sleep(0.1))
x, y, _ = generate(24, 1e-3, 2.0, 16)
torch.manual_seed(0)
model = t1.T1(1, 1, (16, 16), modes=7, width=6, depth=2, transform="fourier")
print("ready", flush=True)
train(model, t1.Fields(input=x, target=y, grid="node", periodic=True), output=sys.argv[1], epochs=10, batch_size=8,
      progress=False)
"""


def test_a_killed_run_continues_to_the_same_weights(tmp_path):
    """kill -9 after the fourth epoch, then run to ten: equal bit by bit to ten at once."""
    words = [sys.executable, "-c", KILLED]
    subprocess.run([*words, str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen([*words, str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
    history = tmp_path / "killed" / "history.csv"
    while process.poll() is None and not (history.exists() and len(history.read_text().splitlines()) > 4):
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert read_run(tmp_path / "killed")["status"] == "running"
    (tmp_path / "killed" / ".checkpoint.safetensors.1.partial").write_bytes(b"half")  # as if killed while writing
    subprocess.run([*words, str(tmp_path / "killed")], check=True, stdout=subprocess.DEVNULL)
    assert equal(load_models(tmp_path / "whole")[0], load_models(tmp_path / "killed")[0])
    assert read_run(tmp_path / "killed")["status"] == "finished"
    assert not list(tmp_path.glob("killed/.*.partial"))


def test_members_of_an_ensemble_are_runs_of_their_seeds(flow, tmp_path):
    together = quiet(t1_model(5), flow[:24], ensemble=3, seed=5, output=tmp_path / "all")
    for number in range(3):
        alone = quiet(t1_model(5 + number), flow[:24], seed=5 + number)
        assert equal(alone.model, together.models[number])
    assert len(load_models(tmp_path / "all")) == 3
    assert read_run(tmp_path / "all")["seeds"] == [5, 6, 7]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_nobody_trains_in_a_folder_that_is_held(flow, tmp_path):
    folder = tmp_path / "run"
    run = quiet(t1_model(3), flow, output=folder, epochs=1)
    before = run.model.state_dict()
    with held(folder):  # as another process would
        with pytest.raises(BlockingIOError, match=r"another process is at work in .*run: wait for it, end it"):
            quiet(t1_model(3), flow, output=folder, epochs=1, again=True)
        kept = quiet(t1_model(4), flow, output=folder, epochs=1)  # a finished run can be read all the same
    assert all(torch.equal(value, before[name]) for name, value in kept.model.state_dict().items())
    assert quiet(t1_model(3), flow, output=folder, epochs=1, again=True).finished


def test_a_finished_run_is_not_run_again_unless_asked(flow, tmp_path, monkeypatch):
    first = quiet(t1_model(), flow, output=tmp_path / "run")
    monkeypatch.setattr(loop.Member, "step", lambda *_: pytest.fail("trained again"))
    second = quiet(t1_model(3), flow, output=tmp_path / "run")
    assert equal(first.model, second.model)
    monkeypatch.undo()
    third = quiet(t1_model(3), flow, output=tmp_path / "run", again=True)
    assert not equal(first.model, third.model)
    with pytest.raises(ValueError, match=r"holds another run, it differs in training.epochs, training.seed"):
        quiet(t1_model(), flow, output=tmp_path / "run", epochs=5, seed=1)
    with pytest.raises(ValueError, match="differs in data"):
        quiet(t1_model(), flow[:20], output=tmp_path / "run")
    with pytest.raises(ValueError, match="differs in model"):
        quiet(t1_model(width=8), flow, output=tmp_path / "run")


def test_the_run_folder_tells_everything(flow, tmp_path):
    run = quiet(t1_model(), flow[:24], flow[24:], output=tmp_path / "run", warmup=0.0)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"run.json", "history.csv", "model.safetensors", "last.safetensors"}
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["model"]["parameters"] == sum(p.numel() for p in run.model.parameters())
    assert told["data"]["train"] == 24
    assert told["data"]["validation"] == 6
    assert told["space"] == "k-space"
    assert told["captured"] == "eager: the device is cpu"
    assert told["environment"]["torch"] == torch.__version__
    with (tmp_path / "run" / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4]
    assert read_history(tmp_path / "run") == run.history
    # The rate of the epoch's last step, the third of twelve, in its middle.
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-2 * (1 + math.cos(math.pi * 2.5 / 12)) / 2)


def test_a_time_budget_ends_the_run_and_its_schedule(flow):
    run = quiet(t1_model(), flow[:24], flow[24:], epochs=1, seconds=0.4)
    assert run.history[-1]["epoch"] > 1
    assert run.description["seconds"] >= 0.4
    assert run.history[-1]["learning_rate"] < 1e-3


def test_early_stopping(flow):
    run = quiet(t1_model(), flow[:24], flow[24:], epochs=50, learning_rate=1e-9, validate_every=1, patience=3)
    assert run.history[-1]["epoch"] < 50
    assert run.finished


def test_the_average_is_what_is_validated_and_kept(flow, monkeypatch):
    step, passed = loop.Member.step, []

    def recorded(self, *arguments):
        loss = step(self, *arguments)
        passed.append(self.model.layers[0].weight.detach().clone())
        return loss

    monkeypatch.setattr(loop.Member, "step", recorded)
    quiet(t1_model(), flow[:24], flow[24:], epochs=3)
    monkeypatch.undo()
    averaged = quiet(t1_model(), flow[:24], flow[24:], epochs=3, average=0.6, validate_every=3)
    expected = t1_model().layers[0].weight.detach().clone()
    for number, weight in enumerate(passed):
        expected += max(0.4, 9 / (10 + number)) * (weight - expected)
    assert torch.allclose(averaged.model.layers[0].weight, expected, atol=1e-6)
    assert not torch.allclose(expected, passed[-1], atol=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run(flow, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0)
    step, steps = loop.Member.step, []

    def broken(self, *arguments):
        steps.append(self)
        loss = step(self, *arguments)
        return loss * float("nan") if len(steps) >= 8 else loss

    monkeypatch.setattr(loop.Member, "step", broken)
    sentence = rf"loss is nan in epoch 8, batch 1: lower learning_rate.*checkpoint is in {tmp_path}"
    with pytest.raises(FloatingPointError, match=sentence):  # after five setbacks
        quiet(t1_model(), flow[:24], output=tmp_path / "run", epochs=9)
    monkeypatch.undo()
    state = loop.folders.read_checkpoint(tmp_path / "run")[1]
    assert state.epoch == 7


def test_fine_tuning_keeps_the_units_and_takes_a_finer_grid(flow):
    first = quiet(t1_model(), flow, epochs=8)
    units = first.model.input_scale.clone()
    T = t1.get_transform("fourier")
    x, y = (T.inverse(2 * T.forward(v, 2), 2, (32, 32)) for v in (flow.input, flow.target))
    finer = t1.Fields(input=x, target=y, grid="node", periodic=True)
    second = quiet(first.model, finer, epochs=1, learning_rate=1e-6)
    assert torch.equal(second.model.input_scale, units)
    assert second.history[0]["loss"] == pytest.approx(first.history[-1]["loss"], rel=0.1)


def test_the_progress_is_told_in_lines_where_there_is_no_terminal(flow, capsys):
    train(t1_model(), flow[:24], flow[24:], epochs=20, batch_size=8)
    told = capsys.readouterr().err
    assert "100%  epoch 20  loss" in told
    assert "s left" in told
    assert "finished after 20 epochs" in told
    assert 8 < told.count("\n") < 15


def test_loggers_are_told_every_epoch(flow, tmp_path, monkeypatch):
    """With stand-ins of the same calls: the packages themselves are an extra."""
    told = []
    board = types.SimpleNamespace(
        SummaryWriter=lambda folder: types.SimpleNamespace(
            add_scalar=lambda name, value, epoch: told.append((name, value, epoch)), flush=lambda: None
        )
    )
    wandb = types.SimpleNamespace(init=lambda **_: types.SimpleNamespace(log=lambda v, step: told.append((v, step))))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = quiet(t1_model(), flow[:24], flow[24:], output=tmp_path / "run", log=["tensorboard", "wandb"], epochs=2)
    for row in run.history:
        assert ("loss", row["loss"], row["epoch"]) in told
        assert ("validation", row["validation"], row["epoch"]) in told
        assert any(step == row["epoch"] and v["loss"] == row["loss"] for v, step in (t for t in told if len(t) == 2))


def test_a_missing_logger_is_named_with_its_extra(flow, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"wandb is not installed: pip install 'transform-once\[logging\]'"):
        quiet(t1_model(), flow[:24], output=tmp_path / "run", log=["wandb"])


def test_data_larger_than_memory_are_streamed(flow, film, tmp_path, monkeypatch):
    from transform_once.training import batches

    flow.save(tmp_path / "flow.h5")
    film.save(tmp_path / "film.h5")
    fno = {"modes": 4, "width": 6, "depth": 2}
    runs = []
    for share in (0.4, 0.0):
        monkeypatch.setattr(batches, "SHARE", share)
        torch.manual_seed(0)
        pairs = quiet(t1.FNO(1, 1, (16, 16), **fno), t1.read(tmp_path / "flow.h5"))
        torch.manual_seed(0)
        films = quiet(t1.FNO(1, 1, (12, 12), **fno), t1.read(tmp_path / "film.h5"), steps=2)
        torch.manual_seed(0)
        modes = quiet(t1.T1(1, 1, (12, 12), **SMALL), t1.read(tmp_path / "film.h5"), steps=2)
        runs.append((pairs.model, films.model, modes.model))
    assert all(equal(ours, theirs) for ours, theirs in zip(*runs, strict=True))


def test_what_is_left_open_is_chosen_for_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def chosen(device, **given):
        settings = Training(**given).resolved(1000, device)
        return settings.optimizer, settings.learning_rate, settings.precision

    assert chosen(cpu) == ("adamw", 4e-3, "float32")
    assert chosen(cuda) == ("muon", 1e-2, "bfloat16")
    assert chosen(cuda, sharding="fsdp") == ("adamw", 4e-3, "bfloat16")
    assert chosen(cpu, optimizer="muon") == ("muon", 1e-2, "float32")
    assert chosen(cuda, learning_rate=5e-4, precision="tf32") == ("muon", 5e-4, "tf32")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda f: quiet(t1_model(), f, epoch=3), "no setting 'epoch'; did you mean epochs"),
        (lambda f: quiet(t1_model(), f, optimizer="sgd"), "optimizer must be one of 'adamw', 'muon'; got 'sgd'"),
        (lambda f: quiet(t1_model(), f, schedule=None), "schedule must be one of 'constant', .*; got None"),
        (lambda f: quiet(t1_model(), f, learning_rate=-1), "learning_rate must be positive"),
        (lambda f: quiet(t1_model(), f, device="cuda:99"), "CUDA GPU|GPU number"),
        (lambda f: quiet(t1.T1(2, 1, (16, 16), **SMALL), f), "data have 1 channels in"),
        (lambda f: quiet(t1.T1(1, 1, (16,), **SMALL), f), "the model is for 1 grid axes, the data have 2"),
        (lambda f: quiet(t1_model(), t1.Fields(input=f.input)), "training needs pairs or trajectories"),
        (lambda f: quiet(t1_model(), f, log=["tensorboard"]), "tensorboard writes into the run folder"),
        (lambda f: quiet(t1_model(), f, log=["paper"], output="x"), "log is any of tensorboard, wandb; got 'paper'"),
        (
            lambda f: quiet(t1_model(), t1.spectra(f, "fourier", 5, cache=False)),
            r"spectra keep \(5, 5\) modes of the fourier basis, the model \(7, 7\)",
        ),
        (
            lambda f: quiet(t1.FNO(1, 1, (16, 16), modes=4), t1.spectra(f, "fourier", 5, cache=False)),
            "these data are spectra, but FNO maps fields: train on fields",
        ),
        (
            lambda f: quiet(t1_model(), t1.Fields(trajectory=f.input[None], grid="node", periodic=True), steps=40),
            "trajectories of 30 frames are too short: a sample needs 41",
        ),
        (
            lambda f: quiet(t1_model(), t1.Fields(trajectory=f.input[:, None], grid="node", periodic=True), order=2),
            "trajectories of 1 frames are too short: a sample needs 3",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(flow, tmp_path, monkeypatch, call, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        call(flow)
