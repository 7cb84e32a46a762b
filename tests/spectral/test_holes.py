"""Missing points: the values that the kept modes can hold best."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transform_once as t1
from transform_once.spectral import holes


def field(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def smooth(size, modes, transform="dct", seed=0, samples=2, channels=3):
    """Fields that are made of the kept modes alone."""
    T, ndim = t1.get_transform(transform), len(size)
    return T.inverse(field((samples, channels, *T.block(modes, size)), seed), ndim, size)


def least_tail(y, hole, modes, transform):
    """The lowest tail energy of each channel of one sample by a dense solution of least squares."""
    T, ndim, size = t1.get_transform(transform), y.ndim - 2, y.shape[2:]
    points = hole.flatten().nonzero().squeeze(1)
    units = torch.zeros(len(points), 1, hole.numel(), dtype=y.dtype)
    units[torch.arange(len(points)), 0, points] = 1
    units = units.unflatten(2, size)

    def tail(z):
        return (z - T.inverse(T.forward(z, ndim, modes), ndim, size, modes)).flatten(2)

    A, b = tail(units)[:, 0].T, tail(y.masked_fill(hole, 0))[0].T
    values = torch.linalg.lstsq(A, -b, driver="gelsd").solution
    return (A @ values + b).square().sum(0)


@pytest.mark.parametrize("transform", ["dct", "fourier", "dst"])
@pytest.mark.parametrize(("size", "modes"), [((41,), 7), ((16, 21), (5, 7)), ((6, 7, 8), 3)])
def test_what_is_made_of_the_kept_modes_is_found_again(size, modes, transform):
    y = smooth(size, modes, transform)
    hole = torch.zeros(1, 1, *size, dtype=torch.bool)
    hole[(0, 0, *(slice(n // 2, n // 2 + 2) for n in size))] = True
    damaged = y.masked_fill(hole, torch.nan)
    found = t1.fill(damaged, hole, modes, transform)
    assert torch.equal(found.masked_fill(hole, 0), y.masked_fill(hole, 0))
    torch.testing.assert_close(found, y, rtol=1e-6, atol=1e-6)


@settings(max_examples=40)
@given(
    size=st.lists(st.integers(5, 11), min_size=1, max_size=2).map(tuple),
    transform=st.sampled_from(["dct", "fourier", "dst"]),
    data=st.data(),
)
def test_the_tail_is_near_the_least_that_values_in_the_hole_allow(size, transform, data):
    """Never more than with the mean or with zeros; with as many rounds as unknowns the least squares themselves."""
    y = field((1, 2, *size), data.draw(st.integers(0, 99)))
    modes = data.draw(st.integers(2, min(size) - 1))
    hole = field((1, 1, *size), data.draw(st.integers(100, 199))) > data.draw(st.floats(0.5, 2.0))
    found = t1.tail_energy(t1.fill(y, hole, modes, transform), modes, transform)[0]
    mean = y.masked_fill(hole, 0).flatten(2).sum(2) / (~hole).flatten(2).sum(2)
    with_mean = torch.where(hole, mean[..., None] if len(size) == 1 else mean[..., None, None], y)
    least = least_tail(y, hole, modes, transform)
    assert (found <= t1.tail_energy(with_mean, modes, transform)[0] + 1e-12).all()
    assert (found >= least - 1e-9).all()
    if hole.sum() <= holes.ROUNDS // 2:  # so few unknowns that conjugate gradients are through
        torch.testing.assert_close(found, least, rtol=1e-6, atol=1e-9)


def test_a_hole_costs_a_quarter_of_the_modes():
    """A smooth flow around a disc: filled, half of the modes along each axis leave less than all of these did."""
    x, y = torch.meshgrid(*2 * [torch.linspace(-1, 1, 64, dtype=torch.float64)], indexing="ij")
    hole = (x.square() + y.square() < 0.1)[None, None]
    flow = (1 + 0.3 * x + 0.2 * torch.sin(2 * y)).masked_fill(hole[0, 0], 0)[None, None]
    few = t1.fill(flow, hole, 16)
    rebuilt = t1.idct(t1.dct(few, 2, 16), 2, (64, 64)).masked_fill(hole, 0)
    error = (rebuilt - flow).norm() / flow.norm()
    assert error < 0.2 * t1.irreducible_loss(flow, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_precision_and_far_offsets(dtype):
    y = smooth((12, 13), 4)
    hole = torch.zeros(1, 1, 12, 13, dtype=torch.bool)
    hole[..., 5:7, 6:8] = True
    found = t1.fill((y + 300).to(dtype), hole, 4)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), y + 300, rtol=0, atol=4096 * torch.finfo(dtype).eps)


def test_nothing_missing_and_everything_missing():
    y = field((2, 1, 9))
    none = torch.zeros(2, 1, 9, dtype=torch.bool)
    assert torch.equal(t1.fill(y, none, 3), y)
    assert torch.equal(t1.fill(y, ~none, 3), torch.zeros_like(y))


def test_holes_of_each_sample_and_channel_and_a_set_of_modes():
    y = smooth((15, 14), 4)
    modes = t1.TopM(16).fit(y)
    hole = torch.rand(2, 3, 15, 14, generator=torch.Generator().manual_seed(0)) < 0.03
    torch.testing.assert_close(t1.fill(y.masked_fill(hole, 9.0), hole, modes), y, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    y, hole = field((2, 1, 8, 9)), torch.zeros(1, 1, 8, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"booleans that fit fields of shape \(2, 1, 8, 9\)"):
        t1.fill(y, hole.float(), 3)
    with pytest.raises(ValueError, match="batch and channels may be 1"):
        t1.fill(y, hole[..., :8], 3)
    with pytest.raises(ValueError, match="use fourier"):
        t1.fill(y, hole, 3, "dft")
