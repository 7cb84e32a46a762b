"""Time of a training step through `t1.train`, as anyone gets it, beside its floor and the peers'.

    python benchmarks/training_step.py                       # on a GPU; --only "T1 24/6/48 fourier, .*bfloat16"
    python benchmarks/training_step.py --accuracy            # what the precisions do to the error, five seeds
    python benchmarks/training_step.py --device cpu --resolution 16 --samples 40 --batch 8 --modes 6 --depth 2 \\
        --widths 8 8 8 --epochs 4 --repeats 2 --threads 1 --output /tmp/toy       # a toy

Navier-Stokes of our own solver (viscosity 1e-3, T=50, 64²), 1000 pairs, batches of 64 (one in sixteen has the 40 that
are left over). A step holds sampling, symmetries, transform where the data are fields, forward, backward and update.
Its time is read off the run's history: seconds over steps in the second half of the run, the median of a few runs and
their range; of an ensemble it is the step of all members. `floors.py` says what the floor is; an ensemble's is that of
one member times members. Products in float32 are full float32, convolutions torch's default, which is tf32 on CUDA.

Peers: neuraloperator's FNO and ours in one plain loop (sampling, forward, relative L2, backward, torch's fused AdamW,
no symmetries), eager and as one CUDA graph. The floor of neuraloperator's is that of our FNO with as many modes, layers
and channels. `--kernels` counts what the GPU is given, kernels and copies: in eight epochs less in four, over the steps
between.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from common import Row, Table, arguments, middle, step_milliseconds
from floors import PRECISIONS, RATE_COLUMNS, Rates, beside_floor, measured_rates, training_floor
from peers import NEURALOPERATOR, neuraloperator, plain_loop

import transform_once as t1
from transform_once.data.fields import Fields
from transform_once.models.operator import Operator
from transform_once.solvers.navier_stokes import NAVIER_STOKES_SYMMETRIES, generate
from transform_once.spectral.precision import matmul_precision
from transform_once.training.run import Run

KEYS = ("data", "model", "path", "precision", "optimizer", "symmetries", "members")
VALUES = ("ms", "spread", "floor ms", "over floor", "limit", "to one member", "kernels", "space", "captured")
ACCURACY_KEYS = ("data", "model", "precision", "epochs", "members")
ACCURACY = ("validation", "std", "best", "worst", "ms", "space", "captured")
PRODUCT, EAGER, GRAPH = "t1.train", "eager", "CUDA graph"
MEMBERS, SEEDS, VALIDATION = (4, 8, 20), 5, 200


class Bench(NamedTuple):
    """What all rows share: the data and their name, the machine's rates, the options."""

    data: str
    fields: Fields
    rates: Rates
    options: argparse.Namespace


def data_name(options: argparse.Namespace) -> str:
    return f"{options.resolution}², {options.samples} pairs, batch {options.batch}"


def prepare(options: argparse.Namespace) -> Bench:
    n, count = options.resolution, options.samples + VALIDATION
    x, y, _ = generate(count, 1e-3, 50.0, n, seed=1, device=options.device)
    symmetries = [symmetry.to_dict() for symmetry in NAVIER_STOKES_SYMMETRIES]
    fields = Fields(input=x.cpu(), target=y.cpu(), grid="node", periodic=True, symmetries=symmetries)
    return Bench(data_name(options), fields, measured_rates(options.device), options)


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Operator]]:
    grid, modes, depth, widths = (options.resolution,) * 2, options.modes, options.depth, options.widths
    T1, T1Plus = (
        partial(kind, 1, 1, grid, modes, width) for kind, width in zip((t1.T1, t1.T1Plus), widths, strict=False)
    )
    name, plus = f"T1 {modes}/{depth}/{widths[0]}", f"T1+ m={modes} width {widths[1]}"
    return {
        f"{name} fourier": partial(T1, depth, transform="fourier"),
        f"{name} dct": partial(T1, depth, transform="dct"),
        f"{plus} dct": partial(T1Plus, transform="dct"),
        f"{plus} fourier": partial(T1Plus, transform="fourier"),
        f"FNO {modes}/{depth}/{widths[2]}": partial(t1.FNO, 1, 1, grid, modes, widths[2], depth),
    }


def jobs(options: argparse.Namespace) -> Iterator[Row]:
    def job(model: str, path: str, precision: str, optimizer: str, symmetries: str, members: int = 1) -> Row:
        values = (data_name(options), model, path, precision, optimizer, symmetries, members)
        return dict(zip(KEYS, values, strict=True))

    models, precisions = list(makers(options)), PRECISIONS[::-1]
    for model in models:
        for optimizer in ("adamw", "muon") if model.startswith("T1 ") else ("adamw",):
            for precision in precisions:
                yield job(model, PRODUCT, precision, optimizer, "yes")
                yield job(model, PRODUCT, precision, optimizer, "no")
    for precision in precisions:
        for members in MEMBERS:
            yield job(models[0], PRODUCT, precision, "adamw", "yes", members)
    for model in (f"{NEURALOPERATOR} {models[-1]}", models[-1]):
        for path in (EAGER, GRAPH) if options.device == "cuda" else (EAGER,):
            for precision in ("float32", "tf32"):
                yield job(model, path, precision, "adamw", "no")


def accuracy_jobs(options: argparse.Namespace) -> Iterator[Row]:
    for model in [*makers(options)][:3:2]:  # T1 in the basis of the data, T1+ with the published UNet
        for precision in PRECISIONS:
            values = (data_name(options), model, precision, options.accuracy, SEEDS)
            yield dict(zip(ACCURACY_KEYS, values, strict=True))


def train(bench: Bench, job: Row, epochs: int, validation: Fields | None = None, **settings: Any) -> Run:
    options = bench.options
    torch.manual_seed(0)
    model = makers(options)[str(job["model"])]()
    settings |= {"precision": job["precision"], "ensemble": job["members"], "batch_size": options.batch}
    pairs = bench.fields[: options.samples]
    run = t1.train(model, pairs, validation, epochs=epochs, device=options.device, progress=False, **settings)
    if not run.finished:  # a signal came
        raise KeyboardInterrupt
    return run


def timed(bench: Bench, job: Row, table: Table) -> Row:
    """Milliseconds of a step, and what stands beside them."""
    options, row = bench.options, dict[str, object]()
    if job["path"] == PRODUCT:
        settings = {"symmetries": job["symmetries"] == "yes", "optimizer": job["optimizer"], "learning_rate": 1e-3}
        runs = [train(bench, job, options.epochs, **settings) for _ in range(options.repeats)]
        times = [step_milliseconds(run.history) for run in runs]
        row |= {name: runs[0].description[name] for name in ("space", "captured")}
        if options.kernels and options.device == "cuda":
            row["kernels"] = kernels(lambda epochs: train(bench, job, epochs, **settings))
    else:
        times = peer_times(bench, job)
    median, spread = middle(times)
    row |= {"ms": f"{median:.4g}", "spread": f"{spread:.2g}", **bench.rates.columns(str(job["precision"]))}
    single = table.find({**job, "members": 1})
    if single and job["members"] != 1:
        row["to one member"] = f"{median / float(str(single['ms'])):.2f}"
    how = {"optimizer": job["optimizer"], "on_modes": row.get("space") == "k-space"}
    model, members = makers(options)[str(job["model"]).removeprefix(f"{NEURALOPERATOR} ")](), int(str(job["members"]))
    floor = partial(training_floor, model, options.batch, bench.rates, str(job["precision"]), **how)
    return row | beside_floor(median, floor, members)


def kernels(run: Callable[[int], Run]) -> str:
    """Kernels and copies of a step on the GPU."""
    counts, steps = [], []
    for epochs in (4, 8):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            steps.append(int(run(epochs).history[-1]["step"] or 0))
        counts.append(sum(event.count for event in profile.key_averages() if event.self_device_time_total > 0))
    return f"{(counts[1] - counts[0]) / (steps[1] - steps[0]):.0f}"


def peer_times(bench: Bench, job: Row) -> list[float]:
    options, name = bench.options, str(job["model"])
    torch.manual_seed(0)
    peer = partial(neuraloperator, options.modes, options.widths[2], options.depth)
    model = (peer if name.startswith(NEURALOPERATOR) else makers(options)[name])().to(options.device)
    x, y = (fields[: options.samples].to(options.device) for fields in (bench.fields.input, bench.fields.target))
    with matmul_precision("high" if job["precision"] == "tf32" else "highest"):
        return plain_loop(model, x, y, options.batch, job["path"] == GRAPH, options.repeats)


def judged(bench: Bench, job: Row) -> Row:
    """The lowest validation errors of five seeds."""
    settings = {"optimizer": "adamw", "learning_rate": 2e-3}
    run = train(bench, job, bench.options.accuracy, bench.fields[bench.options.samples :], **settings)
    best = [member["validation"] for member in run.description["best"]]
    row: Row = {"validation": f"{statistics.mean(best):.5f}", "std": f"{statistics.stdev(best):.5f}"}
    row |= {"best": f"{min(best):.5f}", "worst": f"{max(best):.5f}", "ms": f"{step_milliseconds(run.history):.4g}"}
    return row | {name: run.description[name] for name in ("space", "captured")}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--accuracy", type=int, nargs="?", const=100, metavar="EPOCHS", help="errors by precision")
    parser.add_argument("--kernels", action="store_true", help="count the kernels of a step, too")
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--modes", type=int, default=24)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs=3, default=(48, 64, 32), help="of T1, T1+ and FNO")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.accuracy:
        table = Table(options, "training_precision", ACCURACY_KEYS, ACCURACY)
    else:
        table = Table(options, "training_step", KEYS, (*VALUES, *RATE_COLUMNS))
    if options.draw and options.accuracy:
        table.draw(lambda row: f"{row['model']}, {row['precision']}", "precision", "validation", "", "relative L2")
    elif options.draw:
        table.draw(label, "precision", "ms", "floor ms", "ms a step")
    elif options.accuracy:
        bench = prepare(options)
        table.fill(accuracy_jobs(options), lambda job: judged(bench, job))
    else:
        bench = prepare(options)
        table.fill(jobs(options), lambda job: timed(bench, job, table))


def label(row: Row) -> str:
    parts = [row["model"], row["precision"], row["optimizer"], "symmetries" if row["symmetries"] == "yes" else ""]
    parts += [
        f"{row['members']} members" if row["members"] != "1" else "",
        row["path"] if row["path"] != PRODUCT else "",
    ]
    return ", ".join(str(part) for part in parts if part)


if __name__ == "__main__":
    main()
