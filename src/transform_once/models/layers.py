"""The parts of T1. Inside a model the kept modes are `(channels, modes, batch)`: then everything is a matrix product.

Lift and head are one product over all modes and samples, the channel matrices one batched product over the modes, and
each mixing one batched product over the channels; the batch, last in memory, makes every one of them wide.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from transform_once import kernels
from transform_once.spectral.initialization import diagonal_variance
from transform_once.spectral.transforms import Modes, Transform

# Above this many modes a dense mixing of an arbitrary set would outgrow the model; it gets this rank instead.
DENSE_MODES, RANK = 4096, 256

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": nn.functional.gelu, "sine": torch.sin}


def to_state(X: Tensor) -> Tensor:
    """Modes (batch, channels, *kept), real or complex, to the state (channels, modes, batch) of real numbers.

    A complex channel becomes two real ones, its real and its imaginary part.
    """
    if X.is_complex():
        X = torch.view_as_real(X).movedim(-1, 2).flatten(1, 2)
    return X.flatten(2).permute(1, 2, 0)


def from_state(Z: Tensor, kept_shape: Sequence[int], is_complex: bool) -> Tensor:
    """The inverse of `to_state`."""
    X = Z.permute(2, 0, 1).unflatten(2, tuple(kept_shape))
    if is_complex:
        X = X if X.dtype in (torch.float32, torch.float64) else X.float()  # there are no complex numbers of bfloat16
        return torch.complex(X[:, 0::2].contiguous(), X[:, 1::2].contiguous())
    return X


class Lift(nn.Module):
    """A pointwise affine map of fields and coordinates to `width` channels, done in k-space, with which it commutes.

    The coordinates (0 to 1 along each axis) and the constant 1 have fixed spectra on the training grid, so nothing but
    the input itself is ever transformed. Parameters: (in_channels + axes)·width + width.
    """

    coordinates: Tensor

    def __init__(
        self,
        in_channels: int,
        width: int,
        resolution: Sequence[int],
        modes: Modes,
        transform: Transform,
        coordinates: bool,
    ) -> None:
        super().__init__()
        ndim = len(resolution)
        lines = [torch.linspace(0, 1, n, dtype=torch.float64) for n in resolution] if coordinates else []
        grids = [*torch.meshgrid(*lines, indexing="ij")] if lines else []
        fields = torch.stack([*grids, torch.ones(*resolution, dtype=torch.float64)])
        spectra = to_state(transform.forward(fields[None], ndim, modes))[..., 0]
        # Of a complex spectrum the constant 1 has the real part alone.
        spectra = spectra[:-1] if transform.is_complex else spectra
        self.register_buffer("coordinates", spectra.to(torch.get_default_dtype()), persistent=False)
        self.in_channels = in_channels * (1 + transform.is_complex)
        inputs = self.in_channels + len(spectra) - 1
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(width, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound))

    def forward(self, X: Tensor) -> Tensor:
        """(in_channels, modes, batch) to (width, modes, batch)."""
        if kernels.can_run(X, self.weight):
            from transform_once.kernels import lift

            if lift.fits(X, self.coordinates, self.weight):
                return lift.fused_lift(X, self.coordinates, self.weight, self.bias)
        of_input, of_coordinates = self.weight.split([self.in_channels, self.weight.shape[1] - self.in_channels], 1)
        constant = torch.cat([of_coordinates, self.bias[:, None]], 1) @ self.coordinates
        return (of_input @ X.flatten(1)).unflatten(1, X.shape[1:]) + constant[..., None]


class AxisMixing(nn.Module):
    """Per channel a dense m×m matrix along each axis of a block of modes, one axis after the other."""

    def __init__(self, width: int, block: Sequence[int]) -> None:
        super().__init__()
        self.block = tuple(block)
        self.weights = nn.ParameterList(torch.randn(width, m, m) / math.sqrt(m) for m in block)

    def forward(self, Z: Tensor) -> Tensor:
        """State (width, modes, batch) to the same."""
        Z = Z.unflatten(1, self.block)
        for axis, weight in enumerate(self.weights, start=1):
            Z = Z.movedim(axis, 1)
            Z = torch.bmm(weight, Z.flatten(2)).unflatten(2, Z.shape[2:]).movedim(1, axis)
        return Z.flatten(1, -2)


class SetMixing(nn.Module):
    """One mixing of any set of M modes, shared by all channels: dense, or of low rank where that would be too large."""

    def __init__(self, count: int) -> None:
        super().__init__()
        shapes = [(count, count)] if count <= DENSE_MODES else [(RANK, count), (count, RANK)]
        self.weights = nn.ParameterList(torch.randn(shape) / math.sqrt(shape[1]) for shape in shapes)

    def forward(self, Z: Tensor) -> Tensor:
        """State (width, modes, batch) to the same."""
        Z = Z.transpose(0, 1)
        rest = Z.shape[1:]
        Z = Z.flatten(1)
        for weight in self.weights:
            Z = weight @ Z
        return Z.unflatten(1, rest).transpose(0, 1)


class T1Layer(nn.Module):
    """z ← z + mixing(activation(W_k z_k)): a channel matrix per mode, an activation, and a mixing of the modes.

    Without the mixing a layer acts on each mode alone and could not even shift a field. `block` is the shape of the
    kept block, or (M,) with `is_set` for an arbitrary set. `branch` scales the mixing at the start: small branches make
    deep stacks train. Parameters: w²∏mᵢ + wΣmᵢ² for a block.
    """

    def __init__(
        self, width: int, block: Sequence[int], is_set: bool = False, activation: str = "gelu", branch: float = 1.0
    ) -> None:
        super().__init__()
        self.width, self.activation = width, ACTIVATIONS[activation]
        count = math.prod(block)
        self.weight = nn.Parameter(torch.empty(count, width, width))
        self.mixing: AxisMixing | SetMixing = SetMixing(count) if is_set else AxisMixing(width, block)
        with torch.no_grad():
            self.mixing.weights[-1].mul_(branch)
        self.initialize("kaiming")

    def forward(self, Z: Tensor) -> Tensor:
        """State (width, modes, batch) to the same."""
        if kernels.can_run(Z, self.weight):
            from transform_once.kernels import layer

            if isinstance(self.mixing, AxisMixing) and layer.fits(Z, self.weight, self.mixing.weights):
                return layer.fused_layer(Z, self.activation is torch.sin, self.weight, self.mixing.weights)
            if Z.shape[2] == 1 and kernels.pays(self.weight.numel()):
                return Z + self.mixing(self.activation(layer.single_product(Z, self.weight)))
        if torch.compiler.is_compiling():
            return Z + self.mixing(self.activation(torch.bmm(self.weight, Z.transpose(0, 1))).transpose(0, 1))
        if Z.shape[2] == 1:  # row times matrix is faster than matrix times column, and lies in a row for what follows
            branch = torch.bmm(Z.permute(1, 2, 0), self.weight.mT).permute(2, 0, 1).contiguous()
            return Z + self.mixing(self.activation(branch))
        branch = self.activation(torch.bmm(self.weight, Z.transpose(0, 1)))
        if branch.requires_grad:  # the product with the gradient is twice as fast where that lies in a row
            branch.register_hook(Tensor.contiguous)
        return Z + self.mixing(branch.transpose(0, 1))

    @torch.no_grad()
    def initialize(self, scheme: str) -> None:
        """Draw the channel matrices: "xavier" N(0, 1/c) or "kaiming" N(0, 2/c)."""
        self.weight.normal_(0, math.sqrt((2 if scheme == "kaiming" else 1) / self.width))

    @torch.no_grad()
    def vp_init_(self, resolution: Sequence[int], generator: torch.Generator | None = None) -> None:
        """Draw the channel matrices variance-preserving for white fields on a grid of `resolution` points."""
        variance = diagonal_variance(resolution, len(self.weight), self.width)
        self.weight.normal_(0, math.sqrt(variance), generator=generator)
