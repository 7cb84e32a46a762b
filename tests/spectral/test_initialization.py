"""Variance-preserving initialisation: Monte-Carlo variance ratios of real layers on white input."""

import math

import pytest
import torch

import transform_once as t1
from transform_once.spectral.initialization import dense_variance, diagonal_variance, rfft_variance

TOLERANCE = 0.02


def converge(draw):
    """Mean ratio of independent draws, as many as bring its standard error to a third of the tolerance."""
    generator = torch.Generator().manual_seed(0)
    ratios = draw(generator)
    while len(ratios) < 32 or ratios.std().item() / math.sqrt(len(ratios)) > TOLERANCE / 3:
        ratios = torch.cat([ratios, draw(generator)])
        assert len(ratios) < 200_000, "no convergence"
    return ratios.mean().item()


def mode_layer_ratio(transform, size, modes, variance, channels=4, draws=None):
    """Output over input variance of x̂ = T⁻¹ Sᵀ A S T x, A a channel matrix per mode, fresh x and A in every draw."""
    T, ndim = t1.get_transform(transform), len(size)
    draws = draws or max(4, 2**21 // (channels * math.prod(size)))
    std = math.sqrt(variance)

    def draw(generator):
        X = T.forward(torch.randn(draws, channels, *size, generator=generator), ndim, modes)
        block, X = X.shape[2:], X.flatten(2)
        A = std * torch.randn(draws, channels, channels, X.shape[2], 1 + T.is_complex, generator=generator)
        A = torch.view_as_complex(A) if T.is_complex else A[..., 0]
        Y = torch.einsum("bcm,bcom->bom", X, A).unflatten(2, block)
        return T.inverse(Y, ndim, size).flatten(1).square().mean(1)

    return converge(draw)


GRIDS = [((n,) * ndim, m) for ndim in (1, 2) for n in (64, 128, 256) for m in (8, 16, 24)]
GRIDS += [((n,) * 3, m) for n in (32, 64) for m in (4, 8)]


@pytest.mark.parametrize(("size", "m"), GRIDS, ids=str)
def test_diagonal_layer_of_a_real_transform(size, m):
    variance = diagonal_variance(size, m ** len(size), channels=4)
    assert mode_layer_ratio("dct", size, m, variance) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize(("size", "m"), GRIDS, ids=str)
def test_rfft_layer(size, m):
    block = t1.get_transform("dft").block(m, size)
    variance = rfft_variance(size, block, channels=4)
    assert mode_layer_ratio("dft", size, m, variance) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize(("size", "m"), [((16, 16), (8, 9)), ((15, 12), (8, 7)), ((9,), 5)], ids=str)
def test_rfft_layer_with_all_modes_counts_the_nyquist_column(size, m):
    variance = rfft_variance(size, t1.get_transform("dft").block(m, size), channels=4)
    assert mode_layer_ratio("dft", size, m, variance) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize("m", [8, 16, 24])
@pytest.mark.parametrize("n", [64, 128, 256])
def test_dense_layer(n, m):
    channels, std = 2, math.sqrt(dense_variance((n,), m, channels=2))

    def draw(generator):
        X = t1.dct(torch.randn(2000, channels, n, generator=generator), 1, m)
        A = std * torch.randn(2000, m, channels, m, generator=generator)
        return t1.idct(torch.einsum("bocm,bcm->bo", A, X), 1, n).square().mean(1)

    assert converge(draw) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize("m", [8, 16, 24])
def test_the_papers_dft_formula_taken_literally_nearly_doubles_the_variance(m):
    """N(0, N/2m) for both parts of a diagonal layer counts a complex output: an rfft then gives 2 − 3/(2m), not 1."""
    literal = 256 / (2 * m) / 4
    assert mode_layer_ratio("dft", (256,), m, literal) == pytest.approx(2 - 1.5 / m, abs=2 * TOLERANCE)


def test_a_smooth_field_is_amplified():
    """White input is essential: where the kept modes already hold the energy, vp multiplies the variance by ~N/M."""
    n, m = 64, 24
    k = torch.arange(n, dtype=torch.float64) * math.pi
    spectrum = (k[:, None] ** 2 + k[None] ** 2 + 49) ** -1.25
    x = t1.idct(spectrum * torch.randn(64, 1, n, n, dtype=torch.float64), 2)
    X = t1.dct(x, 2, m)
    A = math.sqrt(diagonal_variance((n, n), m * m)) * torch.randn(64, 1, m, m, dtype=torch.float64)
    assert X.square().sum() / x.square().sum() > 0.95
    assert (t1.idct(A * X, 2, n).var() / x.var()).item() > 4


@pytest.mark.parametrize(("size", "m"), [((64,), 8), ((64, 64), 8), ((128, 128), 16), ((32, 32, 32), 4)], ids=str)
def test_the_spectral_layer_of_neuraloperator(size, m):
    layers = pytest.importorskip("neuralop.layers.spectral_convolution", reason="needs neuraloperator (the dev extra)")
    layer = layers.SpectralConv(8, 8, n_modes=(2 * m,) * len(size), bias=False)

    def draw(generator):
        ratios = []
        for _ in range(8):
            t1.vp_init_(layer, size, generator)
            with torch.no_grad():
                ratios.append(layer(torch.randn(2, 8, *size, generator=generator)).square().mean())
        return torch.stack(ratios)

    assert converge(draw) == pytest.approx(1, abs=TOLERANCE)


def test_a_whole_fno_of_neuraloperator():
    models = pytest.importorskip("neuralop.models", reason="needs neuraloperator (the dev extra)")
    model = models.FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=8, n_layers=3)
    t1.vp_init_(model, (64, 64))
    for layer in model.fno_blocks.convs:
        weight = torch.view_as_real(layer.weight.tensor)
        assert weight.var().item() == pytest.approx(64 * 64 / (8 * 16 * (4 * 9 - 3)), rel=0.1)
    with pytest.raises(ValueError, match="holds the modes"):
        t1.vp_init_(model, (8, 8))


def test_every_layer_that_knows_the_scheme_is_reached():
    class Layer(torch.nn.Module):
        seen = None

        def vp_init_(self, resolution, generator):
            self.seen = resolution

    model = torch.nn.Sequential(Layer(), torch.nn.ReLU(), torch.nn.Sequential(Layer()))
    assert t1.vp_init_(model, [64, 32]) is model
    assert model[0].seen == model[2][0].seen == (64, 32)


def test_a_module_without_spectral_layers_is_refused():
    with pytest.raises(TypeError, match="no spectral layer in Linear"):
        t1.vp_init_(torch.nn.Linear(3, 3), (64, 64))
