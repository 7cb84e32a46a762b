"""What all models share: shapes checked at the boundary, normalisation, one transform in and one out, save and load."""

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from transform_once.files import atomic_path
from transform_once.spectral.modes import ModeSet
from transform_once.spectral.precision import autocast_dtype
from transform_once.spectral.transforms import Modes, get_transform

# One key of a weights file's metadata holds everything: several would be written in random order.
METADATA = "transform_once_model"

INITS = ("vp", "xavier", "kaiming")


@dataclass(frozen=True)
class Dynamics:
    """How a model steps in time: its input channels are the frames x_{t−history}, …, x_t, oldest first.

    order 0: x_{t+1} = f;   order 1: x_{t+1} = x_t + f;   order 2 (Störmer-Verlet): x_{t+1} = 2x_t − x_{t−1} + f.
    """

    order: int = 1
    history: int = 0

    def __post_init__(self) -> None:
        if self.order not in (0, 1, 2):
            raise ValueError(f"the order of an integrator is 0, 1 or 2; got {self.order}")
        if self.history < 0:
            raise ValueError(f"history counts the frames before the present one, 0 or more; got {self.history}")

    @property
    def frames(self) -> int:
        """How many frames a rollout starts from: an integrator of order 2 needs two, whatever the model sees."""
        return max(self.history + 1, self.order)


class Operator(nn.Module, ABC):
    """A map from fields (batch, in_channels, *grid) to fields (batch, out_channels, *grid).

    `resolution` is the grid it is trained on. The arguments it was made with are kept as `config`, so that `load` can
    make it again. Frames of history, constants and masks are further input channels.

    With `set_normalization` the model takes and gives fields in physical units and works on normalised ones inside.
    `dynamics`, set by training on trajectories, says how it steps in time; it is saved with the model.
    """

    known: ClassVar[dict[str, type["Operator"]]] = {}
    config: dict[str, Any]
    dynamics: Dynamics | None = None
    input_shift: Tensor | None
    input_scale: Tensor | None
    output_shift: Tensor | None
    output_scale: Tensor | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Operator.known[cls.__name__] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments as `config`."""
        model = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind_partial(model, *args, **kwargs)
        bound.apply_defaults()
        model.__dict__["config"] = {name: value for name, value in bound.arguments.items() if name != "self"}
        return model

    def __init__(self, in_channels: int, out_channels: int, resolution: Sequence[int]) -> None:
        super().__init__()
        if isinstance(resolution, int):
            raise ValueError(f"resolution must be one length for each axis, such as ({resolution},); got {resolution}")
        if not 1 <= len(resolution) <= 3 or min(resolution) < 1:
            raise ValueError(f"resolution must be one to three axis lengths of at least 1; got {tuple(resolution)}")
        for name in ("width", "depth"):
            if self.config.get(name, 1) < 1:
                raise ValueError(f"{name} must be at least 1; got {self.config[name]}")
        if min(in_channels, out_channels) < 1:
            raise ValueError(f"in_channels and out_channels must be at least 1; got {in_channels} and {out_channels}")
        self.in_channels, self.out_channels, self.resolution = in_channels, out_channels, tuple(resolution)
        for name in ("input_shift", "input_scale", "output_shift", "output_scale"):
            self.register_buffer(name, None)

    @property
    def ndim(self) -> int:
        """Number of grid axes."""
        return len(self.resolution)

    def set_normalization(
        self, input_shift: Tensor, input_scale: Tensor, output_shift: Tensor, output_scale: Tensor
    ) -> None:
        """Keep the affine map per channel: the model sees (x − shift)/scale and gives back ŷ·scale + shift."""
        for name, values, channels in (
            ("input_shift", input_shift, self.in_channels),
            ("input_scale", input_scale, self.in_channels),
            ("output_shift", output_shift, self.out_channels),
            ("output_scale", output_scale, self.out_channels),
        ):
            if tuple(values.shape) != (channels,) or not torch.isfinite(values).all():
                raise ValueError(f"{name} must hold {channels} finite numbers, one per channel; got {values.tolist()}")
            if name.endswith("scale") and not (values > 0).all():
                raise ValueError(f"{name} must be positive for every channel; got {values.tolist()}")
            reference = next(self.parameters())
            setattr(self, name, values.to(reference.device, reference.dtype))

    def _normalize(self, x: Tensor) -> Tensor:
        if self.input_shift is None or self.input_scale is None:
            return x
        return (x - self._per_channel(self.input_shift)) / self._per_channel(self.input_scale)

    def _denormalize(self, y: Tensor) -> Tensor:
        if self.output_shift is None or self.output_scale is None:
            return y
        return y * self._per_channel(self.output_scale) + self._per_channel(self.output_shift)

    def _per_channel(self, values: Tensor) -> Tensor:
        return values.reshape(-1, *(1,) * self.ndim)

    def _check(self, x: Tensor) -> None:
        if x.ndim != 2 + self.ndim or x.shape[1] != self.in_channels:
            axes = ", ".join(["batch", str(self.in_channels), *(["grid"] * self.ndim)])
            raise ValueError(f"{type(self).__name__} expects fields of shape ({axes}); got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{type(self).__name__} expects real floating-point fields; got {x.dtype}: use x.float()")
        own = next((p.dtype for p in self.parameters()), x.dtype)
        if x.dtype != own and autocast_dtype(x) is None:
            names = [str(dtype).removeprefix("torch.") for dtype in (own, x.dtype)]
            raise TypeError(
                f"{type(self).__name__} has weights in {names[0]} and expects such fields; got {names[1]}: "
                f"use x.to(torch.{names[0]}) or model.to(torch.{names[1]})"
            )


class SpectralOperator(Operator):
    """A model that transforms once: forward = inverse ∘ `kspace` ∘ transform. An author writes `kspace` only.

    `kspace` maps kept modes (batch, in_channels, *block) to kept modes (batch, out_channels, *block), for a `ModeSet`
    (batch, channels, M): all that training runs. It is written for the grid `resolution`; at another resolution of N′
    points for N, the spectrum is divided by √(N′/N) going in and multiplied coming out, which is exact for fields on
    cells with the dct and on nodes with fourier. `out_resolution` is the output's grid where it is not the input's,
    `out_transform` its basis: "dst", beside the dct, for outputs that are zero at the walls, and then are so exactly.

    `memory` (lags, out_channels), set by training on trajectories, says how much of what the last known frame has
    outside the kept modes the frames of a rollout still have there; None: nothing.
    """

    memory: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        modes: Modes,
        transform: str = "dct",
        out_resolution: Sequence[int] | None = None,
        out_transform: str | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, resolution)
        self.modes, self.transform = modes, get_transform(transform)
        self.out_transform = get_transform(out_transform or transform)
        if self.out_transform is not self.transform and (transform, out_transform) != ("dct", "dst"):
            raise ValueError(
                f"the basis of the output is the input's, or dst for dct; got {out_transform}, {transform}"
            )
        if transform == "dst" or (self.out_transform is not self.transform and isinstance(modes, ModeSet)):
            raise ValueError("the dst is for outputs: use transform='dct' with out_transform='dst', and modes as ints")
        self.out_resolution = tuple(out_resolution or resolution)
        if len(self.out_resolution) != self.ndim:
            raise ValueError(f"out_resolution must have {self.ndim} axes, as resolution has; got {self.out_resolution}")
        self.block = self.transform.block(modes, self.resolution)
        self.transform.block(modes, self.out_resolution)  # complains where the output's grid cannot hold the modes
        self.kept_shape = (len(modes),) if isinstance(modes, ModeSet) else self.block
        self.register_buffer("memory", None)

    @abstractmethod
    def kspace(self, X: Tensor) -> Tensor:
        """Kept modes of normalised inputs to kept modes of normalised outputs."""

    def forward(self, x: Tensor, size: int | Sequence[int] | None = None) -> Tensor:
        """Fields to fields, on a grid of `size` points; by default the input's (in proportion to `out_resolution`)."""
        self._check(x)
        y = self._transform_once(self._normalize(x), self.kspace, size)
        return self._denormalize(y)

    def _transform_once(
        self, x: Tensor, kspace: Callable[[Tensor], Tensor], size: int | Sequence[int] | None
    ) -> Tensor:
        grid = tuple(x.shape[2:])
        X = self.transform.forward(x, self.ndim, self.modes)
        if grid != self.resolution:
            X = X / math.sqrt(math.prod(grid) / math.prod(self.resolution))
        Y = kspace(X)
        Y = Y.to(X.dtype)  # under autocast the model may work in bfloat16; the way back does not
        out = self._output_grid(grid, size)
        if out != self.out_resolution:
            Y = Y * math.sqrt(math.prod(out) / math.prod(self.out_resolution))
        return self.out_transform.inverse(Y, self.ndim, out, self.modes)

    def _output_grid(self, grid: tuple[int, ...], size: int | Sequence[int] | None) -> tuple[int, ...]:
        if size is not None:
            return (size,) * self.ndim if isinstance(size, int) else tuple(size)
        pairs = zip(grid, self.out_resolution, self.resolution, strict=True)
        return tuple(round(n * out / own) for n, out, own in pairs)

    def _check_modes(self, X: Tensor) -> None:
        if tuple(X.shape[1:]) != (self.in_channels, *self.kept_shape) or X.is_complex() != self.transform.is_complex:
            axes = ", ".join(map(str, ["batch", self.in_channels, *self.kept_shape]))
            kind = "complex" if self.transform.is_complex else "real"
            raise ValueError(f"kspace expects {kind} modes of shape ({axes}); got {X.dtype} of {tuple(X.shape)}")


def check_choice(value: Any, choices: Collection[Any], what: str) -> None:
    """Complain about a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def save(model: Operator, path: str | Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write weights, buffers and configuration to one `.safetensors` file; `tensors` replace the model's own."""
    custom = [name for name, value in model.config.items() if isinstance(value, nn.Module)]
    config = {name: _to_json(value) for name, value in model.config.items() if name not in custom}
    dynamics = None if model.dynamics is None else asdict(model.dynamics)
    description = {"class": type(model).__name__, "config": config, "modules": custom, "dynamics": dynamics}
    weights = model.state_dict() if tensors is None else tensors
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {METADATA: json.dumps(description)})


def load(path: str | Path, **modules: nn.Module) -> Operator:
    """Make the model that `save` wrote, on the CPU. A module given by hand (`body=`) must be given again.

    All tensors keep their dtypes. Nothing but tensors and text is read from the file: no code can hide in it.
    """
    import transform_once.models  # noqa: F401  makes every class known

    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: give the file of weights in it, such as {path}/model.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"expected a model written by save; cannot read {path}: {error}") from None
    if description.get("class") not in Operator.known:
        raise ValueError(f"expected a model written by save; {path} holds something else")
    wanted = description["modules"]
    if sorted(wanted) != sorted(modules):
        given = ", ".join(modules) or "none"
        raise ValueError(f"{path} was saved with the modules {', '.join(wanted) or 'none'} given by hand; got {given}")
    config = {name: _from_json(value) for name, value in description["config"].items()}
    make: Callable[..., Operator] = Operator.known[description["class"]]
    known = inspect.signature(Operator.known[description["class"]].__init__).parameters.keys() - {"self"}
    differ = known ^ (config.keys() | modules.keys())
    if differ:  # a default would stand for what the file does not say
        raise ValueError(
            f"{path} was saved by another version of transform_once, whose {description['class']} differs in "
            f"{', '.join(sorted(differ))}: use that version, or train again"
        )
    model = make(**config, **modules)
    for name in ("input_shift", "input_scale", "output_shift", "output_scale", "memory"):
        if name in tensors:
            setattr(model, name, torch.empty_like(tensors[name]))
    _match_dtypes(model, tensors)
    load_weights(model, tensors, path)
    if description.get("dynamics"):
        model.dynamics = Dynamics(**description["dynamics"])
    return model


def load_weights(model: nn.Module, tensors: dict[str, Tensor], source: object) -> None:
    """Fill the model with these tensors, or complain in one sentence and leave it as it is."""
    own = model.state_dict()
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if missing or foreign or shapes:
        name = (missing + foreign + sorted(shapes))[0]
        raise ValueError(
            f"the weights in {source} are not of this {type(model).__name__}: {len(missing)} tensors are missing, "
            f"{len(foreign)} unknown and {len(shapes)} of another shape, such as {name}"
        )
    model.load_state_dict(tensors)


def _match_dtypes(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Bring the model to the dtypes of these tensors; its other buffers get that of its first real parameter."""
    for name, own in model.state_dict(keep_vars=True).items():
        if name in tensors:
            own.data = own.data.to(tensors[name].dtype)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for name, buffer in model.named_buffers():
        if name not in tensors and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _to_json(value: Any) -> Any:
    if isinstance(value, ModeSet):
        return {"indices": value.indices.tolist(), "block": value.block, "transform": value.transform}
    modes = getattr(value, "modes", None)  # LowPass(24) is what 24 means
    value = value if modes is None else modes
    if isinstance(value, tuple | list):
        return [_to_json(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return ModeSet(torch.tensor(value["indices"]), tuple(value["block"]), value["transform"])
    return tuple(value) if isinstance(value, list) else value
