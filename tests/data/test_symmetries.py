import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transform_once.data.symmetries import Motion, Symmetry, draw, why_not_on_modes
from transform_once.solvers.darcy import DARCY_SYMMETRIES
from transform_once.solvers.navier_stokes import NAVIER_STOKES_SYMMETRIES
from transform_once.spectral.transforms import get_transform

DIAGONAL, SWAP, TURN = NAVIER_STOKES_SYMMETRIES
MIRROR = Symmetry(signs=(1, -1), offset=(0.0, 1.0), factors=(1.0, 1.0, -1.0), input_factors=(1.0, -1.0, 1.0))

TORUS: dict[str, Any] = {"grid": "node", "periodic": True}
BOX: dict[str, Any] = {"grid": "cell", "periodic": False}


def waves(x: Tensor, y: Tensor) -> Tensor:
    """A field in closed form, with waves up to 3 in every orientation and no symmetry of its own."""
    turn = 2 * math.pi
    return (
        torch.sin(turn * (x + 2 * y) + 0.3)
        + 0.7 * torch.cos(turn * (3 * x - y))
        - 0.4 * torch.sin(turn * 2 * x + 1)
        + 0.2 * torch.cos(turn * 3 * y - 2)
        + 0.1
    )


def nodes(rows: int, columns: int, half: float = 0.0) -> tuple[Tensor, Tensor]:
    x = (torch.arange(rows, dtype=torch.float64) + half) / rows
    y = (torch.arange(columns, dtype=torch.float64) + half) / columns
    return x[:, None], y[None, :]


def still(batch: int) -> Tensor:
    return torch.zeros(batch, dtype=torch.float64)


@pytest.mark.parametrize(("grid", "half"), [("node", 0.0), ("cell", 0.5)])
@pytest.mark.parametrize("size", [16, 15])
def test_fields_move_as_the_formula_says(grid: str, half: float, size: int) -> None:
    x, y = nodes(size, size, half)
    w = waves(x, y).expand(3, 1, size, size)
    s = torch.tensor([0.0, 0.137, 0.9], dtype=torch.float64)
    shift = s[:, None, None]
    expected = {
        DIAGONAL: waves(x + shift, y - shift),
        SWAP: -waves(y + 0.25, x + 0.25).expand(3, size, size),
        TURN: waves(0.25 - x, -y).expand(3, size, size),
        Symmetry(signs=(-1, 1), offset=(0.1, 0.2), direction=(2, 1)): waves(-x + 0.1 + 2 * shift, y + 0.2 + shift),
    }
    for symmetry, field in expected.items():
        moved = symmetry.motion(s).fields(w, grid=grid, periodic=True)
        torch.testing.assert_close(moved[:, 0], field, atol=1e-12, rtol=0)


def test_shifts_by_whole_steps_and_reflections_are_exact() -> None:
    w = torch.randn(2, 1, 16, 16)
    assert torch.equal(DIAGONAL.motion(torch.tensor([0.0, 0.25])).fields(w, **TORUS)[0], w[0])
    assert torch.equal(
        DIAGONAL.motion(torch.tensor([0.0, 0.25])).fields(w, **TORUS)[1], torch.roll(w[1], (-4, 4), dims=(-2, -1))
    )
    assert torch.equal(
        SWAP.motion(still(2)).fields(w, **TORUS), -torch.roll(w, (-4, -4), dims=(-2, -1)).transpose(-2, -1)
    )
    turned = torch.roll(torch.roll(w, (-4, 0), (-2, -1)).flip(-2, -1), (1, 1), (-2, -1))
    assert torch.equal(TURN.motion(still(2)).fields(w, **TORUS), turned)


@given(
    rows=st.sampled_from([1, 5, 9]),
    columns=st.sampled_from([3, 7]),
    signs=st.tuples(st.sampled_from([1, -1]), st.sampled_from([1, -1])),
    offset=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    direction=st.tuples(st.integers(-2, 2), st.integers(-2, 2)),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_coefficients_move_as_their_fields_do(
    rows: int,
    columns: int,
    signs: tuple[int, int],
    offset: tuple[float, float],
    direction: tuple[int, int],
    seed: int,
) -> None:
    X = torch.randn(3, 2, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    fourier = get_transform("fourier")
    symmetry = Symmetry(signs=signs, offset=offset, direction=direction, factors=(1.0, -1.0))
    motion = symmetry.motion(torch.tensor([0.0, 0.3, 0.77], dtype=torch.float64))
    moved = motion.fields(fourier.inverse(X, ndim=2, size=(20, 12)), **TORUS)
    expected = fourier.forward(moved, ndim=2, modes=(rows, columns))
    torch.testing.assert_close(motion.modes(X, "fourier"), expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    "symmetries", [DARCY_SYMMETRIES, (MIRROR,), (Symmetry(signs=(-1, -1), offset=(1.0, 1.0), factors=(-1.0,)),)]
)
@pytest.mark.parametrize("place", [BOX, {"grid": "node", "periodic": False}, {"grid": "cell", "periodic": True}])
@pytest.mark.parametrize(("size", "modes"), [((12, 12), (6, 6)), ((9, 9), (9, 9))])
def test_cosines_are_mirrored_and_swapped_as_their_fields_are(
    symmetries: tuple[Symmetry, ...], place: dict[str, Any], size: tuple[int, int], modes: tuple[int, int]
) -> None:
    cosines = get_transform("dct")
    X = torch.randn(16, 3, *modes, dtype=torch.float64)
    motion = draw(symmetries, 16, generator=torch.Generator().manual_seed(0))
    assert why_not_on_modes(symmetries, "dct", modes, place["grid"], (place["periodic"],) * 2) is None
    moved = motion.fields(cosines.inverse(X, ndim=2, size=size), **place)
    torch.testing.assert_close(motion.modes(X, "dct"), cosines.forward(moved, ndim=2, modes=modes), atol=1e-12, rtol=0)


def test_what_cannot_be_done_on_modes_says_why() -> None:
    box, torus = (False, False), (True, True)
    mirror = Symmetry(signs=(-1, 1))

    def why(symmetry: Symmetry, *given: Any) -> str:
        return why_not_on_modes((symmetry,), *given) or ""

    assert "different numbers" in why(DARCY_SYMMETRIES[2], "dct", (6, 5), "cell", box)
    assert "more than mirror" in why(DIAGONAL, "dct", (6, 6), "cell", torus)
    assert "more than mirror" in why(TURN, "dct", (6, 6), "cell", torus)  # about a quarter of the box
    assert "more than mirror" in why(mirror, "dct", (6, 6), "node", torus)
    assert not why(mirror, "dct", (6, 6), "cell", torus)
    assert "rfft" in why(mirror, "rfft", (6, 6), "node", torus)
    assert "without its sine" in why(mirror, "fourier", (6, 5), "node", torus)
    assert "not periodic on nodes" in why(mirror, "fourier", (5, 5), "cell", torus)
    assert not why(mirror, "fourier", (5, 5), "node", torus)
    with pytest.raises(ValueError, match="can only be mirrored"):
        why_not_on_modes((mirror,), "dct", (6, 6), "cell", box)


@pytest.mark.parametrize("symmetry", NAVIER_STOKES_SYMMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_declared_symmetries_agree_in_both_spaces(symmetry: Symmetry, dtype: torch.dtype) -> None:
    fourier = get_transform("fourier")
    w = torch.randn(4, 1, 64, 64, dtype=dtype)
    kept = fourier.forward(w, ndim=2, modes=25)
    motion = symmetry.motion(torch.rand(4))
    expected = fourier.forward(motion.fields(fourier.inverse(kept, ndim=2, size=64), **TORUS), ndim=2, modes=25)
    torch.testing.assert_close(
        motion.modes(kept, "fourier"), expected, atol=2e-5 if dtype == torch.float32 else 1e-11, rtol=0
    )
    # The energy of the kept modes, and so that of the dropped ones, stays.
    torch.testing.assert_close(motion.modes(kept, "fourier").square().sum((1, 2, 3)), kept.square().sum((1, 2, 3)))


def test_a_draw_is_one_of_the_products_for_every_sample() -> None:
    batch = 64
    x, y = nodes(12, 12)
    w = waves(x, y).expand(batch, 1, 12, 12)
    motion = draw((SWAP, TURN), batch, generator=torch.Generator().manual_seed(0))
    moved = motion.fields(w, **TORUS)[:, 0]
    products = torch.stack(
        [
            waves(x, y),
            -waves(y + 0.25, x + 0.25),
            waves(0.25 - x, -y),
            -waves(0.25 - y, 0.5 - x),  # (TURN SWAP w)(x, y) = (SWAP w)(¼−x, −y)
        ]
    )
    gaps = (moved[:, None] - products).abs().amax((-2, -1))
    assert float(gaps.min(1).values.max()) < 1e-12
    counts = torch.bincount(gaps.argmin(1), minlength=4)
    assert int(counts.min()) >= 6, "each product has probability one quarter"


def test_draws_move_input_and_target_alike_and_follow_their_generator() -> None:
    w = torch.randn(8, 1, 9, 9)

    def moved(seed: int) -> Motion:
        return draw(NAVIER_STOKES_SYMMETRIES, 8, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(moved(1).fields(w, **TORUS), moved(1).fields(w, **TORUS))
    assert not torch.equal(moved(1).fields(w, **TORUS), moved(2).fields(w, **TORUS))
    motion = moved(3)
    assert torch.equal(motion.fields(w, inputs=True, **TORUS), motion.fields(w, **TORUS))
    assert torch.equal(motion.modes(w, "fourier", inputs=True), motion.modes(w, "fourier"))


def test_nothing_waits_for_the_device() -> None:
    w = torch.empty(4, 1, 9, 9, device="meta")  # reading a number off this device is an error
    motion = draw(NAVIER_STOKES_SYMMETRIES, 4, device="meta")
    assert motion.fields(w, **TORUS).shape == motion.modes(w, "fourier").shape == w.shape


def test_shifts_are_spread_evenly() -> None:
    motion = draw((DIAGONAL,), 4000, generator=torch.Generator().manual_seed(0))
    first = motion.offset[:, 0]
    assert torch.equal(first, -motion.offset[:, 1])
    quarters = torch.histc(first, 4, 0, 1)
    assert float((quarters - 1000).abs().max()) < 140  # five standard deviations


def test_frames_of_a_sequence_move_together() -> None:
    frames = torch.randn(4, 5, 1, 16, 16)
    motion = draw(NAVIER_STOKES_SYMMETRIES, 4)
    moved = motion.fields(frames, **TORUS)
    for time in range(5):
        torch.testing.assert_close(moved[:, time], motion.fields(frames[:, time], **TORUS))


def test_a_box_is_mirrored_with_its_factors() -> None:
    w = torch.randn(2, 3, 6, 10)
    motion = MIRROR.motion(still(2))
    sign = torch.tensor([1.0, 1.0, -1.0])[:, None, None]
    assert torch.equal(motion.fields(w, grid="cell", periodic=False), w.flip(-1) * sign)
    assert torch.equal(motion.fields(w, grid="node", periodic=False, inputs=True), w.flip(-1) * sign[[0, 2, 1]])
    channel = Symmetry(offset=(0.5, 0.0)).motion(still(2)).fields(w, grid="cell", periodic=(True, False))
    assert torch.equal(channel, w.roll(3, -2))
    drawn = draw((MIRROR,), 32, generator=torch.Generator().manual_seed(0)).fields(w[:1].expand(32, -1, -1, -1), **BOX)
    mirrored = (drawn == w[0].flip(-1) * sign).flatten(1).all(1)
    untouched = (drawn == w[0]).flatten(1).all(1)
    assert bool((mirrored | untouched).all())
    assert 6 < int(mirrored.sum()) < 26


def test_one_and_three_dimensions() -> None:
    line = torch.randn(2, 1, 8)
    assert torch.equal(Symmetry(offset=(0.25,)).motion(still(2)).fields(line, **TORUS), line.roll(-2, -1))
    block = torch.randn(2, 1, 4, 4, 4)
    turned = Symmetry(axes=(2, 0, 1)).motion(still(2)).fields(block, **TORUS)
    # (gw)(x, y, z) = w(z, x, y)
    assert torch.equal(turned, block.permute(0, 1, 3, 4, 2))
    assert turned[0, 0, 1, 2, 3] == block[0, 0, 3, 1, 2]


def test_gradients_pass_through() -> None:
    w = torch.randn(2, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    motion = draw(NAVIER_STOKES_SYMMETRIES, 2)
    assert torch.autograd.gradcheck(lambda w: motion.fields(w, **TORUS), w)
    X = torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(partial(motion.modes, transform="fourier"), X)


def test_declarations_survive_json() -> None:
    for symmetry in (*NAVIER_STOKES_SYMMETRIES, MIRROR):
        assert Symmetry.from_dict(json.loads(json.dumps(symmetry.to_dict()))) == symmetry
    with pytest.raises(ValueError, match=r"got also \['angle'\]"):
        Symmetry.from_dict({"signs": [1, -1], "angle": [90]})


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({}, "at least one of axes"),
        ({"signs": (1, 1), "offset": (0.5,)}, "one entry per grid axis"),
        ({"axes": (0, 2)}, "permutation"),
        ({"signs": (1, 2)}, "signs must be 1 or -1"),
        ({"direction": (1, 0.5)}, "whole numbers"),
    ],
)
def test_bad_declarations_are_named(entries: dict[str, tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Symmetry(**entries)  # type: ignore[arg-type]


def test_bad_use_is_named() -> None:
    w = torch.zeros(2, 2, 8, 6)
    with pytest.raises(ValueError, match="needs equal sizes"):
        SWAP.motion(still(2)).fields(w, **TORUS)
    with pytest.raises(ValueError, match="not periodic"):
        TURN.motion(still(2)).fields(w, grid="cell", periodic=False)
    with pytest.raises(ValueError, match="axis 1 is not periodic"):
        DIAGONAL.motion(still(2)).fields(w, grid="cell", periodic=(True, False))
    with pytest.raises(ValueError, match="one for each of 2 grid axes"):
        TURN.motion(still(2)).fields(w, grid="cell", periodic=(True,))
    with pytest.raises(ValueError, match="3 channels, got fields with 2"):
        MIRROR.motion(still(2)).fields(w, **TORUS)
    with pytest.raises(ValueError, match="keep an odd number"):
        TURN.motion(still(2)).modes(w, "fourier")
    with pytest.raises(ValueError, match="'node' or 'cell'"):
        TURN.motion(still(2)).fields(w, grid="vertex", periodic=True)
    with pytest.raises(ValueError, match="one number of grid axes"):
        draw((TURN, Symmetry(signs=(-1,))), 2)
    with pytest.raises(ValueError, match="agree on the number of channels"):
        draw((MIRROR, Symmetry(signs=(-1, 1), factors=(1.0, -1.0))), 2)
