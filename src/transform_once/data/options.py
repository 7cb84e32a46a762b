"""How to read a source of fields: the same options in Python, in YAML and on the command line."""

from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read a source of fields; what is not given is decided by its format.

    Args:
        input_key: Name of the input array; several, in a list or joined by commas, become channels.
        target_key: Name of the target array, or several.
        trajectory_key: Name of the trajectory array, or several.
        mask_key: Name of an array whose nonzero points leave the loss.
        axes: Axes of the stored arrays by letter: n samples, t time, c channels, x y z grid; such as nxyt, or nxy,nxyt
            for arrays of different ranks.
        format: The format, where the content does not tell it.
        channels: Names or numbers of the channels to keep.
        input_channels: Those of the input alone.
        target_channels: Those of the target alone.
        times: First and last time to keep.
        input_time: Make pairs: the time of the input.
        target_time: Make pairs: the time of the target.
        frame_stride: Keep every such frame.
        stride: Keep every such grid point.
        resize: Rows and columns to resize fields of two dimensions to, with antialiasing.
        camera: Which camera of a ScalarFlow recording, by its place in the file; 2 is the central one of five.
        split: train, validation or test, where the published data set defines them.
        colour: Whether to read a video in colour instead of grey.
        missing: The value that marks missing points, such as nan.
        grid: cell or node, where the source does not tell.
        periodic: Whether the fields are periodic, or along which axes, where the source does not tell.
        units: Units of channels by name, where the source does not tell.
        dtype: float32 or float64.
    """

    input_key: str | list[str] | None = None
    target_key: str | list[str] | None = None
    trajectory_key: str | list[str] | None = None
    mask_key: str | list[str] | None = None
    axes: str | None = None
    format: str | None = None
    channels: list[str | int] | None = None
    input_channels: list[str | int] | None = None
    target_channels: list[str | int] | None = None
    times: tuple[float, float] | None = None
    input_time: float | None = None
    target_time: float | None = None
    frame_stride: int = 1
    stride: int = 1
    resize: tuple[int, int] | None = None
    camera: int = 2
    split: str | None = None
    colour: bool = False
    missing: float | None = None
    grid: Literal["cell", "node"] | None = None
    periodic: bool | list[bool] | None = None
    units: dict[str, str] | None = None
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        for name in ("stride", "frame_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, as plain values."""
        chosen = {one.name: getattr(self, one.name) for one in fields(ReadOptions)}
        return {one.name: chosen[one.name] for one in fields(ReadOptions) if chosen[one.name] != one.default}
