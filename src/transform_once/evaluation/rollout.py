"""Rollouts: a model that steps in time, applied to its own predictions.

With h the model and Δt = 1, from the frames x_{t−H}, …, x_t (`Dynamics`):

    order 0:  x_{t+1} = h(x_{t−H}, …, x_t)
    order 1:  x_{t+1} = x_t + h(…)
    order 2:  x_{t+1} = 2x_t − x_{t−1} + h(…)

A model that transforms once is rolled out wholly on its kept modes: the first frames are projected onto them, once, and
only the frames asked for are transformed back. What the last known frame x_0 has outside them is remembered:

    x_s = kept modes of the rollout + a_s (x_0 − its kept modes),        a_s = `model.memory[s − 1]`,

where training fits the factors to its trajectories by least squares, so that they are near 1 for frames that follow
closely on each other and near 0 where small scales are soon forgotten. Other models go through fields.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from transform_once.models.operator import Dynamics, Operator, SpectralOperator

Predict = Callable[[Tensor], Tensor]


def rollout(model: Operator, first_frames: Tensor, steps: int, *, frames: Sequence[int] | None = None) -> Tensor:
    """The `steps` frames that follow the first ones: (batch, f, c, *grid) to (batch, steps, c, *grid).

    Of the first frames the last `model.dynamics.frames` are used. `frames` picks steps to return, counted from 1; the
    others are never transformed back. Gradients flow; wrap the call in `torch.no_grad()` to predict only.
    """
    return rollout_through(model, first_frames, steps, steps_in_kspace(model), frames)


def rollout_through(
    model: Operator, first_frames: Tensor, steps: int, in_kspace: bool, frames: Sequence[int] | None = None
) -> Tensor:
    """`rollout`, told whether it can stay on the kept modes: asking a model on a GPU waits for it."""
    dynamics = dynamics_of(model)
    wanted = range(1, steps + 1) if frames is None else frames
    _check(model, dynamics, first_frames, steps, wanted)
    first_frames = first_frames[:, -dynamics.frames :].to(next(model.parameters()).dtype)
    chosen = [step - 1 for step in wanted]
    if in_kspace:
        assert isinstance(model, SpectralOperator)  # told to the type checker
        return _through_kspace(model, first_frames, steps, chosen)
    return _picked(field_rollout(model, first_frames, steps), chosen)


def _through_kspace(model: SpectralOperator, first_frames: Tensor, steps: int, chosen: list[int]) -> Tensor:
    grid, T = tuple(first_frames.shape[3:]), model.transform
    resampled = math.sqrt(math.prod(grid) / math.prod(model.resolution))
    shift, scale = _state_units(model, first_frames)
    known = (first_frames - shift) / scale
    first = T.forward(known.flatten(0, 1), model.ndim, model.modes).unflatten(0, known.shape[:2]) / resampled
    Z = _picked(kspace_rollout(model, first, steps), chosen).to(first.dtype)
    z = T.inverse(Z.flatten(0, 1) * resampled, model.ndim, grid, model.modes).unflatten(0, Z.shape[:2])
    if model.memory is not None:
        outside = known[:, -1] - T.inverse(first[:, -1] * resampled, model.ndim, grid, model.modes)
        factors = _picked(remembered(model.memory, steps)[None], chosen)[0].to(z.dtype)
        z = z + factors.reshape(*factors.shape, *(1,) * model.ndim) * outside[:, None]
    return z * scale + shift


def _picked(states: Tensor, chosen: Sequence[int]) -> Tensor:
    """Some of (batch, steps, …), without an index: a list becomes a tensor on the host, which no graph can copy."""
    if list(chosen) == list(range(states.shape[1])):
        return states
    return torch.stack([states[:, step] for step in chosen], 1)


def remembered(memory: Tensor, steps: int) -> Tensor:
    """The factors of the first steps, (steps, c), of a memory (lags, c); beyond its end the last to the s / lags."""
    lags = len(memory)
    later = torch.arange(lags + 1, max(lags, steps) + 1, device=memory.device, dtype=memory.dtype) / lags
    return torch.cat([memory[:steps], memory[-1:].clamp_min(0) ** later[:, None]])


def kspace_rollout(model: SpectralOperator, first: Tensor, steps: int) -> Tensor:
    """Kept modes of normalised frames (batch, f, c, *kept) to those of the next: (batch, steps, c, *kept)."""
    units = _change_units(model)
    if units is None:
        return _march(dynamics_of(model), first, steps, model.kspace)
    units = units.reshape(-1, *(1,) * (first.ndim - 3))
    return _march(dynamics_of(model), first, steps, lambda Z: model.kspace(Z) * units)


def field_rollout(model: Operator, first: Tensor, steps: int) -> Tensor:
    """Fields (batch, f, c, *grid) to the next: (batch, steps, c, *grid), through fields in every step."""
    return _march(dynamics_of(model), first, steps, model)


def steps_in_kspace(model: Operator) -> TypeGuard[SpectralOperator]:
    """Whether a rollout can stay on the kept modes: a model that transforms once and has no maps of fields.

    The state must come out in the units in which it goes in, its changes without a shift; training on trajectories sets
    them so.
    """
    if not isinstance(model, SpectralOperator) or getattr(model, "local", None):
        return False
    if model.input_scale is None or model.output_scale is None or model.input_shift is None:
        return True
    channels, order = model.out_channels, dynamics_of(model).order
    expected = model.input_shift[-channels:] if order == 0 else torch.zeros(channels)
    same = order > 0 or torch.equal(model.output_scale, model.input_scale[-channels:])
    return same and torch.equal(model.output_shift.cpu(), expected.cpu())  # type: ignore[union-attr]


def dynamics_of(model: Operator) -> Dynamics:
    """How the model steps in time, or a complaint that it does not."""
    if model.dynamics is None:
        raise ValueError(
            f"this {type(model).__name__} was not trained to step in time: train it on trajectories, "
            "or set model.dynamics = Dynamics(order, history)"
        )
    return model.dynamics


def _march(dynamics: Dynamics, first: Tensor, steps: int, predict: Predict) -> Tensor:
    states = list(first.unbind(1))
    for _ in range(steps):
        step = predict(torch.cat(states[-dynamics.history - 1 :], 1))
        if dynamics.order == 1:
            step = states[-1] + step
        elif dynamics.order == 2:
            step = 2 * states[-1] - states[-2] + step
        states.append(step)
    return torch.stack(states[first.shape[1] :], 1)


def _change_units(model: Operator) -> Tensor | None:
    """The scale of what a model adds to a frame, in units of the frame, per channel; None where it adds nothing."""
    if dynamics_of(model).order == 0 or model.input_scale is None or model.output_scale is None:
        return None
    return model.output_scale / model.input_scale[-model.out_channels :]


def _state_units(model: Operator, like: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale of one frame, (c, 1, …): those of the last frame among the model's input channels."""
    channels = model.out_channels
    if model.input_shift is None or model.input_scale is None:
        return like.new_zeros(()), like.new_ones(())
    shift, scale = (v[-channels:].reshape(-1, *(1,) * model.ndim) for v in (model.input_shift, model.input_scale))
    return shift, scale


def _check(model: Operator, dynamics: Dynamics, first: Tensor, steps: int, wanted: Sequence[int]) -> None:
    channels = model.out_channels
    if model.in_channels != (dynamics.history + 1) * channels:
        raise ValueError(
            f"a model that sees {dynamics.history + 1} frames of {channels} channels must have "
            f"{(dynamics.history + 1) * channels} input channels; this one has {model.in_channels}"
        )
    if first.ndim != 3 + model.ndim or first.shape[2] != channels or first.shape[1] < dynamics.frames:
        axes = ", ".join(["batch", f"{dynamics.frames} or more frames", str(channels), *["grid"] * model.ndim])
        raise ValueError(f"expected first frames of shape ({axes}); got {tuple(first.shape)}")
    if steps < 1 or any(not 1 <= step <= steps for step in wanted):
        raise ValueError(f"steps must be at least 1 and frames among 1 to steps; got {steps} and {list(wanted)}")
