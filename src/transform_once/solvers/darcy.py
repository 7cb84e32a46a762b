"""Steady Darcy flow through a random two-phase medium on the unit square, as published by Li et al. (2020).

    −∇·(a ∇u) = f,   u = 0 on the boundary,   f = 1,   a = 12 where μ ≥ 0 and 3 elsewhere

Fields are (batch, 1, N, N) on cells: entry (i, j) is the value at x = (i+½)/N, y = (j+½)/N, so that mirrors of the
square are mirrors of the grid, and every third, fifth, … cell of a finer grid is a cell of the coarser one. (The
published grid has 421² nodes, those of the boundary included.) Nothing is periodic.

Finite volumes of second order: the permeability of a face is the geometric mean of its two cells, which is 2 to 3 times
as accurate for this medium as the arithmetic mean (published) or the harmonic one. Conjugate gradients solve for the
pressure; their preconditioner inverts the Laplacian by sine transforms, so that the number of steps (about 20) depends
on the contrast of the medium, not on the grid.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transform_once.data.symmetries import Symmetry
from transform_once.spectral.transforms import dct, idct

# The group of the square, eight maps: both mirrors and the transposition, with all their products.
DARCY_SYMMETRIES = (
    Symmetry(signs=(-1, 1), offset=(1.0, 0.0)),
    Symmetry(signs=(1, -1), offset=(0.0, 1.0)),
    Symmetry(axes=(1, 0)),
)

HIGH, LOW = 12.0, 3.0  # permeability where μ ≥ 0 and where μ < 0
FINE = 300  # cells along an axis of the grid on which pairs are solved, at least
MAX_STEPS = 1000
CHUNK_BYTES = {"cpu": 2**21}  # of one field; more falls out of the cache
DEFAULT_CHUNK_BYTES = 2**28


def gaussian_field(
    samples: int | Sequence[int], resolution: int, seed: int = 0, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Gaussian random fields μ with covariance (−Δ+9)^(−2), zero Neumann conditions and no mean: (samples, 1, N, N).

    μ = Σ_k ξ_k φ_k / (π²|k|²+9) with independent standard normal ξ_k and the orthonormal cosines φ_k of the square, k
    below N along each axis, in float64. The constant is left out, as by the generator of the published data: with it,
    as the covariance is usually quoted, many samples would be mostly of one phase. Sample i depends on (seed, i) alone,
    whatever is drawn with it; a finer grid only adds waves to the same field.

    Args:
        samples: how many, or which (`range(100, 200)`).
    """
    indices = range(samples) if isinstance(samples, int) else samples
    if not indices or resolution < 2 or seed < 0 or any(i < 0 for i in indices):
        raise ValueError(
            "expected at least one sample, a resolution of at least 2, and no negative seed or sample; "
            f"got samples {samples}, resolution {resolution} and seed {seed}"
        )
    kx, ky = _waves(resolution)
    deviation = resolution / (math.pi**2 * (kx**2 + ky**2) + 9)
    spectrum = np.zeros((len(indices), resolution, resolution))
    for row, index in enumerate(indices):
        spectrum[row, kx, ky] = deviation * np.random.default_rng((seed, index)).standard_normal(kx.size)
    return idct(torch.from_numpy(spectrum).to(device), 2).unsqueeze(1)


@lru_cache(maxsize=8)
def _waves(resolution: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All wave numbers but the constant, ordered by size, so that a finer grid only appends."""
    k = np.arange(resolution)
    kx, ky = (axis.ravel() for axis in np.meshgrid(k, k, indexing="ij"))
    order = np.lexsort((ky, kx, np.maximum(kx, ky)))[1:]
    return kx[order], ky[order]


def permeability(field: Tensor) -> Tensor:
    """The two-phase medium of a random field: 12 where it is not negative, 3 elsewhere."""
    return torch.where(field >= 0, HIGH, LOW).to(field.dtype)


def generate(
    samples: int | Sequence[int],
    resolution: int = 64,
    seed: int = 0,
    *,
    refinement: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Random media and the pressure in them: (a, u), each (samples, 1, N, N).

    Medium and pressure are made on a grid `refinement` times as fine and strided to the middle of every so many cells.
    Sample i depends on (seed, i) alone. The published set has 1024 pairs for training, usually at 85² or 64².

    Args:
        samples: how many, or which (`range(100, 200)`).
        refinement: an odd number; by default the smallest that makes at least 300 cells along an axis. For 64² that is
            5, with an error (relative L2, against 960²) of 0.0007 on average and at most 0.0009 in 8 samples; with the
            arithmetic mean of the published scheme it is 0.0021 there, and 0.0016 on 448².
    """
    default = choose_refinement(resolution)
    factor = default if refinement is None else refinement
    if factor < 1 or factor % 2 == 0:
        raise ValueError(f"the refinement must be odd, so that cells have a middle one; got {refinement}")
    indices = range(samples) if isinstance(samples, int) else samples
    kept = slice(factor // 2, None, factor)
    media, pressures = [], []
    for part in _parts(len(indices), resolution * factor, torch.device(device)):
        fine = permeability(gaussian_field(indices[part], resolution * factor, seed, device=device))
        media.append(fine[..., kept, kept].to(dtype))
        pressures.append(solve(fine)[..., kept, kept].to(dtype))
    if not media:
        raise ValueError(f"expected at least one sample; got {samples}")
    return torch.cat(media), torch.cat(pressures)


def choose_refinement(resolution: int) -> int:
    """The smallest odd number of cells a cell for which the grid has at least 300 along an axis."""
    if resolution < 2:
        raise ValueError(f"the resolution must be at least 2; got {resolution}")
    factor = -(-FINE // resolution)
    return factor + 1 - factor % 2


@torch.no_grad()
def solve(medium: Tensor, source: float | Tensor = 1.0, *, tolerance: float = 1e-8) -> Tensor:
    """The pressure u (batch, 1, N, N) in a medium a > 0 of that shape, on the same cells, in the precision of a.

    Computed in float64 until the residual ‖f + ∇·(a∇u)‖ is below `tolerance` · ‖f‖ in every sample, each on its own.

    Args:
        medium: the permeability a.
        source: f, a number or fields (batch, 1, N, N).
        tolerance: for the residual, which is computed once more at the end; 1e-8 is far below the grid's own error.
    """
    if medium.ndim != 4 or medium.shape[1] != 1 or medium.shape[2] != medium.shape[3] or medium.shape[3] < 2:
        raise ValueError(f"the medium must be (batch, 1, N, N) on a square grid; got {tuple(medium.shape)}")
    if not bool(((medium > 0) & medium.isfinite()).all()):
        raise ValueError("the permeability must be positive and finite everywhere; got other values")
    if not 1e-10 <= tolerance < 1:
        raise ValueError(f"the tolerance must lie between 1e-10 (rounding) and 1; got {tolerance}")
    sources = torch.as_tensor(source, dtype=torch.float64, device=medium.device).expand(medium.shape)[:, 0]
    pressure = torch.empty_like(medium)
    for part in _parts(len(medium), medium.shape[-1], medium.device):
        pressure[part, 0] = _Square(medium[part, 0].double()).solve(sources[part], tolerance).to(medium.dtype)
    return pressure


def _parts(count: int, grid: int, device: torch.device) -> list[slice]:
    """Consecutive samples, as many at a time as suit the memory of the device."""
    size = max(1, CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES) // (8 * grid**2))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _Square:
    """The operator u ↦ −∇·(a∇u) on the cells of the unit square, u = 0 on the boundary, for media a (batch, N, N)."""

    def __init__(self, medium: Tensor) -> None:
        n = medium.shape[-1]
        # What flows through a face is its permeability times the difference of its cells, here with the factor 1/h².
        self.rows = (medium[:, 1:] * medium[:, :-1]).sqrt() * n**2
        self.columns = (medium[:, :, 1:] * medium[:, :, :-1]).sqrt() * n**2
        self.diagonal = torch.zeros_like(medium)
        for axis, faces in ((1, self.rows), (2, self.columns)):
            self.diagonal.narrow(axis, 0, n - 1).add_(faces)
            self.diagonal.narrow(axis, 1, n - 1).add_(faces)
            for edge in (0, n - 1):  # the boundary is half a cell away
                self.diagonal.select(axis, edge).add_(medium.select(axis, edge), alpha=2 * n**2)
        # The sines of the Laplacian, sin πk(i+½)/N, are the cosines of wave number N−k with alternating signs.
        index = torch.arange(n, device=medium.device)
        sign = (1 - 2 * (index % 2)).float()
        eigenvalue = (2 * n * torch.cos(math.pi * index.double() / (2 * n))) ** 2
        self.signs = sign[:, None] * sign
        self.inverse = (1 / (eigenvalue[:, None] + eigenvalue)).float()

    def apply(self, u: Tensor) -> Tensor:
        """−∇·(a∇u), symmetric and positive."""
        result = self.diagonal * u
        result[:, 1:].addcmul_(self.rows, u[:, :-1], value=-1)
        result[:, :-1].addcmul_(self.rows, u[:, 1:], value=-1)
        result[:, :, 1:].addcmul_(self.columns, u[:, :, :-1], value=-1)
        result[:, :, :-1].addcmul_(self.columns, u[:, :, 1:], value=-1)
        return result

    def precondition(self, residual: Tensor) -> Tensor:
        """The inverse Laplacian, in float32: it steers the search, the residuals stay in float64."""
        spectrum = dct(residual.float() * self.signs, 2)
        return (idct(spectrum * self.inverse, 2) * self.signs).double()

    def solve(self, source: Tensor, tolerance: float) -> Tensor:
        """Conjugate gradients; a sample that is done rests, so that it does not depend on the others of its batch."""
        goal = tolerance * _norm(source)
        pressure, residual = torch.zeros_like(source), source.clone()
        ahead = self.precondition(residual)
        direction, energy = ahead, _sum(residual * ahead)
        done = _norm(residual) <= goal
        for _ in range(MAX_STEPS):
            if bool(done.all()):
                break
            force = self.apply(direction)
            step = torch.where(done, 0.0, energy / _sum(direction * force))
            pressure.addcmul_(step, direction)
            residual.addcmul_(step, force, value=-1)
            ahead = self.precondition(residual)
            energy_before, energy = energy, _sum(residual * ahead)
            done |= _norm(residual) <= goal
            direction = torch.addcmul(ahead, torch.where(done, 0.0, energy / energy_before), direction)
        left = _norm(source - self.apply(pressure)) > 2 * goal
        if bool(left.any()):
            raise FloatingPointError(
                f"the pressure of {int(left.sum())} of {len(left)} samples did not reach the tolerance {tolerance} in "
                f"{MAX_STEPS} steps; raise the tolerance or lower the contrast of the medium"
            )
        return pressure


def _sum(values: Tensor) -> Tensor:
    return values.sum((1, 2), keepdim=True)


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=(1, 2), keepdim=True)
