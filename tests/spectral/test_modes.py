"""Mode selection, the irreducible loss, and Proposition 1 of the paper."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transform_once as t1
from transform_once.spectral.modes import kept_mask

NAMES = ["dct", "fourier", "dft"]
grids = st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple)


def field(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def residual(y, modes, transform="dct"):
    """Relative L2 per sample of the field rebuilt from its kept modes, the long way round."""
    T, ndim = t1.get_transform(transform), y.ndim - 2
    rebuilt = T.inverse(T.forward(y, ndim, modes), ndim, y.shape[2:], modes)
    return (rebuilt - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)


def test_top_m_beats_every_other_set():
    """Proposition 1, exhaustively: of all 70 sets of 4 out of 8 modes none rebuilds better than top-m."""
    for seed in range(10):
        y = field((1, 1, 8), seed)
        best = residual(y, t1.TopM(4).fit(y)).item()
        for indices in itertools.combinations(range(8), 4):
            rival = t1.ModeSet(torch.tensor(indices)[:, None], (indices[-1] + 1,))
            assert residual(y, rival).item() >= best - 1e-12


@settings(max_examples=30)
@given(size=grids, name=st.sampled_from(["dct", "fourier"]), data=st.data())
def test_no_random_set_of_the_same_size_beats_top_m(size, name, data):
    total = math.prod(size)
    count = data.draw(st.integers(1, total))
    y = field((3, 2, *size), data.draw(st.integers(0, 99)))
    rivals = torch.randperm(total, generator=torch.Generator().manual_seed(count))[:count]
    T = t1.get_transform(name)
    energy = T.forward(y, len(size)).square().sum((0, 1)).flatten()
    dropped = energy.sum() - energy[rivals].sum()
    kept = t1.TopM(count).fit(y, name)
    assert t1.tail_energy(y, kept, name).sum() <= dropped + 1e-9
    # chosen for each field alone, the set is at least as good for every one of them
    alone = t1.tail_energy(y, t1.TopM(count, per="field").fit(y, name), name)
    assert (alone <= t1.tail_energy(y, kept, name) + 1e-9).all()
    by_channel = t1.tail_energy(y, t1.TopM(count, per="channel").fit(y, name), name)
    assert (by_channel.sum(0) <= t1.tail_energy(y, kept, name).sum(0) + 1e-9).all()


@settings(max_examples=40)
@given(n=st.integers(2, 40), data=st.data())
def test_low_pass_is_top_m_for_a_monotone_spectrum(n, data):
    count = data.draw(st.integers(1, n))
    magnitude = field((n,), data.draw(st.integers(0, 99))).abs().sort(descending=True).values + 1e-3
    signs = torch.where(field((n,), 5) > 0, 1.0, -1.0)
    y = t1.idct((magnitude * signs)[None, None], 1)
    assert t1.TopM(count).fit(y).indices.flatten().tolist() == list(range(count))
    assert t1.irreducible_loss(y, t1.TopM(count).fit(y)) == pytest.approx(t1.irreducible_loss(y, count), abs=1e-12)


def test_ties_keep_the_lower_mode():
    y = t1.idct(torch.ones(1, 1, 4, 4, dtype=torch.float64), 2)
    energy = torch.ones(4, 4)
    assert t1.TopM(5).of_energy(energy, (4, 4)).indices.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]
    assert len(t1.TopM(16).fit(y)) == 16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(9,), (15, 12), (6, 7, 8)], ids=str)
def test_low_pass_is_what_a_number_means(name, size):
    y = field((4, 2, *size))
    T, ndim = t1.get_transform(name), len(size)
    for modes in (1, 3, tuple(range(2, 2 + ndim))):
        as_set = t1.LowPass(modes).fit(y, name)
        block = T.forward(y, ndim, modes)
        assert torch.equal(T.forward(y, ndim, t1.LowPass(modes)), block)
        assert as_set.block == block.shape[2:]
        assert len(as_set) == math.prod(block.shape[2:])
        chosen = T.forward(y, ndim, as_set)
        assert torch.allclose(as_set.scatter(chosen), block)
        assert torch.allclose(T.inverse(chosen, ndim, size, as_set), T.inverse(block, ndim, size))
        assert torch.equal(as_set.mask(size), kept_mask(modes, y, name))
        losses = [t1.irreducible_loss(y, m, name) for m in (modes, t1.LowPass(modes), as_set)]
        assert losses == pytest.approx([losses[0]] * 3)


@settings(max_examples=40)
@given(size=grids, name=st.sampled_from(NAMES), per=st.sampled_from(["all", "channel", "field"]), data=st.data())
def test_select_and_scatter_are_inverse_on_the_kept_modes(size, name, per, data):
    y = field((3, 2, *size))
    T = t1.get_transform(name)
    full = T.forward(y, len(size))
    modes = t1.TopM(data.draw(st.integers(1, math.prod(full.shape[2:]))), per=per).fit(y, name)
    kept = modes.select(full)
    assert torch.equal(modes.select(modes.scatter(kept)), kept)
    mask = modes.mask(size).expand(full.shape)
    assert int(mask[0, 0].sum()) == len(modes)
    rebuilt = T.inverse(modes.scatter(kept), len(size), size)
    assert torch.allclose(rebuilt, T.inverse(full * mask, len(size), size), atol=1e-12)


def test_a_set_names_the_same_modes_on_another_grid():
    x = (torch.arange(16) + 0.5) / 16
    wave = torch.cos(5 * math.pi * x)[None, None]
    modes = t1.TopM(1).fit(wave)
    fine = torch.cos(5 * math.pi * (torch.arange(48) + 0.5) / 48)[None, None]
    assert modes.indices.tolist() == [[5]]
    assert t1.irreducible_loss(fine, modes) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_saved_sets_load_again(tmp_path, name):
    modes = t1.TopM(7).fit(field((2, 1, 9, 8)), name)
    modes.save(tmp_path / "modes.safetensors")
    loaded = t1.ModeSet.load(tmp_path / "modes.safetensors")
    assert torch.equal(loaded.indices, modes.indices)
    assert (loaded.block, loaded.transform) == (modes.block, name)
    assert [path.name for path in tmp_path.iterdir()] == ["modes.safetensors"]


@pytest.mark.parametrize("name", ["dct", "fourier"])
@pytest.mark.parametrize("size", [(33,), (15, 12), (6, 7, 8)], ids=str)
def test_irreducible_loss_is_the_error_of_the_rebuilt_field(name, size):
    y = field((5, 2, *size))
    modes = tuple(n // 2 for n in size)
    assert t1.irreducible_loss(y, modes, name) == pytest.approx(residual(y, modes, name).mean().item(), rel=1e-12)


def test_a_tiny_tail_is_not_lost_to_rounding():
    """A float32 field of norm 1e3 whose tail is 1e-6 of it: the difference of the norms could not see it."""
    Y = torch.zeros(1, 1, 64)
    Y[..., 1], Y[..., 40] = 1e3, 1e-3
    y = t1.idct(Y.double(), 1)
    assert t1.irreducible_loss(y, 8) == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(9,), (15, 12), (12, 20), (6, 7, 5)], ids=str)
def test_the_curve_holds_the_loss_of_every_low_pass(name, size):
    y = field((3, 2, *size))
    boxes, losses = t1.irreducible_curve(y, name)
    assert boxes[-1] == t1.get_transform(name).max_modes(size)
    direct = [t1.irreducible_loss(y, box, name) for box in boxes]
    # the direct way subtracts norms for the dft: √eps is the best it can see
    assert losses.tolist() == pytest.approx(direct, abs=1e-7)
    assert (losses.diff() <= 1e-12).all()


def test_curve_in_blocks_equals_curve_at_once(monkeypatch):
    y = field((7, 1, 10, 8))
    whole, top = t1.irreducible_curve(y)[1], t1.TopM(9).fit(y)
    monkeypatch.setattr("transform_once.spectral.modes._BLOCK_NUMBERS", 160)
    assert torch.allclose(t1.irreducible_curve(y)[1], whole)
    assert torch.equal(t1.TopM(9).fit(y).indices, top.indices)


def test_choose_modes_is_the_smallest_that_suffices():
    decay = torch.exp(-0.4 * torch.arange(32.0, dtype=torch.float64))
    y = t1.idct(torch.outer(decay, decay) * field((4, 1, 32, 32)), 2)
    chosen = t1.choose_modes(y, tolerance=0.01)
    assert t1.irreducible_loss(y, chosen) <= 0.01 < t1.irreducible_loss(y, chosen - 1)
    tall = t1.idct(torch.outer(decay.repeat_interleave(2), decay) * field((4, 1, 64, 32)), 2)
    rows, columns = t1.choose_modes(tall, tolerance=0.01)
    assert rows == pytest.approx(2 * columns, abs=1)


def test_the_loss_splits_exactly():
    prediction, target = field((6, 2, 14, 11)), field((6, 2, 14, 11), 1)
    for name in NAMES:
        total, kept, dropped = t1.split_loss(prediction, target, 4, name)
        direct = (prediction - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)
        assert torch.allclose(total, direct)
        assert torch.allclose(total**2, kept**2 + dropped**2)
        T = t1.get_transform(name)
        energy = T.energy(T.forward(prediction - target, 2, 4), 2, (14, 11)).flatten(1).sum(1)
        assert torch.allclose(kept, energy.sqrt() / target.flatten(1).norm(dim=1))


def test_a_reduced_model_is_left_with_the_irreducible_loss():
    target = field((6, 1, 14, 11))
    perfect = t1.idct(t1.dct(target, 2, 5), 2, (14, 11))
    split = t1.split_loss(perfect, target, 5)
    assert split.kept.max() < 1e-7
    assert split.dropped.mean().item() == pytest.approx(t1.irreducible_loss(target, 5), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda y: t1.TopM(0).fit(y), "between 1 and the 72 modes"),
        (lambda y: t1.TopM(73).fit(y), "between 1 and the 72 modes of the grid; got 73"),
        (lambda y: t1.TopM(3, per="sample").fit(y), '"all", "channel" or "field"'),
        (lambda y: t1.LowPass(10).fit(y), "between 1 and 9"),
        (lambda y: t1.irreducible_loss(y[0, 0], 3), "fields .batch, channels, .grid"),
        (lambda y: t1.choose_modes(y, tolerance=0), "above 0"),
        (lambda y: t1.dct(y, 2, t1.TopM(3).fit(y, "fourier")), "chosen for the dct transform on 2 axes"),
        (lambda y: t1.dct(y[..., :4], 2, t1.TopM(70).fit(y)), "at least .9, 8. points"),
        (lambda y: t1.TopM(70).fit(y).select(t1.dct(y, 2, 3)), "at least .9, 8. modes"),
        (lambda y: t1.TopM(7).fit(y).scatter(torch.zeros(2, 6)), "expected 7 kept modes"),
        (lambda y: t1.split_loss(y, y[:1], 3), "a prediction of shape .1, 1, 9, 8."),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        call(field((2, 1, 9, 8)))
    assert "\n" not in str(raised.value)


def test_a_foreign_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("no tensors here")
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    for name in ("text", "model.safetensors"):
        with pytest.raises(ValueError, match=r"written by ModeSet\.save"):
            t1.ModeSet.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        t1.ModeSet.load(tmp_path / "missing")
