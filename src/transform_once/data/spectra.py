"""Transform once: the kept modes of all fields, computed a single time, in memory or in a cache on disk.

A model that works on kept modes needs no more of its data than these: the kept modes Y of the normalised fields, the
energy `tail` that the normalised target has outside them, and the energy of the target in physical units. With them

    ‖y − ŷ‖² = Σ_c s_c² (‖Y_c − Ŷ_c‖² + tail_c),        s_c the scale of the normalisation of channel c,

is exact: training reports the error of the fields in physical units without seeing them. What frames of trajectories
have outside is alike from one to the next, which rollouts make use of (`memory`): `lagged` says how much.
"""

import contextlib
import hashlib
import json
import time
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transform_once.data.arrays import Array, stamp
from transform_once.data.fields import Fields
from transform_once.data.lags import LAGS, Lags, memory_of
from transform_once.data.metadata import Metadata
from transform_once.data.normalization import KINDS, Normalization
from transform_once.data.spectra_cache import SUFFIX, Blocks, Cache, Layout, folder_for
from transform_once.spectral.bases import wave_numbers
from transform_once.spectral.modes import LowPass, ModeSet
from transform_once.spectral.transforms import Modes, Transform, get_transform

FORMAT = "transform-once spectra 2"
BLOCK_MEGABYTES = 16  # of fields read at a time; with float64 and the transform some ten times that is in memory

Pair = tuple[Normalization, Normalization]


def spectra(
    fields: Fields,
    transform: str = "dct",
    modes: Modes = 24,
    *,
    out_transform: str | None = None,
    normalization: str | Pair | None = None,
    cache: bool | str | Path = True,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> "Spectra":
    """The kept modes of the fields, each field transformed once, in float64 whatever precision they are stored in.

    out_transform  the basis of the targets where it is another: "dst", for fields that are zero at the walls.
    normalization  None, "standard" or "unit" (fitted to these fields), or the fitted pair of another `Spectra`: test
                   data take `train.normalization`.
    cache          True: fields from files are cached on disk, in the folder `<source>.spectra` beside their file or
                   folder, fields in memory are not; a path: the folder to cache in, many caches fit into one; False: in
                   memory. A cache is used only if everything it was made from is unchanged and its checksums are right;
                   otherwise it is made anew, or continued where a build was killed. Caches of a source file as it was
                   before it changed are removed from `<source>.spectra`.
    device         where the transforms run, by default the CPU; the result lies in host memory or on disk.
    progress       show a bar on the terminal when the work takes longer than a second.

    With a cache memory stays bounded: fields are read, transformed and written in blocks.
    """
    modes = modes.modes if isinstance(modes, LowPass) else modes
    recipe = _Recipe(fields, get_transform(transform), modes, get_transform(out_transform or transform))
    recipe.check(normalization)
    folder = folder_for(fields, cache)
    if folder is None:
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in recipe.layout.items()}
        made, pair = None, recipe.fitted(normalization)
        for start, block in _tracked(recipe.transformed(pair, 0, device), recipe.units, progress):
            for name, values in block.items():
                arrays[name].reshape(recipe.units, *values.shape[1:])[start : start + len(values)] = values
    else:
        made = recipe.cached(folder, normalization, device, progress)
        pair, arrays = _pair(made.note), made.mapped()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Spectra(tensors, transform, recipe.modes, fields.resolution, pair, fields.metadata, made, out_transform)


@dataclass(eq=False)
class Spectra(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The kept modes of fields, as made by `spectra`; a torch Dataset of samples, indexed like a tensor.

    ```python
    train = spectra(read("flow.h5")[:1000], modes=24, normalization="standard")
    batch = train[[3, 1, 4]]                                  # or train[3], train[10:20], or by a tensor of indices
    loss = train.relative_l2(model.kspace(batch["input"]), batch["target"], batch["tail"], batch["energy"]).mean()
    ```

    `tensors` holds, and a batch gives,

    - of pairs "input" and "target", (n, c, *kept): kept modes of the normalised fields, where `kept` is the block of
      modes, or the number of modes of a `ModeSet`; complex for the dft;
    - of trajectories "trajectory", (n, t, c, *kept), every frame once;
    - "tail", (n, c) or (n, t, c), float64: the energy of the normalised target, or frame, outside the kept modes;
    - "energy", likewise: the energy of the target, or frame, in physical units;
    - of trajectories, in a real basis, "lagged", (n, t, 16, c), float64: the inner products of what a normalised frame
      has outside the kept modes with what the frames 1, 2, … before it have there; 0 where there are none.

    A cache on disk is mapped into memory, so that only what is indexed is read; `load` reads all of it.
    """

    tensors: dict[str, Tensor]
    transform: str
    modes: Modes
    resolution: tuple[int, ...]
    normalization: Pair  # of input and target; of a trajectory twice the same
    metadata: Metadata
    cache: Cache | None = None
    out_transform: str | None = None  # of the targets, where it is not the same

    def __post_init__(self) -> None:
        self._constants: dict[torch.device, _Constants] = {}

    def __len__(self) -> int:
        return len(self.tensors["tail"])

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    @property
    def kind(self) -> str:
        """Either "pairs" or "trajectories"."""
        return "trajectories" if "trajectory" in self.tensors else "pairs"

    def load(self, device: torch.device | str = "cpu") -> "Spectra":
        """The same spectra in the memory of a device."""
        device = torch.device(device)
        tensors = {name: _moved(tensor, device, copy=True) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, cache=None)

    def memory(self) -> Tensor | None:
        """How much of what a frame has outside the kept modes the frames 1, 2, … later still have there: (lags, c).

        The factors of least squares, between −1 and 1; None of pairs, of the dft, and where nothing lies outside.
        """
        if "lagged" not in self.tensors:
            return None
        tail, energy, lagged = (self.tensors[name].double().cpu() for name in ("tail", "energy", "lagged"))
        return memory_of(tail, energy, lagged, self.normalization[1].scale.flatten())

    def relative_l2(self, prediction: Tensor, target: Tensor, tail: Tensor, energy: Tensor) -> Tensor:
        """The relative L2 error ‖y − ŷ‖/‖y‖ of the fields in physical units, per sample or frame, shape (...).

        `prediction` and `target` are normalised kept modes (..., c, *kept), `tail` and `energy` (..., c) as the dataset
        gives them; ŷ is the field that the inverse transform makes of the prediction. Undefined where y = 0.
        """
        error = self.squared_error(prediction, target, tail)
        # The ratio is taken before it is rounded to the precision of the modes: physical units can be of any size.
        weight = self._on(tail.device).squared_scale / energy.sum(-1, keepdim=True)
        return (weight.to(error.dtype) * error).sum(-1).sqrt()

    def squared_error(self, prediction: Tensor, target: Tensor, tail: Tensor) -> Tensor:
        """‖S_mY − Ŷ‖² + tail (..., c): the squared L2 error of the normalised fields per channel."""
        kept = -1 if isinstance(self.modes, ModeSet) else -len(self.resolution)
        target, prediction = target.flatten(kept), prediction.to(target.dtype).flatten(kept)
        if not target.is_complex():
            error = (target - prediction).square().sum(-1)
            return error + tail.to(error.dtype)
        # In the columns of an rfft that are their own conjugates the real inverse takes half of each mode and half of
        # its mirror image's conjugate. A mode whose mirror image is not kept makes that too, so its error counts twice,
        # and the energy of its mirror image, which is in the tail, no more.
        known = self._on(target.device)
        own = prediction[..., known.columns]
        real = (own + own[..., known.mirror].conj() * known.mirrored) / 2
        error = torch.view_as_real(target - prediction.index_copy(-1, known.columns, real)).square().sum(-1)
        lone = torch.view_as_real(target[..., known.lone]).square().sum((-1, -2))
        return ((error * known.weights).sum(-1) + (tail.to(error.dtype) - lone)).clamp_min(0)

    def _on(self, device: torch.device) -> "_Constants":
        """The constants of the loss, put on a device once, so that a captured or compiled step finds them there."""
        if device not in self._constants:
            made = _constants(self.normalization[1].scale, self.transform, self.modes, self.resolution)
            self._constants[device] = _Constants(*(_moved(tensor, device) for tensor in made))
        return self._constants[device]

    def __getstate__(self) -> dict[str, Any]:
        # A cache sent to another process, such as a worker of a loader, is mapped there again and not copied.
        return {**self.__dict__, "_constants": {}, "tensors": self.tensors if self.cache is None else {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.cache is not None:
            self.tensors = {name: torch.from_numpy(array) for name, array in self.cache.mapped().items()}


class _Constants(NamedTuple):
    """What the loss needs besides a batch: for all transforms the scale, for the dft how its modes belong together."""

    squared_scale: Tensor  # (c,)
    columns: Tensor  # where, among the kept modes, those are whose column is its own conjugate
    mirror: Tensor  # where, among those, the mode of opposite wave numbers is
    mirrored: Tensor  # 1 where that is kept, else 0
    lone: Tensor  # where, among the kept modes, those are whose mirror image is not
    weights: Tensor  # how many modes of the full spectrum each kept mode stands for


def _constants(scale: Tensor, transform: str, modes: Modes, size: tuple[int, ...]) -> _Constants:
    waves = torch.zeros(0, len(size), dtype=torch.long)
    if transform == "dft" and isinstance(modes, ModeSet):
        waves = modes.indices
    elif transform == "dft":
        *rows, last = get_transform(transform).block(modes, size)
        waves = torch.cartesian_prod(*(torch.from_numpy(wave_numbers(m)) for m in rows), torch.arange(last))
        waves = waves.reshape(-1, len(size))
    points = torch.tensor(size)
    columns = (2 * waves[:, -1] % points[-1] == 0).nonzero().flatten()
    place = {tuple(wave): i for i, wave in enumerate((waves[columns] % points).tolist())}
    mirror = torch.tensor([place.get(tuple(wave), -1) for wave in (-waves[columns] % points).tolist()]).long()
    lone = columns[mirror < 0]
    weights = torch.full((len(waves),), 2.0)
    weights[columns[mirror >= 0]] = 1.0
    mirrored = (mirror >= 0).float()
    return _Constants(scale.flatten().square(), columns, mirror.clamp_min(0), mirrored, lone, weights)


@dataclass(frozen=True)
class _Recipe:
    """What is to be transformed, and how."""

    fields: Fields
    transform: Transform
    modes: Modes
    out_transform: Transform  # of the targets

    def check(self, normalization: str | Pair | None) -> None:
        """Refuse what cannot be done, warn of what should not be."""
        fields, name, metadata = self.fields, self.transform.name, self.fields.metadata
        if list(fields.shapes) == ["input"]:
            raise ValueError("spectra are of pairs or of trajectories; these fields hold inputs only: give targets too")
        if metadata.missing is not None or fields[:1].mask is not None:
            raise ValueError(
                "these fields have a mask or missing points, which no loss on kept modes can leave out: train on "
                "fields, or put values there that the kept modes can hold (transform_once.fill)"
            )
        if isinstance(self.modes, ModeSet) and self.modes.indices.ndim != 2:
            raise ValueError('expected one set of modes for all fields, as TopM(count, per="all") fits it; got several')
        if self.out_transform is not self.transform and (fields.kind != "pairs" or isinstance(self.modes, ModeSet)):
            raise ValueError("only targets of pairs have a basis of their own, and modes as ints: leave it out")
        self._check_normalization(normalization)
        suits_fourier = metadata.grid == "node" and all(metadata.periodic)
        if suits_fourier == (name == "dct"):
            right = "fourier" if suits_fourier else "dct"
            warnings.warn(
                f"these fields lie on {metadata.grid}s, periodic={metadata.periodic}, for which the right basis is "
                f'transform="{right}"; the {name} of them changes with the resolution or does not decay',
                stacklevel=3,
            )

    def _check_normalization(self, given: str | Pair | None) -> None:
        if given is None or (isinstance(given, str) and given in KINDS):
            return
        if isinstance(given, str) or len(given) != 2 or not all(isinstance(one, Normalization) for one in given):
            kinds = ", ".join(KINDS)
            raise ValueError(f"normalization is one of {kinds}, or two fitted ones, of input and target; got {given!r}")
        wanted, found = (self.fields.in_channels, self.fields.out_channels), tuple(one.scale.numel() for one in given)
        if found != wanted:
            raise ValueError(f"these fields have {wanted} channels in and out, but the normalisation is for {found}")
        if self.fields.kind == "trajectories" and given[0].to_dict() != given[1].to_dict():
            raise ValueError("trajectories have one normalisation: give the same one for input and target")

    def fitted(self, normalization: str | Pair | None) -> Pair:
        """The normalisation of input and target."""
        if normalization is not None and not isinstance(normalization, str):
            return normalization
        maps = [Normalization.fit(self.fields, name, normalization or "none") for name in self.fields.shapes]
        return maps[0], (maps[-1].without_shift() if self.out_transform.name == "dst" else maps[-1])

    @property
    def units(self) -> int:
        """How many samples, or frames of all trajectories."""
        return len(self.fields) * self.fields.frames

    @cached_property
    def layout(self) -> Layout:
        """The shape and dtype of every array."""
        block = self.transform.block(self.modes, self.fields.resolution)
        kept = (len(self.modes),) if isinstance(self.modes, ModeSet) else block
        size = np.dtype(self.fields.metadata.dtype).itemsize
        dtype = np.dtype(f"<c{2 * size}" if self.transform.is_complex else f"<f{size}")
        fronts = {name: shape[: -self.fields.ndim] for name, shape in self.fields.shapes.items()}
        judged = list(fronts.values())[-1]
        modes = {name: ((*front, *kept), dtype) for name, front in fronts.items()}
        made = modes | dict.fromkeys(("tail", "energy"), (judged, np.dtype("<f8")))
        if self.fields.kind == "trajectories" and not self.transform.is_complex:
            made["lagged"] = ((*judged[:-1], LAGS, judged[-1]), np.dtype("<f8"))
        return made

    def transformed(self, normalization: Pair, start: int, device: torch.device | str | None) -> Blocks:
        """Block by block from the unit `start` on: the number of its first unit, and its arrays (units, c, *kept).

        All is computed in float64, where the tail, a small difference of two energies, keeps its digits.
        """
        fields, first = self.fields, divmod(start, self.fields.frames)
        device = torch.device("cpu" if device is None or torch.device(device).type == "mps" else device)
        lags = Lags() if "lagged" in self.layout else None
        if lags and first[1]:  # a build goes on within a trajectory
            known = fields[first[0] : first[0] + 1].select(frames=slice(max(0, first[1] - LAGS), first[1]))
            _, z, Z = self._of("trajectory", known, normalization[1], device)
            lags.products(z, self._held(Z), 1, follows=False)
        for samples, frames, part in fields.blocks(BLOCK_MEGABYTES, first):
            block: dict[str, Array] = {}
            for name, affine in zip(fields.shapes, normalization, strict=False):
                y, z, Z = self._of(name, part, affine, device)
                block[name] = Z.cpu().numpy().astype(self.layout[name][1])
            # The last array is the one that is judged, the target or the trajectory.
            held = self._held(Z)
            kept = self.out_transform.energy(held, fields.ndim, fields.resolution).flatten(2).sum(2)
            block["tail"] = (z.flatten(2).square().sum(2) - kept).clamp_min(0).cpu().numpy()
            block["energy"] = y.flatten(2).square().sum(2).cpu().numpy()
            if lags:
                made = lags.products(z, held, samples.stop - samples.start, follows=frames.start > 0)
                block["lagged"] = made.flatten(0, 1).cpu().numpy()
            yield samples.start * fields.frames + frames.start, block

    def _of(
        self, name: str, part: Fields, affine: Normalization, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """An array of fields as it is, normalised, and its kept modes, (units, c, ...)."""
        ndim = self.fields.ndim
        y = getattr(part, name).reshape(-1, *self.fields.shapes[name][-ndim - 1 :]).to(device, torch.float64)
        z = affine.apply(y)
        T = self.out_transform if name == "target" else self.transform
        return y, z, T.forward(z, ndim, self.modes)

    def _held(self, Z: Tensor) -> Tensor:
        return self.modes.scatter(Z) if isinstance(self.modes, ModeSet) else Z

    def cached(
        self, folder: Path, normalization: str | Pair | None, device: torch.device | str | None, progress: bool
    ) -> Cache:
        """The cache in a folder, made if it is not there or not right."""
        fingerprint = self.fields.fingerprint()
        modes = self.modes.indices.tolist() if isinstance(self.modes, ModeSet) else []
        given = (normalization or "none") if isinstance(normalization, str | None) else _text(normalization)
        layout = {name: (shape, str(dtype)) for name, (shape, dtype) in self.layout.items()}
        names = [self.transform.name, self.out_transform.name]
        key = hashlib.sha256(json.dumps([FORMAT, fingerprint, names, modes, given, layout]).encode())
        # In the folder of a single file names begin with the state of that file, all others are stale.
        source = folder.with_name(folder.name.removesuffix(SUFFIX))
        state = hashlib.sha256(stamp(source).encode()).hexdigest()[:8] if source.is_file() else ""
        name = f"{state or self.transform.name}-{key.hexdigest()[:16]}.h5"
        cache = Cache(folder / name, key.hexdigest(), self.layout, self.units)

        def blocks(note: str, start: int) -> Blocks:
            yield from _tracked(self.transformed(_pair(note), start, device), self.units, progress)
            if self.fields.fingerprint() != fingerprint:
                raise OSError(f"the source of {cache.path} changed while it was transformed: run again")

        if not cache.whole():
            cache.build(lambda: _text(self.fitted(normalization)), blocks)
            for other in folder.glob("*.h5*") if state else ():
                if not other.name.startswith(state):
                    with contextlib.suppress(OSError):  # in use, on a system that does not remove such files
                        other.unlink()
        return cache


def _text(normalization: Pair) -> str:
    return json.dumps([one.to_dict() for one in normalization])


def _pair(text: str) -> Pair:
    first, second = (Normalization.from_dict(values) for values in json.loads(text))
    return first, second


def _moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """The tensor on a device, in float32 where that has no float64."""
    lacking = device.type == "mps" and tensor.dtype == torch.float64
    return tensor.to(device, torch.float32 if lacking else tensor.dtype, copy=copy)


def _tracked(blocks: Blocks, units: int, show: bool) -> Blocks:
    """The blocks, with a bar on the terminal once they have taken longer than a second."""
    from rich.console import Console
    from rich.progress import Progress

    console, began = Console(stderr=True), time.monotonic()
    bar = Progress(console=console, transient=True, disable=not (show and console.is_terminal))
    task = bar.add_task("transform once", total=units)
    try:
        for start, block in blocks:
            yield start, block
            bar.update(task, completed=start + len(block["tail"]))
            if time.monotonic() - began > 1:
                bar.start()
    finally:
        if bar.live.is_started:
            bar.stop()
