"""The kept modes of fields: the loss on them is the loss of the fields, and no cache is used that is not right."""

import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
import warnings

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transform_once.data import spectra as module
from transform_once.data.fields import Fields
from transform_once.data.formats import read
from transform_once.data.normalization import Normalization
from transform_once.data.spectra import Spectra, spectra
from transform_once.data.spectra_cache import Cache
from transform_once.data.writer import FieldsWriter
from transform_once.spectral.modes import LowPass, ModeSet, TopM, tail_energy
from transform_once.spectral.transforms import get_transform

KINDS = {"dct": {"grid": "cell"}, "fourier": {"grid": "node", "periodic": True}}
KINDS["dft"] = KINDS["fourier"]


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def smooth(*shape, seed=0):
    """Fields with a decaying spectrum and an offset, in units of their own in every channel."""
    y = noise(*shape, seed=seed)
    for axis in range(2, len(shape)):
        y = y.cumsum(axis)
    channels = torch.arange(shape[1], dtype=torch.float32).reshape(-1, *[1] * (len(shape) - 2))
    return (y + 3 * channels) * 10**channels


def pairs(transform="dct", n=5, grid=(12, 9), channels=(1, 2)):
    x, y = (smooth(n, c, *grid, seed=c) for c in channels)
    return Fields(input=x, target=y, **KINDS[transform])


def stored_film(path, n=2, t=7, grid=(10, 8), seed=0):
    return Fields(trajectory=noise(n, t, 1, *grid, seed=seed) + 2, dt=0.1).save(path)


def field_loss(made, prediction, y):
    """The relative L2 of the fields in physical units, per sample, in float64: (n, c, *kept), (n, c, *grid)."""
    T, double = get_transform(made.transform), torch.complex128 if prediction.is_complex() else torch.float64
    z = T.inverse(prediction.to(double), len(made.resolution), made.resolution, made.modes)
    error = (made.normalization[1].invert(z) - y.double()).flatten(1)
    return error.norm(dim=1) / y.double().flatten(1).norm(dim=1)


def equal(a: Spectra, b: Spectra):
    same = all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors | b.tensors)
    return same and all(p.to_dict() == q.to_dict() for p, q in zip(a.normalization, b.normalization, strict=True))


# The loss


@st.composite
def cases(draw):
    transform = draw(st.sampled_from(["dct", "fourier", "dft"]))
    grid = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    T = get_transform(transform)
    fields = pairs(transform, n=3, grid=grid)
    modes = tuple(draw(st.integers(1, limit)) for limit in T.max_modes(grid))
    if draw(st.booleans()):
        count = int(np.prod(T.block(None, grid)))
        modes = TopM(draw(st.integers(1, count))).fit(fields.target, transform)
    return fields, transform, modes, draw(st.sampled_from([None, "standard", "unit"])), draw(st.integers(0, 99))


@given(cases(), st.sampled_from([1e-3, 1.0, 30.0]))
@settings(max_examples=150)
def test_the_loss_on_kept_modes_is_that_of_the_fields(case, size):
    fields, transform, modes, normalization, seed = case
    made = spectra(fields, transform, modes, normalization=normalization)
    batch = made[:]
    step = size * torch.randn(batch["target"].shape, generator=torch.Generator().manual_seed(seed))
    if batch["target"].is_complex():
        step = torch.complex(step, size * noise(*step.shape, seed=seed + 1))
    prediction = batch["target"] + step
    loss = made.relative_l2(prediction, batch["target"], batch["tail"], batch["energy"])
    expected = field_loss(made, prediction, fields.target)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("modes", [4, (5, 3), TopM(11)])
@pytest.mark.parametrize("transform", ["dct", "fourier", "dft"])
def test_its_gradient_is_that_of_the_loss_of_the_fields(transform, modes):
    fields = pairs(transform)
    modes = modes.fit(fields.target, transform) if isinstance(modes, TopM) else modes
    made = spectra(fields, transform, modes, normalization="standard")
    batch = made[:]
    prediction = (batch["target"] * noise(*batch["target"].shape)).requires_grad_()
    loss = made.relative_l2(prediction, batch["target"], batch["tail"], batch["energy"])
    (found,) = torch.autograd.grad(loss.sum(), prediction)
    (expected,) = torch.autograd.grad(field_loss(made, prediction, fields.target).sum(), prediction)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_no_prediction_beats_the_tail():
    made = spectra(pairs(), modes=4, normalization="standard")
    batch = made[:]
    best = made.relative_l2(batch["target"], batch["target"], batch["tail"], batch["energy"])
    scale = made.normalization[1].scale.flatten()
    torch.testing.assert_close(
        best.double(), ((scale**2 * batch["tail"]).sum(1) / batch["energy"].sum(1)).sqrt(), rtol=1e-6, atol=0
    )
    worse = made.relative_l2(batch["target"] + 1e-2, batch["target"], batch["tail"], batch["energy"])
    assert (worse > best).all()


def test_units_of_any_size_and_bfloat16_predictions():
    fields = Fields(input=noise(2, 1, 8), target=1e30 * noise(2, 1, 8))  # whose squares no float32 holds
    made = spectra(fields, modes=5, normalization="standard")
    batch = made[:]
    prediction = 1.1 * batch["target"]
    loss = made.relative_l2(prediction, batch["target"], batch["tail"], batch["energy"])
    torch.testing.assert_close(loss.double(), field_loss(made, prediction, fields.target), rtol=1e-5, atol=0)
    rounded = made.relative_l2(prediction.bfloat16(), batch["target"], batch["tail"], batch["energy"])
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, loss, rtol=1e-2, atol=0)


# What is stored


@pytest.mark.parametrize("transform", ["dct", "fourier", "dft"])
def test_pairs_hold_the_modes_of_normalised_fields_the_tail_and_the_energy(transform):
    fields = pairs(transform)
    made = spectra(fields, transform, (5, 3), normalization="standard")
    assert (made.kind, len(made), made.resolution, made.cache) == ("pairs", 5, (12, 9), None)
    assert made.metadata.grid == fields.metadata.grid
    T = get_transform(transform)
    for name, affine in zip(("input", "target"), made.normalization, strict=True):
        assert affine.to_dict() == Normalization.fit(fields, name).to_dict()
        expected = T.forward(affine.apply(getattr(fields, name).double()), 2, (5, 3))
        stored = made.tensors[name]
        assert stored.dtype == (torch.complex64 if transform == "dft" else torch.float32)
        torch.testing.assert_close(stored.to(expected.dtype), expected, rtol=1e-6, atol=1e-6)
    z = made.normalization[1].apply(fields.target.double())
    torch.testing.assert_close(made.tensors["tail"], tail_energy(z, (5, 3), transform), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(made.tensors["energy"], fields.target.double().square().sum((2, 3)))
    assert set(made[0]) == {"input", "target", "tail", "energy"}
    assert made[torch.tensor([3, 1])]["target"].shape == (2, 2, *T.block((5, 3), (12, 9)))


def test_a_trajectory_holds_every_frame_once(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_MEGABYTES", 3 * 80 * 4 / 2**20)  # three frames: cuts trajectories
    w = noise(2, 7, 1, 10, 8) + 2
    made = spectra(Fields(trajectory=w, dt=0.1), modes=4, normalization="unit")
    assert (made.kind, len(made), made.metadata.dt) == ("trajectories", 2, pytest.approx(0.1))
    z = made.normalization[0].apply(w.double())
    expected = get_transform("dct").forward(z, 2, 4)
    torch.testing.assert_close(made.tensors["trajectory"].double(), expected, rtol=1e-6, atol=1e-6)
    tails = torch.stack([tail_energy(z[i], 4) for i in range(2)])
    torch.testing.assert_close(made.tensors["tail"], tails)
    torch.testing.assert_close(made.tensors["energy"], w.double().square().sum((3, 4)))
    # A model that repeats the frame before: one loss per sample and frame.
    batch = made[[1, 0]]
    modes, tail, energy = batch["trajectory"], batch["tail"], batch["energy"]
    loss = made.relative_l2(modes[:, :-1], modes[:, 1:], tail[:, 1:], energy[:, 1:])
    fields = w[[1, 0], 1:].reshape(-1, 1, 10, 8)
    expected = field_loss(made, modes[:, :-1].flatten(0, 1), fields).reshape(2, 6)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_sets_of_modes_low_pass_and_float64(tmp_path):
    fields = pairs()
    kept = TopM(11).fit(fields.target)
    chosen, other = (
        spectra(fields, modes=modes, cache=tmp_path) for modes in (kept, ModeSet(kept.indices.flip(0), kept.block))
    )
    assert chosen.tensors["target"].shape == (5, 2, 11)
    assert chosen.modes is kept
    torch.testing.assert_close(chosen.tensors["target"].flip(-1), other.tensors["target"], rtol=0, atol=0)
    assert chosen.cache.path != other.cache.path
    assert equal(spectra(fields, modes=LowPass((4, 3))), spectra(fields, modes=(4, 3)))
    double = Fields(input=fields.input.double(), target=fields.target.double())
    assert spectra(double, modes=4).tensors["target"].dtype == torch.float64


def test_test_data_take_the_normalisation_of_the_training_data(tmp_path):
    train, test = pairs(n=8).split(5, 3)
    fitted = spectra(train, modes=4, normalization="standard", cache=tmp_path)
    made = spectra(test, modes=4, normalization=fitted.normalization, cache=tmp_path)
    assert made.normalization[1].to_dict() == fitted.normalization[1].to_dict()
    expected = get_transform("dct").forward(fitted.normalization[1].apply(test.target.double()), 2, 4)
    torch.testing.assert_close(made.tensors["target"].double(), expected, rtol=1e-6, atol=1e-6)
    own = spectra(test, modes=4, normalization="standard", cache=tmp_path)
    assert not equal(own, made)
    assert len(list(tmp_path.iterdir())) == 3


# Refusals and warnings


def test_masks_and_missing_points_are_refused():
    x = noise(2, 1, 8)
    with pytest.raises(ValueError, match=r"mask or missing points.*train on fields"):
        spectra(Fields(input=x, target=x, mask=torch.ones(1, 1, 8)))
    with pytest.raises(ValueError, match="mask or missing points"):
        spectra(Fields(trajectory=noise(2, 3, 1, 8), missing=float("nan")))


def test_what_cannot_be_transformed_is_refused():
    fields, films = pairs(), Fields(trajectory=noise(2, 3, 1, 8))
    with pytest.raises(ValueError, match="inputs only: give targets too"):
        spectra(Fields(input=noise(2, 1, 8)))
    with pytest.raises(ValueError, match="between 1 and 9 on axis 1"):
        spectra(fields, modes=10)
    with pytest.raises(ValueError, match="one of the transforms"):
        spectra(fields, "sine")
    with pytest.raises(ValueError, match="one set of modes"):
        spectra(fields, modes=TopM(5, per="channel").fit(fields.target))
    with pytest.raises(ValueError, match="none, standard, unit, or two fitted"):
        spectra(fields, modes=4, normalization="gaussian")
    one = spectra(fields, modes=4, normalization="standard").normalization
    with pytest.raises(ValueError, match=r"\(1, 2\) channels in and out, but the normalisation is for \(2, 1\)"):
        spectra(fields, modes=4, normalization=one[::-1])
    pair = [Normalization.fit(films, "trajectory", kind) for kind in ("standard", "unit")]
    with pytest.raises(ValueError, match="have one normalisation"):
        spectra(films, modes=4, normalization=tuple(pair))


@pytest.mark.parametrize(
    ("transform", "declared", "right"),
    [
        ("dct", {"grid": "node", "periodic": True}, "fourier"),
        ("fourier", {"grid": "cell", "periodic": True}, "dct"),
        ("fourier", {"grid": "node"}, "dct"),
        ("dft", {"grid": "node", "periodic": (True, False)}, "dct"),
        ("dct", {"grid": "node", "periodic": (True, False)}, None),
        ("dct", {}, None),
        ("fourier", {"grid": "node", "periodic": True}, None),
    ],
)
def test_a_basis_that_does_not_suit_the_grid_is_warned_of(transform, declared, right):
    fields = Fields(input=noise(2, 1, 8, 8), target=noise(2, 1, 8, 8), **declared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spectra(fields, transform, 3)
    assert [f'right basis is transform="{right}"' in str(w.message) for w in caught] == ([True] if right else [])
    assert all(w.filename == __file__ for w in caught)


# The cache


@pytest.fixture
def transformed(monkeypatch):
    """The starts of all runs of the transform, and of all fits of a normalisation."""
    runs = []
    original, fit = module._Recipe.transformed, module._Recipe.fitted

    def noted(self, normalization, start, device):
        runs.append(start)
        return original(self, normalization, start, device)

    def fitted(self, normalization):
        runs.append("fit")
        return fit(self, normalization)

    monkeypatch.setattr(module._Recipe, "transformed", noted)
    monkeypatch.setattr(module._Recipe, "fitted", fitted)
    return runs


def test_a_cache_lies_beside_its_source_and_is_not_made_twice(tmp_path, transformed):
    fields = stored_film(tmp_path / "film.h5")
    first = spectra(fields, modes=4, normalization="standard")
    assert transformed == ["fit", 0]
    assert first.cache.path.parent == tmp_path / "film.h5.spectra"
    again = spectra(Fields.open(tmp_path / "film.h5"), modes=4, normalization="standard")
    assert transformed == ["fit", 0]
    assert equal(first, again)
    assert equal(first, spectra(fields.load(), modes=4, normalization="standard"))
    train, test = fields.split(1, 1)
    for part, modes, normalization in ((train, 4, "standard"), (test, 4, "standard"), (train, 5, "standard")):
        spectra(part, modes=modes, normalization=normalization)
    spectra(train, modes=4, normalization="unit")
    spectra(train, modes=4)
    assert sorted(os.listdir(tmp_path)) == ["film.h5", "film.h5.spectra"]
    assert len(os.listdir(tmp_path / "film.h5.spectra")) == 6
    before = len(transformed)
    spectra(test, modes=4, normalization="standard")
    spectra(train, modes=4, normalization="none")  # what None means
    assert len(transformed) == before


def test_where_caches_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = stored_film(tmp_path / "film.h5").pairs()
    assert spectra(fields.load(), modes=4).cache is None
    assert spectra(fields, modes=4, cache=False).cache is None
    assert os.listdir(tmp_path) == ["film.h5"]
    assert spectra(fields, modes=4, cache="a/b").cache.path.parent == tmp_path / "a" / "b"
    assert spectra(fields.load(), modes=4, cache=tmp_path / "c").cache.path.parent == tmp_path / "c"
    np.save(tmp_path / "film.npy", noise(2, 3, 1, 8, 8).numpy())
    assert spectra(read("film.npy"), modes=4).cache.path.parent == tmp_path / "film.npy.spectra"
    (tmp_path / "airfoils").mkdir()
    for i in range(3):
        np.savez(tmp_path / "airfoils" / f"{i}.npz", a=noise(6, 8, 8, seed=i).numpy())
    flow = read(tmp_path / "airfoils")
    made = spectra(flow, modes=4)
    assert made.cache.path.parent == tmp_path / "airfoils.spectra"
    np.savez(tmp_path / "airfoils" / "1.npz", a=noise(6, 8, 8, seed=9).numpy())
    assert not equal(spectra(read(tmp_path / "airfoils"), modes=4), made)


def test_a_stale_cache_is_made_anew_and_removed(tmp_path, transformed):
    path = tmp_path / "film.h5"
    old = spectra(stored_film(path), modes=4)
    path.unlink()
    fields = stored_film(path, seed=1)
    made = spectra(fields, modes=4)
    assert transformed == ["fit", 0, "fit", 0]
    assert not equal(old, made)
    assert equal(made, spectra(fields.load(), modes=4))
    assert [made.cache.path] == list(made.cache.path.parent.iterdir())
    other = spectra(fields, modes=5)  # of the same state of the source: both stay
    assert sorted([made.cache.path, other.cache.path]) == sorted(made.cache.path.parent.iterdir())


def spoil_truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def spoil_data(path):
    with h5py.File(path, "r+") as file:
        file["trajectory"][1, 3, 0, 2, 2] += 1e-3


def spoil_tail(path):
    with h5py.File(path, "r+") as file:
        file["tail"][0, 0, 0] *= 1.001


def spoil_normalization(path):
    with h5py.File(path, "r+") as file:
        note = json.loads(file.attrs["note"])
        note[1]["scale"] = [2.0]
        file.attrs["note"] = json.dumps(note)


def spoil_zeros(path):
    size = path.stat().st_size
    path.write_bytes(bytes(size))


def spoil_text(path):
    path.write_text("something else")


def spoil_foreign(path):
    path.unlink()
    with h5py.File(path, "w") as file:
        file["trajectory"] = np.zeros(3)


def spoil_other_recipe(path):
    other = spectra(Fields.open(path.parent.parent / "film.h5"), modes=4, normalization="unit")
    os.replace(other.cache.path, path)


SPOIL = [value for name, value in list(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("suffix", ["", ".partial"])
@pytest.mark.parametrize("spoil", SPOIL, ids=lambda spoil: spoil.__name__.removeprefix("spoil_"))
def test_a_cache_that_is_not_right_is_made_anew(tmp_path, spoil, suffix):
    fields = stored_film(tmp_path / "film.h5")
    expected = spectra(fields, modes=4, normalization="standard", cache=False)
    made = spectra(fields, modes=4, normalization="standard")
    path = made.cache.path
    del made
    spoil(path)
    if suffix:  # the same damage to a build that was killed
        os.replace(path, f"{path}{suffix}")
    found = spectra(fields, modes=4, normalization="standard")
    assert found.cache.path == path
    assert equal(found, expected)
    assert spectra(fields, modes=4, normalization="standard").cache.whole()


@given(st.integers(0, 2**31), st.integers(1, 255))
@settings(max_examples=60)
def test_any_changed_byte_is_noticed_or_harmless(tmp_path_factory, place, change):
    folder = tmp_path_factory.mktemp("bytes")
    fields = Fields(input=noise(2, 1, 6), target=noise(2, 1, 6, seed=1))
    made = spectra(fields, modes=2, normalization="standard", cache=folder)
    content = bytearray(made.cache.path.read_bytes())
    content[place % len(content)] ^= change
    made.cache.path.write_bytes(content)
    assert equal(
        spectra(fields, modes=2, normalization="standard", cache=folder),
        spectra(fields, modes=2, normalization="standard"),
    )


def test_a_build_that_failed_goes_on_where_it_stopped(tmp_path, transformed, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_MEGABYTES", 3 * 80 * 4 / 2**20)
    fields = stored_film(tmp_path / "film.h5")
    original, written = Cache._write, []

    def fail(self, file, first, block):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(first)
        original(self, file, first, block)

    monkeypatch.setattr(Cache, "_write", fail)
    with pytest.raises(OSError, match=r"cannot write the cache .*cache=False.*No space left"):
        spectra(fields, modes=4, normalization="standard")
    assert written == [0, 3, 6]
    (partial,) = (tmp_path / "film.h5.spectra").iterdir()
    assert partial.name.endswith(".h5.partial")
    monkeypatch.setattr(Cache, "_write", lambda *given: (written.append(given[2]), original(*given)))
    made = spectra(fields, modes=4, normalization="standard")
    assert written == [0, 3, 6, 7, 10, 13]
    assert transformed == ["fit", 0, 7]
    assert equal(made, spectra(fields, modes=4, normalization="standard", cache=False))
    assert [made.cache.path] == list(partial.parent.iterdir())


def test_a_source_that_changes_while_it_is_read_makes_no_cache(tmp_path, monkeypatch):
    fields = stored_film(tmp_path / "film.h5")
    monkeypatch.setattr(Cache, "_write", lambda *_: os.utime(tmp_path / "film.h5"))
    with pytest.raises(OSError, match="changed while it was transformed: run again"):
        spectra(fields, modes=4)
    monkeypatch.undo()
    made = spectra(fields, modes=4)
    assert equal(made, spectra(fields, modes=4, cache=False))
    assert [made.cache.path] == list(made.cache.path.parent.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match=r"cannot write the cache .*taken.*choose another folder"):
        spectra(pairs(), modes=4, cache=tmp_path / "taken")


def test_a_cache_is_mapped_and_safe_from_changes(tmp_path):
    made = spectra(pairs(), modes=4, cache=tmp_path)
    before = made.cache.path.read_bytes()
    loaded = made.load()
    assert loaded.cache is None
    assert equal(made, loaded)
    made.tensors["target"].zero_()  # a private copy of the pages it touches
    assert made.cache.path.read_bytes() == before
    assert equal(spectra(pairs(), modes=4, cache=tmp_path), loaded)
    assert loaded.relative_l2(*(loaded[:][k] for k in ("target", "target", "tail", "energy"))).shape == (5,)


def test_datasets_feed_loaders_and_travel_light(tmp_path):
    fields = Fields(input=noise(20, 1, 64, 64), target=noise(20, 1, 64, 64, seed=1))
    made = spectra(fields, modes=24, cache=tmp_path)
    sent = pickle.dumps(made)
    assert len(sent) < 20_000 < made.tensors["target"].nbytes
    assert equal(pickle.loads(sent), made)
    in_memory = spectra(fields, modes=24)
    assert equal(pickle.loads(pickle.dumps(in_memory)), made)
    batches = list(torch.utils.data.DataLoader(made, batch_size=8))
    assert [len(batch["tail"]) for batch in batches] == [8, 8, 4]
    assert torch.equal(torch.cat([batch["input"] for batch in batches]), made.tensors["input"])


def test_nothing_is_shown_where_there_is_no_terminal(tmp_path, capfd):
    spectra(pairs(), modes=4, cache=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_shown_on_a_terminal_when_it_takes_long(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take any output for a terminal
    monkeypatch.setattr(module, "BLOCK_MEGABYTES", 1e-6)
    spectra(pairs(), modes=4, progress=False)
    spectra(pairs(), modes=4)
    assert "transform once" not in capfd.readouterr().err
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    spectra(pairs(), modes=4)
    assert "transform once" in capfd.readouterr().err


# Size and memory


def test_a_film_shrinks_more_than_tenfold(tmp_path):
    film = Fields(trajectory=noise(1, 3, 1, 1062, 600), dt=1 / 60)
    made = spectra(film, modes=224, cache=tmp_path)
    size, frames = made.cache.path.stat().st_size, 3 * 1062 * 600 * 4
    assert 3 * 224**2 * 4 < size < 3 * 224**2 * 4 + 10_000
    assert 10 * size < frames


def test_no_more_than_a_block_is_in_memory(tmp_path, monkeypatch):
    films = stored_film(tmp_path / "films.h5", n=4, t=50, grid=(32, 32))
    monkeypatch.setattr(module, "BLOCK_MEGABYTES", 1 / 16)
    largest = []
    forward = module.get_transform("dct").forward

    def spied(x, ndim, modes):
        largest.append(x.nbytes)
        return forward(x, ndim, modes)

    monkeypatch.setattr(module.get_transform("dct"), "forward", spied)
    spectra(films, modes=8)
    assert max(largest) == 2**17  # 16 frames in float64
    assert sum(largest) == 4 * 50 * 32 * 32 * 8


MEASURE = """
import resource, sys
from transform_once.data.fields import Fields
from transform_once.data.spectra import spectra
fields = Fields.open(sys.argv[1])
spectra(fields[:1].select(frames=slice(0, 2)), modes=224, normalization="standard")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = spectra(fields, modes=224, normalization="standard")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20, made.cache.path.stat().st_size)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="peak memory is measured as Unix does")
def test_peak_memory_stays_under_a_gibibyte_for_two_of_input(tmp_path):
    frames = 850  # 2 GiB of 1062×600
    path = tmp_path / "long.h5"
    image = noise(1, 1, 1, 1062, 600)
    shapes = {"trajectory": (frames, 1, 1062, 600)}
    with FieldsWriter(path, samples=1, shapes=shapes, dt=1 / 60) as writer:
        for i in range(frames):
            writer.append(trajectory=image.roll(i, 3))
    assert path.stat().st_size > 2**31
    run = subprocess.run([sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True)
    grown, size = map(float, run.stdout.split())
    assert grown < 1.0
    assert 10 * size < path.stat().st_size


# Real kills


FRAMES, GRID = 160, (128, 128)


def build(source, folder, log, begun=None, transforming=None):
    """What a training does first, in blocks of two frames, noting where every run of the transform begins."""
    torch.set_num_threads(1)
    module.BLOCK_MEGABYTES = 2 * 128 * 128 * 4 / 2**20
    original = module._Recipe.transformed

    def noted(self, normalization, start, device):
        with open(log, "a") as notes:
            notes.write(f"{start}\n")
        if transforming is not None:
            transforming.set()
        return original(self, normalization, start, device)

    module._Recipe.transformed = noted
    if begun is not None:
        begun.set()
    spectra(read(source), modes=24, normalization="standard", cache=folder)


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")  # children start at once: it has imported everything already
    context.set_forkserver_preload([__name__, "transform_once.data.formats", "transform_once.data.spectra"])
    first = context.Process(target=noise, args=(1,))
    first.start()
    first.join()
    return context


def run_and_kill(server, arguments, delay, after="transforming"):
    """Start the work, kill it `delay` seconds after it was begun or transforming; how long it lived from then on."""
    events = {"begun": server.Event(), "transforming": server.Event()}
    process = server.Process(target=build, args=arguments, kwargs=events)
    process.start()
    events[after].wait(60)
    began = time.perf_counter()
    process.join(delay)
    process.kill()
    process.join()
    return time.perf_counter() - began


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_building_survives_ten_kills(server, tmp_path):
    source = tmp_path / "film.npy"
    np.save(source, noise(2, FRAMES // 2, 1, *GRID).numpy())
    expected = spectra(read(source), modes=24, normalization="standard", cache=False)
    # How long it takes here and now decides where kills fall, and no result.
    total = run_and_kill(server, (source, tmp_path / "timing", tmp_path / "log"), 60)
    (whole,) = (tmp_path / "timing").iterdir()
    cache = spectra(read(source), modes=24, normalization="standard", cache=tmp_path / "timing").cache
    chance, kills, rounds = random.Random(0), 0, 0
    while kills < 10:
        folder, log = tmp_path / f"round{rounds}", tmp_path / f"log{rounds}"
        path, done, rounds = folder / whole.name, 0, rounds + 1
        while kills < 10:
            after = chance.choice(["begun", "transforming", "transforming"])
            run_and_kill(server, (source, folder, log), chance.uniform(0, total), after)
            if path.exists():
                break
            kills += 1
            names = os.listdir(folder) if folder.exists() else []
            assert names in ([], [f"{whole.name}.partial"])
            finished = cache._finished(folder / f"{whole.name}.partial") or 0
            starts = [int(line) for line in log.read_text().split()] if log.exists() else []
            assert starts == sorted(starts)
            assert finished >= max([done, *starts])  # nothing that was finished is lost or done again
            done = finished
        made = spectra(read(source), modes=24, normalization="standard", cache=folder)
        for name, tensor in made.tensors.items():  # blocks begin elsewhere after a kill, which changes the last digits
            torch.testing.assert_close(tensor, expected.tensors[name], rtol=1e-6, atol=1e-6)
        assert os.listdir(folder) == [whole.name]
    assert kills == 10


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked on Windows")
def test_of_two_processes_one_builds(server, tmp_path):
    source = tmp_path / "film.npy"
    np.save(source, noise(2, FRAMES // 2, 1, *GRID).numpy())
    arguments = (source, tmp_path / "cache", tmp_path / "log")
    processes = [server.Process(target=build, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "0\n"
