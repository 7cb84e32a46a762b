"""Several processes share generation and evaluation; run as a script, this file is one of them."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import transform_once as t1
from transform_once.data.writer import FieldsWriter
from transform_once.evaluation.evaluate import full_evaluation
from transform_once.models.operator import Dynamics
from transform_once.processes import World, joined, world
from transform_once.solvers import datasets

SMOKE = {"samples": 5, "frames": 4, "resolution": (12, 8)}
FLOW = {"viscosity": 1e-3, "time": 1.0, "samples": 21, "resolution": 12, "tolerance": 0.1}


def generate_all(folder):
    datasets.navier_stokes(folder / "pairs.h5", **FLOW)
    datasets.navier_stokes(folder / "films.h5", **{**FLOW, "samples": 5}, frames=3)
    datasets.smoke(folder / "smoke.h5", **SMOKE)


def evaluations(samples):
    """Of ensembles of two, in double precision, so that predictions do not depend on the batch: pairs, trajectories."""
    torch.manual_seed(0)
    members = [t1.T1(1, 1, (12, 10), modes=5, width=4, depth=1).double() for _ in range(2)]
    films = torch.randn(5, 6, 1, 12, 10, dtype=torch.float64)
    mask = torch.rand(5, 1, 12, 10) < 0.2
    films[3] = 0  # no relative error
    pairs = t1.Fields(input=films[:, 0], target=films[:, 1], mask=mask)
    yield "pairs", full_evaluation(members, pairs[:samples], count=3, batch_size=2)
    for one in members:
        one.dynamics = Dynamics(1, 0)
    yield "films", full_evaluation(members, t1.Fields(trajectory=films, dt=0.1)[:samples], count=3)


def flat(numbers, path=""):
    """Every number by its path; what is no number becomes part of that."""
    if isinstance(numbers, dict | list):
        items = numbers.items() if isinstance(numbers, dict) else enumerate(numbers)
        return {key: value for name, inner in items for key, value in flat(inner, f"{path}/{name}").items()}
    return {path: numbers} if isinstance(numbers, int | float) else {f"{path}/{numbers}": 0}


def complaint(action):
    """What it says where it fails."""
    try:
        action()
    except (ValueError, OSError) as error:
        return str(error)
    return None


def writes(count, then):
    """`FieldsWriter.append` that works so many times and then does something else."""
    append, left = FieldsWriter.append, iter(range(count))
    return lambda *place, **arrays: then() if next(left, None) is None else append(*place, **arrays)


def no_space():
    raise OSError(errno.ENOSPC, "no space left")


def failures(folder, place):
    """An error in one process, the leader or another, in the work or in the writing, is one in all of them."""

    def work(item):
        if item == 3:
            raise ValueError("item 3 is broken")
        yield {"item": torch.tensor(item)}

    written = []
    yield complaint(lambda: place.in_turns(range(9), work, lambda arrays: written.append(int(arrays["item"]))))
    yield written
    whole, FieldsWriter.append = FieldsWriter.append, writes(6, no_space)
    yield complaint(lambda: datasets.smoke(folder / "full.h5", **SMOKE))
    FieldsWriter.append = whole
    yield complaint(lambda: datasets.smoke(folder / "smoke.h5", **SMOKE))
    yield complaint(lambda: datasets.navier_stokes(folder / "bad.h5", viscosity=-1.0, resolution=12))
    yield complaint(lambda: datasets.airfoils(folder / "airfoils.h5"))


def main(folder, task):
    torch.set_num_threads(1)
    if task == "die":  # without a word, as in a kill
        FieldsWriter.append = writes(6, lambda: os._exit(1))
        datasets.smoke(folder / "killed.h5", **SMOKE)
    with world("cpu") as place:
        generate_all(folder)
        for samples in (5, 1):
            for name, done in evaluations(samples):
                np.savez(folder / f"{name}-{samples}-{place.rank}.npz", numbers=json.dumps(done.numbers), **done.arrays)
        (folder / f"failures-{place.rank}.json").write_text(json.dumps(list(failures(folder, place))))
        place.wait()
    sys.stdout.flush()
    os._exit(0)  # the destructor of a gloo group can wait for ever


def launch(processes, *words):
    """Start the processes as torchrun does; exit codes and what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, *map(str, words)]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=240)[1] for process in started]
    return [process.returncode for process in started], said


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    generate_all(folder)
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def together(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    codes, said = launch(request.param, __file__, folder, "share")
    assert codes == [0] * request.param, said
    return folder, request.param


@pytest.mark.parametrize("name", ["pairs.h5", "films.h5", "smoke.h5"])
def test_generated_files_are_those_of_one_process_to_the_bit(alone, together, name):
    assert (together[0] / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.parametrize("samples", [5, 1])
def test_all_processes_return_the_evaluation_of_one(together, samples):
    """Shares differ in size, and of one sample only the last process has any."""
    folder, size = together
    for name, expected in evaluations(samples):
        for rank in range(size):
            with np.load(folder / f"{name}-{samples}-{rank}.npz", allow_pickle=False) as file:
                numbers = json.loads(str(file["numbers"]))
                assert flat(numbers) == pytest.approx(flat(expected.numbers), rel=1e-12, abs=1e-15)
                assert set(file) == {"numbers", *expected.arrays}
                for key, values in expected.arrays.items():
                    np.testing.assert_allclose(file[key], values, rtol=1e-6, atol=1e-12, err_msg=key)


def test_an_error_in_one_process_ends_all(together):
    folder, size = together
    guilty = 3 % size
    for rank in range(size):
        broken, written, full, exists, negative, airfoils = json.loads((folder / f"failures-{rank}.json").read_text())
        prefix = "" if rank == guilty else f"process {guilty} gave up, and so do the others: "
        assert broken == prefix + "item 3 is broken"
        assert written == ([0, 1, 2][: 3 - guilty] if rank == 0 else [])
        prefix = "" if rank == 0 else "process 0 gave up, and so do the others: "
        assert full == prefix + "[Errno 28] no space left"
        assert exists.startswith(prefix)
        assert "exists already: remove it or choose another output" in exists
        assert negative == prefix + "the viscosity must be positive, got -1.0"
        assert "run one process, with --workers" in airfoils
    assert (folder / "full.h5.partial").exists()
    assert not (folder / "full.h5").exists()
    assert not list(folder.glob("bad*"))


def test_a_killed_run_continues_with_any_number_of_processes(alone, tmp_path):
    """The leader dies midway; no process outlives it, and three go on from the frames that are in the file."""
    codes, _ = launch(2, __file__, tmp_path, "die")
    assert 0 not in codes
    with pytest.raises(ValueError, match="6 of 20 parts are written"):
        t1.Fields.open(tmp_path / "killed.h5.partial")
    words = [
        word
        for key, value in SMOKE.items()
        for word in (f"--{key}", str(list(value) if key == "resolution" else value))
    ]
    codes, said = launch(3, "-m", "transform_once", "generate", "smoke", *words, "--output", tmp_path / "killed.h5")
    assert codes == [0, 0, 0], said
    assert (tmp_path / "killed.h5").read_bytes() == (alone / "smoke.h5").read_bytes()


def test_shares_are_consecutive_and_cover_all_samples():
    for count in range(8):
        for size in range(1, 5):
            shares = [range(count)[World(rank, size, torch.device("cpu")).part(count)] for rank in range(size)]
            assert [number for share in shares for number in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_writes_what_comes_when_it_comes():
    place, events = joined(torch.device("cpu")), []

    def work(item):
        for part in "ab":
            events.append(f"made {item}{part}")
            yield {"name": f"{item}{part}"}

    place.in_turns(range(2), work, lambda arrays: events.append(f"wrote {arrays['name']}"))
    assert events == [f"{done} {item}{part}" for item in range(2) for part in "ab" for done in ("made", "wrote")]
    assert place.lead(lambda: 5) == place.collect(5, lambda one, other: None) == 5
    with pytest.raises(KeyError), place.together():
        raise KeyError


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
