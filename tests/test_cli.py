"""The command `t1`, run as a user runs it; mostly in this process, which saves the seconds an interpreter takes."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import transform_once as t1
from transform_once import cli
from transform_once.solvers.navier_stokes import generate


def run(*arguments, **environment):
    command = [sys.executable, "-m", "transform_once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture
def t1_command(monkeypatch, capsys):
    """Runs `t1 …` here; gives the exit code and what was printed."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["t1", *map(str, words)])
        monkeypatch.setattr("warnings.showwarning", lambda *_, **__: None)
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data: my.npz of pairs, film.npz of trajectories, a.npy of inputs."""
    place = tmp_path_factory.mktemp("cli")
    x, y, _ = generate(24, 1e-3, 1.0, 16)
    np.savez(place / "my.npz", input=x.numpy(), target=y.numpy())
    np.save(place / "a.npy", x[:5, 0].numpy())
    _, w, _ = generate(3, 1e-3, [0.5 * i for i in range(1, 9)], 16)
    np.savez(place / "film.npz", trajectory=w.numpy())
    return place


SMALL = ("--modes", 5, "--model.width", 6, "--depth", 1, "--batch-size", 8, "--device", "cpu")


def test_help_names_every_verb_and_answers_fast():
    run("--help")  # warms the disk
    start = time.perf_counter()
    shown = run("--help")
    print(f"answered in {time.perf_counter() - start:.2f} s")  # shown, not judged: the machine may be busy
    assert shown.returncode == 0
    assert all(verb in shown.stdout for verb in cli.VERBS)


@pytest.mark.parametrize(
    "words", [[verb] for verb in cli.VERBS if verb != "generate"] + [["generate", s] for s in cli.SOLVERS]
)
def test_the_help_of_a_verb_explains_each_option_with_its_default(t1_command, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "300")
    code, shown, _ = t1_command(*words, "--help")
    assert code == 0
    lines = shown[shown.index("options:") :].splitlines()
    options = [number for number, line in enumerate(lines) if re.match(r"  --\w", line)]
    assert options
    for number in options:
        name = lines[number].split()[0]
        told = " ".join(lines[number : number + 4])
        if name in ("--config", "--print_config", "--print_shtab") or re.search(r"--\w+ CONFIG", lines[number]):
            continue
        assert "default:" in told or "required" in told, lines[number]
        sentence = re.sub(r"\((type|required).*", "", told.split("  ", 2)[-1]).strip()
        assert len(sentence) > 8, lines[number]
    assert "--device" in shown or words[0] in ("import", "report", "export") or words == ["generate", "airfoils"]


def test_the_whole_way_of_a_users_data(t1_command, folder, tmp_path):
    """Train with no configuration at all, evaluate, predict, report; finished runs are not run again."""
    output = tmp_path / "RUN"
    code, shown, errors = t1_command(
        "train", "--data", folder / "my.npz", "--output", output, "--train.epochs", 2, "--device", "cpu"
    )
    assert code == 0, errors
    assert "modes" in shown
    assert "relative l2" in " ".join(shown.split())
    names = {path.name for path in output.iterdir()}
    assert names == {
        *("run.json", "config.yaml", "history.csv", "model.safetensors", "last.safetensors"),
        *("metrics.json", "examples.npz", "report.html"),
    }
    before = (output / "model.safetensors").stat().st_mtime_ns
    again = ("train", "--data", folder / "my.npz", "--output", output, "--train.epochs", 2, "--device", "cpu")
    assert t1_command(*again)[0] == 0
    assert (output / "model.safetensors").stat().st_mtime_ns == before
    code, shown, _ = t1_command("evaluate", output, "--data", folder / "my.npz", "--json")
    numbers = json.loads(shown)
    assert code == 0
    assert numbers["samples"] == 24
    [model] = t1.load_models(output)
    stored = np.load(folder / "my.npz")
    prediction = t1.predict(model, stored["input"]).numpy()
    error = np.linalg.norm((prediction - stored["target"]).reshape(24, -1), axis=1)
    exact = (error / np.linalg.norm(stored["target"].reshape(24, -1), axis=1)).mean()
    assert numbers["relative_l2"] == pytest.approx(exact, rel=1e-5)
    assert {"mse", "mae", "psnr", "smape", "per_channel", "kspace"} <= set(numbers)
    code, shown, _ = t1_command("predict", output, "--input", folder / "a.npy", "--output", tmp_path / "b.npy")
    assert code == 0
    np.testing.assert_allclose(np.load(tmp_path / "b.npy"), prediction[:5, 0], rtol=1e-5, atol=1e-6)
    code, shown, _ = t1_command("report", output, output, "--output", tmp_path / "page.html")
    assert code == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert t1_command("export", output / "model.safetensors", tmp_path / "model.onnx")[0] == 0


def test_an_ensemble_predicts_with_an_error_bar(t1_command, folder, tmp_path):
    words = ("train", "--data", folder / "my.npz", "--data.test", 4, *SMALL, "--train.epochs", 2)
    code, shown, errors = t1_command(*words, "--ensemble", 3, "--output", tmp_path / "run")
    assert code == 0, errors
    assert "3 members; spread / error" in shown
    numbers = json.loads(t1_command("evaluate", tmp_path / "run", "--json")[1])
    assert len(numbers["members"]) == 3
    assert numbers["calibration"]["spread_to_error"] > 0
    t1_command("predict", tmp_path / "run", "--input", folder / "a.npy", "--output", tmp_path / "b.npy")
    mean, spread = (np.load(tmp_path / name) for name in ("b.npy", "b.spread.npy"))
    members = [t1.predict(model, np.load(folder / "a.npy")).numpy()[:, 0] for model in t1.load_models(tmp_path / "run")]
    np.testing.assert_allclose(mean, np.mean(members, 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(spread, np.std(members, 0, ddof=1), rtol=1e-3, atol=1e-6)


def test_rollouts_from_the_command_line(t1_command, folder, tmp_path):
    words = ("train", "--data", folder / "film.npz", "--data.test", 1, *SMALL, "--train.epochs", 2, "--train.steps", 3)
    code, _, errors = t1_command(*words, "--train.history", 1, "--train.order", 2, "--output", tmp_path / "run")
    assert code == 0, errors
    told = ("rollout", tmp_path / "run", "--data", folder / "film.npz", "--steps", 5)
    code, shown, errors = t1_command(*told, "--frames", 1, 5, "--output", tmp_path / "out.h5", "--json")
    assert code == 0, errors
    assert len(json.loads(shown)["per_step"]["relative_l2"]) == 5
    made, [model] = t1.read(tmp_path / "out.h5"), t1.load_models(tmp_path / "run")
    assert made.metadata.times == (2.0, 6.0)
    first = t1.read(folder / "film.npz").trajectory[:, :2]
    np.testing.assert_allclose(made.trajectory, t1.rollout(model, first, 5)[:, [0, 4]].detach(), rtol=1e-5, atol=1e-6)


def test_fine_tuning_starts_from_a_run(t1_command, folder, tmp_path):
    words = ("train", "--data", folder / "my.npz", "--train.epochs", 1)
    assert t1_command(*words, *SMALL, "--output", tmp_path / "first")[0] == 0
    options = ("--init-from", tmp_path / "first", "--train.learning_rate", 1e-12, "--device", "cpu")
    code, _, errors = t1_command(*words, *options, "--output", tmp_path / "second")
    assert code == 0, errors
    first, second = (t1.load_models(tmp_path / name)[0].state_dict() for name in ("first", "second"))
    assert all(np.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_fine_tuning_starts_one_model_from_one(t1_command, folder, tmp_path):
    words = ("train", "--data", folder / "my.npz", "--train.epochs", 1, "--device", "cpu")
    assert t1_command(*words, *SMALL, "--ensemble", 2, "--output", tmp_path / "both")[0] == 0
    one = tmp_path / "both" / "model-01.safetensors"
    for start, members, sentence in (
        (tmp_path / "both", 1, "both holds 2 members: give the weights of one"),
        (one, 2, "other members of an ensemble would begin anew: train them one by one"),
    ):
        code, _, errors = t1_command(*words, "--init-from", start, "--ensemble", members, "--output", tmp_path / "new")
        assert (code, errors.count("\n")) == (2, 1)
        assert sentence in errors
    assert t1_command(*words, "--init-from", one, "--name", "FNO", "--output", tmp_path / "new")[0] == 0
    assert "FNO" not in (tmp_path / "new" / "config.yaml").read_text()  # its model is that of the weights


def test_files_of_another_kind_are_not_written(t1_command, folder, tmp_path):
    words = ("train", "--data", folder / "film.npz", "--epochs", 1, *SMALL, "--output", tmp_path / "run")
    assert t1_command(*words)[0] == 0
    for words, sentence in (
        (("import", folder / "my.npz", tmp_path / "x.npz"), "a name that ends in .h5"),
        (("export", tmp_path / "run", tmp_path / "x.txt"), "a file that ends in .onnx"),
        (("predict", tmp_path / "run", "--input", folder / "a.npy", "--output", tmp_path / "x.npz"), "ends in .npy"),
        (("predict", tmp_path / "run", "--input", "none.npy", "--output", tmp_path / "x.npy"), "t1: none.npy: No such"),
        (("rollout", tmp_path / "run", "--data", folder / "film.npz", "--steps", 30), "too few frames to judge 30"),
    ):
        code, _, errors = t1_command(*words)
        assert (code, errors.count("\n"), sentence in errors) == (2, 1, True), errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_predictions_of_fields_in_another_layout(t1_command, folder, tmp_path):
    assert t1_command("train", "--data", folder / "my.npz", "--epochs", 1, *SMALL, "--output", tmp_path / "run")[0] == 0
    x = np.load(folder / "a.npy")
    np.save(tmp_path / "big.npy", x.astype(">f4"))
    np.savez(tmp_path / "last.npz", field=x[..., None])
    options = {"a": (folder / "a.npy",), "big": (tmp_path / "big.npy",)}
    options["last"] = (tmp_path / "last.npz", "--input-key", "field", "--axes", "nxyc")
    made = {}
    for name, words in options.items():
        code, _, errors = t1_command(
            "predict", tmp_path / "run", "--input", *words, "--output", tmp_path / f"{name}.npy"
        )
        assert code == 0, errors
        made[name] = np.load(tmp_path / f"{name}.npy").reshape(x.shape)
    for name in ("big", "last"):
        np.testing.assert_allclose(made[name], made["a"], rtol=1e-5, atol=1e-6)


def test_a_figure_of_the_paper_from_a_users_data(t1_command, folder, tmp_path):
    words = ("reproduce", "truncation", "--data", folder / "my.npz", "--output", tmp_path / "figures")
    code, _, errors = t1_command(*words)
    assert code == 0, errors
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} >= {".png", ".csv"}
    code, _, errors = t1_command("reproduce", "scaling", "--runs", tmp_path / "a", tmp_path / "b")
    assert code == 2
    assert "a" in errors


def test_compare_says_which_to_use(t1_command, folder, tmp_path):
    words = ("compare", "--data", folder / "my.npz", "--budget", 0.5, "--models", "T1,FNO", "--device", "cpu")
    code, shown, errors = t1_command(*words, "--output", tmp_path / "out")
    assert code == 0, errors
    assert "Use " in shown
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {row["model"] for row in stored["rows"]} == {"T1", "FNO"}
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("counts", "train", "validation", "test"),
    [
        (("--data.train", 18, "--data.test", 6), 17, 1, 6),
        (("--data.train", 20), 16, 2, 2),
        (("--data.validation", 4), 18, 4, 2),
    ],
    ids=str,
)
def test_compare_takes_the_samples_that_are_given(t1_command, folder, tmp_path, counts, train, validation, test):
    words = ("compare", "--data", folder / "my.npz", "--budget", 0.2, "--models", "FNO", "--device", "cpu", *counts)
    code, _, errors = t1_command(*words, "--output", tmp_path)
    assert code == 0, errors
    told = json.loads((tmp_path / "FNO" / "run.json").read_text())["data"]
    assert (told["train"], told["validation"]) == (train, validation)
    assert json.loads((tmp_path / "FNO" / "metrics.json").read_text())["samples"] == test


def test_compare_shows_a_model_that_diverged(t1_command, folder, tmp_path, monkeypatch):
    def diverge(*_, **__):
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr("transform_once.training.compare._searched", diverge)
    words = ("compare", "--data", folder / "my.npz", "--models", "FNO", "--device", "cpu", "--output", tmp_path)
    code, shown, errors = t1_command(*words)
    assert code == 0, errors
    assert "FNO diverged: the loss is nan" in shown
    assert "No model gave a finite error" in shown
    [row] = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert row == {"model": "FNO", "relative_l2": None, "diverged": "the loss is nan"}


def test_demo_names_the_winner_it_measured(t1_command, tmp_path):
    size = ("--resolution", 16, "--samples", 36, "--seconds", 0.5)
    code, shown, errors = t1_command("demo", "--output", tmp_path / "new", *size)
    assert code == 0, errors
    told = {name: float(re.search(rf"{name}: relative L2 ([\d.]+)", shown).group(1)) for name in ("T1Grid", "FNO")}
    stored = {name: json.loads((tmp_path / "new" / name / "metrics.json").read_text()) for name in told}
    for name, value in told.items():
        assert value == pytest.approx(stored[name]["relative_l2"], abs=6e-5)
    assert f"{min(told, key=told.get)} won this time" in shown
    assert "<html" in (tmp_path / "new" / "report.html").read_text()[:200]


def test_verbs_read_a_source_by_the_same_options(t1_command, tmp_path):
    a, b, c = np.random.default_rng(0).normal(size=(3, 4, 2, 16, 12))
    np.savez(tmp_path / "x.npz", a=a, b=b, c=c)
    words = ["--input-key", "a,c", "--target-key", "b", "--input-channels", 0, 3, "--target-channels", 1, "--stride", 2]
    words += ["--grid", "node"]
    code, shown, errors = t1_command("analyze", tmp_path / "x.npz", *words, "--json", "--rates", "false")
    assert code == 0, errors
    assert json.loads(shown)["shapes"] == {"input": [4, 2, 8, 6], "target": [4, 1, 8, 6]}
    code, _, errors = t1_command("import", tmp_path / "x.npz", tmp_path / "x.h5", *words, "--periodic", "[true, false]")
    assert code == 0, errors
    fields = t1.read(tmp_path / "x.h5")
    assert fields.metadata.periodic == (True, False)
    expected = np.concatenate([a[:, :1, ::2, ::2], c[:, 1:, ::2, ::2]], 1)
    np.testing.assert_allclose(fields.input.numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(fields.target.numpy(), b[:, 1:, ::2, ::2], rtol=1e-6)
    code, _, errors = t1_command("import", tmp_path / "x.npz", tmp_path / "y.h5", "--input-chanels", 1)
    assert (code, "input_channels" in errors) == (2, True)


def test_a_signal_saves_and_the_same_command_continues(folder, tmp_path):
    words = ["train", "--data", str(folder / "my.npz"), "--output", str(tmp_path / "run"), *map(str, SMALL)]
    words += ["--train.epochs", "400", "--train.batch_size", "1"]
    command = [sys.executable, "-m", "transform_once", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and "10%" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the same command continues" in shown
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["status"] == "stopped"
    assert 0 < told["epochs_done"] < 400
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fly",), "t1: there is no verb 'fly'; known are analyze"),
        (("trian",), "there is no verb 'trian'; did you mean train?"),
        (("demo", "--samples", "many"), "many"),
        (("demo", "--depth", "3"), "t1 demo: there is no option 'depth'"),
        (("train",), "t1 train: give the data: --data FILE"),
        (("train", "--data", "FOLDER/none.npz"), "there is no"),
        (("train", "--data", "FOLDER/my.npz", "--model.mode", "3"), "no option 'model.mode'; did you mean model.modes"),
        (
            ("train", "--data", "FOLDER/my.npz", "--train.epoch", "3"),
            "no option 'train.epoch'; did you mean train.epochs",
        ),
        (
            ("train", "--data", "FOLDER/my.npz", "--train.optimizer", "sgd"),
            "t1 train: --train.optimizer: expected one of adamw, muon or null; got sgd",
        ),
        (
            ("train", "--data", "FOLDER/my.npz", "--waves", "x"),
            "t1 train: --model.waves: expected int or list[int] or null; got x",
        ),
        (("train", "--data", "FOLDER/my.npz", "--order", "x"), "t1 train: --train.order: expected int; got x"),
        (
            ("train", "--data", "FOLDER/my.npz", "--model", "ResNet"),
            "--model.name: expected one of T1Grid, T1, T1Plus,",
        ),
        (("train", "--data", "FOLDER/my.npz", "--train.learning_rate", "-1"), "learning_rate must be positive"),
        (("train", "--data", "FOLDER/my.npz", "--device", "cuda:99"), "GPU"),
        (("train", "--data", "FOLDER/my.npz", "--output", "/proc/run", "--train.epochs", "1"), "/proc/run"),
        (("train", "--config", "navier_stokes/t9.yaml"), "no configuration navier_stokes/t9.yaml"),
        (("train", "--config", "FOLDER/bad.yaml"), "no option 'model.mode'; did you mean model.modes"),
        (
            ("train", "--config", "navier_stokes/t1.yaml", "--data", "FOLDER/my.npz", "--model.name", "UNet"),
            "t1: FOLDER/my.npz holds 24 samples",
        ),
        (
            ("train", "--data", "FOLDER/my.npz", "--model", "UNet", "--modes", "3"),
            "UNet has no option 'modes'; it has init, width",
        ),
        (("evaluate", "FOLDER", "--data", "FOLDER/my.npz"), "is no run folder: it has no run.json"),
        (("predict", "FOLDER"), "give --input a.npy --output b.npy"),
        (("predict",), "t1 predict: give run: `t1 predict --help` shows how"),
        (("report", "FOLDER/none"), "none"),
        (("rollout", "FOLDER", "--data", "FOLDER/film.npz"), "is no run folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(t1_command, folder, words, sentence):
    (folder / "bad.yaml").write_text("data:\n  path: my.npz\nmodel:\n  mode: 3\n")
    code, shown, errors = t1_command(*(word.replace("FOLDER", str(folder)) for word in words))
    assert code == 2
    assert sentence.replace("FOLDER", str(folder)) in errors
    assert errors.count("\n") == 1, errors
    assert "Traceback" not in errors + shown


def test_a_full_disk_is_one_sentence_and_loses_nothing(t1_command, folder, tmp_path, monkeypatch):
    from transform_once.training import loop
    from transform_once.training import run as folders

    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0)
    save, calls = folders.save_file, []

    def full(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device", str(path))
        save(tensors, path, metadata)

    monkeypatch.setattr(folders, "save_file", full)
    words = ("train", "--data", folder / "my.npz", "--output", tmp_path / "run", *SMALL, "--train.epochs", 5)
    code, _, errors = t1_command(*words)
    assert code == 2
    assert "No space left on device" in errors
    _, state = folders.read_checkpoint(tmp_path / "run")
    assert state.epoch == 2
    assert not list((tmp_path / "run").glob("*.partial"))
    monkeypatch.undo()


def test_export_writes_a_model_that_runs(t1_command, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    model, target = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    t1.save(t1.T1(1, 1, (12, 10), modes=4, width=4, depth=1), model)
    code, _, errors = t1_command("export", model, target)
    assert code == 0, errors
    assert runtime.InferenceSession(str(target)).get_inputs()[0].shape[1:] == [1, 12, 10]
    t1.save(t1.T1(1, 1, (12, 10), modes=4, width=4, depth=1, transform="dft"), model)
    code, _, errors = t1_command("export", model, target)
    assert code == 2
    assert errors.startswith("t1: a T1 with the transform dft computes with complex numbers, which ONNX does not have")
    code, _, errors = t1_command("export", tmp_path / "nowhere", target)
    assert (code, "Traceback" in errors) == (2, False)


def test_an_unwritable_folder_is_named(t1_command, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, _, errors = t1_command("demo", "--output", tmp_path / "file", "--resolution", 16, "--samples", 24)
    assert code == 2
    assert "file" in errors
    assert "Traceback" not in errors
