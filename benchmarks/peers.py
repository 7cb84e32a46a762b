"""FNOs in one plain loop, neuraloperator's and ours: sampling, forward, relative L2, backward, torch's fused AdamW.

Complex weights get the fused AdamW through real views of them, since its kernel does not take them: the same update,
and the fastest that the peers can have.
"""

import time
from collections.abc import Callable, Sequence

import neuralop.models
import torch
from common import captured
from torch import Tensor, nn

from transform_once.training.loss import relative_l2

NEURALOPERATOR = "neuraloperator 2.0.0"


def neuraloperator(modes: int, width: int, depth: int, in_channels: int = 1) -> nn.Module:
    """Its FNO with as many modes as ours: its count is of both sides."""
    return neuralop.models.FNO((2 * modes, 2 * modes), in_channels, 1, hidden_channels=width, n_layers=depth)


def plain_loop(model: nn.Module, x: Tensor, y: Tensor, batch: int, capture: bool, repeats: int) -> list[float]:
    """Milliseconds of a step, by epochs without the samples left over, after a first one to warm up."""
    device, count = x.device, len(x) // batch
    pairs = [(p, torch.view_as_real(p.detach()) if p.is_complex() else p) for p in model.parameters()]
    rate = torch.tensor(1e-3, device=device) if capture else 1e-3
    update = torch.optim.AdamW([real for _, real in pairs], lr=rate, fused=True, capturable=capture)
    chosen = torch.zeros(batch, dtype=torch.long, device=device)

    def step() -> None:
        for p, _ in pairs:
            p.grad = None
        relative_l2(model(x[chosen]), y[chosen]).mean().backward()
        for p, real in pairs:
            real.grad = torch.view_as_real(p.grad) if p.is_complex() else p.grad
        update.step()

    run = captured(step, [p for p, _ in pairs], update) if capture else step
    orders = [torch.randperm(len(x), device=device).split(batch)[:count] for _ in range(repeats + 1)]
    return [1e3 * _seconds(run, chosen, order) / count for order in orders][1:]


def _seconds(step: Callable[[], None], chosen: Tensor, order: Sequence[Tensor]) -> float:
    wait = torch.cuda.synchronize if chosen.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    for batch in order:
        chosen.copy_(batch)
        step()
    wait()
    return time.perf_counter() - start
