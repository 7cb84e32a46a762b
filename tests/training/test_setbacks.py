"""A loss that runs away sends the run back to weights from before."""

import os
import signal

import pytest
import torch

import transform_once as t1
from transform_once.training import loop
from transform_once.training.train import train


def t1_model(seed=0):
    torch.manual_seed(seed)
    return t1.T1(1, 1, (16, 16), modes=7, width=6, depth=2, transform="fourier")


def quiet(model, data, **settings):
    return train(model, data, progress=False, batch_size=8, learning_rate=1e-2, **settings)


def thrown(monkeypatch, at, values):
    """Let a step throw the model out of what it has learned: all its weights times a number, or not finite."""
    step, steps = loop.Member.step, []

    def far(self, *arguments):
        loss = step(self, *arguments)
        steps.append(self)
        if len(steps) in at:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(values)
        return loss

    monkeypatch.setattr(loop.Member, "step", far)
    return steps


@pytest.mark.parametrize("values", [100.0, float("nan")])
def test_a_loss_that_runs_away_is_set_back(flow, monkeypatch, capsys, values):
    """At the beginning of the sixth epoch of three steps; what follows begins from weights after the fifth."""
    settings = {"epochs": 40, "schedule": "constant", "warmup": 0.0}
    plain = quiet(t1_model(), flow[:24], **settings)
    thrown(monkeypatch, {16}, values)
    run = train(t1_model(), flow[:24], batch_size=8, learning_rate=1e-2, **settings)
    assert run.description["setbacks"] == [{"member": 0, "epoch": 6}]
    assert plain.description["setbacks"] == []
    assert "ran away" in capsys.readouterr().err
    rates, losses = ([row[name] for row in run.history] for name in ("learning_rate", "loss"))
    assert rates == [1e-2] * 5 + [5e-3] * 35
    assert not losses[5] < 5 * losses[4]
    assert losses[6] < 1.2 * losses[4]
    assert losses[-1] < 2 * plain.history[-1]["loss"]


def test_after_a_restart_of_the_rate_a_loss_may_rise(flow, monkeypatch):
    thrown(monkeypatch, {16}, 30.0)
    assert quiet(t1_model(), flow[:24], epochs=12, schedule="restarts").description["setbacks"] == []
    monkeypatch.undo()
    thrown(monkeypatch, {16}, float("nan"))
    run = quiet(t1_model(), flow[:24], epochs=12, schedule="restarts")
    assert run.description["setbacks"] == [{"member": 0, "epoch": 6}]


def test_after_five_setbacks_the_run_goes_on_or_ends(flow, monkeypatch):
    thrown(monkeypatch, set(range(4, 20, 3)), 100.0)
    run = quiet(t1_model(), flow[:24], epochs=12)
    assert [row["epoch"] for row in run.description["setbacks"]] == [2, 3, 4, 5, 6]
    monkeypatch.undo()
    thrown(monkeypatch, set(range(4, 20, 3)), float("nan"))
    with pytest.raises(FloatingPointError, match="loss is nan in epoch 7, batch 2"):
        quiet(t1_model(), flow[:24], epochs=12)


def test_a_run_that_is_stopped_before_its_loss_runs_away_ends_with_the_same_weights(flow, tmp_path, monkeypatch):
    settings = {"epochs": 300, "average": 0.9}
    thrown(monkeypatch, {16}, 100.0)
    whole = quiet(t1_model(), flow[:24], **settings)
    monkeypatch.undo()
    steps = thrown(monkeypatch, {16}, 100.0)
    step = loop.Member.step

    def counted(self, *arguments):
        if len(steps) == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    monkeypatch.setattr(loop.Member, "step", counted)
    assert not quiet(t1_model(), flow[:24], output=tmp_path / "run", **settings).finished
    second = quiet(t1_model(seed=9), flow[:24], output=tmp_path / "run", **settings)
    assert second.finished
    assert whole.description["setbacks"] == second.description["setbacks"] == [{"member": 0, "epoch": 6}]
    ours, theirs = whole.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
