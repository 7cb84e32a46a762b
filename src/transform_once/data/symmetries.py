"""Symmetries: maps that take every solution of a problem to another solution, drawn at random as free training data.

A `Symmetry` declares one map of the unit box or torus. `draw` picks a random product of several for every sample of a
batch, and the resulting `Motion` moves inputs and targets alike: on fields, or exactly on kept modes, so that training
never leaves k-space and the energy of the dropped modes stays what it was. In the "fourier" basis translations are
rotations of cos/sin pairs and reflections are signs, in the "dct" basis mirrors are signs. Nothing here waits for the
device: once a first call has put the constants there (the usual warm-up), draws and motions can be part of a CUDA
graph.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from transform_once import kernels


@dataclass(frozen=True)
class Symmetry:
    """One map that takes solutions to solutions: (gw)(x) = factor · w(Ax + offset + s · direction).

    A is a signed permutation: coordinate i of the point at which w is read is `signs[i]` · x[`axes[i]`] + `offset[i]` +
    s · `direction[i]`, in units of the box, first grid axis first. What is not given stays in place. Examples:

    - w(x+s, y−s) for every s: `Symmetry(direction=(1, -1))`
    - −w(y+¼, x+¼): `Symmetry(axes=(1, 0), offset=(0.25, 0.25), factors=(-1.0,))`
    - rotation of the torus by π: `Symmetry(signs=(-1, -1))`
    - mirror of a box along its second axis, w(x, 1−y), where the last of three channels is the velocity along it:
      `Symmetry(signs=(1, -1), offset=(0.0, 1.0), factors=(1.0, 1.0, -1.0))`

    Attributes:
        axes: a permutation of the grid axes.
        signs: +1 or −1 per grid axis.
        offset: the fixed shift per grid axis, as a fraction of the box.
        direction: whole numbers per grid axis; s is drawn uniformly from [0, 1). Empty: no continuous parameter.
        factors: what each target channel is multiplied with; a single number serves all channels.
        input_factors: the same for the input channels; empty: as for the target.
    """

    axes: tuple[int, ...] = ()
    signs: tuple[int, ...] = ()
    offset: tuple[float, ...] = ()
    direction: tuple[int, ...] = ()
    factors: tuple[float, ...] = (1.0,)
    input_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.axes, self.signs, self.offset, self.direction) if part}
        if len(lengths) != 1:
            raise ValueError(
                "a symmetry needs at least one of axes, signs, offset and direction, one entry per grid axis in each; "
                f"got lengths {sorted(lengths)}"
            )
        ndim = lengths.pop()
        defaults = {"axes": range(ndim), "signs": (1,) * ndim, "offset": (0.0,) * ndim, "factors": (1.0,)}
        for name, default in {**defaults, "direction": (0,) * ndim, "input_factors": self.factors}.items():
            object.__setattr__(self, name, tuple(getattr(self, name)) or tuple(default))
        if sorted(self.axes) != list(range(ndim)):
            raise ValueError(f"axes must be a permutation of {tuple(range(ndim))}, got {self.axes}")
        if any(sign not in (1, -1) for sign in self.signs):
            raise ValueError(f"signs must be 1 or -1, got {self.signs}")
        if any(step != int(step) for step in self.direction):
            raise ValueError(f"direction must be whole numbers, so that s=1 closes the circle, got {self.direction}")

    def to_dict(self) -> dict[str, list[float]]:
        """Plain lists by name, ready for JSON; `from_dict` reads them back."""
        return {field.name: list(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Symmetry":
        """The symmetry that `to_dict` wrote."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"a symmetry has the entries {known}, got also {unknown}; remove them")
        return cls(**{name: tuple(value) for name, value in values.items()})

    def motion(self, shift: Tensor) -> "Motion":
        """This map applied to every sample, with s = `shift`, of shape (batch,)."""
        table = _table((self,), shift.device)
        last = torch.full(shift.shape, len(table.maps) - 1, device=shift.device)
        return table.motion(last, shift[:, None].to(table.offset.dtype))


def draw(
    symmetries: Iterable[Symmetry],
    batch: int,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> "Motion":
    """A random product of the symmetries for each of `batch` samples.

    Every symmetry takes part with probability ½ (a pure translation always) and with its own uniform s; products run in
    the order given. The randomness is the device's own, or the given generator of that device.
    """
    table = _table(tuple(symmetries), torch.device(device))
    choice = torch.randint(len(table.maps), (batch,), device=device, generator=generator)
    count = table.direction.shape[-1]
    shift = torch.rand(batch, count, device=device, generator=generator, dtype=table.offset.dtype)
    return table.motion(choice, shift)


@dataclass(frozen=True)
class Motion:
    """One map per sample, w ↦ factor · w(Ax + b), of fields or of their modes.

    Tensors are (batch, channels, *grid) or (batch, time, channels, *grid); all frames of a sequence move together.
    `choice` (batch,) are rows of `table`, `shift` (batch, symmetries) the parameters s; of them follow `signs` and
    `offset` (batch, axes) and the factors (batch, channels or 1).
    """

    table: "_Table"
    choice: Tensor
    shift: Tensor

    @cached_property
    def signs(self) -> Tensor:
        """The signs of A, (batch, axes)."""
        return self.table.signs[self.choice]

    @cached_property
    def offset(self) -> Tensor:
        """b in units of the box, (batch, axes)."""
        return self.table.offset[self.choice] + (self.table.direction[self.choice] * self.shift[:, None]).sum(-1)

    def fields(self, x: Tensor, *, grid: str, periodic: bool | Sequence[bool], inputs: bool = False) -> Tensor:
        """The moved fields, sampled on the same grid.

        Along a periodic axis, with samples at j/N (`grid="node"`) or (j+½)/N (`grid="cell"`), reflections and shifts by
        whole grid steps are exact, other shifts are Fourier interpolation, exact for band-limited fields. An axis that
        is not periodic can be mirrored only, x ↦ 1−x. `inputs` picks the factors of the input channels.
        """
        if grid not in ("node", "cell"):
            raise ValueError(f"grid must be 'node' or 'cell', got {grid!r}")
        ndim = self.table.ndim
        around = (periodic,) * ndim if isinstance(periodic, bool) else tuple(periodic)
        self.table.check(around)
        for axis in range(ndim):
            dim = x.ndim - ndim + axis
            size = x.shape[dim]
            half = 0.5 if grid == "cell" or not around[axis] else 0.0
            # Sample j reads position sign·(j+half) + size·offset − half; its whole part is a gather, the rest a phase.
            start = self.offset[:, axis] * size + (self.signs[:, axis] - 1) * half
            whole = start.round()
            if not self.table.aligned(axis, size, half):
                x = _shift(x, dim, start - whole)
            if not self.table.still(axis):
                steps = torch.arange(size, device=x.device, dtype=start.dtype)
                index = (self.signs[:, axis, None] * steps + whole[:, None]).remainder(size).long()
                x = x.gather(dim, _along(index, dim, x).expand(x.shape))
        return self._finish(x, inputs)

    def modes(self, X: Tensor, transform: str, *, inputs: bool = False, constants: Tensor | None = None) -> Tensor:
        """The moved coefficients of the "fourier" basis (constant, cos 1, sin 1, … an odd number), the "dct" or "dst".

        `why_not_on_modes` says where this is what `fields` does. `constants` (channels,) are added to the constant
        modes before the motion and taken away after it: where fields had a shift taken off, a symmetry that flips their
        sign must see it.
        """
        ndim = self.table.ndim
        if transform == "fourier" and any(kept % 2 == 0 for kept in X.shape[-ndim:]):
            raise ValueError(f"{tuple(X.shape[-ndim:])} modes split a cos/sin pair; keep an odd number on every axis")
        if ndim == 2 and not X.requires_grad and kernels.can_run(X):  # data are moved; gradients go the plain way
            return self._modes_kernel(X, transform, inputs, constants)
        if constants is not None:
            X = _add_constants(X, constants, ndim)
        X = self._finish(self._turned(X) if transform == "fourier" else self._mirrored(X), inputs)
        return X if constants is None else _add_constants(X, -constants, ndim)

    def _modes_kernel(self, X: Tensor, transform: str, inputs: bool, constants: Tensor | None) -> Tensor:
        """The same by one kernel."""
        from transform_once.kernels.motion import move_modes

        table = self.table
        factors = table.input_factors if inputs else table.factors
        self._check_shapes(X, factors)
        tables = (table.signs, table.offset, table.direction, factors, table.permuted[0] if table.permuted else None)
        return move_modes(X, self.choice, self.shift, *tables, constants, cosines=transform != "fourier")

    def _turned(self, X: Tensor) -> Tensor:
        """Pairs of cosine and sine, turned along every axis."""
        ndim = self.table.ndim
        for axis in range(ndim):
            dim = X.ndim - ndim + axis
            kept = X.shape[dim]
            if kept == 1 or self.table.still(axis):
                continue
            wave = torch.arange(1, kept // 2 + 1, device=X.device, dtype=self.offset.dtype)
            angle = 2 * math.pi * wave * self.offset[:, axis, None]
            cosine, sine = (_along(values.to(X.dtype), dim, X) for values in (angle.cos(), angle.sin()))
            sign = _along(self.signs[:, axis, None].to(X.dtype), dim, X)
            even, odd = X.narrow(dim, 1, kept - 1).unflatten(dim, (-1, 2)).unbind(dim + 1)
            pairs = torch.stack((cosine * even + sine * odd, sign * (cosine * odd - sine * even)), dim + 1)
            X = torch.cat((X.narrow(dim, 0, 1), pairs.flatten(dim, dim + 1)), dim)
        return X

    def _mirrored(self, X: Tensor) -> Tensor:
        """Cosines or sines of cells, of which a mirror changes the sign of every second one."""
        ndim = self.table.ndim
        for axis in range(ndim):
            dim = X.ndim - ndim + axis
            if not self.table.still(axis):
                odd = torch.arange(X.shape[dim], device=X.device) % 2
                X = X * _along(self.signs[:, axis, None].to(X.dtype) ** odd, dim, X)
        return X

    def _finish(self, x: Tensor, inputs: bool) -> Tensor:
        """Transpose and multiply, which fields and coefficients share."""
        table, ndim = self.table, self.table.ndim
        factors = table.input_factors if inputs else table.factors
        self._check_shapes(x, factors)
        lead = tuple(range(x.ndim - ndim))
        result = x
        for axes, permuted in zip(table.permutations, table.permuted, strict=True):
            # Axis i of x follows axis axes[i] of the result.
            moved = x.permute(*lead, *(len(lead) + axes.index(axis) for axis in range(ndim)))
            result = torch.where(_along(permuted[self.choice][:, None], 0, x), moved, result)
        return result * _along(factors[self.choice].to(x.dtype), x.ndim - ndim - 1, x)

    def _check_shapes(self, x: Tensor, factors: Tensor) -> None:
        """Complain about axes that cannot be swapped and about channels without a factor."""
        grid, channels = tuple(x.shape[-self.table.ndim :]), x.shape[-self.table.ndim - 1]
        if any(tuple(grid[axis] for axis in axes) != grid for axes in self.table.permutations):
            raise ValueError(
                f"a symmetry that swaps axes needs equal sizes along them, got {grid}; "
                "resample to a square grid or leave this symmetry out"
            )
        if factors.shape[1] not in (1, channels):
            raise ValueError(
                f"the symmetry has factors for {factors.shape[1]} channels, got fields with {channels}; give "
                "one factor per channel, or one for all"
            )


def why_not_on_modes(
    symmetries: Iterable[Symmetry], transform: str, block: Sequence[int], grid: str, periodic: Sequence[bool]
) -> str | None:
    """What hinders `Motion.modes` from doing on this block of kept modes what `Motion.fields` does; None: nothing."""
    table = _table(tuple(symmetries), torch.device("cpu"))
    table.check(tuple(periodic))
    if any(tuple(block[axis] for axis in axes) != tuple(block) for axes in table.permutations):
        return "swap axes of which different numbers of modes are kept"
    if transform in ("dct", "dst"):
        fixed = [around and grid == "node" for around in periodic]  # there a mirror leaves the first point where it is
        places = list(itertools.product(table.maps, range(table.ndim)))
        shifts = any(m.offset[i] % 1 != 0 or any(m.direction[i]) for m, i in places)
        mirrors = not shifts and all(m.signs[i] == 1 or not fixed[i] for m, i in places)
        return None if mirrors else f"do more than mirror fields, which is all that the {transform} can bear"
    if transform != "fourier":
        return f"act on fields, not on kept modes of the {transform} basis"
    if any(kept % 2 == 0 for kept in block):
        return "act on fields where a cosine is kept without its sine"
    return None if grid == "node" and all(periodic) else "act on fields that are not periodic on nodes"


def _add_constants(X: Tensor, constants: Tensor, ndim: int) -> Tensor:
    """Coefficients with a number per channel added to the constant modes."""
    added = X.flatten(-ndim).clone()
    added[..., 0] += constants.to(X.dtype)
    return added.unflatten(-1, X.shape[-ndim:])


class _Table:
    """Every product of some symmetries, one row each, with the shifts s kept symbolic: offset + direction · s."""

    def __init__(self, symmetries: Sequence[Symmetry], device: torch.device) -> None:
        ndims = {len(symmetry.axes) for symmetry in symmetries}
        if len(ndims) != 1:
            raise ValueError(f"symmetries must share one number of grid axes, got {sorted(ndims)}")
        self.ndim = ndims.pop()
        count = len(symmetries)
        self.maps: list[_Map] = []
        for taken in itertools.product(*((True,) if _pure_shift(g) else (False, True) for g in symmetries)):
            product = _Map.identity(self.ndim, count)
            for number, symmetry in enumerate(symmetries):
                if taken[number]:
                    product = product.then(symmetry, number)
            self.maps.append(product)
        # MPS has no float64; elsewhere angles of high wave numbers deserve it.
        real = torch.float32 if device.type == "mps" else torch.float64
        self.signs = torch.tensor([m.signs for m in self.maps], dtype=real, device=device)
        self.offset = torch.tensor([m.offset for m in self.maps], dtype=real, device=device)
        self.direction = torch.tensor([m.direction for m in self.maps], dtype=real, device=device)
        self.factors = torch.tensor(_even([m.factors for m in self.maps]), dtype=real, device=device)
        self.input_factors = torch.tensor(_even([m.input_factors for m in self.maps]), dtype=real, device=device)
        self.permutations = sorted({m.axes for m in self.maps} - {tuple(range(self.ndim))})
        self.permuted = [torch.tensor([m.axes == p for m in self.maps], device=device) for p in self.permutations]

    def motion(self, choice: Tensor, shift: Tensor) -> Motion:
        """Rows `choice` (batch,) with the parameters s = `shift` (batch, symmetries)."""
        return Motion(self, choice, shift)

    def still(self, axis: int) -> bool:
        """Whether no product reflects or shifts along this axis."""
        return all(m.signs[axis] == 1 and m.offset[axis] == 0 and not any(m.direction[axis]) for m in self.maps)

    def aligned(self, axis: int, size: int, half: float) -> bool:
        """Whether every product shifts by whole grid steps along this axis."""
        starts = [m.offset[axis] * size + (m.signs[axis] - 1) * half for m in self.maps]
        moving = any(any(m.direction[axis]) for m in self.maps)
        return not moving and all(abs(start - round(start)) < 1e-12 for start in starts)

    def check(self, periodic: tuple[bool, ...]) -> None:
        """Refuse products that leave a box along an axis that is not periodic."""
        if len(periodic) != self.ndim:
            raise ValueError(f"periodic must be one bool, or one for each of {self.ndim} grid axes, got {periodic}")
        for m in self.maps:
            for axis in range(self.ndim):
                inside = m.offset[axis] == (0 if m.signs[axis] == 1 else 1) and not any(m.direction[axis])
                if periodic[axis] != periodic[m.axes[axis]] or not (periodic[axis] or inside):
                    raise ValueError(
                        f"axis {axis} is not periodic, so it can only be mirrored by x -> 1-x (sign -1, offset 1) or "
                        f"swapped with another such axis; got {m}"
                    )


@dataclass(frozen=True)
class _Map:
    """w ↦ factor · w(Ax + offset + direction · s) with one s per symmetry: `direction` has a row per axis."""

    axes: tuple[int, ...]
    signs: tuple[int, ...]
    offset: tuple[float, ...]
    direction: tuple[tuple[int, ...], ...]
    factors: tuple[float, ...] = (1.0,)
    input_factors: tuple[float, ...] = (1.0,)

    @classmethod
    def identity(cls, ndim: int, count: int) -> "_Map":
        return cls(tuple(range(ndim)), (1,) * ndim, (0.0,) * ndim, ((0,) * count,) * ndim)

    def then(self, g: Symmetry, number: int) -> "_Map":
        """g after this map: (g(self w))(x) reads w at A₁(A₂x + b₂) + b₁, where A₂, b₂ belong to g."""
        axes = range(len(self.axes))
        rows = [tuple(g.direction[i] if j == number else 0 for j in range(len(self.direction[0]))) for i in axes]
        return _Map(
            tuple(g.axes[self.axes[i]] for i in axes),
            tuple(self.signs[i] * g.signs[self.axes[i]] for i in axes),
            tuple(self.signs[i] * g.offset[self.axes[i]] + self.offset[i] for i in axes),
            tuple(
                tuple(self.signs[i] * new + old for new, old in zip(rows[self.axes[i]], self.direction[i], strict=True))
                for i in axes
            ),
            _times(self.factors, g.factors),
            _times(self.input_factors, g.input_factors),
        )


@lru_cache(maxsize=64)
def _table(symmetries: tuple[Symmetry, ...], device: torch.device) -> _Table:
    return _Table(symmetries, device)


def _pure_shift(g: Symmetry) -> bool:
    """Whether s already makes the identity likely enough: nothing but a translation with a free parameter."""
    plain = g.axes == tuple(range(len(g.axes))) and set(g.signs) == {1} and not any(g.offset)
    return plain and any(g.direction) and {*g.factors, *g.input_factors} == {1.0}


def _times(first: tuple[float, ...], second: tuple[float, ...]) -> tuple[float, ...]:
    """Products channel by channel, a single number serving all channels."""
    if 1 not in (len(first), len(second)) and len(first) != len(second):
        raise ValueError(f"symmetries of one data set must agree on the number of channels, got {first} and {second}")
    count = max(len(first), len(second))
    return tuple(first[i % len(first)] * second[i % len(second)] for i in range(count))


def _even(rows: list[tuple[float, ...]]) -> list[list[float]]:
    """Rows of factors brought to one length."""
    count = max(len(row) for row in rows)
    return [list(row) * (count // len(row)) for row in rows]


def _along(values: Tensor, dim: int, like: Tensor) -> Tensor:
    """(batch, n) seen as a tensor that broadcasts against `like`, with n along `dim`."""
    shape = [1] * like.ndim
    shape[dim] = values.shape[1]
    shape[0] = values.shape[0]
    return values.view(shape)


def _shift(x: Tensor, dim: int, steps: Tensor) -> Tensor:
    """x(j + steps) along `dim`, by Fourier interpolation; steps (batch,) are fractions of a grid step, 0 is exact."""
    size = x.shape[dim]
    wave = torch.arange(size // 2 + 1, device=x.device, dtype=steps.dtype)
    angle = 2 * math.pi / size * wave * steps[:, None]
    phase = torch.polar(torch.ones_like(angle), angle)
    X = torch.fft.rfft(x, dim=dim)
    moved = torch.fft.irfft(X * _along(phase.to(X.dtype), dim, x), n=size, dim=dim)
    return torch.where(_along(steps[:, None] == 0, 0, x), x, moved)
