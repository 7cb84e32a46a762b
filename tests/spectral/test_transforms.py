"""The transforms against scipy, against themselves (laws), and inside the machinery of PyTorch."""

import math
import warnings

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import transform_once as t1
from transform_once.spectral import bases, transforms

SIZES = [(1,), (2,), (3,), (7,), (64,), (97,), (600,), (1061,), (1062,)]
SIZES += [(1, 1), (1, 9), (5, 8), (31, 37), (64, 64), (1062, 600), (3, 4, 5), (1, 7, 2), (13, 16, 11)]
NAMES = ["dct", "dst", "fourier", "dft"]
grids = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)


def field(shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fourier_reference(x, ndim):
    """The real Fourier coefficients from scipy's FFT, axis by axis: constant, then √2·(Re, −Im) pairs."""
    for axis in range(-ndim, 0):
        n = x.shape[axis]
        F = np.moveaxis(scipy.fft.rfft(x, axis=axis, norm="ortho"), axis, -1)
        columns = [F[..., 0].real]
        for k in range(1, (n + 1) // 2):
            columns += [math.sqrt(2) * F[..., k].real, -math.sqrt(2) * F[..., k].imag]
        if n % 2 == 0:
            columns.append(F[..., n // 2].real)
        x = np.moveaxis(np.stack(columns, -1), -1, axis)
    return x


def reference(name, x, ndim):
    axes = tuple(range(-ndim, 0))
    if name == "dct":
        return scipy.fft.dctn(x, axes=axes, norm="ortho")
    if name == "dst":
        return scipy.fft.dstn(x, axes=axes, norm="ortho")
    return fourier_reference(x, ndim) if name == "fourier" else scipy.fft.rfftn(x, axes=axes, norm="ortho")


@pytest.fixture(params=["matrix", "fft"])
def path(request, monkeypatch):
    """Both ways to compute: the matrix product, and the FFT that takes over for very long axes."""
    monkeypatch.setattr(transforms, "MATRIX_ENTRIES", 2**40 if request.param == "matrix" else 0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_agrees_with_scipy_and_inverts(name, size, dtype, tolerance, path):
    x = field((2, *size), dtype)
    X = t1.get_transform(name).forward(x, len(size))
    scale = x.double().norm().item()
    assert X.dtype == (dtype.to_complex() if name == "dft" else dtype)
    assert np.abs(X.numpy() - reference(name, x.double().numpy(), len(size))).max() <= tolerance * scale
    back = t1.get_transform(name).inverse(X, len(size), size)
    assert (back - x).abs().max().item() <= tolerance * scale


def test_a_long_axis_takes_the_fft_without_a_matrix():
    x = field((100_003,))
    assert np.abs(t1.dct(x, 1).numpy() - scipy.fft.dct(x.numpy(), norm="ortho")).max() <= 1e-13 * x.norm().item()
    assert (t1.idct(t1.dct(x, 1), 1) - x).abs().max() <= 1e-13 * x.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_half_precision_error_is_that_of_its_rounding(name, dtype, tolerance):
    """Stated for bfloat16 (8 bits: 2⁻⁸ = 4e-3) and float16 (11 bits): error of the largest coefficient against ‖x‖."""
    x = field((3, 48, 50), dtype)
    X = t1.get_transform(name).forward(x, 2)
    assert X.dtype == (torch.complex64 if name == "dft" else dtype)
    exact = reference(name, x.double().numpy(), 2)
    assert np.abs(X.to(torch.complex128).numpy() - exact).max() <= tolerance * x.double().norm().item()


@settings(max_examples=40)
@given(size=grids, name=st.sampled_from(NAMES), seed=st.integers(0, 99))
def test_parseval(size, name, seed):
    T, x = t1.get_transform(name), field(size, seed=seed)
    energy = T.energy(T.forward(x, len(size)), len(size), size).sum()
    assert energy.item() == pytest.approx(x.square().sum().item(), rel=1e-12)


@settings(max_examples=40)
@given(size=grids, name=st.sampled_from(["dct", "dst", "fourier"]), data=st.data())
def test_truncation_equals_full_then_slice(size, name, data):
    modes = tuple(data.draw(st.integers(1, n)) for n in size)
    T, x = t1.get_transform(name), field((2, *size))
    kept = T.forward(x, len(size), modes)
    full = T.forward(x, len(size))
    assert kept.shape[1:] == T.block(modes, size)
    assert torch.allclose(kept, full[(slice(None), *(slice(m) for m in kept.shape[1:]))], atol=1e-13)
    # and the inverse fills the missing modes with zeros
    padded = torch.zeros_like(full)
    padded[(slice(None), *(slice(m) for m in kept.shape[1:]))] = kept
    assert torch.allclose(T.inverse(kept, len(size), size), T.inverse(padded, len(size), size), atol=1e-13)


@settings(max_examples=40)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), data=st.data())
def test_dft_truncation_keeps_both_corners(rows, columns, data):
    T, x = t1.get_transform("dft"), field((2, rows, columns))
    m1, m2 = data.draw(st.integers(1, (rows + 1) // 2)), data.draw(st.integers(1, columns // 2 + 1))
    kept = T.forward(x, 2, (m1, m2))
    full = torch.fft.rfft2(x, norm="ortho")
    wanted = torch.cat([full[:, :m1, :m2], full[:, max(m1, rows - m1) :, :m2]], 1)
    assert torch.allclose(kept, wanted, atol=1e-13)
    padded = torch.zeros_like(full)
    padded[:, :m1, :m2], padded[:, max(m1, rows - m1) :, :m2] = wanted[:, :m1], wanted[:, m1:]
    expected = torch.fft.irfft2(padded, (rows, columns), norm="ortho")
    assert torch.allclose(T.inverse(kept, 2, (rows, columns)), expected, atol=1e-13)


@settings(max_examples=25)
@given(size=grids, name=st.sampled_from(NAMES), a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_linearity(size, name, a, b):
    T, x, y = t1.get_transform(name), field(size), field(size, seed=1)
    left = T.forward(a * x + b * y, len(size))
    assert torch.allclose(left, a * T.forward(x, len(size)) + b * T.forward(y, len(size)), atol=1e-12)


def test_known_coefficients():
    n = 16
    cells, nodes = (torch.arange(n) + 0.5) / n, torch.arange(n) / n
    half_wave = t1.dct(torch.cos(3 * math.pi * cells), 1)
    assert half_wave[3].item() == pytest.approx(math.sqrt(n / 2), abs=1e-5)
    assert half_wave.abs().sum().item() == pytest.approx(math.sqrt(n / 2), abs=1e-4)
    half_wave = t1.get_transform("dst").forward(torch.sin(3 * math.pi * cells), 1)
    assert half_wave[2].item() == pytest.approx(math.sqrt(n / 2), abs=1e-5)
    assert half_wave.abs().sum().item() == pytest.approx(math.sqrt(n / 2), abs=1e-4)
    sine = t1.get_transform("fourier").forward(torch.sin(2 * math.pi * 2 * nodes), 1)
    assert sine[4].item() == pytest.approx(math.sqrt(n / 2), abs=1e-5)  # 1, cos 1, sin 1, cos 2, sin 2


@pytest.mark.parametrize(("name", "offset"), [("dct", 0.5), ("dst", 0.5), ("fourier", 0.0)])
def test_inverse_at_another_resolution_is_the_same_field(name, offset):
    """Scaled by √(N′/N), the kept modes of a band-limited field are the field itself on any grid of the right kind."""

    def sample(rows, columns):
        x = (torch.arange(rows, dtype=torch.float64) + offset) / rows
        y = (torch.arange(columns, dtype=torch.float64) + offset) / columns
        if name == "dst":
            return torch.outer(torch.sin(3 * math.pi * x), torch.sin(math.pi * y) - torch.sin(7 * math.pi * y))
        waves = torch.cos(2 * math.pi * x), 1 + (torch.cos(4 * math.pi * y) if offset else torch.sin(4 * math.pi * y))
        return torch.outer(*waves)

    T = t1.get_transform(name)
    kept = T.forward(sample(20, 24), 2, 7)
    for size in [(40, 48), (9, 17), (20, 31)]:
        scale = math.sqrt(math.prod(size) / (20 * 24))
        assert torch.allclose(scale * T.inverse(kept, 2, size), sample(*size), atol=1e-12)


def test_fourier_modes_are_rounded_down_to_odd():
    T, x = t1.get_transform("fourier"), field((24, 25))
    assert T.forward(x, 2, 8).shape == (7, 7)
    assert T.forward(x, 2, (24, 24)).shape == (24, 23)  # all modes of an even axis include the unpaired Nyquist cosine


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(7,), (4, 5), (3, 4, 2)], ids=str)
def test_gradcheck(name, size, path):
    T, ndim = t1.get_transform(name), len(size)
    modes = tuple(max(1, limit - 1) for limit in T.max_modes(size))
    x = field((2, *size)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: T.forward(x, ndim, modes), (x,))
    X = T.forward(x.detach(), ndim, modes).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: T.inverse(X, ndim, size), (X,))


class Allocations(TorchDispatchMode):
    """Numbers held by the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                shared = any(isinstance(a, torch.Tensor) and a.data_ptr() == tensor.data_ptr() for a in args)
                self.largest = self.largest if shared else max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_transform_allocates_no_full_spectrum(name):
    x = field((8, 64, 64), torch.float32)
    t1.get_transform(name).forward(x, 2, 8)  # the matrices are made here
    with Allocations() as allocations:
        t1.get_transform(name).forward(x, 2, 8)
    assert allocations.largest <= x.numel() // 4


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    T, x = t1.get_transform(name), field((3, 2, 9, 8))
    assert torch.allclose(torch.func.vmap(lambda x: T.forward(x, 2, 3))(x), T.forward(x, 2, 3))


@pytest.mark.parametrize("name", ["dct", "dst", "fourier"])
def test_autocast_leaves_the_transform_in_full_precision(name):
    T, x = t1.get_transform(name), field((2, 32, 32), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = T.forward(x, 2, 8)
        back = T.inverse(inside, 2, 32)
    assert torch.equal(inside, T.forward(x, 2, 8))
    assert torch.equal(back, T.inverse(inside, 2, 32))


@pytest.mark.parametrize("name", NAMES)
def test_compile_in_one_graph_also_when_the_grid_changes(name):
    T = t1.get_transform(name)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: T.inverse(T.forward(x, 2, 4), 2, x.shape[-2:]), fullgraph=True, backend="aot_eager"
    )
    for size in [(16, 20), (12, 14), (18, 11)]:
        x = field((2, *size))
        assert torch.allclose(compiled(x), T.inverse(T.forward(x, 2, 4), 2, size), atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_compile_with_inductor(name):
    T, x = t1.get_transform(name), field((2, 16, 20), torch.float32)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own: complex operators are left to eager kernels
        result = torch.compile(lambda x: T.forward(x, 2, 4), fullgraph=True)(x)
    assert torch.allclose(result, T.forward(x, 2, 4), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_export_with_a_free_batch(name):
    class RoundTrip(torch.nn.Module):
        def forward(self, x):
            T = t1.get_transform(name)
            return T.inverse(T.forward(x, 2, 4), 2, (12, 10))

    bases._cache.clear()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(RoundTrip(), (field((2, 12, 10)),), dynamic_shapes={"x": {0: batch}})
    x = field((5, 12, 10))
    assert torch.allclose(exported.module()(x), RoundTrip()(x))
    assert all(type(matrix) is torch.Tensor for matrix in bases._cache.values())  # no fake tensor was kept


def test_a_matrix_first_made_in_inference_mode_serves_training():
    bases._cache.clear()
    with torch.inference_mode():
        t1.dct(field((2, 9, 9)), 2, 3)
    x = field((2, 9, 9)).requires_grad_()
    t1.dct(x, 2, 3).square().sum().backward()
    assert x.grad is not None


def test_the_cache_is_keyed_and_bounded(monkeypatch):
    bases._cache.clear()
    monkeypatch.setattr(bases, "CACHE_BYTES", 100_000)
    for n in range(10, 60):
        for dtype in (torch.float32, torch.float64):
            t1.dct(torch.zeros(n, dtype=dtype), 1)
    assert len(bases._cache) < 100
    assert sum(matrix.nbytes for matrix in bases._cache.values()) <= 100_000
    assert {key[3] for key in bases._cache} == {torch.float32, torch.float64}


@pytest.mark.parametrize("name", NAMES)
def test_the_meta_device_and_an_empty_batch_pass_through(name):
    T = t1.get_transform(name)
    assert T.forward(torch.empty(2, 12, 10, device="meta"), 2, 3).shape == T.forward(field((2, 12, 10)), 2, 3).shape
    empty = T.forward(torch.empty(0, 4, 12, 10), 2, 3)
    assert T.inverse(empty, 2, (12, 10)).shape == (0, 4, 12, 10)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda x: t1.dct(x.to(torch.complex64), 2), TypeError, "real floating-point field; got torch.complex64"),
        (lambda x: t1.dct(x.int(), 2), TypeError, "got torch.int32: use x.float()"),
        (lambda x: t1.dct(x, 2, 9), ValueError, "between 1 and 8 on axis 0 of a grid of 8 points"),
        (lambda x: t1.dct(x, 2, (8, 10)), ValueError, "between 1 and 9 on axis 1"),
        (lambda x: t1.dct(x, 2, 0), ValueError, "between 1 and 8.*got 0"),
        (lambda x: t1.dct(x, 2, (3, 3, 3)), ValueError, "an int or 2 ints, one per axis; got 3"),
        (lambda x: t1.dct(x, 2, 2.5), TypeError, "an int or one int per axis; got 2.5"),
        (lambda x: t1.dct(x, 4), ValueError, "ndim must be 1, 2 or 3"),
        (lambda x: t1.dct(x[0, 0], 2), ValueError, "at least 2 axes"),
        (lambda x: t1.idct(x, 2, (7, 9)), ValueError, "at least .8, 9. points"),
        (lambda x: t1.idct(x.to(torch.complex64), 2), TypeError, "real floating-point modes"),
        (lambda x: t1.get_transform("dft").inverse(x, 2, (8, 9)), TypeError, "complex modes"),
        (lambda x: t1.get_transform("dft").forward(x, 2, (5, 2)), ValueError, "between 1 and 4 on axis 0"),
        (
            lambda x: t1.get_transform("dft").inverse(t1.get_transform("dft").forward(x, 2), 2, 4),
            ValueError,
            "rfft has",
        ),
        (lambda x: t1.get_transform("wavelet"), ValueError, "dct, dst, fourier, dft; got 'wavelet'"),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence) as raised:
        call(field((2, 8, 9)))
    assert "\n" not in str(raised.value)
