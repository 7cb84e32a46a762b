"""The study of smoke: windows and parts, persistence, a tiny run, and pages from tables that are made up."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from transform_once.data.fields import Fields
from transform_once.studies import smoke as study
from transform_once.studies.smoke import GIVEN, JUDGED, filmed, persistence, shares, smoke, truncations, windows
from transform_once.studies.smoke_page import write_page
from transform_once.studies.study import Results


@pytest.mark.parametrize(("plumes", "expected"), [(104, (64, 20, 20)), (26, (16, 5, 5)), (3, (1, 1, 1))])
def test_shares_are_the_papers(plumes, expected):
    assert shares(plumes) == expected


def test_too_few_plumes():
    with pytest.raises(ValueError, match="three plumes or more"):
        shares(2)


def counted(samples=2, frames=40):
    """Every point of frame t of sample n holds 100 n + t + 1."""
    numbers = 100 * torch.arange(samples)[:, None] + torch.arange(frames) + 1.0
    return Fields(trajectory=numbers[:, :, None, None, None].expand(-1, -1, 1, 4, 6).clone(), dt=0.5)


def test_windows_are_consecutive_frames():
    found = windows(counted(), 3, JUDGED)
    frames = found.trajectory[:, :, 0, 0, 0]
    assert frames.shape == (6, GIVEN + JUDGED)
    assert (frames.diff(dim=1) == 1).all()
    assert frames[:3, 0].tolist() == [9, 19, 28]  # from a fifth of 40 frames to the last that leaves room
    assert frames[5, -1] == 140
    with pytest.raises(ValueError, match="too short for windows of 13"):
        windows(counted(frames=14), 3, JUDGED)


def test_persistence_against_direct_computation():
    test = windows(counted(1), 2, JUDGED)
    found = persistence(test)
    assert found["per_step"]["mae"] == pytest.approx(list(range(1, JUDGED + 1)))
    x = test.trajectory.double().numpy()
    last = x[:, GIVEN - 1 : GIVEN]
    direct = [np.linalg.norm(w[GIVEN:] - b) / np.linalg.norm(w[GIVEN:]) for w, b in zip(x, last, strict=True)]
    assert found["relative_l2"] == pytest.approx(np.mean(direct), rel=1e-6)


def test_truncation_of_a_cosine():
    rows, columns = 12, 10
    i, j = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
    wave = torch.cos(math.pi * 5 * i / rows) * torch.cos(math.pi * 2 * j / columns)
    fields = Fields(trajectory=wave.expand(1, GIVEN + JUDGED, 1, rows, columns).clone())
    lost, kept = truncations(fields, (5, 6))
    assert lost["relative_l2"] == pytest.approx(1, abs=1e-5)
    assert lost["mae"] == pytest.approx(float(wave.abs().mean()), rel=1e-5)
    assert kept["relative_l2"] < 1e-5


def test_integrators_are_judged_on_the_same_frames():
    test = windows(counted(1), 1, JUDGED)
    for order, history in study.INTEGRATORS:
        dynamics = study.Dynamics(order, history)
        own = study._from(test, dynamics)
        assert torch.equal(own.trajectory[:, dynamics.frames :], test.trajectory[:, GIVEN:])


def write_films(folder, frames=40, rows=64, columns=48):
    av = pytest.importorskip("av", reason="writes and reads videos")
    folder.mkdir(parents=True)
    i, j = np.mgrid[:rows, :columns]
    for camera in range(4):
        with av.open(str(folder / f"scalarflow_camera{camera}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=60)
            stream.height, stream.width, stream.pix_fmt = rows, columns, "yuv420p"
            for t in range(frames):
                level = 40 * (camera + 1) + 20 * np.sin((i + j + t) / 6)
                picture = av.VideoFrame.from_ndarray(level.astype(np.uint8), format="gray")
                container.mux(stream.encode(picture.reformat(format="yuv420p")))
            container.mux(stream.encode())


def test_cameras_stay_apart(tmp_path):
    write_films(tmp_path / "smoke")
    parts = filmed(tmp_path / "smoke", (32, 24))
    level = [part.trajectory.mean((1, 2, 3, 4)) * 255 for part in parts]
    assert level[0].tolist() == pytest.approx([40, 80, 160], abs=12)  # cameras 0, 1 and 3
    assert level[2].tolist() == pytest.approx([120] * len(parts.test), abs=12)  # camera 2
    assert {round(value / 40) for value in level[1].tolist()} == {1, 2, 4}
    assert parts.train.frames == 32
    ends = parts.validation.trajectory
    assert not any((frame == ends[0, 0]).all() for frame in parts.train.trajectory[0])  # of later frames


def test_the_recording_alone_or_nothing(tmp_path):
    def made(plumes):
        return study.Study(tmp_path / "smoke", tmp_path, (plumes, 20), 1.0, 1, "cpu", True)

    def sources(plumes):
        return made(plumes).sources

    assert sources(3) == ["plumes"]
    with pytest.raises(ValueError, match="nothing to learn from"):
        smoke(tmp_path, output=tmp_path, runs=tmp_path, plumes=0, device="cpu", quick=True)
    write_films(tmp_path / "smoke", frames=2)
    assert sources(0) == ["recording"]
    early = [case for case in made(0).cases() if case.table == "recording: time"]
    assert {(case.label, case.options["budget"]) for case in early} == {(name, 0.25) for name in study.QUICK}
    assert sources(3) == ["plumes", "recording"]


def test_the_study_runs_resumes_and_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "QUICK", {name: study.QUICK[name] for name in ("FNO", "T1+vp", "T1")})
    monkeypatch.setattr(study, "QUICK_RESOLUTION", (28, 26))
    monkeypatch.setattr(study, "INTEGRATORS", ((1, 1), (2, 2)))
    monkeypatch.setattr(study, "SHORT", {"plumes": (0.25,)})
    output, runs = tmp_path / "docs" / "results", tmp_path / "runs"
    options = {
        "output": output,
        "runs": runs,
        "plumes": 3,
        "frames": 20,
        "budget": 0.05,
        "device": "cpu",
        "quick": True,
    }
    smoke(tmp_path, seconds=0, **options)
    assert not (output / "smoke-quick.csv").exists()
    smoke(tmp_path, **options)
    path = output / "smoke-quick.csv"
    rows = Results(path).rows
    whole = [row for row in rows if row["kind"] == "all"]
    assert {row["label"] for row in whole if row["table"] == "plumes"} == {"persistence", "FNO", "T1", "T1+vp"}
    assert {(row["order"], row["history"]) for row in whole if "integrator" in row["table"]} == {("1", "1"), ("2", "2")}
    steps = [row for row in rows if row["kind"] == "step" and row["label"] == "T1" and row["table"] == "plumes"]
    assert [row["step"] for row in steps] == [str(step) for step in range(1, JUDGED + 1)]
    figures = {
        picture.stem.removeprefix("smoke-quick-plumes-") for picture in (tmp_path / "docs" / "figures").iterdir()
    }
    assert figures == {"time", "steps", "modes-mae", "modes-psnr", "rollout", "k-space", "selection"}
    assert (output / "smoke-quick.html").exists()
    monkeypatch.setattr(study, "train", None)  # whatever would train again, fails
    monkeypatch.setattr(study.Study, "figures", lambda *_: {})
    before = path.read_bytes()
    smoke(tmp_path, **options)
    assert path.read_bytes() == before
    page = tmp_path / "reproduction.md"
    write_page(path, page)
    assert "after the same seconds" in page.read_text()


def test_the_real_recording():
    folder = os.environ.get("TRANSFORM_ONCE_DATA")
    if not folder:
        pytest.skip("TRANSFORM_ONCE_DATA does not name a folder with the real data sets")
    pytest.importorskip("av", reason="reads videos")
    parts = filmed(Path(folder) / "smoke", (66, 38))
    assert parts.train.shapes["trajectory"] == (3, 96, 1, 66, 38)
    assert 0.1 < persistence(parts.test)["relative_l2"] < 0.6
