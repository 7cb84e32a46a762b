"""The matrices behind the transforms, computed in float64 and cached by kind, size, dtype and device."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Matrices are kept until they hold this many bytes together; the least recently used go first.
CACHE_BYTES = 2**28

Sizes = tuple[int, ...]

_cache: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
_cache_lock = threading.Lock()


def matrix(kind: str, n: int | Sizes, m: int | Sizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix of that kind, computed in float64, in that dtype on that device; cached by all of these."""
    if torch.compiler.is_dynamo_compiling():  # traced like the rest, also for a grid size that is a symbol
        return torch.from_numpy(_BUILD[kind](n, m)).to(dtype).to(device)
    key = (kind, n, m, dtype, device)
    with _cache_lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    # Made outside inference mode: a matrix first needed there must serve training later.
    with torch.inference_mode(False), torch.no_grad():
        made = torch.from_numpy(_BUILD[kind](n, m)).to(dtype).to(device)
    if type(made) is Tensor:  # never keep the fake tensor of a trace
        with _cache_lock:
            _cache[key] = made
            while sum(t.nbytes for t in _cache.values()) > CACHE_BYTES and len(_cache) > 1:
                _cache.popitem(last=False)
    return made


def _cosines(n: int, m: int) -> np.ndarray:
    k, i = np.arange(m)[:, None], np.arange(n)[None]
    # The angle is πk(2i+1)/2n; taken modulo its period in integers, it stays exact for long axes.
    rows = np.sqrt(2 / n) * np.cos(np.pi * (k * (2 * i + 1) % (4 * n)) / (2 * n))
    rows[0] = math.sqrt(1 / n)
    return rows


def _sines(n: int, m: int) -> np.ndarray:
    k, i = np.arange(1, m + 1)[:, None], np.arange(n)[None]
    rows = np.sqrt(2 / n) * np.sin(np.pi * (k * (2 * i + 1) % (4 * n)) / (2 * n))
    if m == n:
        rows[-1] = math.sqrt(1 / n) * np.where(np.arange(n) % 2 == 0, 1, -1)
    return rows


def _cosines_and_sines(n: int, m: int) -> np.ndarray:
    k, i = (np.arange(m)[:, None] + 1) // 2, np.arange(n)[None]
    angle = 2 * np.pi * (k * i % n) / n
    rows = np.sqrt(2 / n) * np.where(np.arange(m)[:, None] % 2 == 1, np.cos(angle), np.sin(angle))
    rows[0] = math.sqrt(1 / n)
    if m == n and n % 2 == 0:
        rows[-1] = math.sqrt(1 / n) * np.where(np.arange(n) % 2 == 0, 1, -1)
    return rows


def _half_sample_turn(n: int, m: int) -> np.ndarray:
    angle = -np.pi * np.arange(m) / (2 * n)
    scale = np.where(np.arange(m) == 0, 1, math.sqrt(2))
    return scale * np.stack([np.cos(angle), np.sin(angle)])


def wave_numbers(n: int) -> np.ndarray:
    """Wave numbers 0, 1, …, −2, −1 in the order of an FFT of n points; the layout of a truncated axis too."""
    k = np.arange(n)
    return np.where(k < (n + 1) // 2, k, k - n)


def _waves(n: int, m: int) -> np.ndarray:
    phase = wave_numbers(m)[:, None] * np.arange(n)[None] % n
    rows: np.ndarray = np.exp(-2j * np.pi * phase / n) / math.sqrt(n)
    return rows


def _interleaved_waves(n: int, m: int) -> np.ndarray:
    """Rows cos, −sin of each wave number in turn: a real product gives (real, imaginary) pairs."""
    angle = 2 * np.pi * (np.arange(m)[:, None] * np.arange(n)[None] % n) / n
    return np.stack([np.cos(angle), -np.sin(angle)], 1).reshape(2 * m, n) / math.sqrt(n)


def _waves_in_halves(n: int, m: int) -> np.ndarray:
    """The cosines of all wave numbers, then −sin of all: a real product gives real parts, then imaginary ones."""
    return np.concatenate([_interleaved_waves(n, m)[0::2], _interleaved_waves(n, m)[1::2]])


def _weighted_halves(n: int, m: int) -> np.ndarray:
    return _waves_in_halves(n, m) * np.tile(_column_weights(n, m), 2)[:, None]


def _turned_pairs(n: int, m: int) -> np.ndarray:
    """`_waves` in real numbers: rows (wave number, real or imaginary), columns (point, real or imaginary)."""
    waves = _waves(n, m)
    pairs = np.stack([np.stack([waves.real, -waves.imag], -1), np.stack([waves.imag, waves.real], -1)], 1)
    return pairs.reshape(2 * m, 2 * n)


def _quads(real: np.ndarray, imaginary: np.ndarray, axis: int) -> np.ndarray:
    """What a complex product in real numbers sums with the two parts of a weight, for its real and its imaginary part.

    (Re, Im) with the real part of the weight and (−Im, Re) with the imaginary one.
    """
    return np.stack([real, imaginary, -imaginary, real], axis)


def _turned_quads(n: int, m: int) -> np.ndarray:
    pairs = _turned_pairs(n, m).reshape(m, 2, 2 * n)
    return _quads(pairs[:, 0], pairs[:, 1], axis=1).reshape(4 * m, 2 * n)


def _waves_of_all_axes(n: Sizes, m: Sizes) -> np.ndarray:
    """Rows for the kept waves of a real field, columns for the points of its grid."""
    real, imaginary = _waves_in_halves(n[-1], m[-1]).reshape(2, m[-1], n[-1])
    waves = real + 1j * imaginary
    for points, kept in zip(n[-2::-1], m[-2::-1], strict=True):
        waves = np.kron(_waves(points, kept), waves)
    return waves


def _all_axes_in_halves(n: Sizes, m: Sizes) -> np.ndarray:
    waves = _waves_of_all_axes(n, m)
    return np.concatenate([waves.real, waves.imag])


def _all_axes_in_quarters(n: Sizes, m: Sizes) -> np.ndarray:
    waves = _waves_of_all_axes(n, m)
    return _quads(waves.real, waves.imag, axis=0).reshape(-1, waves.shape[1])


def _all_axes_back(n: Sizes, m: Sizes) -> np.ndarray:
    waves = _waves_of_all_axes(n, m) * np.tile(_column_weights(n[-1], m[-1]), math.prod(m[:-1]))[:, None]
    return np.concatenate([waves.real, waves.imag])


def _weighted_waves(n: int, m: int) -> np.ndarray:
    return _interleaved_waves(n, m) * np.repeat(_column_weights(n, m), 2)[:, None]


def _complex_in_real_numbers(_n: int, _m: int) -> np.ndarray:
    """Of (Re, Im) the rows of [[Re, −Im], [Im, Re]], one after the other."""
    return np.array([[1.0, 0.0, 0.0, 1.0], [0.0, -1.0, 1.0, 0.0]])


def _differences(n: int, order: int, around: bool = False) -> np.ndarray:
    """First, (right − left) / 2, or second, (right + left) / 2 − the point itself, of n points in a row or on a circle.

    The last points of a row are their own neighbours.
    """
    right, left = np.eye(n, k=1), np.eye(n, k=-1)
    right[-1, 0 if around else -1] = left[0, -1 if around else 0] = 1
    return (right - left) / 2 if order == 1 else (right + left) / 2 - np.eye(n)


def _column_weights(n: int, m: int) -> np.ndarray:
    """How often an rfft column counts: once for the constant and the Nyquist wave, twice for the rest."""
    k = np.arange(m)
    return np.where((k == 0) | (2 * k == n), 1.0, 2.0)


_BUILD: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "dct": _cosines,
    "dst": _sines,
    "fourier": _cosines_and_sines,
    "dft": _waves,
    "dft last": _interleaved_waves,
    "dft last, halves": _waves_in_halves,
    "inverse dft last, halves": _weighted_halves,
    "dft, pairs": _turned_pairs,
    "dft, quads": _turned_quads,
    "dft of all axes, halves": _all_axes_in_halves,
    "dft of all axes, quads": _all_axes_in_quarters,
    "inverse dft of all axes": _all_axes_back,
    "inverse dft last": _weighted_waves,
    "complex": _complex_in_real_numbers,
    "differences": _differences,
    "differences around": partial(_differences, around=True),
    "weights": _column_weights,
    "turn": _half_sample_turn,
}
