"""Time and memory of a training step at the scale of ScalarFlow, through `t1.train`.

    python benchmarks/scalarflow_step.py                                       # on a GPU
    python benchmarks/scalarflow_step.py --device cpu --resolution 54 30 --modes 12 12 6 --widths 4 4 4 --depth 2 \\
        --frames 8 --epochs 2 --repeats 2 --output /tmp/toy                    # a toy

Fields of 1062×600 points, batch 1, the last two frames in, integrator of order 1, three steps rolled out in the loss:
on kept modes for T1 and T1+, on fields for the FNO. Trajectories are random, smooth and few: neither time nor memory
depends on what is in them. Time as in `training_step.py`. Memory is the peak of what tensors take on the GPU during
training, data and captured graph included, less what was there before; beside it what torch reserved for that.

The floor is of `floors.py`: weights are read forward and backward in each of the three steps, since those of one layer
alone outgrow the cache, so that their traffic is nearly all of it.
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial

import torch
from common import Row, Table, arguments, middle, step_milliseconds
from floors import PRECISIONS, RATE_COLUMNS, Rates, beside_floor, measured_rates, training_floor

import transform_once as t1
from transform_once.data.fields import Fields
from transform_once.models.operator import Operator

KEYS = ("data", "model", "precision")
VALUES = (
    "parameters",
    "ms",
    "spread",
    "floor ms",
    "over floor",
    "limit",
    "peak GiB",
    "reserved GiB",
    "space",
    "captured",
)
STEPS, HISTORY, WAVES = 3, 1, 12


def smooth_trajectories(options: argparse.Namespace) -> Fields:
    """A few slow waves that swing: X_t = A cos(t/10) + B sin(t/10) on the lowest modes."""
    generator = torch.Generator().manual_seed(0)
    swing = torch.randn(2, options.trajectories, 1, 1, WAVES, WAVES, generator=generator)
    time = torch.arange(options.frames).reshape(1, -1, 1, 1, 1) / 10
    X = time.cos() * swing[0] + time.sin() * swing[1]
    return Fields(trajectory=t1.idct(X, ndim=2, size=tuple(options.resolution)), grid="cell", periodic=False)


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Operator]]:
    grid, depth = tuple(options.resolution), options.depth
    (m1, m2, m3), (w1, w2, w3) = options.modes, options.widths
    return {
        f"T1 {m1}/{depth}/{w1}": partial(t1.T1, HISTORY + 1, 1, grid, m1, w1, depth),
        f"T1+ m={m2} width {w2}": partial(t1.T1Plus, HISTORY + 1, 1, grid, m2, w2),
        f"FNO {m3}/{depth}/{w3}": partial(t1.FNO, HISTORY + 1, 1, grid, m3, w3, depth),
    }


def trained(options: argparse.Namespace, job: Row, fields: Fields) -> tuple[float, Row]:
    """Milliseconds of a step, and what the run tells; all it held is free again afterwards."""
    torch.manual_seed(0)
    model = makers(options)[str(job["model"])]()
    settings = {"precision": job["precision"], "epochs": options.epochs, "batch_size": 1, "learning_rate": 1e-4}
    settings |= {"optimizer": "adamw", "order": 1, "history": HISTORY, "steps": STEPS}
    run = t1.train(model, fields, device=options.device, progress=False, **settings)
    if not run.finished:  # a signal came
        raise KeyboardInterrupt
    about: Row = {name: run.description[name] for name in ("space", "captured")}
    return step_milliseconds(run.history), about | {"parameters": run.description["model"]["parameters"]}


def measured(options: argparse.Namespace, job: Row, fields: Fields, rates: Rates) -> Row:
    times, row, on_gpu = [], dict[str, object](), options.device == "cuda"
    for _ in range(options.repeats):
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        milliseconds, row = trained(options, job, fields)
        times.append(milliseconds)
        if on_gpu:
            row["peak GiB"] = f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.3f}"
            row["reserved GiB"] = f"{torch.cuda.max_memory_reserved() / 2**30:.3f}"
    median, spread = middle(times)
    precision, on_modes = str(job["precision"]), row["space"] == "k-space"
    row |= {"ms": f"{median:.4g}", "spread": f"{spread:.2g}", **rates.columns(precision)}
    model = makers(options)[str(job["model"])]()
    floor = partial(training_floor, model, 1, rates, precision, on_modes=on_modes, steps=STEPS)
    return row | beside_floor(median, floor)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--resolution", type=int, nargs=2, default=(1062, 600))
    parser.add_argument("--modes", type=int, nargs=3, default=(512, 224, 48), help="of T1, T1+ and FNO")
    parser.add_argument("--widths", type=int, nargs=3, default=(8, 128, 48), help="of T1, T1+ and FNO")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--trajectories", type=int, default=2)
    parser.add_argument("--frames", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    table = Table(options, "scalarflow_step", KEYS, (*VALUES, *RATE_COLUMNS))
    if options.draw:
        table.draw(lambda row: f"{row['model']}, {row['precision']}", "model", "ms", "floor ms", "ms a step")
        return
    rows, columns = options.resolution
    data = f"{rows}×{columns}, history {HISTORY}, {STEPS} steps"
    fields, rates = smooth_trajectories(options), measured_rates(options.device)
    jobs = ({"data": data, "model": model, "precision": p} for p in PRECISIONS[::-1] for model in makers(options))
    table.fill(jobs, lambda job: measured(options, job, fields, rates))


if __name__ == "__main__":
    main()
