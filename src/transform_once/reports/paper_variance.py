"""The paper's histograms of the variance that leaves one layer: the collapse of Xavier weights, and vp without it.

A layer x̂ = T⁻¹ S_mᵀ A S_m T x on white fields x of variance 1, with a single draw of A. What the mean variance of its
output must be follows from the formulas of `spectral.initialization`:

| layer         | weights | variance of x̂, in two dimensions, N = n² points               |
|---------------|---------|---------------------------------------------------------------|
| FNO           | xavier  | m(4m−3)/N: about the share of the coefficients that are kept  |
| FFNO          | xavier  | (4m−3)/n: the sum over two axes, each with its own share      |
| FNO and T1    | vp      | 1                                                             |
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transform_once.models.fno import SpectralConvolution
from transform_once.models.layers import T1Layer, from_state, to_state
from transform_once.reports.curves import COLOURS, STYLE
from transform_once.reports.paper_table import PaperFigure, Row
from transform_once.solvers.navier_stokes import initial_vorticity
from transform_once.spectral.transforms import dct, idct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Layer = Callable[[Tensor], Tensor]

CHANNELS = 8  # inside a layer
SAMPLES = 64  # of white fields
BLOCK_NUMBERS = 2**23  # of fields that are in memory at a time
BINS = 60  # a decade of the variance
SMOOTH = 64  # points per axis of the smooth field of the remark


class Kind(NamedTuple):
    """A layer with its weights: `make` draws it for modes and resolution, `expected` is its variance on white input."""

    name: str
    make: Callable[[int, int], Layer]
    expected: Callable[[int, int], float]


def _fno(scheme: str) -> Callable[[int, int], Layer]:
    def make(modes: int, resolution: int) -> Layer:
        layer = SpectralConvolution(CHANNELS, modes, 2)
        if scheme == "vp":
            layer.vp_init_((resolution, resolution))
        return layer

    return make


def _ffno(modes: int, resolution: int) -> Layer:
    rows, columns = (SpectralConvolution(CHANNELS, modes, 1) for _ in range(2))
    return lambda x: rows(x.transpose(-2, -1)).transpose(-2, -1) + columns(x)


def _t1(scheme: str) -> Callable[[int, int], Layer]:
    def make(modes: int, resolution: int) -> Layer:
        """The channel matrices of a T1 layer, which the scheme is about, without activation and mixing."""
        layer = T1Layer(CHANNELS, (modes, modes))
        layer.initialize("xavier")
        if scheme == "vp":
            layer.vp_init_((resolution, resolution))

        def run(x: Tensor) -> Tensor:
            Z = torch.bmm(layer.weight, to_state(dct(x, 2, modes)).transpose(0, 1)).transpose(0, 1)
            return idct(from_state(Z, (modes, modes), is_complex=False), 2, x.shape[-2:])

        return run

    return make


KINDS = (
    Kind("FNO, xavier", _fno("xavier"), lambda m, n: m * (4 * m - 3) / n**2),
    Kind("FFNO, xavier", _ffno, lambda m, n: (4 * m - 3) / n),
    Kind("T1, xavier", _t1("xavier"), lambda m, n: m**2 / n**2),
    Kind("FNO, vp", _fno("vp"), lambda m, n: 1.0),
    Kind("T1, vp", _t1("vp"), lambda m, n: 1.0),
)


def variances(kind: Kind, resolution: int, modes: int, device: torch.device) -> Tensor:
    """The variance of each output field (SAMPLES · CHANNELS,) of one draw of the layer, white fields in."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        with device:
            layer = kind.make(modes, resolution)
        block = max(1, min(SAMPLES, BLOCK_NUMBERS // (CHANNELS * resolution**2)))
        parts = []
        for start in range(0, SAMPLES, block):
            x = torch.randn(min(block, SAMPLES - start), CHANNELS, resolution, resolution)
            parts.append(layer(x.to(device)).square().mean((-2, -1)).flatten().cpu())
    return torch.cat(parts).double()


def smooth_field_factor(modes: int, samples: int = 32) -> tuple[float, float]:
    """What vp does to a smooth field, τ = 7, α = 2.5, on 64²: (share of the energy in the modes, variance ratio)."""
    x = initial_vorticity(samples * CHANNELS, SMOOTH, dtype=torch.float64).unflatten(0, (samples, CHANNELS)).squeeze(2)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        y = _t1("vp")(modes, SMOOTH)(x.float())
    kept = dct(x, 2, modes)
    return (kept.square().sum() / x.square().sum()).item(), (y.double().square().sum() / x.square().sum()).item()


def variance_figure(resolutions: Sequence[int], modes: int, device: torch.device) -> PaperFigure:
    """Histograms of every kind of layer at every number of points per axis."""
    if not resolutions or modes < 1 or min(resolutions) < 2 * modes:
        raise ValueError(
            f"the variance figure keeps {modes} modes on both sides of each axis, so resolutions must be at least "
            f"{2 * modes}; got {list(resolutions)}"
        )
    rows: list[Row] = []
    summary: list[Row] = []
    found = {(kind, n): variances(kind, n, modes, device) for kind in KINDS for n in resolutions}
    low = min(values.min().item() for values in found.values())
    high = max(values.max().item() for values in found.values())
    edges = np.geomspace(low / 1.1, high * 1.1, int(BINS * np.log10(1.21 * high / low)) + 1)
    counts = {key: np.histogram(values.numpy(), edges)[0] for key, values in found.items()}
    for (kind, n), values in found.items():
        about = {"figure": "variance", "series": kind.name, "resolution": n, "modes": modes}
        middles = np.sqrt(edges[1:] * edges[:-1]).tolist()
        rows += [
            {**about, "x": x, "y": int(y), "quantity": "fields"}
            for x, y in zip(middles, counts[kind, n], strict=True)
            if y
        ]
        numbers = {"variance": values.mean().item(), "spread": values.std().item(), "expected": kind.expected(modes, n)}
        rows += [{**about, "x": n, "y": y, "quantity": name} for name, y in numbers.items()]
        summary.append({"layer": kind.name, "points per axis": n, **numbers})
    share, factor = smooth_field_factor(min(modes, SMOOTH))
    smooth = {"figure": "variance", "series": "T1, vp, smooth field", "resolution": SMOOTH, "modes": modes, "x": SMOOTH}
    rows.append({**smooth, "y": factor, "quantity": "variance ratio"})
    rows.append({**smooth, "y": share, "quantity": "share of the energy in the kept modes"})
    sentence = (
        f"White input is essential: on a smooth field (τ=7, α=2.5, {SMOOTH}²), whose first {modes}² DCT modes hold "
        f"{share:.4f} of the energy, vp multiplies the variance by {factor:.2f}."
    )
    remark = f"on a smooth field (τ=7, α=2.5, {SMOOTH}²) vp multiplies the variance by {factor:.2f}"
    figure = _draw(resolutions, edges, counts, modes, remark)
    return PaperFigure("variance", {"": figure}, rows, summary, [sentence], line_art=True)


def _draw(
    resolutions: Sequence[int], edges: np.ndarray, counts: dict[tuple[Kind, int], np.ndarray], modes: int, remark: str
) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(8, 1.45 * len(KINDS) + 1.3), layout="constrained")
        panels = figure.subplots(len(KINDS), 1, sharex=True, squeeze=False)[:, 0]
        for axes, kind in zip(panels, KINDS, strict=True):
            for number, n in enumerate(resolutions):
                colour = COLOURS[number % len(COLOURS)]
                label = f"{n}² points" if kind is KINDS[0] else None
                axes.stairs(counts[kind, n], edges, fill=True, color=colour, alpha=0.55, label=label)
            axes.axvline(1, color="black", lw=0.8, ls=":")
            axes.set_ylabel("fields")
            axes.set_title(f"{kind.name}", loc="left", fontsize=9)
        figure.legend(loc="outside lower center", ncols=len(resolutions))
        panels[-1].set(xscale="log", xlabel="variance of an output field for white input of variance 1 (dotted)")
        title = f"one layer, {modes} modes, {SAMPLES * CHANNELS} output fields of one draw of the weights; white input"
        figure.suptitle(f"{title}\n({remark})", fontsize=9)
    return figure
