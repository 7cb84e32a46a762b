"""Orthonormal transforms over the last axes of a field, truncated to the lowest modes.

A truncated transform is a matrix product: one real product per axis, with a matrix of as many rows as modes are kept.
Only the kept modes are ever computed, the result is differentiable, and the product runs under `torch.compile`, `vmap`,
CUDA graphs and ONNX. It runs in the dtype of the field, also inside an autocast region, because targets and tails that
are rounded to bfloat16 shift measured errors. An axis too long for a matrix goes through an FFT instead.

| name      | sees samples at     | `modes=m` keeps along an axis                                                  |
|-----------|---------------------|--------------------------------------------------------------------------------|
| "dct"     | cells, x = (i+½)/N  | the m lowest half-waves cos(πkx), k < m                                        |
| "dst"     | cells, x = (i+½)/N  | the m lowest half-waves sin(πkx), 1 ≤ k ≤ m: zero at both ends                 |
| "fourier" | nodes, x = i/N      | the m lowest of 1, cos 2πx, sin 2πx, …, rounded down to odd: no pair is split  |
| "dft"     | nodes, x = i/N      | wave numbers −m ≤ k < m (last axis: 0 ≤ k < m), complex, in the layout of rfft |

Transforms with different meanings of `modes` are compared at equal numbers of real coefficients.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from transform_once import kernels
from transform_once.spectral import ffts
from transform_once.spectral.bases import matrix, wave_numbers
from transform_once.spectral.precision import in_full

# An axis whose matrix would have more entries than this goes through an FFT: between what suits a CPU (less) and a GPU
# (more), see benchmarks/transforms.py.
MATRIX_ENTRIES = 2**21


@runtime_checkable
class Selection(Protocol):
    """Kept modes that know how to pick themselves out of a spectrum (see `transform_once.spectral.modes.ModeSet`)."""

    @property
    def transform(self) -> str:
        """Name of the transform whose modes these are."""

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of the smallest block of lowest modes that holds them."""

    def select(self, spectrum: Tensor) -> Tensor:
        """Kept modes out of a spectrum."""

    def scatter(self, kept: Tensor) -> Tensor:
        """Kept modes back into the smallest low-pass block that holds them."""


@runtime_checkable
class Lowest(Protocol):
    """The lowest modes of each axis, said in words (see `transform_once.spectral.modes.LowPass`)."""

    @property
    def modes(self) -> int | tuple[int, ...]:
        """An int, or one per axis."""


Modes = int | Sequence[int] | Lowest | Selection


def dct(x: Tensor, ndim: int, modes: Modes | None = None) -> Tensor:
    """Orthonormal DCT-II over the last `ndim` axes: X_k = √((2−δ_k0)/N) Σ_n x_n cos(πk(n+½)/N) along each.

    `modes` keeps the lowest of each axis (an int, or one per axis) and computes only those; None keeps all.
    """
    return get_transform("dct").forward(x, ndim, modes)


def idct(X: Tensor, ndim: int, size: int | Sequence[int] | None = None, modes: Modes | None = None) -> Tensor:
    """Inverse of `dct` on a grid of `size` points an axis; modes that `X` does not hold are zero.

    The basis is orthonormal at every size. To move a field to another grid multiply by √(N′/N), N the number of points.
    """
    return get_transform("dct").inverse(X, ndim, size, modes)


def get_transform(name: str) -> "Transform":
    """The transform of that name.

    "dct" and "dst" (real, on cells; sines for fields that are zero at the walls), "fourier" (real, on periodic nodes)
    or "dft" (complex).
    """
    if name not in _TRANSFORMS:
        raise ValueError(f"expected one of the transforms {', '.join(_TRANSFORMS)}; got {name!r}")
    return _TRANSFORMS[name]


class Transform(ABC):
    """An orthonormal transform; `forward` and `inverse` act on the last `ndim` axes, one to three, of any sizes."""

    name: str
    is_complex = False

    def forward(self, x: Tensor, ndim: int, modes: Modes | None = None) -> Tensor:
        """Kept modes of the real field `x` (..., *grid); `modes`: an int, one per axis, a ModeSet, or None for all."""
        _check_axes(x, ndim)
        if x.is_complex() or not x.is_floating_point():
            raise TypeError(
                f"the {self.name} transform expects a real floating-point field; got {x.dtype}: use x.float()"
            )
        block = self.block(modes, tuple(x.shape[-ndim:]))
        with in_full(x):
            X = self._analyse(x, ndim, block)
        return modes.select(X) if isinstance(modes, Selection) else X

    def inverse(
        self, X: Tensor, ndim: int, size: int | Sequence[int] | None = None, modes: Modes | None = None
    ) -> Tensor:
        """Field on a grid of `size` points from the modes `X`; those that `X` does not hold are zero.

        `size` defaults to the grid that has just these modes. A `ModeSet` that selected `X` is given as `modes`.
        """
        if isinstance(modes, Selection):
            _check_set(modes, self.name, ndim)
            X = modes.scatter(X)
        _check_axes(X, ndim)
        if X.is_complex() != self.is_complex or not (X.is_complex() or X.is_floating_point()):
            wanted = "complex" if self.is_complex else "real floating-point"
            raise TypeError(f"the inverse {self.name} transform expects {wanted} modes; got {X.dtype}")
        held = tuple(X.shape[-ndim:])
        grid = self._default_size(held) if size is None else _per_axis(size, ndim, "size")
        self._check_size(held, grid)
        with in_full(X):
            return self._synthesise(X, ndim, grid)

    def block(self, modes: Modes | None, size: Sequence[int]) -> tuple[int, ...]:
        """Shape of the block of lowest modes kept on a grid of `size` points; for a ModeSet the block that holds it."""
        if modes is None:
            return self._full(tuple(size))
        if isinstance(modes, Selection):
            _check_set(modes, self.name, len(size))
            self._check_size(modes.block, tuple(size))
            return modes.block
        wanted = _per_axis(modes.modes if isinstance(modes, Lowest) else modes, len(size), "modes")
        axes = range(len(size))
        for axis, limit in zip(axes, self.max_modes(size), strict=True):
            if not 1 <= wanted[axis] <= limit:
                raise ValueError(
                    f"modes must lie between 1 and {limit} on axis {axis} of a grid of {size[axis]} points "
                    f"for the {self.name} transform; got {wanted[axis]}"
                )
        return tuple(self._held(wanted[axis], size[axis], last=axis == len(size) - 1) for axis in axes)

    def reach(self, size: Sequence[int]) -> tuple[Tensor, ...]:
        """For each axis, the smallest `modes` that keeps each coefficient of the full spectrum."""
        return tuple(torch.from_numpy(self._reach(n, last=axis == len(size) - 1)) for axis, n in enumerate(size))

    def max_modes(self, size: Sequence[int]) -> tuple[int, ...]:
        """The largest `modes` a grid of `size` points allows on each axis."""
        return tuple(size)

    def energy(self, X: Tensor, ndim: int, size: Sequence[int]) -> Tensor:
        """Energy of each coefficient, such that the sum over all of them is ‖x‖² (Parseval)."""
        return X.square()

    @abstractmethod
    def numbers(self, size: Sequence[int]) -> Tensor:
        """Multi-index (..., ndim) of each coefficient of the full spectrum; it names the same mode on every grid."""

    @abstractmethod
    def _full(self, size: tuple[int, ...]) -> tuple[int, ...]: ...

    @abstractmethod
    def _held(self, modes: int, n: int, last: bool) -> int: ...

    @abstractmethod
    def _reach(self, n: int, last: bool) -> np.ndarray: ...

    @abstractmethod
    def _default_size(self, held: tuple[int, ...]) -> tuple[int, ...]: ...

    @abstractmethod
    def _check_size(self, held: tuple[int, ...], grid: tuple[int, ...]) -> None: ...

    @abstractmethod
    def _analyse(self, x: Tensor, ndim: int, block: tuple[int, ...]) -> Tensor: ...

    @abstractmethod
    def _synthesise(self, X: Tensor, ndim: int, grid: tuple[int, ...]) -> Tensor: ...


class _RealTransform(Transform):
    """A real orthonormal basis given by its rows; the same along every axis."""

    @abstractmethod
    def _fft(self, x: Tensor, m: int) -> Tensor: ...

    @abstractmethod
    def _ifft(self, X: Tensor, n: int) -> Tensor: ...

    def numbers(self, size: Sequence[int]) -> Tensor:
        return torch.cartesian_prod(*map(torch.arange, size)).reshape(*size, len(size))

    def _full(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return size

    def _default_size(self, held: tuple[int, ...]) -> tuple[int, ...]:
        return held

    def _check_size(self, held: tuple[int, ...], grid: tuple[int, ...]) -> None:
        if any(n < m for n, m in zip(grid, held, strict=True)):
            raise ValueError(f"expected a grid of at least {held} points, one for each kept mode; got {grid}")

    def _analyse(self, x: Tensor, ndim: int, block: tuple[int, ...]) -> Tensor:
        for axis in _order(x, ndim):
            n, m = x.shape[axis], block[axis]
            if n * m > MATRIX_ENTRIES:
                x = self._fft(x.movedim(axis, -1), m).movedim(-1, axis)
            else:
                x = _along(matrix(self.name, n, m, x.dtype, x.device), x, axis)
        return x

    def _synthesise(self, X: Tensor, ndim: int, grid: tuple[int, ...]) -> Tensor:
        for axis in reversed(_order(X, ndim)):
            n, m = grid[axis], X.shape[axis]
            if n * m > MATRIX_ENTRIES:
                X = self._ifft(X.movedim(axis, -1), n).movedim(-1, axis)
            else:
                X = _along(matrix(self.name, n, m, X.dtype, X.device).T, X, axis)
        return X


class _Cosine(_RealTransform):
    name = "dct"

    def _held(self, modes: int, n: int, last: bool) -> int:
        return modes

    def _reach(self, n: int, last: bool) -> np.ndarray:
        return np.arange(1, n + 1)

    def _fft(self, x: Tensor, m: int) -> Tensor:
        return ffts.cosines(x, m)

    def _ifft(self, X: Tensor, n: int) -> Tensor:
        return ffts.of_cosines(X, n)


class _Sine(_Cosine):
    name = "dst"

    def numbers(self, size: Sequence[int]) -> Tensor:
        return super().numbers(size) + 1

    def _fft(self, x: Tensor, m: int) -> Tensor:
        return ffts.sines(x, m)

    def _ifft(self, X: Tensor, n: int) -> Tensor:
        return ffts.of_sines(X, n)


class _Fourier(_RealTransform):
    name = "fourier"

    def _held(self, modes: int, n: int, last: bool) -> int:
        return n if modes == n else modes - (modes % 2 == 0)

    def _reach(self, n: int, last: bool) -> np.ndarray:
        index = np.arange(n)
        return np.minimum(index + 1 + index % 2, n)

    def _fft(self, x: Tensor, m: int) -> Tensor:
        return ffts.waves(x, m)

    def _ifft(self, X: Tensor, n: int) -> Tensor:
        return ffts.of_waves(X, n)


class _ComplexFourier(Transform):
    """The DFT of a real field in the layout of `torch.fft.rfftn(norm="ortho")`, its lowest wave numbers only.

    Half-precision fields are transformed in float32, since no complex type of their precision is supported everywhere.
    """

    name = "dft"
    is_complex = True

    def max_modes(self, size: Sequence[int]) -> tuple[int, ...]:
        return (*((n + 1) // 2 for n in size[:-1]), size[-1] // 2 + 1)

    def energy(self, X: Tensor, ndim: int, size: Sequence[int]) -> Tensor:
        # Interior columns stand for a conjugate pair.
        return (X.real.square() + X.imag.square()) * matrix("weights", size[-1], X.shape[-1], X.real.dtype, X.device)

    def numbers(self, size: Sequence[int]) -> Tensor:
        rows = [torch.from_numpy(wave_numbers(n)) for n in size[:-1]]
        return torch.cartesian_prod(*rows, torch.arange(size[-1] // 2 + 1)).reshape(*self._full(tuple(size)), len(size))

    def _full(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return (*size[:-1], size[-1] // 2 + 1)

    def _held(self, modes: int, n: int, last: bool) -> int:
        return modes if last else min(2 * modes, n)

    def _reach(self, n: int, last: bool) -> np.ndarray:
        if last:
            return np.arange(1, n // 2 + 2)
        k = wave_numbers(n)
        return np.where(k < 0, -k, k + 1)

    def _default_size(self, held: tuple[int, ...]) -> tuple[int, ...]:
        return (*held[:-1], max(2 * (held[-1] - 1), 1))

    def _check_size(self, held: tuple[int, ...], grid: tuple[int, ...]) -> None:
        if any(n < m for n, m in zip(self._full(grid), held, strict=True)):
            raise ValueError(f"expected a grid whose rfft has at least the kept modes {held}; got {grid} points")

    def _analyse(self, x: Tensor, ndim: int, block: tuple[int, ...]) -> Tensor:
        x = ffts.at_least_float32(x)
        n, m = x.shape[-1], block[-1]
        if 2 * n * m > MATRIX_ENTRIES:
            X = torch.fft.rfft(x, norm="ortho")[..., :m]
        else:
            pairs = x @ matrix("dft last", n, m, x.dtype, x.device).T
            X = torch.view_as_complex(pairs.unflatten(-1, (m, 2)).contiguous())
        for axis in range(-2, -ndim - 1, -1):
            n, m = X.shape[axis], block[axis]
            if n * m > MATRIX_ENTRIES:
                kept = torch.from_numpy(wave_numbers(m) % n).to(x.device)
                X = torch.fft.fft(X, dim=axis, norm="ortho").index_select(axis, kept)
            else:
                X = _along(matrix("dft", n, m, X.dtype, X.device), X, axis)
        return X

    def _synthesise(self, X: Tensor, ndim: int, grid: tuple[int, ...]) -> Tensor:
        for axis in range(-ndim, -1):
            n, m = grid[axis], X.shape[axis]
            if n * m > MATRIX_ENTRIES:
                padded = X.new_zeros(*X.shape[:axis], n, *X.shape[X.ndim + axis + 1 :])
                kept = torch.from_numpy(wave_numbers(m) % n).to(X.device)
                X = torch.fft.ifft(padded.index_copy(axis, kept, X), dim=axis, norm="ortho")
            else:
                X = _along(matrix("dft", n, m, X.dtype, X.device).mH, X, axis)
        n, m = grid[-1], X.shape[-1]
        if 2 * n * m > MATRIX_ENTRIES:
            return torch.fft.irfft(X, n, norm="ortho")
        rows = matrix("inverse dft last", n, m, X.real.dtype, X.device)
        return torch.view_as_real(X).flatten(-2) @ rows


_TRANSFORMS: dict[str, Transform] = {t.name: t for t in (_Cosine(), _Sine(), _Fourier(), _ComplexFourier())}


def _order(x: Tensor, ndim: int) -> range:
    """Of the axes: first, where the field is still whole, for kernels the last, whose lines lie in a row."""
    return range(-1, -ndim - 1, -1) if _by_kernel(x) else range(-ndim, 0)


def _by_kernel(x: Tensor) -> bool:
    return x.dtype == torch.float32 and kernels.can_run(x) and kernels.pays(x.numel())


def _along(A: Tensor, x: Tensor, axis: int) -> Tensor:
    """Product of the matrix `A` with `x` along one of its last three axes."""
    if _by_kernel(x):
        from transform_once.kernels.transform import along

        return along(A, x, axis)
    if axis == -1:
        return x @ A.T
    if axis == -2:
        return A @ x
    return (A @ x.flatten(axis + 1)).unflatten(-1, x.shape[axis + 1 :])


def _check_axes(x: Tensor, ndim: int) -> None:
    if ndim not in (1, 2, 3):
        raise ValueError(f"ndim must be 1, 2 or 3, the number of grid axes; got {ndim!r}")
    if x.ndim < ndim:
        raise ValueError(f"expected a tensor with at least {ndim} axes, (..., *grid); got shape {tuple(x.shape)}")


def _check_set(modes: Selection, name: str, ndim: int) -> None:
    if modes.transform != name or len(modes.block) != ndim:
        raise ValueError(
            f"expected modes chosen for the {name} transform on {ndim} axes; "
            f"got modes of the {modes.transform} transform on {len(modes.block)}"
        )


def _per_axis(value: int | Sequence[int], ndim: int, what: str) -> tuple[int, ...]:
    """One integer per axis from an int or a sequence."""
    numbers = tuple(value) if isinstance(value, Sequence) else (value,) * ndim
    if not all(isinstance(number, int | np.integer) for number in numbers):
        raise TypeError(f"{what} must be an int or one int per axis; got {value!r}")
    if len(numbers) != ndim:
        raise ValueError(f"{what} must be an int or {ndim} ints, one per axis; got {len(numbers)}: {numbers}")
    return tuple(map(int, numbers))
