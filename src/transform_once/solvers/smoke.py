"""Buoyant smoke in a closed box in two dimensions, on a staggered grid, with the pressure solved by our own DCT.

    ∂ρ/∂t + ∇·(uρ) = α(1 − ρ),   ∂u/∂t + ∇·(uu) = −∇p + buoyancy · ρ · up + α(u_in − u),   ∇·u = 0,   u·n = 0 on walls

The inflow α(x) ≥ 0 is a small patch on the floor where the density of smoke ρ relaxes to one and the velocity to u_in,
which pulses and sways over time. ρ stays in [0, 1]; it is also the heat that lifts the smoke. There is no viscosity:
the limiter removes what the grid cannot carry. The box is one unit wide and rows/columns units tall, with square cells
and slipping walls, so an inflow describes the same plume at every resolution.

**Images are rows × columns and row 0 is the top, as in video: smoke rises towards row 0.** Densities live at cell
centres (grid kind cell, not periodic), the downward velocity on the faces between rows, the rightward velocity on the
faces between columns. Symmetry: the horizontal mirror (columns reversed) takes plumes to plumes.

One step, of second order in time and in space, with one pressure solve:

1. The velocity at half time, extrapolated from the last two steps and free of divergence, will carry everything.
2. Half a step of buoyancy and of the last pressure.
3. Advection of density and velocity in flux form, one axis after the other, the order alternating. Fluxes are of third
   order and limited; a sweep also updates the volume of each cell (Easter 1993), so that mass is conserved to rounding,
   constants stay constant, and no new extrema arise.
4. The inflow, the other half of the buoyancy, and the projection. The Laplacian on cells between walls is diagonal in
   the DCT-II basis, with eigenvalues 2(cos(πk/N) − 1)/h² along each axis: divergence vanishes to rounding, below 1e-6
   of max|u|/h in float32. (Products of reduced precision, `torch.set_float32_matmul_precision`, would spoil that.)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from transform_once.spectral.transforms import dct

__all__ = ["Inflow", "SmokeSettings", "SmokeSolver", "random_inflow", "simulate", "stream"]

COURANT = 0.6  # aimed at; no new extrema arise up to 0.75, the rest is for speed that is gained within a frame
INFLOW_RATE = 30.0  # how fast the patch takes on the values of the inflow, per unit of time
WAVES = 8  # of each random inflow

# Channels of the state: three fields that move, then what the last step leaves for the next one on the faces of the two
# velocities: their rates of change and the gradient of the pressure.
ROW_VELOCITY, DENSITY, COLUMN_VELOCITY = range(3)
VELOCITIES, RATES, GRADIENTS = slice(0, 3, 2), slice(3, 5), slice(5, 7)


@dataclass(frozen=True)
class SmokeSettings:
    """What decides a plume besides its inflow.

    resolution      rows and columns, at least 4 each.
    frame_interval  time between frames. At the defaults 150 frames take a plume up a box of 1062 × 600.
    buoyancy        upward acceleration of pure smoke, in box widths per squared unit of time.
    """

    resolution: tuple[int, int] = (224, 128)
    frame_interval: float = 0.05
    buoyancy: float = 1.0

    def __post_init__(self) -> None:
        if len(self.resolution) != 2 or min(self.resolution) < 4:
            raise ValueError(f"expected a resolution of at least 4 rows and 4 columns; got {self.resolution}")
        if not (0 < self.frame_interval < math.inf and math.isfinite(self.buoyancy)):
            got = f"{self.frame_interval} and {self.buoyancy}"
            raise ValueError(f"expected a positive frame interval and a finite buoyancy; got {got}")


DEFAULTS = SmokeSettings()


@dataclass(frozen=True)
class Inflow:
    """Where and how smoke enters, a value for each sample: (batch,), or (batch, waves) for the last four.

    position   centre of the patch, from 0 (left wall) to 1 (right wall).
    width      half the width of the patch, and its height, in box widths; 0.06 to 0.12 is good.
    speed      upward speed, in box widths per unit of time.
    frequency  cycles per unit of time of each wave.
    phase      its phase in radians.
    pulse      its share in the upward speed: speed · (1 + Σ pulse · sin(2π · frequency · t + phase)).
    sway       its sideways speed, to the right: Σ sway · cos(2π · frequency · t + phase).

    The mirrored plume has 1 − position and −sway.
    """

    position: Tensor
    width: Tensor
    speed: Tensor
    frequency: Tensor
    phase: Tensor
    pulse: Tensor
    sway: Tensor


def random_inflow(samples: Sequence[int], seed: int = 0) -> Inflow:
    """Inflows of the samples with these numbers; that of sample i depends on `seed` and i only."""
    if len(samples) == 0 or min(samples) < 0 or seed < 0:
        raise ValueError(f"expected sample numbers and a seed of zero or more; got {list(samples)} and {seed}")
    rows = [_draw_inflow(np.random.default_rng((seed, i))) for i in samples]
    return Inflow(*(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)))


def _draw_inflow(generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    position, width, speed = generator.uniform((0.35, 0.06, 0.4), (0.65, 0.12, 0.8))
    # From slow drift to puffs of the size of the patch; slower waves are stronger.
    frequency = np.exp(generator.uniform(math.log(0.3), math.log(8), WAVES))
    phase = generator.uniform(0, 2 * np.pi, WAVES)
    pulse, sway = 0.12 * frequency ** (-1 / 3) * generator.normal(size=(2, WAVES))
    return position, width, speed, frequency, phase, pulse, speed * sway


def simulate(
    frames: int,
    samples: Sequence[int] = range(1),
    seed: int = 0,
    settings: SmokeSettings = DEFAULTS,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, dict[str, Any]]:
    """All frames of `stream` as a trajectory (batch, frames, 1, rows, columns) on the CPU, and what made them."""
    trajectory = torch.empty(len(samples), max(frames, 0), 1, *settings.resolution)
    for number, frame in enumerate(stream(frames, samples, seed, settings, device)):
        trajectory[:, number] = frame
    return trajectory, asdict(settings) | {"seed": seed, "courant": COURANT, "inflow_rate": INFLOW_RATE}


def stream(
    frames: int,
    samples: Sequence[int] = range(1),
    seed: int = 0,
    settings: SmokeSettings = DEFAULTS,
    device: str | torch.device = "cpu",
) -> Iterator[Tensor]:
    """Density (batch, 1, rows, columns) in float32 on `device`, frame by frame; only the latest is held.

    `samples` are the numbers of the random plumes: a batch of `range(4, 8)` continues one of `range(4)`. The box is
    empty and at rest at time zero; frame k, counted from zero, is taken at (k + 1) · frame_interval.
    """
    if frames < 1:
        raise ValueError(f"expected at least one frame; got {frames}")
    solver = SmokeSolver(settings, len(samples), random_inflow(samples, seed), device)
    return (solver.advance(settings.frame_interval).density.clone() for _ in range(frames))


class SmokeSolver:
    """A batch of boxes of smoke, empty and at rest; `start` sets another state, `advance` moves it on.

    Each sample takes steps of its own length, so that it does not depend on its companions in the batch. The host reads
    the largest speeds once an `advance`; the steps between run without it, on a GPU as a CUDA graph.
    """

    def __init__(
        self,
        settings: SmokeSettings = DEFAULTS,
        batch: int = 1,
        inflow: Inflow | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        inflows = batch if inflow is None else len(inflow.position)
        if batch < 1 or inflows != batch:
            raise ValueError(f"expected at least one sample, and an inflow for each; got {batch} and {inflows} inflows")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"smoke is solved in float32 or float64; got {dtype}")
        self.settings, self.device = settings, torch.device(device)
        rows, columns = settings.resolution
        self._cell = 1 / columns
        self._graph: torch.cuda.CUDAGraph | None = None
        # Every channel has a row and a column to spare, so that cells and faces share one array and one sweep.
        grid, zeros = (rows + 1, columns + 1), partial(torch.zeros, dtype=dtype, device=device)
        self._state, self._next = zeros(batch, 7, *grid), zeros(batch, 7, *grid)
        self._dt, self._time, self._steps_left = (zeros(batch, 1, 1, 1) for _ in range(3))
        self._carrier, self._volume, self._ratio = (zeros(batch, channels, *grid) for channels in (2, 3, 3))
        self._sweeps = {axis: _Sweep(axis, self._volume) for axis in (-1, -2)}
        # The solver owns its matrices, because a CUDA graph must not outlive what it reads. Synthesising the gradient
        # instead of differencing a potential keeps the divergence at rounding on large grids: potentials are large.
        cosines = [dct(torch.eye(n, dtype=torch.float64), 1) for n in settings.resolution]
        self._cosines = [values.to(device, dtype) for values in cosines]
        self._slopes = [values.diff(dim=0).to(device, dtype) for values in cosines]
        second = [2 * torch.cos(torch.arange(n, dtype=torch.float64) * (math.pi / n)) - 2 for n in settings.resolution]
        eigenvalues = second[0][:, None] + second[1]
        eigenvalues[0, 0] = math.inf  # The mean of the pressure is free: zero.
        self._inverse_eigenvalues = eigenvalues.reciprocal().to(device, dtype)
        self._patch = None if inflow is None else _Patch(inflow, settings.resolution, self.device, dtype)

    @property
    def density(self) -> Tensor:
        """Smoke density (batch, 1, rows, columns) at cell centres; a view of the state."""
        return self._state[:, DENSITY, None, :-1, :-1]

    @property
    def velocity(self) -> tuple[Tensor, Tensor]:
        """Downward (batch, rows + 1, columns) and rightward (batch, rows, columns + 1) on the faces; views."""
        return self._state[:, ROW_VELOCITY, :, :-1], self._state[:, COLUMN_VELOCITY, :-1]

    @torch.no_grad()
    def start(self, density: Tensor, velocity: tuple[Tensor, Tensor] | None = None) -> None:
        """Begin at time zero with these (shapes as the properties); velocity is projected, and at rest by default."""
        given = (density, *(velocity or ()))
        places = (self.density, *self.velocity)[: len(given)]
        for place, values in zip(places, given, strict=True):
            if place.shape != values.shape:
                raise ValueError(f"expected a field of shape {tuple(place.shape)}; got {tuple(values.shape)}")
            if not bool(values.isfinite().all()):
                raise ValueError("expected a finite density and velocity to start from; got NaN or Inf")
        self._state.zero_()
        self._time.zero_()
        for place, values in zip(places, given, strict=True):
            place.copy_(values)
        self._project(self._state)

    @torch.no_grad()
    def advance(self, interval: float) -> Self:
        """Move on by `interval`, in an even number of equal steps whose Courant numbers stay well below one."""
        if not 0 < interval < math.inf:
            raise ValueError(f"expected a positive interval of time; got {interval}")
        largest = self._state[:, :3].abs().amax((2, 3))
        if self._patch is not None:
            largest = torch.maximum(largest, self._patch.largest)
        # Jumps between opposite faces count too: no sweep may empty a cell. Both axes have the same, up to their sign.
        jumps = self._state[:, ROW_VELOCITY].diff(dim=1).abs().amax((1, 2))
        speeds = torch.maximum(largest[:, VELOCITIES].amax(1), jumps)
        # Buoyancy may speed the smoke up on the way.
        speeds = (speeds + abs(self.settings.buoyancy) * largest[:, DENSITY] * interval).cpu().double()
        pairs = (speeds * (interval / (2 * COURANT * self._cell))).ceil().clamp_min(1).view(-1, 1, 1, 1)
        self._dt.copy_(interval / (2 * pairs))
        self._steps_left.copy_(2 * pairs)
        if self.device.type == "cuda":
            self._replay(int(pairs.max()))
        else:
            for _ in range(int(pairs.max())):
                self._pair()
        return self

    def _replay(self, pairs: int) -> None:
        with torch.cuda.device(self.device):
            if self._graph is None:
                # The first pair is taken outside the graph, on a stream of its own: what needs a warm-up gets it there.
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self._pair()
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._pair()
                self._graph, pairs = graph, pairs - 1
            for _ in range(pairs):
                self._graph.replay()

    def _pair(self) -> None:
        """Two steps, sweeping the axes in opposite orders, by the samples that have steps left."""
        for axes in ((-1, -2), (-2, -1)):
            self._step(*axes)
            active = self._steps_left.sign().clamp_min_(0)
            self._state.lerp_(self._next, active)
            self._time.addcmul_(self._dt, active)
            self._steps_left -= 1

    def _step(self, first: int, second: int) -> None:
        old, new, dt = self._state, self._next, self._dt
        torch.addcmul(old[:, VELOCITIES], old[:, RATES], 0.5 * dt, out=self._carrier).mul_(dt / self._cell)
        new[:, :3] = old[:, :3]
        self._lift(new)
        new[:, VELOCITIES].addcmul_(old[:, GRADIENTS], -0.5 * dt)
        self._advect(new[:, :3], first, second)
        if self._patch is not None:
            self._patch.apply(new[:, :3], dt, self._time)
        self._lift(new)
        along_rows, along_columns = self._project(new)
        # The pressure of this whole step: half of the last one, applied above, and what the projection added.
        gradients = torch.mul(old[:, GRADIENTS], 0.5, out=new[:, GRADIENTS])
        gradients[:, 0, 1:-1, :-1].addcdiv_(along_rows, dt[:, 0])
        gradients[:, 1, :-1, 1:-1].addcdiv_(along_columns, dt[:, 0])
        torch.sub(new[:, VELOCITIES], old[:, VELOCITIES], out=new[:, RATES]).div_(dt)

    def _lift(self, state: Tensor) -> None:
        """Half a step of buoyancy, from the mean density of the cells above and below each face."""
        density, faces = state[:, DENSITY, :-1, :-1], state[:, ROW_VELOCITY, 1:-1, :-1]
        weight = (-0.25 * self.settings.buoyancy) * self._dt[:, 0]
        faces.addcmul_(density[:, :-1], weight).addcmul_(density[:, 1:], weight)

    def _advect(self, fields: Tensor, first: int, second: int) -> None:
        """Carry the three fields along both axes. The first sweep changes the volumes, the second restores them."""
        for axis in (first, second):
            self._sweeps[axis].set_courant(self._carrier)
        self._sweeps[first].carry(fields, fields)
        self._sweeps[first].volume(out=self._volume)
        torch.div(fields, self._volume, out=self._ratio)
        self._sweeps[second].carry(fields, self._ratio)

    def _project(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Close the walls and subtract the gradient that holds the divergence of the velocity; returns the gradient."""
        down, right = state[:, ROW_VELOCITY, :, :-1], state[:, COLUMN_VELOCITY, :-1]
        for wall in (down[:, 0], down[:, -1], right[..., 0], right[..., -1]):
            wall.zero_()
        divergence = (down[:, 1:] - down[:, :-1]).add_(right[..., 1:]).sub_(right[..., :-1])
        rows, columns = self._cosines
        spectrum = (rows.T @ divergence @ columns).mul_(self._inverse_eigenvalues)
        along_rows, along_columns = self._slopes[0] @ (spectrum @ columns.T), rows @ spectrum @ self._slopes[1].T
        down[:, 1:-1] -= along_rows
        right[..., 1:-1] -= along_columns
        return along_rows, along_columns


class _Sweep:
    """Transport along one axis of the three fields at once, each on its own control volumes.

    Everything here is seen with that axis last. There is one face more than there are volumes, and nothing flows
    through the outermost two.
    """

    def __init__(self, axis: int, like: Tensor) -> None:
        self.axis = axis
        # The component along the axis has values on both walls. The other two fields end with a spare volume.
        self.normal, self.across = (COLUMN_VELOCITY, ROW_VELOCITY) if axis == -1 else (ROW_VELOCITY, COLUMN_VELOCITY)
        self.with_spare = slice(0, 2) if axis == -1 else slice(1, 3)
        shape = list(like.shape)
        shape[axis] += 1
        self.courant, self.flux, self.jump = (self._see(like.new_zeros(shape)) for _ in range(3))
        shape[axis] -= 2
        buffers = [self._see(like.new_zeros(shape)) for _ in range(6)]
        self.forward, self.upwind, self.half_slope, self.low, self.high, self.speed = buffers
        self.third = like.new_full((), 1 / 3)

    def _see(self, tensor: Tensor) -> Tensor:
        return tensor if self.axis == -1 else tensor.transpose(-1, -2)

    def set_courant(self, carrier: Tensor) -> None:
        """Courant numbers of all faces from those of the velocities; on walls, where velocity is zero, none matter."""
        carrier, courant = self._see(carrier)[:, self.normal // 2], self.courant[..., 1:-1]
        courant[:, DENSITY] = carrier[..., 1:]
        torch.lerp(carrier[..., :-1], carrier[..., 1:], 0.5, out=courant[:, self.normal])
        torch.lerp(carrier[:, :-1, 1:], carrier[:, 1:, 1:], 0.5, out=courant[:, self.across, 1:])

    def volume(self, out: Tensor) -> None:
        """What a volume of one holds after the sweep."""
        torch.sub(self.courant[..., :-1], self.courant[..., 1:], out=self._see(out)).add_(1)

    def carry(self, mass: Tensor, ratio: Tensor) -> None:
        """Move `mass`, which is `ratio` per volume, through the faces.

        The flux is that of Lax and Wendroff with the curvature of the third-order upwind scheme, its slope limited to
        twice the smaller of the jumps at the face and upwind of it (zero where they differ in sign).
        """
        mass, ratio, courant = self._see(mass), self._see(ratio), self.courant[..., 1:-1]
        forward, jump, upwind = self.forward, self.jump[..., 1:-1], self.upwind
        # One where the flow goes forward, else zero: a lerp by it chooses a side, several times faster than `where`.
        torch.sign(courant, out=forward).clamp_min_(0)
        torch.sub(ratio[..., 1:], ratio[..., :-1], out=jump)
        jump[:, self.with_spare, :, -1] = 0
        torch.lerp(self.jump[..., 2:], self.jump[..., :-2], forward, out=upwind)
        torch.abs(courant, out=self.speed)
        torch.minimum(jump, upwind, out=self.high).clamp_min_(0)
        torch.maximum(jump, upwind, out=self.low).clamp_max_(0)
        half_slope = torch.add(self.third, self.speed, alpha=1 / 3, out=self.half_slope)
        torch.lerp(jump, upwind, half_slope, out=half_slope).mul_(0.5)
        torch.clamp(half_slope, self.low, self.high, out=half_slope)
        torch.lerp(ratio[..., 1:], ratio[..., :-1], forward, out=upwind)
        flux = torch.mul(courant, upwind, out=self.flux[..., 1:-1])
        flux.addcmul_(half_slope, torch.addcmul(self.speed, self.speed, self.speed, value=-1, out=self.low))
        mass.add_(self.flux[..., :-1]).sub_(self.flux[..., 1:])


class _Patch:
    """An `Inflow` on the cells and faces of a grid."""

    def __init__(self, inflow: Inflow, resolution: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        rows, columns = resolution
        given = (inflow.speed, inflow.frequency, inflow.phase, inflow.pulse, inflow.sway)
        self.speed, self.frequency, self.phase, self.pulse, self.sway = (value.to(device, dtype) for value in given)
        upward, sideways = inflow.speed * (1 + inflow.pulse.abs().sum(1)), inflow.sway.abs().sum(1)
        self.largest = torch.stack([upward, torch.ones_like(upward), sideways], 1).to(device, dtype)
        # Places of the row velocity, the density and the column velocity, in cells.
        row = torch.arange(rows + 1).view(1, 1, -1, 1) + torch.tensor([0, 0.5, 0.5]).view(1, 3, 1, 1)
        column = torch.arange(columns + 1).view(1, 1, 1, -1) + torch.tensor([0.5, 0.5, 0]).view(1, 3, 1, 1)
        centre, width = (columns * value.cpu().double().view(-1, 1, 1, 1) for value in (inflow.position, inflow.width))
        width = width.clamp_min(1.5)  # so that the coarsest grid shows it
        bump_up, bump_aside = ((1 - (x / width) ** 2).clamp_min(0) ** 2 for x in (rows - row, column - centre))
        profile = bump_up * bump_aside * ((row < rows) & (column < columns))
        self.first_row = int(profile.amax((0, 1, 3)).nonzero()[0])
        self.rate = (-INFLOW_RATE * profile[:, :, self.first_row :]).to(device, dtype)

    def apply(self, fields: Tensor, dt: Tensor, time: Tensor) -> None:
        """Relax the fields over one step to what the inflow is in the middle of it."""
        middle = torch.add(time, dt, alpha=0.5).view(-1, 1)
        angle = torch.addcmul(self.phase, self.frequency, 2 * math.pi * middle)
        upward = self.speed * (1 + (self.pulse * angle.sin()).sum(1))
        sideways = (self.sway * angle.cos()).sum(1)
        target = torch.stack([-upward, torch.ones_like(upward), sideways], 1)[:, :, None, None]
        fields[:, :, self.first_row :].lerp_(target, (self.rate * dt).expm1_().neg_())
