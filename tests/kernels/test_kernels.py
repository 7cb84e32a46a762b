"""Every kernel against its twin in plain torch, in float64: values and gradients."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import transform_once as t1
from transform_once import kernels
from transform_once.data.symmetries import Symmetry, draw
from transform_once.kernels import layer, layout, lift, loss, motion, muon, neighbours, norm, perceptron, transform
from transform_once.models.fno import FNOLayer, ReleasedFNO
from transform_once.models.layers import T1Layer
from transform_once.models.t1_grid import GridLayer, wave_rows
from transform_once.models.unet import BatchNorm
from transform_once.solvers.darcy import DARCY_SYMMETRIES
from transform_once.solvers.navier_stokes import NAVIER_STOKES_SYMMETRIES
from transform_once.spectral.bases import matrix
from transform_once.spectral.precision import matmul_precision
from transform_once.training import optimizers

pytestmark = pytest.mark.usefixtures("full")


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def gradients(output, inputs, seed=7):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, weights.to(output.device, output.dtype), retain_graph=True)


@pytest.mark.parametrize("activation", ["gelu", "sine"])
@pytest.mark.parametrize(
    ("block", "width", "batch"),
    [((7, 6), 5, 9), ((17, 5), 3, 17), ((9,), 4, 16), ((3, 4, 5), 2, 8), ((33, 2), 2, 66)],
    ids=str,
)
def test_a_layer_and_its_gradients(device, block, width, batch, activation):
    torch.manual_seed(0)
    plain = T1Layer(width, block, activation=activation).to(device, torch.float64)
    weights = [plain.weight, *plain.mixing.weights]
    Z = torch.randn(width, plain.weight.shape[0], batch, device=device, dtype=torch.float64, requires_grad=True)
    expected = plain(Z)
    own = [tensor.detach().float().requires_grad_() for tensor in (Z, *weights)]
    found = layer.fused_layer(own[0], activation == "sine", own[1], own[2:])
    assert relative(found, expected) < 1e-6
    for one, other in zip(gradients(found, own), gradients(expected, [Z, *weights]), strict=True):
        assert relative(one, other) < 2e-6
    with torch.no_grad():
        assert torch.equal(layer.fused_layer(own[0], activation == "sine", own[1], own[2:]), found)


def test_a_second_derivative_is_refused_and_not_wrong(device):
    plain = T1Layer(3, (4, 4)).to(device)
    Z = torch.randn(3, 16, 8, device=device, requires_grad=True)
    out = layer.fused_layer(Z, False, plain.weight, plain.mixing.weights)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), Z, create_graph=True)


@pytest.mark.parametrize(("width", "modes"), [(8, 50), (3, 7), (48, 5)])
def test_the_product_with_single_samples(device, width, modes):
    torch.manual_seed(0)
    Z = torch.randn(width, modes, 1, device=device, requires_grad=True)
    W = torch.randn(modes, width, width, device=device, requires_grad=True)
    expected = torch.bmm(W.double(), Z.double().transpose(0, 1)).transpose(0, 1)
    found = layer.single_product(Z, W)
    assert relative(found, expected) < 1e-6
    for one, other in zip(gradients(found, [Z, W]), gradients(expected, [Z, W]), strict=True):
        assert relative(one, other.double()) < 1e-6


def test_the_lift_and_its_gradients(device):
    torch.manual_seed(0)
    model = t1.T1(2, 1, (12, 10), modes=(5, 6), width=7, depth=1).to(device)
    X = torch.randn(2, 30, 4, device=device, requires_grad=True)
    weights = [model.lift.weight, model.lift.bias]
    found = lift.fused_lift(X, model.lift.coordinates, *weights)
    expected = model.lift.double()(X.double())
    assert relative(found, expected) < 1e-5
    other = gradients(expected, [X, model.lift.weight, model.lift.bias])
    single = [weight.detach().float().requires_grad_() for weight in weights]
    found = lift.fused_lift(X, model.lift.coordinates.float(), *single)
    for one, two in zip(gradients(found, [X, *single]), other, strict=True):
        assert relative(one, two.double()) < 2e-3  # sums over all modes are in tf32 on a GPU


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "none"])
@pytest.mark.parametrize("sine", [True, False], ids=["sine", "gelu"])
def test_a_perceptron_and_its_gradients(device, sine, biases):
    torch.manual_seed(0)
    sizes = [(2, 11, 13, 10), (40, 11), (3, 40), *([(40,), (3,)] if biases else [])]
    exact = [torch.randn(size, device=device, dtype=torch.float64, requires_grad=True) for size in sizes]
    x, inner, outer, *added = exact
    hidden = torch.einsum("hi,bi...->bh...", inner, x)
    hidden = hidden + added[0][:, None, None] if biases else hidden
    expected = torch.einsum("oh,bh...->bo...", outer, torch.sin(hidden) if sine else functional.gelu(hidden))
    expected = expected + added[1][:, None, None] if biases else expected
    own = [tensor.detach().float().requires_grad_() for tensor in exact]
    found = perceptron.perceptron(*own[:3], tuple(own[3:]) or None, sine, torch.float32)
    assert relative(found, expected) < 1e-6
    for one, other in zip(gradients(found, own), gradients(expected, exact), strict=True):
        assert relative(one, other) < 2e-6


def test_the_pointwise_part_of_an_fno_layer(device):
    torch.manual_seed(0)
    plain = FNOLayer(10, 3, 2).to(device, torch.float64)
    v, s = (torch.randn(3, 10, 9, 8, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain.spectral = torch.nn.Identity()
    weights = plain.pointwise_weights
    own = [tensor.detach().float().requires_grad_() for tensor in (s, v, *weights)]
    u = functional.gelu(s + plain.pointwise(v))
    expected = plain.perceptron(u) + v
    for found, exact, count in (
        (perceptron.fno_pointwise(own[0], own[1], own[2:]), expected, 8),
        (perceptron.fno_pointwise(own[0], own[1], own[2:4]), u, 4),  # without the perceptron
    ):
        assert relative(found, exact) < 1e-6
        others = gradients(exact, [s, v, *weights][:count])
        for one, other in zip(gradients(found, own[:count]), others, strict=True):
            assert relative(one, other) < 2e-6


@pytest.mark.parametrize("periodic", [True, False], ids=["periodic", "bounded"])
@pytest.mark.parametrize("near", [True, False], ids=["neighbours", "none"])
@pytest.mark.parametrize(("grid", "width"), [((70,), 10), ((9, 8), 40), ((4, 6, 5), 10), ((2, 3), 10)], ids=str)
def test_a_layer_of_t1_grid_and_its_gradients(device, grid, width, near, periodic):
    torch.manual_seed(0)
    plain = GridLayer(width, 1, len(grid), periodic, near).to(device, torch.float64)
    torch.nn.init.normal_(plain.last.weight)
    torch.nn.init.normal_(plain.last.bias)
    v, s = (torch.randn(3, width, *grid, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain.spectral = torch.nn.Identity()
    plain.spectral.register_forward_hook(lambda *_: s)
    exact = [s, v, *plain.pointwise_weights]
    own = [tensor.detach().float().requires_grad_() for tensor in exact]
    expected, found = plain(v), neighbours.grid_layer(*own[:2], own[2:], periodic)
    assert relative(found, expected) < 1e-6
    for one, other in zip(gradients(found, own), gradients(expected, exact), strict=True):
        assert relative(one, other) < 2e-6
    torch.nn.init.constant_(plain.gate.bias, 1e25)  # its square is infinite in float32, the gate is one
    own[5] = plain.gate.bias.detach().float()
    assert relative(neighbours.grid_layer(*own[:2], own[2:], periodic), plain(v)) < 1e-6


@pytest.mark.parametrize(
    ("grid", "waves", "width", "samples"),
    [((70,), 8, 10, 5), ((8, 12), 2, 40, 3), ((4, 6, 5), (1, 2, 2), 10, 3), ((4, 4), 2, 10, 70)],
    ids=str,
)
def test_a_layer_of_few_waves_and_its_gradients(device, grid, waves, width, samples):
    torch.manual_seed(0)
    plain = GridLayer(width, waves, len(grid), True).to(device, torch.float64)
    torch.nn.init.normal_(plain.last.weight)
    v = torch.randn(samples, width, *grid, device=device, dtype=torch.float64, requires_grad=True)
    exact = [v, plain.spectral.weight, *plain.pointwise_weights]
    own = [tensor.detach().float().requires_grad_() for tensor in exact]
    assert neighbours.few(plain.spectral.block, v)
    rows = wave_rows(own[0], plain.spectral.block)
    found = neighbours.grid_layer(None, own[0], own[2:], True, [own[1], *rows])
    expected = plain(v)
    assert relative(found, expected) < 1e-6
    for one, other in zip(gradients(found, own), gradients(expected, exact), strict=True):
        assert relative(one, other) < 2e-6
    assert not neighbours.few((16, 4), v)
    assert not neighbours.few((2 * grid[0],) * len(grid), v)


@pytest.mark.parametrize("order", [(2, 4, 1, 3, 0), (4, 2, 0, 3, 1)], ids=str)
def test_copies_in_another_order(device, order):
    torch.manual_seed(0)
    X = torch.randn(5, 3, 2, 8, 70, device=device)[:, :, :, ::2].requires_grad_()
    found = layout.permuted(X, order)
    assert found.is_contiguous()
    assert torch.equal(found, X.permute(order))
    weights = torch.randn(found.shape, device=device).transpose(0, 1).contiguous().transpose(0, 1)
    (gradient,) = torch.autograd.grad(found, X, weights)
    assert torch.equal(gradient, weights.permute([order.index(axis) for axis in range(5)]))


@pytest.mark.parametrize(
    ("make", "module", "kernel"),
    [
        (lambda: t1.FNO(1, 1, (16, 12), 3, 8, 2), perceptron, "fno_pointwise"),
        (lambda: ReleasedFNO(1, 1, (16, 12), 3, 8, 2), perceptron, "fno_pointwise"),
        (lambda: t1.T1Grid(1, 1, (16, 12), (7, 9), 8, 2), neighbours, "grid_layer"),
        (lambda: t1.T1Grid(1, 1, (16, 12), (7, 9), 8, 2, waves=2), neighbours, "grid_layer"),
        (lambda: t1.T1Grid(1, 1, (16, 12), (7, 9), 8, 2, waves=2, transform="fourier"), neighbours, "grid_layer"),
    ],
    ids=["fno", "released", "grid", "grid, neighbours", "grid, periodic"],
)
def test_a_whole_model_by_kernels(device, make, module, kernel, monkeypatch):
    """Every decision on the way is taken as in training on a GPU; tf32 is what may differ."""
    torch.manual_seed(0)
    model, x = make().to(device), torch.randn(2, 1, 16, 12, device=device)
    for parameter in model.parameters():
        if not parameter.any():  # layers of T1Grid begin with zeros, which would hide mistakes
            torch.nn.init.normal_(parameter, std=0.3)
    exact = copy.deepcopy(model).double()
    expected = exact(x.double())
    others = gradients(expected, list(exact.parameters()))
    monkeypatch.setattr(kernels, "can_run", lambda *_: True)
    monkeypatch.setattr(kernels, "pays", lambda _: True)
    used, own = [], getattr(module, kernel)
    monkeypatch.setattr(module, kernel, lambda *given: used.append(1) or own(*given))
    with matmul_precision("high"):
        found = model(x)
        ours = gradients(found, list(model.parameters()))
    assert len(used) == 2
    assert relative(found, expected) < 5e-3
    for one, other in zip(ours, others, strict=True):
        assert relative(one, other) < 2e-2


@pytest.mark.parametrize("precision", ["high", "medium"], ids=["tf32", "bfloat16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: t1.T1(1, 1, (8, 6), 3, 4, 1),
        lambda: t1.FNO(1, 1, (8, 6), 2, 4, 1),
        lambda: t1.T1Grid(1, 1, (8, 6), 4, 4, 1, waves=1),
    ],
    ids=["T1", "FNO", "T1Grid"],
)
def test_what_is_not_a_number_is_not_hidden(device, make, precision, monkeypatch):
    """A NaN of all ones, as GPUs make it, in any weight: the output must show it, or training would go on with it."""
    torch.manual_seed(0)
    model, x = make().to(device), torch.randn(1, 1, 8, 6, device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    monkeypatch.setattr(kernels, "can_run", lambda *_: True)
    monkeypatch.setattr(kernels, "pays", lambda _: True)
    ones = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=device).view(torch.float32)
    low = torch.autocast(device.type, torch.bfloat16, enabled=precision == "medium")
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        parameter.data.copy_(ones)
        with torch.no_grad(), matmul_precision("high"), low:
            assert not model(x).isfinite().any(), name
        parameter.data.copy_(before)


@pytest.mark.parametrize(
    ("symmetries", "transform"),
    [
        (NAVIER_STOKES_SYMMETRIES, "fourier"),
        ((Symmetry(signs=(-1, 1), factors=(1.0, -1.0)),), "fourier"),
        (DARCY_SYMMETRIES, "dct"),
    ],
)
@pytest.mark.parametrize("lead", [(2,), (3, 2)], ids=["pairs", "frames"])
def test_motions_of_coefficients(device, symmetries, transform, lead):
    torch.manual_seed(0)
    X = torch.randn(6, *lead, 7, 7, device=device, dtype=torch.float64)
    constants = torch.tensor([0.3, -2.0], device=device, dtype=torch.float64)
    moves = draw(symmetries, 6, device)
    table = moves.table
    for inputs in (False, True):
        for added in (None, constants):
            swapped = table.permuted[0] if table.permutations else None
            factors = table.input_factors if inputs else table.factors
            tables = (moves.choice, moves.shift, table.signs, table.offset, table.direction, factors, swapped)
            found = motion.move_modes(X.float(), *tables, added, cosines=transform == "dct")
            assert relative(found, moves.modes(X, transform, inputs=inputs, constants=added)) < 1e-6


@pytest.mark.parametrize(("frames", "channels", "modes"), [(1, 1, 49), (3, 2, 1500)])
def test_the_loss_and_its_gradient(device, frames, channels, modes):
    torch.manual_seed(0)
    shape = (5, frames, channels, modes)
    target = torch.randn(shape, device=device)
    # As models give it: the batch last in memory.
    prediction = torch.randn(frames, channels, modes, 5, device=device).permute(3, 0, 1, 2).requires_grad_()
    tail = torch.rand(5, frames, channels, device=device, dtype=torch.float64)
    energy = 1 + torch.rand(5, frames, channels, device=device, dtype=torch.float64)
    scales = torch.rand(channels, device=device, dtype=torch.float64)
    error = (prediction.double() - target).square().sum(-1) + tail
    expected = ((scales * error).sum((1, 2)) / energy.sum((1, 2))).sqrt()
    found = loss.relative_l2(prediction, target, tail, energy, scales)
    assert relative(found, expected) < 1e-6
    (one,), (other,) = gradients(found, [prediction]), gradients(expected, [prediction])
    assert relative(one, other.double()) < 1e-6
    with torch.no_grad():
        prediction[2, 0, 0, 7] = math.nan
    assert (
        loss.relative_l2(prediction, target, tail, energy, scales).isnan().tolist()
        == [False] * 2 + [True] + [False] * 2
    )


@pytest.mark.parametrize("name", ["dct", "fourier"])
@pytest.mark.parametrize(("size", "modes"), [((70,), 9), ((20, 33), (5, 31)), ((9, 6, 7), (3, 6, 7))], ids=str)
def test_transforms_there_and_back(device, name, size, modes):
    torch.manual_seed(0)
    T, ndim = t1.get_transform(name), len(size)
    x = torch.randn(3, 2, *size, device=device, dtype=torch.float64, requires_grad=True)
    single = x.detach().float().requires_grad_()
    expected, found = T.forward(x, ndim, modes), single
    for axis in range(-ndim, 0):
        A = matrix(name, size[axis], expected.shape[axis], torch.float32, device)
        found = transform.along(A, found, axis)
    assert relative(found, expected) < 1e-6
    (one,), (other,) = gradients(found, [single]), gradients(expected, [x])
    assert relative(one, other) < 1e-6
    back = found
    for axis in range(-ndim, 0):
        back = transform.along(matrix(name, size[axis], back.shape[axis], torch.float32, device).T, back, axis)
    assert relative(back, T.inverse(expected, ndim, size)) < 1e-6


@pytest.mark.parametrize("pairs", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("shape", [(20, 12), (12, 60)], ids=str)
def test_a_step_of_muon(device, shape, pairs):
    torch.manual_seed(0)
    sizes = (optimizers.NEWTON_SCHULZ, optimizers.NEWTON_SCHULZ_STEPS, pairs)
    W, G, M = (torch.randn(6, *shape, *([2] if pairs else []), device=device) for _ in range(3))
    for number, size in ((2, 0), (3, 1e-25), (4, 1e25)):  # squares of the last two are beyond float32
        G[number] *= size
        M[number] *= size
    new = 0.95 * M + 0.05 * G
    update = (0.05 * G + 0.95 * new).double()
    if pairs:
        steps = torch.view_as_real(optimizers.orthogonalize(torch.view_as_complex(update))).float()
    else:
        steps = optimizers.orthogonalize(update).float()
    expected = (1 - 0.01 * 0.1) * W - 0.01 * 3.0 * steps
    before = W.clone()
    muon.muon_step(W, G, M, torch.tensor(0.01, device=device), 0.95, 0.1, 3.0, *sizes)
    assert ((M - new).flatten(1).abs().amax(1) <= 1e-6 * new.flatten(1).abs().amax(1)).all()
    # The rounds run in bfloat16 on a GPU, which training does not feel.
    tolerance = 0.05 if device.type == "cuda" else 1e-4
    assert (W - expected).abs().max() < tolerance * (expected - before).abs().max()
    assert torch.allclose(W[2], (1 - 0.01 * 0.1) * before[2])


def test_muon_by_kernels_moves_all_matrices_of_a_model(device, monkeypatch):
    """Real and complex, square or not, those of convolutions too; what is larger than a kernel holds takes torch."""
    torch.manual_seed(0)
    models = [t1.FNO(1, 1, (8, 8), 2, 6, 2)]
    for part, hidden in zip(models[0].layers, (12, 20), strict=True):
        part.perceptron = torch.nn.Sequential(
            torch.nn.Conv2d(6, hidden, 1), torch.nn.GELU(), torch.nn.Conv2d(hidden, 6, 1)
        )
    models[0].to(device)
    models.append(copy.deepcopy(models[0]))
    used, step = [], muon.muon_step
    monkeypatch.setattr(muon, "muon_step", lambda *given: used.append(given[0].shape) or step(*given))
    monkeypatch.setattr(muon, "LARGEST", 16)
    for model, runs in zip(models, (False, True), strict=True):
        monkeypatch.setattr(kernels, "can_run", lambda *_, runs=runs: runs)
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers.make_optimizer(model, "muon", 0.01, 0.1).step()
    assert sorted(map(tuple, used)) == sorted([(8, 6, 6, 2)] * 2 + [(1, 6, 6)] * 2 + [(1, 12, 6), (1, 6, 12)])
    tolerance = 0.05 if device.type == "cuda" else 1e-4
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one - other).abs().max() < tolerance * 0.01


@pytest.mark.parametrize("shape", [(5, 7, 3, 4), (70, 40, 2), (2, 3, 2, 3, 2)], ids=str)
def test_batch_norm_and_its_gradients(device, shape):
    torch.manual_seed(0)
    plain = BatchNorm(shape[1]).to(device, torch.float64).train()
    x = (100 + torch.randn(shape, device=device, dtype=torch.float64)).requires_grad_()
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.uniform_(-1, 1)
    own = [tensor.detach().float().requires_grad_() for tensor in (x, plain.weight, plain.bias)]
    running = [plain.running_mean.float(), plain.running_variance.float()]
    found = norm.batch_norm(*own, *running, plain.momentum, plain.epsilon)
    expected = plain(x)
    assert relative(found, expected) < 1e-4  # the mean is a hundred times the spread
    assert relative(running[0], plain.running_mean) < 1e-6
    assert relative(running[1], plain.running_variance) < 1e-4
    others = gradients(expected, [x, plain.weight, plain.bias])
    for one, other in zip(gradients(found, own), others, strict=True):
        assert relative(one, other) < 1e-4


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """Which the interpreter does not show. In a process of its own: here kernels may be interpreted."""
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_leave_the_plain_way_to_all_that_torch_must_follow(device):
    x = torch.randn(3, device=device)
    assert kernels.can_run(x) == (device.type == "cuda")
    assert not kernels.can_run(x.double())
    assert not kernels.can_run(x, x.cpu())
    seen = []
    torch.vmap(lambda row: seen.append(kernels.can_run(row)) or row)(x[:, None])
    assert seen == [False]
