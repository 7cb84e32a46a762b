"""Transport on the periodic unit box: advection with diffusion in one to three dimensions, and Burgers' equation.

    ∂u/∂t + c·∇u = κ Δu          exact: every wave is turned and damped
    ∂u/∂t + u ∂u/∂x = ν ∂²u/∂x²   pseudo-spectral: 2/3 rule, fourth-order Runge-Kutta with the diffusion solved exactly

Fields are (batch, 1, *grid), nodal: entry i along an axis is the value at i/N. Computed in float64, given as float32.

Sample i of every `generate_…` depends on (seed, i) alone, whatever is drawn with it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transform_once.data.symmetries import Symmetry
from transform_once.solvers.vorticity import cutoff

# u(x+s) solves Burgers' equation whenever u(x) does, and so does −u(−x).
BURGERS_SYMMETRIES = (Symmetry(direction=(1,)), Symmetry(signs=(-1,), factors=(-1.0,)))
# The linear equations: translations along every axis, and −u.
ADVECTION_SYMMETRIES = (Symmetry(direction=(1,)), Symmetry(signs=(1,), factors=(-1.0,)))
DIFFUSION_ADVECTION_SYMMETRIES = (
    Symmetry(direction=(1, 0, 0)),
    Symmetry(direction=(0, 1, 0)),
    Symmetry(direction=(0, 0, 1)),
    Symmetry(signs=(1, 1, 1), factors=(-1.0,)),
)

PILOTS = 8  # samples on which the number of time steps is chosen
FINE_GRID = 8192  # points at which Burgers' equation is solved, at least: Li et al.'s number
MAX_STEPS = 2**17
CHUNK_BYTES = {"cpu": 2**20}  # of one field; more falls out of the cache
DEFAULT_CHUNK_BYTES = 2**28


def gaussian_fields(
    samples: int | Sequence[int],
    resolution: int,
    ndim: int,
    seed: int = 0,
    *,
    tau: float,
    alpha: float,
    scale: float | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Gaussian random fields u = Σ û_k e^(2πik·x) with E|û_k|² = scale² (4π²|k|²+τ²)^(−α): (samples, 1, *grid).

    That is the covariance scale² (−Δ+τ²)^(−α) on the periodic box, without the constant and the Nyquist waves, in
    float64. The default scale makes the variance one, but for those waves. A finer grid adds waves to the same field.

    Args:
        samples: how many, or which (`range(100, 200)`).
        resolution: grid points along each of the `ndim` axes.
        tau: the inverse of a length; fields look alike within about 1/τ.
        alpha: above ndim/2; the larger, the smoother.
        scale: see above; 25 with tau=5 and alpha=2 for Li et al.'s Burgers data.
    """
    indices = _indices(samples, resolution, seed)
    if alpha <= ndim / 2 or tau <= 0:
        raise ValueError(f"expected a positive tau and alpha above {ndim / 2}; got {tau} and {alpha}")
    if scale is None:
        gammas = math.gamma(alpha) / math.gamma(alpha - ndim / 2)
        scale = math.sqrt((4 * math.pi) ** (ndim / 2) * gammas) * tau ** (alpha - ndim / 2)
    k = _half_space(resolution, ndim)
    square = 4 * math.pi**2 * sum(axis.astype(float) ** 2 for axis in k)
    deviation = math.sqrt(2) * scale * (square + tau**2) ** (-alpha / 2)
    spectrum = np.zeros((len(indices), *(resolution,) * ndim), dtype=np.complex128)
    for row, index in enumerate(indices):
        normal = np.random.default_rng((seed, index)).standard_normal((k[0].size, 2))
        # One half of the wave numbers carries the field as the real part of its transform.
        spectrum[row][k] = deviation * (normal[:, 0] + 1j * normal[:, 1])
    axes = tuple(range(1, ndim + 1))
    return torch.fft.ifftn(torch.from_numpy(spectrum).to(device), dim=axes, norm="forward").real.unsqueeze(1)


@lru_cache(maxsize=8)
def _half_space(resolution: int, ndim: int) -> tuple[npt.NDArray[np.int64], ...]:
    """One of each pair ±k below the Nyquist frequency, ordered by size, so that a finer grid only appends."""
    largest = (resolution - 1) // 2
    axes = np.meshgrid(*(np.arange(-largest, largest + 1),) * ndim, indexing="ij")
    half = axes[0].size // 2
    k = [axis.ravel()[half + 1 :] for axis in axes]  # those after the constant: the negatives lie before it
    order = np.lexsort((*k, np.maximum.reduce([abs(axis) for axis in k])))
    return tuple(axis[order] for axis in k)


def sums_of_sines(
    samples: int | Sequence[int], resolution: int, seed: int = 0, *, device: torch.device | str = "cpu"
) -> Tensor:
    """A sin(2πmx+φ) + B sin(2πnx+χ), as in PDEBench's advection data: (samples, 1, N), float64.

    The amplitudes are uniform in [0, 1), the wave numbers among 1 … 8, the phases in [0, 2π). (PDEBench also takes
    the absolute value of some of these and cuts others off; we do not.)
    """
    indices = _indices(samples, resolution, seed)
    draws = [np.random.default_rng((seed, index)) for index in indices]
    amplitude, wave, phase = (
        torch.tensor(np.array(numbers), dtype=torch.float64, device=device).unsqueeze(-1)
        for numbers in zip(*((g.random(2), g.integers(1, 9, 2), 2 * math.pi * g.random(2)) for g in draws), strict=True)
    )
    x = torch.arange(resolution, dtype=torch.float64, device=device) / resolution
    return (amplitude * torch.sin(2 * math.pi * wave * x + phase)).sum(1, keepdim=True)


def transport(initial: Tensor, velocity: Sequence[float], diffusivity: float, time: float) -> Tensor:
    """The exact solution of ∂u/∂t + c·∇u = κΔu at that time, for fields (batch, channels, *grid) seen as waves.

    A Nyquist wave, which a grid shows at two phases only, keeps the part of it that the grid shows.

    Args:
        initial: u at time 0 at the nodes i/N, one to three grid axes.
        velocity: c, one number per grid axis, in boxes per unit of time.
        diffusivity: κ ≥ 0.
        time: t; negative only without diffusion.
    """
    ndim = len(velocity)
    if initial.ndim != ndim + 2 or not 1 <= ndim <= 3:
        raise ValueError(f"expected (batch, channels, *grid) with {ndim} grid axes, one to three; got {initial.shape}")
    if diffusivity * min(time, 0) < 0 or diffusivity < 0 or not math.isfinite(time):
        raise ValueError(f"diffusion needs κ ≥ 0 and time ≥ 0; got κ = {diffusivity} and time {time}")
    axes = tuple(range(2, initial.ndim))
    spectrum = torch.fft.rfftn(initial.double(), dim=axes)
    for axis, speed in zip(axes, velocity, strict=True):
        n = initial.shape[axis]
        frequencies = torch.fft.rfftfreq if axis == axes[-1] else torch.fft.fftfreq
        k = 2 * math.pi * frequencies(n, 1 / n, dtype=torch.float64, device=initial.device)
        factor = torch.polar(torch.exp(-diffusivity * time * k**2), -k * speed * time)
        if n % 2 == 0:
            factor[n // 2].imag.zero_()
        spectrum = spectrum * factor.view(-1, *(1,) * (axes[-1] - axis))
    return torch.fft.irfftn(spectrum, s=initial.shape[2:], dim=axes).to(initial.dtype)


def generate_advection(
    samples: int | Sequence[int],
    resolution: int = 1024,
    seed: int = 0,
    *,
    speed: float = 0.4,
    time: float = 1.0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Two random sines and where the wind carries them: (initial, later), each (samples, 1, N), float32."""
    initial = sums_of_sines(samples, resolution, seed, device=device)
    return initial.float(), transport(initial, (speed,), 0.0, time).float()


def generate_diffusion_advection(
    samples: int | Sequence[int],
    resolution: int = 32,
    seed: int = 0,
    *,
    velocity: tuple[float, float, float] = (0.3, 0.2, 0.1),
    diffusivity: float = 2e-3,
    time: float = 1.0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Random smooth fields in the periodic cube, and what becomes of them: two times (samples, 1, N, N, N), float32.

    Initial fields have the covariance of `gaussian_fields` with tau=15 and alpha=4, a standard deviation near one.
    """
    initial = gaussian_fields(samples, resolution, 3, seed, tau=15.0, alpha=4.0, device=device)
    return initial.float(), transport(initial, velocity, diffusivity, time).float()


def initial_burgers(
    samples: int | Sequence[int], grid: int, seed: int = 0, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Gaussian random fields with covariance 625 (−Δ+25)^(−2) and no mean, Li et al.'s: (samples, 1, N), float64."""
    return gaussian_fields(samples, grid, 1, seed, tau=5.0, alpha=2.0, scale=25.0, device=device)


def burgers_grid(resolution: int) -> int:
    """The smallest multiple of the resolution that is at least 8192."""
    if resolution < 4:
        raise ValueError(f"the resolution must be at least 4; got {resolution}")
    return resolution * -(-FINE_GRID // resolution)


def generate_burgers(
    samples: int | Sequence[int],
    resolution: int = 1024,
    seed: int = 0,
    *,
    viscosity: float = 0.1,
    time: float = 1.0,
    tolerance: float = 1e-6,
    steps: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, int]:
    """Random initial fields and what becomes of them: (initial, later, steps), each (samples, 1, N), float32.

    Drawn and solved at 8192 points or a few more, then strided, as Li et al. did. Without `steps` their number is
    chosen from the tolerance on the first samples of the seed, so that every part of a data set is computed alike.
    """
    grid = burgers_grid(resolution)
    if steps is None:
        steps = choose_steps(initial_burgers(PILOTS, grid, seed, device=device), viscosity, time, tolerance)
    initial = initial_burgers(samples, grid, seed, device=device)
    later = solve_burgers(initial, viscosity, time, steps=steps)
    stride = grid // resolution
    return initial[..., ::stride].float(), later[..., ::stride].float(), steps


@torch.no_grad()
def solve_burgers(
    initial: Tensor, viscosity: float, time: float, *, steps: int | None = None, tolerance: float = 1e-6
) -> Tensor:
    """Solution of Burgers' equation at that time, from fields (batch, 1, N) and in their precision.

    Args:
        initial: u at time 0, at the nodes; waves from N/3 on are dropped.
        viscosity: ν > 0; 0.1 in Li et al.'s data. The grid must resolve fronts of a width of ν over the jump of u.
        time: t > 0.
        steps: how many time steps, all alike; by default chosen from the tolerance on the first samples.
        tolerance: relative L2 error to stay under.
    """
    _check_burgers(initial, viscosity, time)
    if steps is None:
        steps = choose_steps(initial[:PILOTS], viscosity, time, tolerance)
    if steps < 1:
        raise ValueError(f"the number of time steps must be at least 1; got {steps}")
    size = max(1, CHUNK_BYTES.get(initial.device.type, DEFAULT_CHUNK_BYTES) // (8 * initial.shape[-1]))
    later = torch.empty_like(initial)
    for start in range(0, len(initial), size):
        part = slice(start, start + size)
        *_, last = _burgers_states(initial[part, 0].double(), viscosity, time, steps)
        later[part, 0] = torch.fft.irfft(last, n=initial.shape[-1]).to(initial.dtype)
    if not bool(later.isfinite().all()):
        raise FloatingPointError(f"Burgers' equation left the finite numbers in {steps} steps; take more steps")
    return later


@torch.no_grad()
def choose_steps(initial: Tensor, viscosity: float, time: float, tolerance: float = 1e-6) -> int:
    """The number of time steps, a power of two, that solves for these fields within the tolerance (relative L2).

    It is doubled until a doubling changes nothing beyond the tolerance, and the larger of the two is taken, whose error
    is about a sixteenth of that. A grid that is too coarse for the fronts is refused.
    """
    _check_burgers(initial, viscosity, time)
    if not 1e-12 <= tolerance < 1:
        raise ValueError(f"the tolerance must lie between 1e-12 and 1; got {tolerance}")
    before: Tensor | None = None
    steps = 8
    while steps <= MAX_STEPS:
        resolved = True
        for number, state in enumerate(_burgers_states(initial[:, 0].double(), viscosity, time, steps), 1):
            if number % (steps // 8) == 0:  # often enough to see the steepest fronts
                shortest = state[:, -max(1, state.shape[-1] // 10) :]
                resolved = resolved and _small(shortest, state, tolerance)
        if before is not None and _small(state - before, state, tolerance):
            if not resolved:
                raise ValueError(
                    f"{initial.shape[-1]} points do not resolve the fronts at a viscosity of {viscosity}; raise the "
                    "viscosity or the tolerance, or give a finer grid"
                )
            return steps
        before, steps = state, 2 * steps
    raise ValueError(
        f"Burgers' equation needs more than {MAX_STEPS} time steps; check the scale of the fields, shorten the time, "
        "or raise the viscosity"
    )


def _burgers_states(initial: Tensor, viscosity: float, time: float, steps: int) -> Iterator[Tensor]:
    """The kept waves (batch, N/3) after every step: classical Runge-Kutta for e^(νk²t)·û.

    Time goes by t ∝ (step/steps)², because rough initial fields change fast at first.
    """
    n = initial.shape[-1]
    kept = cutoff(n) + 1
    k = 2 * math.pi * torch.arange(kept, dtype=torch.float64, device=initial.device)
    state = torch.fft.rfft(initial)[:, :kept]

    def rate(U: Tensor) -> Tensor:
        return weight * torch.fft.rfft(torch.fft.irfft(U, n=n).square())[:, :kept]

    for number in range(steps):
        step = time * (2 * number + 1) / steps**2
        half = torch.exp(-viscosity * k**2 * step / 2)
        weight = -0.5j * step * k
        decayed = half * state
        first = half * rate(state)
        second = rate(decayed + first / 2)
        third = rate(decayed + second / 2)
        fourth = rate(half * (decayed + third))
        state = half * (decayed + (first + 2 * (second + third)) / 6) + fourth / 6
        yield state


def _small(part: Tensor, whole: Tensor, tolerance: float) -> bool:
    """Whether some waves are within the tolerance of all, in the L2 norm of every sample; never where one is NaN."""
    of_part, of_whole = (torch.linalg.vector_norm(waves, dim=-1) for waves in (part, whole))
    return bool((of_part <= tolerance * of_whole).all())


def _check_burgers(initial: Tensor, viscosity: float, time: float) -> None:
    if initial.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the fields must be float32 or float64; got {initial.dtype}: convert them with .float()")
    if initial.ndim != 3 or initial.shape[1] != 1 or initial.shape[2] < 8 or not len(initial):
        raise ValueError(f"expected fields (batch, 1, N) of at least 8 points; got {tuple(initial.shape)}")
    if not bool(initial.isfinite().all()):
        raise ValueError("the initial fields must be finite; got NaN or infinity")
    if not (0 < viscosity < math.inf and 0 < time < math.inf):
        raise ValueError(f"viscosity and time must be positive; got {viscosity} and {time}")


def _indices(samples: int | Sequence[int], resolution: int, seed: int) -> Sequence[int]:
    """The numbers of the samples, after refusing what cannot be drawn."""
    indices = range(samples) if isinstance(samples, int) else samples
    if not indices or resolution < 4 or seed < 0 or any(i < 0 for i in indices):
        raise ValueError(
            "expected at least one sample, a resolution of at least 4, and no negative seed or sample; "
            f"got samples {samples}, resolution {resolution} and seed {seed}"
        )
    return indices
