"""The figures of the paper: the numbers of their tables against direct computation, and what is wrong with an input."""

import csv
import json
import math
import statistics

import numpy as np
import pytest
import torch

from transform_once.data.fields import Fields
from transform_once.evaluation.evaluate import full_evaluation, save_evaluation
from transform_once.evaluation.speed import MEMORY, TASKS, Timing
from transform_once.models.operator import save
from transform_once.models.t1 import T1
from transform_once.reports import paper_data, paper_speed, paper_variance
from transform_once.reports.paper_figures import reproduce_verb
from transform_once.spectral.modes import TopM, irreducible_loss
from transform_once.spectral.transforms import idct

CPU = torch.device("cpu")


def table(path, **wanted):
    """The rows of a CSV with these values, x and y as numbers."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[name] == value for name, value in wanted.items())]
    for row in rows:
        for name in ("x", "y"):
            row[name] = float(row[name]) if row[name] else None
    return rows


def xy(path, **wanted):
    return {row["x"]: row["y"] for row in table(path, **wanted)}


def write(path, values, **options):
    """Fields (n, c, *grid) as a file."""
    Fields(input=torch.as_tensor(values), **options).save(path)
    return path


def field_of(modes, size=(16, 12)):
    """A field whose DCT has these coefficients, by multi-index."""
    X = torch.zeros(1, 1, *size, dtype=torch.float64)
    for index, value in modes.items():
        X[(0, 0, *index)] = value
    return idct(X, len(size))


def fake_run(
    folder, *, seed=0, error=0.1, train=10, grid=(16, 12), frames=None, model="T1", kept=True, index=(1, 0), step=None
):
    """A run folder with known numbers: predictions are the target times 1 + error."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    kinds = ("trajectory",) if frames else ("input", "target")
    about = {
        "format": "transform-once run 1",
        "model": {"class": model, "config": {"modes": 4}, "parameters": 10},
        "data": {
            "source": "data.h5",
            "fingerprint": str(train),
            "train": train,
            "resolution": list(grid),
            "channels": {kind: ["vorticity"] for kind in kinds},
            "units": {"vorticity": "1/s"},
        },
        "training": {"epochs": 1000 // train, "seed": seed},
        "seeds": [seed],
    }
    (folder / "run.json").write_text(json.dumps(about))
    metrics = {"samples": 2, "relative_l2": error, "resolution": list(grid)}
    metrics["kspace"] = {"J": 0.6 * error, "R_o": 0.8 * error, "transform": "dct", "modes": [4] * len(grid)}
    shape = (2, *((frames,) if frames else ()), 1, *grid)
    target = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    inside = np.zeros(grid, dtype=bool)
    inside[tuple(slice(0, 4) for _ in grid)] = True
    arrays = {
        "target": target,
        "prediction": (1 + error) * target,
        "index": np.array(index),
        "target_spectrum": np.ones((1, *grid)),
        "error_spectrum": np.where(inside, 0.1, 1.0 if kept else 2.0)[None],
    }
    if kept:
        arrays["kept"] = inside
    if frames:
        metrics |= {"per_step": {"relative_l2": step or [error] * frames}, "times": [0.5 * t for t in range(frames)]}
        arrays["times"] = np.array(metrics["times"])
    (folder / "metrics.json").write_text(json.dumps(metrics))
    np.savez(folder / "examples.npz", **arrays)
    return folder


def is_picture(path):
    return path.stat().st_size > 5000 and path.read_bytes().startswith(b"\x89PNG")


# --- variance


@pytest.mark.parametrize("kind", paper_variance.KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("resolution", [64, 128])
def test_the_variance_collapses_with_xavier_and_not_with_vp(kind, resolution):
    found = paper_variance.variances(kind, resolution, 24, CPU)
    assert len(found) == paper_variance.SAMPLES * paper_variance.CHANNELS
    expected = 1.0 if "vp" in kind.name else kind.expected(24, resolution)
    assert found.mean().item() == pytest.approx(expected, rel=0.02)
    kept = {"FNO, xavier": 0.5449 * 64**2, "FFNO, xavier": 1.453 * 64 * resolution, "T1, xavier": 24**2}
    if kind.name in kept:
        assert expected == pytest.approx(kept[kind.name] / resolution**2, rel=1e-3)


def test_the_variance_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(paper_variance, "SAMPLES", 8)
    reproduce_verb("variance", tmp_path, resolutions=[16, 24], modes=6)
    path = tmp_path / "variance.csv"
    for kind in paper_variance.KINDS:
        for resolution in ("16", "24"):
            about = {"series": kind.name, "resolution": resolution}
            fields = table(path, **about, quantity="fields")
            assert sum(row["y"] for row in fields) == 8 * paper_variance.CHANNELS
            (mean,) = table(path, **about, quantity="variance")
            expected = paper_variance.variances(kind, int(resolution), 6, CPU).mean().item()
            assert mean["y"] == pytest.approx(expected, rel=1e-6)
            assert min(row["x"] for row in fields) / 1.1 < mean["y"] < 1.1 * max(row["x"] for row in fields)
    assert is_picture(tmp_path / "variance.png")
    assert "White input is essential" in " ".join(capsys.readouterr().out.split())


def test_a_smooth_field_is_amplified_sevenfold():
    share, factor = paper_variance.smooth_field_factor(24)
    assert share == pytest.approx(0.999, abs=5e-4)
    assert factor == pytest.approx(share * 64**2 / 24**2, rel=0.05)


# --- selection, truncation, spectrum

KNOWN = {(0, 1): 4.0, (2, 0): 2.0, (5, 3): 3.0, (9, 9): 1.0}
TOTAL = 16 + 4 + 9 + 1


def test_the_selections_of_a_known_spectrum(tmp_path, capsys):
    data = write(tmp_path / "known.h5", 5 + field_of(KNOWN))  # the mean is aside
    reproduce_verb("selection", tmp_path, data=data, modes=2)
    path = tmp_path / "selection-known.csv"
    low_pass = xy(path, series="low-pass", quantity="mean relative L2")
    for box, left in ((1, TOTAL), (2, 14), (3, 10), (6, 1)):
        assert low_pass[box * box] == pytest.approx(math.sqrt(left / TOTAL))
    for series in ("one shared top-m set", "top-m chosen per field"):
        best = xy(path, series=series, quantity="mean relative L2")
        assert best[1] == pytest.approx(math.sqrt(14 / TOTAL))
        assert best[4] == pytest.approx(0, abs=1e-6)
    needed = {row["series"]: row["x"] for row in table(path) if row["quantity"].startswith("coefficients")}
    assert needed == {"low-pass": 100, "one shared top-m set": 4, "top-m chosen per field": 4}
    panels = {row["series"]: row["y"] for row in table(path) if row["quantity"].endswith("panel")}
    assert panels["panel, low-pass"] == pytest.approx(math.sqrt(14 / TOTAL))
    assert panels["panel, top-m"] == pytest.approx(0, abs=1e-6)
    with np.load(tmp_path / "selection-known.npz") as images:
        np.testing.assert_allclose(images["top_m"], images["original"], atol=1e-6)
        np.testing.assert_allclose(images["low_pass"], 5 + field_of({(0, 1): 4.0})[0, 0], atol=1e-6)
    assert is_picture(tmp_path / "selection-known.png")
    assert "low-pass 100" in " ".join(capsys.readouterr().out.split())


def test_selections_of_several_fields_agree_with_the_library(tmp_path):
    values = torch.randn(3, 2, 10, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = write(tmp_path / "noise.h5", values)
    reproduce_verb("selection", tmp_path, data=data, sample=2, channel=1)
    path = tmp_path / "selection-noise.csv"
    fields = (values - values.mean((-2, -1), keepdim=True)).flatten(0, 1)[:, None]
    low_pass = xy(path, series="low-pass", quantity="mean relative L2")
    assert low_pass[25] == pytest.approx(irreducible_loss(fields, 5), rel=1e-6)
    assert low_pass[63] == pytest.approx(irreducible_loss(fields, (9, 7)), rel=1e-6)
    single = xy(path, series="top-m chosen per field", quantity="mean relative L2")
    assert single[16] == pytest.approx(irreducible_loss(fields, TopM(16, per="field").fit(fields)), rel=1e-6)
    with np.load(tmp_path / "selection-noise.npz") as images:
        np.testing.assert_allclose(images["original"], values[2, 1])


def test_truncations_agree_with_numpy(tmp_path):
    values = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reproduce_verb("truncation", tmp_path, data=write(tmp_path / "noise.h5", values), modes=8)
    path = tmp_path / "truncation-noise.csv"
    fft = {q: xy(path, series="real FFT, 4m² numbers", quantity=q) for q in ("relative L2", "PSNR in dB")}
    absolute = xy(path, series="DCT, m² numbers", quantity="mean absolute error")
    dct = xy(path, series="DCT, m² numbers", quantity="relative L2")
    assert set(dct) == set(fft["relative L2"]) == {4 * m * m / 256 for m in range(1, 8)}
    for m in (1, 3, 7):
        kept = np.zeros((16, 9))
        kept[np.ix_([*range(m), *range(-m, 0)], range(m))] = 1
        rebuilt = np.fft.irfft2(kept * np.fft.rfft2(values.numpy()), (16, 16))
        error = rebuilt - values.numpy()
        norms = np.linalg.norm(error.reshape(2, -1), axis=1) / np.linalg.norm(values.reshape(2, -1).numpy(), axis=1)
        cost = 4 * m * m / 256
        assert fft["relative L2"][cost] == pytest.approx(norms.mean(), rel=1e-6)
        peak = values.max().item() - values.min().item()
        assert fft["PSNR in dB"][cost] == pytest.approx(10 * math.log10(peak**2 / np.mean(error**2)), rel=1e-6)
        assert dct[cost] == pytest.approx(irreducible_loss(values, 2 * m), rel=1e-6)
        lost = values - idct(torch.nn.functional.pad(_dct(values, 2 * m), (0, 16 - 2 * m, 0, 16 - 2 * m)), 2)
        assert absolute[cost] == pytest.approx(lost.abs().mean().item(), rel=1e-6)
    assert is_picture(tmp_path / "truncation-noise.png")
    assert "<svg" in (tmp_path / "truncation-noise.svg").read_text()


def _dct(values, modes):
    n = values.shape[-1]
    k, i = np.arange(modes)[:, None], np.arange(n)[None]
    rows = np.sqrt((2 - (k == 0)) / n) * np.cos(np.pi * k * (2 * i + 1) / (2 * n))
    rows = torch.from_numpy(rows)
    return rows @ values @ rows.T


def test_truncation_of_one_and_three_axes(tmp_path):
    for ndim in (1, 3):
        data = write(tmp_path / f"a{ndim}.h5", torch.randn(1, 1, *(8,) * ndim))
        reproduce_verb("truncation", tmp_path, data=data)
        costs = {float(row["cost"]) for row in table(tmp_path / f"truncation-a{ndim}.csv")}
        assert costs == {(2 * m) ** ndim for m in (1, 2, 3)}


@pytest.mark.parametrize("figure", ["selection", "truncation", "spectrum"])
def test_a_single_mode_and_one_sample_are_drawn(tmp_path, figure):
    data = write(tmp_path / "one.h5", field_of({(3, 0): 2.0}))
    reproduce_verb(figure, tmp_path, data=data)
    assert is_picture(tmp_path / f"{figure}-one.png")
    assert len(table(tmp_path / f"{figure}-one.csv")) > 3


def test_the_spectrum_of_a_known_field(tmp_path):
    x, y = field_of({(3, 0): 2.0}), field_of({(0, 0): 1.0, (8, 6): 3.0})
    Fields(input=x, target=y, channels=("a",), units={"a": "m"}).save(tmp_path / "pair.h5")
    reproduce_verb("spectrum", tmp_path, data=tmp_path / "pair.h5")
    path = tmp_path / "spectrum-pair.csv"
    by_wave = xy(path, series="input: a in m", quantity="RMS coefficient by half-waves")
    shell = sum(round(math.hypot(i, j)) == 3 for i in range(16) for j in range(12))
    assert by_wave[3] == pytest.approx(2 / math.sqrt(shell), rel=1e-5)
    assert by_wave[1] == pytest.approx(0, abs=1e-6)
    inside = {row["series"]: row["y"] for row in table(path) if row["quantity"].startswith("share")}
    assert inside == {"input: a in m": pytest.approx(1), "target: a in m": pytest.approx(0.1, rel=1e-5)}
    with np.load(tmp_path / "spectrum-pair.npz") as images:
        assert images["spectrum_1"][8, 6] == pytest.approx(3, rel=1e-6)
        np.testing.assert_allclose(images["field_0"], x[0, 0], atol=1e-6)


def test_figures_without_data_make_their_own(tmp_path, monkeypatch):
    flow, smoke = paper_data.navier_stokes_fields(CPU, 2, 16, 0.01, 1.0), paper_data.smoke_fields(CPU, (16, 12))
    monkeypatch.setattr(paper_data, "navier_stokes_fields", lambda device: flow)
    monkeypatch.setattr(paper_data, "smoke_fields", lambda device: smoke)
    reproduce_verb("selection", tmp_path)
    with np.load(tmp_path / "selection.npz") as images:
        np.testing.assert_allclose(images["original"], smoke.trajectory[0, -1, 0])  # the last frame
    reproduce_verb("truncation", tmp_path, samples=2)
    reproduce_verb("spectrum", tmp_path)
    assert is_picture(tmp_path / "spectrum.png")
    assert {row["series"] for row in table(tmp_path / "spectrum.csv")} == {
        "input: vorticity in 1/s",
        "target: vorticity in 1/s",
    }


# --- runs


def test_predictions_and_what_lies_outside_the_kept_modes(tmp_path, capsys):
    runs = [fake_run(tmp_path / "t1"), fake_run(tmp_path / "fno", model="FNO", kept=False, error=0.5)]
    reproduce_verb("predictions", tmp_path, runs=runs)
    path = tmp_path / "predictions.csv"
    floor = math.sqrt((192 - 16) / 192)
    for series, factor in (("T1", 1), ("FNO", 2)):
        (outside,) = table(path, series=series, quantity="error outside the kept modes")
        (least,) = table(path, series=series, quantity="R_o of the kept modes")
        assert (outside["x"], outside["y"]) == (16, pytest.approx(factor * floor))
        assert least["y"] == pytest.approx(floor)
        lowest = xy(path, series=series, quantity="error outside the lowest modes")
        assert lowest[9] == pytest.approx(math.sqrt((7 * 0.01 + factor**2 * 176) / 192))
        assert lowest[192] == 0
        assert xy(path, series=series, quantity="R_o")[25] == pytest.approx(math.sqrt(167 / 192))
    (error,) = table(path, series="FNO", quantity="relative L2 of the run fno")
    assert error["y"] == 0.5
    with np.load(tmp_path / "predictions.npz") as images, np.load(runs[1] / "examples.npz") as examples:
        np.testing.assert_allclose(images["prediction_1"], 1.5 * images["truth_1"], rtol=1e-6)
        np.testing.assert_allclose(images["truth_1"], examples["target"][1, 0])  # sample 0 is the second
    assert is_picture(tmp_path / "predictions.png")
    assert "share no test sample" not in " ".join(capsys.readouterr().out.split())


def test_runs_without_a_common_sample_show_their_own(tmp_path, capsys):
    runs = [fake_run(tmp_path / "a"), fake_run(tmp_path / "b", model="FNO", index=(8, 9))]
    reproduce_verb("predictions", tmp_path, runs=runs)
    assert "share no test sample" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="sample 1 is not among the examples of all runs"):
        reproduce_verb("predictions", tmp_path, runs=runs, sample=1)


def test_every_run_predicts_the_sample_of_the_data_given(tmp_path):
    x = torch.randn(4, 1, 8, 6)
    data = Fields(input=x, target=x.flip(2)).save(tmp_path / "data.h5")
    runs = []
    for seed in range(2):
        folder = fake_run(tmp_path / f"r{seed}", model=f"T{seed}")
        torch.manual_seed(seed)
        model = T1(1, 1, (8, 6), 3, 4, 1).eval()
        save(model, folder / "model.safetensors")
        save_evaluation(folder, full_evaluation([model], data, progress=False))
        runs.append((folder, model))
    reproduce_verb("predictions", tmp_path, data=tmp_path / "data.h5", sample=2, runs=[folder for folder, _ in runs])
    with np.load(tmp_path / "predictions-data.npz") as images, torch.no_grad():
        for number, (_, model) in enumerate(runs):
            np.testing.assert_allclose(images[f"truth_{number}"], x[2, 0].flip(0))
            np.testing.assert_allclose(images[f"prediction_{number}"], model(x[2:3])[0, 0], atol=1e-6)


def test_the_exponent_of_a_scaling_law(tmp_path):
    folders = []
    for train in (10, 20, 40):
        for seed, factor in enumerate((0.9, 1.1)):
            error = factor * 2 / math.sqrt(train)
            folders.append(fake_run(tmp_path / f"{train}-{seed}", train=train, seed=seed, error=error))
    folders.append(fake_run(tmp_path / "alone", model="FNO"))
    reproduce_verb("scaling", tmp_path, runs=folders)
    path = tmp_path / "scaling.csv"
    (exponent,) = table(path, series="T1", quantity="exponent")
    assert exponent["y"] == pytest.approx(-0.5)
    for row in table(path, series="T1", quantity="relative L2"):
        errors = [factor * 2 / math.sqrt(row["x"]) for factor in (0.9, 1.1)]
        assert row["y"] == pytest.approx(statistics.fmean(errors))
        assert float(row["deviation"]) == pytest.approx(statistics.stdev(errors))
        assert row["runs"] == "2"
    assert not table(path, series="FNO")
    assert is_picture(tmp_path / "scaling.png")


def test_rollouts(tmp_path):
    steps = [0.1, 0.2, None, 0.4]
    runs = [
        fake_run(tmp_path / "a", frames=4, error=0.3),
        fake_run(tmp_path / "b", frames=4, error=0.5, seed=1),
        fake_run(tmp_path / "c", frames=4, model="FNO", step=steps),
    ]
    reproduce_verb("rollout", tmp_path, runs=runs)
    path = tmp_path / "rollout.csv"
    first = table(path, series="T1", quantity="relative L2")
    assert [row["x"] for row in first] == [0, 0.5, 1, 1.5]
    assert [row["y"] for row in first] == [pytest.approx(0.4)] * 4
    assert float(first[0]["deviation"]) == pytest.approx(statistics.stdev([0.3, 0.5]))
    second = [row["y"] for row in table(path, series="FNO", quantity="relative L2")]
    assert second[:2] == [0.1, 0.2]
    assert math.isnan(second[2])
    shown = table(path, series="T1", quantity="relative L2 of the frame shown")
    assert [row["y"] for row in shown] == [pytest.approx(0.3, rel=1e-5)] * 4
    assert is_picture(tmp_path / "rollout.png")


# --- what is wrong


@pytest.mark.parametrize("figure", ["predictions", "scaling", "rollout"])
def test_runs_must_be_given_and_be_whole(tmp_path, figure):
    with pytest.raises(ValueError, match=f"the figure {figure} shows trained models: give run folders with --runs"):
        reproduce_verb(figure, tmp_path)
    bare = fake_run(tmp_path / "bare", frames=4)
    (bare / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        reproduce_verb(figure, tmp_path, runs=[bare])
    new = fake_run(tmp_path / "new", frames=4)
    (new / "metrics.json").unlink()
    with pytest.raises(ValueError, match=r"new has no metrics.json: run `t1 evaluate`"):
        reproduce_verb(figure, tmp_path, runs=[new])
    assert not list(tmp_path.glob("*.png"))


def test_runs_of_another_kind_are_refused(tmp_path):
    pairs, films = fake_run(tmp_path / "pairs"), fake_run(tmp_path / "films", frames=3)
    with pytest.raises(ValueError, match="films predicts rollouts"):
        reproduce_verb("predictions", tmp_path, runs=[films])
    with pytest.raises(ValueError, match="pairs has no errors by step"):
        reproduce_verb("rollout", tmp_path, runs=[pairs])
    with pytest.raises(
        ValueError, match="at least two different numbers of training samples; these were trained on 10"
    ):
        reproduce_verb("scaling", tmp_path, runs=[pairs])
    with pytest.raises(ValueError, match="predicts 1 channels, numbered from 0; got channel 3"):
        reproduce_verb("predictions", tmp_path, runs=[pairs], channel=3)


def test_predictions_that_are_not_finite_are_said(tmp_path):
    folder = fake_run(tmp_path / "blown")
    with np.load(folder / "examples.npz") as file:
        arrays = dict(file)
    arrays["error_spectrum"] = np.full_like(arrays["error_spectrum"], np.inf)
    np.savez(folder / "examples.npz", **arrays)
    with pytest.raises(ValueError, match="the errors of blown are not finite"):
        reproduce_verb("predictions", tmp_path, runs=[folder])


@pytest.mark.parametrize("figure", ["selection", "truncation"])
def test_constant_fields_are_refused(tmp_path, figure):
    with pytest.raises(ValueError, match="every field is constant"):
        reproduce_verb(figure, tmp_path, data=write(tmp_path / "flat.h5", torch.full((2, 1, 8, 8), 3.3)))


@pytest.mark.parametrize("figure", ["selection", "truncation", "spectrum"])
def test_nan_and_a_single_point_are_refused(tmp_path, figure):
    values = np.ones((2, 8, 8), dtype=np.float32)
    values[1, 2, 3] = np.nan
    np.savez(tmp_path / "nan.npz", x=values)
    with pytest.raises(ValueError, match=r"NaN|finite"):
        reproduce_verb(figure, tmp_path, data=tmp_path / "nan.npz", input_key="x", axes="nxy", sample=1)
    with pytest.raises(ValueError, match="a single grid point, so a single mode"):
        reproduce_verb(figure, tmp_path, data=write(tmp_path / "point.h5", torch.ones(1, 1, 1, 1)))
    assert not list(tmp_path.glob("*.png"))


def test_a_constant_channel_has_a_spectrum(tmp_path):
    reproduce_verb("spectrum", tmp_path, data=write(tmp_path / "flat.h5", torch.full((1, 1, 8, 8), 2.0)))
    assert xy(tmp_path / "spectrum-flat.csv", quantity="RMS coefficient by half-waves")[0] == pytest.approx(16)
    reproduce_verb("spectrum", tmp_path, data=write(tmp_path / "zero.h5", torch.zeros(1, 1, 8, 8)))


def test_choices_that_do_not_exist_are_one_sentence(tmp_path):
    data = write(tmp_path / "a.h5", torch.randn(2, 1, 8, 8))
    line = write(tmp_path / "line.h5", torch.randn(2, 1, 8))
    with pytest.raises(ValueError, match="numbered from 0; asked for"):
        reproduce_verb("spectrum", tmp_path, data=data, sample=2)
    with pytest.raises(ValueError, match="got channel 1"):
        reproduce_verb("selection", tmp_path, data=data, channel=1)
    with pytest.raises(ValueError, match="modes must lie between 1 and 8"):
        reproduce_verb("truncation", tmp_path, data=data, modes=9)
    for figure in ("selection", "spectrum"):
        with pytest.raises(ValueError, match="these fields have one axis"):
            reproduce_verb(figure, tmp_path, data=line)
    with pytest.raises(ValueError, match="resolutions must be at least 48; got"):
        reproduce_verb("variance", tmp_path, resolutions=[32])
    with pytest.raises(ValueError, match="a speed map needs resolutions of at least 4"):
        reproduce_verb("speed-map", tmp_path, resolutions=[2], widths=[2], depths=[1])


# --- the speed map


def test_a_speed_map_is_written_as_it_goes_and_continues(tmp_path, monkeypatch, capsys):
    measured, path = [], tmp_path / "speed-map-cpu.csv"

    def fake(case, device, execution="eager"):
        assert len(table(path) if path.exists() else []) == 6 * len(measured)
        measured.append(case)
        times = {"t1": 0.002, "fno": 0.001 * case.resolution}
        whole = [Timing(case, task, ends, execution, **times) for task in TASKS[:2] for ends in task.ends]
        return [*whole, *(Timing(case, TASKS[2], ends, execution, note=MEMORY) for ends in TASKS[2].ends)]

    monkeypatch.setattr(paper_speed, "measure", fake)
    sizes = {"resolutions": [16, 32], "widths": [4], "depths": [3]}
    reproduce_verb("speed-map", tmp_path, **sizes, seconds=0)
    assert "3 cells are not measured yet" in " ".join(capsys.readouterr().out.split())
    assert len(measured) == 1
    reproduce_verb("speed-map", tmp_path, **sizes)
    assert [(c.resolution, c.width, c.depth) for c in measured] == [(16, 4, 6), (16, 32, 3), (32, 4, 6), (32, 32, 3)]
    rows = table(path, series="forward, batch 16, fields to modes, eager")
    assert [(row["x"], row["y"]) for row in rows] == [(16, 8), (16, 8), (32, 16), (32, 16)]
    assert all(math.isnan(row["y"]) and row["note"] == MEMORY for row in table(path, ends="modes to modes"))
    assert all(row["hardware"] and "torch" in row["versions"] for row in table(path))
    assert is_picture(tmp_path / "speed-map-cpu.png")
    reproduce_verb("speed-map", tmp_path, **(sizes | {"resolutions": [16, 32, 48]}))
    assert [c.resolution for c in measured[4:]] == [48, 48]  # what is there is not measured again
    reproduce_verb("speed-map", tmp_path, **sizes, opponent="FNO")
    assert [c.opponent for c in measured[6:]] == ["FNO"] * 4
    assert "Hatched cells do not fit in memory" in " ".join(capsys.readouterr().out.split())


def test_a_tiny_speed_map_is_measured(tmp_path):
    sizes = {"resolutions": [8], "widths": [2], "depths": [1], "modes": 3}
    reproduce_verb("speed-map", tmp_path, **sizes)
    rows = table(tmp_path / "speed-map-cpu.csv")
    assert len(rows) == 2 * 6
    for row in rows:
        assert row["y"] == pytest.approx(float(row["fno_ms"]) / float(row["t1_ms"]), rel=1e-6)
