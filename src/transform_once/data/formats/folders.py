"""Folders of small files, and videos: read frame by frame, never loaded whole."""

import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from transform_once.data.arrays import Array, Index, Items, stamp
from transform_once.data.formats.catalogue import Catalogue
from transform_once.data.formats.tables import NUMPY, needed, readable
from transform_once.data.options import ReadOptions

AIRFOIL_CHANNELS = ("freestream_x", "freestream_y", "mask", "pressure", "velocity_x", "velocity_y")
SPLITS = {"train": slice(0, 64), "validation": slice(64, 84), "test": slice(84, 104)}
FRAMES_PER_SECOND = 60


def airfoils(path: Path, options: ReadOptions) -> Catalogue:
    """Deep-Flow-Prediction: a folder of `*.npz`, key `a` (6, N, N): three channels of inputs, then three of targets.

    The inputs are the free stream and the airfoil's mask, the targets pressure and velocity; `mask_key="mask"` takes
    the points inside the airfoil out of the loss.
    """
    files = tuple(sorted(path.glob("*.npz")))
    shape = _same_shape(files, "a")
    if len(shape) != 3 or shape[0] != 6:
        raise ValueError(f"{files[0]} holds a of shape {shape}, expected (6, rows, columns) as in Deep-Flow-Prediction")
    parts = {"input": slice(0, 3), "target": slice(3, 6), "mask": slice(2, 3)}

    def load(key: str) -> Items:
        part = parts[key]
        return Items((len(files), part.stop - part.start, *shape[1:]), partial(_read_npz, "a", part, shape), files)

    return Catalogue(
        path,
        list(parts),
        open=load,
        input=("input",),
        target=("target",),
        channels={"input": AIRFOIL_CHANNELS[:3], "target": AIRFOIL_CHANNELS[3:]},
        names=[file.stem for file in files],
        grid="node",
    )


def scalarflow(path: Path, options: ReadOptions) -> Catalogue:
    """ScalarFlow: folders `sim_*` of `imgsTarget_000xxx.npz`, key `data` (5 cameras, 1062, 600, 1), 60 frames a second.

    One camera makes trajectories of one channel. The published split of the 104 recordings is 64, 20 and 20.
    """
    recordings = sorted(folder for folder in path.glob("sim_*") if folder.is_dir())
    if options.split is not None:
        if options.split not in SPLITS or len(recordings) != 104:
            asked = f"asked for {options.split!r} of {len(recordings)}"
            raise ValueError(f"split is one of {', '.join(SPLITS)} of all 104 recordings; {asked}")
        recordings = recordings[SPLITS[options.split]]
    pattern = re.compile(r"imgsTarget_\d{6}\.npz")
    films = [sorted(file for file in folder.iterdir() if pattern.fullmatch(file.name)) for folder in recordings]
    frames = {len(film): folder.name for film, folder in zip(films, recordings, strict=True)}
    if len(frames) != 1 or 0 in frames:
        counted = ", ".join(f"{count} in {name}" for count, name in frames.items())
        raise ValueError(f"the recordings of {path} differ in their number of frames imgsTarget_000xxx.npz: {counted}")
    shape = _npz_shape(films[0][0], "data")
    if len(shape) not in (3, 4) or not 0 <= options.camera < shape[0]:
        raise ValueError(
            f"{films[0][0]} holds images {shape}, expected (cameras, rows, columns, 1) with camera {options.camera}"
        )
    load = partial(_read_npz, "data", options.camera, shape)
    size = (len(films), len(films[0]), *shape[1:3])
    array = Items(size, load, tuple(file for film in films for file in film), leading=2)
    return Catalogue(
        path,
        ["imgsTarget"],
        open=lambda key: array,
        axes=lambda key, shape: "ntxy",
        trajectory=("imgsTarget",),
        times=np.arange(len(films[0])) / FRAMES_PER_SECOND,
        channels={"imgsTarget": ("density",)},
        names=[folder.name for folder in recordings],
    )


def _read_npz(key: str, part: int | slice, shape: tuple[int, ...], file: Path, index: Index) -> Array:
    """A part of one array of an archive: `part` of its first axis, `index` of the rest."""
    with readable(file, NUMPY), open(file, "rb") as opened, np.load(opened, allow_pickle=False) as archive:
        values: Array = archive[key]
    if values.shape != shape:
        raise ValueError(f"{file} holds {key} of shape {values.shape}, the files before it {shape}: all must be alike")
    chosen: Array = values[part]
    if isinstance(part, int):
        return chosen.reshape(chosen.shape[:2])[index]
    return chosen[index]


def _same_shape(files: tuple[Path, ...], key: str) -> tuple[int, ...]:
    shapes: dict[tuple[int, ...], Path] = {}
    for file in files:
        shapes.setdefault(_npz_shape(file, key), file)
    if len(shapes) > 1:
        found = "; ".join(f"{shape} in {file.name}" for shape, file in shapes.items())
        raise ValueError(f"the files of {files[0].parent} differ in resolution: {found}")
    return next(iter(shapes))


def _npz_shape(file: Path, key: str) -> tuple[int, ...]:
    """The shape of an array in an archive, from its header alone."""
    with readable(file, NUMPY), zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        if key in names:
            with archive.open(f"{key}.npy") as member:
                first = np.lib.format.read_magic(member) == (1, 0)
                header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                shape: tuple[int, ...] = header(member)[0]
                return shape
    raise ValueError(f"{file} has no {key}: it has {', '.join(names)}")


def video(path: Path, options: ReadOptions) -> Catalogue:
    """A video as one trajectory of grey (or red, green and blue) levels between 0 and 1, decoded as it is read."""
    needed("av", "video", "reading videos")
    film = Video(path, options.colour)
    return Catalogue(
        path,
        ["video"],
        open=lambda key: film,
        axes=lambda key, shape: "tcxy",
        trajectory=("video",),
        times=np.array(film.times),
        channels={"video": ("red", "green", "blue") if options.colour else ("grey",)},
        names=[path.stem],
    )


@dataclass
class Video:
    """The frames of a video, (t, 1 or 3, rows, columns). Reading on is cheap, going back decodes from a key frame."""

    path: Path
    colour: bool
    shape: tuple[int, ...] = field(init=False)
    times: tuple[float, ...] = field(init=False)
    _stamps: tuple[int, ...] = field(init=False, repr=False)
    _decoder: tuple[int, int, Iterator[Any]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        container, stream = self._open()
        with container:
            packets = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
            self._stamps = tuple(sorted(packets))
            self.times = tuple(float((pts - self._stamps[0]) * stream.time_base) for pts in self._stamps)
            self.shape = (len(packets), 3 if self.colour else 1, stream.height, stream.width)
        if not packets:
            raise OSError(f"{self.path} is no readable video: it has no frames")

    def _open(self) -> tuple[Any, Any]:
        av = needed("av", "video", "reading videos")
        with readable(self.path, "video"):
            container = av.open(str(self.path))
            return container, container.streams.video[0]

    def _frames(self, first: int) -> Iterator[Any]:
        """Decoded frames from the first asked for."""
        container, stream = self._open()
        with container:
            container.seek(self._stamps[first], stream=stream)
            yield from (frame for frame in container.decode(stream) if frame.pts >= self._stamps[first])

    def __getitem__(self, index: Index) -> Array:
        wanted = range(*index[0].indices(self.shape[0]))
        shape = (
            len(wanted),
            *(len(range(*part.indices(n))) for part, n in zip(index[1:], self.shape[1:], strict=True)),
        )
        images = np.zeros(shape, dtype=np.float32)
        if not wanted:
            return images
        # The decoder goes on where the last read ended, unless that was elsewhere or in another process.
        position, frames = wanted[0], None
        if self._decoder is not None and self._decoder[0] == os.getpid() and self._decoder[1] <= wanted[0]:
            _, position, frames = self._decoder
        if frames is None or wanted[0] - position > 250:
            position, frames = wanted[0], self._frames(wanted[0])
        for place, number in enumerate(wanted):
            frame = None
            while position <= number:
                frame = next(frames, None)
                position += 1
            if frame is None or frame.pts != self._stamps[number]:
                raise OSError(
                    f"{self.path} cannot be decoded at frame {number} of {self.shape[0]}: it is damaged or truncated"
                )
            pixels = frame.to_ndarray(format="rgb24" if self.colour else "gray")
            image = np.moveaxis(pixels, -1, 0) if self.colour else pixels[None]
            images[place] = image[index[1:]] / np.float32(255)
        self._decoder = (os.getpid(), position, frames)
        return images

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoder": None}

    def identity(self) -> str:
        """The file and how it is read."""
        return f"{stamp(self.path)} {self.colour}"
