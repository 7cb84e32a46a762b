"""A first try with T1 against one with FNO or a UNet: default settings, equal seconds, five kinds of problems.

    python benchmarks/generality.py --seconds 560    # on a GPU; the same command continues
    python benchmarks/generality.py --draw           # table and picture of the rows, no GPU
    python benchmarks/generality.py --device cpu --samples 40 --held-out 10 --shrink 4 --seconds-per-run 2    # a toy

Navier-Stokes at 64² (ν=1e-4, T=15), Darcy flow at 64² (piecewise constant media, not periodic), Burgers' equation and
advection at 1024 points, diffusion with advection at 32³. 1000 pairs to train, 100 to keep the best weights by, as
`t1 train` does, and 200 that nothing is chosen by, on which each run is measured once. Models are those that
`training.choose` picks for the data; training has the default settings, the symmetries of each problem among them.
T1Grid, which is the default model, and T1 without and with local maps are also trained in a quarter of the seconds.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import describe, results_folder
from timed_runs import Deadline, Row, Table, fill, markdown, run_rows, text, train_for

import transform_once as t1
from transform_once.config import Model
from transform_once.models.operator import Operator
from transform_once.processes import choose_device
from transform_once.reports.curves import COLOURS, STYLE
from transform_once.reports.figures import save_figure
from transform_once.solvers import datasets, more_datasets

KEY = ("problem", "model", "share", "budget", "seed", "resolution", "train", "change")
PICTURE = "generality.png"
SEED = 2023  # of the data
LEVEL = 1.05  # how much worse the first try may be in a quarter of the seconds

# The generator and its resolution.
PROBLEMS: dict[str, tuple[Callable[..., None], int]] = {
    "Navier-Stokes": (partial(datasets.navier_stokes, viscosity=1e-4, time=15.0), 64),
    "Darcy flow": (more_datasets.darcy, 64),
    "Burgers 1-D": (more_datasets.burgers, 1024),
    "advection 1-D": (more_datasets.advection, 1024),
    "diffusion-advection 3-D": (more_datasets.diffusion_advection, 32),
}
MODELS = {
    "T1Grid": Model("T1Grid"),
    "T1": Model("T1"),
    "T1 pointwise": Model("T1", local="pointwise"),
    "T1 conv": Model("T1", local="conv"),
    "FNO": Model("FNO"),
    "UNet": Model("UNet"),
}
FIRST, QUARTER = "T1Grid", 0.25  # what `t1 train` takes by default


def parts_of(problem: str, options: argparse.Namespace, device: torch.device) -> dict[str, t1.Fields]:
    """The samples to test on, to validate with and to train on, made where they are not there yet."""
    make, resolution = PROBLEMS[problem]
    counts = {"test": options.held_out, "validation": max(1, options.held_out // 2), "train": options.samples}
    resolution, samples = resolution // options.shrink, sum(counts.values())
    path = options.data / f"{problem.lower().replace(' ', '-')}-{samples}-{resolution}-{SEED}.h5"
    if not path.exists():
        options.data.mkdir(parents=True, exist_ok=True)
        make(path, samples=samples, resolution=resolution, seed=SEED, device=str(device))
    split = t1.Fields.open(path).split(*counts.values())
    return {name: part.load() for name, part in zip(counts, split, strict=True)}


def jobs_of(problem: str, options: argparse.Namespace) -> list[Row]:
    """All runs of a problem: every model, then the T1s in a quarter of the seconds."""
    whole = [(name, 1.0) for name in MODELS]
    runs = [*whole, *((name, QUARTER) for name in MODELS if name.startswith("T1"))]
    resolution = PROBLEMS[problem][1] // options.shrink
    about = {"problem": problem, "resolution": resolution, "train": options.samples, "change": options.change}
    return [
        {**about, "model": name, "share": share, "budget": share * options.seconds_per_run, "seed": seed}
        for seed in options.seeds
        for name, share in runs
        if name in options.models
    ]


def row_of(job: Row, parts: dict[str, t1.Fields], given: dict[str, Any], device: torch.device) -> Row:
    """Train with default settings, but for those that are given, and measure."""
    said: list[str] = []

    def make() -> Operator:
        model, said[:] = MODELS[job["model"]].build(parts["train"], 0, job["seed"], str(device))
        return model

    settings = {**given, "seed": job["seed"]}
    model, row = train_for(job["budget"], make, parts["train"], parts["validation"], settings, device)
    errors = {part: t1.evaluate(model, parts[part], progress=False)["relative_l2"] for part in ("validation", "test")}
    hidden = ("in_channels", "out_channels", "resolution")
    config = {key: value for key, value in model.config.items() if key not in hidden and value is not None}
    return {**row, **errors, "configuration": repr(config), "chosen": "; ".join(said)}


def errors_of(rows: Sequence[Row], problem: str, model: str, share: float) -> list[float]:
    """The test errors of all seeds under the change that was run last."""
    kept = [row for row in rows if (row["problem"], row["model"], row["share"]) == (problem, model, text(share))]
    last = max(kept, key=lambda row: row["date"], default={"change": ""})["change"]
    return [float(row["test"]) for row in kept if row.get("test") and row["change"] == last]


def _known(rows: Sequence[Row]) -> list[str]:
    """The problems that there are rows of."""
    return [problem for problem in PROBLEMS if any(row["problem"] == problem for row in rows)]


def table_of(rows: Sequence[Row]) -> str:
    """Problems down, models across, and how a first try in a quarter of the seconds compares with FNO."""
    kinds = [name for name in MODELS if name.startswith("T1")]
    columns = ["problem", *MODELS, *(f"{name}, ¼ of the seconds" for name in kinds), f"{FIRST} in ¼ / FNO"]
    lines = []
    for problem in _known(rows):
        whole = {name: errors_of(rows, problem, name, 1.0) for name in MODELS}
        quarter = {name: errors_of(rows, problem, name, QUARTER) for name in kinds}
        cells = [_mean(errors) for errors in (*whole.values(), *quarter.values())]
        both = quarter[FIRST] and whole["FNO"]
        ratio = statistics.fmean(quarter[FIRST]) / statistics.fmean(whole["FNO"]) if both else None
        verdict = "" if ratio is None else f"{ratio:.2f}" if ratio <= LEVEL else f"**{ratio:.2f}**"
        lines.append([problem, *cells, verdict])
    return markdown(columns, lines)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Bars of the test error, grouped by problem; those of a quarter of the seconds are hatched."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = [(name, 1.0) for name in MODELS] + [(name, QUARTER) for name in MODELS if name.startswith("T1")]
    bars.sort(key=lambda bar: (list(MODELS).index(bar[0]), -bar[1]))
    width = 0.85 / len(bars)
    with rc_context({**STYLE, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.subplots()
        for number, (name, share) in enumerate(bars):
            found = [(at, errors_of(rows, problem, name, share)) for at, problem in enumerate(_known(rows))]
            found = [(at, errors) for at, errors in found if errors]
            where = [at + (number - (len(bars) - 1) / 2) * width for at, _ in found]
            style: dict[str, Any] = {"color": COLOURS[list(MODELS).index(name)], "label": name}
            if share != 1:
                style |= {"hatch": "////", "alpha": 0.45, "label": f"{name}, ¼ of the seconds"}
            axes.bar(where, [statistics.fmean(errors) for _, errors in found], width, **style)
            for x, (_, errors) in zip(where, found, strict=True):
                axes.plot([x] * len(errors), errors, ".", color="#222222", markersize=3)
        axes.set(yscale="log", ylabel="relative L2, test pairs")
        axes.set_xticks(range(len(_known(rows))), [problem.replace(" ", "\n") for problem in _known(rows)])
        axes.grid(axis="x", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
        return save_figure(figure, path)


def _mean(errors: Sequence[float]) -> str:
    if not errors:
        return ""
    return f"{statistics.fmean(errors):.4g}" + (f" ± {statistics.stdev(errors):.2g}" if len(errors) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds-per-run", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, help="begin no run that would not end within so many seconds")
    parser.add_argument("--only", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS), help="these problems")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="these models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=1000, help="to train on")
    parser.add_argument("--held-out", type=int, default=200, help="to test on; half as many more to validate with")
    parser.add_argument("--shrink", type=int, default=1, help="divide all resolutions by this, for a toy")
    parser.add_argument("--change", default="first", help="what is new in the code; the rows of each change are kept")
    parser.add_argument(
        "--settings", type=json.loads, default={}, help='of t1 train, {"optimizer": "muon"}; name them by --change'
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="folder of the rows; by default that of the hardware")
    parser.add_argument("--data", type=Path, default=Path("runs/data"), help="folder for the solvers' data")
    parser.add_argument("--draw", action="store_true", help="draw the rows and print their table, train nothing")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="folder of the picture")
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    options = parser.parse_args()
    if options.settings and options.change == parser.get_default("change"):
        parser.error("settings of your own need a name: give --change")
    device = choose_device(options.device)
    table = Table((options.output or results_folder(device.type)) / "generality.csv", KEY)
    if options.draw:
        options.figures.mkdir(parents=True, exist_ok=True)
        same = {str(PROBLEMS[name][1] // options.shrink) for name in PROBLEMS}
        rows = [row for row in table.rows if row["train"] == str(options.samples) and row["resolution"] in same]
        print(table_of(rows), draw(rows, options.figures / PICTURE), sep="\n")
        if options.page:
            picture = f"\n\n![Errors of first tries](figures/{PICTURE})" if rows else ""
            fill(options.page, "generality", table_of(rows) + picture)
        return
    print(describe(device.type))
    deadline, left = Deadline(options.seconds), 0
    for problem in options.only:
        jobs = jobs_of(problem, options)
        if all(table.finished(job) for job in jobs):
            continue
        parts = parts_of(problem, options, device)
        work = partial(row_of, parts=parts, given=options.settings, device=device)
        left += run_rows(table, jobs, work, deadline, device)
    print(f"{left} runs are left, the same command continues" if left else "all that was asked is done")


if __name__ == "__main__":
    main()
