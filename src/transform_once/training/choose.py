"""Rules that choose a model for data when the user does not: stated in one sentence each, the same for every model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transform_once.data.fields import Fields
from transform_once.evaluation.analysis import Analysis, analyze
from transform_once.evaluation.coherence import coherence
from transform_once.evaluation.rates import sines_for_cosines, targets
from transform_once.models.ffno import FFNO, ReleasedFFNO
from transform_once.models.fno import FNO, ReleasedFNO
from transform_once.models.operator import Operator, SpectralOperator, check_choice
from transform_once.models.t1 import T1, T1Plus
from transform_once.models.t1_grid import T1Grid, grid_points, most_waves
from transform_once.models.unet import UNet
from transform_once.processes import choose_device
from transform_once.spectral.modes import ModeSet, TopM, choose_modes, irreducible_loss
from transform_once.spectral.transforms import get_transform

MODELS: dict[str, type[Operator]] = {
    model.__name__: model for model in (T1, T1Plus, T1Grid, FNO, FFNO, UNet, ReleasedFNO, ReleasedFFNO)
}

SAMPLES = 64  # looked at to choose the modes


@dataclass(frozen=True)
class Reach:
    """How modes are chosen: the fewest that leave `tolerance` of the target, within limits of an axis."""

    tolerance: float
    most: dict[int, int]  # by number of axes


FEWEST = {1: 16, 2: 8, 3: 8}  # modes of an axis, by number of axes
DENSE = Reach(0.01, {1: 256, 2: 48, 3: 12})  # what a dense mixing of the modes can bear, and a CPU
GRID = Reach(0.002, {1: 256, 2: 48, 3: 16})  # of T1Grid on a GPU: its weights do not grow with the modes
PARAMETERS = 20_000_000  # of a T1, which its width is chosen for
WIDTHS = {"T1": 48, "T1Plus": 32, "T1Grid": 32, "FNO": 32, "FFNO": 48, "UNet": 32}
DEPTH = 4
DEEP = 8  # of layers that act on few waves, on a GPU: each of them does less and costs less
FEWEST_WAVES = 2


def choose_model(
    fields: Fields,
    name: str = "T1Grid",
    history: int = 0,
    given: dict[str, Any] | None = None,
    device: str = "auto",
) -> tuple[Operator, list[str]]:
    """A model for these fields, and a sentence for everything that was chosen. `given` are arguments that are not.

    It is left on the CPU; `device` is where it will be trained.

    transform  the basis that needs fewest modes (`analyze`), of level ones that of the declared grid
    modes      the fewest that leave 1% of the target, of an axis at least 16, 8 or 8 in one, two and three dimensions
               and at most 256, 48 or 12; for T1Grid on a GPU 0.2%, at most 256, 48 or 16; for wave numbers (FNO, FFNO)
               half as many as for T1
    width      T1 48, less where it would have more than 20 million parameters; FNO, T1Grid, T1Plus and UNet 32
    out_transform  of T1Grid with the dct on pairs: dst where that needs at most half as many modes, as it does for
               targets that are zero at the walls; the modes are then the fewest of the dst
    waves      of T1Grid in two and three dimensions: those beyond which waves of the target do not follow linearly from
               the same ones of the input (`coherence`), at least 2; where these are more than half, up to 16 or 8
    depth      4; of T1Grid with fewer waves on a GPU 8

    `given["top_modes"]` keeps that many modes of largest energy in one shared set instead of a block.
    """
    check_choice(name, MODELS, "the model's name")
    given, said = dict(given or {}), []
    given = {key: value for key, value in given.items() if value is not None}
    make = MODELS[name]
    accepted, on_gpu = set(make.__init__.__annotations__), choose_device(device).type == "cuda"
    counted = given.pop("top_modes", None)
    for key in given:
        if key not in accepted:
            options = ", ".join(sorted(accepted - {"return", "in_channels", "out_channels", "resolution"}))
            others = [other for other, kind in MODELS.items() if key in kind.__init__.__annotations__]
            raise ValueError(f"{name} has no option {key!r}; it has {options}. {', '.join(others)} would have {key!r}")
    if "transform" in accepted and ("transform" not in given or "modes" not in given) and counted is None:
        said += _choose_modes(fields, given, GRID if make is T1Grid and on_gpu else DENSE, sines=make is T1Grid)
    elif "modes" in accepted and "modes" not in given and counted is None:
        said += _choose_wave_numbers(fields, given)
    if counted is not None:
        said += _choose_top(fields, given, counted, accepted)
    if make is T1Grid and fields.ndim > 1 and not {"waves", "body"} & set(given):
        said += _choose_waves(fields, given, history, on_gpu)
    if "depth" in accepted and "depth" not in given:
        given["depth"] = DEPTH
    if "width" not in given:
        given["width"], sentence = _width(name, fields, given)
        said.append(sentence)
    channels = (history + 1) * fields.in_channels if fields.kind == "trajectories" else fields.in_channels
    model = make(channels, fields.out_channels, fields.resolution, **given)
    if isinstance(model, SpectralOperator) and counted is None and not model.transform.is_complex:
        asked = given["modes"] if isinstance(given["modes"], Sequence) else (given["modes"],) * len(model.kept_shape)
        if tuple(asked) != model.kept_shape:
            kept = "×".join(map(str, model.kept_shape))
            said.append(f"kept modes {kept}: sines and cosines come in pairs, so an even number means one less")
    return model, said


def _choose_transform(fields: Fields, given: dict[str, Any]) -> tuple[Analysis, list[str]]:
    """Set the transform of a model that transforms once; what it was chosen by."""
    found = analyze(fields, tolerance=DENSE.tolerance, samples=min(SAMPLES, len(fields)), progress=False, rates=False)
    if "transform" in given:
        return found, []
    given["transform"] = found.recommendation.transform
    return found, [f"transform {given['transform']}: it needs fewest modes for these fields"]


def _choose_modes(fields: Fields, given: dict[str, Any], reach: Reach = DENSE, sines: bool = False) -> list[str]:
    """Set transform and modes of a model that transforms once; of its output the basis too, where it may be `sines`."""
    found, said = _choose_transform(fields, given)
    if sines and fields.kind == "pairs" and given["transform"] == "dct" and given.get("out_transform", "dst") == "dst":
        said += _choose_sines(fields, given, reach)
    if "modes" not in given:
        basis = found.bases[given["transform"]]
        curve = basis.low_pass[found.judged]
        enough = [number for number, error in enumerate(curve.error) if error <= reach.tolerance]
        box = basis.boxes[enough[0] if enough else -1]
        kept = _within(box, fields, given["transform"], reach)
        given["modes"] = kept[0] if len(set(kept)) == 1 else kept
        inside = [all(x <= y for x, y in zip(other, kept, strict=True)) for other in basis.boxes]
        number = max(0, sum(inside) - 1)  # the boxes grow: the last one that lies in what is kept
        said.append(
            f"modes {' × '.join(map(str, kept))}: dropping the others costs at least "
            f"{100 * curve.with_mean[number]:.2g}% of the target"
        )
    return said


def _choose_sines(fields: Fields, given: dict[str, Any], reach: Reach) -> list[str]:
    """Set the basis of the output, and its modes, where the target is zero at the walls."""
    said = []
    if "out_transform" not in given:
        found = sines_for_cosines(fields)
        if found is None:
            return []
        given["out_transform"] = "dst"
        said = [f"out_transform dst: the target is zero at the walls, {found[0]} sines do for {found[1]} cosines"]
    if "modes" not in given:
        y = targets(fields)
        kept = _within(_per_axis(choose_modes(y, reach.tolerance, "dst"), fields.ndim), fields, "dst", reach)
        given["modes"] = kept[0] if len(set(kept)) == 1 else kept
        lost = 100 * irreducible_loss(y, kept, "dst")
        said.append(f"modes {' × '.join(map(str, kept))}: dropping the others costs at least {lost:.2g}% of the target")
    return said


def _within(box: Sequence[int], fields: Fields, transform: str, reach: Reach) -> tuple[int, ...]:
    """Modes of each axis within what the grid and the model can bear."""
    ndim, most = fields.ndim, get_transform(transform).max_modes(fields.resolution)
    return tuple(
        min(limit, reach.most[ndim], max(FEWEST[ndim], wanted)) for wanted, limit in zip(box, most, strict=True)
    )


def _per_axis(modes: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return modes if isinstance(modes, tuple) else (modes,) * ndim


def _choose_wave_numbers(fields: Fields, given: dict[str, Any]) -> list[str]:
    """Set the modes of a model that counts wave numbers on both sides: half as many as T1 has half-waves."""
    wanted: dict[str, Any] = {}
    _choose_modes(fields, wanted)
    modes = wanted["modes"] if isinstance(wanted["modes"], tuple) else (wanted["modes"],) * fields.ndim
    kept = tuple(min(math.ceil(m / 2), n // 2) for m, n in zip(modes, fields.resolution, strict=True))
    given["modes"] = kept[0] if len(set(kept)) == 1 else kept
    return [f"modes {' × '.join(map(str, kept))}: wave numbers on both sides, the reach of a T1 with {modes[0]} modes"]


def _choose_waves(fields: Fields, given: dict[str, Any], history: int, on_gpu: bool) -> list[str]:
    """Set the waves of T1Grid's layers where half of the most will do, and on a GPU how many layers."""
    if isinstance(given["modes"], ModeSet):
        return []  # T1Grid says what it has against them
    most = most_waves(grid_points(get_transform(given["transform"]).block(given["modes"], fields.resolution)))
    found = coherence(fields, max(most), history)
    wanted = max(FEWEST_WAVES, found.waves()) if found else max(most)
    if 2 * wanted > max(most):
        return []
    waves = tuple(min(wanted, m) for m in most)
    given["waves"] = waves[0] if len(set(waves)) == 1 else waves
    said = [f"waves {wanted}: higher ones of the target do not follow linearly from the same ones of the input"]
    if on_gpu and "depth" not in given:
        given["depth"] = DEEP
        said.append(f"depth {DEEP}: layers that act on few waves see neighbours instead, so it takes more of them")
    return said


def _choose_top(fields: Fields, given: dict[str, Any], count: int, accepted: set[str]) -> list[str]:
    """Set transform and modes, one set of largest energy, by the energies that the analysis summed in one pass."""
    if "transform" not in accepted or "modes" in given:
        raise ValueError("top_modes chooses the modes of a T1: leave modes out, and use it with T1 only")
    found, said = _choose_transform(fields, given)
    energy = found.bases[given["transform"]].energy[found.judged].sum(0)
    given["modes"] = TopM(count).of_energy(energy, fields.resolution, given["transform"])
    return [*said, f"modes: the {count} of largest energy"]


def _width(name: str, fields: Fields, given: dict[str, Any]) -> tuple[int, str]:
    width = WIDTHS.get(name, 32)
    if name != "T1":
        return width, f"width {width}: the usual one"
    modes = given["modes"]
    count = len(modes) if hasattr(modes, "__len__") and not isinstance(modes, tuple) else None
    if count is None:
        count = math.prod(get_transform(given["transform"]).block(modes, fields.resolution))
    bound = math.sqrt(PARAMETERS / (count * given.get("depth", DEPTH)))
    narrow = max(8, 8 * int(bound // 8))
    if narrow < width:
        return narrow, f"width {narrow}: more would have over {PARAMETERS / 1e6:.0f} million parameters"
    return width, f"width {width}: the usual one"
