"""The pictures of an analysis, looked at by their parts, and the verb that makes them."""

import json
import math
import sys

import numpy as np
import pytest
import torch

from transform_once.data.fields import Fields
from transform_once.evaluation.analysis import analyze
from transform_once.reports.analysis_figures import (
    analyze_verb,
    compaction_figure,
    energy_figure,
    irreducible_figure,
    save_analysis,
)
from transform_once.spectral.transforms import get_transform

FIGURES = (energy_figure, compaction_figure, irreducible_figure)


def fields_on(grid, count=1, samples=3, **facts):
    """Pairs of random fields whose modes decay with the largest of their wave numbers."""
    highest = torch.stack(torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")).amax(0)
    decay = (1.0 + highest.double()) ** -2.5
    draw = torch.randn(2, samples, count, *grid, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = get_transform("dct").inverse(decay * draw, len(grid))
    return Fields(input=x, target=y + 2, **facts)


def analysed(*arguments, tolerance=0.05, **facts):
    return analyze(fields_on(*arguments, **facts), tolerance=tolerance, rates=False, progress=False)


def sparse():
    X = torch.zeros(3, 1, 16, 16, dtype=torch.float64)
    X[:, 0, [0, 2, 13, 1], [0, 3, 1, 14]] = 1.0
    return Fields(input=get_transform("dct").inverse(X, 2))


def drawn(figure):
    """The figure after it was laid out, and its renderer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def panels(figure):
    return [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize("grid", [(24,), (16, 12), (8, 6, 10)])
@pytest.mark.parametrize("draw", FIGURES)
def test_every_panel_has_content_labels_and_its_own_place(draw, grid):
    figure = draw(analysed(grid, 2, channels=("heat", "wind"), units={"heat": "K"}))
    renderer = drawn(figure)
    width, height = figure.canvas.get_width_height()
    boxes = []
    for axes in panels(figure):
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.images or axes.lines
        box = axes.get_tightbbox(renderer)
        assert box.x0 > -1
        assert box.y0 > -1
        assert box.x1 < width + 1
        assert box.y1 < height + 1
        boxes.append(box)
    boxes += [axes.get_tightbbox(renderer) for axes in figure.axes if axes.get_label() == "<colorbar>"]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    boxes += [figure._suptitle.get_window_extent(renderer)] if figure._suptitle else []
    for i, one in enumerate(boxes):
        assert min(one.width, one.height) > 5
        assert not any(one.padded(-2).overlaps(other.padded(-2)) for other in boxes[i + 1 :])


def test_maps_show_the_energy_of_every_mode_and_the_kept_ones():
    found = analysed((16, 12), 2, channels=("heat", "wind"), units={"heat": "K"})
    figure = energy_figure(found)
    shown = panels(figure)
    assert [axes.get_title() for axes in shown] == ["input: heat", "input: wind", "target: heat", "target: wind"]
    energy = [*found.basis.energy["input"], *found.basis.energy["target"]]
    for axes, values in zip(shown, energy, strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), values.log10())
        edge = np.concatenate([path.vertices for path in axes.collections[0].get_paths()])
        np.testing.assert_allclose(edge.max(0), found.recommendation.modes - 0.5, atol=0.05)
    bars = [axes.get_ylabel() for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert bars == ["log₁₀ mean energy / (K)²", "log₁₀ mean energy"] * 2


def test_a_channel_that_never_varies_says_so_in_its_title():
    fields = fields_on((8, 8), 2, channels=("flow", "freestream"))
    x = fields.input.clone()
    x[:, 1] = 3.0
    constant = Fields(input=x, target=fields.target, channels=("flow", "freestream"))
    figure = energy_figure(analyze(constant, rates=False, progress=False))
    assert [axes.get_title() for axes in panels(figure)][1] == "input: freestream (constant)"


def test_many_channels_are_drawn_in_part():
    figure = energy_figure(analysed((8, 8), 6))
    assert len(panels(figure)) == 8
    assert "first 4 channels" in figure._suptitle.get_text()


def test_compaction_shows_all_bases_over_their_cost():
    found = analysed((16, 16))
    axes = compaction_figure(found).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["tolerance² 0.0025"].get_ydata()[0] == found.tolerance**2
    for name, basis in found.bases.items():
        curve = basis.low_pass["target"]
        line = lines[f"{name}, low-pass"]
        count = len(line.get_xdata())
        assert list(line.get_xdata()) == curve.cost[:count]
        assert list(line.get_ydata()[:-1]) == curve.left_out[: count - 1]
        assert f"{name}, largest modes" in lines


@pytest.mark.parametrize(("fields", "selection"), [(fields_on((16, 16)), "low-pass"), (sparse(), "shared top-m")])
def test_the_recommendation_is_marked_where_it_is(fields, selection):
    found = analyze(fields, tolerance=0.05, rates=False, progress=False)
    assert found.recommendation.selection == selection
    axes = irreducible_figure(found).axes[0]
    mark = next(line for line in axes.lines if line.get_label().startswith("recommended"))
    assert mark.get_xdata()[0] == found.recommendation.coefficients
    assert mark.get_ydata()[0] == max(found.recommendation.error, axes.get_ylim()[0])
    assert mark.get_ydata()[0] <= found.tolerance


def test_a_top_set_is_outlined_mode_by_mode():
    found = analyze(sparse(), rates=False, progress=False)
    outline = panels(energy_figure(found))[0].collections[0]
    assert found.recommendation.selection == "shared top-m"
    centres = {(0, 0), (2, 3), (13, 1), (1, 14)}
    vertices = np.concatenate([path.vertices for path in outline.get_paths()])
    near = {min(centres, key=lambda c: (v[1] - c[0]) ** 2 + (v[0] - c[1]) ** 2) for v in vertices}
    assert near == centres
    assert max(min(abs(v[1] - c[0]) + abs(v[0] - c[1]) for c in centres) for v in vertices) < 1.1


def test_files_hold_what_was_found(tmp_path):
    found = analysed((12, 10))
    paths = save_analysis(found, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["analysis.json", "energy.png", "compaction.png", "irreducible.png"]
    report = json.loads(paths[0].read_text())
    assert report == json.loads(json.dumps(found.to_dict()))
    assert report["recommendation"]["reason"] == found.recommendation.reason
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths[1:])
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)


@pytest.mark.parametrize("grid", [(2,), (1, 2), (2, 2)])
def test_the_smallest_grids_have_pictures_too(grid, tmp_path):
    y = torch.arange(2.0 * math.prod(grid)).reshape(2, 1, *grid)
    save_analysis(analyze(Fields(input=y), rates=False, progress=False), tmp_path)


def run(monkeypatch, *arguments):
    from jsonargparse import auto_cli

    monkeypatch.setattr(sys, "argv", ["analyze", *map(str, arguments)])
    auto_cli(analyze_verb)


def test_the_verb_prints_one_json_object(monkeypatch, tmp_path, capsys):
    fields_on((12, 10)).save(tmp_path / "x.h5")
    run(monkeypatch, tmp_path / "x.h5", "--json=true", "--rates=false", f"--output={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert printed.count("\n") == 1


def test_the_verb_prints_tables_and_reads_named_arrays(monkeypatch, tmp_path, capsys):
    w = fields_on((12, 10), samples=4).target.numpy()
    np.savez(tmp_path / "x.npz", u=w[:, 0], v=2 * w[:, 0])
    words = ("--read.trajectory_key=u,v", "--read.axes=txy", "--tolerance=0.1", "--samples=1")
    run(monkeypatch, tmp_path / "x.npz", *words)
    printed = capsys.readouterr().out
    assert 'Use transform="dct"' in printed
    assert "trajectory" in printed
    assert "Measured on" in printed
    with pytest.raises(FileNotFoundError, match="there is no"):
        analyze_verb(tmp_path / "nowhere.h5")
