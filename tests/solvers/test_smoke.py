import dataclasses
import json
import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transform_once.solvers.smoke import Inflow, SmokeSettings, SmokeSolver, random_inflow, simulate, stream

Velocity = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small grids gain nothing from threads, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def divergence(velocity: Velocity) -> float:
    """The largest |∇·u| in units of max|u|/h, h the size of a cell, over all samples."""
    down, right = (component.double() for component in velocity)
    jumps = down[:, 1:] - down[:, :-1] + right[..., 1:] - right[..., :-1]
    largest = torch.maximum(down.abs().amax((1, 2)), right.abs().amax((1, 2)))
    return float((jumps.abs().amax((1, 2)) / largest).max())


def noise(batch: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Velocity]:
    """Density of zeros and ones and a white velocity: the roughest start a grid can hold."""
    generator = torch.Generator().manual_seed(seed)
    density = (torch.rand(batch, 1, rows, columns, generator=generator) > 0.5).float()
    down = torch.randn(batch, rows + 1, columns, generator=generator)
    return density, (down, torch.randn(batch, rows, columns + 1, generator=generator))


def blob(rows: int, columns: int, x: float = 0.45, y: float = 0.7, radius: float = 0.15) -> Tensor:
    """Cell averages of a Gaussian around (x, y), y downwards, in box widths."""
    fine_rows, fine_columns = (torch.arange(4 * n, dtype=torch.float64) + 0.5 for n in (rows, columns))
    squares = (fine_rows / (4 * columns) - y)[:, None] ** 2 + (fine_columns / (4 * columns) - x) ** 2
    return torch.nn.functional.avg_pool2d(torch.exp(-squares / radius**2)[None, None], 4)


@pytest.mark.parametrize("resolution", [(5, 7), (64, 48), (1062, 600)])
def test_velocity_is_free_of_divergence(resolution: tuple[int, int]) -> None:
    density, velocity = noise(1, *resolution)
    solver = SmokeSolver(SmokeSettings(resolution), inflow=random_inflow([0]))
    solver.start(density, velocity)
    assert divergence(solver.velocity) < 1e-5
    # From rest is hardest: what the pressure removes is as large as what remains.
    solver.start(torch.zeros_like(density))
    solver.advance(1e-4)
    assert divergence(solver.velocity) < 1e-5
    assert solver.velocity[0].abs().max() > 1e-5


def test_projection_is_the_orthogonal_one() -> None:
    rows, columns = 4, 5
    _, (down, right) = noise(1, rows, columns)
    solver = SmokeSolver(SmokeSettings((rows, columns)), dtype=torch.float64)
    solver.start(torch.zeros(1, 1, rows, columns), (down, right))
    # Independently: remove from the inner faces their part in the range of the transposed divergence, by least squares.
    faces = [("down", j, i) for j in range(1, rows) for i in range(columns)]
    faces += [("right", j, i) for j in range(rows) for i in range(1, columns)]
    operator = np.zeros((rows * columns, len(faces)))
    for number, (kind, j, i) in enumerate(faces):
        operator[j * columns + i, number] = -1
        operator[(j - 1) * columns + i if kind == "down" else j * columns + i - 1, number] = 1
    inner = np.concatenate([down[0, 1:-1].numpy().ravel(), right[0, :, 1:-1].numpy().ravel()]).astype(np.float64)
    expected = inner - np.linalg.pinv(operator) @ (operator @ inner)
    ours = np.concatenate([solver.velocity[0][0, 1:-1].numpy().ravel(), solver.velocity[1][0, :, 1:-1].numpy().ravel()])
    np.testing.assert_allclose(ours, expected, atol=1e-12)


@settings(max_examples=12)
@given(rows=st.integers(4, 40), columns=st.integers(4, 40), speed=st.floats(0.1, 20), seed=st.integers(0, 1000))
def test_mass_and_bounds_are_kept_in_any_flow(rows: int, columns: int, speed: float, seed: int) -> None:
    density, velocity = noise(2, rows, columns, seed)
    solver = SmokeSolver(SmokeSettings((rows, columns)), batch=2)
    solver.start(density, (speed * velocity[0], speed * velocity[1]))
    before = density.double().sum((1, 2, 3))
    for _ in range(4):
        solver.advance(0.05 / speed)
        assert divergence(solver.velocity) < 1e-5
        assert solver.density.min() >= -1e-6
        assert solver.density.max() <= 1 + 1e-6
    torch.testing.assert_close(solver.density.double().sum((1, 2, 3)), before, rtol=1e-6, atol=1e-6)


def test_whirls_of_the_size_of_a_cell_empty_none() -> None:
    # Opposite faces of a cell may both blow outwards at full speed here, so that jumps are twice the speed.
    generator = torch.Generator().manual_seed(0)
    nodes = torch.nn.functional.pad(
        torch.randint(0, 2, (50, 23, 23), generator=generator).double() * 2 - 1, (1, 1, 1, 1)
    )
    solver = SmokeSolver(SmokeSettings((24, 24), buoyancy=0.0), batch=50)
    density = noise(50, 24, 24)[0]
    solver.start(density, (-nodes.diff(dim=2), nodes.diff(dim=1)))
    fastest = max(float(component.abs().max()) for component in solver.velocity)
    for _ in range(3):
        solver.advance(1.19 / 24 / fastest)  # two steps at the largest Courant number that speed alone would allow
        assert solver.density.min() >= -1e-6
        assert solver.density.max() <= 1 + 1e-6


def test_mass_is_conserved_over_a_thousand_steps() -> None:
    solver = SmokeSolver(SmokeSettings((48, 32)))
    start = blob(48, 32, y=1.2).float()
    solver.start(start)
    for _ in range(125):
        solver.advance(0.2)
    mass = float(solver.density.double().sum() / start.double().sum())
    assert abs(mass - 1) < 1e-5
    assert solver.density.min() >= -1e-6
    assert not torch.allclose(solver.density, start, atol=0.1)


def cells(n: int) -> Velocity:
    """The steady Euler flow u = (sin πx cos πy, −cos πx sin πy) (right, down) as means over the faces."""
    nodes = torch.arange(n + 1, dtype=torch.float64) / n
    stream_function = torch.sin(math.pi * nodes)[:, None] * torch.sin(math.pi * nodes) / math.pi
    return -n * stream_function.diff(dim=1)[None], n * stream_function.diff(dim=0)[None]


def carried(n: int, time: float) -> Tensor:
    """The blob carried by that flow: its value at the foot of each characteristic, traced back by Runge-Kutta."""
    centres = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    place = torch.stack(torch.meshgrid(centres, centres, indexing="xy"))

    def flow(x: Tensor) -> Tensor:
        sines, cosines = torch.sin(math.pi * x), torch.cos(math.pi * x)
        return torch.stack([sines[0] * cosines[1], -cosines[0] * sines[1]])

    step = -time / 40
    for _ in range(40):
        a = flow(place)
        b = flow(place + step / 2 * a)
        c = flow(place + step / 2 * b)
        place = place + step / 6 * (a + 2 * b + 2 * c + flow(place + step * c))
    return torch.exp(-((place[0] - 0.5) ** 2 + (place[1] - 0.3) ** 2) / 0.1**2)


def test_a_steady_flow_stays_and_carries_a_blob_with_second_order() -> None:
    density_errors, velocity_errors = [], []
    for n in (32, 64, 128):
        solver = SmokeSolver(SmokeSettings((n, n), buoyancy=0.0), dtype=torch.float64)
        solver.start(carried(n, 0.0)[None, None], cells(n))
        solver.advance(1.0)
        density_errors.append(float((solver.density[0, 0] - carried(n, 1.0)).square().mean().sqrt()))
        velocity_errors.append(float((solver.velocity[1] - cells(n)[1]).square().mean().sqrt()))
    for errors, bound in ((density_errors, 1.5e-3), (velocity_errors, 1.5e-4)):
        orders = np.log2(np.divide(errors[:-1], errors[1:]))
        assert orders.min() > 1.8, (errors, orders)
        assert errors[-1] < bound


def test_rising_smoke_converges_with_second_order() -> None:
    runs = []
    for n in (48, 96, 192):
        solver = SmokeSolver(SmokeSettings((n, n)), dtype=torch.float64)
        solver.start(blob(n, n))
        for _ in range(n // 4):  # intervals that shrink with the cells, or steps would not
            solver.advance(4 / n)
        runs.append(solver.density)
    coarse, fine = (float((torch.nn.functional.avg_pool2d(b, 2) - a).square().mean().sqrt()) for a, b in pairwise(runs))
    assert math.log2(coarse / fine) > 1.8


def test_smoke_rises_towards_row_zero() -> None:
    rows = torch.arange(48.0)
    solver = SmokeSolver(SmokeSettings((48, 32)))
    solver.start(blob(48, 32, y=1.1).float())

    def height() -> float:
        profile = solver.density[0, 0].sum(1)
        return float((rows * profile).sum() / profile.sum())

    heights = [height()]
    for _ in range(5):
        solver.advance(0.2)
        heights.append(height())
    assert all(after < before for before, after in pairwise(heights))
    assert heights[-1] < heights[0] - 3


def test_the_floor_is_the_mirrored_ceiling() -> None:
    density = blob(40, 32, y=0.9)
    up, down = (SmokeSolver(SmokeSettings((40, 32), buoyancy=b), dtype=torch.float64) for b in (1.0, -1.0))
    up.start(density)
    down.start(density.flip(2))
    for _ in range(5):
        up.advance(0.1)
        down.advance(0.1)
    torch.testing.assert_close(down.density.flip(2), up.density, rtol=0, atol=1e-10)


def mirrored(inflow: Inflow) -> Inflow:
    return dataclasses.replace(inflow, position=1 - inflow.position, sway=-inflow.sway)


def test_the_mirrored_plume_is_the_mirror_of_the_plume() -> None:
    inflow = random_inflow([3, 4], seed=5)
    box = SmokeSettings((56, 32))
    one, other = (SmokeSolver(box, 2, flow, dtype=torch.float64) for flow in (inflow, mirrored(inflow)))
    density, (down, right) = blob(56, 32, x=0.3, y=1.3).expand(2, 1, 56, 32), noise(2, 56, 32)[1]
    one.start(density, (0.1 * down, 0.1 * right))
    other.start(density.flip(3), (0.1 * down.flip(2), -0.1 * right.flip(2)))
    for _ in range(10):
        one.advance(0.05)
        other.advance(0.05)
    torch.testing.assert_close(other.density.flip(3), one.density, rtol=0, atol=1e-9)
    torch.testing.assert_close(-other.velocity[1].flip(2), one.velocity[1], rtol=0, atol=1e-9)
    assert (one.density - one.density.flip(3)).abs().max() > 0.5


def test_the_inflow_pulses_and_sways_from_the_start() -> None:
    def value(number: float) -> Tensor:
        return torch.full((1, 1), number)

    # Upward 0.5 (1 − cos(πt/2)), sideways 0.5 sin(πt/2).
    steady = {"position": value(0.5)[0], "width": value(0.1)[0], "speed": value(0.5)[0]}
    waves = {"frequency": value(0.25), "phase": value(-math.pi / 2), "pulse": value(1.0), "sway": value(0.5)}
    solver = SmokeSolver(SmokeSettings((64, 64), buoyancy=0.0), inflow=Inflow(**steady, **waves))
    for _ in range(2):
        solver.start(torch.zeros(1, 1, 64, 64))
        upward, sideways = [], []
        for interval in (0.1, 0.9, 1.0, 1.0):
            solver.advance(interval)
            upward.append(-float(solver.velocity[0][0, -5:-2, 30:34].mean()))
            sideways.append(float(solver.velocity[1][0, -4:, 30:35].mean()))
        np.testing.assert_allclose(sideways, [0.08, 0.5, 0.0, -0.5], atol=0.1)
        assert upward[0] < 0.01 < upward[1] < 0.5 * upward[2]


def test_no_two_plumes_are_alike() -> None:
    trajectory, _ = simulate(20, range(4), settings=SmokeSettings((56, 32)))
    another, _ = simulate(20, [0], seed=1, settings=SmokeSettings((56, 32)))
    last = torch.cat([trajectory, another])[:, -1, 0].flatten(1)
    distances = torch.cdist(last, last) / last.norm(dim=1)
    assert distances[~torch.eye(5, dtype=torch.bool)].min() > 0.3


def test_a_sample_depends_on_its_number_and_the_seed_only() -> None:
    box = SmokeSettings((48, 32), frame_interval=0.2)
    together, _ = simulate(4, range(4), seed=2, settings=box)
    alone, _ = simulate(4, [2], seed=2, settings=box)
    torch.testing.assert_close(alone[0], together[2], rtol=0, atol=1e-6)
    # Its companions take other numbers of steps, or the test says nothing.
    solver = SmokeSolver(box, 4, random_inflow(range(4), 2)).advance(box.frame_interval)
    assert len(set(solver._dt.flatten().tolist())) > 1


def test_a_plume_is_the_same_at_every_resolution() -> None:
    coarse, _ = simulate(8, settings=SmokeSettings((112, 64)))
    fine, _ = simulate(8, settings=SmokeSettings((224, 128)))
    fine = torch.nn.functional.avg_pool2d(fine[0, -1], 2)
    assert (coarse[0, -1] - fine).norm() / fine.norm() < 0.1
    assert fine.norm() > 5


def test_what_is_still_stays_still() -> None:
    solver = SmokeSolver(SmokeSettings((40, 24)), batch=2)
    solver.advance(1.0)
    assert not solver.density.any()
    assert not solver.velocity[0].any()
    layers = torch.linspace(1, 0, 40).view(1, 1, 40, 1).expand(2, 1, 40, 24)  # lighter above: hydrostatic
    for density in (torch.ones(2, 1, 40, 24), layers):
        solver.start(density)
        for _ in range(10):
            solver.advance(0.1)
        assert max(float(component.abs().max()) for component in solver.velocity) < 1e-5
        torch.testing.assert_close(solver.density, density, rtol=0, atol=1e-5)


def test_frames_are_densities_of_an_entering_plume() -> None:
    box = SmokeSettings((30, 20))
    trajectory, made_by = simulate(6, [4, 7], seed=3, settings=box)
    assert trajectory.shape == (2, 6, 1, 30, 20)
    assert trajectory.dtype == torch.float32
    assert trajectory.min() >= 0
    assert trajectory.max() <= 1
    assert (trajectory.sum((2, 3, 4)).diff(dim=1) > 0).all()
    assert not trajectory[:, 0, 0, :15].any()
    assert torch.equal(torch.stack(list(stream(6, [4, 7], seed=3, settings=box)), 1), trajectory)
    assert json.loads(json.dumps(made_by))["frame_interval"] == 0.05


def test_a_narrow_inflow_shows_on_the_coarsest_grid() -> None:
    trajectory, _ = simulate(3, range(5), settings=SmokeSettings((4, 4)))
    assert (trajectory[:, -1].amax((1, 2, 3)) > 0.1).all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: SmokeSettings((3, 20)), "at least 4 rows and 4 columns; got"),
        (lambda: SmokeSettings((20,)), "at least 4 rows and 4 columns; got"),  # type: ignore[arg-type]
        (lambda: SmokeSettings(frame_interval=0.0), "positive frame interval and a finite buoyancy; got 0.0"),
        (lambda: SmokeSettings(buoyancy=math.nan), "positive frame interval and a finite buoyancy; got 0.05 and nan"),
        (lambda: stream(0), "at least one frame; got 0"),
        (lambda: stream(1, []), "expected sample numbers and a seed of zero or more"),
        (lambda: random_inflow([-1]), "expected sample numbers and a seed of zero or more"),
        (lambda: SmokeSolver(batch=0), "at least one sample, and an inflow for each; got 0"),
        (lambda: SmokeSolver(batch=3, inflow=random_inflow([0, 1])), "an inflow for each; got 3 and 2 inflows"),
        (lambda: SmokeSolver().advance(-1.0), "positive interval of time; got -1.0"),
        (lambda: SmokeSolver().start(torch.zeros(1, 1, 128, 224)), r"shape \(1, 1, 224, 128\); got \(1, 1, 128, 224\)"),
        (lambda: SmokeSolver().start(torch.full((1, 1, 224, 128), math.nan)), "got NaN or Inf"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(call: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()  # type: ignore[operator]


def test_half_precision_is_refused() -> None:
    with pytest.raises(TypeError, match="float32 or float64; got torch"):
        SmokeSolver(dtype=torch.float16)
