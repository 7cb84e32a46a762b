"""The units that a plan gives a model, above all those of the changes that it adds to frames."""

import math

import pytest
import torch

import transform_once as t1
from transform_once.models.operator import Dynamics
from transform_once.training.plan import _squared_change, make_plan
from transform_once.training.settings import Training

GRID = (8, 6)


def films(order, mask=False):
    """Frames a + b·t or a + b·t²/2, so that the differences of that order are b, of different size in each channel."""
    generator = torch.Generator().manual_seed(order)
    a, b = torch.randn(2, 5, 1, 2, *GRID, dtype=torch.float64, generator=generator)
    b *= torch.tensor([0.1, 0.02], dtype=torch.float64).reshape(2, 1, 1)
    time = torch.arange(7.0, dtype=torch.float64).reshape(-1, 1, 1, 1)
    frames = a + b * (time if order == 1 else time**2 / 2)
    solid = torch.zeros(5, 1, *GRID, dtype=torch.bool)
    solid[..., :2] = mask
    given = {"mask": solid} if mask else {}
    return t1.Fields(trajectory=frames, grid="cell", periodic=False, **given), b[:, 0]


MODELS = {
    "fields": lambda history: t1.FNO(2 * (history + 1), 2, GRID, modes=2, width=4, depth=1),
    "k-space": lambda history: t1.T1(2 * (history + 1), 2, GRID, modes=GRID, width=4, depth=1),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("space", MODELS)
def test_the_output_is_in_units_of_the_changes(order, space):
    data, changes = films(order)
    model = MODELS[space](1)
    plan = make_plan(model, data, None, Training(order=order, history=1), progress=False)
    assert plan.space == space
    plan.prepare(model)
    assert model.dynamics == Dynamics(order, 1)
    exact = changes.square().mean((0, 2, 3)).sqrt()
    torch.testing.assert_close(model.output_scale.double(), exact, rtol=1e-5, atol=0)
    assert not model.output_shift.any()
    spread = data.trajectory.std((0, 1, 3, 4), correction=0)
    torch.testing.assert_close(model.input_scale.double(), spread.repeat(2), rtol=1e-5, atol=0)
    again = make_plan(model, films(3 - order)[0], None, Training(order=order, history=1), progress=False)
    before = model.output_scale.clone()
    again.prepare(model)
    torch.testing.assert_close(model.output_scale, before)  # a model that has units keeps them


@pytest.mark.filterwarnings("ignore:these fields lie on")
@pytest.mark.parametrize("transform", ["dct", "fourier", "dft"])
def test_changes_are_those_of_the_kept_modes(transform):
    data, changes = films(1)
    made = t1.spectra(data, transform, 3, cache=False)
    T = t1.get_transform(transform)
    expected = T.energy(T.forward(changes[2], 2, 3), 2, GRID).flatten(1).sum(1) / math.prod(GRID)
    torch.testing.assert_close(_squared_change(made, 2, 4, 1), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("transform", ["dct", "fourier"])
@pytest.mark.parametrize("grid", [(32,), (24, 15), (9, 10, 11)], ids=str)
def test_the_kept_modes_of_a_t1_have_variance_one(transform, grid):
    """On smooth fields, all of whose energy is kept."""
    torch.manual_seed(0)
    ndim, T = len(grid), t1.get_transform(transform)
    x, y = (T.inverse(T.forward(5 + 3 * torch.randn(40, 2, *grid), ndim, 3), ndim, grid) for _ in range(2))
    data = t1.Fields(input=x, target=y, grid="cell" if transform == "dct" else "node", periodic=transform != "dct")
    model = t1.T1(2, 2, grid, 5, width=4, depth=1, transform=transform)
    plan = make_plan(model, data, None, Training(symmetries=False), progress=False)
    assert plan.space == "k-space"
    for name in ("input", "target"):
        assert plan.train.tensors[name].square().mean() == pytest.approx(1, rel=0.01)
    plan.prepare(model)
    torch.testing.assert_close(model.output_shift, y.mean((0, *range(2, y.ndim))), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "model",
    [
        lambda: t1.T1(2, 2, GRID, 3, width=4, depth=1, local="pointwise"),
        lambda: t1.T1Plus(2, 2, GRID, 4, width=4),
        lambda: t1.T1Grid(2, 2, GRID, 4, width=4, depth=1),
        lambda: t1.FNO(2, 2, GRID, 2, width=4, depth=1),
    ],
)
def test_fields_of_other_models_have_variance_one(model):
    x, y = torch.randn(2, 6, 2, *GRID)
    model = model()
    make_plan(model, t1.Fields(input=x, target=3 * y), None, Training(), progress=False).prepare(model)
    torch.testing.assert_close(model.output_scale, 3 * y.std((0, 2, 3), correction=0))


def test_masked_points_have_no_changes():
    data, changes = films(1, mask=True)
    model = MODELS["fields"](0)
    make_plan(model, data, None, Training(), progress=False).prepare(model)
    exact = changes[..., 2:].square().mean((0, 2, 3)).sqrt()
    torch.testing.assert_close(model.output_scale.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("settings", "data"), [({"order": 0}, 1), ({"normalization": "none"}, 1), ({}, 0)])
def test_where_there_are_no_changes_the_units_are_those_of_the_frames(settings, data):
    """Order 0, data that are not normalised, and films in which nothing moves."""
    film, _ = films(1)
    if not data:
        film = t1.Fields(trajectory=film.trajectory[:, :1].expand(-1, 7, -1, -1, -1), grid="cell", periodic=False)
    model = MODELS["fields"](0)
    make_plan(model, film, None, Training(**settings), progress=False).prepare(model)
    torch.testing.assert_close(model.output_scale, model.input_scale)
