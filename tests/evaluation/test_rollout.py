import math

import pytest
import torch

import transform_once as t1
from transform_once.evaluation.rollout import field_rollout, kspace_rollout, rollout, steps_in_kspace
from transform_once.models.operator import Dynamics, Operator, SpectralOperator

SIZES = [(17,), (12, 9), (6, 5, 4)]


class Diagonal(SpectralOperator):
    """h(x_{t−H}, …, x_t) = a(k)·x_t in k-space, a known propagator."""

    def __init__(self, resolution, modes, history=0, transform="dct"):
        super().__init__(history + 1, 1, resolution, modes, transform)
        self.weight = torch.nn.Parameter(torch.linspace(0.2, 0.9, math.prod(self.block)).reshape(self.block).double())

    def kspace(self, X):
        return self.weight * X[:, -1:]


class Point(Operator):
    """h = a·x_t, of fields."""

    def __init__(self, resolution, history=0):
        super().__init__(history + 1, 1, resolution)
        self.weight = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x):
        return self._denormalize(self.weight * self._normalize(x)[:, -1:])


def first_frames(size, count=3):
    return torch.randn(2, count, 1, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def closed_form(order, weight, before, now, step):
    """Frame number `step` after `now`, mode by mode."""
    if order == 0:
        return weight**step * now
    if order == 1:
        return (1 + weight) ** step * now
    # λ² − (2 + a)λ + 1 = 0 has real roots λ and 1/λ for a > 0.
    root = 1 + weight / 2 + torch.sqrt(weight + weight**2 / 4)
    grown = (now * root - before) / (root**2 - 1)
    return grown * root ** (step + 1) + (now - grown * root) * root ** -(step + 0.0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize("transform", ["dct", "fourier"])
def test_a_linear_system_follows_its_closed_form(size, order, steps, transform):
    model = Diagonal(size, 3, history=1, transform=transform)
    model.dynamics = Dynamics(order, 1)
    x = first_frames(size)
    T = t1.get_transform(transform)
    before, now = (T.forward(x[:, i], len(size), 3) for i in (-2, -1))
    made = rollout(model, x, steps)
    assert made.shape == (2, steps, 1, *size)
    for step in range(1, steps + 1):
        exact = T.inverse(closed_form(order, model.weight, before, now, step), len(size), size)
        torch.testing.assert_close(made[:, step - 1], exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_model_of_fields_rolls_out_through_the_same_interface(order):
    model = Point((8, 6))
    model.dynamics = Dynamics(order, 0)
    x = first_frames((8, 6))
    exact = torch.stack([closed_form(order, model.weight, x[:, 1], x[:, 2], step) for step in range(1, 5)], 1)
    torch.testing.assert_close(rollout(model, x, 4), exact)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_normalisation_does_not_move_a_rollout_out_of_kspace(order):
    """Changes of frames have units of their own."""
    model = Diagonal((12, 9), 4, history=1)
    model.dynamics = Dynamics(order, 1)
    shift, scale = torch.tensor([2.0, 2.0]).double(), torch.tensor([3.0, 3.0]).double()
    model.set_normalization(shift, scale, *((shift[:1], scale[:1]) if order == 0 else (torch.zeros(1), scale[:1] / 7)))
    assert steps_in_kspace(model)
    projected = t1.idct(t1.dct(first_frames((12, 9)), 2, 4), 2, (12, 9))
    torch.testing.assert_close(rollout(model, projected, 5), field_rollout(model, projected[:, -2:], 5))


@pytest.mark.parametrize(("order", "shift", "scale"), [(0, 1.0, 2.0), (0, 0.0, 1.0), (1, 0.5, 1.0)])
def test_other_units_of_the_output_go_through_fields(order, shift, scale):
    model = Diagonal((12, 9), 4)
    model.dynamics = Dynamics(order, 0)
    model.set_normalization(torch.ones(1), torch.ones(1), *(torch.tensor([value]) for value in (shift, scale)))
    x = first_frames((12, 9))
    assert not steps_in_kspace(model)
    torch.testing.assert_close(rollout(model, x, 3), field_rollout(model, x[:, -1:], 3))


def test_only_the_frames_asked_for_are_transformed_back(monkeypatch):
    model = Diagonal((12, 9), 4)
    model.dynamics = Dynamics(1, 0)
    x, inverse, counted = first_frames((12, 9)), model.transform.inverse, []

    def counting(X, *arguments):
        counted.append(len(X))
        return inverse(X, *arguments)

    monkeypatch.setattr(type(model.transform), "inverse", lambda self, *arguments: counting(*arguments))
    chosen = rollout(model, x, 10, frames=[10, 3])
    assert counted == [2 * 2]
    monkeypatch.undo()
    torch.testing.assert_close(chosen, rollout(model, x, 10)[:, [9, 2]])


def test_a_finer_grid_makes_the_same_rollout():
    line = (torch.arange(48, dtype=torch.float64) + 0.5) / 48
    fine = (torch.cos(math.pi * line)[:, None] * torch.cos(2 * math.pi * line)).reshape(1, 1, 1, 48, 48)
    coarse = fine[..., 1::3, 1::3]
    model = Diagonal((16, 16), 4)
    model.dynamics = Dynamics(1, 0)
    torch.testing.assert_close(rollout(model, fine, 3)[..., 1::3, 1::3], rollout(model, coarse, 3))


def test_gradients_flow_through_a_rollout_in_kspace():
    model = t1.T1(2, 1, (12, 12), modes=4, width=6, depth=1)
    model.dynamics = Dynamics(1, 1)
    first = torch.randn(3, 2, 1, 4, 4)
    kspace_rollout(model, first, 3).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_dynamics_are_saved_with_the_model(tmp_path):
    model = t1.T1(2, 1, (12, 12), modes=4, width=6, depth=1)
    model.dynamics = Dynamics(2, 1)
    t1.save(model, tmp_path / "model.safetensors")
    assert t1.load(tmp_path / "model.safetensors").dynamics == Dynamics(2, 1)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: rollout(m, torch.randn(1, 1, 1, 8, 8), 3), "was not trained to step in time"),
        (
            lambda m: rollout(timed(m, 1, 1), torch.randn(1, 2, 1, 8, 8), 3),
            "must have 2 input channels",
        ),
        (lambda m: rollout(timed(m, 2, 0), torch.randn(1, 1, 1, 8, 8), 3), "2 or more frames"),
        (lambda m: rollout(timed(m, 1, 0), torch.randn(1, 1, 2, 8, 8), 3), "expected first frames"),
        (lambda m: rollout(timed(m, 1, 0), torch.randn(1, 1, 1, 8, 8), 0), "steps must be at least 1"),
        (lambda m: rollout(timed(m, 1, 0), torch.randn(1, 1, 1, 8, 8), 2, frames=[3]), "frames among 1 to steps"),
        (lambda m: Dynamics(3, 0), "order of an integrator is 0, 1 or 2; got 3"),
        (lambda m: Dynamics(1, -1), "0 or more; got -1"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(t1.T1(1, 1, (8, 8), modes=3, width=4, depth=1))


def timed(model, order, history):
    model.dynamics = Dynamics(order, history)
    return model
