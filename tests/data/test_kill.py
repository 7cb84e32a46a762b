"""Real SIGKILL at random moments: what was finished stays, nothing is doubled, nothing half-written reads as whole."""

import multiprocessing
import os
import random
import sys
import time

import numpy as np
import pytest
import torch

from transform_once.data.fields import Fields
from transform_once.data.formats import convert, read
from transform_once.data.writer import FieldsWriter

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")

SAMPLES, SHAPE = 48, (2, 96, 96)


def sample(i):
    return torch.from_numpy(np.random.default_rng(i).normal(size=(1, *SHAPE)).astype(np.float32))


def generate(path, progress):
    """What a generator does: continue where the file ends, note every sample as soon as append has returned."""
    shapes = {"input": SHAPE, "target": SHAPE}
    with (
        FieldsWriter(path, samples=SAMPLES, shapes=shapes, seed=1) as writer,
        open(progress, "ab", buffering=0) as notes,
    ):
        for i in range(writer.finished, SAMPLES):
            writer.append(input=sample(i), target=2 * sample(i), names=[f"sample {i}"])
            notes.write(bytes([i]))


def import_films(path, progress):
    """What `t1 import` does, with a source so long that every trajectory is cut into blocks of frames."""
    Fields.blocks.__defaults__ = (4 * 96 * 96 * 4 / 2**20, (0, 0))
    convert(progress, path)


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")  # children start at once: it has imported everything already
    context.set_forkserver_preload([__name__, "transform_once.data.formats"])
    first = context.Process(target=sample, args=(0,))
    first.start()
    first.join()
    return context


def run_and_kill(server, target, arguments, delay):
    """Start the work, kill it after `delay` seconds; whether it had ended by itself."""
    process = server.Process(target=target, args=arguments)
    process.start()
    process.join(delay)
    ended = process.exitcode is not None
    process.kill()
    process.join()
    return ended


def finish(server, target, arguments):
    process = server.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def duration(server, target, arguments):
    """How long the work takes here and now, so that the kills fall all over it; it decides no result."""
    start = time.perf_counter()
    finish(server, target, arguments)
    return time.perf_counter() - start


def check_unfinished(path):
    """An unfinished file has another name and is refused."""
    assert not path.exists()
    partial = path.with_name(path.name + ".partial")
    if partial.exists():
        with pytest.raises(ValueError, match="unfinished"):
            read(partial)
        with pytest.raises(ValueError, match="parts are written"):
            Fields.open(partial)


def test_generating_survives_ten_kills(server, tmp_path):
    chance = random.Random(0)
    total = duration(server, generate, (tmp_path / "timing.h5", tmp_path / "timing"))
    kills, rounds = 0, 0
    while kills < 10:
        path, progress = tmp_path / f"x{rounds}.h5", tmp_path / f"progress{rounds}"
        rounds += 1
        done = 0
        while not path.exists() and kills < 10:
            ended = run_and_kill(server, generate, (path, progress), chance.uniform(0, total))
            if path.exists() or ended:
                break
            kills += 1
            check_unfinished(path)
            noted = progress.read_bytes() if progress.exists() else b""
            if path.with_name(path.name + ".partial").exists():
                writer = FieldsWriter(path, samples=SAMPLES, shapes={"input": SHAPE, "target": SHAPE}, seed=1)
                assert writer.finished >= max(len(set(noted)), done)  # nothing that was finished is lost
                done = writer.finished
                assert writer.names == tuple(f"sample {i}" for i in range(done))
                writer.close()
        if not path.exists():
            finish(server, generate, (path, progress))
        fields = Fields.open(path)
        assert len(fields) == SAMPLES
        noted = list(progress.read_bytes())
        assert len(noted) == len(set(noted))  # nothing was done twice after it had been reported finished
        for i in range(SAMPLES):
            assert torch.equal(fields[i].input, sample(i))
            assert torch.equal(fields[i].target, 2 * sample(i))
        assert not path.with_name(path.name + ".partial").exists()


def test_importing_survives_ten_kills(server, tmp_path):
    chance = random.Random(1)
    films = np.random.default_rng(0).normal(size=(6, 30, 1, 96, 96)).astype(np.float32)
    source = tmp_path / "films.npy"
    np.save(source, films)
    total = duration(server, import_films, (tmp_path / "timing.h5", source))
    kills, rounds = 0, 0
    while kills < 10:
        path = tmp_path / f"x{rounds}.h5"
        rounds += 1
        while not path.exists() and kills < 10:
            if run_and_kill(server, import_films, (path, source), chance.uniform(0, total)) or path.exists():
                break
            kills += 1
            check_unfinished(path)
        if not path.exists():
            finish(server, import_films, (path, source))
        assert torch.equal(Fields.open(path).trajectory, torch.from_numpy(films))
        os.remove(path)
