"""Analysis against closed forms: fields made of a few known modes, and the direct computations of `spectral.modes`."""

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transform_once.data.fields import Fields
from transform_once.data.spectra import spectra
from transform_once.evaluation import analysis as module
from transform_once.evaluation.analysis import BASES, analyze
from transform_once.evaluation.rates import cache_weight, measure_rates
from transform_once.models.t1 import T1
from transform_once.solvers.navier_stokes import generate
from transform_once.spectral.modes import ModeSet, TopM, irreducible_loss, tail_energy
from transform_once.spectral.transforms import get_transform, idct

GRIDS = [(24,), (12, 9), (6, 5, 8)]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def smooth(count, grid, seed=0):
    """Random fields on cells that do not repeat: windows into periodic ones of twice the size."""
    double = tuple(2 * n for n in grid)
    waves = [(torch.arange(n, dtype=torch.float64) + 1) // 2 for n in double]
    square = sum(w.reshape([-1 if a == axis else 1 for a in range(len(grid))]) ** 2 for axis, w in enumerate(waves))
    periodic = get_transform("fourier").inverse((square + 4) ** -2 * noise(count, 1, *double, seed=seed), len(grid))
    return periodic[(..., *(slice(n) for n in grid))] * math.prod(grid)


def quick(fields, **options):
    return analyze(fields, **{"progress": False, "rates": False} | options)


def three_waves(transform, grid):
    """Two fields of mean 5 and −1 with energies 16, 4, 1 and 9, 9, 1 in three modes, the third one at the middle."""
    modes = [(1,) * len(grid), (3,) + (1,) * (len(grid) - 1), tuple(n // 2 for n in grid)]
    X = torch.zeros(2, 1, *get_transform(transform).block(None, grid), dtype=torch.float64)
    for sample, amplitudes in enumerate([(4, 2, 1), (3, -3, 1)]):
        for mode, amplitude in zip(modes, amplitudes, strict=True):
            X[(sample, 0, *mode)] = amplitude
    means = torch.tensor([5.0, -1.0], dtype=torch.float64).reshape(2, 1, *[1] * len(grid))
    return get_transform(transform).inverse(X, len(grid)) + means, modes


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("transform", ["dct", "fourier"])
def test_three_waves_have_the_energies_errors_and_counts_one_knows(transform, grid):
    y, modes = three_waves(transform, grid)
    found = quick(Fields(input=y), tolerance=0.3)
    basis = found.bases[transform]
    energy = basis.energy["input"][0]
    for mode, value in zip(modes, (12.5, 6.5, 1.0), strict=True):
        assert energy[mode] == pytest.approx(value)
    assert energy.flatten()[0] == pytest.approx(13 * math.prod(grid))  # (5² + 1²)/2 times the points
    assert energy.sum() == pytest.approx(20 + 13 * math.prod(grid))
    assert basis.shells["input"][0, 0] == pytest.approx(13 * math.prod(grid))
    reach = get_transform(transform).reach(grid)
    first = [max(int(reach[axis][k]) for axis, k in enumerate(mode)) for mode in modes]
    curve = basis.low_pass["input"]
    assert (curve.cost[0], curve.cost[-1]) == (1, math.prod(grid))
    assert sorted(set(curve.cost)) == curve.cost
    for box, error, left_out in zip(basis.boxes, curve.error, curve.left_out, strict=True):
        lost = [
            sum(e for e, m in zip(energies, first, strict=True) if m > max(box)) / sum(energies)
            for energies in ((16, 4, 1), (9, 9, 1))
        ]
        assert error == pytest.approx(np.mean(np.sqrt(lost)), abs=1e-7)
        assert left_out == pytest.approx(np.mean(lost), abs=1e-12)
    # Kept: the mean and the two large modes leave 1/21 and 1/19, a mean error of 0.224.
    assert basis.needed["shared top-m"] == 3
    assert basis.needed["top-m per field"] == 3
    at = basis.top.cost.index(3)
    assert basis.top.error[at] == pytest.approx((21**-0.5 + 19**-0.5) / 2)
    assert basis.top.left_out[at] == pytest.approx((1 / 21 + 1 / 19) / 2)
    channel = basis.channels[0]
    assert (channel.mean, channel.deviation) == pytest.approx((2.0, math.sqrt(20 / math.prod(grid))))


@pytest.mark.parametrize("grid", [*GRIDS, (8, 8), (1, 16)])
@pytest.mark.parametrize("name", BASES)
def test_curves_are_the_irreducible_losses_of_the_library(name, grid):
    y = smooth(6, grid).reshape(3, 2, *grid) * torch.tensor([1.0, 3.0]).reshape(1, 2, *[1] * len(grid)) + 0.7
    basis = quick(Fields(input=noise(3, 1, *grid), target=y)).bases[name]
    curve, T = basis.low_pass["target"], get_transform(name)
    norm = (y - y.mean(tuple(range(2, y.ndim)), keepdim=True)).flatten(1).norm(dim=1)
    for number, box in enumerate(basis.boxes):
        assert curve.cost[number] == math.prod(T.block(box, grid)) * (2 if name == "dft" else 1)
        assert curve.with_mean[number] == pytest.approx(irreducible_loss(y, box, name), abs=2e-8)
        tail = tail_energy(y, box, name).sum(1)
        assert curve.error[number] == pytest.approx((tail.sqrt() / norm).mean().item(), abs=2e-7)
        assert curve.left_out[number] == pytest.approx((tail / norm**2).mean().item(), abs=1e-12)
    for cost, error in list(zip(basis.top.cost, basis.top.with_mean, strict=True))[::3]:
        count = cost // 2 if name == "dft" else cost
        assert error == pytest.approx(irreducible_loss(y, TopM(count).fit(y, name), name), abs=2e-6)


def test_cost_is_m_squared_for_real_bases_and_four_m_squared_for_the_dft():
    bases = quick(Fields(input=smooth(2, (16, 16)))).bases
    assert bases["dct"].low_pass["input"].cost == [m * m for m in range(1, 17)]
    assert bases["fourier"].low_pass["input"].cost == [m * m for m in (1, 3, 5, 7, 9, 11, 13, 15, 16)]
    assert bases["dft"].low_pass["input"].cost[:8] == [4 * m * m for m in range(1, 9)]


def test_modes_per_field_are_counted_field_by_field():
    y = smooth(5, (12, 10), seed=3)
    found = quick(Fields(input=y), tolerance=0.05)
    counts = []
    for one in y:
        for count in range(1, 121):
            tail = tail_energy(one[None], TopM(count).fit(one[None])).sum()
            if (tail.sqrt() / (one - one.mean()).norm()).item() <= 0.05:
                counts.append(count)
                break
    assert found.bases["dct"].needed["top-m per field"] == np.mean(counts)


def test_energy_at_equal_cost_is_that_of_the_affordable_low_pass():
    y = smooth(4, (16, 16)) + 3
    rows = quick(Fields(input=y)).equal_cost()
    assert [row["cost"] for row in rows] == [4, 16, 64]
    norm = (y - y.mean((2, 3), keepdim=True)).square().flatten(1).sum(1)
    for side, row in zip((2, 4, 8), rows, strict=True):
        for name, m in (("dct", side), ("fourier", side - 1), ("dft", side // 2)):
            assert row[name] == pytest.approx((tail_energy(y, m, name).sum(1) / norm).mean().item())


def test_smooth_periodic_nodes_get_the_fourier_basis_and_cells_that_do_not_repeat_the_dct():
    x, y, _ = generate(8, 1e-3, 5.0, 32, seed=1)
    periodic = quick(Fields(input=x, target=y, grid="node", periodic=True))
    cells = quick(Fields(input=smooth(6, (48, 40))))
    assert periodic.recommendation.transform == "fourier"
    assert cells.recommendation.transform == "dct"
    for found, fields in ((periodic, y.double()), (cells, smooth(6, (48, 40)))):
        norm = (fields - fields.mean((2, 3), keepdim=True)).flatten(1).norm(dim=1)
        name, m = found.recommendation.transform, found.recommendation.modes
        assert found.recommendation.selection == "low-pass"
        assert not any("check the declaration" in note for note in found.notes)
        error, fewer = (
            (tail_energy(fields, modes, name).sum(1).sqrt() / norm).mean().item()
            for modes in (m, m - (2 if name == "fourier" else 1))
        )
        assert error <= 0.01 < fewer
        assert found.recommendation.error == pytest.approx(error)
        assert found.modes == m
        sentence = found.recommendation.reason
        assert sentence.count(". ") == 0
        assert sentence.endswith(".")
        assert name in sentence


def test_the_measurement_decides_against_a_wrong_declaration_and_says_so():
    _, y, _ = generate(4, 1e-3, 5.0, 32, seed=1)
    declared_cells = quick(Fields(input=y))
    assert declared_cells.recommendation.transform == "fourier"
    assert any("cells, periodic=(False, False)" in note and "expects dct" in note for note in declared_cells.notes)
    declared_periodic = quick(Fields(input=smooth(4, (32, 32)), grid="node", periodic=True))
    assert declared_periodic.recommendation.transform == "dct"
    assert any("nodes, periodic=(True, True)" in note for note in declared_periodic.notes)


def test_where_the_bases_are_level_the_declared_grid_decides():
    y = noise(3, 1, 12, 12)  # white: no basis compacts it
    assert quick(Fields(input=y, grid="node", periodic=True)).recommendation.transform == "fourier"
    found = quick(Fields(input=y))
    assert found.recommendation.transform == "dct"
    assert "the declared grid decides" in found.recommendation.reason
    assert any("More than half of the 144 modes" in note for note in found.notes)


def test_few_high_modes_get_one_shared_set_that_models_take():
    X = torch.zeros(4, 1, 32, 32, dtype=torch.float64)
    kept = [(0, 0), (2, 3), (20, 1), (1, 28)]
    for mode in kept:
        X[(slice(None), 0, *mode)] = 2 + noise(4, seed=sum(mode)).abs()
    y = get_transform("dct").inverse(X, 2)
    fields = Fields(input=y, target=y)
    found = quick(fields)
    assert (found.recommendation.selection, found.recommendation.modes) == ("shared top-m", 4)
    assert found.coefficients_needed["low-pass"] == 29**2
    assert isinstance(found.modes, ModeSet)
    assert sorted(map(tuple, found.modes.indices.tolist())) == sorted(kept)
    assert not found.monotone
    T1(1, 1, (32, 32), found.modes, width=4, depth=1)(y.float())
    made = spectra(fields, modes=found.modes, progress=False)
    assert found.cache["bytes"] == sum(tensor.nbytes for tensor in made.tensors.values())
    assert measure_rates(fields, "dct", found.modes, "cpu").speed_up > 0


def test_a_set_must_halve_the_work_of_a_layer():
    # In one dimension a low-pass of m modes and a set of M take m(48 + m) and M(48 + M) products for each channel.
    for count, selection in ((18, "low-pass"), (17, "shared top-m")):
        X = torch.zeros(2, 1, 64, dtype=torch.float64)
        X[..., torch.arange(count) * 28 // (count - 1)] = 1 + noise(2, 1, count).abs()
        found = quick(Fields(input=get_transform("dct").inverse(X, 1)), tolerance=1e-6)
        needed = found.bases["dct"].needed
        assert (needed["low-pass"], needed["shared top-m"]) == (29, count)
        assert (count * (48 + count) <= 29 * (48 + 29) / 2) == (selection == "shared top-m")
        assert found.recommendation.selection == selection


def test_a_spectrum_is_monotone_if_no_shell_has_twice_the_energy_of_a_lower_one():
    decay = (torch.arange(32.0, dtype=torch.float64) + 1) ** -2
    signs = noise(5, 1, 32).sign()
    falling = get_transform("dct").inverse(decay * signs, 1)
    assert quick(Fields(input=falling)).bases["dct"].rises_at is None
    for factor, rises in ((1.8, None), (2.5, (6,))):
        bump = decay.clone()
        bump[5] = bump[4] * math.sqrt(factor)
        rising = quick(Fields(input=get_transform("dct").inverse(bump * signs, 1)), tolerance=0.001)
        assert rising.bases["dct"].rises_at == rises
    # Beyond what the tolerance can see nothing matters.
    late = decay.clone()
    late[30] = 0.01
    assert (
        quick(Fields(input=get_transform("dct").inverse(late * signs, 1)), tolerance=0.2).bases["dct"].rises_at is None
    )


def test_every_frame_of_a_trajectory_is_a_field():
    y = smooth(12, (10, 14)) + 1
    pairs = quick(Fields(input=y)).to_dict()
    films = quick(Fields(trajectory=y.reshape(3, 4, 1, 10, 14))).to_dict()
    assert films["fields_analysed"] == pairs["fields_analysed"] == 12
    assert films["bases"]["dct"]["low_pass"]["trajectory"]["error"] == pytest.approx(
        pairs["bases"]["dct"]["low_pass"]["input"]["error"]
    )
    assert films["coefficients_needed"] == pairs["coefficients_needed"]


def test_blocks_give_what_all_at_once_gives_in_one_pass(monkeypatch, tmp_path):
    fields = Fields(trajectory=smooth(30, (16, 12)).reshape(5, 6, 1, 16, 12).float()).save(tmp_path / "x.h5")
    whole = quick(fields).to_dict()
    passes, blocks = [], Fields.blocks
    monkeypatch.setattr(module, "BLOCK_MEGABYTES", 4 * 16 * 12 * 4 / 2**20)
    monkeypatch.setattr(Fields, "blocks", lambda self, *a, **k: passes.append(a) or blocks(self, *a, **k))
    parts = quick(fields).to_dict()
    assert len(passes) == 1
    assert parts["coefficients_needed"] == whole["coefficients_needed"]
    for name in BASES:
        ours, theirs = parts["bases"][name], whole["bases"][name]
        assert ours["low_pass"]["trajectory"]["error"] == pytest.approx(theirs["low_pass"]["trajectory"]["error"])
        assert ours["top_m"]["error"] == pytest.approx(theirs["top_m"]["error"])


def test_beyond_the_memory_for_single_fields_evenly_spread_ones_stand_for_all(monkeypatch):
    y = smooth(20, (8, 8))
    y[3] = 2.0  # constant, and passed over
    monkeypatch.setattr(module, "HELD_NUMBERS", 5 * 64)
    found = quick(Fields(input=y))
    assert found.fields_held == 5
    varying = y[[i for i in range(20) if i != 3]]
    order = TopM(10).fit(y)
    shown, norm = varying[::4], (varying - varying.mean((2, 3), keepdim=True))[::4].flatten(1).norm(dim=1)
    basis = found.bases["dct"]
    expected = (tail_energy(shown, order).sum(1).sqrt() / norm).mean().item()
    assert basis.top.error[basis.top.cost.index(10)] == pytest.approx(expected, rel=1e-5)
    assert any("means over 5 evenly spread fields" in note for note in found.notes)
    assert any("1 of 20 input fields are constant" in note for note in found.notes)


@given(scale=st.floats(1e-6, 1e6), offset=st.floats(-100, 100))
def test_units_do_not_matter(scale, offset):
    y = smooth(3, (9, 8))
    changed = quick(Fields(input=scale * (y + offset))).bases["dct"]
    plain = quick(Fields(input=y)).bases["dct"]
    assert changed.needed["low-pass"] == plain.needed["low-pass"]
    assert changed.low_pass["input"].error == pytest.approx(plain.low_pass["input"].error, abs=1e-7)


def test_samples_are_spread_evenly():
    y = smooth(9, (8, 8))
    found = quick(Fields(input=y), samples=3)
    assert found.fields_analysed == 3
    direct = quick(Fields(input=y[[0, 4, 8]]))
    assert found.bases["dct"].low_pass == direct.bases["dct"].low_pass
    assert found.cache["field_bytes"] == 9 * 64 * 8  # the cache is that of all


@pytest.mark.parametrize(
    ("transform", "modes", "numbers", "facts"),
    [("dct", 5, 25, {}), ("fourier", 5, 25, {"grid": "node", "periodic": True}), ("dct", (5, 7), 35, {})],
)
def test_the_cache_weighs_what_it_will(transform, modes, numbers, facts):
    y = smooth(6, (12, 12)).float()
    fields = Fields(input=y, target=torch.cat([y, y], 1), **facts)
    made = spectra(fields, transform, modes, cache=False, progress=False)
    weight = cache_weight(fields, numbers)
    assert weight["bytes"] == sum(tensor.nbytes for tensor in made.tensors.values())
    assert weight["field_bytes"] == y.nbytes * 3
    assert weight["ratio"] == weight["bytes"] / weight["field_bytes"]


@pytest.mark.parametrize("grid", [(32,), (12, 10), (6, 5, 4)])
def test_rates_are_measured_and_leave_the_random_numbers_alone(grid):
    fields = Fields(input=smooth(2, grid))
    torch.manual_seed(5)
    found = analyze(fields, tolerance=0.2, progress=False)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    rates = found.rates
    assert rates.speed_up == pytest.approx(rates.fno_seconds / rates.t1_seconds)
    assert rates.threads == torch.get_num_threads()
    assert rates.device.startswith("cpu")
    assert "Measured on cpu" in rates.sentence
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_mixed_set_of_channels_says_what_each_needs():
    grid = (16, 16)
    rough, calm, flat = noise(3, 1, *grid), smooth(3, grid), torch.full((3, 1, *grid), 4.0, dtype=torch.float64)
    y = torch.cat([rough, calm, flat], 1)
    found = quick(Fields(input=y, channels=("rough", "calm", "flat"), units={"calm": "K"}), tolerance=0.05)
    needs = {channel.name: channel.modes for channel in found.bases["dct"].channels}
    norm = (calm - calm.mean((2, 3), keepdim=True)).flatten(1).norm(dim=1)
    errors = [(tail_energy(calm, m).sum(1).sqrt() / norm).mean().item() for m in range(1, 17)]
    assert needs["calm"] == 1 + next(i for i, error in enumerate(errors) if error <= 0.05)
    assert needs["rough"] > needs["calm"]
    assert needs["flat"] is None
    assert [channel.unit for channel in found.bases["dct"].channels] == ["", "K", ""]


def test_a_small_rough_channel_that_drowns_is_named():
    y = torch.cat([1e3 * smooth(3, (16, 16)), noise(3, 1, 16, 16)], 1)
    found = quick(Fields(input=y, channels=("height", "wind")), tolerance=0.05)
    assert found.recommendation.coefficients < 128
    assert any("wind by itself would need a low-pass of 16 modes" in note for note in found.notes)
    alike = quick(Fields(input=torch.cat([smooth(3, (16, 16)), smooth(3, (16, 16), seed=1)], 1)), tolerance=0.05)
    assert not any("by itself" in note for note in alike.notes)


def test_the_table_holds_the_numbers():
    from rich.console import Console

    found = analyze(Fields(input=smooth(3, (12, 12)), channels=("heat",)), progress=False)
    console = Console(width=500, file=io.StringIO())
    console.print(found.table())
    text = console.file.getvalue()
    assert found.recommendation.reason in text
    assert found.recommendation.meaning in text
    for number in found.coefficients_needed.values():
        assert f"{number:,.0f}" in text
    assert "heat" in text
    assert "Measured on" in text


def test_one_field_is_analysed_with_a_warning():
    found = quick(Fields(input=smooth(1, (16, 16))))
    assert any("Only one field was analysed" in note for note in found.notes)
    assert found.coefficients_needed["shared top-m"] == found.coefficients_needed["top-m per field"]


def test_masked_fields_are_mentioned():
    y = smooth(2, (8, 8)).float()
    y[0, 0, 0, 0] = math.nan
    found = quick(Fields(input=y, target=y, missing=math.nan))
    assert any("Points that do not count" in note for note in found.notes)
    with pytest.raises(ValueError, match="nan"):
        Fields(input=y)


@pytest.mark.parametrize("films", [False, True])
def test_what_stands_at_points_that_do_not_count_takes_no_modes(films):
    size, inside = (32, 24), torch.zeros(32, 24, dtype=torch.bool)
    inside[12:16, 8:12] = True
    y = idct(torch.randn(6, 2, 5, 5, dtype=torch.float64), 2, size)

    def modes(values, mask=None):
        arrays = {"trajectory": values.unflatten(0, (2, 3))} if films else {"input": y, "target": values}
        hidden = None if mask is None else mask[(None,) * (3 if films else 2)]
        return quick(Fields(**arrays, mask=hidden), tolerance=0.03).recommendation.modes

    assert modes(y) == 5
    assert modes(y.masked_fill(inside, 0.0)) != 5
    assert modes(y.masked_fill(inside, 0.0), inside) == 5
    assert modes(y.masked_fill(inside, 1e3), inside) == 5


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 1, 8, 8), {"tolerance": 0.0}, "tolerance is a relative error between 0 and 1"),
        ((2, 1, 8, 8), {"tolerance": 1.0}, "tolerance is a relative error between 0 and 1"),
        ((2, 1, 8, 8), {"tolerance": math.nan}, "tolerance is a relative error between 0 and 1"),
        ((2, 1, 8, 8), {"samples": 0}, "samples must be at least 1"),
        ((2, 1, 1, 1), {}, "a single grid point, so a single mode"),
        ((2, 1, 8, 8), {"constant": True}, "every input field is constant"),
    ],
)
def test_bad_input_is_one_sentence(shape, options, message):
    y = torch.full(shape, 280.1) if options.pop("constant", False) else noise(*shape)
    with pytest.raises(ValueError, match=message):
        quick(Fields(input=y), **options)


def test_the_counts_of_the_climate():
    folder = os.environ.get("TRANSFORM_ONCE_DATA")
    if not folder:
        pytest.skip("TRANSFORM_ONCE_DATA does not name a folder with the real data sets")
    wind = np.load(Path(folder) / "climate" / "erainterim_zuv.npz", allow_pickle=False)["u"]
    found = quick(Fields(trajectory=wind.reshape(1, 6, 1, 241, 480), periodic=(False, True)))
    assert found.recommendation.transform == "dct"
    assert found.recommendation.modes == 152
    assert found.coefficients_needed["low-pass"] == 152**2 == 23104
    assert found.coefficients_needed["shared top-m"] == pytest.approx(15000, rel=0.02)
    assert found.coefficients_needed["top-m per field"] == pytest.approx(9600, rel=0.005)
    assert "one fixed set" in found.recommendation.meaning
