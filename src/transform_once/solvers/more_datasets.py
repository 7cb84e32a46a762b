"""More data sets from our own solvers, each a verb of `t1 generate`: Darcy flow, Burgers' equation, transport.

They are written sample by sample, in shares over processes, as those of `datasets` are: a killed run continues.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transform_once.solvers.datasets import _write

if TYPE_CHECKING:
    from torch import Tensor

    from transform_once.data.symmetries import Symmetry
    from transform_once.processes import World


def darcy(
    output: Path = Path("darcy.h5"),
    samples: int = 1200,
    resolution: int = 64,
    refinement: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Pressure in a random two-phase medium on the unit square, Li et al.'s Darcy flow: pairs (permeability, pressure).

    Args:
        output: The file of fields to write (.h5); a run that was killed continues.
        samples: How many.
        resolution: Cells along each axis.
        refinement: Solve on so many times as many cells, an odd number; by default on at least 300 along each axis.
        seed: Sample i depends on the seed and i alone.
        device: Where to solve: cpu or cuda; of several processes each takes a GPU of its own.
    """
    from transform_once.processes import world
    from transform_once.solvers import darcy as solver

    factor = solver.choose_refinement(resolution) if refinement is None else refinement
    with world(device) as place:

        def pairs(numbers: range) -> "tuple[Tensor, Tensor]":
            return solver.generate(numbers, resolution, seed, refinement=factor, device=place.device)

        announced = {
            **_described("Darcy flow in a two-phase medium", seed, (resolution,) * 2, solver.DARCY_SYMMETRIES),
            "grid": "cell",
            "periodic": False,
            "channels": {"input": ("permeability",), "target": ("pressure",)},
            "settings": {"high": solver.HIGH, "low": solver.LOW, "source": 1.0, "grid": resolution * factor},
        }
        _make(place, output, samples, announced, pairs, 16)


def burgers(
    output: Path = Path("burgers.h5"),
    viscosity: float = 0.1,
    time: float = 1.0,
    samples: int = 1200,
    resolution: int = 1024,
    seed: int = 0,
    tolerance: float = 1e-6,
    device: str = "cpu",
) -> None:
    """Burgers' equation on the circle from Gaussian random fields, as published by Li et al.: pairs (initial, later).

    Args:
        output: The file of fields to write (.h5); a run that was killed continues.
        viscosity: Viscosity; 0.1 in Li et al.'s data.
        time: The time of the target.
        samples: How many.
        resolution: Grid points; solved at 8192 points or the next multiple of these, and strided.
        seed: Sample i depends on the seed and i alone.
        tolerance: Relative L2 error of the solution, from which the number of time steps is chosen.
        device: Where to solve: cpu or cuda; of several processes each takes a GPU of its own.
    """
    from transform_once.processes import world
    from transform_once.solvers import transport as solver

    with world(device) as place:

        def choose() -> int:
            grid = solver.burgers_grid(resolution)
            pilots = solver.initial_burgers(solver.PILOTS, grid, seed, device=place.device)
            return solver.choose_steps(pilots, viscosity, time, tolerance)

        def pairs(numbers: range) -> "tuple[Tensor, Tensor]":
            first, last, _ = solver.generate_burgers(
                numbers, resolution, seed, viscosity=viscosity, time=time, steps=steps, device=place.device
            )
            return first, last

        steps = place.lead(choose)
        announced = {
            **_described("Burgers' equation on the circle", seed, (resolution,), solver.BURGERS_SYMMETRIES),
            "channels": ("velocity",),
            "settings": {
                "viscosity": viscosity,
                "time": time,
                "grid": solver.burgers_grid(resolution),
                "steps": steps,
                "tolerance": tolerance,
            },
        }
        if place.leads:
            print(f"{announced['settings']['grid']} points, {steps} time steps", file=sys.stderr)
        _make(place, output, samples, announced, pairs, 64)


def advection(
    output: Path = Path("advection.h5"),
    speed: float = 0.4,
    time: float = 1.0,
    samples: int = 1200,
    resolution: int = 1024,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Sums of two sines carried around the circle, exact: pairs (initial, later).

    Args:
        output: The file of fields to write (.h5); a run that was killed continues.
        speed: Speed, in circumferences per unit of time.
        time: The time of the target.
        samples: How many.
        resolution: Grid points.
        seed: Sample i depends on the seed and i alone.
        device: Where to compute: cpu or cuda; of several processes each takes a GPU of its own.
    """
    from transform_once.processes import world
    from transform_once.solvers import transport as solver

    with world(device) as place:

        def pairs(numbers: range) -> "tuple[Tensor, Tensor]":
            return solver.generate_advection(numbers, resolution, seed, speed=speed, time=time, device=place.device)

        announced = {
            **_described("advection on the circle", seed, (resolution,), solver.ADVECTION_SYMMETRIES),
            "settings": {"speed": speed, "time": time},
        }
        _make(place, output, samples, announced, pairs, 256)


def diffusion_advection(
    output: Path = Path("diffusion_advection.h5"),
    velocity: tuple[float, float, float] = (0.3, 0.2, 0.1),
    diffusivity: float = 2e-3,
    time: float = 1.0,
    samples: int = 1200,
    resolution: int = 32,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Gaussian random fields in the periodic cube, carried and smoothed, exact: pairs (initial, later).

    Args:
        output: The file of fields to write (.h5); a run that was killed continues.
        velocity: Along each axis, in boxes per unit of time; with signs write them as "[0.3, -0.2, 0.1]".
        diffusivity: Of the field; 0 for advection alone.
        time: The time of the target.
        samples: How many.
        resolution: Grid points along each axis.
        seed: Sample i depends on the seed and i alone.
        device: Where to compute: cpu or cuda; of several processes each takes a GPU of its own.
    """
    from transform_once.processes import world
    from transform_once.solvers import transport as solver

    with world(device) as place:

        def pairs(numbers: range) -> "tuple[Tensor, Tensor]":
            return solver.generate_diffusion_advection(
                numbers,
                resolution,
                seed,
                velocity=velocity,
                diffusivity=diffusivity,
                time=time,
                device=place.device,
            )

        announced = {
            **_described(
                "diffusion and advection in the periodic cube",
                seed,
                (resolution,) * 3,
                solver.DIFFUSION_ADVECTION_SYMMETRIES,
            ),
            "settings": {"velocity": list(velocity), "diffusivity": diffusivity, "time": time},
        }
        _make(place, output, samples, announced, pairs, 16)


def _described(source: str, seed: int, grid: tuple[int, ...], symmetries: "tuple[Symmetry, ...]") -> dict[str, Any]:
    """What the sets have in common: pairs of one channel each, by default a concentration on periodic nodes."""
    return {
        "shapes": {"input": (1, *grid), "target": (1, *grid)},
        "grid": "node",
        "periodic": True,
        "channels": ("concentration",),
        "source": source,
        "seed": seed,
        "symmetries": [symmetry.to_dict() for symmetry in symmetries],
    }


def _make(
    place: "World",
    output: Path,
    samples: int,
    announced: dict[str, Any],
    pairs: "Callable[[range], tuple[Tensor, Tensor]]",
    block: int,
) -> None:
    """Write the pairs of all samples, so many at a time, but no process idle for want of a block."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1; got {samples}")
    place.lead(lambda: pairs(range(1)))  # bad settings are refused before there is a file
    block = min(block, -(-samples // place.size))
    _write(
        place,
        output,
        samples,
        announced,
        lambda numbers, _written: [dict(zip(("input", "target"), pairs(numbers), strict=True))],
        block,
        "solving",
    )
