"""Two-dimensional Navier-Stokes flow in vorticity form on the unit torus, pseudo-spectral.

    ∂w/∂t + u·∇w = ν Δw + f,   u = (∂ψ/∂y, −∂ψ/∂x),   −Δψ = w

Fields are (batch, 1, N, N), nodal: entry (i, j) is the value at x = i/N, y = j/N, so rows, the first grid axis, are x.
Everything is periodic. Products are dealiased by the 2/3 rule (waves |k| < N/3 are kept), time goes by fourth-order
Runge-Kutta with the diffusion solved exactly (integrating factor); step and internal grid follow from a tolerance.

`generate` draws initial fields and solves; `solve` starts from fields of yours. How a step is made is in `vorticity`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transform_once.data.symmetries import Symmetry
from transform_once.solvers.vorticity import Flow

Forcing = Tensor | Callable[[Tensor, Tensor], Tensor] | None

# For the forcing of `paper_forcing`: w(x+s, y−s) for every s, −w(y+¼, x+¼) and w(¼−x, −y) solve whenever w(x, y) does.
NAVIER_STOKES_SYMMETRIES = (
    Symmetry(direction=(1, -1)),
    Symmetry(axes=(1, 0), offset=(0.25, 0.25), factors=(-1.0,)),
    Symmetry(signs=(-1, -1), offset=(0.25, 0.0)),
)

PILOTS = 4  # trajectories on which settings are chosen
MAX_GRID = 2048
MAX_STEPS = 10**6
SPEED_MARGIN = 1.25  # other samples may be faster than the pilots
CHUNK_BYTES = {"cpu": 2**19}  # of one complex field; more falls out of the cache
DEFAULT_CHUNK_BYTES = 2**28


def paper_forcing(x: Tensor, y: Tensor) -> Tensor:
    """f = 0.1 (sin 2π(x+y) + cos 2π(x+y)), the forcing of Li et al.'s Navier-Stokes data and of the paper."""
    phase = 2 * math.pi * (x + y)
    return 0.1 * (phase.sin() + phase.cos())


@dataclass(frozen=True)
class Settings:
    """How a run is discretised, and the errors found when this was chosen from a tolerance.

    Attributes:
        grid: points per axis of the internal grid, a multiple of the resolution of the fields.
        time_step: the longest step; each stretch between requested times is cut into equal steps no longer than this.
        scheme: "rk4", or "crank-nicolson" for Li et al.'s: diffusion by Crank-Nicolson, advection by explicit Euler.
        tolerance: relative L2 error asked for; None for settings given by hand.
        time_error: largest change (relative L2) on the pilots when the step was halved.
        tail: largest share (relative L2) of the vorticity in the outermost tenth of the resolved wave numbers, pilots.
    """

    grid: int
    time_step: float
    scheme: Literal["rk4", "crank-nicolson"] = "rk4"
    tolerance: float | None = None
    time_error: float | None = None
    tail: float | None = None

    def __post_init__(self) -> None:
        if self.scheme not in ("rk4", "crank-nicolson"):
            raise ValueError(f"scheme must be 'rk4' or 'crank-nicolson', got {self.scheme!r}")
        if self.grid < 4 or not 0 < self.time_step < math.inf:
            raise ValueError(f"expected a grid of at least 4 points and a positive time step, got {self}")


# The discretisation behind Li et al.'s published data (strided to 64² there; `generate` strides too).
LI_ET_AL = Settings(grid=256, time_step=1e-4, scheme="crank-nicolson")


def initial_vorticity(
    samples: int | Sequence[int],
    resolution: int = 64,
    seed: int = 0,
    *,
    tau: float = 7.0,
    alpha: float = 2.5,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Gaussian random fields w = Σ ŵ_k e^(2πik·x) with E|ŵ_k|² = 2 τ^(2α−2) (4π²|k|²+τ²)^(−α): (samples, 1, N, N).

    This is what lies behind Li et al.'s data, standard deviation 0.26 (as a covariance it is usually quoted as
    7^(3/2) (−Δ+49)^(−2.5), which would be 0.04). The mean is zero, and so are the waves at the Nyquist frequency.
    Sample i depends on (seed, i) alone, whatever is drawn with it; a finer grid only adds waves to the same field.

    Args:
        samples: how many, or which (`range(100, 200)`).
    """
    indices = range(samples) if isinstance(samples, int) else samples
    if resolution < 4 or seed < 0 or any(i < 0 for i in indices):
        raise ValueError(
            "the resolution must be at least 4, the seed and the samples at least 0, "
            f"got resolution {resolution}, seed {seed} and samples {samples}"
        )
    kx, ky = _half_plane(resolution)
    deviation = 2 * tau ** (alpha - 1) * (4 * math.pi**2 * (kx**2 + ky**2) + tau**2) ** (-alpha / 2)
    fields = torch.empty(len(indices), 1, resolution, resolution, dtype=dtype)
    for row, index in enumerate(indices):
        normal = np.random.default_rng((seed, index)).standard_normal((kx.size, 2))
        spectrum = np.zeros((resolution, resolution), dtype=np.complex128)
        # One half of the wave numbers carries the field as the real part of its transform.
        spectrum[kx, ky] = resolution**2 * deviation * (normal[:, 0] + 1j * normal[:, 1])
        fields[row, 0] = torch.from_numpy(np.fft.ifft2(spectrum).real)
    return fields.to(device)


@lru_cache(maxsize=8)
def _half_plane(resolution: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One of each pair ±k below the Nyquist frequency, ordered by size, so that a finer grid only appends."""
    largest = (resolution - 1) // 2
    k = np.arange(-largest, largest + 1)
    kx, ky = (axis.ravel() for axis in np.meshgrid(k, k, indexing="ij"))
    upper = (ky > 0) | ((ky == 0) & (kx > 0))
    kx, ky = kx[upper], ky[upper]
    order = np.lexsort((ky, kx, np.maximum(abs(kx), abs(ky))))
    return kx[order], ky[order]


def generate(
    samples: int | Sequence[int],
    viscosity: float,
    times: float | Sequence[float],
    resolution: int = 64,
    seed: int = 0,
    *,
    forcing: Forcing = paper_forcing,
    tolerance: float = 1e-3,
    settings: Settings | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Settings]:
    """Random initial fields and what becomes of them: (initial, later, settings).

    `initial` is (samples, 1, N, N); `later` has the same shape for a single time and (samples, times, 1, N, N) for
    several. Without `settings` they are chosen on the first samples of the seed, so that every part of a data set is
    computed alike; pass the returned settings on to save the choice. Sample i then depends on (seed, i) alone: samples
    2j and 2j+1 share a complex field whatever the batch. With `scheme="crank-nicolson"` fields are drawn on the
    internal grid and strided, as Li et al. did: `settings=LI_ET_AL`.

    The paper's data: viscosity 1e-3, time 50 and viscosity 1e-4, time 15, both at 64².
    """
    indices = range(samples) if isinstance(samples, int) else samples
    if settings is None:
        pilots = initial_vorticity(PILOTS, resolution, seed, dtype=torch.float64, device=device)
        _check_tolerance(tolerance, dtype)
        settings = choose_settings(pilots, viscosity, times, forcing, tolerance)
    drawn = settings.grid if settings.scheme == "crank-nicolson" else resolution
    _check_grid(settings.grid, resolution)
    pairs = sorted({index // 2 for index in indices})
    both = [index for pair in pairs for index in (2 * pair, 2 * pair + 1)]
    initial = initial_vorticity(both, drawn, seed, dtype=dtype, device=device)
    later, _ = solve(initial, viscosity, times, forcing, settings=settings)
    position = {index: row for row, index in enumerate(both)}
    rows = torch.tensor([position[index] for index in indices], device=device)
    stride = drawn // resolution
    return initial[rows, ..., ::stride, ::stride], later[rows, ..., ::stride, ::stride], settings


def solve(
    initial: Tensor,
    viscosity: float,
    times: float | Sequence[float],
    forcing: Forcing = paper_forcing,
    *,
    tolerance: float = 1e-3,
    settings: Settings | None = None,
) -> tuple[Tensor, Settings]:
    """The flow that starts from `initial`, at one time or at several: (later, settings).

    Differentiable in `initial` and in a forcing given as a field; the memory for that grows with the number of steps.

    Args:
        initial: vorticity (batch, 1, N, N), float32 or float64.
        viscosity: ν > 0; 1e-3 to 1e-5 are usual.
        times: one time, which gives (batch, 1, N, N), or increasing ones, which give (batch, times, 1, N, N); all > 0.
        forcing: a function of the coordinates x and y, a field (N, N) or (batch, 1, N, N), or None.
        tolerance: relative L2 error to stay under; step and internal grid are chosen for it on the first samples.
        settings: the discretisation, instead of a tolerance.
    """
    instants = _check(initial, viscosity, times)
    if settings is None:
        _check_tolerance(tolerance, initial.dtype)
        pilot_forcing = forcing[:PILOTS] if isinstance(forcing, Tensor) and forcing.ndim == 4 else forcing
        settings = choose_settings(initial[:PILOTS], viscosity, times, pilot_forcing, tolerance)
    _check_grid(settings.grid, initial.shape[-1])
    forces = _forcing_fields(forcing, settings.grid, initial)
    bytes_a_pair = settings.grid**2 * 2 * initial.element_size()
    chunk = 2 * max(1, CHUNK_BYTES.get(initial.device.type, DEFAULT_CHUNK_BYTES) // bytes_a_pair)
    pieces = []
    for start in range(0, len(initial), chunk):
        part = slice(start, start + chunk)
        flow = Flow(settings.grid, viscosity, forces if len(forces) == 1 else forces[part])
        states = flow.march(flow.spectrum(initial[part, 0]), instants, settings.scheme, settings.time_step)
        frames = [flow.fields(state, initial.shape[-1]) for state in states]
        pieces.append(torch.stack(frames, 1)[: len(initial[part])])
    later = torch.cat(pieces).unsqueeze(2)
    lost = (~later.detach().isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if lost:
        raise FloatingPointError(
            f"the solution of sample {lost[0]} ({len(lost)} of {len(later)}) left the finite numbers with {settings}; "
            "use a shorter time step, or a tolerance instead of settings"
        )
    return (later[:, 0] if isinstance(times, int | float) else later), settings


@torch.no_grad()
def choose_settings(
    initial: Tensor,
    viscosity: float,
    times: float | Sequence[float],
    forcing: Forcing = paper_forcing,
    tolerance: float = 1e-3,
) -> Settings:
    """The coarsest grid and longest step that meet a tolerance (relative L2) on a few trajectories, in float64.

    The grid starts at that of the fields and doubles while the outermost tenth of the resolved wave numbers holds more
    than the tolerance. The step is as long as stability allows, shorter while halving it changes the result by more
    than a quarter of the tolerance. Arguments are those of `solve`.
    """
    instants = _check(initial, viscosity, times)
    _check_tolerance(tolerance, torch.float64)
    fields = initial.detach().double()

    def flow(grid: int) -> Flow:
        return Flow(grid, viscosity, _forcing_fields(forcing, grid, fields))

    def pilot(grid: int, step: float) -> _Pilot | None:
        return _fly(flow(grid), fields[:, 0], instants, Settings(grid, step))

    def stable_step(grid: int, speed: float) -> float:
        return flow(grid).stable_step(SPEED_MARGIN * speed, instants[-1])

    grid = fields.shape[-1]
    start = flow(grid)
    step = _shorter(stable_step(grid, start.speed(start.spectrum(fields[:, 0]))), 1.0, instants[-1])
    while True:
        while (run := pilot(grid, step)) is None or step > stable_step(grid, run.speed):
            step = _shorter(step, 0.5, instants[-1])
        if run.tail <= tolerance:
            break
        grid, step = 2 * grid, step / 2
        if grid > MAX_GRID:
            raise ValueError(
                f"a tolerance of {tolerance} needs a grid finer than {MAX_GRID}²; raise the tolerance or give settings"
            )
    step = min(2 * step, stable_step(grid, run.speed))
    while True:
        coarse, fine = pilot(grid, step), pilot(grid, step / 2)
        error = math.inf if coarse is None or fine is None else _distance(coarse.fields, fine.fields)
        if error <= tolerance / 4:
            return Settings(grid, step, "rk4", tolerance, error, run.tail)
        step = _shorter(step, min(0.9, max(0.1, 0.9 * (tolerance / 4 / error) ** 0.25)), instants[-1])


def _shorter(step: float, factor: float, final: float) -> float:
    if factor * step * MAX_STEPS < final:
        raise ValueError(
            f"the tolerance needs more than {MAX_STEPS} steps; check the scale of the vorticity, shorten the time, or "
            "raise the tolerance"
        )
    return factor * step


class _Pilot(NamedTuple):
    """What a trial run shows: fields (batch, times, N, N), the largest speed, the largest tail after the start."""

    fields: Tensor
    speed: float
    tail: float


def _fly(flow: Flow, initial: Tensor, instants: list[float], settings: Settings) -> _Pilot | None:
    """A trial run, looked at eight times on the way as well; None if it does not stay finite."""
    stops = sorted({*instants, *(instants[-1] * part / 8 for part in range(1, 9))})
    start = flow.spectrum(initial)
    speed, tail, frames = flow.speed(start), 0.0, []
    for stop, state in zip(stops, flow.march(start, stops, settings.scheme, settings.time_step), strict=True):
        if not bool(state.isfinite().all()):
            return None
        speed, tail = max(speed, flow.speed(state)), max(tail, flow.tail(state))
        if stop in instants:
            frames.append(flow.fields(state, initial.shape[-1])[: len(initial)])
    return _Pilot(torch.stack(frames, 1), speed, tail)


def _distance(first: Tensor, second: Tensor) -> float:
    """The largest relative L2 distance over samples and times."""
    size = second.norm(dim=(-2, -1)).clamp_min(torch.finfo(second.dtype).tiny)
    return float(((first - second).norm(dim=(-2, -1)) / size).max())


def _forcing_fields(forcing: Forcing, grid: int, like: Tensor) -> Tensor:
    """The forcing as fields (1 or batch, n, n): a function on the internal grid, a field on its own."""
    if isinstance(forcing, Tensor):
        resolution = like.shape[-1]
        if forcing.shape not in ((resolution, resolution), (len(like), 1, resolution, resolution)):
            raise ValueError(
                f"a forcing field must be {(resolution, resolution)} or {(len(like), 1, resolution, resolution)}, like "
                f"the initial fields, got {tuple(forcing.shape)}"
            )
        values = forcing.reshape(-1, resolution, resolution)
    elif forcing is None:
        values = torch.zeros(1, grid, grid)
    else:
        nodes = torch.arange(grid, dtype=torch.float64) / grid
        values = torch.as_tensor(forcing(nodes[:, None], nodes[None, :])).broadcast_to(1, grid, grid)
    if not bool(values.isfinite().all()):
        raise ValueError("the forcing must be finite, got NaN or infinity")
    return values.to(like.device, like.dtype)


def _check(initial: Tensor, viscosity: float, times: float | Sequence[float]) -> list[float]:
    """The times as a list, after refusing what cannot be solved."""
    if initial.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the vorticity must be float32 or float64, got {initial.dtype}; convert it with .float()")
    if initial.ndim != 4 or initial.shape[1] != 1 or initial.shape[2] != initial.shape[3] or initial.shape[2] < 4:
        raise ValueError(f"the vorticity must be (batch, 1, N, N) on a square grid, got {tuple(initial.shape)}")
    bad = (~initial.detach().isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if bad or not len(initial):
        found = f"NaN or infinity in samples {bad}" if bad else "an empty batch"
        raise ValueError(f"the vorticity must be finite, one sample or more, got {found}")
    if not 0 < viscosity < math.inf:
        raise ValueError(f"the viscosity must be positive, got {viscosity}")
    instants = [float(times)] if isinstance(times, int | float) else [float(time) for time in times]
    rising = all(earlier < later for earlier, later in itertools.pairwise(instants))
    if not instants or not rising or not 0 < instants[0] <= instants[-1] < math.inf:
        raise ValueError(f"times must be one positive time or increasing positive times, got {times}")
    return instants


def _check_grid(grid: int, resolution: int) -> None:
    if grid % resolution:
        raise ValueError(f"the internal grid must be a multiple of the resolution {resolution}, got {grid}")


def _check_tolerance(tolerance: float, dtype: torch.dtype) -> None:
    floor = 1e-5 if dtype == torch.float32 else 1e-12
    if not floor <= tolerance < 1:
        raise ValueError(f"the tolerance must lie between {floor} (rounding of {dtype}) and 1, got {tolerance}")
