"""A model averaged over the symmetric orbit of its input: ŷ = mean over g of g⁻¹ model(g x), equivariant by design."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import transform_once as t1
from transform_once.models.operator import Operator

BATCH = 64


def elements(symmetries: Sequence[t1.Symmetry], shifts: int) -> list[tuple[t1.Symmetry, ...]]:
    """Products of the symmetries, each with and without: a free shift s takes the values 0, 1/shifts, 2/shifts, …"""
    choices: list[list[t1.Symmetry | None]] = []
    for g in symmetries:
        values = [j / shifts for j in range(shifts)] if any(g.direction) else [0.0]
        choices.append([*(() if any(g.direction) and _moves_only(g) else (None,)), *(_at(g, s) for s in values)])
    return [tuple(g for g in chosen if g is not None) for chosen in itertools.product(*choices)]


def inverse(g: t1.Symmetry) -> t1.Symmetry:
    """The map that undoes g: what g reads at p = Ax + b is read back at x = A⁻¹(p − b)."""
    axes, signs, offset = ([0.0] * len(g.axes) for _ in range(3))
    for i, axis in enumerate(g.axes):
        axes[axis], signs[axis], offset[axis] = i, g.signs[i], -g.signs[i] * g.offset[i]
    factors, input_factors = (tuple(1 / f for f in some) for some in (g.factors, g.input_factors))
    return t1.Symmetry(tuple(axes), tuple(signs), tuple(offset), (), factors, input_factors)  # type: ignore[arg-type]


def orbit_average(
    predict: Callable[[Tensor], Tensor], x: Tensor, like: t1.Fields, orbit: Sequence[Sequence[t1.Symmetry]]
) -> Tensor:
    """Predictions of x (n, …) averaged over an orbit of `elements`; grid and borders are those of `like`."""
    grid, periodic = like.metadata.grid, like.metadata.periodic

    def moved(fields: Tensor, g: t1.Symmetry, inputs: bool) -> Tensor:
        still = torch.zeros(len(fields), device=fields.device)
        return g.motion(still).fields(fields, grid=grid, periodic=periodic, inputs=inputs)

    total = None
    for product in orbit:
        there = x
        for g in product:
            there = moved(there, g, inputs=True)
        back = predict(there).double()
        for g in reversed(product):
            back = moved(back, inverse(g), inputs=False)
        total = back if total is None else total + back
    if total is None:
        raise ValueError("an orbit has at least one element: give the symmetries of the data to `elements`")
    return total / len(orbit)


def predictor(model: Operator, steps: int = 0) -> Callable[[Tensor], Tensor]:
    """Fields to fields on the CPU, in batches; first frames to the next ones where `steps` are given."""

    def rolled(frames: Tensor) -> Tensor:
        device = next(model.parameters()).device
        model.eval()
        with torch.no_grad():
            return torch.cat([t1.rollout(model, part.to(device), steps).cpu() for part in frames.split(BATCH)])

    def mapped(x: Tensor) -> Tensor:
        prediction = t1.predict(model, x)
        assert isinstance(prediction, Tensor)  # told to the type checker
        return prediction

    return rolled if steps else mapped


def _at(g: t1.Symmetry, s: float) -> t1.Symmetry:
    """The symmetry with its free shift fixed."""
    offset = tuple(b + s * d for b, d in zip(g.offset, g.direction, strict=True))
    return t1.Symmetry(g.axes, g.signs, offset, (), g.factors, g.input_factors)


def _moves_only(g: t1.Symmetry) -> bool:
    """Whether the identity is among the shifts already."""
    still = g.axes == tuple(range(len(g.axes))) and set(g.signs) == {1} and not any(g.offset)
    return still and {*g.factors, *g.input_factors} == {1.0}
