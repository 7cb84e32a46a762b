"""The command `t1`: each verb is a typed function; options, help and YAML come from its signature."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def import_(
    source: Path,
    output: Path,
    input_key: str | None = None,
    target_key: str | None = None,
    trajectory_key: str | None = None,
    mask_key: str | None = None,
    axes: str | None = None,
    format: str | None = None,  # noqa: A002
    channels: list[str | int] | None = None,
    times: tuple[float, float] | None = None,
    input_time: float | None = None,
    target_time: float | None = None,
    frame_stride: int = 1,
    stride: int = 1,
    resize: tuple[int, int] | None = None,
    camera: int = 2,
    split: str | None = None,
    colour: bool = False,
    missing: float | None = None,
    grid: str | None = None,
    periodic: bool | None = None,
) -> None:
    """Turn a file or folder of fields in any known format into a file of our own.

    Args:
        source: .npz, .npy, .pt, .mat, .h5 (also PDEBench and The Well), .nc, .zarr, .mp4, or a folder of airfoils or of
            ScalarFlow recordings.
        output: The file of fields to write (.h5); an import that was killed continues.
        input_key: Name of the input array in the source; several, joined by commas, become channels.
        target_key: Name of the target array.
        trajectory_key: Name of the trajectory array.
        mask_key: Name of an array whose nonzero points leave the loss.
        axes: Axes of the stored arrays by letter: n samples, t time, c channels, x y z grid; such as nxyt.
        format: The format, where the content does not tell it.
        channels: Names or numbers of the channels to keep.
        times: First and last time to keep.
        input_time: Make pairs: the time of the input.
        target_time: Make pairs: the time of the target.
        frame_stride: Keep every such frame.
        stride: Keep every such grid point.
        resize: Rows and columns to resize images to.
        camera: Which camera of a ScalarFlow recording.
        split: train, validation or test, where the published data set defines them.
        colour: Read a video in colour instead of grey.
        missing: The value that marks missing points, such as nan.
        grid: cell or node, where the source does not tell.
        periodic: Whether the fields are periodic, where the source does not tell.
    """
    options = {
        name: value for name, value in locals().items() if name not in ("source", "output") and value is not None
    }
    from transform_once.data.formats import convert

    for key in ("input_key", "target_key", "trajectory_key"):
        if key in options:
            options[key] = options[key].split(",")
    print(convert(source, output, **options))


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

    from transform_once.solvers import datasets

    generate = {
        "_help": "Make a data set with the embedded solvers.",
        "navier-stokes": datasets.navier_stokes,
        "smoke": datasets.smoke,
        "airfoils": datasets.airfoils,
    }
    verbs = {"generate": generate, "import": import_, "export": export, "demo": demo}
    try:
        auto_cli(verbs, args=_spelled(sys.argv[1:]), prog="t1")  # type: ignore[arg-type]
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("T1_TRACEBACK"):
            raise
        print(f"t1: {error}", file=sys.stderr)
        sys.exit(2)


def _spelled(arguments: list[str]) -> list[str]:
    """Arguments as the parser wants them: `--target-time` with an underscore, `1062 600` after an option as a list."""
    spelled: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            spelled.append("--" + name[2:].replace("-", "_") + equals + value)
        elif _is_number(argument) and len(spelled) > 1 and spelled[-2].startswith("--") and _is_number(spelled[-1]):
            spelled[-1] = f"[{spelled[-1].strip('[]')},{argument}]"
        else:
            spelled.append(argument)
    return spelled


def _is_number(text: str) -> bool:
    """Whether the text is a number, or a list of numbers joined before."""
    return all(part.replace(".", "", 1).isdigit() for part in text.strip("[]").split(","))
