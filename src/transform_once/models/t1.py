"""T1 and T1+: one transform, a network on the kept modes, one transform back."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from transform_once import kernels
from transform_once.models.layers import ACTIVATIONS, Lift, T1Layer, from_state, to_state
from transform_once.models.operator import INITS, SpectralOperator, check_choice
from transform_once.models.unet import UNetBody
from transform_once.spectral.modes import ModeSet
from transform_once.spectral.transforms import Modes

HEAD_WIDTH = 128
# The residual branches start this small: deep stacks then train as well as shallow ones.
BRANCH = 0.1
# The last map of the head starts this small: the first predictions are near zero, not noise.
HEAD_SCALE = 1e-2


class T1(SpectralOperator):
    """Transform, lift, `depth` layers on the kept modes, a head shared by all modes, transform back.

    Args:
        in_channels: Channels of the input fields.
        out_channels: Channels of the output fields.
        resolution: Grid it is trained on; any other works at call time.
        modes: Kept modes: an int or one per axis (low-pass), or a `ModeSet` such as `TopM(576).fit(y)`.
        width: Channels inside. Good values: 32 to 64 in two dimensions.
        depth: Layers. Good values: 4 to 16.
        transform: "dct" (fields on cells), "fourier" (periodic fields on nodes) or "dft" (complex, for comparison).
        init: "vp" (first layer variance-preserving, the others Kaiming), "xavier" or "kaiming".
        activation: "gelu" or "sine", of the layers.
        head_activation: "gelu" or "sine", as in the released research code. A sine of large arguments changes its sign
            with every step: training is then unsteady, most of all in one dimension.
        coordinates: Whether the model sees where it is.
        local: None: training stays wholly in k-space. "pointwise" or "conv" adds small learned maps of the fields
            before and after the transform with a skip between them, which fields with jumps need; "pointwise" moves
            to other resolutions, "conv" (3 wide) less well.
        out_resolution: Grid of the output where it is not the input's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        modes: Modes,
        width: int = 48,
        depth: int = 6,
        *,
        transform: str = "dct",
        init: Literal["vp", "xavier", "kaiming"] = "vp",
        activation: Literal["gelu", "sine"] = "gelu",
        head_activation: Literal["gelu", "sine"] = "gelu",
        coordinates: bool = True,
        local: Literal["pointwise", "conv"] | None = None,
        out_resolution: Sequence[int] | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, resolution, modes, transform, out_resolution)
        check_choice(init, INITS, "init")
        check_choice(activation, ACTIVATIONS, "activation")
        check_choice(head_activation, ACTIVATIONS, "head_activation")
        check_choice(local, (None, *LOCAL_KERNELS), "local")
        if local and self.out_resolution != self.resolution:
            raise ValueError("a local map joins input and output point by point: leave out_resolution at the input's")
        self.local = nn.ModuleList()
        if local:
            periodic = transform != "dct"
            self.local.append(_local_map(in_channels, width, width, local, self.ndim, periodic))
            self.local.append(_local_map(2 * width, width, out_channels, local, self.ndim, periodic))
            in_channels = out_channels = width
        self.lift = Lift(in_channels, width, self.resolution, modes, self.transform, coordinates)
        is_set = isinstance(modes, ModeSet)
        shape = self.kept_shape
        self.layers: Sequence[T1Layer] = nn.ModuleList(  # type: ignore[assignment]
            T1Layer(width, shape, is_set, activation, BRANCH) for _ in range(depth)
        )
        self.head_activation = head_activation
        outputs = out_channels * (1 + self.transform.is_complex)
        self.head = nn.ParameterList(
            [
                torch.randn(HEAD_WIDTH, width) / math.sqrt(width),
                torch.randn(outputs, HEAD_WIDTH) * (HEAD_SCALE / math.sqrt(HEAD_WIDTH)),
            ]
        )
        for layer in self.layers:
            layer.initialize("xavier" if init == "xavier" else "kaiming")
        if init == "vp":
            self.vp_init_(self.resolution)

    def kspace(self, X: Tensor) -> Tensor:
        """Kept modes (batch, in_channels, *block) to kept modes (batch, out_channels, *block)."""
        if self.local:
            raise ValueError("a T1 with a local map works on fields too: train it on fields, or leave local at None")
        self._check_modes(X)
        return self._trunk(X)

    def forward(self, x: Tensor, size: int | Sequence[int] | None = None) -> Tensor:
        """Fields to fields, on a grid of `size` points; by default the input's (in proportion to `out_resolution`)."""
        if not self.local:
            return super().forward(x, size)
        self._check(x)
        if size is not None and self._output_grid((), size) != tuple(x.shape[2:]):
            raise ValueError(f"a local map keeps the input's grid {tuple(x.shape[2:])}; got size {size}")
        v = self.local[0](self._normalize(x))
        u = self._transform_once(v, self._trunk, None)
        return self._denormalize(self.local[1](torch.cat([u, v], 1)))

    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None) -> None:
        """Draw the first layer variance-preserving; on every layer the mean square would grow without bound."""
        self.layers[0].vp_init_(resolution, generator)

    def _trunk(self, X: Tensor) -> Tensor:
        Z = self.lift(to_state(X))
        for layer in self.layers:
            Z = layer(Z)
        return from_state(self._last(Z), self.kept_shape, self.transform.is_complex)

    def _last(self, Z: Tensor) -> Tensor:
        """The head: (width, modes, batch) to (outputs, modes, batch)."""
        inner, outer = self.head
        if kernels.can_run(Z, inner):
            from transform_once.kernels import perceptron

            if perceptron.fits(Z[None], inner, outer):
                sine = self.head_activation == "sine"
                return perceptron.perceptron(Z[None], inner, outer, None, sine, torch.float32)[0]
        hidden = ACTIVATIONS[self.head_activation](inner @ Z.flatten(1))
        return (outer @ hidden).unflatten(1, Z.shape[1:])


class T1Plus(SpectralOperator):
    """T1+: transform, lift to one channel more per axis, one T1 layer, a UNet on the kept block, transform back.

    Args:
        in_channels: Channels of the input fields.
        out_channels: Channels of the output fields.
        resolution: Grid it is trained on, two or three axes; any other works at call time.
        modes: Kept modes, an int or one per axis: the UNet works on a block.
        width: First channel count of the UNet, 2^exponent in the paper: 64 for Navier-Stokes, 32 and 128 elsewhere.
        transform: "dct" or "fourier".
        init: "vp" draws the T1 layer variance-preserving; "xavier" and "kaiming" do not.
        activation: "gelu" or "sine", of the T1 layer.
        out_resolution: Grid of the output where it is not the input's.
        body: Any module from (batch, in_channels + axes, *block) to (batch, out_channels, *block), instead of the UNet.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resolution: Sequence[int],
        modes: int | Sequence[int],
        width: int = 64,
        *,
        transform: str = "dct",
        init: Literal["vp", "xavier", "kaiming"] = "vp",
        activation: Literal["gelu", "sine"] = "gelu",
        out_resolution: Sequence[int] | None = None,
        body: nn.Module | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, resolution, modes, transform, out_resolution)
        check_choice(init, INITS, "init")
        check_choice(activation, ACTIVATIONS, "activation")
        if self.transform.is_complex or isinstance(modes, ModeSet):
            raise ValueError(
                "T1Plus works on a block of real modes: use dct or fourier, and modes as ints, not a ModeSet"
            )
        channels = in_channels + self.ndim
        self.lift = Lift(in_channels, channels, self.resolution, modes, self.transform, coordinates=True)
        self.layer = T1Layer(channels, self.block, activation=activation)
        self.layer.initialize("xavier" if init == "xavier" else "kaiming")
        if body is None:
            body = UNetBody(channels, out_channels, self.block, width)
            body.start_small()
        self.body = body
        if init == "vp":
            self.vp_init_(self.resolution)

    def kspace(self, X: Tensor) -> Tensor:
        """Kept modes (batch, in_channels, *block) to kept modes (batch, out_channels, *block)."""
        self._check_modes(X)
        Z = self.layer(self.lift(to_state(X)))
        Y: Tensor = self.body(from_state(Z, self.block, is_complex=False))
        expected = (X.shape[0], self.out_channels, *self.block)
        if tuple(Y.shape) != expected:
            raise ValueError(f"the body must return modes of shape {expected}; it returned {tuple(Y.shape)}")
        return Y

    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None) -> None:
        """Draw the T1 layer variance-preserving."""
        self.layer.vp_init_(resolution, generator)


LOCAL_KERNELS = {"pointwise": 1, "conv": 3}


def _local_map(inputs: int, width: int, outputs: int, kind: str, ndim: int, periodic: bool) -> nn.Sequential:
    """Two convolutions with a GELU between them; beyond its border a field repeats itself, or its last value."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1]
    kernel = LOCAL_KERNELS[kind]
    padding = {"padding": kernel // 2, "padding_mode": "circular" if periodic else "replicate"} if kernel > 1 else {}
    return nn.Sequential(
        convolution(inputs, width, kernel, **padding),  # type: ignore[arg-type]
        nn.GELU(),
        convolution(width, outputs, kernel, **padding),  # type: ignore[arg-type]
    )
