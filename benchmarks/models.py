"""Forward plus backward of T1, T1+ and T1Grid against neuraloperator's FNO and ours, in one process, interleaved.

python benchmarks/models.py [--device cuda]

Beside those stands the time that the operations of their products and convolutions take at the rate of a large
float32 product on this machine: the floor of a machine that does nothing else.
"""

import argparse
from collections.abc import Callable

import neuralop.models
import torch
from common import interleaved, milliseconds, report
from floors import measured_rates
from torch.utils.flop_counter import FlopCounterMode

import transform_once as t1


def step(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return run


def models(n: int) -> dict[str, torch.nn.Module]:
    grid = (n, n)
    return {
        "neuraloperator 2.0.0 FNO (48,48)/6/32": neuralop.models.FNO((48, 48), 1, 1, hidden_channels=32, n_layers=6),
        "our FNO 24/6/32": t1.FNO(1, 1, grid, modes=24, width=32, depth=6),
        "T1 24/6/48": t1.T1(1, 1, grid, modes=24, width=48, depth=6),
        "T1+ m=24, width 64": t1.T1Plus(1, 1, grid, modes=24, width=64),
        "T1Grid 24/4/32": t1.T1Grid(1, 1, grid, modes=24, width=32, depth=4),
    }


def operations(model: torch.nn.Module, x: torch.Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        step(model, x)()
    return float(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows: list[dict[str, object]] = []
    for n, batch in ((64, 16), (128, 4)):
        x = torch.randn(batch, 1, n, n, device=options.device)
        made = {name: model.to(options.device) for name, model in models(n).items()}
        rivals = {name: step(model, x) for name, model in made.items()}
        times = {name: milliseconds(t) for name, t in interleaved(rivals, options.rounds, options.device).items()}
        slowest = next(iter(times.values()))[0]
        rate = measured_rates(options.device).products["float32"]
        floors = {name: 1e3 * operations(made[name], x) / rate for name in made if name.startswith("T1")}
        rows += [
            {
                "model": name,
                "size": f"{n}²",
                "batch": batch,
                "ms": f"{median:.1f}",
                "iqr": f"{spread:.1f}",
                "speed-up": f"{slowest / median:.2f}",
                "floor ms": f"{floors[name]:.1f}" if name in floors else "",
                "over floor": f"{median / floors[name]:.2f}" if name in floors else "",
            }
            for name, (median, spread) in times.items()
        ]
    report(rows, "models", options.device)


if __name__ == "__main__":
    main()
