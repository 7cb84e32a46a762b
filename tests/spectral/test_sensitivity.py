"""The gradient mismatch against maps whose Jacobian between spectra is known."""

import pytest
import torch

import transform_once as t1

GRID = (6, 5)


def linear_map(seed=0):
    """A random linear map between fields of one channel, and its matrix between DCT spectra."""
    n = GRID[0] * GRID[1]
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = t1.idct(torch.eye(n, dtype=torch.float64).reshape(n, *GRID), 2).flatten(1)  # row j: the field of mode j
    return (lambda x: (x.flatten(2) @ A.T).unflatten(2, GRID)), basis @ A @ basis.T


def kept_modes():
    mask = torch.zeros(GRID, dtype=torch.bool)
    mask[:3, :3] = True
    return mask.flatten()


def test_rows_of_a_linear_map_are_those_of_its_matrix():
    field_map, J = linear_map()
    x = torch.randn(2, 1, *GRID, dtype=torch.float64)
    found = t1.gradient_mismatch(field_map, x, 3, outputs=[(0, 0), (2, 1)])
    kept = kept_modes()
    for row, k in enumerate([0, 2 * GRID[1] + 1]):
        assert torch.allclose(found.dropped[row], J[k, ~kept].abs().sum())
        assert torch.allclose(found.kept[row], J[k, kept].abs().sum())


def test_a_model_that_copies_the_kept_part_has_no_kept_mismatch():
    field_map, J = linear_map()
    other, K = linear_map(1)
    x = torch.randn(2, 1, *GRID, dtype=torch.float64)
    modes = t1.LowPass(3).fit(x)
    reduced = lambda x: t1.idct(t1.dct(field_map(t1.idct(t1.dct(x, 2, 3), 2, GRID)), 2, 3), 2, GRID)  # noqa: E731
    copied = t1.gradient_mismatch(field_map, x, modes, outputs=[(1, 1)], model=reduced)
    assert copied.kept.max() < 1e-12
    k, kept = GRID[1] + 1, kept_modes()
    different = t1.gradient_mismatch(field_map, x, modes, outputs=[(1, 1)], model=other)
    assert torch.allclose(different.kept, (J[k, kept] - K[k, kept]).abs().sum())
    assert torch.allclose(different.dropped, J[k, ~kept].abs().sum())


def test_probes_estimate_the_squared_total():
    field_map, J = linear_map()
    x = torch.randn(1, 1, *GRID, dtype=torch.float64)
    found = t1.squared_mismatch(field_map, x, 3, probes=400)
    kept = kept_modes()
    for estimate, error, exact in [
        (found.dropped, found.dropped_error, J[kept][:, ~kept].square().sum()),
        (found.kept, found.kept_error, J[kept][:, kept].square().sum()),
    ]:
        assert abs(estimate - exact) < 4 * error
        assert error < 0.05 * exact


def test_a_map_diagonal_in_k_space_does_not_feel_the_dropped_modes():
    decay = torch.linspace(1, 0.1, 30, dtype=torch.float64).reshape(GRID)
    diffusion = lambda x: t1.idct(decay * t1.dct(x, 2), 2)  # noqa: E731
    x = torch.randn(2, 1, *GRID, dtype=torch.float64)
    assert t1.gradient_mismatch(diffusion, x, 3, outputs=[(0, 0), (2, 2)]).dropped.max() < 1e-12
    squaring = t1.gradient_mismatch(lambda x: x**2, x, 3, outputs=[(0, 0), (2, 2)])
    assert squaring.dropped.min() > 0.1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: t1.gradient_mismatch(lambda x: x, x, 3, [(0, 0)], transform="dft"), "expected a real transform"),
        (lambda x: t1.gradient_mismatch(lambda x: x, x, 7, [(0, 0)]), "between 1 and 6"),
        (lambda x: t1.gradient_mismatch(lambda x: x[..., :3], x, 3, [(0, 0)]), "same batch and grid"),
        (lambda x: t1.squared_mismatch(lambda x: x, x, 3, probes=1), "at least 2"),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(torch.randn(2, 1, *GRID))
