"""Pictures of runs: scales, images, outlines, arrows and spectra by wave number, decoded and checked."""

import base64
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from transform_once.reports.curves import line_plot, shells, wave_lengths
from transform_once.reports.panels import (
    Scale,
    arrows,
    error_scale,
    field_scale,
    outline,
    panel,
    pixels_a_side,
    plane,
    shrink,
    spectrum_scale,
)


def decoded(html):
    """The picture of a panel as numbers of its palette."""
    first = re.search(r'src="data:image/png;base64,([^"]+)"', html)[1]
    return np.array(Image.open(io.BytesIO(base64.b64decode(first))))


def test_one_scale_holds_truth_and_prediction():
    truth, prediction = np.array([0.0, 2.0]), np.array([-0.05, 2.5])
    assert field_scale(truth, prediction) == Scale(-0.05, 2.5, "viridis")
    signed = field_scale(np.array([-1.0, 2.0]), np.array([-4.0, 1.0]))
    assert (signed.low, signed.high) == (-4.0, 4.0)
    assert signed.labels() == ("−4", "0", "4")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_the_scale_of_an_error_is_symmetric_and_holds_it(values):
    scale = error_scale(np.array(values))
    assert scale.low == -scale.high
    assert scale.high == max(map(abs, values))


def test_a_picture_has_the_colours_of_its_values():
    values = np.array([[0.0, 1.0], [0.5, np.nan]])
    html = panel("field", values, Scale(0.0, 1.0, "viridis"), 64, "a field")
    assert decoded(html).tolist() == [[0, 254], [127, 255]]
    assert "1 of 4 points are not finite" in html
    assert 'alt="a field"' in html


def test_a_constant_field_says_so_instead_of_showing_nothing():
    flat = np.full((4, 4), 0.25)
    html = panel("field", flat, field_scale(flat, flat), 64, "a field")
    assert "0.25 everywhere" in html
    assert np.unique(decoded(html)).size == 1


def test_a_title_cannot_break_out_of_the_page():
    html = panel("<script>", np.zeros((2, 2)), Scale(0, 1, "viridis"), 8, '"><script>')
    assert "<script>" not in html


def test_large_pictures_are_means_over_squares():
    values = np.arange(35.0).reshape(5, 7)
    small = shrink(values, 4)
    assert small.shape == (3, 4)
    assert small[0, 0] == values[:2, :2].mean()
    assert small[2, 3] == values[4, 6]
    assert shrink(values, 7).shape == (5, 7)


def test_spectra_show_at_most_seven_decades_of_magnitude():
    scale = spectrum_scale(np.array([1e-30, 0.0, 50.0]))
    assert (scale.low, scale.high) == (-5, 2)
    html = panel("spectrum", np.array([[100.0, 0.0]]), scale, 64, "spectrum")
    assert decoded(html).tolist() == [[254, 0]]
    assert "10⁻⁵" in html


def test_a_spectrum_of_zeros_is_drawn():
    zeros = np.zeros((3, 3))
    assert decoded(panel("spectrum", zeros, spectrum_scale(zeros), 64, "spectrum")).tolist() == zeros.tolist()


def segments(path):
    """The unit edges of an SVG path of h and v steps."""
    edges = set()
    for x, y, kind, n in re.findall(r"M(\d+) (\d+)([hv])(\d+)", path):
        for i in range(int(n)):
            edges.add((int(x) + i, int(y), "h") if kind == "h" else (int(x), int(y) + i, "v"))
    return edges


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_the_outline_is_where_kept_and_dropped_modes_meet(rows):
    kept = np.array(rows)
    wide = np.pad(kept, 1)
    across = {(c - 1, r, "h") for r, c in zip(*np.nonzero(wide[1:] != wide[:-1]), strict=True)}
    down = {(c, r - 1, "v") for r, c in zip(*np.nonzero(wide[:, 1:] != wide[:, :-1]), strict=True)}
    assert segments(outline(kept)) == across | down


def test_arrows_follow_the_velocity():
    along, down = np.zeros((18, 18)), np.zeros((18, 18))
    along[9, 9], down[3, 3] = 2.0, -1.0
    lines = re.findall(r"M[\d.]+ [\d.]+l([-\d.]+) ([-\d.]+)", arrows(along, down, 2.0))
    shafts = [(float(dx), float(dy)) for dx, dy in lines[::3]]  # each is followed by the two lines of its head
    assert shafts == [(0.0, pytest.approx(-0.475, abs=0.01)), (0.95, 0.0)]  # where nothing moves there is no arrow


def test_of_three_axes_a_plane_is_shown_and_named():
    cube = np.arange(60).reshape(5, 4, 3)
    middle, words = plane(cube)
    assert np.array_equal(middle, cube[2])
    assert "plane 2 of 5" in words
    assert np.array_equal(plane(cube, first=True)[0], cube[0])


@pytest.mark.parametrize(
    ("transform", "lengths"),
    [("dct", [0, 1, 2, 3, 4]), ("fourier", [0, 1, 1, 2, 2]), ("dft", [0, 1, 2, 3, 4])],
)
def test_wave_numbers_of_an_axis(transform, lengths):
    assert wave_lengths((5,), transform).tolist() == lengths


def test_shells_keep_the_energy_of_a_spectrum():
    spectrum = np.random.default_rng(0).normal(size=(6, 9))
    numbers = np.rint(np.hypot(*np.meshgrid(np.arange(6), np.arange(9), indexing="ij"))).astype(int)
    for k, value in enumerate(shells(spectrum, "dct")):
        assert value == pytest.approx(np.sqrt(np.mean(spectrum[numbers == k] ** 2)))
    both = wave_lengths((4, 3), "dft")
    assert both[3, 0] == 1  # of negative wave number
    assert both[2, 2] == pytest.approx(np.hypot(2, 2))


def test_a_plot_of_nothing_is_no_plot():
    nothing = {"line": (np.arange(3), np.array([np.nan, 0.0, -1.0]))}
    assert line_plot(nothing, ("x", "y"), "nothing") == ""
    assert "image/svg+xml" in line_plot({"one": (np.array([0]), np.array([0.5]))}, ("x", "y"), "one point")


def test_more_pictures_are_smaller_ones():
    sides = [pixels_a_side(count, 300e3) for count in (1, 10, 50, 1000)]
    assert sides == sorted(sides, reverse=True)
    assert 0.8 * 50 * sides[2] ** 2 <= 300e3
