"""T1 and T1+ against the textbook computation, and what their parts are for."""

import math

import pytest
import torch

import transform_once as t1
from transform_once.models import layers
from transform_once.spectral.transforms import Transform


def textbook(model, x):
    """T1 the long way: lift fields with coordinates, full DCT, layers on the block by einsum, pad, full inverse."""
    grid = x.shape[2:]
    lines = [torch.linspace(0, 1, n, dtype=x.dtype) for n in grid]
    coordinates = torch.stack(torch.meshgrid(*lines, indexing="ij")).expand(len(x), -1, *grid)
    lifted = torch.einsum("wc,bcij->bwij", model.lift.weight, torch.cat([x, coordinates], 1))
    lifted = lifted + model.lift.bias[:, None, None]
    m1, m2 = model.block
    z = t1.dct(lifted, 2)[:, :, :m1, :m2]
    for layer in model.layers:
        W = layer.weight.reshape(m1, m2, *layer.weight.shape[1:])
        y = torch.nn.functional.gelu(torch.einsum("ijdc,bcij->bdij", W, z))
        first, second = layer.mixing.weights
        y = torch.einsum("cki,bcij->bckj", first, y)
        z = z + torch.einsum("ckj,bcij->bcik", second, y)
    inner, outer = model.head
    activation = {"gelu": torch.nn.functional.gelu, "sine": torch.sin}[model.config["head_activation"]]
    z = torch.einsum("oh,bhij->boij", outer, activation(torch.einsum("hw,bwij->bhij", inner, z)))
    padded = torch.zeros(len(x), z.shape[1], *grid, dtype=x.dtype)
    padded[:, :, :m1, :m2] = z
    return t1.idct(padded, 2)


@pytest.mark.parametrize("head_activation", ["gelu", "sine"])
def test_forward_equals_the_textbook(head_activation):
    model = t1.T1(2, 3, (20, 17), modes=(7, 5), width=8, depth=3, head_activation=head_activation).double()
    x = torch.randn(4, 2, 20, 17, dtype=torch.float64)
    expected = textbook(model, x)
    assert (model(x) - expected).norm() < 1e-6 * expected.norm()  # the lift's constant spectra are float32
    single = model.float()(x.float())
    assert (single - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("transform", ["dct", "fourier", "dft"])
@pytest.mark.parametrize("kind", [t1.T1, t1.T1Plus])
def test_kspace_and_forward_agree_and_transform_once(kind, transform, monkeypatch):
    if kind is t1.T1Plus and transform == "dft":
        pytest.skip("T1+ works on real modes")
    model = kind(1, 2, (18, 16), modes=6, width=8, transform=transform).eval()
    x = torch.randn(3, 1, 18, 16)
    calls = []
    forward, inverse = Transform.forward, Transform.inverse
    monkeypatch.setattr(Transform, "forward", lambda self, *a: calls.append("forward") or forward(self, *a))
    monkeypatch.setattr(Transform, "inverse", lambda self, *a: calls.append("inverse") or inverse(self, *a))
    y = model(x)
    assert calls == ["forward", "inverse"]
    T = t1.get_transform(transform)
    Y = model.kspace(T.forward(x, 2, 6))
    assert Y.shape == (3, 2, *T.block(6, (18, 16)))
    assert torch.allclose(T.inverse(Y, 2, (18, 16)), y, atol=1e-6)


def test_any_set_of_modes():
    y = torch.randn(5, 1, 14, 13)
    modes = t1.TopM(40).fit(y)
    model = t1.T1(1, 2, (14, 13), modes=modes, width=8, depth=2)
    out = model(y)
    assert out.shape == (5, 2, 14, 13)
    assert model.kspace(t1.dct(y, 2, modes)).shape == (5, 2, 40)
    assert t1.irreducible_loss(out.detach(), modes) < 1e-6  # it emits nothing but these modes
    assert model.layers[0].mixing.weights[0].shape == (40, 40)


def test_mixing_of_a_large_set_is_of_low_rank():
    with torch.device("meta"):
        layer = layers.T1Layer(4, (5000,), is_set=True)
    shapes = [tuple(weight.shape) for weight in layer.mixing.weights]
    assert shapes == [(layers.RANK, 5000), (5000, layers.RANK)]


def test_the_dft_variant_carries_real_and_imaginary_parts_as_channels():
    model = t1.T1(1, 1, (12, 12), modes=3, width=8, depth=1, transform="dft")
    assert model.block == (6, 3)
    assert model.lift.weight.shape == (8, 2 * (1 + 2))
    assert model.head[1].shape[0] == 2


def test_vp_goes_to_the_first_layer_only():
    model = t1.T1(1, 1, (64, 64), modes=8, width=16, depth=3, init="vp")
    variances = [layer.weight.var().item() for layer in model.layers]
    assert variances[0] == pytest.approx(64 * 64 / (16 * 64), rel=0.05)
    assert variances[1:] == pytest.approx([2 / 16] * 2, rel=0.05)
    xavier = t1.T1(1, 1, (64, 64), modes=8, width=16, depth=3, init="xavier")
    assert [layer.weight.var().item() for layer in xavier.layers] == pytest.approx([1 / 16] * 3, rel=0.05)


def test_vp_reaches_t1_plus():
    made = {}
    for init in ("vp", "xavier", "kaiming"):
        torch.manual_seed(0)
        made[init] = t1.T1Plus(1, 1, (64, 64), modes=24, width=8, init=init)
    variance = {init: model.layer.weight.var().item() for init, model in made.items()}
    assert variance["vp"] == pytest.approx(64 * 64 / (3 * 24 * 24), rel=0.1)
    assert variance["xavier"] == pytest.approx(1 / 3, rel=0.1)
    assert variance["kaiming"] == pytest.approx(2 / 3, rel=0.1)
    x = torch.randn(2, 1, 64, 64)
    assert not torch.allclose(made["vp"].eval()(x), made["kaiming"].eval()(x))


def test_vp_goes_to_every_layer_of_an_fno_and_an_ffno():
    fno = t1.FNO(1, 1, (64, 64), modes=8, width=16, depth=3, init="vp")
    for layer in fno.layers:
        assert layer.spectral.weight.var().item() == pytest.approx(64 * 64 / (2 * 16 * 8 * (4 * 8 - 3)), rel=0.05)
    ffno = t1.FFNO(1, 1, (64, 32), modes=8, width=16, depth=2, init="vp")
    for axes in ffno.spectral:
        for n, layer in zip((64, 32), axes, strict=True):
            assert layer.weight.var().item() == pytest.approx(n / (2 * 16 * (4 * 8 - 3)), rel=0.15)
    again = t1.vp_init_(t1.FNO(1, 1, (64, 64), modes=8, width=16, depth=1), (32, 32))
    assert again.layers[0].spectral.weight.var().item() == pytest.approx(32 * 32 / (2 * 16 * 8 * 29), rel=0.05)


def test_the_axes_of_an_ffno_layer_preserve_the_variance_together():
    model = t1.FFNO(1, 1, (32, 48), modes=8, width=32, depth=1, init="vp")
    x = torch.randn(64, 32, 32, 48)
    with torch.no_grad():
        y = sum(layer(x.movedim(axis, -1)).movedim(-1, axis) for axis, layer in enumerate(model.spectral[0], start=2))
    assert y.var().item() == pytest.approx(1, abs=0.1)


def fit(model, X, Y, steps, rate=3e-3):
    """Train on modes; the relative L2 of the last batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    generator = torch.Generator().manual_seed(0)
    history = []
    for _ in range(steps):
        batch = torch.randint(len(X), (32,), generator=generator)
        optimizer.zero_grad()
        loss = relative(model.kspace(X[batch]), Y[batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.append(loss.item())
    return sum(history[-20:]) / 20


def relative(prediction, target):
    return ((prediction - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


def smooth_modes(count, m, seed=0):
    decay = 1 / (1 + torch.arange(float(m)) // 2) ** 1.5
    return torch.randn(count, 1, m, m, generator=torch.Generator().manual_seed(seed)) * torch.outer(decay, decay)


def test_depth_helps():
    """A nonlinear map of smooth fields: after 300 steps 16 layers are no worse than 6."""
    X = smooth_modes(512, 8)
    x = t1.idct(X, 2, (16, 16)) * 2
    X = t1.dct(x, 2, 8)
    Y = t1.dct(torch.tanh(x) * x.roll(2, -1), 2, 8)
    losses = {}
    for depth in (6, 16):
        torch.manual_seed(0)
        losses[depth] = fit(t1.T1(1, 1, (16, 16), modes=8, width=12, depth=depth), X, Y, 300)
    print(losses)
    assert losses[16] <= 1.1 * losses[6]
    assert losses[6] < 0.9


def heat(X):
    """Heat flow between walls without flux: exact in the DCT."""
    k = torch.arange(X.shape[-1]) * math.pi
    return X * torch.exp(-0.004 * (k[:, None] ** 2 + k**2))


def advection(X, shift=0.13):
    """Advection along the columns with a little diffusion, periodic: exact in the Fourier basis, pair by pair."""
    k = (torch.arange(X.shape[-1]) + 1) // 2
    angle = 2 * math.pi * k[1::2] * shift
    cos, sin = X[..., 1::2], X[..., 2::2]
    moved = torch.stack([cos * angle.cos() - sin * angle.sin(), cos * angle.sin() + sin * angle.cos()], -1).flatten(-2)
    wave = 2 * math.pi * k
    return torch.cat([X[..., :1], moved], -1) * torch.exp(-5e-4 * (wave[:, None] ** 2 + wave**2))


def test_the_advection_used_below_is_a_shift():
    X = smooth_modes(1, 9)
    T = t1.get_transform("fourier")
    rolled = T.inverse(X, 2, (64, 64)).roll(16, -1)
    k = 2 * math.pi * ((torch.arange(9) + 1) // 2)
    damping = torch.exp(-5e-4 * (k[:, None] ** 2 + k**2))
    assert torch.allclose(T.inverse(advection(X, 0.25) / damping, 2, (64, 64)), rolled, atol=1e-5)


@pytest.mark.parametrize(("transform", "problem"), [("dct", heat), ("fourier", advection)])
def test_trained_weights_keep_their_error_on_other_grids(transform, problem):
    """Smooth fields with more modes (15) than the model keeps (9), sampled afresh on each grid."""
    T = t1.get_transform(transform)
    X = smooth_modes(512, 15)
    model = t1.T1(1, 1, (64, 64), modes=9, width=12, depth=2, transform=transform)
    assert fit(model, X[..., :9, :9], problem(X)[..., :9, :9], 400, rate=1e-2) < 0.25
    X = smooth_modes(64, 15, seed=1)
    errors = {}
    for grid in [(64, 64), (128, 128), (96, 48)]:
        scale = math.sqrt(math.prod(grid) / 64**2)
        x, y = (scale * T.inverse(modes, 2, grid) for modes in (X, problem(X)))
        with torch.no_grad():
            errors[grid] = relative(model(x), y).item()
    print(errors)
    for grid in [(128, 128), (96, 48)]:
        assert errors[grid] == pytest.approx(errors[64, 64], rel=0.1)


def test_without_mixing_advection_cannot_be_learned():
    X = smooth_modes(512, 9)
    Y = advection(X)

    losses = {}
    for mixing in (True, False):
        torch.manual_seed(0)
        model = t1.T1(1, 1, (64, 64), modes=9, width=12, depth=2, transform="fourier")
        if not mixing:
            for layer in model.layers:
                layer.mixing = torch.nn.Identity()
        losses[mixing] = fit(model, X, Y, 300, rate=1e-2)
    print(losses)
    assert losses[True] < 0.25
    assert losses[False] > 2 * losses[True]
    assert losses[False] > 0.4


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("local", ["pointwise", "conv"])
def test_local_maps(local, ndim):
    grid = (12, 10, 9)[:ndim]
    model = t1.T1(1, 2, grid, modes=5, width=6, depth=1, local=local)
    y = model(torch.randn(3, 1, *grid))
    assert y.shape == (3, 2, *grid)
    y.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(torch.randn(3, 1, *(2 * n for n in grid))).shape[2:] == tuple(2 * n for n in grid)
    T = t1.get_transform("dct")
    with pytest.raises(ValueError, match="train it on fields"):
        model.kspace(T.forward(torch.randn(3, 1, *grid), ndim, 5))
    with pytest.raises(ValueError, match="keeps the input's grid"):
        model(torch.randn(3, 1, *grid), size=20)
    with pytest.raises(ValueError, match="leave out_resolution"):
        t1.T1(1, 1, grid, modes=5, local=local, out_resolution=tuple(2 * n for n in grid))


def test_a_local_map_represents_a_jump_that_kept_modes_cannot():
    """The sign of a smooth field, from 6² modes: the irreducible loss binds plain T1 and not one with a local map."""
    x = t1.idct(smooth_modes(64, 6), 2, (24, 24)) * 8
    y = torch.tanh(20 * x)
    floor = t1.irreducible_loss(y, 6)
    losses = {}
    for local in (None, "pointwise"):
        torch.manual_seed(0)
        model = t1.T1(1, 1, (24, 24), modes=6, width=12, depth=1, local=local)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(150):
            optimizer.zero_grad()
            loss = relative(model(x), y)
            loss.backward()
            optimizer.step()
        losses[local] = loss.item()
    assert losses[None] >= floor
    assert losses["pointwise"] < 0.8 * floor


def test_any_body_in_t1_plus(tmp_path):
    body = torch.nn.Conv2d(3, 2, 3, padding=1)
    model = t1.T1Plus(1, 2, (16, 16), modes=8, body=body)
    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 2, 16, 16)
    t1.save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="saved with the modules body given by hand; got none"):
        t1.load(tmp_path / "model.safetensors")
    loaded = t1.load(tmp_path / "model.safetensors", body=torch.nn.Conv2d(3, 2, 3, padding=1))
    x = torch.randn(2, 1, 16, 16)
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(ValueError, match=r"must return modes of shape \(2, 2, 8, 8\); it returned \(2, 2, 6, 6\)"):
        t1.T1Plus(1, 2, (16, 16), modes=8, body=torch.nn.Conv2d(3, 2, 3))(x)
