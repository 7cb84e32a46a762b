"""Our FNO against neuraloperator's on the same data, for the same epochs: is the baseline as strong as the peers' own?

    python benchmarks/fno_accuracy.py                                          # on a GPU, ten minutes
    python benchmarks/fno_accuracy.py --device cpu --resolution 16 --modes 6 --width 16 --depth 4 --epochs 40 --seeds 2

Navier-Stokes at high viscosity (1e-3, T=50), 1000 pairs to train and 200 to test, AdamW 1e-3 halved four times on the
way, batches of 64, relative L2. Of equal size: (48, 48) centred modes there are 24 on both sides here. Beside them the
layer of the released research code, its spectrum kept, which lacks the perceptron.
"""

import argparse
import time
from collections.abc import Callable

import neuralop.models
import torch
from common import report

import transform_once as t1
from transform_once.models.fno import ReleasedFNO
from transform_once.solvers.navier_stokes import generate


def models(n: int, modes: int, width: int, depth: int) -> dict[str, Callable[[], torch.nn.Module]]:
    size, both = {"modes": modes, "width": width, "depth": depth}, (2 * modes, 2 * modes)
    return {
        "ours": lambda: t1.FNO(1, 1, (n, n), **size),
        "neuraloperator 2.0.0": lambda: neuralop.models.FNO(both, 1, 1, hidden_channels=width, n_layers=depth),
        "released layer": lambda: ReleasedFNO(1, 1, (n, n), **size, phase_blind=False),
    }


def relative_l2(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((prediction - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


def train(model: torch.nn.Module, data: dict[str, torch.Tensor], epochs: int, seed: int) -> tuple[float, float]:
    """Test error after the last epoch, and seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, epochs // 5), 0.5)
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(data["x"]), generator=generator).to(data["x"].device).split(64):
            optimizer.zero_grad(set_to_none=True)
            relative_l2(model(data["x"][batch]), data["y"][batch]).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        error = relative_l2(model(data["x_test"]), data["y_test"]).item()
    return error, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--modes", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    x, y, _ = generate(1200, 1e-3, 50.0, options.resolution, device=options.device)
    data = {"x": x[:1000], "y": y[:1000], "x_test": x[1000:], "y_test": y[1000:]}
    rows: list[dict[str, object]] = []
    for seed in range(options.seeds):
        for name, make in models(options.resolution, options.modes, options.width, options.depth).items():
            torch.manual_seed(seed)
            model = make()
            error, seconds = train(model.to(options.device), data, options.epochs, seed)
            rows.append(
                {
                    "model": name,
                    "size": f"{options.resolution}², {options.modes}/{options.depth}/{options.width}",
                    "seed": seed,
                    "epochs": options.epochs,
                    "parameters": sum(p.numel() * (1 + p.is_complex()) for p in model.parameters()),
                    "test relative L2": f"{error:.4f}",
                    "seconds": f"{seconds:.1f}",
                }
            )
            print(rows[-1], flush=True)
    report(rows, "fno_accuracy", options.device)


if __name__ == "__main__":
    main()
