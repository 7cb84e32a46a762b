"""Optimisers (AdamW, Muon), the learning rate over a run, and the moving average of the weights."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from transform_once import kernels
from transform_once.models.fno import SpectralConvolution
from transform_once.models.layers import AxisMixing, SetMixing, T1Layer
from transform_once.models.operator import check_choice
from transform_once.models.unet import UNetBody

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "step", "cosine", "restarts")

# The quintic a·s + b·s³ + c·s⁵ lifts small singular values fast; five rounds of it bring all those between 0.0015 and 1
# into NEWTON_SCHULZ_BAND, where it then keeps them. It does not converge to 1, and training needs no more.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_BAND = (0.65, 1.25)

# Root mean square of the entries of a Muon step of rate 1, near that of an AdamW step in the course of a training.
STEP_SIZE = 0.2

# Modules with these names are first or last maps.
EDGES = frozenset({"lift", "head", "local"})


def make_optimizer(
    model: nn.Module, name: str, learning_rate: float, weight_decay: float, *, capturable: bool = False
) -> torch.optim.Optimizer:
    """The optimiser of a model's trainable parameters: "adamw" or "muon".

    All parameters decay, as in the paper: p ← (1 − rate·weight_decay)·p at every step. AdamW is torch's, as one fused
    kernel where the parameters are real and on a CPU or a CUDA device, in any floating-point type. Muon
    orthogonalises the updates of the matrices inside the network (`matrix_weights`) and leaves the rest to AdamW. Good
    rates for T1, the higher the fewer steps: 1e-3 to 1e-2 with AdamW, 5e-3 to 2e-2 with Muon. A step of Muon takes 15
    products with each matrix, for T1 the work of a batch of 5·width samples: cheap on a GPU, slow on a CPU.

    `capturable` makes every step fit for a CUDA graph: the rate is then a tensor on the device of the parameters, which
    `set_rate` fills. Loading a state dict replaces tensors: load first, capture after.
    """
    check_choice(name, OPTIMIZERS, "optimizer")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate must be a positive number; got {learning_rate}: try 1e-3")
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise ValueError(f"weight_decay must be a number of at least 0; got {weight_decay}: try 1e-4, or 0 for none")
    parameters = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no trainable parameters: set requires_grad on some of them")
    values = list(parameters.values())
    options: dict[str, Any] = {
        "lr": torch.tensor(learning_rate, device=values[0].device) if capturable else learning_rate,
        "weight_decay": weight_decay,
        "capturable": capturable,
        "fused": all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in values),
    }
    if name == "adamw":
        return torch.optim.AdamW(values, **options)
    forms = matrix_weights(model)
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for key, parameter in parameters.items():
        groups.setdefault(forms.get(key, (0, False)), []).append(parameter)
    return Muon(
        ({"params": group, "columns": columns, "pairs": pairs} for (columns, pairs), group in groups.items()), **options
    )


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameters; a rate that is a tensor (`capturable`) is filled in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def matrix_weights(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """The parameters that Muon treats as matrices: name → (columns, pairs), as the groups of `Muon` have it.

    The channel and mixing matrices of T1 layers, the complex ones of spectral convolutions, linear layers, and kernels
    of convolutions as (out, in·kernel). The first and the last maps (`lift`, `head`, `local`, and the first convolution
    of a UNet) are not among them, since there a row or a column means one physical channel; nor are matrices of one
    row or one column, whose orthogonalisation would only normalise them.
    """
    found, edges = {}, []
    for prefix, module in model.named_modules():
        if isinstance(module, UNetBody):
            edges.append(module.encoder[0])
        if not EDGES.isdisjoint(prefix.split(".")) or any(module in edge.modules() for edge in edges):
            continue
        names, columns = ["weight"], 1
        if isinstance(module, AxisMixing | SetMixing):
            names = [f"weights.{index}" for index in range(len(module.weights))]
        elif isinstance(module, nn.modules.conv._ConvNd):
            columns = 1 + len(module.kernel_size)
        elif not isinstance(module, T1Layer | SpectralConvolution | nn.Linear):
            continue
        pairs = isinstance(module, SpectralConvolution)
        for name in names:
            shape = module.get_parameter(name).shape[: -1 if pairs else None]
            if min(shape[-columns - 1], math.prod(shape[-columns:])) > 1:
                found[f"{prefix}.{name}" if prefix else name] = (columns, pairs)
    return found


def newton_schulz(X: Tensor) -> Tensor:
    """U f(S) Vᴴ for each X = U S Vᴴ of a batch (batch, rows, columns), real or complex, of spectral norm at most 1.

    f(s) lies in NEWTON_SCHULZ_BAND for all s from 0.0015 to 1: nearly the orthogonal (unitary) matrix closest to X, by
    15 batched products. Cheapest with rows ≤ columns.
    """
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        A = torch.bmm(X, X.mH)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def orthogonalize(X: Tensor) -> Tensor:
    """Each matrix of (batch, rows, columns) made nearly orthogonal, whatever its size; a zero matrix stays zero.

    Real matrices in bfloat16 on CUDA and in float32 elsewhere, complex ones in complex64; double precision stays.
    """
    dtype = X.dtype
    if dtype not in (torch.float64, torch.complex64, torch.complex128):
        X = X.to(torch.bfloat16 if X.is_cuda else torch.float32)
    # Even modes with hardly any energy get a whole step. The largest entry becomes 1 first, or squares of small numbers
    # would vanish and what is left of the norm would let the rounds diverge.
    X = X / X.abs().amax((1, 2), keepdim=True).clamp_min(1e-30)
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True)
    return newton_schulz(X / norm.clamp_min(1e-20)).to(dtype)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for matrices, AdamW for everything else, in one optimiser.

    For a matrix W (r×c) with gradient G, momentum M, rate η and decay λ:

        M ← μM + (1 − μ)G,   O = orthogonalize((1 − μ)G + μM),   W ← (1 − ηλ)W − η·0.2·√max(r, c)·O

    The factor gives the entries of a step of any shape a root mean square of 0.2η, as AdamW's have in practice, so that
    one rate and one decay serve both parts and all shapes. Another convention, O·√max(1, r/c), fixes the largest
    singular value of a step instead: its rate 0.01 for square matrices of side n is 0.05/√n here (0.0072 for n = 48).
    A complex matrix counts as the real one of twice the side, so its real numbers move as far as all others.

    Each parameter group says which axes are the matrix: `columns` is the number of trailing axes that make its columns,
    the axis before them its rows, all before that a batch; 0 (the default) hands the group to AdamW. With `pairs` one
    more axis at the end holds real and imaginary parts. Matrices of a group that are equal in shape, or transposed, are
    stacked and orthogonalised by one sequence of batched products. See `make_optimizer`, which sets all of this.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | Tensor,
        weight_decay: float,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        capturable: bool = False,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"capturable": capturable, "fused": fused, "columns": 0, "pairs": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; `closure`, if given, computes loss and gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                update = self._muon if group["columns"] else self._adamw
                update(group, parameters, [p.grad for p in parameters])
        return loss

    def _muon(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        fused = [_has_kernel(group, p, g) for p, g in zip(parameters, gradients, strict=True)]
        pairs = itertools.compress(zip(parameters, gradients, strict=True), fused)
        kernels.side_by_side([partial(self._muon_kernel, group, p, g) for p, g in pairs])
        plain = [not one for one in fused]
        parameters, gradients = list(itertools.compress(parameters, plain)), list(itertools.compress(gradients, plain))
        if not parameters:
            return
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        steps = _orthogonalized(updates, group["columns"], group["pairs"], group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(parameters, steps)

    def _muon_kernel(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> None:
        """The same for a batch of small matrices by one kernel."""
        from transform_once.kernels.muon import muon_step

        rate = group["lr"] if isinstance(group["lr"], Tensor) else torch.full((), group["lr"], device=p.device)
        columns, pairs = group["columns"], group["pairs"]
        tensors = (p, gradient, self.state[p]["momentum"])
        weights, gradients, momenta = (_matrices(tensor, columns, pairs) for tensor in tensors)
        size = STEP_SIZE * math.sqrt(max(weights.shape[1:3]) * (1 + pairs))
        scales = (rate, group["momentum"], group["weight_decay"], size)
        muon_step(weights, gradients, momenta, *scales, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, pairs)

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        on_device = group["capturable"] or group["fused"]
        for p in parameters:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        adamw(
            parameters,
            gradients,
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            capturable=group["capturable"],
            fused=group["fused"],
            has_complex=any(p.is_complex() for p in parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _matrices(tensor: Tensor, columns: int, pairs: bool) -> Tensor:
    """Of a parameter or what belongs to it: (batch, rows, columns), with pairs of numbers on a last axis."""
    shape, parts = (tensor.shape[:-1], (2,)) if pairs else (tensor.shape, ())
    return tensor.reshape(-1, shape[-columns - 1], math.prod(shape[-columns:]), *parts)


def _has_kernel(group: dict[str, Any], p: Tensor, gradient: Tensor) -> bool:
    """Whether one kernel can take the whole step: small matrices in float32."""
    if p.dtype != torch.float32 or not kernels.can_run(p, gradient):
        return False
    from transform_once.kernels import muon

    rows, columns = _matrices(p, group["columns"], group["pairs"]).shape[1:3]
    sides = 1 + group["pairs"]
    return muon.fits(rows * sides, columns * sides) and p.is_contiguous() and gradient.is_contiguous()


def _orthogonalized(
    updates: Sequence[Tensor], columns: int, pairs: bool, learning_rate: float | Tensor
) -> list[Tensor]:
    """The steps to subtract, one for each update and of its shape; matrices of equal shape go through together."""
    matrices = [_matrices(update, columns, pairs) for update in updates]
    is_tall = [matrix.shape[1] > matrix.shape[2] for matrix in matrices]
    stacks: dict[tuple[Any, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        stacks.setdefault((*sorted(matrix.shape[1:3]), matrix.dtype, matrix.device), []).append(index)
    steps = list(updates)
    for (_, longer, *_), members in stacks.items():
        X = torch.cat([matrices[i].transpose(1, 2) if is_tall[i] else matrices[i] for i in members])
        X = torch.view_as_real(orthogonalize(torch.view_as_complex(X))) if pairs else orthogonalize(X)
        X = X * (learning_rate * (STEP_SIZE * math.sqrt(longer * (1 + pairs))))
        for i, part in zip(members, X.split([len(matrices[i]) for i in members]), strict=True):
            steps[i] = (part.transpose(1, 2) if is_tall[i] else part).reshape(updates[i].shape)
    return steps


def rate(
    schedule: str,
    learning_rate: float,
    *,
    fraction: float,
    epoch: float,
    step: int,
    warmup: float,
    step_size: int,
    gamma: float,
    period: int,
) -> float:
    """The learning rate at a point of a run, a pure function of progress, so that nothing needs to be saved.

    Args:
        schedule: "constant"; "step": × gamma every `step_size` epochs (the paper: 0.5 every 100); "cosine": half a
            cosine from `learning_rate` after the warm-up to 0 at the end; "restarts": half a cosine to 0 over every
            `period` steps, then again from the top.
        learning_rate: The highest rate.
        fraction: How much of the run is done, 0 to 1. For step k of n use (k + ½)/n: no step then has the rate 0.
        epoch: Epochs done; only "step" looks at it.
        step: Optimiser steps done; only "restarts" looks at it.
        warmup: Fraction of the run over which the rate grows linearly from 0, on top of any schedule; 0 for none.
            Good values: 0.02 to 0.1.
        step_size: Epochs between the drops of "step".
        gamma: Factor of each drop of "step".
        period: Steps between the restarts of "restarts".
    """
    check_choice(schedule, SCHEDULES, "schedule")
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup is a fraction of the run, from 0 to less than 1; got {warmup}")
    if min(step_size, period) < 1:
        raise ValueError(f"step_size (epochs) and period (steps) must be at least 1; got {step_size} and {period}")
    factor = 1.0
    if schedule == "step":
        factor = gamma ** math.floor(epoch / step_size)
    elif schedule == "cosine":
        progress = (fraction - warmup) / (1 - warmup)
        factor = (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2
    elif schedule == "restarts":
        factor = (1 + math.cos(math.pi * (step % period) / period)) / 2
    return learning_rate * factor * (min(1.0, fraction / warmup) if warmup else 1.0)


class Average:
    """The exponential moving average of a model's parameters and buffers: a ← a + weight·(p − a) per update.

    The weight is 1 − decay; where `at` is told the number n of each step it is 9/(10 + n) while that is larger, so that
    early weights are soon forgotten and any decay serves runs of any length. Buffers of whole numbers (counters) are
    copied. `tensors` has the names of the model's state_dict, and is what to save and to load
    (`tensors[name].copy_(saved)`).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be from 0 to less than 1; got {decay}: try 0.999")
        self.decay = decay
        self.weight = torch.tensor(1 - decay, device=next(model.parameters()).device)
        self.tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def at(self, step: int) -> None:
        """Say which step, from 0, the next update belongs to; outside a CUDA graph, which then finds the weight."""
        self.weight.fill_(max(1 - self.decay, 9 / (10 + step)))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the model's present weights into the average; fit for a CUDA graph."""
        pairs = list(zip(self.tensors.values(), self._of(model), strict=True))
        averaged = [pair for pair in pairs if pair[0].is_floating_point() or pair[0].is_complex()]
        if averaged:
            old, new = map(list, zip(*averaged, strict=True))
            change = torch._foreach_sub(new, old)
            torch._foreach_mul_(change, self.weight)
            torch._foreach_add_(old, change)
        for own, tensor in pairs:
            if not (own.is_floating_point() or own.is_complex()):
                own.copy_(tensor)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the `with`, and its own, bit by bit, after it."""
        tensors = self._of(model)
        own = [tensor.clone() for tensor in tensors]
        with torch.no_grad():
            torch._foreach_copy_(tensors, list(self.tensors.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(tensors, own)

    def _of(self, model: nn.Module) -> list[Tensor]:
        """The tensors of the model in the order of our own."""
        state = model.state_dict()
        if state.keys() != self.tensors.keys():
            name = sorted(state.keys() ^ self.tensors.keys())[0]
            raise ValueError(f"the average is of another model, which differs in {name}: make a new Average")
        return [state[name] for name in self.tensors]
