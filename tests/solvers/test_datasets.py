"""`t1 generate` and `t1 import`, run as a user runs them, also killed on the way."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import transform_once as t1
from transform_once.solvers.navier_stokes import NAVIER_STOKES_SYMMETRIES, solve


def command(*arguments):
    return [sys.executable, "-m", "transform_once", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True)


NAVIER_STOKES = ("generate", "navier-stokes", "--viscosity", "1e-3", "--time", "1", "--resolution", "16")


def test_navier_stokes_pairs_solve_the_equation(tmp_path):
    done = run(*NAVIER_STOKES, "--samples", 5, "--seed", 3, "--output", tmp_path / "ns.h5")
    assert done.returncode == 0, done.stderr
    fields = t1.read(tmp_path / "ns.h5")
    assert fields.shapes == {"input": (5, 1, 16, 16), "target": (5, 1, 16, 16)}
    later, _ = solve(fields.input.double(), 1e-3, 1.0, tolerance=1e-6)
    assert (later - fields.target).norm() < 1e-3 * later.norm()
    assert (fields.metadata.grid, fields.metadata.periodic, fields.metadata.seed) == ("node", (True, True), 3)
    declared = tuple(t1.Symmetry.from_dict(symmetry) for symmetry in fields.metadata.symmetries)
    assert declared == NAVIER_STOKES_SYMMETRIES


def test_navier_stokes_trajectories_begin_with_the_initial_field(tmp_path):
    assert run(*NAVIER_STOKES, "--samples", 2, "--frames", 4, "--output", tmp_path / "films.h5").returncode == 0
    assert run(*NAVIER_STOKES, "--samples", 2, "--output", tmp_path / "pairs.h5").returncode == 0
    films, pairs = t1.read(tmp_path / "films.h5"), t1.read(tmp_path / "pairs.h5")
    assert films.metadata.times == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert torch.equal(films.trajectory[:, 0], pairs.input)
    assert (films.trajectory[:, -1] - pairs.target).norm() < 1e-3 * pairs.target.norm()


def test_smoke_takes_rows_and_columns_and_declares_its_mirror(tmp_path):
    arguments = ("generate", "smoke", "--samples", 2, "--frames", 6, "--resolution", 24, 16)
    done = run(*arguments, "--output", tmp_path / "smoke.h5")
    assert done.returncode == 0, done.stderr
    fields = t1.read(tmp_path / "smoke.h5")
    assert fields.shapes == {"trajectory": (2, 6, 1, 24, 16)}
    assert not torch.equal(*fields.trajectory)
    (mirror,) = (t1.Symmetry.from_dict(symmetry) for symmetry in fields.metadata.symmetries)
    moved = mirror.motion(torch.zeros(2)).fields(fields.trajectory, grid="cell", periodic=False)
    assert torch.equal(moved, fields.trajectory.flip(-1))


@pytest.mark.parametrize(
    "arguments",
    [
        (*NAVIER_STOKES, "--samples", 500),
        ("generate", "smoke", "--samples", 2, "--frames", 30, "--resolution", 24, 16),
    ],
    ids=["navier-stokes", "smoke"],
)
def test_kills_lose_nothing_finished(tmp_path, arguments):
    """Killed at random moments of the work and begun again, the file ends as one that was never killed."""
    whole, killed = tmp_path / "whole.h5", tmp_path / "killed.h5"
    partial = killed.with_name("killed.h5.partial")
    assert run(*arguments, "--output", whole).returncode == 0
    moments = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(command(*arguments, "--output", killed), stderr=subprocess.DEVNULL)
        while not partial.exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not killed.exists():
            with pytest.raises(ValueError, match="unfinished"):
                t1.read(partial)
    if not killed.exists():
        assert run(*arguments, "--output", killed).returncode == 0
    first, second = t1.read(whole), t1.read(killed)
    for name in first.shapes:
        assert torch.allclose(getattr(first, name), getattr(second, name), atol=1e-6)


def test_import_chooses_keys_and_times(tmp_path):
    a, u = np.random.default_rng(0).normal(size=(3, 8, 8)), np.random.default_rng(1).normal(size=(3, 8, 8, 4))
    np.savez(tmp_path / "flow.npz", a=a, u=u, t=np.array([10.0, 20.0, 30.0, 50.0]))
    options = ("--input-key", "a", "--target-key", "u", "--target-time", 50, "--axes", "nxy,nxyt")
    done = run("import", tmp_path / "flow.npz", tmp_path / "out.h5", *options)
    assert done.returncode == 0, done.stderr
    fields = t1.read(tmp_path / "out.h5")
    assert np.allclose(fields.input[:, 0], a, atol=1e-6)
    assert np.allclose(fields.target[:, 0], u[..., -1], atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "navier-stokes", "--samples", 0), "samples must be at least 1"),
        (("generate", "navier-stokes", "--viscosity", -1, "--resolution", 16), "the viscosity must be positive"),
        (("generate", "smoke", "--resolution", 2, 2), "at least 4 rows and 4 columns"),
        (("generate", "wind"), "wind"),
        (("import", "nowhere.npz", "out.h5"), "there is no nowhere.npz"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    done = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
