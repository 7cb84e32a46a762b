"""Measuring speed: what is compared, how it is timed, and what does not fit. No measured time decides a test."""

import math

import pytest
import torch

from transform_once.evaluation import speed
from transform_once.evaluation.speed import FIELDS, IN_MODES, TASKS, TO_MODES, Case, Task, interleaved, measure
from transform_once.models.fno import FNO, ReleasedFNO
from transform_once.spectral.transforms import get_transform

CPU = torch.device("cpu")
TINY = Case(8, 2, 1, modes=3)


class Clock:
    """A clock that only moves when a call says so."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(speed.time, "perf_counter", lambda: self.now)

    def call(self, name, seconds):
        def run():
            self.log.append(name)
            self.now += seconds[min(self.log.count(name), len(seconds)) - 1]

        return run


def test_modes_are_fewer_where_the_grid_has_not_as_many():
    assert Case(64, 8, 2).kept == 24
    assert Case(16, 8, 2).kept == 8
    for resolution in (4, 5, 47, 48):
        speed.make_models(Case(resolution, 2, 1), CPU)


@pytest.mark.parametrize(("opponent", "kind"), [("paper", ReleasedFNO), ("FNO", FNO)])
def test_both_models_have_the_same_depth_width_and_modes(opponent, kind):
    t1, fno = speed.make_models(Case(16, 6, 3, modes=5, opponent=opponent), CPU)
    assert type(fno) is kind
    assert len(t1.layers) == 3
    assert t1.kept_shape == (5, 5)
    for name in ("modes", "width", "depth", "resolution"):
        assert t1.config[name] == fno.config[name]
    assert fno.config.get("phase_blind", False) is False


@pytest.mark.parametrize("transform", ["dct", "dft"])
def test_without_the_inverse_the_same_is_computed_up_to_it(transform):
    rivals = speed.make_rivals(Case(12, 4, 2, modes=4, transform=transform), Task(2, False), CPU)
    fields, modes = rivals[FIELDS](), rivals[TO_MODES]()
    assert not fields.requires_grad
    torch.testing.assert_close(get_transform(transform).inverse(modes, 2, (12, 12)), fields)


@pytest.mark.parametrize("name", [FIELDS, IN_MODES, "FNO"])
def test_a_training_step_moves_every_weight(name, monkeypatch):
    case = Case(12, 4, 2, modes=4)
    made = speed.make_models(case, CPU)
    monkeypatch.setattr(speed, "make_models", lambda *_: made)
    rivals = speed.make_rivals(case, Task(2, True), CPU)
    before = [[p.clone() for p in model.parameters()] for model in made]
    rivals[name]()
    for model, old in zip(made, before, strict=True):
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), old, strict=True)]
        assert all(moved) if model is made[name == "FNO"] else not any(moved)
        assert all(p.isfinite().all() for p in model.parameters())


def test_medians_are_of_turns_after_a_warm_up(monkeypatch):
    clock = Clock(monkeypatch)
    # The first two calls of each warm up; of the others the median counts, whatever one odd moment does.
    rivals = {"a": clock.call("a", [50, 50, 1, 1, 9, 1, 1]), "b": clock.call("b", [70, 70, 2])}
    found = interleaved(rivals, CPU, seconds=20)
    assert clock.log[:4] == ["a", "a", "b", "b"]
    assert clock.log[4:] == ["a", "b"] * (len(clock.log[4:]) // 2)
    assert found["a"][0] == 1
    assert found["b"] == (2, 0)


def test_short_calls_are_timed_together(monkeypatch):
    clock = Clock(monkeypatch)
    found = interleaved({"short": clock.call("short", [1e-4])}, CPU, seconds=0.01)
    assert (len(clock.log) - 2) % 20 == 0  # two milliseconds hold twenty of a tenth
    assert found["short"][0] == pytest.approx(1e-4)


def test_every_task_is_measured_with_both_ends():
    timings = measure(TINY, CPU, seconds=0.0)
    assert [(t.task, t.ends) for t in timings] == [(task, ends) for task in TASKS for ends in task.ends]
    assert all(t.speed_up == t.fno / t.t1 > 0 and t.note == "" and t.execution == "eager" for t in timings)
    assert {task.name for task in TASKS} == {"forward, batch 1", "forward, batch 16", "training step, batch 16"}


def test_measuring_leaves_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    measure(TINY, CPU, seconds=0.0)
    assert torch.equal(torch.randn(3), expected)


def test_what_does_not_fit_is_nan_and_says_so(monkeypatch):
    batch = speed.needed_bytes(TINY, TASKS[2])
    monkeypatch.setattr(speed, "free_bytes", lambda device: batch)
    timings = measure(TINY, CPU, seconds=0.0)
    assert [bool(t.note) for t in timings] == [False] * 4 + [True] * 2
    assert math.isnan(timings[-1].speed_up)
    assert timings[-1].note == "does not fit in memory"


def test_running_out_of_memory_on_the_way_is_no_error(monkeypatch):
    def fail(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(speed, "make_rivals", fail)
    assert all(t.note for t in measure(TINY, CPU))


def test_the_estimate_grows_with_the_case():
    case, training = Case(64, 16, 4), Task(16, True)
    assert speed.needed_bytes(case, training) > speed.needed_bytes(case, Task(16, False))
    assert speed.needed_bytes(case._replace(resolution=128), training) > 3 * speed.needed_bytes(case, training)
    assert speed.free_bytes(CPU) > 0


def test_what_cannot_be_measured_is_one_sentence():
    with pytest.raises(ValueError, match="a CUDA graph needs a GPU"):
        measure(TINY, CPU, "CUDA graph")
    with pytest.raises(ValueError, match="execution must be one of"):
        measure(TINY, CPU, "compiled")
    with pytest.raises(ValueError, match="opponent must be one of"):
        measure(TINY._replace(opponent="UNet"), CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_call_computes_the_same():
    device = torch.device("cuda")
    x, y = torch.ones(4, device=device), torch.zeros(4, device=device)
    replay = speed.captured(lambda: y.copy_(2 * x))
    x.fill_(3)
    replay()
    assert y.tolist() == [6] * 4
    timings = measure(TINY, device, "CUDA graph", seconds=0.01)
    assert all(t.speed_up > 0 for t in timings)
