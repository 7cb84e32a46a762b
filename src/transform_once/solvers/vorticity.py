"""The vorticity equation on a grid of the unit torus: its spectrum, its rates of change, and steps through time.

u·∇w = (∂xx−∂yy)(uv) + ∂xy(v²−u²) takes two inverse and two forward transforms where the plain form takes five. Two
trajectories travel as real and imaginary part of one complex field, so that every transform is a complex one, which
needs no copies and treats all waves alike. On CUDA a step is one graph launch.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def cutoff(grid: int) -> int:
    """The largest wave number |k| kept by the 2/3 rule: products of two such waves alias onto no kept one."""
    return (grid - 1) // 3


class Flow:
    """The equation on a grid.

    A state is the unnormalised spectrum of w₂ⱼ + i·w₂ⱼ₊₁, two trajectories each, as real numbers (pairs, n, n, 2).
    """

    def __init__(self, grid: int, viscosity: float, forces: Tensor) -> None:
        self.grid, self.viscosity = grid, viscosity
        self.real, self.device = forces.dtype, forces.device
        k = 2 * math.pi * torch.fft.fftfreq(grid, 1 / grid, dtype=torch.float64)
        kx, ky = k[:, None], k[None, :]
        square = kx**2 + ky**2
        radius = square.sqrt() / (2 * math.pi * cutoff(grid))
        # A disc rather than a square: the waves in the corners add little but limit the step.
        kept = (radius <= 1).double()
        # The inverse transforms below are unnormalised: their factor 1/n² sits here.
        inverse = torch.where(square > 0, kept / square, 0.0) / grid**2
        both = torch.stack((ky * inverse, -kx * inverse)) * 1j
        self.velocity_tables = torch.view_as_complex(torch.view_as_real(both).to(self.real).to(self.device))
        # −u·∇w = −(∂xx−∂yy)(uv) − ∂xy(v²−u²), whose multipliers are:
        self.products = ((kx**2 - ky**2) * kept, kx * ky * kept)
        self.diffusion = viscosity * square
        self.kept, self.outermost = self.table(kept), self.table(kept * (radius > 0.9))
        self.forcing = self.spectrum(forces.expand(2, -1, -1) if len(forces) == 1 else forces)

    def table(self, values: Tensor) -> Tensor:
        """Multipliers (n, n), made in float64, as (n, n, 2) in the precision and on the device of the run."""
        return values.to(self.real).to(self.device).unsqueeze(-1).repeat(1, 1, 2)

    def spectrum(self, fields: Tensor) -> Tensor:
        """The state of fields (batch, N, N), N no larger than the grid; an odd batch gets a companion at rest."""
        if len(fields) % 2:
            fields = torch.cat((fields, torch.zeros_like(fields[:1])))
        coarse = torch.fft.fft2(torch.complex(fields[0::2], fields[1::2]))
        largest = min(cutoff(self.grid), (fields.shape[-1] - 1) // 2)
        k = torch.arange(-largest, largest + 1, device=fields.device)
        state = coarse.new_zeros(len(coarse), self.grid, self.grid)
        state[:, k[:, None], k] = coarse[:, k[:, None], k] * (self.grid / fields.shape[-1]) ** 2
        return torch.view_as_real(state) * self.kept

    def fields(self, state: Tensor, resolution: int) -> Tensor:
        """The values (batch, N, N) of a state at the nodes of the coarser grid."""
        stride = self.grid // resolution
        values = torch.view_as_real(torch.fft.ifft2(torch.view_as_complex(state)))[:, ::stride, ::stride]
        return values.movedim(-1, 1).flatten(0, 1)

    def velocity(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """u and v, each (pairs, n, n, 2), the last axis numbering the two trajectories."""
        spectrum = torch.view_as_complex(state)
        u, v = (torch.fft.ifft2(spectrum * table, norm="forward") for table in self.velocity_tables)
        return torch.view_as_real(u), torch.view_as_real(v)

    def speed(self, state: Tensor) -> float:
        """The largest √(u²+v²), which limits the step."""
        u, v = self.velocity(state)
        return float((u * u + v * v).max().sqrt())

    def stable_step(self, speed: float, longest: float) -> float:
        """The longest "rk4" step, up to `longest`, at which no wave grows in a uniform flow of that speed.

        A step multiplies a wave by e^(−νk²h) R(ikh·speed), where |R(iy)|² = 1 − y⁶/72 + y⁸/576 for Runge-Kutta.
        """
        k = 2 * math.pi * torch.arange(1, cutoff(self.grid) + 1, dtype=torch.float64)
        steps = longest * 2 ** (torch.arange(-400, 1, dtype=torch.float64)[:, None] / 10)
        y = k * speed * steps
        growth = torch.log1p(y**8 / 576 - y**6 / 72) / 2 - self.viscosity * k**2 * steps
        stable = (growth.amax(1) <= 0).cumprod(0)
        return float(steps[int(stable.sum().clamp_min(1)) - 1])

    def tail(self, state: Tensor) -> float:
        """The share of the outermost tenth of the kept wave numbers in the L2 norm, largest over the pairs."""
        energy = state.square()
        whole = energy.sum((1, 2, 3)).clamp_min(torch.finfo(energy.dtype).tiny)
        return float(((energy * self.outermost).sum((1, 2, 3)) / whole).sqrt().max())

    def march(self, state: Tensor, instants: list[float], scheme: str, longest_step: float) -> Iterator[Tensor]:
        """The states at increasing times."""
        integrator, now = None, 0.0
        for instant in instants:
            steps = math.ceil((instant - now) / longest_step * (1 - 1e-12))
            if steps:
                step = (instant - now) / steps
                if integrator is None or not math.isclose(step, integrator.step, rel_tol=1e-9):
                    integrator = Integrator(self, scheme, step)
                state = integrator.advance(state, steps)
            now = instant
            yield state


class Integrator:
    """Steps of one length, by one scheme: "rk4", classical Runge-Kutta for e^(νk²t)·ŵ, or "crank-nicolson"."""

    def __init__(self, flow: Flow, scheme: str, step: float) -> None:
        self.flow, self.scheme, self.step = flow, scheme, step
        half = flow.diffusion * step / 2
        # Diffusion is applied as w + loss·w: a rounded factor near 1, met at every step, would be another viscosity.
        if scheme == "rk4":
            loss = torch.expm1(-half)
            weights = [step / 2 * (1 + loss), step / 2 + 0 * loss, step * (1 + loss), step / 6 + 0 * loss]
        else:
            loss = -2 * half / (1 + half)
            weights = [step / (1 + half)]
        self.loss, self.third = flow.table(loss), flow.table((1 + loss) / 3)
        self.stages = [
            (*(flow.table(product * weight) for product in flow.products), flow.forcing * flow.table(weight))
            for weight in weights
        ]
        self.graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def rate(self, state: Tensor, stage: int) -> Tensor:
        """Advection and forcing at `state`, times the weight of that stage."""
        u, v = self.flow.velocity(state)
        uv = torch.fft.fft2(torch.view_as_complex(u * v))
        difference = torch.fft.fft2(torch.view_as_complex((v * v).addcmul_(u, u, value=-1)))
        first, second, forcing = self.stages[stage]
        total = torch.addcmul(forcing, first, torch.view_as_real(uv))
        return total.addcmul_(second, torch.view_as_real(difference))

    def once(self, state: Tensor) -> Tensor:
        """One step."""
        decayed = torch.addcmul(state, self.loss, state)
        first = self.rate(state, 0)
        if self.scheme == "crank-nicolson":
            return first.add_(decayed)
        second = self.rate(decayed + first, 1)
        decayed_twice = torch.addcmul(decayed, self.loss, decayed)
        third = self.rate(decayed + second, 2)
        fourth = self.rate(decayed_twice + third, 3)
        change = torch.add(first, second, alpha=2).mul_(self.third).add_(third, alpha=1 / 3).add_(fourth)
        return change.add_(decayed_twice)

    def advance(self, state: Tensor, steps: int) -> Tensor:
        """Many steps; on CUDA, where launches would dominate, as replays of one captured graph."""
        needs_gradient = torch.is_grad_enabled() and (state.requires_grad or self.flow.forcing.requires_grad)
        if not state.is_cuda or needs_gradient:
            for _ in range(steps):
                state = self.once(state)
            return state
        with torch.cuda.device(state.device):
            graph, held = self.graph or self.capture(state)
            held.copy_(state)
            for _ in range(steps):
                graph.replay()
            return held.clone()

    def capture(self, state: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record one step from a buffer onto itself; the step before it, on its own stream, makes the FFT plans."""
        held = state.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.once(held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held.copy_(self.once(held))
        self.graph = graph, held
        return self.graph
