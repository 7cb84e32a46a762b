"""Parameter counts, shapes and what every model must be able to do."""

import copy
import math
import subprocess
import sys

import pytest
import torch

import transform_once as t1
from transform_once.models.ffno import ReleasedFFNO
from transform_once.models.fno import ReleasedFNO


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


PUBLISHED = {
    "FNO 24/6/32": (14_166_593, lambda: ReleasedFNO(1, 1, (64, 64), modes=24, width=32, depth=6)),
    "FFNO 32/10/82": (8_889_057, lambda: t1.FFNO(1, 1, (64, 64), 32, 82, 10, coordinates=False)),
    "T1 24/6/48": (8_300_864, lambda: t1.T1(1, 1, (64, 64), modes=24, width=48, depth=6)),
    "T1+ 24, exponent 6": (10_230_989, lambda: t1.T1Plus(1, 1, (64, 64), modes=24, width=64)),
    "airfoil FNO": (31_871_555, lambda: ReleasedFNO(3, 3, (128, 128), modes=24, width=48, depth=6)),
    "DFPNet128": (12_978_947, lambda: t1.UNet(3, 3, (128, 128), width=64)),
    "airfoil T1+": (3_559_633, lambda: t1.T1Plus(3, 3, (128, 128), modes=100, width=32)),
    "ScalarFlow FNO": (84_950_705, lambda: ReleasedFNO(2, 1, (1062, 600), modes=48, width=48, depth=4)),
    "ScalarFlow T1": (83_887_272, lambda: t1.T1(2, 1, (1062, 600), modes=512, width=8, depth=4)),
    "ScalarFlow T1+": (67_755_541, lambda: t1.T1Plus(2, 1, (1062, 600), modes=224, width=128)),
}


# Published UNets have biases before their batch norms, which take them off again; ours have not: 49 times the width.
WITHOUT_BIASES = {"T1+ 24, exponent 6": 64, "DFPNet128": 64, "airfoil T1+": 32, "ScalarFlow T1+": 128}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    expected, make = PUBLISHED[name]
    with torch.device("meta"):
        assert count(make()) == expected - 49 * WITHOUT_BIASES.get(name, 0)


@pytest.mark.parametrize(
    ("published", "ours", "make"),
    [
        (14_166_593, 14_181_473, lambda: t1.FNO(1, 1, (64, 64), modes=24, width=32, depth=6)),
        (31_871_555, 31_904_723, lambda: t1.FNO(3, 3, (128, 128), modes=24, width=48, depth=6)),
        (84_950_705, 84_974_417, lambda: t1.FNO(2, 1, (1062, 600), modes=48, width=48, depth=4)),
    ],
)
def test_the_stronger_fno_is_hardly_larger(published, ours, make):
    with torch.device("meta"):
        assert count(make()) == ours
    assert ours == pytest.approx(published, rel=0.01)


def small(name, grid, **options):
    """A small model of any kind from 2 to 3 channels on a grid of any dimension."""
    if name == "UNet":
        return t1.UNet(2, 3, grid, width=4)
    if name == "T1Plus":
        return t1.T1Plus(2, 3, grid, modes=6, width=4, **options)
    if name == "T1Grid":
        return t1.T1Grid(2, 3, grid, modes=6, width=8, depth=2, **options)
    kinds = {"T1": t1.T1, "FNO": t1.FNO, "FFNO": t1.FFNO, "ReleasedFNO": ReleasedFNO, "ReleasedFFNO": ReleasedFFNO}
    return kinds[name](2, 3, grid, modes=4, width=8, depth=2, **options)


KINDS = ["T1", "T1Plus", "T1Grid", "FNO", "FFNO", "UNet", "ReleasedFNO", "ReleasedFFNO"]
GRIDS = [(17,), (12, 15), (9, 8, 11)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_model_in_every_dimension(name, grid):
    model = small(name, grid)
    x = torch.randn(4, 2, *grid)
    y = model(x)
    assert y.shape == (4, 3, *grid)
    y.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert not any(parameter.is_complex() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["T1", "T1Plus", "T1Grid", "FNO", "FFNO"])
def test_another_resolution_at_call_time(name):
    model = small(name, (16, 12)).eval()
    assert model(torch.randn(2, 2, 20, 31)).shape == (2, 3, 20, 31)


@pytest.mark.parametrize("transform", ["dct", "fourier"])
@pytest.mark.parametrize("name", ["T1", "T1Plus", "T1Grid"])
def test_a_band_limited_field_gives_the_same_answer_on_every_grid(name, transform):
    """What the kept modes hold is the same function whatever the grid: so must be the prediction."""
    model = small(name, (16, 12), transform=transform).eval()
    modes = torch.randn(2, 2, 6, 6)[..., :5, :5]
    T = t1.get_transform(transform)

    def sample(grid):
        return T.inverse(modes, 2, grid) * math.sqrt(math.prod(grid) / (16 * 12))

    coarse = model(sample((16, 12)))
    fine = model(sample((32, 24)), size=(32, 24))
    back = T.inverse(T.forward(fine, 2, 6) / 2, 2, (16, 12))
    assert torch.allclose(back, coarse, atol=1e-5)


def test_an_output_grid_of_its_own():
    model = t1.T1(1, 2, (16, 12), modes=5, width=6, depth=1, out_resolution=(32, 10))
    assert model(torch.randn(3, 1, 16, 12)).shape == (3, 2, 32, 10)
    assert model(torch.randn(3, 1, 32, 24)).shape == (3, 2, 64, 20)
    assert model(torch.randn(3, 1, 16, 12), size=(8, 9)).shape == (3, 2, 8, 9)


@pytest.mark.parametrize("name", KINDS)
def test_normalisation_is_part_of_the_model(name, tmp_path):
    model = small(name, (12, 15)).eval()
    plain = copy.deepcopy(model)
    shift, scale = torch.tensor([3.0, -1.0]), torch.tensor([2.0, 0.5])
    out_shift, out_scale = torch.tensor([1.0, 0.0, -4.0]), torch.tensor([10.0, 1.0, 0.1])
    model.set_normalization(shift, scale, out_shift, out_scale)
    x = torch.randn(2, 2, 12, 15)
    inside = (x - shift[:, None, None]) / scale[:, None, None]
    expected = plain(inside) * out_scale[:, None, None] + out_shift[:, None, None]
    assert torch.allclose(model(x), expected, atol=1e-5)
    t1.save(model, tmp_path / "model.safetensors")
    assert torch.equal(t1.load(tmp_path / "model.safetensors").eval()(x), model(x))


@pytest.mark.parametrize("name", KINDS)
def test_training_steps_repeat_bit_by_bit(name):
    def train():
        torch.manual_seed(1)
        model = small(name, (12, 15))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 2, 12, 15)).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    first, second = train(), train()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["T1", "T1 fourier", "T1 dft", "T1Plus", "T1Grid", "FNO", "FFNO", "UNet"])
def test_bfloat16_autocast(name):
    torch.manual_seed(0)
    name, _, transform = name.partition(" ")
    model = small(name, (12, 15), **{"transform": transform} if transform else {}).eval()
    x = torch.randn(2, 2, 12, 15)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert y.isfinite().all()
    assert (y.float() - model(x)).norm() < 0.05 * model(x).norm()


@pytest.mark.parametrize("name", ["T1", "T1Plus", "T1Grid", "FNO", "FFNO"])
def test_compiles_as_one_graph(name):
    model = small(name, (12, 15)).eval()
    torch._dynamo.reset()
    x = torch.randn(2, 2, 12, 15)
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x), atol=1e-5)


DATA_PARALLEL = """
import os, sys, torch
import transform_once as t1
rank, folder = int(sys.argv[1]), sys.argv[2]
store = torch.distributed.FileStore(folder + "/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
for kind in (t1.T1, t1.FNO):
    torch.manual_seed(0)
    model = kind(1, 1, (12, 10), modes=4, width=6, depth=2)
    x, y = torch.randn(2, 4, 1, 12, 10)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    own = slice(2 * rank, 2 * rank + 2)
    (parallel(x[own]) - y[own]).square().mean().backward()
    shared = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(shared, model.parameters()))
open(f"{folder}/done{rank}", "w").close()
os._exit(0)  # the destructor of a process group can wait for the interpreter that waits for it
"""


def test_data_parallel_gradients_are_those_of_the_whole_batch(tmp_path):
    """Two processes, half a batch each: real weights, so no imaginary part of a gradient is lost on the way."""
    ranks = [subprocess.Popen([sys.executable, "-c", DATA_PARALLEL, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [process.wait() for process in ranks] == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: small("T1", (12, 15))(torch.randn(2, 1, 12, 15)),
            ValueError,
            r"T1 expects fields of shape \(batch, 2",
        ),
        (lambda: small("FNO", (12, 15))(torch.randn(2, 2, 12)), ValueError, "FNO expects fields of shape"),
        (lambda: small("T1", (12, 15))(torch.randn(2, 2, 3, 15)), ValueError, "between 1 and 3 on axis 0"),
        (lambda: small("FNO", (12, 15))(torch.randn(2, 2, 6, 15)), ValueError, "between 1 and 3 on axis 0"),
        (lambda: small("FFNO", (12, 15))(torch.randn(2, 2, 12, 5)), ValueError, "between 1 and 3 on axis 0"),
        (lambda: small("UNet", (12, 15))(torch.randn(2, 2, 12, 16)), ValueError, "was built for fields of"),
        (lambda: small("T1", (12, 15))(torch.randn(2, 2, 12, 15) + 0j), TypeError, "real floating-point"),
        (lambda: small("T1", (12, 15))(torch.ones(2, 2, 12, 15).int()), TypeError, r"use x\.float\(\)"),
        (
            lambda: small("FNO", (12, 15))(torch.randn(2, 2, 12, 15).double()),
            TypeError,
            r"weights in float32 and expects such fields; got float64: use x\.to\(torch\.float32\) or model\.to",
        ),
        (lambda: small("T1", (12, 15)).kspace(torch.randn(2, 2, 5, 4)), ValueError, r"\(batch, 2, 4, 4\)"),
        (lambda: t1.T1(1, 1, (8, 8), modes=9), ValueError, "between 1 and 8"),
        (lambda: t1.FNO(1, 1, (8, 8), modes=5), ValueError, "between 1 and 4"),
        (lambda: t1.FFNO(1, 1, (8, 8), modes=6), ValueError, "between 1 and 5"),
        (lambda: t1.T1(0, 1, (8, 8), modes=4), ValueError, "at least 1; got 0 and 1"),
        (lambda: t1.T1(1, 1, (8, 8), modes=4, width=0), ValueError, "width must be at least 1; got 0"),
        (lambda: t1.T1(1, 1, 64, modes=4), ValueError, r"one length for each axis, such as \(64,\); got 64"),
        (lambda: t1.FNO(1, 1, (8, 8), modes=4, depth=0), ValueError, "depth must be at least 1; got 0"),
        (lambda: t1.T1(1, 1, (8, 8, 8, 8), modes=4), ValueError, "one to three axis lengths"),
        (lambda: t1.T1(1, 1, (8, 8), modes=4, init="vpp"), ValueError, "'vp', 'xavier', 'kaiming'; got 'vpp'"),
        (lambda: t1.T1(1, 1, (8, 8), modes=4, activation="relu"), ValueError, "'gelu', 'sine'"),
        (lambda: t1.T1(1, 1, (8, 8), modes=4, head_activation="tanh"), ValueError, "head_activation must be one of"),
        (lambda: t1.T1(1, 1, (8, 8), modes=4, transform="wavelet"), ValueError, "dct, dst, fourier, dft"),
        (lambda: t1.T1(1, 1, (8, 8), modes=4, out_resolution=(8,)), ValueError, "must have 2 axes"),
        (lambda: t1.T1(1, 1, (8, 8), modes=4, out_resolution=(3, 8)), ValueError, "between 1 and 3"),
        (lambda: t1.T1Plus(1, 1, (8, 8), modes=4, transform="dft"), ValueError, "block of real modes"),
        (
            lambda: small("T1", (12, 15)).set_normalization(*[torch.zeros(2)] * 2, *[torch.ones(3)] * 2),
            ValueError,
            "input_scale must be positive",
        ),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence) as raised:
        call()
    assert "\n" not in str(raised.value)
