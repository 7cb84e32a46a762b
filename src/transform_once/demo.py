"""`t1 demo`: the main job from end to end, without any input, on two CPU cores in less than five minutes."""

import time
from pathlib import Path


def demo(
    output: Path = Path("demo"),
    resolution: int = 32,
    samples: int = 600,
    seconds: float = 45.0,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Generate a small Navier-Stokes set, choose the modes, transform once, train T1Grid and an FNO equally long.

    Args:
        output: Folder for the data, the runs and the page.
        resolution: Grid points along each axis.
        samples: Trajectories to solve for; 5 of 6 to train, the rest half to choose weights by and half to test on.
        seconds: Seconds of training for each of the two models.
        seed: Seed of data and weights.
        device: auto, cpu, cuda, cuda:1 or mps.
    """
    from rich.console import Console

    from transform_once.data.formats import read
    from transform_once.evaluation.analysis import analyze
    from transform_once.reports.page import report
    from transform_once.solvers.datasets import navier_stokes
    from transform_once.training.compare import compare

    console, began = Console(highlight=False), time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    data = output / "navier_stokes.h5"

    def say(sentence: str) -> None:
        console.print(f"[{time.monotonic() - began:5.1f} s] {sentence}", markup=False)

    say(f"Solving Navier-Stokes {samples} times on {resolution}² points: vorticity at time 0 to vorticity at time 10.")
    navier_stokes(data, viscosity=1e-3, time=10.0, samples=samples, resolution=resolution, seed=seed)
    fields = read(data)
    held = samples // 12
    train, validation, test = fields.split(samples - 2 * held, held, held)
    found = analyze(train, samples=64, progress=False, rates=False)
    say(found.recommendation.reason)
    say(f"Training T1Grid and an FNO on {len(train)} pairs for {seconds:g} s each, two trials of the rate included.")
    result = compare(
        train,
        seconds,
        models=("T1Grid", "FNO"),
        output=output,
        validation=validation,
        test=test,
        seed=seed,
        device=device,
        normalization="standard",
    )
    for row in result.rows:
        say(
            f"{row['model']}: relative L2 {row['relative_l2']:.4f} on {len(test)} unseen pairs after {row['steps']} "
            f"steps of {row['ms_per_step']:.1f} ms ({row['parameters']:,} parameters)"
        )
    winner, loser = result.rows
    say(
        f"{winner['model']} won this time: its error is {winner['relative_l2'] / loser['relative_l2']:.2f} times "
        f"that of {loser['model']}."
    )
    page = report([run.folder for run in result.runs if run.folder is not None], output / "report.html")
    say(f"Page with pictures: {page}")
