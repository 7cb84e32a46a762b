"""Data sets from our own solvers, written sample by sample: a killed run loses nothing finished and continues.

Every function here is a verb of `t1 generate`; heavy modules load inside, so that asking for help stays fast. Under
`torchrun --nproc-per-node K -m transform_once generate …` K processes share the samples and the first one writes them.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from transform_once.processes import Arrays, World

Item = TypeVar("Item")


def navier_stokes(
    output: Path = Path("navier_stokes.h5"),
    viscosity: float = 1e-3,
    time: float = 50.0,
    samples: int = 1200,
    resolution: int = 64,
    frames: int = 0,
    seed: int = 0,
    scheme: Literal["rk4", "li"] = "rk4",
    tolerance: float = 1e-3,
    device: str = "cpu",
) -> None:
    """Vorticity on the torus with the paper's forcing, from Gaussian random fields: pairs, or trajectories.

    Args:
        output: The file of fields to write (.h5); a run that was killed continues.
        viscosity: Viscosity; 1e-3 with time 50 and 1e-4 with time 15 in the paper.
        time: The time of the target, or of the last frame.
        samples: How many.
        resolution: Grid points along each axis.
        frames: 0 for pairs (initial, final); otherwise trajectories of the initial field and this many later ones.
        seed: Sample i depends on the seed and i alone.
        scheme: "rk4", with time step and grid chosen from the tolerance, or "li" to remake the data of Li et al.
        tolerance: Relative L2 error of the solution.
        device: Where to solve: cpu or cuda; of several processes each takes a GPU of its own.
    """
    import torch

    from transform_once.processes import world
    from transform_once.solvers import navier_stokes as solver

    if samples < 1 or frames < 0:
        raise ValueError(f"samples must be at least 1 and frames at least 0; got {samples} and {frames}")
    times = [time * (frame + 1) / frames for frame in range(frames)] if frames else time
    field = (1, resolution, resolution)
    with world(device) as place:

        def choose() -> solver.Settings:
            if scheme == "li":
                return solver.LI_ET_AL
            pilots = solver.initial_vorticity(solver.PILOTS, resolution, seed, dtype=torch.float64, device=place.device)
            return solver.choose_settings(pilots, viscosity, time, tolerance=tolerance)

        def solve(numbers: range, _written: int) -> "Iterator[Arrays]":
            initial, later, _ = solver.generate(
                numbers, viscosity, times, resolution, seed, settings=settings, device=place.device
            )
            if frames:
                yield {"trajectory": torch.cat([initial[:, None], later], 1)}
            else:
                yield {"input": initial, "target": later}

        settings = place.lead(choose)
        announced: dict[str, Any] = {
            "shapes": {"trajectory": (frames + 1, *field)} if frames else {"input": field, "target": field},
            "grid": "node",
            "periodic": True,
            "channels": ("vorticity",),
            "source": "Navier-Stokes on the unit torus",
            "seed": seed,
            "settings": {"viscosity": viscosity, "time": time, "forcing": "paper", **asdict(settings)},
            "symmetries": [symmetry.to_dict() for symmetry in solver.NAVIER_STOKES_SYMMETRIES],
            **({"times": (0.0, *times)} if isinstance(times, list) else {}),
        }
        if place.leads:
            print(f"grid {settings.grid}², time step {settings.time_step:.3g}", file=sys.stderr)
        # An even number, because two samples are solved as one; no process is idle for want of blocks.
        block = min(512 if place.device.type == "cuda" else 32, 2 * -(-samples // (2 * place.size)))
        _write(place, output, samples, announced, solve, block, "solving")


def smoke(
    output: Path = Path("smoke.h5"),
    samples: int = 4,
    frames: int = 150,
    resolution: tuple[int, int] = (1062, 600),
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Rising plumes of smoke with random inflow, no two alike: trajectories of the density.

    Args:
        output: The file of fields to write (.h5); a run that was killed continues after the last finished plume.
        samples: How many plumes.
        frames: Frames of each.
        resolution: Rows and columns; row 0 is the top.
        seed: Plume i depends on the seed and i alone.
        device: Where to solve: cpu or cuda. Of several processes each takes one plume at a time, and a GPU of its own.
    """
    from transform_once.data.symmetries import Symmetry
    from transform_once.processes import world
    from transform_once.solvers.smoke import SmokeSettings, stream

    settings = SmokeSettings(resolution=(resolution[0], resolution[1]))
    mirror = Symmetry(signs=(1, -1), offset=(0.0, 1.0))
    announced: dict[str, Any] = {
        "shapes": {"trajectory": (frames, 1, *resolution)},
        "grid": "cell",
        "channels": ("density",),
        "times": tuple(settings.frame_interval * (frame + 1) for frame in range(frames)),
        "source": "buoyant smoke in a closed box",
        "seed": seed,
        "settings": asdict(settings),
        "symmetries": [mirror.to_dict()],
    }
    with world(device) as place:

        def simulate(numbers: range, written: int) -> "Iterator[Arrays]":
            # A plume killed midway is simulated again; the frames already in the file stay as they are.
            for frame, density in enumerate(stream(frames, numbers, seed, settings, place.device)):
                if frame >= written:
                    yield {"trajectory": density[:, None]}

        _write(place, output, samples, announced, simulate, 1, "simulating", pieces=frames)


def airfoils(
    output: Path = Path("airfoils.h5"),
    samples: int = 100,
    workers: int = 1,
    shapes: Path | None = None,
    seed: int = 0,
    resolution: int = 128,
) -> None:
    """Steady flow around airfoils with OpenFOAM and gmsh: pairs (freestream and mask) to (pressure and velocity).

    Args:
        output: The file of fields to write (.h5); finished cases stay in the folder <output>.cases, so that a run that
            was killed continues.
        samples: How many converged cases; cases that fail or do not converge are recorded there and skipped.
        workers: Solver processes at a time; a case takes half a minute to a minute of one core.
        shapes: A folder of .dat outlines; by default the UIUC airfoils of AeroSandbox (the extra `airfoil`).
        seed: Case i depends on the seed and i alone.
        resolution: Points along each axis of the images.
    """
    from transform_once.data.symmetries import Symmetry
    from transform_once.data.writer import FieldsWriter
    from transform_once.solvers import airfoil as solver

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("airfoils have workers of their own: run one process, with --workers, instead of several")
    settings = solver.AirfoilSettings(resolution=resolution)
    cases = output.with_name(output.name + ".cases")
    flows = solver.generate(samples, seed, workers, shapes, cases, settings)  # complains about missing programs
    mirror = Symmetry(
        signs=(1, -1), offset=(0.0, 1.0), factors=(1.0, 1.0, -1.0), input_factors=(1.0, -1.0, 1.0)
    )  # the velocity across the mirror changes its sign
    declared: dict[str, Any] = {
        "grid": "node",
        "channels": {"input": solver.INPUT_CHANNELS, "target": solver.TARGET_CHANNELS},
        "source": "steady flow around airfoils, OpenFOAM",
        "seed": seed,
        "settings": asdict(settings),
        "symmetries": [mirror.to_dict()],
    }
    image = (3, resolution, resolution)
    with FieldsWriter(output, samples=samples, shapes={"input": image, "target": image}, **declared) as writer:
        for number, flow in enumerate(_progress(flows, "simulating", samples)):
            if number >= writer.finished:
                writer.append(input=flow.input[None], target=flow.target[None], names=[flow.name])
    skipped = solver.failures(cases)
    if skipped:
        print(f"{len(skipped)} cases failed or did not converge; {cases} says why", file=sys.stderr)


def _write(
    place: "World",
    output: Path,
    samples: int,
    announced: dict[str, Any],
    make: "Callable[[range, int], Iterable[Arrays]]",
    block: int,
    what: str,
    pieces: int = 1,
) -> None:
    """Write all samples in order, from where a killed run stopped; all processes make them, the leader has the file.

    `make` gives arrays to append for the samples of these numbers, after so many frames that are written already; they
    come in `pieces` for each `block` of samples.
    """
    from transform_once.data.writer import FieldsWriter

    with ExitStack() as stack:
        writer: FieldsWriter  # the leader's alone

        def begin() -> tuple[int, int]:
            nonlocal writer
            writer = stack.enter_context(FieldsWriter(output, samples=samples, **announced))
            return writer.finished, writer.finished_frames

        def append(arrays: "Arrays") -> None:
            writer.append(**arrays)
            next(bar, None)

        finished, written = place.lead(begin)
        blocks = [range(start, min(start + block, samples)) for start in range(finished, samples, block)]
        bar = _progress(range(len(blocks) * pieces - written), what)
        if place.leads:
            next(bar, None)
        place.in_turns(blocks, lambda numbers: make(numbers, written if numbers[0] == finished else 0), append)
        place.lead(lambda: writer.finish())


def _progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The items, with a bar on standard error while they last."""
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, what, total=total, console=Console(stderr=True), transient=True))
