"""The DCT here against torch-dct and scipy, in one process, interleaved.

Beside each time stands the floor of this machine: the larger of bytes (field read once, kept modes written once) over
the measured copy bandwidth, and operations of the matrix products over the measured rate of a large matrix product.
"""

import argparse

import scipy.fft
import torch
import torch_dct
from common import interleaved, milliseconds, report

import transform_once as t1
from transform_once.spectral import transforms

CASES = [(64, 24), (64, 64), (128, 24), (128, 64), (256, 24), (256, 64), (256, 224), (512, 24), (512, 64), (1024, 24)]


def floor_rates(device: str) -> tuple[float, float]:
    """Measured bytes/s of a large copy and operations/s of a large float32 matrix product."""
    x = torch.randn(2**26 if device == "cuda" else 2**24, device=device)
    y = torch.empty_like(x)
    n = 8192 if device == "cuda" else 1536
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    times = interleaved({"copy": lambda: y.copy_(x), "product": lambda: a @ b}, 10, device)
    return 2 * x.nbytes / min(times["copy"]), 2 * n**3 / min(times["product"])


def images_of(n: int, device: str) -> int:
    """As many as fill the machine: on a GPU 2 GiB."""
    if device == "cuda":
        return 2**29 // n**2
    return 512 if n <= 256 else 512 * 256 * 256 // n**2


def image_row(n: int, m: int, device: str, rates: tuple[float, float], rounds: int) -> dict[str, object]:
    images = images_of(n, device)
    x = torch.randn(images // 8, 8, n, n, device=device)
    rivals = {"ours": lambda: t1.dct(x, ndim=2, modes=m), "ours, inverse": lambda: t1.idct(X, ndim=2, size=(n, n))}
    X = t1.dct(x, ndim=2, modes=m)
    if device == "cpu":
        array = x.numpy()
        rivals["torch-dct"] = lambda: torch_dct.dct_2d(x, norm="ortho")
        rivals["scipy"] = lambda: scipy.fft.dctn(array, axes=(-2, -1), norm="ortho", workers=2)
    else:
        rivals["torch-dct"] = lambda: torch_dct.dct_2d(x, norm="ortho")
    times = interleaved(rivals, rounds, device)
    operations = 2 * images * (m * n * n + m * m * n)
    floor = max((x.nbytes + X.nbytes) / rates[0], operations / rates[1])
    row: dict[str, object] = {"images": images, "size": f"{n}²", "m": m}
    for name, seconds in times.items():
        median, spread = milliseconds(seconds)
        row |= {f"{name} ms": f"{median:.2f}", f"{name} iqr": f"{spread:.2f}"}
    ours = milliseconds(times["ours"])[0]
    row["floor ms"] = f"{1e3 * floor:.2f}"
    row["over floor"] = f"{ours / (1e3 * floor):.2f}"
    for rival in ("torch-dct", "scipy"):
        if rival in times:
            row[f"{rival} / ours"] = f"{milliseconds(times[rival])[0] / ours:.1f}"
    return row


def matrix_against_fft(device: str, rounds: int) -> list[dict[str, object]]:
    """Where the FFT overtakes the matrix on one long axis; `MATRIX_ENTRIES` is set from this."""
    rows: list[dict[str, object]] = []
    for n in (256, 512, 1024, 2048, 4096, 8192):
        for m in (n, n // 4):
            x = torch.randn(256, n, device=device)
            limit = transforms.MATRIX_ENTRIES

            def call(entries: int, x: torch.Tensor = x, m: int = m) -> None:
                transforms.MATRIX_ENTRIES = entries
                t1.dct(x, ndim=1, modes=m)

            times = interleaved({"matrix": lambda c=call: c(2**40), "fft": lambda c=call: c(0)}, rounds, device)
            transforms.MATRIX_ENTRIES = limit
            matrix, fft = (milliseconds(times[name])[0] for name in ("matrix", "fft"))
            rows.append(
                {
                    "n": n,
                    "m": m,
                    "matrix ms": f"{matrix:.2f}",
                    "fft ms": f"{fft:.2f}",
                    "used": "fft" if n * m > limit else "matrix",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(2)
    rates = floor_rates(options.device)
    print(f"copy {rates[0] / 1e9:.1f} GB/s, float32 product {rates[1] / 1e9:.0f} Gop/s")
    report([image_row(n, m, options.device, rates, options.rounds) for n, m in CASES], "transforms", options.device)
    report(matrix_against_fft(options.device, options.rounds), "matrix_against_fft", options.device)


if __name__ == "__main__":
    main()
