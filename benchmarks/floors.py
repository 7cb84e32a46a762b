"""What a call must at least cost on a machine: bytes over a measured copy rate, operations over a measured rate.

A floor is the larger of the two, of

- bytes of the weights: read forward and backward, in each step of a rollout; their gradient written once and read
  once; AdamW reads and writes p, m and v, Muon p and m. Of b = 4 bytes, of b = 2 for products in bfloat16, but p, m
  and v always of 4, from which a rounded copy is then written too. For AdamW: 40 bytes a weight in float32.
- bytes of the states: each layer reads one and writes one, backward it reads its input again and the gradient, and
  writes one, as if all inside a layer were fused. Layers are those of T1 and FNO, of T1+ its one T1 layer and the
  convolutions of its UNet; lift and head count nothing.
- bytes of the samples: read once.
- operations of all matrix products and convolutions, counted while the step runs on tensors without data: a complex
  product counts as four; transforms count nothing, which spares the FNO most. At the rate of their precision; that is
  tf32 for convolutions in float32 on CUDA, torch's default, and bfloat16 for Muon's own products there.

It is a floor for memory that forgets: caches that hold weights or states from one use to the next (50 MB on an H200)
may go below it, for single members and in inference.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import interleaved
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import transform_once as t1
from transform_once.models.operator import Operator, SpectralOperator
from transform_once.spectral import transforms
from transform_once.spectral.precision import matmul_precision
from transform_once.training.optimizers import make_optimizer

PRECISIONS = ("float32", "tf32", "bfloat16")


class Rates(NamedTuple):
    """Measured: bytes a second of a large copy, read plus written, and operations a second of a large product."""

    copy: float
    products: dict[str, float]

    def columns(self, precision: str) -> dict[str, object]:
        return {"copy GB/s": f"{self.copy / 1e9:.0f}", "product Tflop/s": f"{self.products[precision] / 1e12:.3g}"}


RATE_COLUMNS = ("copy GB/s", "product Tflop/s")


def measured_rates(device: str) -> Rates:
    """The best of thirty: nothing that is timed afterwards should be faster."""
    x = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    y, n = torch.empty_like(x), 8192 if device == "cuda" else 1024
    copy = 2 * x.nbytes / min(interleaved({"": lambda: y.copy_(x)}, 30, device)[""])
    products = {}
    for precision in PRECISIONS:
        a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32)
        with matmul_precision("high" if precision == "tf32" else "highest"):
            times = interleaved({"": lambda a=a: a @ a}, 30, device)[""]
        products[precision] = 2 * n**3 / min(times)
    return Rates(copy, products)


class _Counter(TorchDispatchMode):
    """Adds up operations of products and of convolutions, and the numbers that these read and write going forward."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.convolutions, self.convolved = 0.0, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        operations = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
        if "convolution" in packet.__name__:
            self.convolutions += operations
        else:
            self.products += (4 if isinstance(out, Tensor) and out.is_complex() else 1) * operations
        if packet is torch.ops.aten.convolution:
            self.convolved += args[0].numel() + out.numel()
        return out

    def seconds(self, rates: Rates, precision: str) -> float:
        rounded = precision == "float32" and torch.cuda.is_available() and torch.backends.cudnn.allow_tf32
        return (
            self.products / rates.products[precision]
            + self.convolutions / rates.products["tf32" if rounded else precision]
        )


def _counted(call: Callable[[], object]) -> _Counter:
    with _Counter() as counter, mock.patch.object(transforms, "MATRIX_ENTRIES", 0):  # FFTs for matrices: not counted
        call()
    return counter


def _state_numbers(model: Operator, batch: int, convolved: float) -> float:
    """That the layers read and write going forward."""
    if isinstance(model, t1.T1Plus):
        return convolved + 2 * batch * (model.in_channels + model.ndim) * math.prod(model.block)
    points = model.kept_shape if isinstance(model, SpectralOperator) else model.resolution
    return float(2 * model.config["depth"] * model.config["width"] * math.prod(points) * batch)


def weight_numbers(model: torch.nn.Module) -> int:
    """Real numbers: a complex weight counts twice."""
    return sum(p.numel() * (1 + p.is_complex()) for p in model.parameters())


def training_floor(
    model: Operator,
    batch: int,
    rates: Rates,
    precision: str,
    *,
    optimizer: str = "adamw",
    on_modes: bool = False,
    steps: int = 1,
) -> tuple[float, str]:
    """Milliseconds that a training step takes at least, and whether "bytes" or "operations" limit it.

    `on_modes` for training wholly in k-space, `steps` of the rollout in the loss. The model's weights are given up.
    """
    model = model.to("meta").train()
    on_modes = on_modes and isinstance(model, SpectralOperator)
    shape = model.kept_shape if on_modes else model.resolution
    x = torch.zeros(batch, model.in_channels, *shape, device="meta")
    call = model.kspace if on_modes else model
    counter = _counted(lambda: call(x).square().sum().backward())
    of_update = _counted(make_optimizer(model, optimizer, 1e-3, 0.0).step)
    b = 2 if precision == "bfloat16" else 4
    per_weight = 2 * b * steps + 2 * b + (24 if optimizer == "adamw" else 16) + (2 if b == 2 else 0)
    size = per_weight * weight_numbers(model) + 2.5 * b * steps * _state_numbers(model, batch, counter.convolved)
    size += 4 * batch * (model.in_channels + steps * model.out_channels) * math.prod(shape)
    in_update = "bfloat16" if torch.cuda.is_available() else "float32"
    return _larger(size / rates.copy, steps * counter.seconds(rates, precision) + of_update.seconds(rates, in_update))


def beside_floor(milliseconds: float, floor: Callable[[], tuple[float, str]], members: int = 1) -> dict[str, object]:
    """The columns of a floor beside a time; a time without its floor is a time still."""
    try:
        least, limit = floor()
    except Exception as error:
        print(f"no floor: {type(error).__name__}: {error}", flush=True)
        return {}
    least *= members
    return {"floor ms": f"{least:.3g}", "over floor": f"{milliseconds / least:.2f}", "limit": limit}


def inference_floor(model: torch.nn.Module, fields: Tensor, rates: Rates, precision: str) -> tuple[float, str]:
    """Milliseconds of reading weights and input once and writing the output, or of the operations if they take longer.

    As if all between input and output were fused. The model is left as it is.
    """
    bare = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad():
        counter = _counted(lambda: bare(fields.to("meta")))
    size = (2 if precision == "bfloat16" else 4) * weight_numbers(model) + 2 * fields.nbytes
    return _larger(size / rates.copy, counter.seconds(rates, precision))


def _larger(of_bytes: float, of_operations: float) -> tuple[float, str]:
    return (1e3 * of_bytes, "bytes") if of_bytes > of_operations else (1e3 * of_operations, "operations")
