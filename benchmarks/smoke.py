"""One step of a buoyant plume at 128 × 224 (columns × rows) against PhiFlow 3.4.0, in one process, interleaved.

python benchmarks/smoke.py        needs `pip install --no-deps phiflow==3.4.0 phiml` beside torch, scipy and matplotlib

All step on from the same developed plume by the same time, three quarters of what ours allows itself. Each step holds
an inflow, buoyancy, advection of density and velocity, and a pressure projection in a closed box:

    ours      density and velocity: limited third-order fluxes, conservative and bounded; exact projection by DCT
    PhiFlow   velocity: semi-Lagrangian (first order); density: MacCormack (second order) or semi-Lagrangian, neither
              conservative; projection by conjugate gradients from the last pressure, by its own (compiled with
              `jit_compile`) or SciPy's, until the residual is below the stated share of the norm of the divergence, or
              below 1e-5 in cells per step. Its default for a closed box, a rank deficiency of one, did not converge
              here: it is told zero.

Semi-Lagrangian steps may be longer than ours; the table counts steps. Divergence is the largest |∇·u| over max|u|/h at
the end of the run.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import interleaved, milliseconds, report
from phi.torch.flow import (
    ZERO_GRADIENT,
    Box,
    CenteredGrid,
    Solve,
    Sphere,
    StaggeredGrid,
    advect,
    backend,
    dual,
    field,
    fluid,
    jit_compile,
    math,
    resample,
    spatial,
)
from torch import Tensor

from transform_once.solvers.smoke import COURANT, SmokeSettings, SmokeSolver, random_inflow

ROWS, COLUMNS = 224, 128
GRID = {"x": COLUMNS, "y": ROWS, "bounds": Box(x=COLUMNS, y=ROWS)}


def divergence(down: Tensor, right: Tensor) -> float:
    jumps = down[:, 1:] - down[:, :-1] + right[..., 1:] - right[..., :-1]
    return float(jumps.abs().max() / torch.maximum(down.abs().max(), right.abs().max()))


def developed_plume() -> tuple[SmokeSolver, float]:
    """A plume half-way up the box, and a length of its steps at which an `advance` by two of them takes just two."""
    inflow = random_inflow([1])
    solver = SmokeSolver(SmokeSettings((ROWS, COLUMNS)), inflow=inflow)
    for _ in range(60):
        solver.advance(0.05)
    fastest_inflow = inflow.speed * (1 + inflow.pulse.abs().sum(1))
    fastest = max(float(speeds.abs().max()) for speeds in (*solver.velocity, fastest_inflow))
    return solver, 0.75 * COURANT / COLUMNS / fastest


class PhiFlow:
    """The same plume in PhiFlow, in units of cells and steps, y upwards."""

    def __init__(
        self, plume: SmokeSolver, dt: float, density_scheme: Callable[..., Any], method: str, tolerance: float
    ) -> None:
        down, right = (component[0] * (dt * COLUMNS) for component in plume.velocity)
        across, upward = right[:, 1:-1].flip(0).T, -down[1:-1].flip(0).T
        faces = {"x": math.tensor(across, spatial("x,y")), "y": math.tensor(upward, spatial("x,y"))}
        self.velocity = StaggeredGrid(math.stack(faces, dual("vector")), 0, **GRID)
        self.density = CenteredGrid(math.tensor(plume.density[0, 0].flip(0).T, spatial("x,y")), ZERO_GRADIENT, **GRID)
        self.pressure = CenteredGrid(0, ZERO_GRADIENT, **GRID)
        mouth = Sphere(x=0.5 * COLUMNS, y=0.04 * COLUMNS, radius=0.08 * COLUMNS)
        inflow = resample(mouth, to=self.density, soft=True) * dt
        solve = Solve(method, tolerance, rank_deficiency=0)
        lift = (0, plume.settings.buoyancy * dt**2 * COLUMNS)

        def step(velocity: Any, density: Any, pressure: Any) -> tuple[Any, Any, Any]:
            density = density_scheme(density, velocity, 1.0) + inflow
            velocity = advect.semi_lagrangian(velocity, velocity, 1.0) + resample(density * lift, to=velocity)
            velocity, pressure = fluid.make_incompressible(velocity, (), math.copy_with(solve, x0=pressure))
            return velocity, density, pressure

        self.step = jit_compile(step) if method == "CG" else step  # a call of SciPy cannot be compiled

    def __call__(self) -> None:
        self.velocity, self.density, self.pressure = self.step(self.velocity, self.density, self.pressure)

    def divergence(self) -> float:
        return float(math.max(abs(field.divergence(self.velocity).values))) / float(math.max(abs(self.velocity.values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    backend.default_backend().set_default_device("CPU")
    ours, dt = developed_plume()
    mac_cormack, semi_lagrangian = advect.mac_cormack, advect.semi_lagrangian
    theirs = {
        "PhiFlow 3.4.0, MacCormack, SciPy CG 1e-5": PhiFlow(ours, dt, mac_cormack, "scipy-CG", 1e-5),
        "PhiFlow 3.4.0, MacCormack, own CG 1e-5, jit": PhiFlow(ours, dt, mac_cormack, "CG", 1e-5),
        "PhiFlow 3.4.0, MacCormack, own CG 1e-3, jit": PhiFlow(ours, dt, mac_cormack, "CG", 1e-3),
        "PhiFlow 3.4.0, semi-Lagrangian, own CG 1e-3, jit": PhiFlow(ours, dt, semi_lagrangian, "CG", 1e-3),
    }

    def ten_steps() -> None:
        for _ in range(5):
            ours.advance(2 * dt)  # a pair of steps

    times = interleaved({"ours": ten_steps, **theirs}, options.rounds)
    times["ours"] = [seconds / 10 for seconds in times["ours"]]
    fastest = min(milliseconds(times[name])[0] for name in theirs)
    rows: list[dict[str, object]] = []
    for name, seconds in times.items():
        median, spread = milliseconds(seconds)
        left = divergence(*ours.velocity) if name == "ours" else theirs[name].divergence()
        row = {"solver": name, "ms per step": f"{median:.2f}", "iqr": f"{spread:.2f}", "divergence": f"{left:.1e}"}
        rows.append(row | {"fastest PhiFlow / this": f"{fastest / median:.2f}"})
    report(rows, "smoke")


if __name__ == "__main__":
    main()
