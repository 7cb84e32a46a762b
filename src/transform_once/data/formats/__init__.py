"""Reading what others write: `read` for any file or folder of fields, `convert` to turn it into our own HDF5."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from transform_once.data.fields import Fields
from transform_once.data.formats import folders, hdf5, tables
from transform_once.data.formats.catalogue import Catalogue, assemble, frame_at, selected
from transform_once.data.options import ReadOptions

READERS: dict[str, Callable[[Path, ReadOptions], Catalogue]] = {
    "npz": tables.npz,
    "npy": tables.npy,
    "pt": tables.pt,
    "mat": tables.mat,
    "xarray": tables.xarray,
    "hdf5": hdf5.hdf5,
    "pdebench": hdf5.pdebench,
    "well": hdf5.well,
    "airfoils": folders.airfoils,
    "scalarflow": folders.scalarflow,
    "video": folders.video,
}
NARROWING = ["channels", "input_channels", "target_channels", "times", "input_time", "target_time", "stride"]
NARROWING += ["frame_stride", "format"]
SUFFIXES = {".npz": "npz", ".npy": "npy", ".pt": "pt", ".pth": "pt", ".mat": "mat"}
SUFFIXES |= dict.fromkeys((".nc", ".nc4", ".cdf", ".netcdf", ".zarr"), "xarray")
SUFFIXES |= dict.fromkeys((".mp4", ".avi", ".mov", ".mkv", ".webm"), "video")


def read(path: str | Path, **options: Any) -> Fields:
    """The fields of a file or folder, read by slices where the format allows; options are those of `ReadOptions`.

    ```python
    read("flow.h5")                                                     # ours, PDEBench, The Well, or arrays by name
    read("ns_V1e-3.mat", target_time=50)                                # Li et al.: pairs a → u at t = 50
    read("plume.mp4", resize=(1062, 600), frame_stride=2)
    read("era5.npz", trajectory_key="t2m", axes="txy")
    read("airfoils/"); read("scalarflow/", split="train", camera=2)
    ```
    """
    path = Path(path)
    known = [item.name for item in fields(ReadOptions)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}: known are {', '.join(known)}")
    chosen = ReadOptions(**options)
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise FileNotFoundError(f"there is no {path}{where}: check the path")
    name = chosen.format or _format_of(path)
    if name == "fields":
        return _own(path, chosen)
    if name not in READERS:
        raise ValueError(f"unknown format {name!r}: known are fields, {', '.join(READERS)}")
    return assemble(READERS[name](path, chosen), chosen)


def convert(source: str | Path, output: str | Path, **options: Any) -> Fields:
    """Stream what `read` reads into a file of our own, continuing one that was begun and killed; returns it, opened."""
    return read(source, **options).save(output)


def _format_of(path: Path) -> str:
    if path.suffix in SUFFIXES:
        return SUFFIXES[path.suffix]
    if path.suffix == ".partial":
        raise ValueError(f"{path} is unfinished: run again what made it, and it continues")
    if path.is_file():
        if path.suffix in (".h5", ".hdf5"):
            return hdf5.kind_of(path)
        raise ValueError(f"{path} has no known ending: say format, one of fields, {', '.join(READERS)}")
    if any(path.glob("sim_*")):
        return "scalarflow"
    if any(path.glob("*.npz")):
        return "airfoils"
    if any(path.glob("*.h5")) or any(path.glob("*.hdf5")):
        return "well"
    raise ValueError(f"the folder {path} holds no known data: neither sim_*/, *.npz, *.h5 nor *.hdf5")


def _own(path: Path, options: ReadOptions) -> Fields:
    """Our own files know what they hold: only options that narrow it apply."""
    foreign = [name for name in options.given() if name not in NARROWING]
    if foreign:
        raise ValueError(
            f"{path} is a file of our own, so {', '.join(foreign)} does not apply: only {', '.join(NARROWING)}"
        )
    found = Fields.open(path)
    if options.input_time is not None or options.target_time is not None:
        times = np.array(found.metadata.times)
        if options.input_time is None or options.target_time is None or found.kind == "pairs":
            raise ValueError("input_time and target_time together make pairs of a trajectory")
        found = found.pairs(frame_at(times, options.input_time), frame_at(times, options.target_time))
    return selected(found, options)
