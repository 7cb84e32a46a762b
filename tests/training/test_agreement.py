"""What training says of its validation data is what `evaluate` measures on them, whatever the data and the model."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch

import transform_once as t1
from transform_once.data.symmetries import Symmetry
from transform_once.training import loop
from transform_once.training.plan import make_plan
from transform_once.training.run import read_run
from transform_once.training.settings import Training

GRID = (16, 16)


def smooth(count, channels=1, size=16, modes=6, seed=0):
    """Fields of a few cosines."""
    generator = torch.Generator().manual_seed(seed)
    return t1.idct(torch.randn(count, channels, modes, modes, generator=generator) * size / modes, 2, (size, size))


def pairs(count=12, **facts):
    x = smooth(count)
    return t1.Fields(input=x, target=0.5 * x + 0.3 * x**2, **facts)


def small(kind=t1.T1Grid, **options):
    torch.manual_seed(0)
    return kind(1, 1, GRID, modes=8, width=8, **options)


def trained(model, *data, **settings):
    return t1.train(model, *data, **{"epochs": 6, "batch_size": 4, "validate_every": 6, "progress": False, **settings})


def agree(run, data, **options):
    said = run.description["best"][0]["validation"]
    found = t1.evaluate(run.model, data, **{"progress": False, **options})
    assert found["relative_l2"] == pytest.approx(said, rel=1e-4)
    return said


@pytest.mark.parametrize("kind", [t1.T1, t1.T1Grid])
def test_with_an_output_grid_of_its_own(kind):
    """Only the units of the modes differ: prediction and truth are of one function."""
    x = smooth(12)
    fine = t1.Fields(input=x, target=x)
    run = trained(small(kind, out_resolution=(8, 8)), fine, fine, epochs=40, validate_every=40, learning_rate=1e-2)
    truth = t1.idct(t1.dct(x, 2, 8) / 2, 2, (8, 8))  # the same function on 8² points
    with torch.no_grad():
        found = (run.model(x) - truth).norm() / truth.norm()
    assert found < 1.2 * run.description["best"][0]["validation"] + 0.02
    film = t1.Fields(trajectory=smooth(4, 5)[:, :, None])
    with pytest.raises(ValueError, match="leave out_resolution out"):
        trained(small(out_resolution=(8, 8)), film)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_rollouts_of_rough_frames(declared, order):
    """What a model cannot keep it remembers from the last known frame, also where it is trained on fields."""
    torch.manual_seed(0)
    frames = torch.randn(6, 1, 1, *GRID) + 0.1 * smooth(6, 4).cumsum(1)[:, :, None]
    shift = Symmetry(direction=(1, 0)).to_dict()
    film = t1.Fields(trajectory=frames, grid="cell", periodic=True, symmetries=[shift] if declared else [])
    run = trained(small(), film, film, order=order, steps=4 - max(1, order))
    assert run.description["space"] == ("fields" if declared else "k-space")
    options = {"steps": 4 - max(1, order), "progress": False}
    agree(run, film, **options)
    assert run.model.memory.flatten().tolist() == pytest.approx([1, 1, 1], abs=0.02)
    assert t1.evaluate(run.model, film, **options)["kspace"]["R_o"] < 0.05
    run.model.memory = None
    assert t1.evaluate(run.model, film, **options)["kspace"]["R_o"] > 0.5


def test_targets_that_are_zero_have_no_error_and_are_left_out():
    data = pairs()
    y = data.target.clone()
    y[3] = 0
    some = t1.Fields(input=data.input, target=y)
    for model in (small(), t1.FNO(1, 1, GRID, modes=4, width=8, depth=1)):
        run = trained(model, some, some)
        others = some[[i for i in range(12) if i != 3]]
        agree(run, others)
        assert run.history[-1]["loss"] < run.history[0]["loss"] < 10
    solid = torch.zeros(1, 1, *GRID, dtype=torch.bool)
    solid[..., 8:] = True
    film = torch.randn(3, 4, 1, *GRID)
    film[0, ..., :8] = 0  # nothing is left of it outside the mask
    run = trained(small(), t1.Fields(trajectory=film, mask=solid), symmetries=False)
    assert run.history[-1]["loss"] < 10


def test_data_and_weights_of_different_precision():
    data = pairs(dtype="float64")
    assert data.target.dtype == torch.float64
    for model in (small(), small(t1.T1), t1.FNO(1, 1, GRID, modes=4, width=8, depth=1), t1.UNet(1, 1, GRID, width=4)):
        agree(trained(model, data, data), data)
    agree(trained(small().double(), pairs(), pairs()), pairs())
    members = t1.train(small().double(), data, epochs=1, ensemble=2, progress=False).models
    assert {next(model.parameters()).dtype for model in members} == {torch.float64}
    film = t1.Fields(trajectory=smooth(4, 5).double()[:, :, None], dtype="float64")
    run = trained(small(), film, film, steps=2)
    assert t1.rollout(run.model, film.trajectory[:, :1], 2).dtype == torch.float32


@pytest.mark.parametrize(
    ("facts", "symmetry", "reason"),
    [
        ({"grid": "node", "periodic": True}, {"signs": (-1, -1)}, "transforms once"),
        ({"grid": "cell", "periodic": True}, {"signs": (-1, -1)}, "not periodic on nodes"),
        ({"grid": "node", "periodic": False}, {"signs": (1, -1), "offset": (0.0, 1.0)}, "not periodic on nodes"),
        ({"grid": "node", "periodic": True}, {"signs": (-1, -1), "factors": (3.0,)}, "change the size"),
    ],
)
def test_symmetries_act_on_modes_only_where_that_is_exact(facts, symmetry, reason):
    data = pairs(symmetries=[Symmetry(**symmetry).to_dict()], **facts)
    model = t1.T1(1, 1, GRID, modes=7, width=4, depth=1, transform="fourier")
    assert reason in make_plan(model, data, None, Training(), progress=False).reason


def test_a_mask_is_not_moved_by_fractions_of_a_grid_step():
    x, mask = torch.randn(6, 1, 10), torch.zeros(1, 1, 10, dtype=torch.bool)
    for offset, sentence in ((0.25, "fractions of a grid step"), (0.2, None)):
        symmetries = [Symmetry(offset=(offset,)).to_dict()]
        data = t1.Fields(input=x, target=x, mask=mask, grid="node", periodic=True, symmetries=symmetries)
        model = t1.FNO(1, 1, (10,), modes=3, width=4, depth=1)
        if sentence is None:
            trained(model, data)
        else:
            with pytest.raises(ValueError, match=sentence):
                trained(model, data)


def test_validation_data_and_spectra_must_fit():
    data, fine = pairs(), t1.Fields(input=smooth(4, size=32), target=smooth(4, size=32))
    with pytest.raises(ValueError, match=r"grid of \(32, 32\) points, those to train on of \(16, 16\)"):
        trained(small(), data, fine)
    made, other = (t1.spectra(data, modes=8, normalization=kind, cache=False) for kind in ("standard", "none"))
    with pytest.raises(ValueError, match="other units"):
        trained(small(), made, other)
    with pytest.raises(ValueError, match="keep"):
        trained(small(), made, t1.spectra(data, modes=6, normalization="standard", cache=False))
    model = trained(small(), made, made).model
    with pytest.raises(ValueError, match="other units"):
        trained(model, other)
    with pytest.raises(ValueError, match="train them one by one"):
        trained(model, made, ensemble=2)
    with pytest.raises(ValueError, match="give validation data"):
        trained(small(), data, patience=3)


def test_data_in_a_folder_that_cannot_be_written_are_transformed_in_memory(tmp_path, monkeypatch):
    pairs().save(tmp_path / "x.h5")
    make = Path.mkdir

    def refuse(self, *arguments, **options):
        if self.suffix == ".spectra":
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        return make(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert trained(small(), t1.read(tmp_path / "x.h5")).description["space"] == "k-space"


def test_a_folder_knows_its_validation_data(tmp_path):
    data = pairs()
    trained(small(), data, data[:4], output=tmp_path / "run")
    with pytest.raises(ValueError, match="it differs in validation data"):
        trained(small(), data, data[4:8], output=tmp_path / "run")
    model = small()
    again = trained(model, data, data[:4], output=tmp_path / "run")
    assert again.model is model  # a finished run, too, leaves its weights in the model that was given
    agree(again, data[:4])


def test_a_body_given_by_hand_is_trained_in_a_folder(tmp_path):
    body = torch.nn.Conv2d(1, 1, 3, padding=1)
    for _ in range(2):  # the second finds it finished
        run = trained(t1.T1Grid(1, 1, GRID, modes=8, body=body), pairs(), pairs(), output=tmp_path / "run")
        assert read_run(tmp_path / "run")["status"] == "finished"
        agree(run, pairs())


def test_a_signal_as_the_seconds_run_out_still_ends_the_run_well(tmp_path, monkeypatch):
    step = loop.Member.step

    def late(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(loop.Trainer, "fraction", 1.0)
        return step(self, *arguments)

    monkeypatch.setattr(loop.Member, "step", late)
    run = trained(small(), pairs(), pairs(), seconds=60.0, output=tmp_path / "run")
    assert run.finished
    assert run.history[-1]["validation"] == pytest.approx(agree(run, pairs()))


def test_a_run_that_is_killed_at_its_very_end_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(loop.Trainer, "_load_best", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trained(small(), pairs(), pairs(), output=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    monkeypatch.undo()
    run = trained(small(), pairs(), pairs(), output=tmp_path / "run")
    assert [row["epoch"] for row in run.history] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples():
    data = pairs(5)
    run = trained(small(), data, epochs=1, learning_rate=1e-12, symmetries=False)
    assert run.history[0]["loss"] == pytest.approx(
        t1.evaluate(run.model, data, progress=False)["relative_l2"], rel=1e-5
    )
