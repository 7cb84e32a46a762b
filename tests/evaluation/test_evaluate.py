"""Predictions and evaluations of models whose maps are known, against the same computed directly."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import transform_once as t1
from transform_once.data.fields import Fields
from transform_once.evaluation.evaluate import (
    Evaluation,
    evaluate,
    examples,
    full_evaluation,
    predict,
    save_evaluation,
)
from transform_once.models.operator import Dynamics, Operator, SpectralOperator
from transform_once.solvers import navier_stokes
from transform_once.spectral.modes import TopM, irreducible_loss, tail_energy


class ChannelMap(Operator):
    """y = A x at every point; with `wild` the output is noise unless the model is in eval mode."""

    def __init__(self, in_channels, out_channels, resolution, wild=0.0):
        super().__init__(in_channels, out_channels, resolution)
        self.matrix = nn.Parameter(torch.randn(out_channels, in_channels))
        self.wild = nn.Dropout(wild)
        self.batches = []

    def forward(self, x):
        self._check(x)
        assert not torch.is_grad_enabled()
        self.batches.append(len(x))
        return self._denormalize(self.wild(torch.einsum("oi,bi...->bo...", self.matrix, self._normalize(x))))


class ModeScale(SpectralOperator):
    """Every kept mode times a factor."""

    def __init__(self, channels, resolution, modes, transform="dct", factor=1.0, out_resolution=None):
        super().__init__(channels, channels, resolution, modes, transform, out_resolution)
        self.factor, self.one = factor, nn.Parameter(torch.ones(()))  # the parameter says where, and how precise

    def kspace(self, X):
        return X * self.one * self.factor


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def flow(samples=6, resolution=16):
    settings = navier_stokes.Settings(grid=resolution, time_step=0.05)
    initial, final, _ = navier_stokes.generate(samples, 1e-3, 1.0, resolution, settings=settings)
    return Fields(input=initial, target=final, grid="node", periodic=True)


def relative(prediction, target):
    return (prediction - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)


def as_arrays(x, dtype):
    return x.numpy().astype(dtype)


@pytest.mark.parametrize("grid", [(9,), (6, 5), (4, 3, 5)])
def test_predictions_are_the_models_own(grid):
    model, x = ChannelMap(2, 3, grid), torch.randn(7, 2, *grid)
    expected = torch.einsum("oi,bi...->bo...", model.matrix, x)
    for given in (x, x.double(), as_arrays(x, np.float32), as_arrays(x, np.float64)):
        y = predict(model, given, batch_size=3)
        assert not y.requires_grad
        torch.testing.assert_close(y, expected.detach())
    assert model.batches == [3, 3, 1] * 4


def test_the_channel_axis_may_be_absent_where_there_is_one_channel():
    model, x = ChannelMap(1, 2, (5, 4)), torch.randn(3, 5, 4)
    torch.testing.assert_close(predict(model, x), predict(model, x[:, None]))
    assert predict(model, np.ones((2, 5, 4), dtype=int)).shape == (2, 2, 5, 4)
    with pytest.raises(ValueError, match=r"expects fields of shape \(batch, 2, grid, grid\); got \(3, 5, 4\)"):
        predict(ChannelMap(2, 2, (5, 4)), x)


def test_a_model_is_left_in_the_mode_it_was_in():
    model, x = ChannelMap(1, 1, (8,), wild=0.9), torch.randn(4, 1, 8)
    model.train()
    model.wild.eval()  # frozen by hand
    predict(model, x, device="cpu")
    assert model.training
    assert not model.wild.training
    model.wild.train()
    torch.testing.assert_close(predict(model, x), (model.matrix * x).detach())
    assert model.wild.training
    assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="expects fields"):
        predict(model, torch.zeros(2, 3, 8))
    assert model.wild.training


def test_an_ensemble_predicts_mean_and_spread():
    models, x = [ChannelMap(2, 2, (6,)) for _ in range(4)], torch.randn(5, 2, 6)
    each = torch.stack([predict(model, x) for model in models])
    mean, spread = predict(models, x, batch_size=2)
    torch.testing.assert_close(mean, each.mean(0))
    torch.testing.assert_close(spread, each.std(0))
    torch.testing.assert_close(predict(models[:1], x), each[0])


def test_a_spectral_model_predicts_on_the_grid_asked_for():
    x = torch.arange(16).add(0.5).mul(math.pi / 16).cos().reshape(1, 1, 16)
    finer = torch.arange(24).add(0.5).mul(math.pi / 24).cos().reshape(1, 1, 24)
    torch.testing.assert_close(predict(ModeScale(1, (16,), 4), x, size=24), finer)


def test_large_fields_go_in_smaller_batches():
    model = ChannelMap(1, 1, (2**10, 2**10))
    predict(model, torch.zeros(5, 1, 2**10, 2**10))
    assert model.batches == [4, 1]
    model = ChannelMap(1, 1, (8,))
    predict(model, torch.zeros(100, 1, 8))
    assert model.batches == [64, 36]


def stepper(order=1, history=0, channels=1, factor=0.0):
    model = ModeScale(channels * (history + 1), (8,), 8, factor=factor)
    model.out_channels, model.dynamics = channels, Dynamics(order, history)
    return model


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: predict(m, torch.zeros(2, 2, 8), size=16), "ChannelMap keeps the input's: leave size out"),
        (lambda m: predict(m, torch.zeros(2, 2, 8, dtype=torch.complex64)), "expected real fields of shape"),
        (lambda m: predict(m, torch.zeros(0, 2, 8)), r"got torch.float32 of \(0, 2, 8\)"),
        (
            lambda m: predict(m, torch.tensor([0.0, torch.nan]).reshape(2, 1, 1).expand(2, 2, 8)),
            "sample 1 of the input",
        ),
        (lambda m: predict(m, torch.zeros(2, 2, 8), batch_size=0), "batch_size must be at least 1"),
        (lambda m: predict([], torch.zeros(2, 2, 8)), "got 0 models"),
        (lambda m: predict([m, ChannelMap(1, 2, (8,))], torch.zeros(2, 2, 8)), "got 2 models of 2 kinds"),
        (lambda m: predict(stepper(), torch.zeros(2, 1, 8)), "change from one frame to the next: use rollout"),
        (lambda m: evaluate(m, Fields(input=torch.zeros(2, 2, 8))), "hold inputs only"),
        (lambda m: evaluate(m, Fields(input=torch.zeros(2, 1, 8), target=torch.ones(2, 2, 8))), r"\(2, 2\) .*\(1, 2\)"),
        (lambda m: evaluate(m, Fields(input=torch.zeros(2, 2, 8, 8), target=torch.ones(2, 2, 8, 8))), "1 grid axes"),
        (lambda m: evaluate(m, Fields(input=torch.zeros(2, 2, 8), target=torch.ones(2, 2, 8))[:0]), "no samples"),
        (
            lambda m: evaluate(m, Fields(input=torch.zeros(2, 2, 8), target=torch.ones(2, 2, 8)), steps=2),
            "leave steps=2",
        ),
        (
            lambda m: evaluate(m, Fields(trajectory=torch.ones(2, 3, 2, 8))),
            r"3 frames: give pairs, such as fields.pairs",
        ),
        (
            lambda m: evaluate(stepper(), Fields(input=torch.ones(2, 1, 8), target=torch.ones(2, 1, 8))),
            "give trajector",
        ),
        (lambda m: evaluate(stepper(), Fields(trajectory=torch.ones(2, 3, 2, 8))), "the frames of these fields have 2"),
        (
            lambda m: evaluate(stepper(2), Fields(trajectory=torch.ones(2, 2, 1, 8))),
            "2 frames; trajectories of 2 leave",
        ),
        (
            lambda m: evaluate(stepper(), Fields(trajectory=torch.ones(2, 4, 1, 8)), steps=4),
            "between 1 and the 3 frames",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(call, match):
    with pytest.raises(ValueError, match=match):
        call(ChannelMap(2, 2, (8,)))


@pytest.mark.parametrize("grid", [(9,), (6, 5), (4, 3, 5)])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_pairs_are_measured_in_physical_units(grid, batch_size):
    model = ChannelMap(2, 2, grid)
    shift, scale = torch.tensor([3.0, -2.0]), torch.tensor([5.0, 0.1])
    model.set_normalization(shift, scale, shift, scale)
    x, y = torch.randn(10, 2, *grid), torch.randn(10, 2, *grid) + 4
    mask = torch.rand(10, 1, *grid) < 0.2
    fields = Fields(input=x, target=y, mask=mask, channels=("u", "v"))
    result = evaluate(model, fields, batch_size=batch_size, progress=False)
    s, a = scale.reshape(-1, *[1] * len(grid)), shift.reshape(-1, *[1] * len(grid))
    prediction = (torch.einsum("oi,bi...->bo...", model.matrix, (x - a) / s) * s + a).detach()
    errors = relative(prediction * ~mask, y * ~mask)
    assert result["relative_l2"] == pytest.approx(errors.mean().item(), rel=1e-5)
    assert result["relative_l2_std"] == pytest.approx(errors.std(unbiased=False).item(), rel=1e-4)
    visible = ~mask[:, 0]
    for number, name in enumerate("uv"):
        wrong = (prediction - y)[:, number][visible]
        assert result["per_channel"][name]["mse"] == pytest.approx(wrong.square().mean().item(), rel=1e-5)
    assert result["resolution"] == list(grid)
    split = result["kspace"]["J"] ** 2 + result["kspace"]["R_o"] ** 2
    assert split == pytest.approx(errors.square().mean().item(), rel=1e-5)
    json.dumps(result, allow_nan=False)


def test_missing_points_do_not_count():
    x, y = torch.randn(4, 1, 12), torch.randn(4, 1, 12)
    absent = torch.rand(4, 1, 12) < 0.3
    model = ChannelMap(1, 1, (12,))
    result = evaluate(model, Fields(input=x, target=y.masked_fill(absent, torch.nan), missing=math.nan))
    wrong = (model.matrix * x - y)[~absent]
    assert result["mae"] == pytest.approx(wrong.abs().mean().item(), rel=1e-5)


def test_files_are_measured_as_what_they_hold(tmp_path):
    model, fields = ChannelMap(1, 1, (16, 16)), flow()
    assert evaluate(model, fields.save(tmp_path / "flow.h5"), batch_size=2) == evaluate(model, fields, batch_size=2)


@pytest.mark.parametrize("transform", ["dct", "fourier", "dft"])
@pytest.mark.parametrize("grid", [(12,), (8, 10), (6, 8, 4)])
def test_the_split_of_a_spectral_model(transform, grid):
    """It gets the kept modes of the input times 0.7, and nothing else: J = 0.3 on those, R_o is the rest."""
    y = torch.randn(5, 2, *grid, dtype=torch.float64)
    fields = Fields(input=y, target=y, grid="node", periodic=True)
    model = ModeScale(2, grid, 2, transform, factor=0.7).double()
    result = evaluate(model, fields)["kspace"]
    dropped = tail_energy(y, 2, transform).sum(1) / y.flatten(1).square().sum(1)
    assert result["transform"] == transform
    if transform != "dft":  # its truncation is no projection: a little of the prediction lies in other modes
        assert result["J"] == pytest.approx(0.3 * (1 - dropped).mean().sqrt().item(), rel=1e-10)
        assert result["R_o"] == pytest.approx(dropped.mean().sqrt().item(), rel=1e-10)
    everything = relative(predict(model, y), y).square().mean().item()
    assert result["J"] ** 2 + result["R_o"] ** 2 == pytest.approx(everything, rel=1e-10)


def test_the_outer_error_of_a_model_on_any_modes_is_the_irreducible_loss():
    y = torch.randn(1, 1, 8, 8)
    modes = TopM(10).fit(y)
    result = evaluate(ModeScale(1, (8, 8), modes, factor=0.0), Fields(input=y, target=y))["kspace"]
    assert result["R_o"] == pytest.approx(irreducible_loss(y, modes), rel=1e-6)
    assert (result["kept"], result["J"] ** 2 + result["R_o"] ** 2) == (10, pytest.approx(1))


@pytest.mark.parametrize(
    ("make", "cells", "nodes"),
    [
        (lambda: t1.FNO(1, 1, (16, 16), modes=(3, 8), width=4, depth=1), [6, 16], [5, 16]),
        (lambda: t1.FFNO(1, 1, (16, 16), modes=5, width=4, depth=1), [10, 10], [9, 9]),
        (lambda: t1.UNet(1, 1, (16, 16), width=4), [8, 8], [7, 7]),
        (lambda: t1.T1(1, 1, (16, 16), modes=6, width=4, depth=1, local="pointwise"), [6, 6], None),
        (lambda: t1.T1Plus(1, 1, (16, 16), modes=6, width=4, transform="fourier"), None, [5, 5]),
    ],
)
def test_every_model_is_split_at_the_modes_that_the_rule_names(make, cells, nodes):
    model, fields = make(), flow(3)
    for grid, periodic, modes, transform in (("cell", False, cells, "dct"), ("node", True, nodes, "fourier")):
        if modes is None:
            continue
        declared = Fields(input=fields.input, target=fields.target, grid=grid, periodic=periodic)
        done = full_evaluation(model, declared)
        kspace, error = done.numbers["kspace"], relative(predict(model, fields.input), fields.target)
        assert (kspace["transform"], kspace["modes"]) == (transform, modes)
        assert kspace["J"] ** 2 + kspace["R_o"] ** 2 == pytest.approx(error.square().mean().item(), rel=1e-4)
        assert ("kept" in done.arrays) == isinstance(model, SpectralOperator)


def test_a_finer_grid_is_measured_on_that_grid():
    model = ModeScale(1, (16, 16), 15, "fourier")
    fine = flow(3, 32)
    result = evaluate(model, Fields(input=fine.input, target=fine.input, grid="node", periodic=True))
    assert result["resolution"] == [32, 32]
    assert result["relative_l2"] == pytest.approx(irreducible_loss(fine.input, 15, "fourier"), rel=1e-4)
    reduced = ModeScale(1, (32, 32), 15, "fourier", out_resolution=(16, 16))  # it is asked for the target's grid
    assert evaluate(reduced, fine)["resolution"] == [32, 32]


def test_a_basis_that_changes_with_the_grid_is_warned_of():
    model, fine = ModeScale(1, (16, 16), 8), flow(2, 32)
    with pytest.warns(UserWarning, match="its dct moves to .32, 32. only roughly"):
        evaluate(model, fine)
    evaluate(model, flow(2, 16))
    evaluate(model, Fields(input=fine.input, target=fine.target))  # cells


def decay(factor=0.8, frames=7, samples=5, dtype=torch.float64):
    """x_{t+1} = factor · x_t on one axis, times 0, 0.5, …"""
    x = torch.randn(samples, 1, 2, 8, dtype=dtype)
    powers = factor ** torch.arange(frames, dtype=dtype).reshape(1, -1, 1, 1)
    return Fields(trajectory=x * powers, dt=0.5, channels=("u", "v"))


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("steps", [None, 3])
def test_rollouts_are_measured_step_by_step_against_the_closed_form(order, steps):
    """A model that gives 0.9 x instead of 0.8 x is wrong by (0.9/0.8)ᵏ − 1 after k steps."""
    fields, count = decay(), steps or 7 - max(order, 1)
    model = stepper(order, channels=2, factor={0: 0.9, 1: -0.1, 2: 0.0}[order]).double()
    result = evaluate(model, fields, steps=steps, batch_size=2)
    if order < 2:
        expected = [(0.9 / 0.8) ** k - 1 for k in range(1, count + 1)]
    else:  # with f = 0 it goes on along a line: x_k = (1 − 0.2 k) x_0, after x_0 and x_1 = 0.8 x_0
        expected = [abs((1 - 0.2 * k) / 0.8**k - 1) for k in range(2, count + 2)]
    assert result["per_step"]["relative_l2"] == pytest.approx(expected, rel=1e-9)
    first = max(order, 1)
    assert result["times"] == [0.5 * k for k in range(first, first + count)]
    true = 0.8 ** np.arange(first, first + count)
    assert result["relative_l2"] == pytest.approx(np.linalg.norm(expected * true) / np.linalg.norm(true), rel=1e-9)
    assert set(result["per_channel"]) == {"u", "v"}
    assert len(result["per_step"]["mse"]) == count


def test_a_mask_with_a_time_axis_hides_the_frames_it_says():
    fields = decay(dtype=torch.float32)
    broken, mask = fields.trajectory.clone(), torch.zeros(5, 7, 1, 8, dtype=torch.bool)
    broken[:, 3, :, 2:4], mask[:, 3, :, 2:4] = 100.0, True
    model = stepper(0, channels=2, factor=0.9)
    hidden = evaluate(model, Fields(trajectory=broken, mask=mask))
    assert hidden["per_step"]["relative_l2"] == pytest.approx([(9 / 8) ** k - 1 for k in range(1, 7)], rel=1e-5)
    fixed = evaluate(model, Fields(trajectory=fields.trajectory, mask=mask[:1, :1]))
    assert fixed["relative_l2"] == pytest.approx(evaluate(model, fields)["relative_l2"], rel=1e-6)


def test_history_and_pairs_of_a_model_of_order_0():
    class LastFrame(ModeScale):
        def kspace(self, X):
            return X[:, -1:]

    model = LastFrame(3, (8,), 8)
    model.out_channels, model.dynamics = 1, Dynamics(0, 2)
    fields = Fields(trajectory=decay().select(channels=["u"]).trajectory.float())
    result = evaluate(model, fields)
    assert result["per_step"]["relative_l2"] == pytest.approx([0.8**-k - 1 for k in range(1, 5)], rel=1e-4)
    now = stepper(0, channels=2, factor=0.9)
    pairs = decay(dtype=torch.float32).pairs(0, 1)
    assert evaluate(now, pairs)["relative_l2"] == pytest.approx(0.125, rel=1e-5)


def noisy_members(count, grid=(32, 32)):
    """Members 1 + ε_k times the input, and targets of the same kind, one ε per sample in place of the member's."""
    members = [ChannelMap(1, 1, grid) for _ in range(count)]
    noise = 0.1 * torch.randn(count)
    for member, epsilon in zip(members, noise, strict=True):
        nn.init.constant_(member.matrix, 1 + epsilon.item())
    return members, noise


def test_an_ensemble_is_measured_by_its_mean_its_members_and_its_spread():
    members, noise = noisy_members(8)
    epsilon = 0.1 * torch.randn(400, 1, 1, 1)
    x = torch.randn(400, 1, 32, 32) * torch.logspace(-1, 1, 400).reshape(-1, 1, 1, 1)
    fields = Fields(input=x, target=x * (1 + epsilon))
    result = evaluate(members, fields)
    offset = (noise.mean() - epsilon.flatten()).abs() / (1 + epsilon.flatten())
    assert result["relative_l2"] == pytest.approx(offset.mean().item(), rel=1e-4)
    assert result["members"] == pytest.approx([evaluate(member, fields)["relative_l2"] for member in members], rel=1e-6)
    calibration = result["calibration"]
    energy = x.square().mean((1, 2, 3))
    wide, wrong = noise.std().square() * energy, (noise.mean() - epsilon.flatten()).square() * energy
    ratio = (1 + 1 / 8) * wide.sum() / wrong.sum()
    assert calibration["spread_to_error"] == pytest.approx(ratio.sqrt().item(), rel=1e-4)
    covered = ((noise.mean() - epsilon).abs() <= 2 * noise.std()).float().mean().item()
    assert calibration["coverage_2sigma"] == pytest.approx(covered, abs=1e-3)
    expected = np.corrcoef(wide.sqrt().numpy(), wrong.sqrt().numpy())[0, 1]
    assert calibration["correlation"] == pytest.approx(expected, rel=1e-3)
    assert "calibration" not in evaluate(members[:1], fields)


def test_masked_points_do_not_count_for_an_ensemble_either():
    members, _ = noisy_members(3)
    x, y = torch.randn(2, 10, 1, 32, 32)
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    mask[..., 16:] = True
    hidden = evaluate(members, Fields(input=x, target=y.masked_fill(mask, 50.0), mask=mask))
    cropped = evaluate(members, Fields(input=x[..., :16], target=y[..., :16]))
    assert hidden["calibration"] == pytest.approx(cropped["calibration"], rel=1e-6)
    assert hidden["members"] == pytest.approx(cropped["members"], rel=1e-6)


def test_a_rolled_out_ensemble_has_a_spread_at_every_step():
    members = [stepper(0, channels=2, factor=factor) for factor in (0.7, 0.9)]
    done = full_evaluation(members, decay(dtype=torch.float32), count=2)
    spread, target = done.arrays["spread"], done.arrays["target"]
    for k in range(1, 7):
        wide = abs(0.9**k - 0.7**k) / math.sqrt(2) / 0.8**k
        assert spread[:, k - 1] == pytest.approx(wide * np.abs(target[:, k - 1]), rel=1e-4)
    assert done.numbers["members"] == pytest.approx(
        [evaluate(member, decay(dtype=torch.float32))["relative_l2"] for member in members], rel=1e-5
    )


def test_examples_run_from_best_to_worst_with_their_spectra():
    x = torch.randn(9, 2, 8, 6)
    sizes = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.2, 0.8, 0.4, 0.6, 0.7]).reshape(-1, 1, 1, 1)
    model = ModeScale(2, (8, 6), (4, 3))
    seen = predict(model, x)
    fields = Fields(input=x, target=seen / (1 + sizes))  # the relative error is just `sizes`
    arrays = examples(model, fields, count=3, batch_size=2)
    assert arrays["index"].tolist() == [1, 0, 2]
    assert arrays["relative_l2"] == pytest.approx([0.1, 0.5, 0.9], rel=1e-5)
    for name, values in (("input", x), ("target", fields.target), ("prediction", seen)):
        np.testing.assert_allclose(arrays[name], values[[1, 0, 2]].numpy(), rtol=1e-6)
    E, Y = (t1.dct(z, 2) for z in (seen - fields.target, fields.target))
    np.testing.assert_allclose(arrays["error_spectrum"], E.square().mean(0).sqrt().numpy(), atol=1e-5)
    np.testing.assert_allclose(arrays["target_spectrum"], Y.square().mean(0).sqrt().numpy(), atol=1e-5)
    assert arrays["kept"].sum() == 12
    assert arrays["kept"][:4, :3].all()
    assert arrays["error_spectrum"][:, ~arrays["kept"]].max() < 1e-5
    assert {"spread", "mask", "times"}.isdisjoint(arrays)


def test_examples_of_rollouts_are_a_few_frames_and_the_last_spectrum(monkeypatch):
    x = decay(0.95, frames=41, samples=3, dtype=torch.float32)
    mask = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    mask[..., 0] = True
    fields = Fields(trajectory=x.trajectory, dt=0.5, mask=mask)
    model = stepper(0, channels=2, factor=0.9)
    arrays = examples(model, fields)
    assert arrays["input"].shape == (3, 1, 2, 8)
    assert arrays["target"].shape == arrays["prediction"].shape == arrays["mask"].shape == (3, 12, 2, 8)
    assert (arrays["times"][0], arrays["times"][-1]) == (0.5, 20.0)
    np.testing.assert_allclose(arrays["target"][:, -1], x.trajectory[arrays["index"], -1].numpy())
    first = x.trajectory[arrays["index"], 0].numpy()
    np.testing.assert_allclose(arrays["prediction"][:, 0], 0.9 * first, rtol=1e-4, atol=1e-6)
    last = t1.dct(x.trajectory[:, -1], 1).square().mean(0).sqrt()
    np.testing.assert_allclose(arrays["target_spectrum"], last.numpy(), rtol=1e-4)
    assert evaluate(model, fields)["per_step"]["relative_l2"][-1] == pytest.approx(1 - (0.9 / 0.95) ** 40, rel=1e-4)
    monkeypatch.setattr("transform_once.evaluation.evaluate.PICTURE_NUMBERS", 10)
    np.testing.assert_array_equal(examples(model, fields)["target"], arrays["target"][:, [0, -1]])


def test_an_evaluation_is_saved_whole_and_read_without_code(tmp_path):
    done = full_evaluation([ModeScale(1, (16, 16), 8, "fourier", f) for f in (0.5, 1.0)], flow(), count=2)
    save_evaluation(tmp_path, done)
    save_evaluation(tmp_path, done)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["examples.npz", "metrics.json"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == done.numbers
    with np.load(tmp_path / "examples.npz", allow_pickle=False) as file:
        assert set(file) == set(done.arrays)
        for name, values in done.arrays.items():
            np.testing.assert_array_equal(file[name], values)
    with pytest.raises(ValueError, match="JSON"):
        save_evaluation(tmp_path, Evaluation({"relative_l2": math.nan}, {}))
    assert json.loads((tmp_path / "metrics.json").read_text()) == done.numbers
    with pytest.raises(FileNotFoundError, match="does not exist: create it first"):
        save_evaluation(tmp_path / "nowhere", done)


def test_a_rollout_that_blows_up_is_still_reported(tmp_path):
    model = stepper(0, channels=2, factor=1e30)
    done = full_evaluation(model, decay(dtype=torch.float32), count=2)
    save_evaluation(tmp_path, done)
    assert done.numbers["relative_l2"] is None
    assert done.numbers["per_step"]["relative_l2"][0] == pytest.approx(1.25e30, rel=1e-4)
    assert done.numbers["kspace"]["J"] is None
