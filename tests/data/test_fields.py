import errno
import json
import math
import os
import pickle
import shutil
import tracemalloc

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transform_once.data.arrays import Arranged, HDF5Array, Items, Stacked, View
from transform_once.data.fields import Fields
from transform_once.data.metadata import Metadata
from transform_once.data.normalization import Normalization
from transform_once.data.writer import FieldsWriter

SHAPES = {"input": (1, 4, 5), "target": (2, 4, 5)}


def pairs(n=6, **declared):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, c, 4, 5, generator=generator) for c in (1, 2))
    return x, y, Fields(input=x, target=y, **declared)


def films(n=3, t=7, **declared):
    w = torch.randn(n, t, 2, 4, 5, generator=torch.Generator().manual_seed(1))
    return w, Fields(trajectory=w, **declared)


# Lazy arrays against NumPy


@st.composite
def choices(draw, size):
    if draw(st.booleans()):
        start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        return slice(start, stop, draw(st.integers(1, 3)))
    return draw(st.lists(st.integers(0, size - 1), max_size=6))


@given(st.data())
@settings(max_examples=60)
def test_views_select_like_numpy(data):
    array = np.arange(6 * 5 * 4, dtype=np.float32).reshape(6, 5, 4)
    view, expected = View(array), array
    for _ in range(data.draw(st.integers(1, 4))):
        axis = data.draw(st.integers(0, expected.ndim - 1))
        if expected.shape[axis] == 0:
            continue
        choice = data.draw(choices(expected.shape[axis]))
        view = view.select(axis, choice)
        expected = expected[(slice(None),) * axis + (choice,)] if choice != [] else np.take(expected, [], axis=axis)
        assert view.shape == expected.shape
    np.testing.assert_array_equal(view.read(), expected)


def test_a_view_drops_an_axis_chosen_by_number_and_nests():
    array = np.arange(60).reshape(3, 4, 5)
    view = View(array).select(1, -1)
    np.testing.assert_array_equal(view.read(), array[:, -1])
    outer = View(view).select(0, [2, 0]).select(1, slice(1, 4, 2))
    np.testing.assert_array_equal(outer.read(), array[[2, 0], -1][:, 1:4:2])
    np.testing.assert_array_equal(View(array).select(0, slice(None, None, -1)).read(), array[::-1])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 12), st.integers(0, 12), st.integers(1, 4))
def test_stacked_arrays_read_like_their_concatenation(lengths, start, stop, step):
    parts = [np.random.default_rng(i).normal(size=(2, n)) for i, n in enumerate(lengths)]
    whole = np.concatenate(parts, axis=1)
    index = (slice(0, 2, 1), slice(start, stop, step))
    stacked = Stacked(tuple(parts), 1)
    assert stacked.shape == whole.shape
    np.testing.assert_array_equal(stacked[index].reshape(whole[index].shape), whole[index])


def test_arranged_permutes_repeats_and_joins_axes():
    array = np.random.default_rng(0).normal(size=(3, 4, 5, 6))  # n x y t
    arranged = Arranged(array, "nxyt", "ntcxy", (3, 6, 1, 4, 5))
    index = (slice(1, 3), slice(0, 6, 2), slice(None), slice(None), slice(1, 4))
    np.testing.assert_array_equal(arranged[index], array.transpose(0, 3, 1, 2)[:, :, None][index])
    constant = Arranged(array[:, :2, 0, 0], "nc", "ncxy", (3, 2, 7, 8))
    assert constant[(slice(None),) * 4].shape == (3, 2, 7, 8)
    assert (
        constant[(slice(None), slice(1, 2), slice(None), slice(None))] == array[:, 1, 0, 0].reshape(3, 1, 1, 1)
    ).all()
    tensor = Arranged(array, "nxcc", "ncx", (3, 30, 4))  # entries of a 5 by 6 tensor, row by row
    np.testing.assert_array_equal(
        tensor[(slice(None), slice(7, 9), slice(None))], array.reshape(3, 4, 30)[:, :, 7:9].swapaxes(1, 2)
    )


def test_items_call_only_for_what_is_asked(tmp_path):
    called = []

    def load(file, index):
        called.append(file.name)
        return np.full((2, 3), int(file.name))[index]

    items = Items((2, 3, 2, 3), load, tuple(tmp_path / str(i) for i in range(6)), leading=2)
    values = items[(slice(1, 2), slice(0, 3, 2), slice(0, 1), slice(None))]
    assert called == ["3", "5"]
    np.testing.assert_array_equal(values[0, :, 0, 0], [3, 5])


# Fields in memory


def test_fields_know_their_shapes():
    x, y, fields = pairs(grid="node", periodic=True, channels={"target": ("p", "q")}, seed=3)
    assert (fields.kind, len(fields), fields.ndim, fields.resolution) == ("pairs", 6, 2, (4, 5))
    assert (fields.in_channels, fields.out_channels, fields.frames) == (1, 2, 1)
    assert fields.metadata.periodic == (True, True)
    assert fields.metadata.channels == {"input": ("channel_0",), "target": ("p", "q")}
    assert torch.equal(fields.input, x)
    assert torch.equal(fields.target, y)
    assert fields.mask is None
    w, moving = films(dt=0.5)
    assert (moving.kind, moving.frames, moving.metadata.dt) == ("trajectories", 7, 0.5)
    assert torch.equal(moving.trajectory, w)


@pytest.mark.parametrize("grid", [(9,), (4, 5), (3, 4, 5)])
def test_one_to_three_grid_axes(grid, tmp_path):
    x = torch.randn(2, 3, *grid)
    saved = Fields(input=x).save(tmp_path / "x.h5")
    assert saved.resolution == grid
    assert torch.equal(saved.input, x)
    assert saved.select(stride=2).resolution == tuple(len(range(1, n, 2)) for n in grid)


def test_indexing_and_splitting_are_lazy_and_exact():
    x, _, fields = pairs(names=[f"s{i}" for i in range(6)])
    for chosen, expected in [(2, [2]), (-1, [5]), (slice(1, 5, 2), [1, 3]), ([4, 0], [4, 0]), (torch.tensor([3]), [3])]:
        part = fields[chosen]
        assert torch.equal(part.input, x[expected])
        assert part.names == tuple(f"s{i}" for i in expected)
    train, test = fields.split(3, 2)
    assert torch.equal(train.input, x[:3])
    assert torch.equal(test.input, x[3:5])
    with pytest.raises(ValueError, match="cannot split 6 samples into parts of 4, 3"):
        fields.split(4, 3)
    with pytest.raises(IndexError, match="there are 6 samples"):
        fields[6]


def test_samples_are_chosen_by_booleans_and_numbers_of_numpy():
    x, _, fields = pairs()
    wanted = [False, True, False, False, True, True]
    for chosen in (wanted, np.array(wanted), list(np.array(wanted)), torch.tensor(wanted)):
        assert torch.equal(fields[chosen].input, x[[1, 4, 5]])
    for number in (np.int64(2), np.array([2]), torch.tensor(2), [np.int64(2)]):
        assert torch.equal(fields[number].input, x[2:3])
    assert len(fields[[]]) == 0
    for wrong in ([True, False], np.array([True]), torch.tensor([True] * 7), True):
        with pytest.raises(IndexError, match=r"there are 6 samples, got \d booleans: give one per sample"):
            fields[wrong]


def test_frames_channels_strides_and_pairs():
    w, fields = films(dt=0.1, channels=("u", "v"))
    chosen = fields.select(frames=slice(1, None, 2), channels=["v"])
    assert torch.equal(chosen.trajectory, w[:, 1::2, 1:])
    assert chosen.metadata.times == pytest.approx((0.1, 0.3, 0.5))
    assert chosen.metadata.dt == pytest.approx(0.2)
    assert chosen.metadata.channels == {"trajectory": ("v",)}
    assert torch.equal(fields.select(frames=[6, 0]).trajectory, w[:, [6, 0]])
    both = fields.pairs(0, -1)
    assert torch.equal(both.input, w[:, 0])
    assert torch.equal(both.target, w[:, -1])
    with pytest.raises(ValueError, match="has the channels u, v, not p"):
        fields.select(channels=["p"])


def test_strides_keep_nodes_and_middle_cells():
    nodes = torch.arange(9.0) / 9
    cells = (torch.arange(9.0) + 0.5) / 9
    kept = Fields(input=nodes[None, None], grid="node").select(stride=3).input
    torch.testing.assert_close(kept[0, 0], torch.arange(3.0) / 3)
    kept = Fields(input=cells[None, None], grid="cell").select(stride=3).input
    torch.testing.assert_close(kept[0, 0], (torch.arange(3.0) + 0.5) / 3)


def test_a_stride_must_divide_a_periodic_axis():
    x = torch.randn(2, 1, 6, 9)
    assert Fields(input=x, grid="node", periodic=(False, True)).select(stride=9).resolution == (1, 1)
    assert Fields(input=x, grid="node", periodic=(False, True)).select(stride=3).resolution == (2, 3)
    assert Fields(input=x, grid="node").select(stride=2).resolution == (3, 5)
    with pytest.raises(ValueError, match="a stride of 2 does not divide the 9 points of a periodic axis"):
        Fields(input=x, grid="node", periodic=True).select(stride=2)


def test_factors_of_symmetries_follow_the_channels():
    x, y = torch.randn(2, 2, 8), torch.randn(2, 3, 8)
    mirror = {"signs": [-1], "offset": [1.0]}
    own = {**mirror, "factors": [1.0, 2.0, 3.0], "input_factors": [4.0, 5.0]}
    fields = Fields(input=x, target=y, symmetries=[own, mirror])
    first, second = fields.select(channels={"input": [1], "target": [2, 0]}).metadata.symmetries
    assert (first["factors"], first["input_factors"]) == ([3.0, 1.0], [5.0])
    assert (second["factors"], second["input_factors"]) == ([1.0], [1.0])
    only = fields.select(channels={"target": [2, 1]}).metadata.symmetries[0]
    assert (only["factors"], only["input_factors"]) == ([3.0, 2.0], [4.0, 5.0])
    shared = Fields(input=y, target=y, symmetries=[{**mirror, "factors": [1.0, 2.0, 3.0]}])
    kept = shared.select(channels={"target": [2]}).metadata.symmetries[0]
    assert (kept["factors"], kept["input_factors"]) == ([3.0], [1.0, 2.0, 3.0])
    film = Fields(trajectory=y[:, None], symmetries=[{**mirror, "factors": [1.0, 2.0, 3.0]}])
    moved = film.select(channels=[1, 0]).metadata.symmetries[0]
    assert (moved["factors"], moved["input_factors"]) == ([2.0, 1.0], [2.0, 1.0])


def test_batches_and_blocks_cover_everything_once():
    w, fields = films(n=5)
    assert torch.equal(torch.cat([b.trajectory for b in fields.batches(2)]), w)
    frame = 2 * 4 * 5 * 4 / 2**20
    for megabytes in (frame, 3 * frame, 7 * frame, 15 * frame, 1):
        seen = torch.zeros_like(w)
        for samples, frames, block in fields.blocks(megabytes):
            assert block.trajectory.numel() * 4 <= max(megabytes * 2**20, 1)
            seen[samples, frames] += block.trajectory
        assert torch.equal(seen, w)
    first = next(fields.blocks(2 * frame, start=(1, 3)))
    assert first[:2] == (slice(1, 2), slice(3, 5))


def test_masks_follow_every_selection():
    w, _ = films()
    shared = torch.zeros(1, 1, 4, 5)
    shared[..., 0, :] = 1
    fields = Fields(trajectory=w, mask=shared)
    assert fields.mask.shape == (1, 1, 1, 4, 5)
    assert fields[1:].select(frames=[0, 2], stride=2).mask.shape == (1, 1, 1, 2, 2)
    own = torch.rand(3, 7, 2, 4, 5) > 0.5
    fields = Fields(trajectory=w, mask=own)
    part = fields[[2, 0]].select(frames=slice(0, 4), channels=[1])
    assert torch.equal(part.mask, own[[2, 0]][:, :4, 1:])
    assert torch.equal(fields.pairs(0, 3).mask, own[:, 3])
    with pytest.raises(ValueError, match="the mask has shape"):
        Fields(trajectory=w, mask=own[..., :3])


@pytest.mark.parametrize("marker", [math.nan, -9999.0])
def test_missing_values_are_declared_masked_and_filled(marker, tmp_path):
    x = torch.randn(3, 2, 4, 5)
    y = torch.randn(3, 2, 4, 5)
    y[1, 0, 2, 3] = marker
    fields = Fields(input=x, target=y, missing=marker)
    for found in (fields, fields.load(), fields.save(tmp_path / "x.h5"), next(fields[1:].batches(2))):
        last = found[-2:]
        assert last.mask.sum() == 1
        assert last.mask[0, 0, 2, 3]
        valid = y[1, 0].flatten()[torch.arange(20) != 13]
        torch.testing.assert_close(last.target[0, 0, 2, 3], valid.mean())
    everything = Fields(input=torch.full((1, 1, 3, 3), math.nan), missing=math.nan)
    assert everything.mask.all()
    assert (everything.input == 0).all()


def test_a_view_given_from_outside_is_checked():
    values = np.ones((2, 3, 1, 4), dtype=np.float32)
    values[1, 2, 0, 0] = -9999
    last = View(values).select(1, 2)
    assert Fields(input=last, missing=-9999).mask.sum() == 1
    assert Fields(input=last, missing=-9999).input.min() == 1
    values[1, 2, 0, 0] = math.nan
    with pytest.raises(ValueError, match="sample 1 of input holds a value that is NaN"):
        Fields(input=last).load()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_are_named_by_sample(bad, tmp_path):
    x, y, _ = pairs()
    y[4, 0, 0, 0] = bad
    with pytest.raises(ValueError, match="sample 4 of target holds a value that is NaN or Inf"):
        Fields(input=x, target=y)
    np.save(tmp_path / "y.npy", y.numpy())
    lazy = Fields(input=np.load(tmp_path / "y.npy", mmap_mode="r"))
    assert lazy[:4].input.shape == (4, 2, 4, 5)  # what is not read is not judged
    with pytest.raises(ValueError, match="sample 4 of input"):
        lazy[[5, 4]].load()
    writer = FieldsWriter(tmp_path / "y.h5", samples=6, shapes={"input": (2, 4, 5)})
    writer.append(input=y[:4])
    with pytest.raises(ValueError, match=r"sample 4 of input for y.h5"):
        writer.append(input=y[4:])
    assert writer.finished == 4
    writer.close()
    if math.isinf(bad):
        with pytest.raises(ValueError, match="sample 4"):
            Fields(input=y, missing=math.nan)


def test_an_undeclared_nan_is_an_error_beside_a_declared_marker():
    x = torch.tensor([[[1.0, -9999.0, math.nan]]])
    with pytest.raises(ValueError, match="sample 0"):
        Fields(input=x, missing=-9999.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "fields are a trajectory, or an input with or without a target, not nothing"),
        ({"target": torch.zeros(1, 1, 4)}, "not target"),
        ({"input": torch.zeros(1, 4)}, "input has 2 axes"),
        ({"trajectory": torch.zeros(1, 2, 4)}, r"trajectory has 3 axes, expected \(n, t, c, \*grid\)"),
        ({"input": torch.zeros(1, 1, 4, 4), "target": torch.zeros(1, 4, 4, 1)}, "channels first"),
        ({"input": torch.zeros(2, 1, 4), "target": torch.zeros(3, 1, 4)}, "differ in their number of samples"),
        ({"input": torch.zeros(2, 1, 4), "grid": "centre"}, '"cell"'),
        ({"input": torch.zeros(2, 1, 4), "periodic": (True, False)}, "periodic has 2 entries for 1 grid axes"),
        ({"input": torch.zeros(2, 1, 4), "channels": ("a", "b")}, "give one name per channel"),
        ({"trajectory": torch.zeros(1, 3, 1, 4), "times": (0.0, 1.0)}, "times has 2 entries for 3 frames"),
        ({"input": torch.zeros(2, 1, 0)}, "empty axis"),
    ],
)
def test_wrong_fields_are_refused_with_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        Fields(**arguments)
    assert "\n" not in str(error.value)


def test_other_refusals():
    with pytest.raises(TypeError, match="unknown metadata sead: known are grid"):
        Fields(input=torch.zeros(1, 1, 4), sead=1)
    with pytest.raises(TypeError, match="real numbers, not complex64"):
        Fields(input=torch.zeros(1, 1, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match="settings must be plain"):
        Metadata(settings={"solver": object()}).to_attributes()
    uneven = Fields(trajectory=torch.zeros(1, 3, 1, 4), times=(0, 1, 5))
    with pytest.raises(ValueError, match="not equally spaced"):
        _ = uneven.metadata.dt
    with pytest.raises(ValueError, match="hold trajectory, no input"):
        _ = uneven.input


# The file


def test_a_file_returns_everything(tmp_path):
    known = {
        "grid": "node",
        "periodic": (True, False),
        "channels": ("u", "v"),
        "units": {"u": "m/s"},
        "dt": 0.25,
        "source": "a solver",
        "seed": 7,
        "settings": {"viscosity": 1e-3, "forcing": ["sin", {"wave": 1}]},
        "symmetries": [{"axes": [1, 0], "factor": -1}],
    }
    w, fields = films(names=("first", "second", "dritte-ß"), **known)
    opened = fields.save(tmp_path / "x.h5")
    assert torch.equal(opened.trajectory, w)
    assert opened.metadata.to_attributes() == fields.metadata.to_attributes()
    assert (opened.metadata.times, opened.names) == (fields.metadata.times, fields.names)
    assert json.loads(json.dumps(opened.metadata.settings)) == known["settings"]
    with h5py.File(tmp_path / "x.h5") as file:  # the layout others can rely on
        assert file["trajectory"].shape == (3, 7, 2, 4, 5)
        assert file["trajectory"].dtype == "<f4"
        assert file.attrs["dt"] == pytest.approx(0.25)
        assert file.attrs["grid"] == "node"
        assert json.loads(file.attrs["symmetries"]) == known["symmetries"]
        np.testing.assert_allclose(file["time"], np.arange(7) * 0.25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.h5"]


def test_double_precision_stays_double(tmp_path):
    x = torch.randn(2, 1, 8, dtype=torch.float64)
    assert torch.equal(Fields(input=x).save(tmp_path / "x.h5").input, x)
    assert Fields(input=torch.ones(2, 1, 8, dtype=torch.int32)).input.dtype == torch.float32
    assert Fields(input=torch.ones(2, 1, 8, dtype=torch.bfloat16)).input.dtype == torch.float32


@pytest.mark.parametrize("shape", [(1, 1, 4, 5), (3, 1, 4, 5), (1, 7, 2, 4, 5), (3, 7, 1, 4, 5), (3, 1, 2, 4, 5)])
def test_every_kind_of_mask_is_saved(shape, tmp_path):
    w, _ = films()
    mask = torch.rand(shape) > 0.5
    fields = Fields(trajectory=w, mask=mask)
    assert torch.equal(fields.save(tmp_path / "x.h5").mask, fields.mask)


def test_a_file_can_be_sent_to_another_process_and_follows_changes(tmp_path):
    x, _, fields = pairs()
    opened = fields.save(tmp_path / "x.h5")
    _ = opened.input
    assert torch.equal(pickle.loads(pickle.dumps(opened)).input, x)  # as DataLoader workers do
    before = opened.fingerprint()
    assert before == Fields.open(tmp_path / "x.h5").fingerprint()
    assert before != opened[1:].fingerprint()
    os.remove(tmp_path / "x.h5")
    Fields(input=x + 1, target=torch.zeros(6, 2, 4, 5)).save(tmp_path / "x.h5")
    again = Fields.open(tmp_path / "x.h5")
    assert torch.equal(again.input, x + 1)
    assert again.fingerprint() != before
    assert pairs()[2].fingerprint() == fields.fingerprint()


def test_parts_of_a_memory_map_have_fingerprints_of_their_own(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((6, 1, 4, 4), dtype=np.float32))
    whole = np.load(tmp_path / "x.npy", mmap_mode="r")
    parts = [whole, whole[:3], whole[3:], whole[::2], whole[:3].swapaxes(2, 3), whole[:3].view(np.int32), whole[[0, 4]]]
    assert len({Fields(input=part).fingerprint() for part in parts}) == len(parts)
    again = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert Fields(input=again[3:]).fingerprint() == Fields(input=whole[3:]).fingerprint()
    assert Fields(input=again[1:][2:]).fingerprint() == Fields(input=whole[3:]).fingerprint()
    later = np.memmap(tmp_path / "x.npy", np.float32, "r", whole.offset + whole[:3].nbytes, (3, 1, 4, 4))
    assert Fields(input=later).fingerprint() == Fields(input=whole[3:]).fingerprint()


def test_one_frame_of_a_long_file_reads_one_frame(tmp_path):
    path = tmp_path / "long.h5"
    shapes = {"trajectory": (1000, 1, 256, 256)}  # 262 MB that the disk never sees: all but one frame is a hole
    writer = FieldsWriter(path, samples=1, shapes=shapes)
    writer.close()
    with open(f"{path}.partial", "r+b") as file:
        file.seek(writer._places["finished"])
        file.write(b"\1" * 1000)
    os.rename(f"{path}.partial", path)
    tracemalloc.start()
    fields = Fields.open(path)
    frame = fields.select(frames=[617]).trajectory
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert frame.shape == (1, 1, 1, 256, 256)
    assert peak < 4 * frame.numel() * 4


# The writer


def test_fewer_samples_than_announced_make_a_shorter_file(tmp_path):
    x, y, _ = pairs()
    mask = torch.rand(6, 1, 4, 5) > 0.5
    with FieldsWriter(tmp_path / "x.h5", samples=100, shapes={**SHAPES, "mask": (1, 4, 5)}, seed=5) as writer:
        writer.append(input=x[:4], target=y[:4], mask=mask[:4], names=list("abcd"))
        writer.append(input=x[4:], target=y[4:], mask=mask[4:], names=["e", "f"])
        assert writer.names == tuple("abcdef")
    fields = Fields.open(tmp_path / "x.h5")
    assert torch.equal(fields.input, x)
    assert torch.equal(fields.target, y)
    assert torch.equal(fields.mask, mask)
    assert (fields.names, fields.metadata.seed) == (tuple("abcdef"), 5)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_a_partial_file_never_reads_as_complete_and_continues(tmp_path):
    w, fields = films()
    path = tmp_path / "x.h5"
    shapes = {"trajectory": (7, 2, 4, 5)}

    def interrupted():
        with FieldsWriter(path, samples=3, shapes=shapes) as writer:
            writer.append(trajectory=w[:1])
            writer.append(trajectory=w[1:2, :3])  # a piece of the second
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not path.exists()
    with pytest.raises(ValueError, match="unfinished, 10 of 21 parts"):
        Fields.open(f"{path}.partial")
    shutil.copy(f"{path}.partial", tmp_path / "renamed.h5")
    with pytest.raises(ValueError, match="unfinished, 10 of 21 parts"):
        Fields.open(tmp_path / "renamed.h5")
    with FieldsWriter(path, samples=3, shapes=shapes) as writer:
        assert (writer.finished, writer.finished_frames) == (1, 3)
        with pytest.raises(ValueError, match="append whole trajectories, or the next frames of one"):
            writer.append(trajectory=w[1:3])
        with pytest.raises(BlockingIOError, match="another process is writing"):
            FieldsWriter(path, samples=3, shapes=shapes)
        writer.append(trajectory=w[1:2, 3:])
        writer.append(trajectory=w[2:])
        with pytest.raises(ValueError, match="announced with 3 samples"):
            writer.append(trajectory=w[:1])
    assert torch.equal(Fields.open(path).trajectory, w)
    with pytest.raises(FileExistsError, match="exists already"):
        FieldsWriter(path, samples=3, shapes=shapes)
    assert len(fields) == 3


def test_a_partial_file_of_other_fields_is_not_continued(tmp_path):
    FieldsWriter(tmp_path / "x.h5", samples=3, shapes=SHAPES, seed=1).close()
    for changed in ({"seed": 2}, {"samples": 4}, {"shapes": {"input": (1, 4, 5)}}, {"mask": torch.ones(1, 4, 5)}):
        arguments = {"samples": 3, "shapes": SHAPES, "seed": 1, **changed}
        word = next(iter(changed)).rstrip("s") if "samples" not in changed else "samples"
        with pytest.raises(ValueError, match=rf"begun with other settings \(.*{word}"):
            FieldsWriter(tmp_path / "x.h5", **arguments)
    FieldsWriter(tmp_path / "x.h5", samples=3, shapes=SHAPES, seed=1).close()


def test_the_writer_refuses_what_does_not_fit(tmp_path):
    x, y, _ = pairs()
    writer = FieldsWriter(tmp_path / "x.h5", samples=6, shapes=SHAPES)
    with pytest.raises(ValueError, match="append takes input and target; got input"):
        writer.append(input=x)
    with pytest.raises(ValueError, match=r"target to append has shape \(6, 1, 4, 5\), expected \(6, 2, 4, 5\)"):
        writer.append(input=x, target=x)
    with pytest.raises(ValueError, match="one name of at most 64 bytes"):
        writer.append(input=x, target=y, names=["x" * 65] * 6)
    assert writer.finished == 0
    with pytest.raises(ValueError, match="cannot be completed with 0 whole samples"), writer:
        pass
    with pytest.raises(FileNotFoundError, match="create it first"):
        FieldsWriter(tmp_path / "absent" / "x.h5", samples=6, shapes=SHAPES)


def test_no_space_left_is_one_sentence_and_loses_nothing(tmp_path):
    x, y, _ = pairs()
    writer = FieldsWriter(tmp_path / "x.h5", samples=6, shapes=SHAPES)
    writer.append(input=x[:2], target=y[:2])

    class FullDisk:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.file.write(data[: len(data) // 2])  # a disk fills in the middle of a write
            raise OSError(errno.ENOSPC, "No space left on device")

    real, writer._file = writer._file, FullDisk(writer._file)
    with pytest.raises(OSError, match=r"no space left to write .*: free some and run again") as error:
        writer.append(input=x[2:4], target=y[2:4])
    assert error.value.errno == errno.ENOSPC
    real.close()
    with FieldsWriter(tmp_path / "x.h5", samples=6, shapes=SHAPES) as writer:
        assert writer.finished == 2
        writer.append(input=x[2:], target=y[2:])
    assert torch.equal(Fields.open(tmp_path / "x.h5").target, y)


@given(stop=st.integers(0, 2 * (20 + 40) * 4 + 2))
@settings(max_examples=40)
def test_a_write_torn_at_any_byte_is_repaired(stop, tmp_path_factory):
    """The process dies after exactly `stop` bytes of an append have reached the file."""
    path = tmp_path_factory.mktemp("torn") / "x.h5"
    x, y, _ = pairs(n=3)
    writer = FieldsWriter(path, samples=3, shapes=SHAPES)
    writer.append(input=x[:1], target=y[:1])
    left = stop

    def write(name, start, values, original=writer._write):
        nonlocal left
        data = np.ascontiguousarray(values).view(np.uint8).ravel()
        original(name, start, data[:left])
        if left < data.size:
            raise KeyboardInterrupt
        left -= data.size

    writer._write = write
    if stop < 2 * (20 + 40) * 4 + 2:
        with pytest.raises(KeyboardInterrupt):
            writer.append(input=x[1:], target=y[1:])
    else:
        writer.append(input=x[1:], target=y[1:])
    writer.close()
    marks = max(0, stop - 2 * (20 + 40) * 4)
    with FieldsWriter(path, samples=3, shapes=SHAPES) as writer:
        assert writer.finished == 1 + marks
        if marks < 2:
            writer.append(input=x[1 + marks :], target=y[1 + marks :])
    fields = Fields.open(path)
    assert torch.equal(fields.input, x)
    assert torch.equal(fields.target, y)


def test_a_truncated_or_foreign_file_is_refused(tmp_path):
    _, _, fields = pairs()
    path = tmp_path / "x.h5"
    fields.save(path)
    content = path.read_bytes()
    (tmp_path / "short.h5").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.h5").write_text("not HDF5")
    for name in ("short.h5", "text.h5"):
        with pytest.raises(OSError, match=f"{name} is no readable HDF5 file"):
            Fields.open(tmp_path / name)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["input"] = np.zeros((1, 1, 4))
    with pytest.raises(ValueError, match="is not a file of transform-once fields"):
        Fields.open(tmp_path / "other.h5")


def test_samples_in_groups_must_agree(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["b"] = np.zeros(3), np.zeros(4)
    with pytest.raises(ValueError, match="differ in shape"):
        HDF5Array(tmp_path / "x.h5", ("a", "b"))


# Normalisation


@pytest.mark.parametrize("name", ["trajectory", "target"])
def test_normalisation_against_direct_statistics(name):
    x = torch.randn(4, 50, 3, 6, 5, dtype=torch.float64) * torch.tensor([1.0, 1e-3, 1e3]).view(3, 1, 1) + 1e4
    fields = Fields(trajectory=x)
    if name == "target":
        fields, x = fields.pairs(3, 4), x[:, 4]
    dims = tuple(d for d in range(x.ndim) if d != x.ndim - 3)
    standard = Normalization.fit(fields, name, "standard")
    torch.testing.assert_close(standard.shift.flatten(), x.mean(dims), rtol=1e-12, atol=0)
    torch.testing.assert_close(standard.scale.flatten(), x.std(dims, correction=0), rtol=1e-9, atol=0)
    z = standard.apply(x)
    torch.testing.assert_close(z.mean(dims), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(z.var(dims, correction=0), torch.ones(3, dtype=torch.float64))
    unit = Normalization.fit(fields, name, "unit").apply(x)
    assert torch.equal(unit.amin(dims), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(unit.amax(dims), torch.ones(3, dtype=torch.float64))
    assert torch.equal(Normalization.fit(fields, name, "none").apply(x), x)


@pytest.mark.parametrize("kind", ["none", "standard", "unit"])
def test_normalisation_round_trips_and_survives_json(kind):
    x, _, fields = pairs()
    fitted = Normalization.fit(fields, "input", kind)
    torch.testing.assert_close(fitted.invert(fitted.apply(x)), x)
    again = Normalization.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert torch.equal(again.apply(x), fitted.apply(x))
    assert fitted.apply(x).dtype == torch.float32
    assert again.shift.shape == (1, 1, 1)


def test_normalisation_streams_and_leaves_out_masked_points(monkeypatch):
    x, y, _ = pairs()
    mask = torch.zeros(6, 1, 4, 5)
    mask[:, :, :2] = 1
    spoiled = torch.where(mask.bool(), torch.tensor(1e6), y)
    fields = Fields(input=x, target=spoiled, mask=mask)
    monkeypatch.setattr(Fields.blocks, "__defaults__", (2e-4, (0, 0)))  # one sample a block
    assert len(list(fields.blocks())) == 6
    for kind in ("standard", "unit"):
        fitted = Normalization.fit(fields, "target", kind)
        direct = Normalization.fit(Fields(input=y[:, :, 2:]), "input", kind)
        torch.testing.assert_close(fitted.shift, direct.shift)
        torch.testing.assert_close(fitted.scale, direct.scale)


def test_normalisation_leaves_out_missing_points_of_any_array():
    x, y, _ = pairs()
    spoiled = x.clone()
    spoiled[:, :, :3] = math.nan
    fitted = Normalization.fit(Fields(input=spoiled, target=y, missing=math.nan), "input")
    direct = Normalization.fit(Fields(input=x[:, :, 3:]), "input")
    torch.testing.assert_close(fitted.shift, direct.shift)
    torch.testing.assert_close(fitted.scale, direct.scale)


def test_a_constant_channel_keeps_its_scale():
    x = torch.full((3, 1, 7), 0.1)
    for kind in ("standard", "unit"):
        fitted = Normalization.fit(Fields(input=x), "input", kind)
        assert fitted.scale.item() == 1
        assert torch.equal(fitted.apply(x), torch.zeros_like(x))
    with pytest.raises(ValueError, match="unknown normalisation 'minmax': choose one of none, standard, unit"):
        Normalization.fit(Fields(input=x), "input", "minmax")
    with pytest.raises(ValueError, match="hold input, no target"):
        Normalization.fit(Fields(input=x), "target")


@pytest.mark.parametrize("parts", [1, 2])
def test_a_tenth_of_the_samples_is_held_out(parts):
    x, y, _ = pairs()
    fields = Fields(input=x.repeat(5, 1, 1, 1)[:25], target=y.repeat(5, 1, 1, 1)[:25])
    found = fields.hold_out(parts)
    assert [len(part) for part in found] == [25 - 2 * parts, *[2] * parts]
    assert torch.equal(torch.cat([part.target for part in found]), fields.target)
    assert fields[:9].hold_out(parts)[0].target.shape[0] == 9  # too few


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_of_few_trajectories_the_last_frames_are_held_out(count, frames, parts, least):
    films = Fields(trajectory=torch.arange(float(count * frames)).reshape(count, frames, 1, 1).expand(-1, -1, 1, 4))
    found = films.hold_out(parts, least)
    assert torch.equal(torch.cat([part.trajectory for part in found], 1), films.trajectory)
    assert [time for part in found for time in part.metadata.times] == list(films.metadata.times)
    held = max(least, frames // 10)
    assert [part.frames for part in found[1:]] == ([held] * parts if frames >= (parts + 1) * held else [])
