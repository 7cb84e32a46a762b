"""Optimisers against SVDs and torch's own; rates against torch's schedulers; the average against its closed form."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import transform_once as t1
from transform_once.spectral.modes import TopM
from transform_once.training.optimizers import (
    NEWTON_SCHULZ_BAND,
    OPTIMIZERS,
    SCHEDULES,
    Average,
    Muon,
    make_optimizer,
    matrix_weights,
    newton_schulz,
    orthogonalize,
    rate,
    set_rate,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def small_t1(**options):
    return t1.T1(1, 1, (16, 16), modes=6, width=8, depth=2, **options)


MODELS = {
    "T1": small_t1,
    "T1 complex": lambda: small_t1(transform="dft"),
    "T1 local": lambda: small_t1(local="conv"),
    "T1Plus": lambda: t1.T1Plus(1, 1, (16, 16), modes=6, width=4),
    "FNO": lambda: t1.FNO(1, 1, (16, 16), modes=4, width=4, depth=2),
    "FFNO": lambda: t1.FFNO(1, 1, (16, 16), modes=4, width=4, depth=2),
    "UNet": lambda: t1.UNet(1, 1, (16, 16), width=4),
}

DEFAULTS = {"fraction": 0.0, "epoch": 0.0, "step": 0, "warmup": 0.0, "step_size": 100, "gamma": 0.5, "period": 7}


def give_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.grad = torch.zeros_like(p).copy_(noise)  # laid out in memory as the parameter is


def train(model, optimizer, x, y, steps, schedule="constant"):
    """Relative L2 before each step."""
    losses, highest = [], optimizer.param_groups[0]["lr"]
    for step in range(steps):
        set_rate(optimizer, rate(schedule, highest, **(DEFAULTS | {"fraction": (step + 0.5) / steps})))
        optimizer.zero_grad()
        loss = (model(x) - y).norm() / y.norm()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def spread_matrices(rows, columns, is_complex=False, batch=3):
    """Random matrices whose singular values are spread evenly from 0.01 to 1 on a logarithmic scale, in float64."""
    dtype = torch.complex128 if is_complex else torch.float64
    U, _, Vh = torch.linalg.svd(torch.randn(batch, rows, columns, dtype=dtype), full_matrices=False)
    s = torch.logspace(-2, 0, min(rows, columns), dtype=torch.float64)
    return (U * s.to(dtype)) @ Vh, U @ Vh


# Newton-Schulz


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (2, 3)])
def test_newton_schulz_keeps_the_directions_and_brings_the_singular_values_into_the_band(shape, is_complex):
    X, _ = spread_matrices(*shape, is_complex)
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    inner = U.mH @ newton_schulz(X) @ Vh.mH  # diagonal where the directions are the same
    found = inner.diagonal(dim1=1, dim2=2)
    assert torch.allclose(inner, torch.diag_embed(found), atol=1e-12)
    if is_complex:
        assert found.imag.abs().max() < 1e-12
    low, high = NEWTON_SCHULZ_BAND
    assert (found.real > low).all()
    assert (found.real < high).all()
    assert (found.real - s).abs().max() > 0.3


def test_the_band_is_the_one_that_is_stated():
    s = torch.logspace(math.log10(0.0015), 0, 20001, dtype=torch.float64)[:, None, None]
    found = newton_schulz(s)
    low, high = NEWTON_SCHULZ_BAND
    assert low < found.min() < low + 0.05
    assert high - 0.05 < found.max() < high


@given(st.integers(2, 6), st.integers(2, 6), st.floats(-30, 30), st.booleans())
def test_orthogonalize_is_near_the_polar_factor_whatever_the_size(rows, columns, exponent, is_complex):
    X, polar = spread_matrices(rows, columns, is_complex)
    found = orthogonalize((X * 10**exponent).to(torch.complex64 if is_complex else torch.float32))
    # The Frobenius norm divides the smallest singular value by at most √6, still above 0.0015.
    assert torch.linalg.matrix_norm(found - polar, 2).max() < 1 - NEWTON_SCHULZ_BAND[0]


def test_a_batch_equals_its_matrices_one_by_one():
    X = torch.randn(7, 4, 6)
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in X])
    assert torch.allclose(orthogonalize(X), alone, atol=1e-6)


def test_complex_matrices_equal_their_real_embedding():
    X, _ = spread_matrices(4, 6, is_complex=True)

    def embed(A):
        return torch.cat([torch.cat([A.real, -A.imag], 2), torch.cat([A.imag, A.real], 2)], 1)

    assert torch.allclose(embed(newton_schulz(X)), newton_schulz(embed(X)), atol=1e-12)


def test_a_zero_matrix_stays_zero():
    assert orthogonalize(torch.zeros(2, 3, 3)).eq(0).all()


def test_bfloat16_is_precise_enough():
    X, polar = spread_matrices(24, 24)
    found = newton_schulz((X / torch.linalg.matrix_norm(X)[:, None, None]).bfloat16()).double()
    s = torch.linalg.svdvals(polar.mT @ found)
    assert s.min() > NEWTON_SCHULZ_BAND[0] - 0.15
    assert s.max() < NEWTON_SCHULZ_BAND[1] + 0.05


# Which parameters are matrices


def test_the_matrices_of_each_model():
    def of(model):
        return {name: form for name, form in matrix_weights(model).items() if ".1." not in name}

    layer = {"weight": (1, False), "mixing.weights.0": (1, False), "mixing.weights.1": (1, False)}
    assert of(small_t1()) == {f"layers.0.{name}": form for name, form in layer.items()}
    assert of(small_t1(local="conv")) == of(small_t1())
    top = t1.T1(1, 1, (16, 16), modes=TopM(20).fit(torch.randn(4, 1, 16, 16)), width=8, depth=1)
    assert of(top) == {"layers.0.weight": (1, False), "layers.0.mixing.weights.0": (1, False)}
    assert of(MODELS["FNO"]()) == {
        "layers.0.spectral.weight": (1, True),
        "layers.0.pointwise.weight": (3, False),
        "layers.0.perceptron.0.weight": (3, False),
        "layers.0.perceptron.2.weight": (3, False),
    }
    assert set(of(MODELS["FFNO"]())) == {
        *("spectral.0.0.weight", "feed_forward.0.0.weight", "feed_forward.0.2.weight"),
    }
    plus = matrix_weights(MODELS["T1Plus"]())
    assert {f"layer.{name}" for name in layer} < set(plus)
    unet = matrix_weights(MODELS["UNet"]())
    assert "body.encoder.1.1.weight" in unet
    for forms in (plus, unet):
        assert not any(name.startswith(("body.encoder.0.", "body.head.")) for name in forms)


def test_single_rows_are_no_matrices():
    assert matrix_weights(nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 1), nn.Linear(5, 2))) == {"2.weight": (1, False)}


# Muon


def test_a_muon_step_is_the_equation():
    model = MODELS["FNO"]().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, "muon", 0.01, 0.1)
    momenta = dict.fromkeys(before, 0)
    for seed in range(3):
        give_gradients(model, seed)
        optimizer.step()
        for name, (columns, pairs) in matrix_weights(model).items():
            G = model.get_parameter(name).grad
            momenta[name] = 0.95 * momenta[name] + 0.05 * G
            update = 0.05 * G + 0.95 * momenta[name]
            X = torch.view_as_complex(update) if pairs else update.flatten(-columns)[None]
            unit = X / torch.linalg.matrix_norm(X)[:, None, None]
            O = newton_schulz(unit) * 0.2 * math.sqrt(max(X.shape[1:]) * (2 if pairs else 1))  # noqa: E741
            O = (torch.view_as_real(O) if pairs else O).reshape(G.shape)  # noqa: E741
            before[name] = (1 - 0.01 * 0.1) * before[name] - 0.01 * O
    for name in matrix_weights(model):
        assert torch.allclose(model.get_parameter(name), before[name], rtol=0, atol=1e-12), name


def test_the_rest_is_torchs_adamw_bit_by_bit():
    model = MODELS["UNet"]()
    twin = copy.deepcopy(model)
    muon, adamw = (make_optimizer(m, name, 0.01, 0.1) for m, name in ((model, "muon"), (twin, "adamw")))
    for seed in range(3):
        for m, optimizer in ((model, muon), (twin, adamw)):
            give_gradients(m, seed)
            optimizer.step()
    matrices = matrix_weights(model)
    for name, p in model.named_parameters():
        assert torch.equal(p, twin.get_parameter(name)) is (name not in matrices), name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_linear_weights_move_as_in_torchs_muon():
    model = nn.Linear(12, 8, bias=False)
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(model, "muon", 0.01, 0.1)
    other = torch.optim.Muon(twin.parameters(), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = model.weight.detach().clone()
    for seed in range(2):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        optimizer.step()
        other.step()
    # Torch's works in bfloat16 everywhere, hence the tolerance.
    assert (model.weight - twin.weight).norm() < 0.03 * (model.weight - before).norm()


@pytest.mark.parametrize("name", MODELS)
def test_a_muon_step_is_of_one_size_for_every_shape(name):
    model = MODELS[name]()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    give_gradients(model)
    make_optimizer(model, "muon", 1e-2, 0.0).step()
    for key in matrix_weights(model):
        step = (model.get_parameter(key) - before[key]).square().mean().sqrt()
        assert 0.55 * 0.2e-2 < step < 1.25 * 0.2e-2, key


def test_members_stacked_in_front_move_as_each_alone():
    models = [MODELS["FNO"]() for _ in range(3)]
    for seed, model in enumerate(models):
        give_gradients(model, seed)
    groups = []
    for name, (columns, pairs) in matrix_weights(models[0]).items():
        stacked = torch.stack([model.get_parameter(name).detach() for model in models]).requires_grad_()
        stacked.grad = torch.stack([model.get_parameter(name).grad for model in models])
        groups.append({"params": [stacked], "columns": columns, "pairs": pairs})
    Muon(groups, 0.01, 0.1).step()
    for model in models:
        make_optimizer(model, "muon", 0.01, 0.1).step()
    for name, group in zip(matrix_weights(models[0]), groups, strict=True):
        alone = torch.stack([model.get_parameter(name) for model in models])
        assert torch.allclose(group["params"][0], alone, atol=1e-6)


# Both optimisers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_steps(name, optimizer):
    model = MODELS[name]()
    x, y = torch.randn(2, 4, 1, 16, 16)
    before = copy.deepcopy(model.state_dict())
    train(model, make_optimizer(model, optimizer, 1e-3, 1e-4), x, y, 3)
    for key, p in model.named_parameters():
        assert torch.isfinite(p).all(), key
        assert not torch.equal(p, before[key]), key


@pytest.mark.parametrize(("optimizer", "learning_rate"), [("adamw", 1e-2), ("muon", 2e-2)])
def test_a_t1_learns_a_linear_map(optimizer, learning_rate):
    T = t1.get_transform("dct")
    X = torch.randn(64, 1, 6, 6)
    k = torch.arange(6.0)
    Y = X * torch.exp(-0.05 * (k[:, None] ** 2 + k**2))  # heat flow for some time
    x, y = (T.inverse(Z, ndim=2, size=(16, 16)) for Z in (X, Y))
    model = small_t1()
    losses = train(model, make_optimizer(model, optimizer, learning_rate, 1e-4), x, y, 200, schedule="cosine")
    assert losses[0] > 0.9
    assert losses[-1] < losses[0] / 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_continues_bit_by_bit(optimizer, capturable, dtype, tmp_path):
    model = MODELS["FNO"]().to(dtype)
    first = make_optimizer(model, optimizer, 1e-2, 0.1, capturable=capturable)
    for seed in range(3):
        give_gradients(model, seed)
        first.step()
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for values in state["state"].values() for value in values.values())
    twin = copy.deepcopy(model)
    second = make_optimizer(twin, optimizer, 1.0, 0.0, capturable=capturable)
    second.load_state_dict(state)
    for seed in range(3, 6):
        for m, o in ((model, first), (twin, second)):
            give_gradients(m, seed)
            o.step()
    for (name, p), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, other), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rate_in_a_tensor_acts_as_a_number_and_stays_the_same_tensor(optimizer):
    model = MODELS["FNO"]()
    twin = copy.deepcopy(model)
    plain = make_optimizer(model, optimizer, 1.0, 0.1)
    capturable = make_optimizer(twin, optimizer, 1.0, 0.1, capturable=True)
    rates = [group["lr"] for group in capturable.param_groups]
    for seed, value in enumerate((0.5, 0.25)):
        for m, o in ((model, plain), (twin, capturable)):
            set_rate(o, value)
            give_gradients(m, seed)
            o.step()
    for value, group in zip(rates, capturable.param_groups, strict=True):
        assert group["lr"] is value
        assert value == 0.25
    assert {group["lr"] for group in plain.param_groups} == {0.25}
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, other, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["T1", "FNO", "UNet"])
def test_a_captured_step_equals_an_eager_one(name, optimizer):
    models = [MODELS[name]().cuda()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [make_optimizer(m, optimizer, 0.5, 0.1, capturable=True) for m in models]
    averages = [Average(m, 0.9) for m in models]

    def step(which):
        optimizers[which].step()
        averages[which].update(models[which])

    for model in models:
        give_gradients(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(0)  # makes the moments
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    step(1)
    for seed, value in enumerate((0.25, 0.125), start=1):
        for model, o in zip(models, optimizers, strict=True):
            set_rate(o, value)
            for p, q in zip(model.parameters(), MODELS[name]().parameters(), strict=True):
                p.grad.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        step(1)
    for key, tensor in models[0].state_dict().items():
        assert torch.allclose(tensor, models[1].state_dict()[key], atol=1e-6), key
        assert torch.allclose(averages[0].tensors[key], averages[1].tensors[key], atol=1e-6), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_torchs_and_all_parameters_decay(dtype):
    model = small_t1().to(dtype)
    twin = copy.deepcopy(model)
    ours = make_optimizer(model, "adamw", 1e-2, 0.3)
    assert ours.param_groups[0]["fused"]
    assert len(ours.param_groups) == 1
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.3, fused=False)
    for seed in range(3):
        for m, o in ((model, ours), (twin, reference)):
            give_gradients(m, seed)
            o.step()
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_complex_parameters_and_frozen_ones(optimizer):
    model = nn.Module()
    model.own = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
    model.linear = nn.Linear(3, 3)
    model.linear.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    give_gradients(model)
    make_optimizer(model, optimizer, 1e-2, 0.1).step()
    assert torch.equal(model.linear.weight, before["linear.weight"])
    assert not torch.equal(model.own, before["own"])
    assert not torch.equal(model.linear.bias, before["linear.bias"])


def test_muon_calls_its_closure_with_gradients():
    model = nn.Linear(3, 3)
    optimizer = make_optimizer(model, "muon", 1e-2, 0.0)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sgd", 1e-3, 0.0), "optimizer must be one of 'adamw', 'muon'; got 'sgd'"),
        (("adamw", 0.0, 0.0), "learning_rate must be a positive number; got 0.0"),
        (("muon", math.nan, 0.0), "learning_rate must be a positive number; got nan"),
        (("muon", 1e-3, -1.0), "weight_decay must be a number of at least 0; got -1.0"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(nn.Linear(2, 2), *arguments)


def test_a_model_without_parameters_is_named():
    with pytest.raises(ValueError, match="ReLU has no trainable parameters"):
        make_optimizer(nn.ReLU(), "adamw", 1e-3, 0.0)


# The rate


def torch_rates(make, count):
    """The rates that a scheduler of torch gives before each of `count` steps."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    scheduler = make(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_rates_equal_torchs_schedulers():
    schedulers = torch.optim.lr_scheduler
    expected = torch_rates(lambda o: schedulers.StepLR(o, step_size=4, gamma=0.5), 15)
    found = [rate("step", 0.3, **(DEFAULTS | {"epoch": k + 0.9, "step_size": 4})) for k in range(15)]
    assert found == pytest.approx(expected)
    expected = torch_rates(lambda o: schedulers.CosineAnnealingLR(o, T_max=20), 21)
    found = [rate("cosine", 0.3, **(DEFAULTS | {"fraction": k / 20})) for k in range(21)]
    assert found == pytest.approx(expected)
    expected = torch_rates(lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=7), 30)
    found = [rate("restarts", 0.3, **(DEFAULTS | {"step": k})) for k in range(30)]
    assert found == pytest.approx(expected)


def test_warm_up_then_cosine_equals_torchs_in_sequence():
    schedulers = torch.optim.lr_scheduler

    def warm_up_then_cosine(optimizer):
        return schedulers.LambdaLR(optimizer, lambda k: k / 5 if k < 5 else (1 + math.cos(math.pi * (k - 5) / 20)) / 2)

    expected = torch_rates(warm_up_then_cosine, 26)
    found = [rate("cosine", 0.3, **(DEFAULTS | {"fraction": k / 25, "warmup": 0.2})) for k in range(26)]
    assert found == pytest.approx(expected)


@given(st.sampled_from(SCHEDULES), st.floats(0, 1), st.floats(0, 500), st.integers(0, 1000), st.floats(0.01, 0.9))
def test_a_warm_up_multiplies_any_schedule(schedule, fraction, epoch, step, warmup):
    where = DEFAULTS | {"fraction": fraction, "epoch": epoch, "step": step}
    found = rate(schedule, 0.3, **(where | {"warmup": warmup}))
    assert 0 <= found <= 0.3
    if schedule != "cosine":  # which starts its descent only after the warm-up
        assert found == pytest.approx(rate(schedule, 0.3, **where) * min(1, fraction / warmup))


@pytest.mark.parametrize(
    ("schedule", "changes", "message"),
    [
        ("linear", {}, "schedule must be one of"),
        ("constant", {"warmup": 1.0}, "warmup is a fraction of the run"),
        ("step", {"step_size": 0}, "must be at least 1; got 0 and 7"),
        ("restarts", {"period": 0}, "must be at least 1; got 100 and 0"),
    ],
)
def test_bad_schedules_are_named(schedule, changes, message):
    with pytest.raises(ValueError, match=message):
        rate(schedule, 0.3, **(DEFAULTS | changes))


# The average


def test_the_average_is_its_closed_form_and_counters_are_copied():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))  # which counts its batches
    average = Average(model, 0.8)
    history = [copy.deepcopy(model.state_dict())]
    for _ in range(4):
        model(torch.randn(2, 1, 16, 16))  # moves the statistics of the norms
        for p in model.parameters():
            p.data.add_(torch.randn_like(p))
        average.update(model)
        history.append(copy.deepcopy(model.state_dict()))
    assert average.tensors.keys() == model.state_dict().keys()
    counters = 0
    for name, found in average.tensors.items():
        if found.is_floating_point():
            expected = 0.8**4 * history[0][name]
            expected = expected + sum(0.2 * 0.8 ** (4 - n) * history[n][name] for n in range(1, 5))
            assert torch.allclose(found, expected, atol=1e-6), name
        else:
            counters += 1
            assert found == 4
    assert counters > 0


def test_the_average_is_lent_and_taken_back_bit_by_bit():
    model = MODELS["UNet"]().eval()
    x = torch.randn(2, 1, 16, 16)
    average = Average(model, 0.5)
    pointers = [p.data_ptr() for p in model.parameters()]
    for p in model.parameters():
        p.data.add_(torch.randn_like(p))
    average.update(model)
    before, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(average.tensors)
    twin = MODELS["UNet"]().eval()
    twin.load_state_dict(average.tensors)

    def interrupted():
        with average.applied(model):
            assert torch.equal(model(x), twin(x))
            assert [p.data_ptr() for p in model.parameters()] == pointers
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(average.tensors[name], kept[name])


def test_an_average_of_equal_weights_is_these_weights():
    model = small_t1()
    average = Average(model, 0.999)
    for _ in range(5):
        average.update(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(average.tensors[name], tensor)


def test_bad_averages_are_named():
    with pytest.raises(ValueError, match=r"decay must be from 0 to less than 1; got 1\.0"):
        Average(nn.Linear(2, 2), 1.0)
    with pytest.raises(ValueError, match="of another model, which differs in bias"):
        Average(nn.Linear(2, 2), 0.9).update(nn.Linear(2, 2, bias=False))
