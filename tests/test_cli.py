"""The command `t1`, run as a user runs it."""

import os
import subprocess
import sys
import time

import pytest

import transform_once as t1


def run(*arguments, **environment):
    command = [sys.executable, "-m", "transform_once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_help_names_every_verb_and_answers_fast():
    run("--help")  # warms the disk
    start = time.perf_counter()
    shown = run("--help")
    print(f"answered in {time.perf_counter() - start:.2f} s")  # shown, not judged: the machine may be busy
    assert shown.returncode == 0
    assert "demo" in shown.stdout


def test_the_help_of_a_verb_explains_each_option():
    shown = run("demo", "--help").stdout
    for option, sentence in {"--modes": "Modes to keep along each axis", "--output": "Folder for the picture"}.items():
        assert option in shown
        assert sentence in " ".join(shown.split())


def test_demo_writes_its_picture(tmp_path):
    shown = run("demo", "--output", str(tmp_path / "new"), "--resolution", "[32,24]", "--modes", "8")
    assert shown.returncode == 0, shown.stderr
    picture = tmp_path / "new" / "core.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 20_000
    assert [path.name for path in picture.parent.iterdir()] == ["core.png"]
    assert "irreducible relative L2" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("demo", "--modes", "999"), "t1: modes must lie between 1 and"),
        (("demo", "--modes", "0"), "got 0"),
        (("demo", "--modes", "many"), "many"),
        (("demo", "--depth", "3"), "depth"),
        (("fly",), "fly"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    shown = run(*arguments, "--output", str(tmp_path)) if arguments[0] == "demo" else run(*arguments)
    assert shown.returncode == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr + shown.stdout


def test_export_writes_a_model_that_runs(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    model, target = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    t1.save(t1.T1(1, 1, (12, 10), modes=4, width=4, depth=1), model)
    shown = run("export", str(model), str(target))
    assert shown.returncode == 0, shown.stderr
    assert runtime.InferenceSession(str(target)).get_inputs()[0].shape[1:] == [1, 12, 10]
    t1.save(t1.FNO(1, 1, (12, 10), modes=4, width=4, depth=1), model)
    refused = run("export", str(model), str(target))
    assert refused.returncode == 2
    assert refused.stderr.startswith("t1: FNO computes with complex numbers, which ONNX does not have")
    missing = run("export", str(tmp_path / "nowhere"), str(target))
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    shown = run("demo", "--output", str(tmp_path / "file"), "--resolution", "[16,16]", "--modes", "4")
    assert shown.returncode == 2
    assert "file" in shown.stderr
    assert "Traceback" not in shown.stderr
