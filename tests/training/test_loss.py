import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import transform_once as t1
from transform_once.data.normalization import Normalization
from transform_once.data.symmetries import Symmetry, draw
from transform_once.evaluation.rollout import rollout
from transform_once.models.operator import Dynamics
from transform_once.solvers.darcy import DARCY_SYMMETRIES
from transform_once.training.loss import FieldObjective, KSpaceObjective, relative_l2
from transform_once.training.plan import make_plan
from transform_once.training.settings import Training


def naive(prediction, target):
    error = (prediction - target).double().flatten(1).norm(dim=1)
    return error / target.double().flatten(1).norm(dim=1)


@given(
    size=st.sampled_from([(11,), (9, 6), (10, 8), (5, 4, 6)]),
    kind=st.sampled_from(["dct", "fourier", "dft"]),
    channels=st.integers(1, 3),
    shift=st.floats(-5, 5),
    scale=st.floats(0.1, 10),
    seed=st.integers(0, 10**6),
)
def test_the_loss_on_kept_modes_is_the_loss_of_the_fields(size, kind, channels, shift, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (shift + scale * torch.randn(3, channels, *size, dtype=torch.float64, generator=generator) for _ in "xy")
    grid = {"grid": "cell"} if kind == "dct" else {"grid": "node", "periodic": True}
    fields = t1.Fields(input=x, target=y, **grid)
    pair = tuple(Normalization.fit(fields, name, "standard") for name in ("input", "target"))
    spectra = t1.spectra(fields, kind, 2, normalization=pair, cache=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = t1.T1(channels, channels, size, modes=2, width=4, depth=1, transform=kind).double()
    model.set_normalization(*(v.flatten() for one in pair for v in (one.shift, one.scale)))
    ours = KSpaceObjective(model, spectra)(spectra[:])
    torch.testing.assert_close(ours, naive(model(x), y), rtol=1e-5, atol=1e-8)


def test_symmetries_act_on_fields_where_a_pair_is_split(flow):
    n = flow.resolution[0]
    for modes, space in ((n - 1, "k-space"), (n, "fields")):
        model = t1.T1(1, 1, flow.resolution, modes, 4, 1, transform="fourier")
        run = t1.train(model, flow, epochs=1, device="cpu", progress=False)
        assert run.description["space"] == space


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dct", "fourier"])
def test_rollouts_on_kept_modes_have_the_error_of_their_fields(film, order, kind):
    settings = Training(order=order, history=1, steps=3, symmetries=False)
    model = t1.T1(2, 1, (12, 12), modes=5, width=4, depth=1, transform=kind)
    grid = film if kind == "fourier" else t1.Fields(trajectory=film.trajectory)
    plan = make_plan(model, grid, None, settings)
    plan.prepare(model)
    assert model.dynamics == Dynamics(order, 1)
    batch = plan.source(torch.device("cpu")).batch(torch.tensor([0, 7, 11]))
    windows = torch.stack([film.trajectory[i][s : s + 5] for i, s in [(0, 0), (1, 2), (2, 1)]])
    torch.testing.assert_close(batch["energy"][:, :, 0], windows.double().square().sum((2, 3, 4)))
    exact = naive(rollout(model, windows[:, :2], 3), windows[:, 2:])
    torch.testing.assert_close(plan.objective(model).eval()(batch).double(), exact, rtol=1e-4, atol=1e-6)
    fields = FieldObjective(model, grid, steps=3).eval()
    torch.testing.assert_close(fields({"trajectory": windows}).double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["FNO", "T1", "T1 with maps of fields"])
def test_rollouts_in_the_loss_ask_the_host_for_nothing(film, name):
    """No step of a loss may wait for the device or copy from the host: neither could be captured on a GPU."""
    model = t1.FNO(2, 1, (12, 12), modes=3, width=4, depth=1)
    if name != "FNO":
        model = t1.T1(2, 1, (12, 12), modes=5, width=4, depth=1, local="conv" if "maps" in name else None)
    make_plan(model, film, None, Training(history=1, steps=3, symmetries=False)).prepare(model)
    objective, batch = FieldObjective(model, film, steps=3), {"trajectory": film.trajectory[:, :5]}
    objective(batch)
    with Operations() as seen:
        objective(batch)
    assert seen.names & {"aten::mm", "aten::bmm"}
    assert not seen.names & {"aten::equal", "aten::_local_scalar_dense", "aten::index", "aten::lift_fresh"}


class Operations(TorchDispatchMode):
    """The names of what is computed within."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("normalization", ["none", "standard", "unit"])
@pytest.mark.parametrize("transform", ["fourier", "dct"])
def test_motions_on_kept_modes_are_motions_of_the_fields(flow, transform, normalization):
    """The same draw, on spectra and on fields; for shifts of band-limited fields, so that those are exact."""
    symmetries, place = (*DARCY_SYMMETRIES, Symmetry(signs=(1, 1), factors=(-1.0,))), {"grid": "cell"}
    x, y = flow.input.double() + 0.3, flow.target.double() + 0.3
    if transform == "fourier":
        T = t1.get_transform("fourier")
        x, y = (T.inverse(T.forward(v, 2, 7), 2, (16, 16)) for v in (x, y))
        symmetries = tuple(Symmetry.from_dict(known) for known in flow.metadata.symmetries)
        place = {"grid": "node", "periodic": True}
    declared = [symmetry.to_dict() for symmetry in symmetries]
    fields = t1.Fields(input=x, target=y, symmetries=declared, **place)
    model = t1.T1(1, 1, (16, 16), modes=7, width=4, depth=1, transform=transform).double()
    plan = make_plan(model, fields, None, Training(normalization=normalization))
    assert plan.space == "k-space"
    plan.prepare(model)
    model.double()
    kspace = KSpaceObjective(model, plan.train, symmetries)
    of_fields = FieldObjective(model, fields, symmetries)
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    first = kspace(plan.train[:8], seeds[0])
    second = of_fields({"input": x[:8], "target": y[:8]}, seeds[1])
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(first, kspace(plan.train[:8], seeds[0]))
    torch.testing.assert_close(kspace.eval()(plan.train[:8]), naive(model(x[:8]), y[:8]), rtol=1e-5, atol=1e-7)


def test_masked_points_leave_the_loss_and_move_with_the_field():
    x, y = torch.randn(2, 5, 1, 8, 8)
    mask = torch.zeros(5, 1, 8, 8, dtype=torch.bool)
    mask[:, :, :2, :3] = True
    fields = t1.Fields(input=x, target=torch.where(mask, torch.full_like(y, 7.0), y), mask=mask)
    mirror = (Symmetry(signs=(1, -1), offset=(0.0, 1.0), factors=(-1.0,)),)
    model = t1.FNO(1, 1, (8, 8), modes=2, width=4, depth=1)
    objective = FieldObjective(model, fields, mirror)
    generator = torch.Generator().manual_seed(1)
    batch = {"input": x, "target": fields.target, "mask": mask}
    ours = objective(batch, generator)
    motion = draw(mirror, 5, generator=torch.Generator().manual_seed(1))
    flipped = motion.signs[:, 1] == -1
    assert 0 < flipped.sum() < 5
    for number in range(5):
        a, b, m = x[number], fields.target[number], mask[number]
        if flipped[number]:
            a, b, m = -a.flip(-1), -b.flip(-1), m.flip(-1)
        exact = (model(a[None])[0] - b)[~m].norm() / b[~m].norm()
        torch.testing.assert_close(ours[number], exact)


def test_a_perfect_prediction_has_a_gradient():
    y = torch.randn(2, 1, 4, 4)
    prediction = y.clone().requires_grad_()
    relative_l2(prediction, y).sum().backward()
    assert torch.isfinite(prediction.grad).all()


def test_bfloat16_works_inside_and_measures_in_float32(flow):
    model = t1.T1(1, 1, (16, 16), modes=7, width=8, depth=2, transform="fourier")
    fields = t1.Fields(input=flow.input, target=flow.target, grid="node", periodic=True)
    plan = make_plan(model, fields, None, Training(precision="bfloat16"))
    plan.prepare(model)
    half = plan.objective(model)(plan.train[:8])
    whole = KSpaceObjective(model, plan.train)(plan.train[:8])
    assert half.dtype == torch.float32
    assert not torch.equal(half, whole)
    torch.testing.assert_close(half, whole, rtol=2e-2, atol=0)


def test_another_resolution_is_rescaled():
    line = (torch.arange(24) + 0.5) / 24
    fine = torch.cos(torch.pi * line)[:, None] * torch.cos(2 * torch.pi * line)
    fine = torch.stack([fine, 2 * fine + 0.1, fine.T])[:, None]
    model = t1.T1(1, 1, (12, 12), modes=4, width=4, depth=1)
    for fields in (fine, fine[..., 1::2, 1::2]):
        plan = make_plan(model, t1.Fields(input=fields, target=fields.roll(1, 0)), None, Training(normalization="none"))
        ours = plan.objective(model)(plan.train[:])
        torch.testing.assert_close(ours.double(), naive(model(fields), fields.roll(1, 0)), rtol=1e-4, atol=1e-6)
