"""Coherence of waves against closed forms: filters, products, noise, in one, two and three dimensions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transform_once as t1
from transform_once.evaluation.coherence import Coherence, coherence

GRIDS = [(24,), (15,), (16, 12), (9, 14), (8, 6, 7)]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filtered(x, seed=1):
    """Every wave times a number of its own: a convolution with a random field."""
    axes = tuple(range(2, x.ndim))
    kernel = torch.fft.rfftn(noise(1, 1, *x.shape[2:], seed=seed), dim=axes)
    return torch.fft.irfftn(torch.fft.rfftn(x, dim=axes) * kernel, s=x.shape[2:], dim=axes)


def shells(grid):
    """The largest wave number of each point of the spectrum."""
    k = [torch.fft.fftfreq(n, 1 / n).abs() for n in grid]
    return torch.stack(torch.meshgrid(*k, indexing="ij")).amax(0)


def low(x, most):
    """The waves below `most` alone."""
    axes = tuple(range(2, x.ndim))
    X = torch.fft.fftn(x, dim=axes) * (shells(x.shape[2:]) < most)
    return torch.fft.ifftn(X, dim=axes).real


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_convolution_is_coherent_in_all_waves(grid):
    x = noise(60, 1, *grid)
    y = filtered(x)
    found = coherence(t1.Fields(input=x, target=y))
    below = len(found.energy)
    assert below == (max(grid) + 1) // 2
    assert found.explained == pytest.approx(found.energy, abs=1e-9)
    assert found.waves(0.01) == below
    Y = torch.fft.fftn(y - y.mean(0), dim=tuple(range(2, y.ndim)))
    for axis, n in enumerate(grid, 2):
        if n % 2 == 0:  # the last wave of such an axis is its own mirror, and left out
            Y = Y.index_fill(axis, torch.tensor([n // 2]), 0)
    power = Y.abs().square().sum((0, 1))
    expected = [float(power[shells(grid) == number].sum() / power.sum()) for number in range(below)]
    assert found.energy == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_unrelated_fields_are_coherent_nowhere(grid):
    found = coherence(t1.Fields(input=noise(60, 2, *grid), target=noise(60, 3, *grid, seed=1)), 99)
    assert found.explained == (0.0,) * len(found.energy)
    assert sum(found.energy) == pytest.approx(1)
    assert found.waves(0.01) == 0


@pytest.mark.parametrize("grid", [(40,), (16, 20), (10, 9, 8)], ids=str)
def test_the_waves_that_follow_are_found(grid):
    x, other = noise(80, 1, *grid), noise(80, 1, *grid, seed=1)
    y = low(filtered(x), 3) + other - low(other, 3)
    assert coherence(t1.Fields(input=x, target=y), 99).waves(0.01) == 3


def test_squares_of_a_field_are_incoherent():
    x = low(noise(100, 1, 24, 24), 4)
    assert coherence(t1.Fields(input=x, target=x**2), 8).waves(0.01) == 0
    found = coherence(t1.Fields(input=x, target=x**2 + x), 8)
    assert found.waves(0.01) == 4
    assert found.explained[4:] == (0.0,) * 4


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_the_share_is_that_of_signal_and_noise_whatever_the_channels(channels):
    """What unrelated channels explain by chance is taken off, else 5 of 40 would explain an eighth of anything."""
    x = noise(40, channels, 32, 32)
    y = 0.6 * filtered(x[:, :1]) / filtered(x[:, :1]).std() + 0.8 * noise(40, 1, 32, 32, seed=3)
    found = coherence(t1.Fields(input=x, target=y), 16)
    power = filtered(x[:, :1])
    whole = coherence(t1.Fields(input=x, target=power), 16).energy
    mine = [0.36 * share / (0.36 * share + 0.64 * flat) for share, flat in zip(whole, _flat(16), strict=True)]
    for number in range(4, 16):  # those of many waves
        assert found.explained[number] / found.energy[number] == pytest.approx(mine[number], abs=0.06)


def _flat(most):
    """Shares of the shells in white noise in two dimensions."""
    sizes = [(2 * number + 1) ** 2 - max(2 * number - 1, 0) ** 2 for number in range(most)]
    return [size / sum(sizes) for size in sizes]


def test_channels_work_together_and_repeated_or_constant_ones_do_no_harm():
    x = noise(50, 2, 12, 12)
    y = filtered(x[:, :1]) + filtered(x[:, 1:], seed=4)
    constant = torch.full((50, 1, 12, 12), 3.0, dtype=torch.float64)
    found = coherence(t1.Fields(input=torch.cat([x, x[:, :1], constant], 1), target=y), 6)
    assert found.explained == pytest.approx(found.energy, abs=1e-9)
    alone = coherence(t1.Fields(input=x[:, :1], target=y), 6)
    assert sum(alone.explained) < 0.8


@given(st.floats(-100, 100), st.floats(0.01, 100), st.integers(0, 11))
def test_offsets_units_and_shifts_of_channels_change_nothing(offset, scale, shift):
    x, other = noise(40, 2, 12, 10), noise(40, 1, 12, 10, seed=2)
    y = torch.cat([low(filtered(x[:, :1]) + filtered(x[:, 1:], seed=3), 3) + 0.1 * other, other], 1)
    units = torch.tensor([scale, 1 / scale], dtype=torch.float64)[:, None, None]
    first = coherence(t1.Fields(input=x, target=y), 5)
    moved = coherence(t1.Fields(input=units * (x - offset), target=units * y.roll(shift, 2) + offset), 5)
    assert moved.energy == pytest.approx(first.energy, abs=1e-9)
    assert moved.explained == pytest.approx(first.explained, abs=1e-9)


def test_of_trajectories_it_is_the_change_that_counts():
    """Frames that differ by noise are nearly equal, yet nothing of the next change follows from them."""
    steps = noise(4, 30, 1, 12, 12) * 0.01
    film = t1.Fields(trajectory=noise(4, 1, 1, 12, 12, seed=5) + steps.cumsum(1))
    assert coherence(film, 6).waves(0.01) == 0
    moved = torch.stack([noise(8, 1, 12, 12, seed=6).roll(number, -1) for number in range(20)], 1)
    found = coherence(t1.Fields(trajectory=moved), 6, history=1)
    assert sum(found.explained) == pytest.approx(1, abs=1e-6)


def test_where_nothing_can_be_told_it_is_none():
    x = noise(12, 6, 8, 8)
    assert coherence(t1.Fields(input=x, target=x), 4) is None  # 12 samples for 6 channels
    still = torch.ones(40, 1, 8, 8) * 0.1
    both = torch.cat([still, noise(40, 1, 8, 8).float()], 1)
    found = coherence(t1.Fields(input=noise(40, 1, 8, 8).float(), target=both), 4)
    assert sum(found.explained) == pytest.approx(sum(found.energy)) == 1  # of the channel that varies
    assert coherence(t1.Fields(input=noise(40, 1, 8, 8).float(), target=still), 4) is None
    assert coherence(t1.Fields(trajectory=noise(9, 2, 1, 8, 8)), 4, history=1) is None  # two frames, three needed


@pytest.mark.parametrize(
    ("explained", "tolerance", "waves"),
    [
        ((0.5, 0.3, 0.0), 0.01, 2),
        ((0.5, 0.3, 0.001), 0.01, 2),
        ((0.5, 0.3, 0.01), 0.01, 3),
        ((0.9, 0.09, 0.01), 0.01, 3),
        ((0.2, 0.0, 0.1), 0.001, 3),
        ((0.0, 0.0), 0.01, 0),
    ],
)
def test_waves_leave_little_of_what_is_not_linear(explained, tolerance, waves):
    assert Coherence((), explained).waves(tolerance) == waves


@pytest.mark.parametrize(
    ("explained", "words"),
    [
        ((0.0, 0.001), "No wave of the target follows"),
        ((0.5, 0.4999), "The target follows from the input wave by wave: a linear map explains 99.99% of it."),
        ((0.2, 0.4, 0.0), "explain 60% of the variance of the target, up to wave number 1; products the rest."),
        ((0.2, 0.4, 0.1), "explain 70% of the variance of the target, at all wave numbers; products the rest."),
    ],
)
def test_it_is_said_in_words(explained, words):
    assert words in Coherence((), explained).in_words("the target")


def test_an_analysis_says_it():
    x = noise(40, 1, 16, 16)
    found = t1.analyze(t1.Fields(input=x, target=low(x, 3) ** 2, periodic=True), progress=False)
    assert any(note.startswith("No wave of the target follows") for note in found.notes)
    film = t1.Fields(trajectory=torch.stack([x.roll(number, -1) for number in range(3)], 1), periodic=True)
    assert any("change between frames follows" in note for note in t1.analyze(film, progress=False).notes)
    alone = t1.analyze(t1.Fields(input=x, periodic=True), progress=False)
    assert not any("follows" in note for note in alone.notes)
