"""The command `t1`: each verb is a typed function; options, help and YAML come from its signature."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VERBS = ("export", "demo")


def export(model: Path, output: Path) -> None:
    """Write a saved model as ONNX, for any batch size, to run without PyTorch.

    Args:
        model: A `.safetensors` file written by `save`.
        output: The `.onnx` file to write.
    """
    from transform_once.models.export import export as export_model
    from transform_once.models.operator import load

    path = export_model(load(model), output)
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def demo(output: Path = Path("demo"), resolution: tuple[int, int] = (128, 96), modes: int = 24, seed: int = 0) -> None:
    """Show the core on a generated field: its spectrum, the kept modes, the irreducible loss, and a picture.

    Args:
        output: Folder for the picture.
        resolution: Grid points along each axis of the field.
        modes: Modes to keep along each axis.
        seed: Seed of the random field.
    """
    from rich.console import Console
    from rich.table import Table

    from transform_once.report.figures import compaction_figure, save_figure
    from transform_once.spectral.modes import TopM, choose_modes, irreducible_loss
    from transform_once.spectral.transforms import dct

    console = Console()
    console.print(
        f"A smooth random field on {resolution[0]}×{resolution[1]} cells that does not repeat at its borders."
    )
    field = _smooth_field(resolution, seed)
    spectrum = dct(field, ndim=2, modes=None)
    console.print(
        f"Its DCT has {spectrum.numel()} coefficients and the field's energy (Parseval): "
        f"{spectrum.square().sum():.3f} of {field.square().sum():.3f}."
    )
    table = Table("kept", "low-pass, dct", "low-pass, fourier", "top-m, dct", title="irreducible relative L2")
    for m in sorted({max(1, modes // 4), max(1, modes // 2), modes}):
        losses = (
            irreducible_loss(field, m),
            irreducible_loss(field, m, "fourier"),
            irreducible_loss(field, TopM(m * m).fit(field)),
        )
        table.add_row(f"{m}² = {m * m}", *(f"{loss:.2e}" for loss in losses))
    console.print(table)
    console.print("(fourier keeps an odd number of modes of each axis, one less than an even one asked for)")
    smallest = choose_modes(field, tolerance=0.01)
    console.print(f"The smallest low-pass that loses at most 1% keeps {smallest} modes: no model on these does better.")
    output.mkdir(parents=True, exist_ok=True)
    console.print(f"Picture: {save_figure(compaction_figure(field, modes), output / 'core.png')}")


def _smooth_field(resolution: tuple[int, int], seed: int) -> "Tensor":
    """A Gaussian random field (1, 1, rows, columns): a window into a periodic one of twice the size."""
    import torch

    from transform_once.spectral.transforms import get_transform

    rows, columns = (2 * n for n in resolution)
    wave_numbers = [(torch.arange(n, dtype=torch.float64) + 1) // 2 for n in (rows, columns)]
    amplitude = (wave_numbers[0][:, None] ** 2 + wave_numbers[1] ** 2 + 25) ** -2
    noise = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    periodic = get_transform("fourier").inverse(amplitude * noise, 2)
    window = periodic[: resolution[0], : resolution[1]]
    return (window / window.std())[None, None]


def main() -> None:
    """Run the verb named on the command line; bad input is one sentence and exit code 2."""
    from jsonargparse import auto_cli

    try:
        auto_cli({verb: globals()[verb] for verb in VERBS}, prog="t1")
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("T1_TRACEBACK"):
            raise
        print(f"t1: {error}", file=sys.stderr)
        sys.exit(2)
