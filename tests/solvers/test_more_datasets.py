"""The verbs of `t1 generate` for Darcy flow, Burgers' equation and transport, also stopped on the way."""

import pytest
import torch

import transform_once as t1
from transform_once.solvers import darcy, more_datasets
from transform_once.solvers.darcy import DARCY_SYMMETRIES, solve
from transform_once.solvers.transport import (
    ADVECTION_SYMMETRIES,
    BURGERS_SYMMETRIES,
    DIFFUSION_ADVECTION_SYMMETRIES,
    generate_burgers,
    transport,
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def distance(first, second):
    return float((first - second).norm() / second.norm())


def declared(fields):
    return tuple(t1.Symmetry.from_dict(symmetry) for symmetry in fields.metadata.symmetries)


def test_darcy_pairs_solve_the_equation(tmp_path):
    more_datasets.darcy(tmp_path / "darcy.h5", samples=20, resolution=16, refinement=1, seed=3)
    fields = t1.read(tmp_path / "darcy.h5")
    assert fields.shapes == {"input": (20, 1, 16, 16), "target": (20, 1, 16, 16)}
    assert distance(solve(fields.input.double()), fields.target) < 1e-6
    assert (fields.metadata.grid, fields.metadata.periodic, fields.metadata.seed) == ("cell", (False, False), 3)
    assert fields.metadata.channels == {"input": ("permeability",), "target": ("pressure",)}
    assert fields.metadata.settings == {"high": 12.0, "low": 3.0, "source": 1.0, "grid": 16}
    assert declared(fields) == DARCY_SYMMETRIES


def test_darcy_says_on_which_grid_it_was_solved(tmp_path):
    more_datasets.darcy(tmp_path / "darcy.h5", samples=1, resolution=20)
    assert t1.read(tmp_path / "darcy.h5").metadata.settings["grid"] == 300


def test_burgers_pairs_are_those_of_the_solver(tmp_path, capsys):
    more_datasets.burgers(tmp_path / "burgers.h5", samples=3, resolution=64, seed=2, tolerance=1e-4)
    fields = t1.read(tmp_path / "burgers.h5")
    initial, later, steps = generate_burgers(3, 64, seed=2, tolerance=1e-4)
    assert torch.equal(fields.input, initial)
    assert distance(fields.target, later) < 1e-6
    assert fields.metadata.settings == {"viscosity": 0.1, "time": 1.0, "grid": 8192, "steps": steps, "tolerance": 1e-4}
    assert (fields.metadata.grid, fields.metadata.periodic) == ("node", (True,))
    assert declared(fields) == BURGERS_SYMMETRIES
    assert f"{steps} time steps" in capsys.readouterr().err


def test_advection_moves_its_sines(tmp_path):
    more_datasets.advection(tmp_path / "advection.h5", samples=5, resolution=40, speed=0.25, time=3.0)
    fields = t1.read(tmp_path / "advection.h5")
    assert distance(fields.target, fields.input.roll(30, -1)) < 1e-6
    assert fields.metadata.channels["target"] == ("concentration",)
    assert declared(fields) == ADVECTION_SYMMETRIES


def test_diffusion_and_advection_in_three_dimensions(tmp_path):
    more_datasets.diffusion_advection(tmp_path / "cube.h5", samples=3, resolution=8, velocity=(0.5, -0.25, 0.1))
    fields = t1.read(tmp_path / "cube.h5")
    assert fields.shapes == {"input": (3, 1, 8, 8, 8), "target": (3, 1, 8, 8, 8)}
    assert distance(transport(fields.input, (0.5, -0.25, 0.1), 2e-3, 1.0), fields.target) < 1e-6
    assert fields.metadata.periodic == (True, True, True)
    assert declared(fields) == DIFFUSION_ADVECTION_SYMMETRIES


@pytest.mark.parametrize("name", ["darcy", "burgers", "advection", "diffusion_advection"])
def test_every_option_is_explained(name):
    from jsonargparse import auto_cli, capture_parser

    parser = capture_parser(lambda: auto_cli(getattr(more_datasets, name), args=[]))
    described = [action for action in parser._actions if action.dest not in ("help", "config", "print_config")]
    assert len(described) >= 6
    assert all(action.help for action in described)


def test_an_interrupted_run_loses_nothing_finished(tmp_path, monkeypatch):
    """Stopped after two blocks and begun again, the file ends as one that was never stopped, made block by block."""
    whole, stopped = tmp_path / "whole.h5", tmp_path / "stopped.h5"
    options = {"samples": 48, "resolution": 12, "refinement": 1}
    asked = []
    generate = darcy.generate

    def interrupted(numbers, *arguments, **keywords):
        asked.append(numbers)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return generate(numbers, *arguments, **keywords)

    monkeypatch.setattr(darcy, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        more_datasets.darcy(stopped, **options)
    with pytest.raises(ValueError, match="unfinished"):
        t1.read(tmp_path / "stopped.h5.partial")
    more_datasets.darcy(stopped, **options)
    assert asked == [range(1), range(16), range(16, 32), range(32, 48), range(1), range(32, 48)]
    more_datasets.darcy(whole, **options)
    first, second = t1.read(whole), t1.read(stopped)
    assert torch.equal(first.input, second.input)
    assert torch.equal(first.target, second.target)


@pytest.mark.parametrize(
    ("verb", "options", "sentence"),
    [
        ("darcy", {"samples": 0}, "samples must be at least 1"),
        ("darcy", {"refinement": 2}, "must be odd"),
        ("darcy", {"resolution": 0}, "at least 2"),
        ("burgers", {"viscosity": -1.0}, "must be positive"),
        ("burgers", {"resolution": 0}, "resolution must be at least 4"),
        ("advection", {"resolution": 2}, "resolution 2"),
        ("diffusion_advection", {"diffusivity": -1.0}, "κ ≥ 0"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, verb, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        getattr(more_datasets, verb)(tmp_path / "out.h5", **{"samples": 2, **options})
    assert not list(tmp_path.iterdir())
