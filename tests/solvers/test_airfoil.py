"""The airfoil solver: its programs replaced by stand-ins, and one real flow (slow) where they are installed."""

import json
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest

from transform_once.solvers import airfoil as solver
from transform_once.solvers import airfoil_case as case

COARSE = case.AirfoilSettings(resolution=32, iterations=5, airfoil_edge=0.02, far_edge=1.0)
BOUNDARY = "4(" + " ".join(f"{patch} {{ type patch; nFaces 7; }}" for patch in case.PATCHES) + ")"


def thickness(x):
    """Half the thickness of a symmetric profile that closes at both ends."""
    return 0.6 * (np.sqrt(x) - x) * (1 - 0.5 * x)


def selig(points=41):
    x = (1 + np.cos(np.linspace(0, 2 * np.pi, points))) / 2
    sign = np.where(np.arange(points) < points // 2, 1, -1)
    return np.stack([x, 0.05 * x * (1 - x) + sign * thickness(x)], axis=1)


def write(path, points, header="PROFILE 1", footer=""):
    rows = "\n".join(f"{x:.9f} {y:.9f}" for x, y in points)
    path.write_text(f"{header}\n{rows}\n{footer}")
    return path


def inside(x, y, points):
    """Even-odd rule, edge by edge: independent of the mesh."""
    result = np.zeros(np.broadcast(x, y).shape, dtype=bool)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
        if y0 != y1:
            result ^= ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    return result


# One flow, by programs that only pretend


@pytest.fixture
def shape(tmp_path):
    return case.read_airfoil(write(tmp_path / "profile.dat", selig()))


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stand-ins on the PATH; `programs(simpleFoam=script)` sets what one does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(**scripts):
        for name, script in (
            {"gmsh": "", "gmshToFoam": "cp -r ../polyMesh constant/", "simpleFoam": ""} | scripts
        ).items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)

    (tmp_path / "polyMesh").mkdir()
    (tmp_path / "polyMesh" / "boundary").write_text(BOUNDARY)
    install()
    return install


def sampled(folder, speed, resolution=32):
    """Sample files of iterations 4 and 5 as simpleFoam leaves them: u grows from 0.9 to 1 of the speed, p is x."""
    i, j = np.meshgrid(np.arange(resolution), np.arange(resolution), indexing="ij")
    x, y = -0.5 + 2 * i / resolution, -1 + 2 * j / resolution
    hole = inside(x, y, selig())
    for iteration, factor in ((4, 0.9), (5, 1.0)):
        target = folder / str(iteration)
        target.mkdir(parents=True)
        rows = np.stack([x, y, 0.5 + 0 * x, x, factor * speed + 0 * x, 2 * y, 0 * x])[:, ~hole].T
        np.savetxt(target / "grid_p.xy", rows[:, :4])
        np.savetxt(target / "grid_U.xy", rows[:, [0, 1, 2, 4, 5, 6]])
    return x, y, hole


SOLVED = (
    "mkdir -p postProcessing && cp -r ../cloud postProcessing/ && echo 'Solving for Ux, Initial residual = 0.25, Final'"
)


def test_simulate_reads_the_solver_back(tmp_path, shape, programs):
    x, y, hole = sampled(tmp_path / "cloud", speed=20.0)
    programs(simpleFoam=SOLVED)
    flow = solver.simulate(shape, 20.0, 30.0, tmp_path / "case", COARSE)
    np.testing.assert_array_equal(flow.mask, hole)
    np.testing.assert_allclose(flow.p, np.where(hole, 0, x))
    np.testing.assert_allclose(flow.v, np.where(hole, 0, 2 * y))
    assert (flow.residual, flow.drift) == (0.25, pytest.approx(0.1))
    assert not flow.converged
    stream = re.search(r"internalField uniform \((.+) (.+) 0\);", (tmp_path / "case" / "0" / "U").read_text())
    assert [float(part) for part in stream.groups()] == pytest.approx([20 * np.sqrt(3) / 2, 10])
    assert "type empty" in " ".join((tmp_path / "case/constant/polyMesh/boundary").read_text().split())
    inputs, target = solver.channels(flow, 20.0, 30.0)
    assert inputs.dtype == target.dtype == np.float32
    np.testing.assert_array_equal(inputs[2], hole)
    np.testing.assert_allclose(inputs[0], np.where(hole, 0, 20 * np.sqrt(3) / 2), rtol=1e-6)
    np.testing.assert_allclose(inputs[1], np.where(hole, 0, 10), rtol=1e-6)
    np.testing.assert_allclose(target, [flow.p, flow.u, flow.v], rtol=1e-6)
    with pytest.raises(ValueError, match="must be empty or new"):
        solver.simulate(shape, 20.0, 30.0, tmp_path / "case", COARSE)


@pytest.mark.parametrize(
    ("scripts", "error", "sentence"),
    [
        (
            {"gmsh": "echo 'Error   : Self intersecting'; exit 1"},
            case.CaseError,
            "gmsh ended with status 1: Self inter",
        ),
        ({"simpleFoam": "echo '--> FOAM FATAL ERROR:'; echo 'Maximum'; exit 1"}, case.CaseError, "status 1: Maximum"),
        ({"simpleFoam": "kill -FPE $$"}, case.CaseError, "simpleFoam ended with SIGFPE"),
        ({"simpleFoam": "kill -KILL $$"}, InterruptedError, "stopped by SIGKILL"),
        ({}, case.CaseError, "left no samples"),
    ],
)
def test_failing_programs_give_their_reason(tmp_path, shape, programs, scripts, error, sentence):
    programs(**scripts)
    with pytest.raises(error, match=sentence):
        solver.simulate(shape, 20.0, 0.0, tmp_path / "case", COARSE)


def test_holes_away_from_the_airfoil_and_bad_numbers_are_failures(tmp_path, shape, programs):
    sampled(tmp_path / "cloud", speed=20.0)
    programs(simpleFoam=SOLVED + "; sed -i 1d postProcessing/cloud/?/*.xy")
    with pytest.raises(case.CaseError, match="away from the airfoil"):
        solver.simulate(shape, 20.0, 0.0, tmp_path / "case", COARSE)
    programs(simpleFoam=SOLVED + "; sed -i '1s/[^ ]*$/nan/' postProcessing/cloud/5/grid_p.xy")
    with pytest.raises(case.CaseError, match="not finite"):
        solver.simulate(shape, 20.0, 0.0, tmp_path / "other", COARSE)


def test_missing_programs_are_named_with_their_command(tmp_path, shape, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"gmsh and gmshToFoam and simpleFoam.* apt-get install gmsh openfoam$"):
        solver.simulate(shape, 20.0, 0.0, tmp_path / "case", COARSE)
    with pytest.raises(FileNotFoundError, match="apt-get install"):
        solver.generate(1, shapes=tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("velocity", "angle"), [(0.0, 1.0), (-3.0, 1.0), (np.inf, 1.0), (5.0, np.nan)])
def test_impossible_streams_are_refused(tmp_path, shape, velocity, angle):
    with pytest.raises(ValueError, match="velocity must be positive"):
        solver.simulate(shape, velocity, angle, tmp_path / "case")


# Many flows, by a solver that only pretends


def pretend(shape, velocity, angle, folder, settings):
    """A flow made of its arguments; steep angles fail, fast streams do not converge."""
    if angle > 12:
        raise case.CaseError("steep")
    field = np.full((4, 4), velocity)
    mask = np.eye(4, dtype=bool)
    return solver.AirfoilFlow(mask, field, field * 2, field + angle, 1e-3, velocity / 1000, velocity < 80)


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    folder = tmp_path / "shapes"
    folder.mkdir()
    for name in ("a", "b", "c"):
        write(folder / f"{name}.dat", selig())
    monkeypatch.setattr(solver, "require_programs", lambda: None)
    monkeypatch.setattr(solver, "simulate", pretend)
    return folder


def assert_same(one, other):
    assert [sample.name for sample in one] == [sample.name for sample in other]
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left.input, right.input)
        np.testing.assert_array_equal(left.target, right.target)
        assert (left.residual, left.drift) == (right.residual, right.drift)


def test_a_draw_depends_on_seed_and_index_alone():
    draws = [solver.draw(3, index, 50) for index in range(400)]
    assert draws == [solver.draw(3, index, 50) for index in reversed(range(400))][::-1]
    assert len({*draws, *(solver.draw(4, index, 50) for index in range(400))}) == 800
    numbers, speeds, angles = (np.array(column) for column in zip(*draws, strict=True))
    assert {*numbers} == {*range(50)}
    assert 10 <= speeds.min() < 12 < 98 < speeds.max() <= 100
    assert -22.5 <= angles.min() < -21 < 21 < angles.max() <= 22.5


def test_generate_skips_and_records_what_fails_whatever_the_workers(tmp_path, shapes):
    alone = list(solver.generate(12, seed=5, shapes=shapes, output=tmp_path / "one"))
    together = list(solver.generate(12, seed=5, workers=3, shapes=shapes, output=tmp_path / "three"))
    assert len(alone) == 12
    assert_same(alone, together)
    records = solver.failures(tmp_path / "one")
    reasons = {record["reason"].split(":")[0] for record in records}
    assert reasons == {"steep", "Not converged"}
    expected, failed, index = [], [], 0
    while len(expected) < 12:
        number, velocity, angle = solver.draw(5, index, 3)
        if angle > 12 or velocity >= 80:
            failed.append(index)
        else:
            x, y = solver.freestream(velocity, angle)
            expected.append(f"{'abc'[number]}_{int(100 * x)}_{int(100 * y)}")
        index += 1
    assert [sample.name for sample in alone] == expected
    assert [record["index"] for record in records] == failed


def test_generate_resumes_and_extends(tmp_path, shapes, monkeypatch):
    everything = list(solver.generate(8, shapes=shapes, output=tmp_path / "whole"))
    stream = solver.generate(8, shapes=shapes, output=tmp_path / "out")
    first = [next(stream) for _ in range(3)]
    stream.close()
    assert_same(first, everything[:3])
    damaged = min((tmp_path / "out").glob("*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert_same(list(solver.generate(8, shapes=shapes, output=tmp_path / "out")), everything)
    monkeypatch.setattr(solver, "simulate", lambda *_: pytest.fail("a finished case was solved again"))
    assert_same(list(solver.generate(8, shapes=shapes, output=tmp_path / "out")), everything)
    assert not list((tmp_path / "out").glob(".*"))


def test_two_runs_cannot_share_a_folder(tmp_path, shapes):
    first = solver.generate(3, shapes=shapes, output=tmp_path / "out")
    next(first)
    with pytest.raises(BlockingIOError, match="another process is at work in"):
        next(solver.generate(3, shapes=shapes, output=tmp_path / "out"))
    assert len(list(first)) == 2
    assert len(list(solver.generate(3, shapes=shapes, output=tmp_path / "out"))) == 3


def test_a_folder_of_other_settings_is_refused(tmp_path, shapes):
    list(solver.generate(1, shapes=shapes, output=tmp_path / "out"))
    with pytest.raises(ValueError, match=r"other settings \(iterations, seed\)"):
        solver.generate(1, seed=1, shapes=shapes, output=tmp_path / "out", settings=case.AirfoilSettings(iterations=50))
    write(shapes / "d.dat", selig())
    with pytest.raises(ValueError, match=r"other settings \(shapes\)"):
        solver.generate(1, shapes=shapes, output=tmp_path / "out")


def test_interruption_is_not_recorded_as_failure_and_bad_outlines_are(tmp_path, shapes, monkeypatch):
    def interrupted(*_):
        raise InterruptedError("simpleFoam was stopped")

    monkeypatch.setattr(solver, "simulate", interrupted)
    with pytest.raises(InterruptedError):
        list(solver.generate(2, shapes=shapes, output=tmp_path / "out"))
    assert solver.failures(tmp_path / "out") == []
    for path in shapes.iterdir():
        path.write_text("nothing here\n")
    with pytest.raises(RuntimeError, match=r"20 airfoil cases in a row failed; the last reason: .*at least 8"):
        list(solver.generate(2, shapes=shapes, output=tmp_path / "bad"))
    assert len(solver.failures(tmp_path / "bad")) >= solver.PATIENCE
    for wrong in ({"samples": 0}, {"samples": 1, "workers": 0}, {"samples": 1, "seed": -1}):
        with pytest.raises(ValueError, match="must be positive"):
            solver.generate(**wrong, shapes=shapes, output=tmp_path / "none")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kills_lose_nothing_and_leave_nothing_half_written(tmp_path, shapes, monkeypatch):
    whole = list(solver.generate(40, workers=2, shapes=shapes, output=tmp_path / "whole"))

    def slowly(*arguments):
        time.sleep(0.005)
        return pretend(*arguments)

    monkeypatch.setattr(solver, "simulate", slowly)
    chance, known = random.Random(0), 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            list(solver.generate(40, workers=2, shapes=shapes, output=tmp_path / "out"))
            os._exit(0)
        time.sleep(chance.uniform(0.01, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished = sorted((tmp_path / "out").glob("[0-9]*")) if (tmp_path / "out").exists() else []
        for path in finished:
            assert json.loads(path.read_text()) if path.suffix == ".json" else solver._load(path) is not None
        assert len(finished) >= known
        known = len(finished)
    assert_same(list(solver.generate(40, workers=2, shapes=shapes, output=tmp_path / "out")), whole)
    assert not list((tmp_path / "out").glob(".*"))


# The real programs


needs_openfoam = pytest.mark.skipif(
    any(shutil.which(program) is None for program in solver.PACKAGES),
    reason="OpenFOAM or gmsh is absent; install with: apt-get install openfoam gmsh",
)


@pytest.mark.slow
@needs_openfoam
def test_a_real_flow_end_to_end(tmp_path):
    folder, outline = tmp_path / "shapes", selig(201)
    folder.mkdir()
    write(folder / "profile.dat", outline)
    settings = case.AirfoilSettings(iterations=400, airfoil_edge=0.01, far_edge=0.8)
    (sample,) = solver.generate(1, seed=0, shapes=folder, output=tmp_path / "out", settings=settings)
    assert sample.input.shape == sample.target.shape == (3, 128, 128)
    i, j = np.meshgrid(np.arange(128), np.arange(128), indexing="ij")
    x, y = -0.5 + i / 64, -1 + j / 64
    mask = sample.input[2] > 0
    expected = inside(x, y, outline)
    assert expected.sum() > 200
    assert (mask != expected).sum() <= 4  # the spline and the polygon differ by less than a node
    speed = np.hypot(*sample.input[:2, 0, 0])
    p, u, v = sample.target
    assert not sample.target[:, mask].any()
    assert 1.1 * speed < np.hypot(u, v).max() < 3 * speed
    np.testing.assert_allclose([u[0].mean(), v[0].mean()], sample.input[:2, 0, 0], atol=0.2 * speed)
    # Bernoulli's constant holds up to where the stream is stopped, at the nose.
    ahead = (x < 0) & (np.abs(y) < 0.25)
    total = p + (u**2 + v**2) / 2
    assert total[ahead].std() < 0.05 * speed**2
    assert p[np.hypot(x, y) < 0.1].max() - p[0].mean() > 0.2 * speed**2
