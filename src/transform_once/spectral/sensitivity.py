"""How much the kept outputs of a map depend on the dropped inputs: what truncating the input costs.

Let ψ be the map between spectra, Y = ψ(X), of a map φ between fields. A model γ that sees only the kept modes of X
cannot follow ψ where kept outputs depend on dropped inputs. For an output mode k the gap between the gradients is

    Σ_j |∂ψ_k/∂X_j − ∂γ_k/∂X_j| = Σ_{j kept} |∂ψ_k/∂X_j − ∂γ_k/∂X_j| + Σ_{j dropped} |∂ψ_k/∂X_j|

whose second sum no training changes. Rows of the Jacobian come exactly from vector-Jacobian products; the squared total
over all kept outputs is estimated from random sign vectors v: E ‖Jᵀv‖² = ‖J‖²_F.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from transform_once.spectral.modes import grid_of, kept_mask
from transform_once.spectral.transforms import Modes, Transform, get_transform

FieldMap = Callable[[Tensor], Tensor]


class GradientMismatch(NamedTuple):
    """Sums over the inputs of one sample: `dropped` of |∂ψ_k/∂X_j|, `kept` of |∂ψ_k/∂X_j − ∂γ_k/∂X_j|.

    Both are (outputs, batch). Without a model `kept` is the sum of |∂ψ_k/∂X_j|, for comparison.
    """

    dropped: Tensor
    kept: Tensor


class SquaredMismatch(NamedTuple):
    """Squared Frobenius norms per sample (batch,) over all kept outputs, with the standard error of each estimate."""

    dropped: Tensor
    kept: Tensor
    dropped_error: Tensor
    kept_error: Tensor


def gradient_mismatch(
    field_map: FieldMap,
    x: Tensor,
    modes: Modes,
    outputs: Iterable[Sequence[int]],
    *,
    model: FieldMap | None = None,
    transform: str = "dct",
    channel: int = 0,
) -> GradientMismatch:
    """Exact gradient mismatch at the fields `x` (batch, channels, *grid) for the chosen output modes.

    `field_map` (a solver, a trained model: anything differentiable) and `model` take fields to fields on the same grid.
    `outputs` lists multi-indices k of output modes, `channel` says of which output channel. One backward pass for each.
    """
    gap = _Gap(field_map, x, modes, model, transform)
    sums = []
    for k in outputs:
        cotangent = torch.zeros(gap.shape, dtype=x.dtype, device=x.device)
        for sample in cotangent[:, channel]:
            sample[tuple(k)] = 1
        sums.append(torch.stack([part.flatten(1).abs().sum(1) for part in gap(cotangent)]))
    return GradientMismatch(*torch.stack(sums, 1))


def squared_mismatch(
    field_map: FieldMap,
    x: Tensor,
    modes: Modes,
    *,
    model: FieldMap | None = None,
    transform: str = "dct",
    probes: int = 16,
    seed: int = 0,
) -> SquaredMismatch:
    """Squared mismatch over all kept outputs and channels, estimated from random `probes` (one backward pass for each).

    `dropped` estimates Σ_{k kept, j dropped} |∂ψ_k/∂X_j|²; `kept` the same over kept j of ∂ψ_k/∂X_j − ∂γ_k/∂X_j.
    """
    if probes < 2:
        raise ValueError(f"probes must be at least 2, so that the estimate has an error bar; got {probes}")
    gap = _Gap(field_map, x, modes, model, transform)
    generator = torch.Generator().manual_seed(seed)
    squares = []
    for _ in range(probes):
        signs = torch.randint(0, 2, gap.shape, generator=generator).to(x) * 2 - 1
        squares.append(torch.stack([part.flatten(1).square().sum(1) for part in gap(signs * gap.mask)]))
    samples = torch.stack(squares)
    return SquaredMismatch(*samples.mean(0), *(samples.std(0) / probes**0.5))


class _Gap:
    """The two parts of a row of the gradient gap for an output cotangent (batch, channels, *spectrum)."""

    def __init__(self, field_map: FieldMap, x: Tensor, modes: Modes, model: FieldMap | None, transform: str):
        T, size = get_transform(transform), grid_of(x)
        if T.is_complex:
            raise ValueError(f'expected a real transform, "dct" or "fourier"; got {transform!r}')
        self.mask = kept_mask(modes, x, transform).to(x)
        self.pullback = _Pullback(field_map, x, T)
        self.model_pullback = None if model is None else _Pullback(model, x, T)
        self.shape = self.pullback.output.shape[:2] + T.block(None, size)

    def __call__(self, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        row = self.pullback(cotangent)
        difference = row if self.model_pullback is None else row - self.model_pullback(cotangent)
        return row * (1 - self.mask), difference * self.mask


class _Pullback:
    """Rows of the Jacobian of the map between spectra: vᵀ ∂ψ/∂X, as a full spectrum."""

    def __init__(self, field_map: FieldMap, x: Tensor, T: Transform):
        self.transform, self.size = T, grid_of(x)
        self.input = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            self.output = field_map(self.input)
        if self.output.shape[0] != x.shape[0] or grid_of(self.output) != self.size:
            raise ValueError(
                f"expected a map to fields of the same batch and grid as its input {tuple(x.shape)}; "
                f"it returned {tuple(self.output.shape)}"
            )

    def __call__(self, cotangent: Tensor) -> Tensor:
        # The basis is orthonormal: the transpose of a transform is its inverse.
        field = self.transform.inverse(cotangent, len(self.size), self.size)
        (gradient,) = torch.autograd.grad(self.output, self.input, field, retain_graph=True)
        return self.transform.forward(gradient, len(self.size))
