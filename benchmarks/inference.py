"""Time from field in to field out of trained-size models, without gradients: on a GPU, on a CPU, through onnxruntime.

    python benchmarks/inference.py                  # on a GPU: batch 1 and 16, eager and as one CUDA graph
    python benchmarks/inference.py --device cpu     # two threads, batch 1, torch and onnxruntime
    python benchmarks/inference.py --device cpu --resolution 16 --modes 6 --depth 2 --widths 8 8 8 --output /tmp/toy

All models of a batch size and a precision take turns, so that they meet the same load; median and interquartile range.
A turn is five calls after one that is not timed, since the threads of torch and of onnxruntime disturb one another.
A call on a GPU lasts until the device is done with it; "in a row" is a call among fifty that are waited for together.
The output of onnxruntime must be that of torch. bfloat16 and tf32 are of the products inside the models, the transforms
of T1 stay in float32. The floor (`floors.py`; of neuraloperator's FNO that of ours) reads weights and input once and
writes the output: a GPU whose cache holds the weights from call to call may go below it.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from common import Row, Table, arguments, milliseconds
from floors import PRECISIONS, RATE_COLUMNS, beside_floor, inference_floor, measured_rates
from peers import NEURALOPERATOR, neuraloperator
from torch import Tensor, nn

import transform_once as t1
from transform_once.evaluation.speed import captured
from transform_once.spectral.precision import matmul_precision

KEYS = ("size", "batch", "model", "path", "precision")
VALUES = ("us", "spread", "in a row us", "floor us", "over floor", "limit", "load")
IN_A_ROW, CALLS = 50, 5
EAGER, GRAPH, TORCH, ONNX = "eager", "CUDA graph", "torch", "onnxruntime"


def models(options: argparse.Namespace) -> dict[str, nn.Module]:
    grid, modes, depth = (options.resolution,) * 2, options.modes, options.depth
    w1, w2, w3 = options.widths
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        f"T1 {modes}/{depth}/{w1} dct": t1.T1(1, 1, grid, modes, w1, depth),
        f"T1 {modes}/{depth}/{w1} fourier": t1.T1(1, 1, grid, modes, w1, depth, transform="fourier"),
        f"T1+ m={modes} width {w2}": t1.T1Plus(1, 1, grid, modes, w2),
        f"FNO {modes}/{depth}/{w3}": t1.FNO(1, 1, grid, modes, w3, depth),
        f"{NEURALOPERATOR} FNO {modes}/{depth}/{w3}": neuraloperator(modes, w3, depth),
    }
    return {name: model.to(options.device).eval() for name, model in made.items()}


@contextlib.contextmanager
def inside(precision: str, device: str) -> Iterator[None]:
    """Without gradients, with products in this precision."""
    cast = torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False)
    with torch.no_grad(), cast, matmul_precision("high" if precision == "tf32" else "highest"):
        yield


def onnx_call(model: nn.Module, x: Tensor, folder: Path, threads: int) -> Callable[[], object]:
    """The model in onnxruntime, after a look that it gives the same."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads would slow torch's
    path = t1.export(model, folder / "model.onnx")
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    given = {"input": x.numpy()}
    with torch.no_grad():
        y = model(x)
    error = float((torch.from_numpy(session.run(None, given)[0]) - y).norm() / y.norm())
    if not error < 1e-4:
        raise ValueError(f"onnxruntime differs from torch by {error:.1e}")
    return lambda: session.run(None, given)


def rivals(
    options: argparse.Namespace, made: dict[str, nn.Module], x: Tensor, folder: Path
) -> Iterator[tuple[tuple[str, str], Callable[[], object]]]:
    """Model and path, and what makes the call."""
    for name, model in made.items():
        if options.device == "cuda":
            yield (name, GRAPH), lambda model=model: captured(lambda: model(x))
            yield (name, EAGER), lambda model=model: lambda: model(x)
        else:
            yield (name, TORCH), lambda model=model: lambda: model(x)
            if name.startswith("T1"):
                yield (name, ONNX), lambda model=model: onnx_call(model, x, folder, options.threads)


def seconds_of(call: Callable[[], object], device: str, calls: int = 1) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


class Group:
    """All rivals of a batch size and a precision, measured together when the first of them is asked for."""

    def __init__(self, options: argparse.Namespace, made: dict[str, nn.Module], batch: int, precision: str) -> None:
        self.options, self.made, self.batch, self.precision = options, made, batch, precision
        n = options.resolution
        self.x = torch.randn(batch, 1, n, n, generator=torch.Generator().manual_seed(1)).to(options.device)
        self.singles: dict[tuple[str, str], list[float]] = {}
        self.rows: dict[tuple[str, str], list[float]] = {}
        self.errors: dict[tuple[str, str], str] = {}

    def measure(self) -> None:
        calls, device = dict[tuple[str, str], Callable[[], object]](), self.options.device
        with inside(self.precision, device), tempfile.TemporaryDirectory() as folder:
            for key, make in rivals(self.options, self.made, self.x, Path(folder)):
                try:
                    calls[key] = make()
                    seconds_of(calls[key], device, 3)
                except Exception as error:
                    calls.pop(key, None)
                    self.errors[key] = f"{type(error).__name__}: {error}"  # its traceback would hold memory
            for _ in range(self.options.rounds):
                for key, call in calls.items():
                    call()
                    self.singles.setdefault(key, []).extend(seconds_of(call, device) for _ in range(CALLS))
                    if device == "cuda":
                        self.rows.setdefault(key, []).append(seconds_of(call, device, IN_A_ROW))

    def row(self, job: Row) -> Row:
        key = str(job["model"]), str(job["path"])
        if not self.singles and not self.errors:
            self.measure()
        if key in self.errors:
            raise RuntimeError(self.errors[key])
        median, spread = (1e3 * value for value in milliseconds(self.singles[key]))
        row: Row = {"us": f"{median:.1f}", "spread": f"{spread:.1f}", "load": f"{os.getloadavg()[0]:.2f}"}
        return row | ({"in a row us": f"{1e3 * milliseconds(self.rows[key])[0]:.1f}"} if self.rows else {})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--modes", type=int, default=24)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs=3, default=(48, 64, 32), help="of T1, T1+ and FNO")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table(options, "inference", KEYS, (*VALUES, *RATE_COLUMNS))
    if options.draw:
        label = lambda row: f"{row['model']}, batch {row['batch']}, {row['path']}, {row['precision']}"  # noqa: E731
        table.draw(label, "path", "us", "floor us", "µs a call")
        return
    made, rates, on_gpu = models(options), measured_rates(options.device), options.device == "cuda"
    kinds = [(batch, precision) for batch in (1, 16) for precision in PRECISIONS] if on_gpu else [(1, "float32")]
    groups = {kind: Group(options, made, *kind) for kind in kinds}

    def work(job: Row) -> Row:
        batch, precision = int(str(job["batch"])), str(job["precision"])
        row = groups[batch, precision].row(job)
        model = made[str(job["model"]).removeprefix(f"{NEURALOPERATOR} ")]
        floor = partial(inference_floor, model, groups[batch, precision].x, rates, precision)
        beside = beside_floor(float(str(row["us"])) / 1e3, floor)
        if beside:
            beside["floor us"] = f"{1e3 * float(str(beside.pop('floor ms'))):.4g}"
        return row | beside | rates.columns(precision)

    jobs: list[Row] = [
        dict(zip(KEYS, (f"{options.resolution}²", batch, model, path, precision), strict=True))
        for batch, precision in kinds
        for (model, path), _ in rivals(options, made, groups[batch, precision].x, Path())
    ]
    table.fill(jobs, work)


if __name__ == "__main__":
    main()
