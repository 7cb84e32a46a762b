"""Flows around airfoils as models learn them: units without dimension, parts that share no shape, errors outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.formats import read
from transform_once.data.symmetries import Symmetry
from transform_once.spectral.holes import fill
from transform_once.spectral.transforms import dct, idct
from transform_once.studies.study import Row

MIRROR = Symmetry(signs=(1, -1), offset=(0.0, 1.0), factors=(1.0, 1.0, -1.0), input_factors=(1.0, -1.0, 1.0))
CHANNELS = ("pressure", "velocity_x", "velocity_y")
FOLDS = 5  # every shape is in the test part of one of them
VALIDATION = 0.15  # of the shapes, the next ones in their order; the rest is for training


@dataclass(frozen=True, eq=False)
class Flows:
    """Flows around airfoils: `fields` (n, 3, x, y) = p/|v|² less its mean `level` (n,), u/|v|, v/|v|; zero inside.

    `stream` (n, 2) is the free stream v, `inside` (n, 1, x, y) the airfoil.
    """

    names: tuple[str, ...]
    stream: Tensor
    inside: Tensor
    fields: Tensor
    level: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, numbers: Sequence[int]) -> "Flows":
        chosen = list(numbers)
        arrays = (self.stream, self.inside, self.fields, self.level)
        return Flows(tuple(self.names[i] for i in chosen), *(array[chosen] for array in arrays))

    @property
    def speed(self) -> Tensor:
        """|v|, (n, 1, 1, 1)."""
        return self.stream.norm(dim=1).reshape(-1, 1, 1, 1)

    @property
    def angle(self) -> Tensor:
        """Of the free stream against the chord, in degrees, without sign, (n,)."""
        return torch.rad2deg(torch.atan2(self.stream[:, 1], self.stream[:, 0])).abs()

    @property
    def physical(self) -> Tensor:
        """p, u and v in the units of the free stream, the pressure with its level."""
        units = torch.cat([self.speed**2, self.speed, self.speed], 1)
        level = torch.zeros_like(self.fields)
        level[:, :1] = self.level.reshape(-1, 1, 1, 1) * ~self.inside
        return (self.fields + level) * units

    def pairs(self, sigma: Tensor | None = None, symmetric: bool = True, masked: bool = True) -> Fields:
        """What models learn: from direction and mask to the dimensionless fields; `masked`: outside the airfoil alone.

        With `sigma` (3,), deviations over the training part, in the paper's way: from the free stream itself to the
        physical fields, each over its deviation, so that no channel rules the loss.
        """
        given = (self.stream if sigma is not None else self.stream / self.speed[..., 0, 0])[..., None, None]
        mask = self.inside.float()
        target = self.fields if sigma is None else self.physical / sigma.reshape(-1, 1, 1)
        return Fields(
            input=torch.cat([given * ~self.inside, mask], 1),
            target=target,
            mask=self.inside if masked else None,
            names=self.names,
            grid="node",
            channels={"input": ("freestream_x", "freestream_y", "mask"), "target": CHANNELS},
            source="steady flow around airfoils",
            symmetries=[MIRROR.to_dict()] if symmetric else [],
        )

    def dimensionless(self, prediction: Tensor, sigma: Tensor | None = None) -> Tensor:
        """A prediction for `pairs(sigma)` as dimensionless fields; of physical ones the mean pressure is removed."""
        if sigma is None:
            return prediction
        units = torch.cat([self.speed**2, self.speed, self.speed], 1)
        return _levelled(prediction * sigma.reshape(-1, 1, 1) / units, self.inside, zero=False)[0]


def _levelled(fields: Tensor, inside: Tensor, zero: bool = True) -> tuple[Tensor, Tensor]:
    """Fields whose pressure has mean zero outside the airfoil, with zeros inside if wanted, and the mean."""
    outside = ~inside[:, 0]
    level = (fields[:, 0] * outside).sum((1, 2)) / outside.sum((1, 2))
    pressure = fields[:, :1] - level.reshape(-1, 1, 1, 1)
    fields = torch.cat([pressure, fields[:, 1:]], 1)
    return (fields * ~inside if zero else fields), level


def _flows(names: Sequence[str], stream: Tensor, inside: Tensor, fields: Tensor) -> Flows:
    return Flows(tuple(names), stream, inside, *_levelled(fields, inside))


def read_flows(path: Path, further: Sequence[Path] = (), stride: int = 1) -> Flows:
    """The solutions of openfoam.npz, and of files that `t1 generate airfoils` wrote; every stride-th point."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in ("mask", "fields", "freestream", "name")}
    points = (..., slice(None, None, stride), slice(None, None, stride))
    inside = torch.from_numpy(arrays["mask"][points] != 0)[:, None]
    fields = torch.from_numpy(arrays["fields"][points].astype(np.float32))
    parts = [_flows(arrays["name"].tolist(), torch.from_numpy(arrays["freestream"]).float(), inside, fields)]
    parts += [of_fields(read(file, stride=stride)) for file in further]
    tensors = ([getattr(part, key) for part in parts] for key in ("stream", "inside", "fields", "level"))
    return Flows(tuple(name for part in parts for name in part.names), *map(torch.cat, tensors))


def of_fields(fields: Fields) -> Flows:
    """Flows of pairs in physical units: (freestream x and y, mask) to (p, u, v), as in Deep-Flow-Prediction."""
    given, target = fields.input.float(), fields.target.float()
    stream = given[:, :2, 0, 0]  # the corner lies outside every airfoil; inside, the free stream is stored as zero
    speed = stream.norm(dim=1).reshape(-1, 1, 1, 1)
    scaled = torch.cat([target[:, :1] / speed**2, target[:, 1:] / speed], 1)
    return _flows(fields.names, stream, given[:, 2:] > 0.5, scaled)


def shapes_of(names: Sequence[str]) -> list[str]:
    """The airfoils of names SHAPE_<100·v_x>_<100·v_y>."""
    return [name.rsplit("_", 2)[0] for name in names]


def split(flows: Flows, for_test: Sequence[str] = (), fold: int = 0) -> dict[str, Flows]:
    """Training, validation and test parts, no shape in two of them; shapes `for_test` are in the test of every fold."""
    own = shapes_of(flows.names)
    drawn = np.random.default_rng(0).permutation(sorted(set(own) - set(for_test))).tolist()
    first, end = (round(part * len(drawn) / FOLDS) for part in (fold, fold + 1))
    counts = [max(1, end - first), max(1, round(VALIDATION * len(drawn)))]
    if sum(counts) >= len(drawn):
        raise ValueError(f"flows around 3 different airfoils or more are needed for three parts; got {len(drawn)}")
    test, validation, rest = np.split(np.roll(drawn, -first), np.cumsum(counts))
    shapes = {"train": set(rest), "validation": set(validation), "test": {*test, *for_test}}
    order = np.random.default_rng(1).permutation(len(own)).tolist()  # so that the first 25 are any 25
    return {part: flows[[i for i in order if own[i] in chosen]] for part, chosen in shapes.items()}


def errors(prediction: Tensor, flows: Flows) -> Row:
    """Relative L2 of dimensionless fields, zero inside the airfoil: mean and median of samples, means by channel."""
    whole = errors_of_each(prediction, flows)
    channels = errors_of_each(prediction, flows, by_channel=True).mean(0).tolist()
    about = {"samples": len(flows), "relative_l2": float(whole.mean()), "median": float(whole.quantile(0.5))}
    return about | dict(zip(CHANNELS, channels, strict=True))


def errors_of_each(prediction: Tensor, flows: Flows, by_channel: bool = False) -> Tensor:
    """The relative L2 of every flow (n,), or of its channels (n, 3)."""
    error, truth = (prediction.double() - flows.fields) * ~flows.inside, flows.fields.double()
    first = 2 if by_channel else 1
    return error.flatten(first).norm(dim=first) / truth.flatten(first).norm(dim=first)


def rebuilt(flows: Flows, modes: int) -> Tensor:
    """What the lowest modes have of the fields, with values inside the airfoils that these modes can hold."""
    return idct(dct(fill(flows.fields, flows.inside, modes), 2, modes), 2, flows.fields.shape[2:])
