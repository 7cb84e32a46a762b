"""What rollouts remember of the last known frame outside the kept modes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transform_once as t1
from transform_once.data import spectra as module
from transform_once.data.lags import LAGS
from transform_once.evaluation.rollout import remembered
from transform_once.models.operator import Dynamics
from transform_once.spectral.modes import TopM

FILMS, FRAMES = 5, 24


def film(grid=(12, 9), channels=2, decay=(0.9, 0.5), seed=0):
    """Frames whose every mode forgets at the same rate, per channel: x_{t+1} = a x_t + √(1 − a²) noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(FILMS, FRAMES, channels, *grid, generator=generator, dtype=torch.float64)
    a = torch.tensor(decay[:channels], dtype=torch.float64).reshape(-1, *(1,) * len(grid))
    frames = [noise[:, 0]]
    for t in range(1, FRAMES):
        frames.append(a * frames[-1] + (1 - a**2).sqrt() * noise[:, t])
    return torch.stack(frames, 1)


def outside(x, modes, ndim, transform="dct"):
    T = t1.get_transform(transform)
    return x - T.inverse(T.forward(x, ndim, modes), ndim, x.shape[-ndim:], modes)


@pytest.mark.parametrize(
    ("grid", "modes", "transform"),
    [
        ((40,), 7, "dct"),
        ((12, 9), (5, 4), "dct"),
        ((11, 8), 5, "fourier"),
        ((6, 5, 4), 3, "dct"),
        ((12, 9), None, "dct"),
    ],
)
def test_products_are_those_of_what_lies_outside(grid, modes, transform):
    x = film(grid)
    if modes is None:
        modes = TopM(20).fit(x.flatten(0, 1), "dct")
    node = transform == "fourier"
    fields = t1.Fields(trajectory=x, dtype="float64", grid="node" if node else "cell", periodic=node)
    made = t1.spectra(fields, transform, modes, normalization="standard", cache=False)
    z = made.normalization[1].apply(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    rest = outside(z, modes, len(grid), transform).flatten(3)
    expected = torch.zeros(FILMS, FRAMES, LAGS, 2, dtype=torch.float64)
    for lag in range(1, LAGS + 1):
        expected[:, lag:, lag - 1] = (rest[:, lag:] * rest[:, :-lag]).sum(-1)
    torch.testing.assert_close(made.tensors["lagged"], expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(made.tensors["tail"], rest.square().sum(-1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("start", [0, 1, 7, 23, 24, 40, 41, 119])
@pytest.mark.parametrize("frames", [1, 5, 30, 100])
def test_blocks_of_any_size_from_any_frame_on_give_the_same(start, frames, monkeypatch):
    x = film()
    fields = t1.Fields(trajectory=x, dtype="float64")
    whole = t1.spectra(fields, "dct", 4, cache=False).tensors["lagged"].flatten(0, 1).numpy()
    monkeypatch.setattr(module, "BLOCK_MEGABYTES", frames * x[0, 0].nbytes / 2**20)
    recipe = module._Recipe(fields, t1.get_transform("dct"), 4, t1.get_transform("dct"))
    for first, block in recipe.transformed(recipe.fitted(None), start, None):
        assert first >= start
        assert block["lagged"] == pytest.approx(whole[first : first + len(block["lagged"])], abs=1e-9)


def test_factors_are_those_of_least_squares_and_of_the_process():
    x = film()
    made = t1.spectra(t1.Fields(trajectory=x, dtype="float64"), "dct", 4, normalization="standard", cache=False)
    memory, rest = made.memory(), outside(x, 4, 2).flatten(3)
    assert memory.shape == (LAGS, 2)
    for lag in (1, 3, 16):
        for channel in (0, 1):
            before, after = rest[:, :-lag, channel].reshape(-1, 1), rest[:, lag:, channel].reshape(-1, 1)
            best = torch.linalg.lstsq(before, after).solution
            assert float(memory[lag - 1, channel]) == pytest.approx(float(best), rel=1e-4)
    theory = torch.tensor([[0.9**s, 0.5**s] for s in range(1, 5)])
    torch.testing.assert_close(memory[:4], theory, rtol=0, atol=0.05)


def test_pairs_the_dft_and_fields_with_nothing_outside_have_none():
    x = film((8, 8))
    assert t1.spectra(t1.Fields(input=x[0], target=x[1]), "dct", 4, cache=False).memory() is None
    periodic = t1.Fields(trajectory=x, grid="node", periodic=True)
    assert t1.spectra(periodic, "dft", 3, cache=False).memory() is None
    assert t1.spectra(t1.Fields(trajectory=x.float()), "dct", 8, cache=False).memory() is None
    smooth = t1.idct(t1.dct(x, 2, 4), 2, (8, 8))
    smooth[:, :, 1] = x[:, :, 1]
    memory = t1.spectra(t1.Fields(trajectory=smooth.float()), "dct", 4, cache=False).memory()
    assert memory[:, 0].eq(0).all()
    assert memory[:, 1].ne(0).any()


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("kind", [t1.T1, t1.T1Grid])
def test_rollouts_add_what_is_remembered(order, kind, tmp_path):
    torch.manual_seed(0)
    x = film().float()
    model = kind(4, 2, (12, 9), modes=4, width=4, depth=1)
    model.dynamics = Dynamics(order, 1)
    model.set_normalization(
        *(torch.tensor(v) for v in ([0.5, -1.0] * 2, [2.0, 3.0] * 2, [0.0, 0.0] if order else [0.5, -1.0], [2.0, 3.0]))
    )
    with torch.no_grad():
        without = t1.rollout(model, x[:, :3], 5)
        model.memory = torch.tensor([[0.5, 0.2], [0.3, -0.1]])
        found = t1.rollout(model, x[:, :3], 5)
    rest = outside(x[:, 2], 4, 2)
    factors = torch.tensor([[0.5, 0.2], [0.3, -0.1], [0.3**1.5, 0], [0.3**2, 0], [0.3**2.5, 0]])
    torch.testing.assert_close(found - without, factors[None, :, :, None, None] * rest[:, None], rtol=1e-4, atol=1e-5)
    t1.save(model, tmp_path / "model.safetensors")
    again = t1.load(tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(t1.rollout(again, x[:, :3], 5, frames=[2, 5]), found[:, [1, 4]])
        finer = t1.rollout(again, torch.nn.functional.interpolate(x[0, :3], (24, 18))[None], 2)
    assert finer.shape == (1, 2, 2, 24, 18)


@given(st.integers(1, 6), st.integers(1, 20))
def test_factors_go_on_beyond_what_is_known(lags, steps):
    memory = torch.linspace(0.95, 0.6, lags)[:, None].repeat(1, 2)
    memory[:, 1] = -0.5
    found = remembered(memory, steps)
    assert found.shape == (steps, 2)
    assert torch.equal(found[:lags], memory[:steps])
    assert found[:, 0].diff().le(1e-6).all()
    assert found[lags:, 1].eq(0).all()


def test_training_remembers_and_validates_so():
    """Of still frames with a rough part and a smooth one that moves, only the smooth one is to be learned."""
    still = torch.randn(6, 1, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    waves = torch.zeros(6, FRAMES, 1, 4, 4)
    waves[:, :, 0, 1, 2] = torch.linspace(0, 6, FRAMES).sin() * 8
    fields = t1.Fields(trajectory=still + t1.idct(waves, 2, (16, 16)))
    torch.manual_seed(0)
    model = t1.T1Grid(2, 1, (16, 16), modes=6, width=8, depth=2)
    run = t1.train(model, fields, fields, epochs=10, history=1, steps=2, batch_size=8, progress=False)
    found = t1.evaluate(run.model, fields, progress=False)
    assert found["kspace"]["R_o"] < 1e-3
    run.model.memory = None
    assert t1.evaluate(run.model, fields, progress=False)["kspace"]["R_o"] > 0.5
