"""The real transforms of the last axis through FFTs, for axes that are too long for a matrix.

Forward the m lowest modes of all n, back a line of n points from as many modes as there are; orthonormal, and computed
in float32 at least.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from transform_once.spectral.bases import matrix


def cosines(x: Tensor, m: int) -> Tensor:
    """DCT-II: even samples forward, odd ones backward; it is the real part of their turned DFT."""
    n, dtype = x.shape[-1], x.dtype
    x = at_least_float32(x)
    V = torch.fft.fft(torch.cat((x[..., 0::2], x[..., 1::2].flip(-1)), -1), norm="ortho")[..., :m]
    turn = matrix("turn", n, m, x.dtype, x.device)
    return (V.real * turn[0] - V.imag * turn[1]).to(dtype)


def of_cosines(X: Tensor, n: int) -> Tensor:
    """The inverse of `cosines`."""
    dtype = X.dtype
    X = pad(at_least_float32(X), (0, n - X.shape[-1]))
    turn = matrix("turn", n, n, X.dtype, X.device)
    v = torch.fft.ifft(torch.complex(X * turn[0], -X * turn[1]), norm="ortho").real
    i = torch.arange(n, device=X.device)
    return v.index_select(-1, torch.where(i % 2 == 0, i // 2, n - 1 - i // 2)).to(dtype)


def sines(x: Tensor, m: int) -> Tensor:
    """DST-II: with every second sample turned round, its modes are those of the DCT from the highest down."""
    return cosines(_alternated(x), x.shape[-1]).flip(-1)[..., :m]


def of_sines(X: Tensor, n: int) -> Tensor:
    """The inverse of `sines`."""
    return _alternated(of_cosines(pad(X, (0, n - X.shape[-1])).flip(-1), n))


def waves(x: Tensor, m: int) -> Tensor:
    """The constant, then pairs of cosine and sine, then the Nyquist wave where there is one."""
    n, dtype = x.shape[-1], x.dtype
    F = torch.fft.rfft(at_least_float32(x), norm="ortho")
    pairs = math.sqrt(2) * torch.stack((F.real, -F.imag), -1)[..., 1 : (n + 1) // 2, :].flatten(-2)
    nyquist = [F.real[..., -1:]] if n % 2 == 0 else []
    return torch.cat([F.real[..., :1], pairs, *nyquist], -1)[..., :m].to(dtype)


def of_waves(X: Tensor, n: int) -> Tensor:
    """The inverse of `waves`."""
    dtype = X.dtype
    X = pad(at_least_float32(X), (0, n - X.shape[-1]))
    pairs = X[..., 1 : 2 * ((n + 1) // 2) - 1].unflatten(-1, (-1, 2)) / math.sqrt(2)
    ends = [X[..., -1:]] if n % 2 == 0 else []
    real = torch.cat([X[..., :1], pairs[..., 0], *ends], -1)
    imaginary = pad(-pairs[..., 1], (1, len(ends)))
    return torch.fft.irfft(torch.complex(real, imaginary), n, norm="ortho").to(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision fields in float32, all others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _alternated(x: Tensor) -> Tensor:
    return x * (1 - 2 * (torch.arange(x.shape[-1], device=x.device) % 2)).to(x.dtype)
