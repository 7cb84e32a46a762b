"""The baselines: a correct FNO and FFNO, and why the released ones are not."""

import math

import pytest
import torch

import transform_once as t1
from transform_once.models import ffno, fno
from transform_once.models.ffno import ReleasedFFNO
from transform_once.models.fno import ReleasedFNO, SpectralConvolution
from transform_once.spectral import transforms


def textbook_convolution(layer, x):
    """The spectral layer by torch's own FFT on a full grid, with the two corner blocks written out."""
    m1, m2 = layer.modes
    W = torch.view_as_complex(layer.weight).reshape(2 * m1, m2, layer.width, layer.width)
    X = torch.fft.rfft2(x, norm="ortho")
    Y = torch.zeros_like(X)
    Y[:, :, :m1, :m2] = torch.einsum("xyoi,bixy->boxy", W[:m1], X[:, :, :m1, :m2])
    Y[:, :, -m1:, :m2] = torch.einsum("xyoi,bixy->boxy", W[m1:], X[:, :, -m1:, :m2])
    return torch.fft.irfft2(Y, x.shape[2:], norm="ortho")


def test_the_fno_equals_the_textbook():
    model = t1.FNO(2, 1, (18, 15), modes=(5, 4), width=6, depth=2).double()
    x = torch.randn(3, 2, 18, 15, dtype=torch.float64)
    lines = [torch.linspace(0, 1, n, dtype=torch.float64) for n in (18, 15)]
    v = torch.cat([x, torch.stack(torch.meshgrid(*lines, indexing="ij")).expand(3, -1, -1, -1)], 1)
    first, last = model.layers
    v = model.lift(v)
    u = torch.nn.functional.gelu(textbook_convolution(first.spectral, v) + first.pointwise(v))
    v = torch.nn.functional.gelu(first.perceptron(u) + v)
    u = torch.nn.functional.gelu(textbook_convolution(last.spectral, v) + last.pointwise(v))
    assert torch.allclose(model(x), model.head(last.perceptron(u) + v), atol=1e-12)


@pytest.mark.parametrize("phase_blind", [False, True])
def test_the_released_fno_equals_its_description(phase_blind):
    model = ReleasedFNO(1, 1, (18, 15), modes=(5, 4), width=6, depth=2, phase_blind=phase_blind).double()
    x = torch.randn(3, 1, 18, 15, dtype=torch.float64)
    lines = [torch.linspace(0, 1, n, dtype=torch.float64) for n in (18, 15)]
    v = model.lift(torch.cat([x, torch.stack(torch.meshgrid(*lines, indexing="ij")).expand(3, -1, -1, -1)], 1))
    for spectral, pointwise in zip(model.spectral, model.pointwise, strict=True):
        v = torch.nn.functional.gelu(textbook_convolution(spectral, v) + v + pointwise(v))
    assert torch.allclose(model(x), model.head(v), atol=1e-12) is not phase_blind


def shifted(layer, shift, n):
    """Weights that make a layer of one channel shift its input along the first axis by `shift` points."""
    m1, m2 = layer.modes
    k = torch.fft.fftfreq(2 * m1, 1 / (2 * m1))
    W = torch.exp(-2j * math.pi * k * shift / n)[:, None].expand(2 * m1, m2)
    with torch.no_grad():
        layer.weight.copy_(torch.view_as_real(W.reshape(-1, 1, 1).contiguous()))
    return layer


def test_a_correct_layer_shifts_a_field_and_a_phase_blind_one_cannot():
    n = 16
    T = t1.get_transform("dft")
    x = T.inverse(T.forward(torch.randn(2, 1, n, n), 2, 4), 2, n)  # band-limited
    x = x - x.mean((-2, -1), keepdim=True)
    layer = shifted(SpectralConvolution(1, 6, 2), 3, n)
    assert torch.allclose(layer(x), x.roll(3, -2), atol=1e-5)
    layer.phase_blind = True
    blind = layer(x)
    even = blind.flip(-2, -1).roll((1, 1), (-2, -1))
    assert torch.allclose(blind, even, atol=1e-5)  # whatever its weights, it emits even fields alone
    assert (blind - x.roll(3, -2)).norm() > 0.5 * x.norm()


def test_no_weights_let_a_phase_blind_layer_shift():
    """Fitted to shift one odd wave, the correct layer succeeds and the phase-blind one cannot even begin."""
    n = 16
    nodes = torch.arange(n) / n
    x = torch.sin(2 * math.pi * nodes)[:, None].expand(n, n)[None, None]
    errors = {}
    for blind in (False, True):
        layer = SpectralConvolution(1, 3, 2, phase_blind=blind)
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=50)

        def loss(layer=layer, optimizer=optimizer):
            optimizer.zero_grad()
            value = (layer(x) - x).square().mean()
            value.backward()
            return value

        optimizer.step(loss)
        errors[blind] = ((layer(x) - x).norm() / x.norm()).item()
    assert errors[False] < 1e-3
    assert errors[True] == pytest.approx(1, abs=1e-3)


def test_the_released_ffno_is_another_model():
    outputs = []
    for kind in (t1.FFNO, ReleasedFFNO):
        torch.manual_seed(0)
        model = kind(1, 1, (16, 16), modes=4, width=6, depth=3)
        outputs.append(model(torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))))
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize("grid", [(12, 10), (11,), (6, 7, 8)], ids=str)
def test_without_coordinates_an_ffno_commutes_with_shifts(grid):
    """So the paper's cannot know where the force is; one that sees the coordinates can."""
    x, by = torch.randn(2, 1, *grid, dtype=torch.float64), [3] * len(grid)
    axes = list(range(2, x.ndim))
    for coordinates in (False, True):
        model = t1.FFNO(1, 1, grid, 3, 6, 2, coordinates=coordinates).double()
        apart = model(x.roll(by, axes)) - model(x).roll(by, axes)
        assert (apart.abs().max() > 1e-2) if coordinates else (apart.abs().max() < 1e-12)


@pytest.mark.parametrize(("grid", "width"), [((12, 10), 6), ((11,), 8), ((6, 7, 8), 5)], ids=str)
def test_spare_channels_change_nothing(grid, width, monkeypatch):
    model = t1.FFNO(2, 3, grid, 3, width, 3).double()
    x = torch.randn(2, 2, *grid, dtype=torch.float64)
    found = []
    for spare in (0, 3):
        monkeypatch.setattr(ffno, "_spare", lambda *_, spare=spare: spare)
        y = model(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("entries", [0, 60, 2**21], ids=["fft", "both", "matrix"])
@pytest.mark.parametrize("kind", [t1.FFNO, ReleasedFFNO])
@pytest.mark.parametrize(
    ("grid", "modes"), [((9,), (5,)), ((12,), (7,)), ((12, 9), (3, 4)), ((7, 10, 5), (4, 6, 2))], ids=str
)
def test_the_ffno_sums_one_transform_per_axis(grid, modes, kind, entries, monkeypatch):
    """Against torch's own FFT, with odd axes and all wave numbers of an axis, and by matrices as by FFTs."""
    monkeypatch.setattr(transforms, "MATRIX_ENTRIES", entries)
    model = kind(2, 3, grid, modes, width=4, depth=2).double()
    x = torch.randn(3, 2, *grid, dtype=torch.float64)
    v = model.lift(torch.cat([x, fno.coordinate_channels(x)], 1))
    for layers, feed_forward in zip(model.spectral, model.feed_forward, strict=True):
        total = torch.zeros_like(v)
        for axis, (m, layer) in enumerate(zip(modes, layers, strict=True), start=2):
            V = torch.fft.rfft(v.movedim(axis, -1), norm="ortho")
            Y = torch.zeros_like(V)
            Y[..., :m] = torch.einsum("koi,bi...k->bo...k", torch.view_as_complex(layer.weight), V[..., :m])
            total = total + torch.fft.irfft(Y, grid[axis - 2], norm="ortho").movedim(-1, axis)
        b = feed_forward(total)
        v = v + kind.sign * b
    expected, y = model.head(b), model(x)
    assert torch.allclose(y, expected, rtol=0, atol=1e-12)
    weights, direction = list(model.parameters()), torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(z, weights, direction) for z in (y, expected)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_fno_is_the_same_operator_on_another_grid():
    model = t1.FNO(1, 1, (16, 16), modes=3, width=6, depth=1)
    T = t1.get_transform("fourier")
    modes = torch.randn(1, 6, 5, 5)
    coarse, fine = (T.inverse(modes, 2, n) * n / 16 for n in (16, 32))
    layer = model.layers[0].spectral
    assert torch.allclose(layer(fine)[..., ::2, ::2], layer(coarse), atol=1e-5)


def test_an_odd_axis_has_all_its_wave_numbers_once():
    """Of 2m − 1 points: with weights of one, the layer gives back any field, and −m, which is not there, rests."""
    layer = SpectralConvolution(1, (3, 3), 2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 0.0]).expand_as(layer.weight))
    x = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    y = layer(x)
    assert torch.allclose(y, x, atol=1e-12)
    y.square().sum().backward()
    rests = layer.weight.grad.unflatten(0, layer.block).flatten(1).abs().sum(1) == 0
    assert rests.tolist() == [False, False, False, True, False, False]
    model = t1.FNO(1, 1, (6, 6), 3, 4, 1)
    assert model(torch.randn(1, 1, 5, 5)).shape == (1, 1, 5, 5)
    with pytest.raises(ValueError, match="between 1 and 2 on axis 0 of a grid of 4 points"):
        model(torch.randn(1, 1, 4, 5))


@pytest.mark.parametrize("phase_blind", [False, True])
@pytest.mark.parametrize(
    ("size", "modes"), [((11, 12), (3, 4)), ((8, 8), 4), ((7, 8), 4), ((7, 9, 8), (2, 3, 4))], ids=str
)
def test_all_axes_at_once_and_axis_by_axis_give_the_same(size, modes, phase_blind):
    layer = SpectralConvolution(3, modes, len(size), phase_blind).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    at_once, by_axis = layer._all_at_once(x), layer._axis_by_axis(x)
    assert torch.allclose(at_once[:, :, 0], by_axis.transpose(2, 3).flatten(3), atol=1e-13)
    Y = at_once[:, :, :, : 1 if phase_blind else 2]
    fields = layer._back_axis_by_axis(Y[:, :, 0].unflatten(3, by_axis.shape[2::2]).transpose(2, 3), x)
    assert torch.allclose(layer._back_at_once(Y, x), fields, atol=1e-13)


def test_autocast_takes_the_transforms_to_its_precision_too():
    layer = SpectralConvolution(8, 6, 2)
    x = torch.randn(3, 8, 32, 32).bfloat16()
    expected = layer(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).norm() / expected.norm()
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("phase_blind", [False, True])
@pytest.mark.parametrize(
    ("size", "modes"),
    [((13,), 4), ((11, 12), (3, 4)), ((16, 9), (8, 4)), ((7, 8), (4, 5)), ((7, 9, 8), (2, 3, 4)), ((5, 6, 7), 3)],
    ids=str,
)
def test_matrices_and_complex_numbers_give_the_same(size, modes, phase_blind, monkeypatch):
    layer = SpectralConvolution(3, modes, len(size), phase_blind).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    found = {}
    for entries in (2**21, 0):
        monkeypatch.setattr(transforms, "MATRIX_ENTRIES", entries)
        y = layer(x)
        found[entries] = [y, *torch.autograd.grad(y.square().sum(), [x, layer.weight])]
    for one, other in zip(*found.values(), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    monkeypatch.setattr(transforms, "MATRIX_ENTRIES", 2**21)
    assert layer(x[:0]).shape == (0, 3, *size)
