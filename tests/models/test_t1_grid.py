"""T1Grid: between its two transforms it is its body, on the field that the kept modes make on few points."""

import math

import pytest
import torch

import transform_once as t1
from transform_once.models.t1_grid import GridLayer, gated, periodic_coordinates
from transform_once.training.optimizers import matrix_weights


@pytest.mark.parametrize("transform", ["dct", "fourier"])
@pytest.mark.parametrize("size", [(16,), (8, 12), (4, 8, 12)], ids=str)
def test_with_all_modes_it_is_its_body(transform, size):
    model = t1.T1Grid(2, 3, size, size, width=6, depth=2, transform=transform).double()
    x = torch.randn(4, 2, *size, dtype=torch.float64)
    assert torch.allclose(model(x), model.body(x), atol=1e-12)


@pytest.mark.parametrize("transform", ["dct", "fourier"])
def test_with_fewer_modes_it_is_its_body_on_the_small_field(transform):
    model = t1.T1Grid(1, 2, (20, 30), (7, 9), width=6, depth=2, transform=transform).double()
    T, scale = t1.get_transform(transform), math.sqrt(8 * 12 / (20 * 30))
    x = torch.randn(3, 1, 20, 30, dtype=torch.float64)
    small = T.inverse(T.forward(x, 2, (7, 9)), 2, (8, 12)) * scale
    expected = T.inverse(T.forward(model.body(small), 2, (7, 9)) / scale, 2, (20, 30))
    assert torch.allclose(model(x), expected, atol=1e-12)
    constant = torch.full((1, 1, 20, 30), 3.0, dtype=torch.float64)
    assert torch.allclose(T.inverse(T.forward(constant, 2, (7, 9)), 2, (8, 12)) * scale, constant[..., :8, :12])


def test_its_layers_act_on_all_waves_of_the_small_grid_up_to_a_limit():
    def waves(model):
        (found,) = {layer.spectral.modes for layer in model.body.layers}
        return found

    assert waves(t1.T1Grid(1, 1, (512,), 200, width=4, depth=1)) == (64,)
    assert waves(t1.T1Grid(1, 1, (40, 40, 40), (32, 12, 20), width=2, depth=1)) == (8, 6, 8)
    assert waves(t1.T1Grid(1, 1, (64, 64), 20)) == (10, 10)
    assert waves(t1.T1Grid(1, 1, (64, 64), (25, 9), transform="fourier")) == (14, 6)
    assert waves(t1.T1Grid(1, 1, (128, 128), 100, width=4, depth=1)) == (16, 16)
    assert waves(t1.T1Grid(1, 1, (64, 64), 24, width=4, depth=1, waves=5)) == (5, 5)


@pytest.mark.parametrize("size", [(12,), (8, 12), (4, 8, 6)], ids=str)
@pytest.mark.parametrize("periodic", [True, False], ids=["periodic", "bounded"])
def test_a_layer_equals_its_formula_and_begins_as_the_identity(size, periodic):
    torch.manual_seed(0)
    layer = GridLayer(5, 2, len(size), periodic).double()
    v = torch.randn(3, 5, *size, dtype=torch.float64)
    assert torch.equal(layer(v), v)
    torch.nn.init.normal_(layer.last.weight)
    mode = "circular" if periodic else "replicate"
    around = torch.nn.functional.pad(v, (1, 1) * len(size), mode=mode)
    weights = layer.around.weight.flatten(1).unflatten(1, (1 + 2 * len(size), 5))
    u = layer.spectral(v) + layer.around.bias.view(-1, *(1,) * len(size))
    u = u + torch.einsum("oi,bi...->bo...", weights[:, 0], v)
    middle = [slice(1, n + 1) for n in size]
    for axis, n in enumerate(size):
        left, right = (around[:, :, *middle[:axis], slice(s, s + n), *middle[axis + 1 :]] for s in (0, 2))
        u = u + torch.einsum("oi,bi...->bo...", weights[:, 1 + 2 * axis], (right - left) / 2)
        u = u + torch.einsum("oi,bi...->bo...", weights[:, 2 + 2 * axis], (right + left) / 2 - v)
    assert torch.allclose(layer(v), layer.last(product(u, layer.gate(u))) + v, atol=1e-12)
    assert torch.allclose(layer._around(v), layer.around(layer._with_differences(v)), atol=1e-12)


def product(u, z):
    """4g(u / 4) ⊙ g(z): sin(atan z) = z / √(1 + z²)."""
    return 4 * torch.atan(u / 4).sin() * torch.atan(z).sin()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_product_and_its_derivative_are_those_of_the_formula(dtype):
    torch.manual_seed(0)
    u, z = (8 * torch.randn(2, 3, 5, 7)).to(dtype).requires_grad_(), torch.randn(2, 3, 5, 7).to(dtype).requires_grad_()
    gradient = torch.randn(2, 3, 5, 7).to(dtype)
    found = torch.autograd.grad(gated(u, z), (u, z), gradient)
    u64, z64 = (x.detach().double().requires_grad_() for x in (u, z))
    expected = torch.autograd.grad(product(u64, z64), (u64, z64), gradient.double())
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    assert torch.allclose(gated(u, z).double(), product(u64, z64), **close)
    assert all(torch.allclose(one.double(), true, **close) for one, true in zip(found, expected, strict=True))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(gated, (u, z))
        assert torch.autograd.gradgradcheck(gated, (u, z))
        under_func = torch.func.vmap(torch.func.grad(lambda a, b: gated(a, b).sum()))(u, z)
        assert torch.allclose(under_func, torch.autograd.grad(product(u, z).sum(), u)[0])


def test_what_is_huge_is_bounded_and_what_is_not_a_number_stays_so():
    huge = torch.tensor([1e30, -1e30, torch.inf, 1e8, torch.nan], requires_grad=True)
    one = torch.full((5,), 1e30, requires_grad=True)
    found = gated(huge, one)
    assert torch.allclose(found[:4], torch.tensor([4.0, -4.0, 4.0, 4.0]))
    assert found[4].isnan()
    slopes = torch.autograd.grad(found[:4].sum(), (huge, one))
    assert all((slope[:4].abs() < 1e-6).all() for slope in slopes)


def test_layers_that_act_on_all_waves_need_no_neighbours():
    few, every = (t1.T1Grid(1, 1, (32, 32), 16, width=4, depth=1, waves=waves) for waves in (7, None))
    assert few.body.layers[0].around.in_channels == 20
    assert every.body.layers[0].around.in_channels == 4
    layer, v = GridLayer(5, 2, 1, True, neighbours=False), torch.randn(3, 5, 12)
    torch.nn.init.normal_(layer.last.weight)
    u = layer.spectral(v) + layer.around(v)
    assert torch.allclose(layer(v), layer.last(product(u, layer.gate(u))) + v, atol=1e-6)


def test_muon_takes_all_matrices_of_its_layers():
    found = matrix_weights(t1.T1Grid(1, 1, (16, 16), 8, width=4, depth=1))
    assert {name.removeprefix("body.layers.0.") for name in found} == {
        f"{part}.weight" for part in ("spectral", "around", "gate", "last")
    }


def test_the_gate_of_a_huge_number_is_one_and_not_zero():
    torch.manual_seed(0)
    layer, v = GridLayer(5, 2, 1, True), torch.randn(3, 5, 12)
    torch.nn.init.normal_(layer.last.weight)
    torch.nn.init.constant_(layer.gate.bias, 1e25)  # its square is infinite
    u = layer.spectral(v) + layer.around(layer._with_differences(v))
    assert torch.allclose(layer(v), layer.last(product(u, torch.tensor(1e9))) + v, rtol=1e-5, atol=1e-6)


def test_layers_add_to_large_channels_and_do_not_multiply_them():
    torch.manual_seed(0)
    v = start = 1e3 * torch.randn(3, 8, 12)
    for _ in range(16):
        layer = GridLayer(8, 2, 1, True)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, 0, 2)
        v = layer(v)
    assert (v - start).abs().max() < 16 * 8 * 4 * 2 * 5  # layers, channels, bound, five deviations of the last weights


def test_coordinates_of_a_periodic_field_have_no_seam():
    x = torch.zeros(2, 1, 8, 12, dtype=torch.float64)
    c = periodic_coordinates(x)
    assert c.shape == (2, 4, 8, 12)
    rows, columns = torch.arange(8).double() / 8, torch.arange(12).double() / 12
    assert torch.allclose(c[1, 0, :, 3], torch.sin(2 * math.pi * rows))
    assert torch.allclose(c[0, 3, 5], torch.cos(2 * math.pi * columns))
    moved = t1.T1Grid(1, 1, (8, 12), (7, 11), width=6, depth=1, transform="fourier").body
    assert moved.lift[0].in_channels == 5
    assert t1.T1Grid(1, 1, (8, 12), (7, 11), width=6, depth=1).body.lift[0].in_channels == 3


def test_any_body_works(tmp_path):
    body = torch.nn.Conv2d(1, 2, 3, padding=1)
    model = t1.T1Grid(1, 2, (16, 16), 8, body=body)
    x = torch.randn(3, 1, 16, 16)
    assert model(x).shape == (3, 2, 16, 16)
    t1.save(model, tmp_path / "model.safetensors")
    again = t1.load(tmp_path / "model.safetensors", body=torch.nn.Conv2d(1, 2, 3, padding=1))
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: t1.T1Grid(1, 1, (16, 16), 8, transform="dft"), "T1Grid works on a block of real modes"),
        (lambda: t1.T1Grid(1, 1, (16, 16), t1.TopM(9).fit(torch.randn(2, 1, 16, 16))), "not a ModeSet"),
        (lambda: t1.T1Grid(1, 1, (16, 16), (1, 8)), "at least two modes on every axis"),
        (lambda: t1.T1Grid(1, 1, (16, 16), 8, init="zeros"), "init must be one of"),
        (
            lambda: t1.T1Grid(1, 1, (16, 16), 8, waves=(3, 5)),
            r"waves lie between 1 and half of the points of an axis, \(4, 4\); got \(3, 5\)",
        ),
        (
            lambda: t1.T1Grid(1, 2, (16, 16), 8, body=torch.nn.Conv2d(1, 2, 3))(torch.randn(1, 1, 16, 16)),
            r"the body must return fields of shape \(1, 2, 8, 8\)",
        ),
    ],
)
def test_what_is_wrong_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_it_trains_on_kept_modes_and_learns_a_product_of_fields():
    """Squares of fields are local: on values they are learned at once, on coefficients they are convolutions."""
    torch.manual_seed(0)
    x = t1.idct(torch.randn(120, 1, 4, 4), 2, (16, 16)) * 4
    fields = t1.Fields(input=x, target=x.square(), grid="cell", periodic=False)
    errors = {}
    for kind in (t1.T1Grid, t1.T1):
        torch.manual_seed(0)
        model = kind(1, 1, (16, 16), modes=8, width=16, depth=2)
        run = t1.train(model, fields[:100], fields[100:], epochs=30, batch_size=10, device="cpu", progress=False)
        assert run.description["space"] == "k-space"
        errors[kind] = run.description["best"][0]["validation"]
    assert errors[t1.T1Grid] < 0.3 * errors[t1.T1]
