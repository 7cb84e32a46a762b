"""Outlines, mesh script, case files and sampled grids of the airfoil solver, against closed forms."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transform_once.solvers import airfoil_case as case

COARSE = case.AirfoilSettings(resolution=32, iterations=5, airfoil_edge=0.02, far_edge=1.0)
BOUNDARY = """
FoamFile
{
    version     2.0;
    class       polyBoundaryMesh;
}
4
(
    back { type patch; physicalType patch; nFaces 7; startFace 11; }
    front
    {
        type            patch;
        physicalType    patch;
        nFaces          7;
    }
    farfield { type patch; physicalType patch; nFaces 2; }
    airfoil { type patch; physicalType patch; nFaces 4; }
)
"""


def thickness(x):
    """Half the thickness of a symmetric profile that closes at both ends."""
    return 0.6 * (np.sqrt(x) - x) * (1 - 0.5 * x)


def selig(points=41):
    x = (1 + np.cos(np.linspace(0, 2 * np.pi, points))) / 2
    sign = np.where(np.arange(points) < points // 2, 1, -1)
    return np.stack([x, 0.05 * x * (1 - x) + sign * thickness(x)], axis=1)


def write(path, points, header="PROFILE 1", footer=""):
    rows = "\n".join(f"{x:.9f} {y:.9f}" for x, y in points)
    path.write_text(f"{header}\n{rows}\n{footer}")
    return path


def area(points):
    x, y = points.T
    return float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))) / 2


# Outlines


def test_selig_outline_is_closed_once_and_counter_clockwise(tmp_path):
    points = selig()
    read = case.read_airfoil(write(tmp_path / "a.dat", points, footer="drawn by hand 2/3\n"))
    assert read.name == "a"
    np.testing.assert_allclose(read.points, points[:-1], atol=1e-8)  # the repeated trailing edge is dropped, at the end
    assert area(read.points) > 0


def test_every_form_gives_the_same_outline(tmp_path):
    points = selig()
    expected = case.read_airfoil(write(tmp_path / "selig.dat", points)).points
    upper, lower = points[:21][::-1], points[20:]
    lednicer = tmp_path / "lednicer.dat"
    blocks = ["\n".join(f" {x:.9f} {y:.9f}" for x, y in block) for block in (upper, lower)]
    lednicer.write_text(f"PROFILE\n 21. 21.\n\n{blocks[0]}\n\n{blocks[1]}\n")
    np.testing.assert_allclose(case.read_airfoil(lednicer).points, expected, atol=1e-8)
    repeated = write(tmp_path / "repeated.dat", np.repeat(points, 2, axis=0))
    np.testing.assert_allclose(case.read_airfoil(repeated).points, expected, atol=1e-8)
    percent = write(tmp_path / "percent.dat", 100 * points + [3, 0])
    np.testing.assert_allclose(case.read_airfoil(percent).points, expected, atol=1e-8)
    clockwise = case.read_airfoil(write(tmp_path / "clockwise.dat", points[::-1])).points
    np.testing.assert_allclose(np.sort(clockwise, axis=0), np.sort(expected, axis=0), atol=1e-8)
    assert area(clockwise) == pytest.approx(area(expected))


def test_blunt_trailing_edge_keeps_both_corners(tmp_path):
    points = selig()
    points[0] += [0, 0.002]
    points[-1] -= [0, 0.002]
    assert len(case.read_airfoil(write(tmp_path / "blunt.dat", points)).points) == len(points)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        (selig()[:5], "at least 8 distinct finite points"),
        (np.where(selig() == selig()[3], np.nan, selig()), "at least 8 distinct finite points"),
        (selig()[[0, 1, 2, 3, 25, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 30, 36]], "crosses itself or is flat"),
        (np.stack([np.linspace(0, 1, 12), np.zeros(12)], axis=1), "crosses itself or is flat"),
    ],
)
def test_bad_outlines_are_refused_in_one_sentence(tmp_path, points, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        case.read_airfoil(write(tmp_path / "bad.dat", points))
    assert "bad.dat" in str(caught.value)


def test_missing_shapes_are_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"No \.dat files"):
        case.find_shapes(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'transform-once\[airfoil\]'"):
        case.find_shapes()


@pytest.mark.skipif(
    importlib.util.find_spec("aerosandbox") is None, reason="AeroSandbox, which has the UIUC shapes, is absent"
)
def test_uiuc_outlines_read():
    paths = case.find_shapes()
    assert len(paths) > 1500
    for path in paths[::40]:
        points = case.read_airfoil(path).points
        assert area(points) > 0
        assert points[:, 0].min() == 0
        assert points[:, 0].max() == pytest.approx(1)


# The case as text


def test_mesh_script_lists_the_outline_and_names_every_patch(tmp_path):
    shape = case.read_airfoil(write(tmp_path / "a.dat", selig()))
    text = case.mesh_text(shape, COARSE)
    lines = text.splitlines()
    places = [line.split("{")[1].rstrip("};").split(",") for line in lines if line.startswith("Point(")]
    table = np.array(places, dtype=float)
    np.testing.assert_allclose(table[:-4, :2], shape.points, atol=1e-9)
    np.testing.assert_array_equal(table[:-4, 3], COARSE.airfoil_edge)
    np.testing.assert_array_equal(table[-4:], [[-5, -5, 0, 1], [5, -5, 0, 1], [5, 5, 0, 1], [-5, 5, 0, 1]])
    assert f"Spline(5) = {{1:{len(shape.points)}, 1}};" in lines  # back to its first point
    assert [line for line in lines if line.startswith("Line(")] == [
        f"Line({k}) = {{{len(shape.points) + k}, {len(shape.points) + end}}};"
        for k, end in ((1, 2), (2, 3), (3, 4), (4, 1))
    ]
    assert all(f'Physical Surface("{patch}")' in text for patch in case.PATCHES)


def test_boundary_patches_get_their_types():
    text = case.patch_boundary(BOUNDARY)
    for patch, kind in case.PATCHES.items():
        block = text[text.index(patch) :].split("}")[0]
        assert f"type {kind};" in " ".join(block.split())
        assert "nFaces" in block
    assert "physicalType" not in text
    assert "class       polyBoundaryMesh;" in text
    with pytest.raises(case.CaseError, match="but has"):
        case.patch_boundary(BOUNDARY.replace("farfield", "defaultFaces"))


def test_case_files_hold_the_flow_and_the_cloud():
    files = case.case_files((12.5, -3.25), COARSE)
    assert {name.split("/")[0] for name in files} == {"0", "constant", "system"}
    assert all(text.count("{") == text.count("}") and text.count("(") == text.count(")") for text in files.values())
    assert files["0/U"].count("uniform (12.5 -3.25 0);") == 2  # start and far field
    assert "volVectorField" in files["0/U"]
    assert "volScalarField" in files["0/p"]
    assert "freestreamPressure" not in files["0/p"]
    control = files["system/controlDict"]
    assert control.count(" 0.5)") == COARSE.resolution**2
    assert "endTime 5;" in control
    assert "writeInterval 1;" in control


@pytest.mark.parametrize("wrong", [{"iterations": 7}, {"resolution": 1}, {"airfoil_edge": 0.0}, {"tolerance": -1.0}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match="must be"):
        case.AirfoilSettings(**wrong)


# The sampled cloud


def cloud(resolution, channels, keep):
    i, j = (axis.ravel() for axis in np.meshgrid(np.arange(resolution), np.arange(resolution), indexing="ij"))
    values = np.stack([(k + 1) * 1000 + i * 100 + j for k in range(channels)]).reshape(channels, resolution, resolution)
    rows = np.stack(
        [-0.5 + 2 * i / resolution, -1 + 2 * j / resolution, np.full(i.size, 0.5), *values.reshape(channels, -1)]
    )
    return rows.T[keep], values


@given(st.integers(2, 12), st.randoms(use_true_random=False))
def test_nodes_that_the_cloud_leaves_out_are_the_mask(resolution, chance):
    keep = [k for k in range(resolution**2) if chance.random() < 0.8]
    chance.shuffle(keep)
    rows, values = cloud(resolution, 2, np.array(keep, dtype=int))
    mask, found = case.grid_from_cloud(np.round(rows, 7), resolution)
    expected = np.ones(resolution**2, dtype=bool)
    expected[keep] = False
    np.testing.assert_array_equal(mask.ravel(), expected)
    np.testing.assert_array_equal(found, np.where(mask, 0, values))


def test_first_axis_is_x_and_second_is_y():
    mask, found = case.grid_from_cloud(np.array([[-0.5, 0.5, 0.5, 7.0]]), 4)
    assert found[0, 0, 3] == 7
    assert not mask[0, 3]
    assert mask.sum() == 15


def test_foreign_clouds_are_refused():
    rows, _ = cloud(4, 1, slice(None))
    with pytest.raises(case.CaseError, match="not distinct nodes"):
        case.grid_from_cloud(rows + np.array([0.1, 0, 0, 0]), 4)
    with pytest.raises(case.CaseError, match="not distinct nodes"):
        case.grid_from_cloud(rows[[0, 0]], 4)
    with pytest.raises(case.CaseError, match="leave the grid"):
        case.grid_from_cloud(rows + np.array([0.5, 0, 0, 0]), 4)
