"""How the memory of large arrays comes: training steps on a CPU with pages of 4 kB, of 2 MB, and without giving back.

    python benchmarks/large_pages.py [--rounds 5]

Torch and the C library read these settings when they start, so every measurement is a process of its own, by turns.
`transform_once` sets THP_MEM_ALLOC_ENABLE=1 where it is not set. The last way also has glibc keep all that is freed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

from common import interleaved, report

import transform_once as t1

KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11)}
WAYS: dict[str, dict[str, str]] = {
    "4 kB": {"THP_MEM_ALLOC_ENABLE": "0"},
    "2 MB": {"THP_MEM_ALLOC_ENABLE": "1"},
    "2 MB, kept": {"THP_MEM_ALLOC_ENABLE": "1", **KEEP},
}


def measure() -> None:
    import torch

    def step(model: torch.nn.Module, shape: tuple[int, ...]) -> Callable[[], None]:
        x = torch.randn(shape)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()

        return run

    large, small = (16, 3, 128, 128), (16, 1, 64, 64)
    steps = {
        "FNO 24/6/48, 128²": step(t1.FNO(3, 3, large[2:], modes=24, width=48, depth=6), large),
        "UNet 64, 128²": step(t1.UNet(3, 3, large[2:], width=64), large),
        "T1Grid 64/8/32, 128²": step(t1.T1Grid(3, 3, large[2:], modes=64, depth=8, waves=4), large),
        "T1+ 100, 128²": step(t1.T1Plus(3, 3, large[2:], modes=100, width=32), large),
        "FNO 24/6/32, 64²": step(t1.FNO(1, 1, small[2:], modes=24, width=32, depth=6), small),
        "T1Grid 24/4/32, 64²": step(t1.T1Grid(1, 1, small[2:], modes=24), small),
    }
    print(json.dumps({name: statistics.median(times) for name, times in interleaved(steps, 3, "cpu").items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help="once, in this process, with its settings")
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    plain = {name: value for name, value in os.environ.items() if name not in {*KEEP, "THP_MEM_ALLOC_ENABLE"}}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, settings in WAYS.items():
            words = [sys.executable, __file__, "--measure"]
            done = subprocess.run(words, env=plain | settings, check=True, capture_output=True, text=True)
            found[way].append(json.loads(done.stdout))
    rows: list[dict[str, object]] = []
    for name in found["4 kB"][0]:
        seconds = {way: statistics.median(one[name] for one in found[way]) for way in WAYS}
        times = {f"{way}, ms": f"{1e3 * value:.0f}" for way, value in seconds.items()}
        rows.append({"step, batch of 16": name, **times, "4 kB / 2 MB": f"{seconds['4 kB'] / seconds['2 MB']:.2f}"})
    report(rows, "large_pages")


if __name__ == "__main__":
    main()
