"""Navier-Stokes on the torus against torch-cfd 0.2.6 at equal accuracy, in one process, interleaved.

python benchmarks/navier_stokes.py                  ours and torch-cfd; the ways to take the transforms of one stage
python benchmarks/navier_stokes.py --device cuda    ours alone: 1200 trajectories of the paper's two data sets

torch-cfd installs by `pip install --no-deps torch-cfd==0.2.6` with einops, tqdm, dill, seaborn and xarray beside it.
The problem is the paper's first data set, 64², in float32. Each solver takes the longest step of one ladder that keeps
its largest relative error, against a run on 128² in float64, under the target.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from common import interleaved, milliseconds, report
from torch import Tensor

from transform_once.solvers.navier_stokes import (
    PILOTS,
    Settings,
    choose_settings,
    generate,
    initial_vorticity,
    paper_forcing,
    solve,
)

# A run is called with a number of steps and gives the vorticity (batch, 1, N, N) at the final time.
Run = Callable[[int], Tensor]
DATA_SETS = ((1e-3, 50.0), (1e-4, 15.0))  # the paper's viscosities and final times
TARGETS = (1e-3, 1e-4)


def torch_cfd_runs(initial: Tensor, viscosity: float, final: float) -> dict[str, Run]:
    """torch-cfd's two spectral steppers of order above one, as its examples build them."""
    from torch_cfd.forcings import SinCosForcing
    from torch_cfd.grids import Grid
    from torch_cfd.spectral import IMEXStepper, NavierStokes2DSpectral, RK4CrankNicolsonStepper

    grid = Grid(shape=tuple(initial.shape[-2:]), domain=((0, 1), (0, 1)))

    def run(equation: NavierStokes2DSpectral) -> Run:
        def call(steps: int) -> Tensor:
            state, _ = equation(torch.fft.rfft2(initial[:, 0]), final / steps, steps=steps)
            return torch.fft.irfft2(state).unsqueeze(1)

        return call

    steppers = {"RK2-CN": IMEXStepper(order=2), "RK4-CN": RK4CrankNicolsonStepper()}
    forcing = SinCosForcing(grid=grid)
    return {
        f"torch-cfd {name}": run(NavierStokes2DSpectral(viscosity, grid, forcing_fn=forcing, step_fn=stepper))
        for name, stepper in steppers.items()
    }


def our_run(initial: Tensor, viscosity: float, final: float) -> Run:
    grid = initial.shape[-1]
    return lambda steps: solve(initial, viscosity, final, paper_forcing, settings=Settings(grid, final / steps))[0]


def longest_steps(run: Run, exact: Tensor, final: float) -> dict[float, tuple[int, float]]:
    """For each target the fewest steps of a ladder that keep the largest relative L2 error under it, and that error."""
    found: dict[float, tuple[int, float]] = {}
    for rung in range(24):
        steps = math.ceil(final * 2 ** (2 + rung / 4))
        try:
            difference = run(steps).double() - exact
        except FloatingPointError:
            continue
        error = float((difference.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max())
        found |= {target: (steps, error) for target in TARGETS if target not in found and error <= target}
        if len(found) == len(TARGETS):
            break
    return found


def against_torch_cfd(samples: int, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    viscosity, final = DATA_SETS[0]
    initial = initial_vorticity(samples, 64)
    exact, _ = solve(initial.double(), viscosity, final, settings=Settings(128, 0.05))
    runs = {"ours": our_run(initial, viscosity, final), **torch_cfd_runs(initial, viscosity, final)}
    found = {name: longest_steps(run, exact, final) for name, run in runs.items()}
    for target in TARGETS:
        chosen = {name: steps[target] for name, steps in found.items() if target in steps}
        calls = {name: (lambda run=runs[name], steps=chosen[name][0]: run(steps)) for name in chosen}
        times = {name: milliseconds(seconds) for name, seconds in interleaved(calls, rounds).items()}
        rows += [
            {
                "solver": name,
                "target": target,
                "error": f"{chosen[name][1]:.1e}",
                "steps": chosen[name][0],
                "ms a trajectory": f"{median / samples:.2f}",
                "iqr": f"{spread / samples:.2f}",
                "us a step": f"{1e3 * median / samples / chosen[name][0]:.1f}",
                "ours is faster by": f"{median / times['ours'][0]:.1f}",
            }
            for name, (median, spread) in times.items()
        ]
    return rows


def transforms_of_one_stage(rounds: int) -> list[dict[str, object]]:
    """Two fields to the grid and two back, per trajectory: as real, as complex transforms, and as matrix products."""
    rows: list[dict[str, object]] = []
    for size, batch in ((64, 64), (128, 16), (256, 4)):
        kept = 2 * ((size - 1) // 3) + 1
        fields = torch.randn(2 * batch, size, size)
        half, full = torch.fft.rfft2(fields), torch.fft.fft2(torch.complex(fields[:batch], fields[batch:]))
        up, block = torch.randn(size, kept), torch.randn(2 * batch, kept, kept)
        rivals = {
            "real": lambda half=half, fields=fields: (torch.fft.irfft2(half), torch.fft.rfft2(fields)),
            "complex": lambda full=full: (torch.fft.ifft2(full), torch.fft.fft2(full)),
            "matrices": lambda up=up, block=block, fields=fields: (up @ block @ up.T, up.T @ fields @ up),
        }
        times = interleaved(rivals, rounds)
        row: dict[str, object] = {"size": f"{size}²", "batch": batch}
        row |= {f"{name} us": f"{1e3 * milliseconds(seconds)[0] / batch:.1f}" for name, seconds in times.items()}
        rows.append(row)
    return rows


def on_cuda(samples: int, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for viscosity, final in DATA_SETS:
        torch.cuda.synchronize()
        start = time.perf_counter()
        settings = generate(samples, viscosity, final, device="cuda")[2]
        torch.cuda.synchronize()
        everything = time.perf_counter() - start
        pilots = initial_vorticity(PILOTS, 64, dtype=torch.float64, device="cuda")
        initial = initial_vorticity(samples, 64, device="cuda")
        choose = lambda pilots=pilots, nu=viscosity, t=final: choose_settings(pilots, nu, t)  # noqa: E731
        run = lambda initial=initial, nu=viscosity, t=final, s=settings: solve(initial, nu, t, settings=s)  # noqa: E731
        times = interleaved({"choose": choose, "solve": run}, rounds, "cuda")
        steps = math.ceil(final / settings.time_step)
        rows.append(
            {
                "trajectories": samples,
                "viscosity": viscosity,
                "time": final,
                "grid": f"{settings.grid}²",
                "steps": steps,
                "choose s": f"{milliseconds(times['choose'])[0] / 1e3:.2f}",
                "solve s": f"{milliseconds(times['solve'])[0] / 1e3:.2f}",
                "ms a step": f"{milliseconds(times['solve'])[0] / steps:.3f}",
                "first call, all s": f"{everything:.2f}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--samples", type=int, default=0, help="trajectories; 32 on the CPU and 1200 on CUDA by default"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.device == "cuda":
        report(on_cuda(options.samples or 1200, options.rounds), "navier_stokes", "cuda")
        return
    with torch.no_grad():
        report(against_torch_cfd(options.samples or 32, options.rounds), "navier_stokes")
        report(transforms_of_one_stage(options.rounds), "navier_stokes_transforms")


if __name__ == "__main__":
    main()
