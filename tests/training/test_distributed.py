"""Several processes on one machine with gloo, each in an interpreter of its own."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from transform_once.processes import choose_device, world

SCRIPT = """
import os, sys, warnings
import torch
import transform_once as t1
from transform_once.solvers.navier_stokes import generate
from transform_once.training.train import train

warnings.simplefilter("ignore")
torch.set_num_threads(1)
name, output, epochs, sharding = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
x, y, _ = generate(14, 1e-3, 1.0, 12)
fields = t1.Fields(input=x, target=y, grid="node", periodic=True)
torch.manual_seed(0)
make = {
    "T1": lambda: t1.T1(1, 1, (12, 12), modes=5, width=6, depth=2, transform="fourier"),
    "FNO": lambda: t1.FNO(1, 1, (12, 12), modes=4, width=6, depth=2),
}
run = train(make[name](), fields[:10], fields[10:], output=output, epochs=epochs, batch_size=5, validate_every=1,
      learning_rate=1e-2, progress=False, sharding=sharding, device="cpu")
error = (run.model(fields.input) - fields.target).flatten(1).norm(dim=1) / fields.target.flatten(1).norm(dim=1)
open(f"{output}/error-{os.environ.get('RANK', 0)}", "w").write(str(error.mean().item()))
os._exit(0)  # the destructor of a gloo group can wait for ever
"""


def launch(tmp_path, name, output, processes, epochs=3, sharding="ddp"):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(processes):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if processes > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            environment |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        words = [sys.executable, str(script), name, str(tmp_path / output), str(epochs), sharding]
        started.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return load_weights(tmp_path / output)


def load_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "last.safetensors")


def same(first, second, tolerance):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["T1", "FNO"])
def test_two_processes_give_the_result_of_one(tmp_path, name):
    """Batches of 5 are cut unevenly, 3 and 2. FNO: gradients of complex numbers are summed as pairs of real ones."""
    alone, together = launch(tmp_path, name, "alone", 1), launch(tmp_path, name, "together", 2)
    same(alone, together, 1e-5)
    same_errors(tmp_path, "together")
    rows = [(tmp_path / folder / "history.csv").read_text().splitlines() for folder in ("alone", "together")]
    for first, second in zip(*(lines[1:] for lines in rows), strict=True):
        ours, theirs = ([float(row.split(",")[column]) for column in (5, 6)] for row in (first, second))
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_shards_train_continue_and_are_saved_whole(tmp_path):
    alone, sharded = launch(tmp_path, "T1", "alone", 1), launch(tmp_path, "T1", "sharded", 2, sharding="fsdp")
    same(alone, sharded, 1e-5)
    same_errors(tmp_path, "sharded")


def same_errors(tmp_path, folder):
    """Every process is given the best weights, whole."""
    alone = float((tmp_path / "alone" / "error-0").read_text())
    for rank in (0, 1):
        assert float((tmp_path / folder / f"error-{rank}").read_text()) == pytest.approx(alone, rel=1e-4)


def test_devices_are_named_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA GPU is to be seen: use --device cpu"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="device is auto, cpu, cuda"):
        choose_device("gpu")
    with world("cpu") as place:
        assert (place.rank, place.size, place.leads) == (0, 1, True)
        assert place.any(True)
        assert not place.any(False)
