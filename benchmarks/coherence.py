"""Which waves follow from the same ones of the input, and what T1Grid gains by acting on these alone.

    python benchmarks/coherence.py                              # on a CPU at half the resolution, half an hour
    python benchmarks/coherence.py --draw --page docs/layers.md # the table of the rows, nothing is trained

For each problem the coherence shell by shell (`transform_once.evaluation.coherence`), the waves that `training.choose`
takes by it, and the test error of T1Grid after as many steps of Muon with all waves and four layers, with the chosen
ones and four layers, and with the chosen ones and eight. Where all waves are chosen, two show what it would cost.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from common import describe, results_folder
from timed_runs import Deadline, Row, Table, fill, markdown, run_rows

import transform_once as t1
from transform_once.evaluation.coherence import coherence
from transform_once.models.t1_grid import T1Grid, grid_points, most_waves
from transform_once.processes import choose_device
from transform_once.solvers import datasets, more_datasets
from transform_once.training.choose import DEEP, DEPTH, FEWEST_WAVES, choose_model

KEY = ("problem", "resolution", "train", "steps", "layers")
SEED, SHELLS = 2024, 9
PROBLEMS: dict[str, tuple[Callable[..., None], int]] = {
    "Navier-Stokes, ν=1e-3, T=20": (partial(datasets.navier_stokes, viscosity=1e-3, time=20.0), 64),
    "Navier-Stokes, ν=1e-4, T=15": (partial(datasets.navier_stokes, viscosity=1e-4, time=15.0), 64),
    "Darcy flow": (more_datasets.darcy, 64),
    "Burgers 1-D": (more_datasets.burgers, 1024),
    "advection 1-D": (more_datasets.advection, 1024),
    "diffusion-advection 3-D": (more_datasets.diffusion_advection, 32),
}
LAYERS = {"all": DEPTH, "few": DEPTH, "few, deep": DEEP}


def parts_of(problem: str, options: argparse.Namespace) -> tuple[t1.Fields, t1.Fields]:
    """Samples to train on and to test on, made where they are not there yet."""
    make, resolution = PROBLEMS[problem]
    resolution, samples = resolution // options.shrink, options.samples + options.held_out
    path = options.data / f"coherence-{list(PROBLEMS).index(problem)}-{samples}-{resolution}-{SEED}.h5"
    if not path.exists():
        options.data.mkdir(parents=True, exist_ok=True)
        make(path, samples=samples, resolution=resolution, seed=SEED, device=options.device)
    test, train = t1.Fields.open(path).split(options.held_out, options.samples)
    return train.load(), test.load()


def row_of(job: Row, parts: tuple[t1.Fields, t1.Fields], options: argparse.Namespace) -> Row:
    """Train for the job's steps, whatever the time, and test once."""
    train, test = parts
    model, _ = choose_model(train, given={"waves": FEWEST_WAVES, "depth": LAYERS[job["layers"]]}, device=options.device)
    assert isinstance(model, T1Grid)
    most = most_waves(grid_points(model.block))
    found = coherence(train, max(most))
    assert found is not None
    chosen = max(FEWEST_WAVES, found.waves())
    few = chosen if 2 * chosen <= max(most) else FEWEST_WAVES
    waves = most if job["layers"] == "all" else tuple(min(few, m) for m in most)
    torch.manual_seed(0)
    model = T1Grid(**{**model.config, "waves": waves})
    epochs = max(1, round(job["steps"] / -(-len(train) // options.batch_size)))
    settings = {"optimizer": "muon", "learning_rate": 1e-2, "weight_decay": 3e-2, "batch_size": options.batch_size}
    run = t1.train(model, train, epochs=epochs, progress=False, device=options.device, seed=0, **settings)
    taken = run.history[-1]["step"]
    return {
        "waves": " × ".join(map(str, waves)),
        "chosen": chosen if few == chosen else "all",
        "modes": " × ".join(map(str, model.block)),
        "depth": model.config["depth"],
        "energy": " ".join(f"{share:.3g}" for share in found.energy[:SHELLS]),
        "explained": " ".join(f"{share:.3g}" for share in found.explained[:SHELLS]),
        "parameters": run.description["model"]["parameters"],
        "milliseconds_per_step": 1000 * run.description["seconds"] / taken,
        "loss": run.history[-1]["loss"],
        "test": t1.evaluate(run.model, test, progress=False)["relative_l2"],
    }


def table_of(rows: Sequence[Row]) -> str:
    """Problems down; coherence of the first shells, what is chosen, and errors with the milliseconds of a step."""
    lines = []
    for problem in PROBLEMS:
        mine = {row["layers"]: row for row in rows if row["problem"] == problem and row.get("test")}
        if not mine:
            continue
        one = next(iter(mine.values()))
        shares = zip(one["explained"].split(), one["energy"].split(), strict=True)
        shells = [float(linear) / float(whole) if float(whole) > 1e-9 else None for linear, whole in shares]
        cells = ["–" if share is None else f"{share:.2f}" for share in shells[1:]]
        cells += [""] * (SHELLS - 1 - len(cells))
        errors = [
            f"{float(mine[name]['test']):.4g} ({float(mine[name]['milliseconds_per_step']):.0f} ms)"
            if name in mine
            else ""
            for name in LAYERS
        ]
        lines.append([problem, *cells, one["chosen"], mine.get("few", one)["waves"], *errors])
    columns = ["problem", *(f"k={number}" for number in range(1, SHELLS)), "chosen", "few"]
    return markdown([*columns, "all waves, 4 layers", "few, 4 layers", "few, 8 layers"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--samples", type=int, default=300, help="to train on")
    parser.add_argument("--held-out", type=int, default=100, help="to test on")
    parser.add_argument("--shrink", type=int, default=2, help="divide all resolutions by this")
    parser.add_argument("--seconds", type=float, help="begin no run once so many seconds have passed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="folder of the rows; by default that of the hardware")
    parser.add_argument("--data", type=Path, default=Path("runs/data"), help="folder for the solvers' data")
    parser.add_argument("--draw", action="store_true", help="print the table of the rows, train nothing")
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    options = parser.parse_args()
    device = choose_device(options.device)
    table = Table((options.output or results_folder(device.type)) / "coherence.csv", KEY)
    if not options.draw:
        print(describe(device.type))
        deadline = Deadline(options.seconds)
        for problem, (_, resolution) in PROBLEMS.items():
            about = {"problem": problem, "resolution": resolution // options.shrink, "train": options.samples}
            jobs = [{**about, "steps": options.steps, "layers": name, "budget": 0} for name in LAYERS]
            if not all(table.finished(job) for job in jobs):
                run_rows(
                    table, jobs, partial(row_of, parts=parts_of(problem, options), options=options), deadline, device
                )
    print(table_of(table.rows))
    if options.page:
        fill(options.page, "coherence", table_of(table.rows))


if __name__ == "__main__":
    main()
