"""The study of airfoils: shapes stay apart, units come and go, and a tiny run from data to page."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transform_once.data.fields import Fields
from transform_once.data.formats import read
from transform_once.spectral.transforms import dct, idct
from transform_once.studies import airfoil_flows
from transform_once.studies import airfoils as study
from transform_once.studies.airfoil_flows import Flows, errors, of_fields, read_flows, rebuilt, shapes_of, split
from transform_once.studies.airfoils_page import write_page
from transform_once.studies.study import Results


def made_up(names, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = len(names)
    inside = torch.zeros(count, 1, size, size, dtype=torch.bool)
    inside[:, :, size // 4 : size // 2, size // 2 : size // 2 + 2] = True
    stream = 10 + 60 * torch.rand(count, 2, generator=generator)
    fields = torch.randn(count, 3, size, size, generator=generator)
    return airfoil_flows._flows(names, stream, inside, fields)


@given(st.lists(st.integers(0, 11), min_size=12, max_size=40), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_no_shape_is_in_two_parts(numbers, held):
    names = [f"foil_{n}_{100 + i}_{i}" for i, n in enumerate([*range(5), *numbers])]
    for_test = [f"foil_{n}" for n in range(held)][: max(0, len({*range(5), *numbers}) - 4)]
    parts = split(made_up(names, 4), for_test)
    shapes = {part: set(shapes_of(flows.names)) for part, flows in parts.items()}
    assert not shapes["train"] & shapes["validation"]
    assert not shapes["train"] & shapes["test"]
    assert not shapes["validation"] & shapes["test"]
    assert set(for_test) <= shapes["test"]
    assert sorted(name for flows in parts.values() for name in flows.names) == sorted(names)
    assert all(len(flows) for flows in parts.values())


@given(st.integers(5, 30))
@settings(max_examples=20, deadline=None)
def test_every_shape_is_in_the_test_of_one_fold(count):
    flows = made_up([f"foil{n}_100_{n}" for n in range(count)], 4)
    folds = [split(flows, fold=fold) for fold in range(airfoil_flows.FOLDS)]
    tested = [name for parts in folds for name in parts["test"].names]
    assert sorted(tested) == sorted(flows.names)
    assert {len(parts["validation"]) for parts in folds} == {max(1, round(0.15 * count))}


def test_the_numbers_of_samples_are_compared_with_the_same_seeds():
    def row(table, seed, train, label="FNO"):
        return {"table": table, "label": label, "seed": seed, "train": train}

    rows = [row("main", "0", "90"), row("main", "1", "86"), row("main", "2", "50"), row("main", "0", "90", "UNet")]
    fewer = [row("samples", "0", "25"), row("samples", "1", "25")]
    found = study._by_samples([*rows, *fewer, row("ablation", "0", "90")])
    assert found == [*fewer, row("main", "0", 88), row("main", "1", 88)]


def test_too_few_shapes():
    with pytest.raises(ValueError, match="3 different airfoils"):
        split(made_up(["a_1_2", "a_3_4", "b_5_6"], 4))


def test_shapes_with_underscores_in_their_name():
    assert shapes_of(["DP1,79-8,37_DS_1557_53", "naca0012_986_-280"]) == ["DP1,79-8,37_DS", "naca0012"]


def test_pressure_has_no_level_and_nothing_is_inside():
    flows = made_up(["a_1_2", "b_3_4"])
    for number in range(2):
        outside = ~flows.inside[number, 0]
        assert flows.fields[number, 0][outside].mean() == pytest.approx(0, abs=1e-6)
        assert flows.fields[number][:, ~outside].abs().max() == 0
    pairs = flows.pairs()
    assert torch.equal(pairs.mask, flows.inside)
    assert flows.pairs(masked=False).mask is None
    direction = pairs.input[:, :2, 0, 0]
    assert torch.allclose(direction.norm(dim=1), torch.ones(2))
    assert torch.equal(pairs.input[:, 2:] == 1, flows.inside)
    assert pairs.input[:, :2].masked_select(flows.inside).abs().max() == 0


def test_physical_units_and_back():
    flows = made_up(["a_1_2", "b_3_4", "c_5_6"])
    sigma = flows.physical.std((0, 2, 3))
    pairs = flows.pairs(sigma)
    assert torch.allclose(pairs.target.std((0, 2, 3)), torch.ones(3), atol=1e-4)
    back = flows.dimensionless(pairs.target, sigma)
    outside = (~flows.inside).expand_as(back)
    assert torch.allclose(back[outside], flows.fields[outside], atol=1e-5)
    assert errors(flows.fields, flows)["relative_l2"] == 0
    # What was read from physical files is the same flow.
    stream = flows.stream[..., None, None] * ~flows.inside
    fields = Fields(
        input=torch.cat([stream, flows.inside.float()], 1), target=flows.physical, names=flows.names, grid="node"
    )
    again = of_fields(fields)
    assert torch.allclose(again.fields, flows.fields, atol=1e-5)
    assert torch.allclose(again.level, flows.level, atol=1e-5)


def test_errors_against_direct_computation():
    flows = made_up(["a_1_2", "b_3_4"])
    found = errors(flows.fields + 0.1, flows)  # what is predicted inside does not matter
    truth, outside = flows.fields.double().numpy(), ~flows.inside[:, 0].numpy()
    for name, channels in (("relative_l2", slice(0, 3)), ("velocity_y", slice(2, 3))):
        count = channels.stop - channels.start
        ratios = [
            0.1 * np.sqrt(count * free.sum()) / np.linalg.norm(y[channels])
            for y, free in zip(truth, outside, strict=True)
        ]
        assert found[name] == pytest.approx(np.mean(ratios), rel=1e-5)
        assert name != "relative_l2" or found["median"] == pytest.approx(np.median(ratios), rel=1e-5)


def test_modes_that_need_not_hold_zeros_inside_leave_less():
    flows = made_up(["a_1_2"], 16)
    wave = torch.cos(torch.linspace(0, 2, 16)) + torch.linspace(1, 2, 16)[:, None]
    flows = airfoil_flows._flows(flows.names, flows.stream, flows.inside, wave.expand(1, 3, 16, 16))
    zeros = idct(dct(flows.fields, 2, 6), 2, (16, 16))
    assert errors(rebuilt(flows, 6), flows)["relative_l2"] < 0.2 * errors(zeros, flows)["relative_l2"]
    assert errors(rebuilt(flows, 16), flows)["relative_l2"] < 1e-5


def test_the_mirror_takes_flows_to_flows():
    flows = made_up(["a_1_2"])
    mirrored = Flows(flows.names, flows.stream * torch.tensor([1.0, -1.0]), flows.inside.flip(3), *_mirror(flows))
    motion = airfoil_flows.MIRROR.motion(torch.zeros(1))
    for name in ("input", "target"):
        moved = motion.fields(getattr(flows.pairs(), name), grid="node", periodic=False, inputs=name == "input")
        assert torch.allclose(moved, getattr(mirrored.pairs(), name), atol=1e-6)


def _mirror(flows):
    fields = flows.fields.flip(3) * torch.tensor([1.0, 1.0, -1.0]).reshape(1, 3, 1, 1)
    return fields, flows.level


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "data" / "airfoil"
    (place / "dfp_original").mkdir(parents=True)
    flows = made_up([f"foil{n}_{n}_{n}" for n in range(9)], 128)
    np.savez(
        place / "openfoam.npz",
        fields=flows.fields.numpy().astype(np.float16),
        mask=flows.inside[:, 0].numpy().astype(np.uint8),
        freestream=flows.stream.numpy(),
        name=np.array(flows.names),
        residual_ux=np.zeros(9),
    )
    for number in range(2):
        stream = flows.stream[number, :, None, None] * ~flows.inside[number]
        whole = torch.cat([stream, flows.inside[number].float(), flows.physical[number]])
        np.savez(place / "dfp_original" / f"foil{number}_1_{number}.npz", a=whole.double().numpy())
    return tmp_path / "data"


def test_reading_and_a_stride(folder):
    flows = read_flows(folder / "airfoil" / "openfoam.npz", stride=4)
    assert flows.fields.shape == (9, 3, 32, 32)
    original = of_fields(read(folder / "airfoil" / "dfp_original", stride=4))
    assert torch.allclose(original.fields, flows.fields[:2], atol=2e-2)  # the level is over other points
    assert torch.allclose(original.stream, flows.stream[:2])


FIGURES = ("truncation", "spectrum", "predictions", "angles", "samples")


def test_the_study_runs_resumes_and_draws(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "QUICK", {name: study.QUICK[name] for name in ("FNO", "T1+vp")})
    monkeypatch.setattr(study, "SAMPLES", (2,))
    output, runs = tmp_path / "docs" / "results", tmp_path / "runs"
    options = {"output": output, "runs": runs, "device": "cpu", "quick": True}
    with monkeypatch.context() as patch:
        patch.setattr(study.Study, "figures", lambda *_: {})
        study.airfoils(folder, seconds=0, **options)
    assert not (output / "airfoils-quick.csv").exists()
    study.airfoils(folder, **options)
    path = output / "airfoils-quick.csv"
    rows = Results(path).rows
    assert {(row["label"], row["part"]) for row in rows if row["table"] == "main"} == {
        (model, part) for model in ("FNO", "T1+vp") for part in ("test", "original")
    }
    changed = {tuple(row[what] for what in ("symmetric", "scaled", "masked")) for row in rows}
    without = {("False", "True", "True"), ("True", "False", "True"), ("True", "True", "False")}
    assert changed == {("", "", ""), ("True", "True", "True"), *without}  # the floors have no settings
    budgets = {(row["label"], json.loads(row["case"])["options"]["budget"]) for row in rows if row["seconds"]}
    assert budgets == {("FNO", study.QUICK_BUDGET), ("T1+vp", study.QUICK_BUDGET / 4)}
    assert {row["train"] for row in rows if row["table"] == "samples"} == {"2"}
    held = {row["samples"] for row in rows if row["part"] == "original"}
    assert held == {"2"}
    figures = {picture.name for picture in (tmp_path / "docs" / "figures").iterdir()}
    assert figures == {f"airfoils-quick-{stem}.png" for stem in FIGURES}
    assert (output / "airfoils-quick.html").stat().st_size > 10_000
    monkeypatch.setattr(study, "train", None)  # whatever would train again, fails
    monkeypatch.setattr(study.Study, "figures", lambda *_: {})
    before = path.read_bytes()
    study.airfoils(folder, **options)
    assert path.read_bytes() == before
    page = tmp_path / "reproduction.md"
    write_page(path, page)
    assert "no mirror symmetry" in page.read_text()


def test_the_real_shapes():
    folder = os.environ.get("TRANSFORM_ONCE_DATA")
    if not folder:
        pytest.skip("TRANSFORM_ONCE_DATA does not name a folder with the real data sets")
    flows = read_flows(Path(folder) / "airfoil" / "openfoam.npz", stride=4)
    parts = split(flows)
    assert sum(map(len, parts.values())) == 136
    assert len(parts["train"]) > 80
    original = of_fields(read(Path(folder) / "airfoil" / "dfp_original", stride=4))
    speed = [float(name.split("_")[1]) / 100 for name in original.names]
    assert original.stream[:, 0].tolist() == pytest.approx(speed, rel=0.01)
    assert 0.8 < original.fields[:, 1].mean() < 1.1
