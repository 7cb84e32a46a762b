"""The streaming metrics against the same numbers computed naively, at once, with NumPy."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from transform_once.evaluation.metrics import (
    Calibration,
    KSpaceError,
    Metrics,
    Scores,
    from_best_to_worst,
    mean_and_spread,
)
from transform_once.spectral.modes import TopM, split_loss

GRIDS = [(13,), (6, 5), (4, 3, 5)]


def fields(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def holes(shape, seed=5):
    """About a third of the points."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def naive(prediction, target, mask, peak=None):
    """All metrics of arrays (n, …), point by point and sample by sample."""
    ratios, errors, sizes, seen = [], [], [], []
    for ours, true, hidden in zip(prediction, target, mask, strict=True):
        p, y = ours[~hidden], true[~hidden]
        if np.any(y != 0):
            ratios.append(np.sqrt(np.sum((p - y) ** 2)) / np.sqrt(np.sum(y**2)))
        errors.append(np.abs(p - y))
        sizes.append(np.abs(p) + np.abs(y))
        seen.append(y)
    errors, sizes, seen = map(np.concatenate, (errors, sizes, seen))
    peak = seen.max() - seen.min() if peak is None else peak
    symmetric = [2 * e / s if s > 0 else 0.0 for e, s in zip(errors, sizes, strict=True)]
    return {
        "relative_l2": np.mean(ratios),
        "relative_l2_std": np.std(ratios),
        "mse": np.mean(errors**2),
        "mae": np.mean(errors),
        "psnr": 20 * math.log10(peak) - 10 * math.log10(np.mean(errors**2)),
        "smape": np.mean(symmetric),
        "undefined": len(target) - len(ratios),
    }


def check(result, expected):
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 1)])
def test_fields_are_measured_as_by_hand(grid, shared):
    shape = (7, 2, *grid)
    prediction, target = fields(shape, 1), fields(shape, 2)
    mask = holes([1 if axis in shared else n for axis, n in enumerate(shape)])
    metrics = Metrics(["u", "v"])
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        metrics.add(prediction[part], target[part], mask[part] if mask.shape[0] > 1 else mask)
    result, p, y, m = metrics.result(), prediction.numpy(), target.numpy(), mask.expand(shape).numpy()
    check(result, naive(p, y, m))
    for number, name in enumerate("uv"):
        check(result["per_channel"][name], naive(p[:, number], y[:, number], m[:, number]))
    assert result["samples"] == 7
    assert "per_step" not in result
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shared", [(), (0, 1), (1, 2)])
def test_sequences_are_measured_jointly_and_step_by_step(grid, shared):
    shape = (5, 4, 2, *grid)
    prediction, target = fields(shape, 1), fields(shape, 2)
    mask = holes([1 if axis in shared else n for axis, n in enumerate(shape)])
    metrics = Metrics(["u", "v"], steps=4)
    metrics.add(prediction, target, mask)
    result, p, y, m = metrics.result(), prediction.numpy(), target.numpy(), mask.expand(shape).numpy()
    check(result, naive(p, y, m))
    check(result["per_channel"]["v"], naive(p[:, :, 1], y[:, :, 1], m[:, :, 1]))
    peak = y[~m].max() - y[~m].min()
    for step in range(4):
        expected = naive(p[:, step], y[:, step], m[:, step], peak)
        check({name: values[step] for name, values in result["per_step"].items()}, expected)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_batches_and_their_order_do_not_matter(sizes, backwards):
    count = sum(sizes)
    prediction, target = fields((count, 3, 1, 6), 1), fields((count, 3, 1, 6), 2)
    mask = holes((count, 3, 1, 6))
    at_once, streamed = Metrics(["u"], steps=3), Metrics(["u"], steps=3)
    whole = at_once.add(prediction, target, mask)
    parts = list(zip(*(x.split(sizes) for x in (prediction, target, mask)), strict=True))
    errors = [streamed.add(*part) for part in (parts[::-1] if backwards else parts)]
    torch.testing.assert_close(torch.cat(errors[::-1] if backwards else errors), whole)
    one, other = at_once.result(), streamed.result()
    for table in (("per_channel", "u"), ("per_step",), ()):
        for part in table:
            one, other = one[part], other[part]
        for name in ("relative_l2", "relative_l2_std", "mse", "mae", "psnr", "smape", "undefined"):
            assert other[name] == pytest.approx(one[name], rel=1e-10, abs=1e-12)
        one, other = at_once.result(), streamed.result()


def same_numbers(one, other):
    """Equal to 1e-12, whatever the tables hold."""
    if isinstance(one, dict | list):
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        assert len(one) == len(other)
        for key in keys:
            same_numbers(one[key], other[key])
    else:
        assert one == (pytest.approx(other, rel=1e-12, abs=1e-15) if isinstance(other, float) else other)


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4).filter(lambda shares: any(shares)),
    st.sampled_from([None, "zero", "blown up"]),
    st.booleans(),
)
def test_merged_shares_are_one_pass_over_all_samples(shares, odd_one, sequences):
    """Shares of several batches each, some of none at all; a sample may have no relative error, or no error at all."""
    count, steps = sum(map(sum, shares)), 2 if sequences else None
    shape = (count, 2, 1, 6) if sequences else (count, 1, 6)
    target, members, mask = fields(shape, 1), fields((3, *shape), 2), holes(shape)
    if odd_one == "zero":
        target[count // 2] = 0
    elif odd_one == "blown up":
        members[1, count // 2] = math.nan
    scores = [Scores(Metrics(["u"], steps), KSpaceError("dct", 2, (6,)), 3) for _ in shares]
    together = Scores(Metrics(["u"], steps), KSpaceError("dct", 2, (6,)), 3)
    start = 0
    for share, batches in zip(scores, shares, strict=True):
        for size in batches:
            part = slice(start, start := start + size)
            share.add(list(members[:, part]), target[part], mask[part])
    together.add(list(members), target, mask)
    first, *others = scores
    for other in others:
        first.merge(other)
    same_numbers(first.result(), together.result())
    torch.testing.assert_close(torch.cat(first.errors), torch.cat(together.errors), equal_nan=True)
    for ours, expected in zip(first.kspace.spectra(), together.kspace.spectra(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_only_what_measures_the_same_merges():
    with pytest.raises(ValueError, match="same channels and steps merge"):
        Metrics("uv").merge(Metrics("uv", steps=2))
    for other in (KSpaceError("fourier", 3, (6,)), KSpaceError("dct", 2, (6,)), KSpaceError("dct", 3, (7,))):
        with pytest.raises(ValueError, match="same modes of the same transform and grid"):
            KSpaceError("dct", 3, (6,)).merge(other)
    with pytest.raises(ValueError, match="got 2 and 3 members"):
        Calibration(2).merge(Calibration(3))


@given(st.floats(-1e3, 1e3).filter(lambda factor: abs(factor) > 1e-3))
def test_scaling_both_scales_what_has_units_only(factor):
    prediction, target = fields((4, 2, 9), 1), fields((4, 2, 9), 2)
    plain, scaled = Metrics("uv"), Metrics("uv")
    plain.add(prediction, target)
    scaled.add(factor * prediction, factor * target)
    expected, result = plain.result(), scaled.result()
    expected["mse"] *= factor**2
    expected["mae"] *= abs(factor)
    names = ("relative_l2", "relative_l2_std", "mse", "mae", "psnr", "smape")
    assert {name: result[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-9)


def test_an_error_in_proportion_to_the_target_is_that_proportion():
    target = fields((6, 1, 8, 8), dtype=torch.float32)
    metrics = Metrics(["u"])
    errors = metrics.add(target * 1.25, target)
    result = metrics.result()
    torch.testing.assert_close(errors, torch.full((6,), 0.25, dtype=torch.float64), rtol=1e-7, atol=0)
    assert (result["relative_l2"], result["smape"]) == pytest.approx((0.25, 2 * 0.25 / 2.25), rel=1e-7)
    assert result["relative_l2_std"] < 1e-7


def test_sums_are_taken_in_double_precision():
    """In float32 the sum of 2²⁵ ones stops at 2²⁴, and the deviation of 1000 + 1e-4 is lost."""
    target = torch.ones(1, 1, 2**21)
    metrics = Metrics(["u"])
    for _ in range(16):
        metrics.add(target * 1.5, target)
    assert metrics.result()["mse"] == 0.25
    assert metrics.result()["psnr"] is None  # a constant target has no range
    steady = Metrics(["u"])
    for wrong in (999.9999, 1000.0001):
        steady.add(torch.full((50, 1, 4), 1.0 + wrong, dtype=torch.float64), torch.ones(50, 1, 4, dtype=torch.float64))
    assert steady.result()["relative_l2_std"] == pytest.approx(1e-4, rel=1e-6)


def test_half_precision_fields_are_measured_in_double():
    prediction, target = fields((3, 1, 50), 1).bfloat16(), fields((3, 1, 50), 2).bfloat16()
    metrics = Metrics(["u"])
    metrics.add(prediction, target)
    everything = np.zeros((3, 1, 50), dtype=bool)
    check(metrics.result(), naive(prediction.double().numpy(), target.double().numpy(), everything))


def test_zero_targets_are_undefined_and_perfection_has_no_decibels():
    target = torch.stack([torch.zeros(1, 8), torch.linspace(1, 2, 8)[None]])
    metrics = Metrics(["u"])
    errors = metrics.add(target.clone(), target)
    result = metrics.result()
    assert errors.isnan().tolist() == [True, False]
    assert (result["relative_l2"], result["undefined"], result["samples"]) == (0, 1, 2)
    assert (result["mse"], result["smape"], result["psnr"]) == (0, 0, None)
    empty = Metrics(["u"])
    empty.add(target, target, torch.ones(2, 1, 8, dtype=torch.bool))
    assert (empty.result()["relative_l2"], empty.result()["mse"], empty.result()["undefined"]) == (None, None, 2)
    json.dumps(empty.result(), allow_nan=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prediction_that_blew_up_is_no_number_but_the_worst(bad):
    target = fields((4, 2, 1, 6))
    prediction = target * 1.1
    prediction[2, 1] = bad
    metrics = Metrics(["u"], steps=2)
    errors = torch.cat([metrics.add(prediction[:3], target[:3]), metrics.add(prediction[3:], target[3:])])
    result = metrics.result()
    assert from_best_to_worst(errors, 4)[-1] == 2
    assert (result["relative_l2"], result["relative_l2_std"], result["mse"]) == (None, None, None)
    assert result["per_step"]["relative_l2"] == [pytest.approx(0.1), None]
    json.dumps(result, allow_nan=False)


def test_masked_points_may_hold_anything():
    prediction, target, mask = fields((3, 2, 7), 1), fields((3, 2, 7), 2), holes((3, 1, 7))
    clean, dirty = Metrics("uv"), Metrics("uv")
    clean.add(prediction, target, mask)
    dirty.add(prediction.masked_fill(mask, math.nan), target.masked_fill(mask, math.inf), mask)
    assert dirty.result() == clean.result()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.zeros(2, 1, 4), torch.zeros(2, 1, 5)), r"target's shape \(2, 1, 1, 5\)"),
        ((torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)), "1 time steps of 1 channels; got 1 of 2"),
        ((torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)), "mask of booleans"),
        ((torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(3, 1, 4, dtype=torch.bool)), "mask of booleans"),
    ],
)
def test_what_does_not_fit_is_said(arguments, match):
    with pytest.raises(ValueError, match=match):
        Metrics(["u"]).add(*arguments)


def test_channel_names_differ():
    with pytest.raises(ValueError, match="all different; got u, u"):
        Metrics(["u", "u"])


@pytest.mark.parametrize("transform", ["dct", "fourier", "dft"])
@pytest.mark.parametrize("grid", [(12,), (8, 7), (5, 6, 4)])
def test_the_split_adds_up_and_is_that_of_split_loss(transform, grid):
    prediction, target = fields((5, 2, *grid), 1), fields((5, 2, *grid), 2)
    split, metrics = KSpaceError(transform, 2, grid), Metrics("uv")
    for part in (slice(0, 2), slice(2, 5)):
        split.add(prediction[part], target[part])
        metrics.add(prediction[part], target[part])
    result, total = split.result(), metrics.result()
    parts = split_loss(prediction, target, 2, transform)
    assert result["J"] == pytest.approx(parts.kept.square().mean().sqrt().item(), rel=1e-10)
    assert result["R_o"] == pytest.approx(parts.dropped.square().mean().sqrt().item(), rel=1e-10)
    mean_square = total["relative_l2"] ** 2 + total["relative_l2_std"] ** 2
    assert result["J"] ** 2 + result["R_o"] ** 2 == pytest.approx(mean_square, rel=1e-10)
    assert math.prod(result["modes"]) == result["kept"] == int(split.kept.sum())


def test_the_split_of_masked_sequences_adds_up_and_leaves_zeros_out():
    prediction, target, mask = fields((4, 3, 2, 6, 6), 1), fields((4, 3, 2, 6, 6), 2), holes((4, 1, 1, 6, 6))
    target[1] = 0
    modes = TopM(9).fit(fields((4, 2, 6, 6), 3))
    split, metrics = KSpaceError("dct", modes, (6, 6)), Metrics("uv", steps=3)
    split.add(prediction, target, mask)
    metrics.add(prediction, target, mask)
    result, total = split.result(), metrics.result()
    mean_square = total["relative_l2"] ** 2 + total["relative_l2_std"] ** 2
    assert result["J"] ** 2 + result["R_o"] ** 2 == pytest.approx(mean_square, rel=1e-10)
    assert (result["kept"], total["undefined"]) == (9, 1)
    error, true = split.spectra()
    visible = ((prediction - target) * ~mask)[:, -1].square().mean(0).sum((1, 2)).sqrt()
    assert np.sqrt((error**2).sum((1, 2))) == pytest.approx(visible.numpy(), rel=1e-5)
    assert np.sqrt((true**2).sum((1, 2))) == pytest.approx(
        target[:, -1].square().mean(0).sum((1, 2)).sqrt().numpy(), rel=1e-5
    )


def test_no_number_where_nothing_is_defined():
    split = KSpaceError("dct", 2, (4,))
    split.add(torch.ones(2, 1, 4), torch.zeros(2, 1, 4))
    assert (split.result()["J"], split.result()["R_o"]) == (None, None)


@pytest.mark.parametrize("members", [2, 5, 30])
def test_members_and_truth_of_one_distribution_are_calibrated(members):
    """Truth and members differ from the unknown centre alike, with a noise level that varies from sample to sample."""
    levels = torch.logspace(-1, 1, 40, dtype=torch.float64).reshape(-1, 1, 1)
    truth, *drawn = levels * fields((members + 1, 40, 2, 3000))
    mean, spread = mean_and_spread(drawn)
    calibration = Calibration(members)
    for part in (slice(0, 15), slice(15, 40)):
        calibration.add(mean[part], spread[part], truth[part])
    result = calibration.result()
    assert result["spread_to_error"] == pytest.approx(1, abs=0.02)
    expected = 1 - 2 * stats.t.sf(2 / math.sqrt(1 + 1 / members), members - 1)
    assert result["coverage_expected"] == pytest.approx(expected, rel=1e-5)
    assert result["coverage_2sigma"] == pytest.approx(expected, abs=0.005)
    assert result["correlation"] > 0.99


def test_members_too_sure_of_themselves_are_found_out():
    """Members scatter by 1 around a centre that is wrong by 3: E e² = 9 + 1/K."""
    drawn = fields((5, 20, 1, 4000)) + 3
    mean, spread = mean_and_spread(list(drawn))
    calibration = Calibration(5)
    calibration.add(mean, spread, torch.zeros(20, 1, 4000), holes((20, 1, 4000)))
    result = calibration.result()
    assert result["spread_to_error"] == pytest.approx(math.sqrt(1.2 / 9.2), rel=0.01)
    assert result["coverage_2sigma"] < 0.2
    assert abs(result["correlation"]) < 0.6


def test_correlation_is_that_of_numpy_and_none_where_nothing_varies():
    mean, spread, target = fields((6, 1, 9), 1), fields((6, 1, 9), 2).abs(), fields((6, 1, 9), 3)
    calibration, flat = Calibration(3), Calibration(3)
    calibration.add(mean, spread, target)
    wide, wrong = (x.square().mean((1, 2)).sqrt().numpy() for x in (spread, mean - target))
    assert calibration.result()["correlation"] == pytest.approx(np.corrcoef(wide, wrong)[0, 1], rel=1e-10)
    flat.add(target + 1, torch.ones(6, 1, 9), target)
    flat_one = Calibration(3)
    flat_one.add(target[:1] + 1, torch.ones(1, 1, 9), target[:1])
    assert flat_one.result()["correlation"] is None
    assert flat.result()["coverage_2sigma"] == 1


def test_mean_and_spread_are_those_of_torch_and_zero_where_members_agree():
    members = fields((3, 4, 1, 5), dtype=torch.float32)
    mean, spread = mean_and_spread(list(members))
    torch.testing.assert_close(mean, members.mean(0))
    torch.testing.assert_close(spread, members.std(0))
    assert mean_and_spread([members[0]] * 3)[1].eq(0).all()
    assert mean_and_spread([members[0]])[1] is None


def test_samples_are_picked_from_best_to_worst():
    errors = torch.tensor([0.3, 0.1, torch.nan, 0.2, 0.1, torch.inf])
    assert from_best_to_worst(errors, 3) == [1, 3, 5]
    assert from_best_to_worst(errors, 100) == [1, 4, 3, 0, 5]
    assert from_best_to_worst(torch.full((3,), torch.nan), 2) == [0, 2]
