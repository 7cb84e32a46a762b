"""The study of climate: parts that never overlap, baselines against direct computation, and the page it makes."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from transform_once.studies import climate as study
from transform_once.studies.climate import HISTORY, LEADS, Month, baselines, climate, reconstruction, scores
from transform_once.studies.climate_page import write_page
from transform_once.studies.study import Results


def hourly(hours=256, rows=8, columns=10, seed=0):
    """A warming month with a daily cycle, and noise that persists."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(hours, 1, rows, columns, generator=generator)
    for hour in range(1, hours):
        noise[hour] = 0.9 * noise[hour - 1] + 0.4 * noise[hour]
    time = torch.arange(hours).reshape(-1, 1, 1, 1)
    return 280 + 3 * torch.sin(2 * math.pi * time / 24) + 0.01 * time + noise


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "data" / "climate"
    place.mkdir(parents=True)
    np.savez(place / "era5_t2m_uk_hourly_2019-03.npz", t2m=hourly().squeeze(1).numpy())
    random = np.random.default_rng(0)
    smooth = {
        name: np.cumsum(random.normal(size=(2, 3, 12, 16)), axis=-1).astype(np.float32) for name in study.VARIABLES
    }
    np.savez(place / "erainterim_zuv.npz", **smooth)
    return tmp_path / "data"


@pytest.mark.parametrize("hours", [245, 256, 744])
@pytest.mark.parametrize("lead", LEADS)
def test_no_hour_is_in_two_parts(hours, lead):
    month = Month.split(hourly(hours, 2, 3))
    used = {}
    for part in month.parts:
        targets = month.targets(part, lead)
        used[part] = {int(t) - lead * back for t in targets for back in range(HISTORY + 2)}
        assert used[part] <= set(month.parts[part])
    assert not used["train"] & used["validation"]
    assert not used["validation"] & used["test"]
    assert max(used["train"]) < min(used["validation"]) <= max(used["validation"]) < min(used["test"])
    assert sum(map(len, month.parts.values())) == hours


def test_too_few_hours():
    with pytest.raises(ValueError, match="every part needs 49 hours"):
        Month.split(hourly(200, 2, 3))


def test_windows_hold_the_anomalies_of_their_hours():
    month, lead = Month.split(hourly(256, 2, 3)), 24
    window = month.windows("validation", lead)
    target = int(month.targets("validation", lead)[-1])
    train = month.fields[: month.parts["train"].stop]
    for place, hour in enumerate((target - 48, target - 24, target)):
        same = [train[h] for h in range(len(train)) if h % 24 == hour % 24]
        assert torch.allclose(window[-1, place], month.fields[hour] - torch.stack(same).mean(0), atol=1e-4)


@pytest.mark.parametrize("lead", LEADS)
def test_baselines_against_direct_computation(lead):
    month = Month.split(hourly())
    x, border = month.fields.double(), month.parts["train"].stop
    found = baselines(month, "test", lead)
    by_hour = [x[:border][h::24].mean(0) for h in range(24)]
    before, after = [], []
    for t in range(2 * lead, border):
        before.append(x[t - lead] - by_hour[(t - lead) % 24])
        after.append(x[t] - by_hour[t % 24])
    damping = float(torch.linalg.lstsq(torch.stack(before).reshape(-1, 1), torch.stack(after).reshape(-1, 1)).solution)
    for place, t in enumerate(month.targets("test", lead).tolist()):
        anomaly = x[t - lead] - by_hour[(t - lead) % 24]
        direct = {
            "persistence": x[t - lead],
            "climatology": x[:border].mean(0),
            "diurnal climatology": by_hour[t % 24],
            "anomaly persistence": by_hour[t % 24] + anomaly,
            "damped persistence": by_hour[t % 24] + damping * anomaly,
        }
        for name, values in direct.items():
            assert torch.allclose(found[name][place].double(), values, atol=1e-3), name
    persisted = scores(month, "test", lead, found["persistence"])
    truth = x[month.targets("test", lead)]
    error = found["persistence"] - truth
    assert persisted["rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
    assert persisted["skill"] == pytest.approx(0, abs=1e-9)
    norms = [(e.norm() / (y - x[:border].mean(0)).norm()).item() for e, y in zip(error, truth, strict=True)]
    assert persisted["relative"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert scores(month, "test", lead, truth)["skill"] == pytest.approx(1)


def test_reconstruction_against_a_spectrum_that_is_known():
    # Every field is one cosine of its own: one coefficient each; a shared set needs all, of the other month none help.
    rows, columns = 12, 16
    i, j = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    waves = [(1, 2), (3, 1), (2, 2), (5, 0), (0, 6), (4, 4)]
    fields = [np.cos(np.pi * a * (i + 0.5) / rows) * np.cos(np.pi * b * (j + 0.5) / columns) for a, b in waves]
    found = reconstruction(torch.tensor(np.stack(fields)))
    needed = {row["selection"]: row["coefficients"] for row in found if not row["box"]}
    assert needed["top-m chosen per field"] == 1
    assert needed["one shared top-m set"] == len(waves)
    assert needed["low-pass"] == 7 * 7
    assert needed["top-m of the other month"] > len(waves)


def test_the_study_runs_resumes_and_draws(folder, tmp_path, monkeypatch):
    output = tmp_path / "docs" / "results"
    path = output / "climate-quick.csv"
    with monkeypatch.context() as patch:
        patch.setattr(study, "_figures", lambda *_: {})
        climate(folder, output, seconds=0, device="cpu", quick=True)
    assert not path.exists()  # no case was begun
    with monkeypatch.context() as patch:
        patch.setattr(study, "train", lambda *_, **__: SimpleNamespace(finished=False))
        with pytest.raises(KeyboardInterrupt):
            climate(folder, output, device="cpu", quick=True)
    assert not [row for row in Results(path).rows if row.get("epochs")]  # what a signal stopped is no row
    climate(folder, output, device="cpu", quick=True)
    rows = Results(path).rows
    forecasts = [row for row in rows if row["table"] == "forecast"]
    assert {row["label"] for row in forecasts} == {*study.BASELINES, *study.MODELS}
    assert {(row["label"], row["lead"], row["way"]) for row in forecasts if row["label"] == "T1"} == {
        ("T1", "1", "directly"),
        ("T1", "24", "directly"),
        ("T1", "24", "hour by hour"),
    }
    assert all(math.isfinite(float(row["rmse"])) for row in forecasts)
    names = {picture.name for picture in (tmp_path / "docs" / "figures").iterdir()}
    assert names == {f"climate-quick-{stem}.png" for stem in ("selection", "curves", "forecast")}
    monkeypatch.setattr(study, "train", None)  # whatever would train again, fails
    monkeypatch.setattr(study, "_figures", lambda *_: {})
    before = path.read_bytes()
    climate(folder, output, device="cpu", quick=True)
    assert path.read_bytes() == before
    page = tmp_path / "reproduction.md"
    write_page(path, page)
    text = page.read_text()
    assert "best without a model" in text
    assert "| 24 | T1, hour by hour |" in text


def test_the_real_month():
    folder = os.environ.get("TRANSFORM_ONCE_DATA")
    if not folder:
        pytest.skip("TRANSFORM_ONCE_DATA does not name a folder with the real data sets")
    month = Month.read(Path(folder))
    assert {name: len(part) for name, part in month.parts.items()} == {"train": 446, "validation": 148, "test": 150}
    x = month.fields.numpy()
    direct = np.sqrt(np.mean((x[596:] - x[595:-1]) ** 2))
    found = scores(month, "test", 1, baselines(month, "test", 1)["persistence"])
    assert found["rmse"] == pytest.approx(direct, rel=1e-4)
