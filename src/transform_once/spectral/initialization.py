"""Variance-preserving (vp) initialisation of layers that keep few modes, as formulas and as one function for any model.

A layer x̂ = T⁻¹ S_mᵀ A S_m T x drops most modes, so weights drawn for fields (variance 1/c) let its output collapse.
With white input, N = ∏Nᵢ points, c input channels and s² the variance of one real weight component, the output
variance equals the input variance for

| layer                                                                  | s²                     |
|------------------------------------------------------------------------|------------------------|
| dense: every one of M kept modes from every other                      | N / (c M²)             |
| diagonal: a channel matrix per mode, M modes of a real transform       | N / (c M)              |
| rfft: a complex channel matrix per mode, R rows × C columns kept       | N / (c R (4C − 3))     |

In the last, interior columns stand for a conjugate pair of two real numbers each, and of the column k = 0 the real
inverse keeps only the Hermitian part (of a Nyquist column too, then 4C − 6). For the layout of the FNO, R = 2m₁ in two
dimensions, 4m₁m₂ in three and 1 in one. White input is essential: a smooth field, whose energy is in the kept modes, is
amplified.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def dense_variance(resolution: Sequence[int], kept: int, channels: int = 1) -> float:
    """Weight variance N/(cM²) for a layer that maps `kept` modes densely to `kept` modes."""
    return math.prod(resolution) / (channels * kept**2)


def diagonal_variance(resolution: Sequence[int], kept: int, channels: int = 1) -> float:
    """Weight variance N/(cM) for a channel matrix on each of `kept` modes of a real orthonormal transform."""
    return math.prod(resolution) / (channels * kept)


def rfft_variance(resolution: Sequence[int], block: Sequence[int], channels: int = 1) -> float:
    """Variance of the real and of the imaginary part of the weights on a kept `block` (rows…, columns) of an rfft.

    For the FNO with m modes the block is (2m, m) in two dimensions, (m,) in one and (2m, 2m, m) in three.
    """
    rows, columns = math.prod(block[:-1]), block[-1]
    has_nyquist = resolution[-1] > 1 and 2 * (columns - 1) == resolution[-1]
    return math.prod(resolution) / (channels * rows * (4 * columns - 3 - 3 * has_nyquist))


def vp_init_(module: nn.Module, resolution: Sequence[int], generator: torch.Generator | None = None) -> nn.Module:
    """Draw the spectral weights of `module` variance-preserving for fields on a grid of `resolution` points, in place.

    Takes this library's layers and models (each knows where the scheme belongs: the first layer of T1, every layer of
    FNO) and any module that holds spectral convolutions of `neuraloperator`. Returns `module`.
    """
    if not _apply(module, tuple(resolution), generator):
        raise TypeError(
            f"found no spectral layer in {type(module).__name__}: expected a model or layer of this library, "
            "or one holding neuraloperator's SpectralConv"
        )
    return module


def _apply(module: nn.Module, resolution: tuple[int, ...], generator: torch.Generator | None) -> bool:
    own: Callable[[tuple[int, ...], torch.Generator | None], None] | None = getattr(module, "vp_init_", None)
    if own is not None:
        own(resolution, generator)
        return True
    if type(module).__name__ == "SpectralConv" and type(module).__module__.startswith("neuralop."):
        _init_neuraloperator(module, resolution, generator)
        return True
    return sum(_apply(child, resolution, generator) for child in module.children()) > 0  # a sum visits every child


@torch.no_grad()
def _init_neuraloperator(layer: nn.Module, resolution: tuple[int, ...], generator: torch.Generator | None) -> None:
    """neuraloperator keeps one dense complex weight (in, out, *block) a layer; its block is centred, not split."""
    weight = getattr(layer.weight, "tensor", None)
    if not isinstance(weight, Tensor) or not weight.is_complex() or weight.ndim != 2 + len(resolution):
        raise TypeError(
            "expected a SpectralConv with dense complex weights (in, out, *modes) for as many axes as the resolution "
            f"{resolution} has; this one is factorised, separable or of another dimension"
        )
    if any(m > n for m, n in zip(weight.shape[2:], (*resolution[:-1], resolution[-1] // 2 + 1), strict=True)):
        raise ValueError(f"expected a resolution that holds the modes {tuple(weight.shape[2:])}; got {resolution}")
    variance = rfft_variance(resolution, weight.shape[2:], weight.shape[0])
    torch.view_as_real(weight).normal_(0, math.sqrt(variance), generator=generator)
