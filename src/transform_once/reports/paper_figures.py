"""`t1 reproduce`: the figures of the paper from our own data, each as a picture and as a table with its numbers."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from transform_once.data.fields import Fields
    from transform_once.reports.paper_table import PaperFigure

VARIANCE_RESOLUTIONS = (64, 128, 256, 512)
MODES = 24  # of the paper's layers
SECONDS = {"cpu": 120.0, "cuda": 180.0}  # of measuring speed, by default


def reproduce_verb(
    figure: Literal[
        "variance", "speed-map", "selection", "truncation", "spectrum", "predictions", "scaling", "rollout"
    ],
    output: Path = Path("figures"),
    data: Path | None = None,
    runs: list[Path] | None = None,
    device: str = "cpu",
    sample: int | None = None,
    samples: int = 16,
    channel: int = 0,
    modes: int | None = None,
    resolutions: list[int] | None = None,
    widths: list[int] | None = None,
    depths: list[int] | None = None,
    opponent: Literal["paper", "FNO"] = "paper",
    transform: Literal["dct", "fourier", "dft"] = "dct",
    seconds: float | None = None,
    input_key: str | None = None,
    target_key: str | None = None,
    trajectory_key: str | None = None,
    axes: str | None = None,
    resize: tuple[int, int] | None = None,
    frame_stride: int = 1,
) -> None:
    """Make a figure of the paper from our own data: a picture, and a CSV with every number of its curves and maps.

    Args:
        figure: "variance": what one layer does to white fields, Xavier against vp; "speed-map": T1 against an FNO by
            resolution, width and depth, measured here; "selection": low-pass against top-m reconstructions;
            "truncation": errors of truncated DCT and real FFT at equal cost; "spectrum": a sample in n-space and
            k-space. Of runs "predictions": predictions, k-space errors, and errors outside the kept modes against R_o;
            "scaling": error against the number of training samples; "rollout": frames and error against time.
        output: Folder for FIGURE.csv and FIGURE.png, line art as .svg too, and the arrays of image panels as .npz.
        data: Fields to show, in any format that `t1 import` reads; by default smoke or Navier-Stokes made here. For
            predictions and rollout: test data of which every run predicts the same sample.
        runs: Run folders, for predictions, scaling and rollout.
        device: Where to compute and measure: auto, cpu, cuda, cuda:1.
        sample: Number of the sample, or frame, to show; by default the first, of trajectories the last.
        samples: How many, evenly spread, the curves of selection and truncation are means over.
        channel: Number of the channel to show.
        modes: Kept modes: of the layers (24), of the panels of selection, or to mark in truncation.
        resolutions: Points per axis, for variance and speed-map.
        widths: Widths of the speed map, at depth 6.
        depths: Depths of the speed map, at width 32.
        opponent: The FNO of the speed map: with the paper's layer, or this library's with its perceptron.
        transform: The transform of T1 in the speed map.
        seconds: When to stop measuring speed; the same command continues. By default 120, on a GPU 180.
        input_key: Name of the input array in the data; several, joined by commas, become channels.
        target_key: Name of the target array.
        trajectory_key: Name of the trajectory array.
        axes: Axes of the stored arrays by letter: n samples, t time, c channels, x y z grid; such as nxyt.
        resize: Rows and columns to resize images to.
        frame_stride: Keep every such frame.
    """
    from transform_once.processes import choose_device
    from transform_once.reports import paper_data

    place = choose_device(device)
    given = None
    if data is not None:
        options = {"input_key": input_key, "target_key": target_key, "trajectory_key": trajectory_key, "axes": axes}
        given = paper_data.read_fields(data, {**options, "resize": resize, "frame_stride": frame_stride})
    if figure == "variance":
        from transform_once.reports.paper_variance import variance_figure

        made = variance_figure(resolutions or VARIANCE_RESOLUTIONS, modes or MODES, place)
    elif figure == "speed-map":
        from transform_once.reports.paper_speed import Plan, speed_map

        sizes = {"resolutions": resolutions, "widths": widths, "depths": depths, "modes": modes}
        plan = Plan.default(place, **sizes, transform=transform, opponent=opponent)
        made = speed_map(plan, output, place, SECONDS.get(place.type, 120.0) if seconds is None else seconds)
    elif figure in ("selection", "truncation", "spectrum"):
        made = _of_fields(figure, given, place, sample, samples, channel, modes)
    else:
        made = _of_runs(figure, runs, given, place, sample, channel)
    if data is not None:
        made = replace(made, name=f"{made.name}-{data.stem}")
    made.show()
    for path in made.save(output):
        print(path)


def _of_fields(
    figure: str,
    given: "Fields | None",
    place: "torch.device",
    sample: int | None,
    samples: int,
    channel: int,
    modes: int | None,
) -> "PaperFigure":
    """A figure of the fields that are given, or of some that are made here."""
    from transform_once.reports import paper_data
    from transform_once.reports.paper_selection import selection_figure
    from transform_once.reports.paper_spectrum import spectrum_figure
    from transform_once.reports.paper_truncation import truncation_figure

    make = paper_data.smoke_fields if figure == "selection" else paper_data.navier_stokes_fields
    fields = given if given is not None else make(place)
    if figure == "truncation":
        return truncation_figure(paper_data.shown(fields, samples=samples), modes)
    number = _number(fields, sample)
    if figure == "spectrum":
        return spectrum_figure([(a, paper_data.shown(fields, a, [number])) for a in fields.shapes], number)
    whole, one = paper_data.shown(fields, samples=samples), paper_data.shown(fields, samples=[number])
    return selection_figure(whole, one, number, channel, modes)


def _of_runs(
    figure: str,
    runs: "Sequence[Path] | None",
    given: "Fields | None",
    place: "torch.device",
    sample: int | None,
    channel: int,
) -> "PaperFigure":
    """A figure of trained models."""
    from transform_once.reports.paper_predictions import predictions_figure
    from transform_once.reports.paper_rollout import rollout_figure
    from transform_once.reports.paper_runs import read_groups
    from transform_once.reports.paper_scaling import scaling_figure

    groups = read_groups(runs, figure, sizes_apart=figure != "scaling")
    if figure == "scaling":
        return scaling_figure(groups)
    draw = predictions_figure if figure == "predictions" else rollout_figure
    return draw(groups, given, sample, channel, place)


def _number(fields: "Fields", sample: int | None) -> int:
    if sample is not None:
        return sample
    return len(fields) * fields.frames - 1 if fields.kind == "trajectories" else 0
