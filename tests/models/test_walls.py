"""Outputs in sines, for fields that are zero at the walls: exact, cheaper, and chosen where they help."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transform_once as t1
from transform_once.data.normalization import Normalization
from transform_once.evaluation.evaluate import full_evaluation, save_evaluation
from transform_once.solvers import more_datasets
from transform_once.solvers.darcy import DARCY_SYMMETRIES
from transform_once.training.choose import choose_model
from transform_once.training.loss import FieldObjective, KSpaceObjective
from transform_once.training.plan import make_plan
from transform_once.training.settings import Training

GRID = (16, 16)


def pairs(count=12, offset=0.0, **facts):
    """Rough inputs, targets that are zero at the walls."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, *GRID, generator=generator, dtype=torch.float64)
    modes = torch.randn(count, 1, 12, 12, generator=generator, dtype=torch.float64)
    modes[:, :, 0, 0] += 30
    falling = torch.arange(1, 13) ** 2
    y = t1.get_transform("dst").inverse(modes / torch.outer(falling, falling), 2, GRID)
    return t1.Fields(input=x + offset, target=y, dtype="float64", **facts)


def model(modes=6, **options):
    torch.manual_seed(0)
    return t1.T1Grid(1, 1, GRID, modes, width=8, depth=2, transform="dct", out_transform="dst", **options).double()


def naive(prediction, target):
    return (prediction - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)


def test_the_output_is_zero_at_the_walls_on_every_grid():
    net, x = model(), pairs().input
    with torch.no_grad():
        coarse, fine = net(x), net(x, size=(16, 4096))
    wall = 1.5 * fine[..., 0] - 0.5 * fine[..., 1]  # continued to the wall itself, half a cell before the first
    assert coarse.abs().max() > 0.01
    assert wall.abs().max() < 1e-4 * fine.abs().max()
    kept = t1.get_transform("dst").forward(coarse, 2, 6)
    torch.testing.assert_close(net.kspace(t1.dct(x, 2, 6)), kept)


@given(normalization=st.sampled_from(["none", "standard", "unit"]), offset=st.floats(-3, 3), seed=st.integers(0, 99))
def test_the_loss_on_kept_modes_is_the_loss_of_the_fields(normalization, offset, seed):
    symmetries = DARCY_SYMMETRIES
    fields = pairs(offset=offset, symmetries=[one.to_dict() for one in symmetries])
    net = model()
    plan = make_plan(net, fields, None, Training(normalization=normalization))
    assert plan.space == "k-space"
    assert not plan.normalization[1].shift.any()
    plan.prepare(net)
    net.double()
    kspace, of_fields = KSpaceObjective(net, plan.train, symmetries), FieldObjective(net, fields, symmetries)
    batch = {"input": fields.input, "target": fields.target}
    first, second = (
        one(data, torch.Generator().manual_seed(seed)) for one, data in ((kspace, plan.train[:]), (of_fields, batch))
    )
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        exact = naive(net(fields.input), fields.target)
        torch.testing.assert_close(kspace.eval()(plan.train[:]), exact, rtol=1e-6, atol=1e-9)


def test_training_says_what_evaluate_finds_and_saves_it(tmp_path):
    fields = pairs()
    run = t1.train(model(), fields, fields, epochs=3, batch_size=4, progress=False, output=tmp_path / "run")
    found = t1.evaluate(run.model, fields, progress=False)
    assert found["relative_l2"] == pytest.approx(run.description["best"][0]["validation"], rel=1e-5)
    assert found["kspace"]["transform"] == "dst"
    outside = t1.tail_energy(fields.target, 6, "dst").sum(1) / fields.target.flatten(1).square().sum(1)
    assert found["kspace"]["R_o"] == pytest.approx(math.sqrt(outside.mean()), rel=1e-6)
    again = t1.load(tmp_path / "run" / "model.safetensors")
    assert again.out_transform.name == "dst"
    with torch.no_grad():
        assert torch.equal(again(fields.input), run.model(fields.input))
    save_evaluation(tmp_path / "run", full_evaluation(run.model, fields, progress=False))
    page = t1.report([tmp_path / "run"], tmp_path / "report.html")
    assert "half-waves of the DST" in page.read_text(encoding="utf-8")


def test_spectra_are_made_and_cached_by_basis(tmp_path):
    fields = pairs().save(tmp_path / "walls.h5")
    cosines = t1.spectra(fields, "dct", 6, normalization="standard")
    sines = t1.spectra(fields, "dct", 6, out_transform="dst", normalization="standard")
    assert len(list((tmp_path / "walls.h5.spectra").glob("*.h5"))) == 2
    assert torch.equal(cosines.tensors["input"], sines.tensors["input"])
    root = fields.target.square().mean().sqrt()
    expected = t1.get_transform("dst").forward(fields.target / root, 2, 6)
    torch.testing.assert_close(sines.tensors["target"], expected, rtol=1e-6, atol=1e-6)
    lost = [(one.tensors["tail"] * one.normalization[1].scale.square()).sum() for one in (cosines, sines)]
    assert lost[1] < 0.1 * lost[0]
    with pytest.raises(ValueError, match=r"spectra keep .* of the dct basis, the model .* of the dct and dst basis"):
        t1.train(model(), cosines, epochs=1, progress=False)
    assert t1.train(model(), sines, epochs=1, progress=False, symmetries=False).description["space"] == "k-space"


def test_it_is_chosen_for_targets_that_are_zero_at_the_walls(tmp_path):
    more_datasets.darcy(tmp_path / "darcy.h5", samples=24, resolution=32, refinement=3)
    fields = t1.Fields.open(tmp_path / "darcy.h5")
    chosen, said = choose_model(fields, device="cpu")
    assert chosen.config["out_transform"] == "dst"
    assert any("zero at the walls" in sentence for sentence in said)
    plain, _ = choose_model(fields, given={"transform": "dct", "modes": 12}, device="cpu")
    assert plain.config["out_transform"] is None
    asked, _ = choose_model(fields, given={"modes": 12}, device="cpu")
    assert (asked.config["modes"], asked.config["out_transform"]) == (12, "dst")
    cells = (torch.arange(32) + 0.5) / 32
    waves = torch.stack([torch.cos(math.pi * k * cells) for k in range(6)])
    open_ends = torch.einsum("nij,ix,jy->nxy", torch.randn(24, 6, 6), waves, waves)[:, None]
    other, _ = choose_model(t1.Fields(input=open_ends, target=open_ends + 1), device="cpu")
    assert other.config["out_transform"] is None
    film, _ = choose_model(t1.Fields(trajectory=fields.target[:, None].expand(-1, 3, -1, -1, -1)), device="cpu")
    assert film.config["out_transform"] is None


def test_what_cannot_be_is_said_in_one_sentence():
    for options in ({"transform": "dst"}, {"transform": "fourier", "out_transform": "dst"}, {"out_transform": "dft"}):
        with pytest.raises(ValueError, match=r"the basis of the output|the dst is for outputs"):
            t1.T1Grid(1, 1, GRID, 6, **options)
    film = t1.Fields(trajectory=pairs().target[:, None].expand(-1, 4, -1, -1, -1))
    with pytest.raises(ValueError, match="leave out_transform out"):
        t1.train(model(), film, epochs=1, progress=False)
    with pytest.raises(ValueError, match="only targets of pairs"):
        t1.spectra(film, "dct", 6, out_transform="dst", cache=False)
    net, fields = model(), pairs()
    shifted = tuple(Normalization.fit(fields, name) for name in ("input", "target"))
    net.set_normalization(*(v.flatten() for one in shifted for v in (one.shift, one.scale)))
    with pytest.raises(ValueError, match="sines have no constant mode"):
        t1.train(net, fields, epochs=1, progress=False)
