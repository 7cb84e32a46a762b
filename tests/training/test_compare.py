import json
import math

import pytest
import torch

import transform_once as t1
from transform_once.data.fields import Fields
from transform_once.training import compare as module
from transform_once.training.run import read_run


def test_every_model_gets_the_same_seconds_and_the_best_is_named(flow, tmp_path):
    found = t1.compare(flow, 0.5, models=("T1", "FNO"), output=tmp_path, progress=False, device="cpu")
    errors = [row["relative_l2"] for row in found.rows]
    assert errors == sorted(errors)
    assert {row["model"] for row in found.rows} == {"T1", "FNO"}
    for row in found.rows:
        told = read_run(tmp_path / row["model"])
        assert told["training"]["seconds"] == pytest.approx(0.8 * 0.5)
        assert float(min(row["trials"], key=row["trials"].get)) == row["learning_rate"]
        assert told["training"]["learning_rate"] == row["learning_rate"]
        assert told["data"]["train"] == 24
        assert told["data"]["validation"] == 3
        numbers = json.loads((tmp_path / row["model"] / "metrics.json").read_text())
        assert numbers["relative_l2"] == row["relative_l2"]
        assert numbers["samples"] == 3
    assert not list(tmp_path.glob("*trial*"))
    assert found.rows[0]["model"] in found.advice or "level" in found.advice


def rows(**errors):
    return [
        {"model": name, "relative_l2": error, "ms_per_step": cost, "steps": 10}
        for name, (error, cost) in errors.items()
    ]


def test_the_advice_follows_the_numbers():
    assert module._advice(rows(FNO=(0.1, 9.0), T1=(0.2, 1.0))).startswith("Use FNO: its error on the test samples is")
    level = module._advice(rows(FNO=(0.100, 9.0), T1=(0.103, 1.0)))
    assert level.startswith("Use T1: FNO (0.1000) and T1 are level within 5%")
    assert module._advice(rows(T1=(0.1, 1.0))).startswith("T1 is the only one")


def test_the_advice_goes_by_finite_errors():
    told = module._advice(rows(FNO=(0.1, 9.0), T1=(0.2, 1.0), UNet=(None, 1.0), FFNO=(math.inf, 1.0)))
    assert told.startswith("Use FNO: its error on the test samples is 0.1000, that of the next, T1, 0.2000")
    assert told.endswith("UNet and FFNO gave no finite error.")
    assert module._advice(rows(T1=(None, 1.0))).startswith("No model gave a finite error")


@pytest.mark.parametrize(
    ("given", "train", "validation", "test"),
    [(("test",), 27, 3, 7), (("validation",), 27, 7, 3), (("validation", "test"), 30, 7, 7), ((), 24, 3, 3)],
    ids=str,
)
def test_only_what_is_not_given_is_held_out(flow, given, train, validation, test):
    parts = module._parts(flow, frames=2, **{"validation": None, "test": None} | dict.fromkeys(given, flow[:7]))
    assert [len(part) for part in parts] == [train, validation, test]


def test_models_are_compared_on_the_end_of_one_film(tmp_path):
    film = Fields(trajectory=torch.randn(1, 14, 1, 8, 8))
    found = t1.compare(film, 0.2, models=("FNO",), output=tmp_path, progress=False, device="cpu", steps=2)
    data = found.runs[0].description["data"]
    assert (data["train"], data["validation"]) == (1, 1)
    assert found.rows[0]["relative_l2"] > 0.1  # of noise


def test_a_given_test_set_is_measured(flow, tmp_path):
    found = t1.compare(flow[:23], 0.2, models=("FNO",), output=tmp_path, test=flow[23:], progress=False, device="cpu")
    told = read_run(tmp_path / "FNO")["data"]
    assert (told["train"], told["validation"]) == (21, 2)
    assert json.loads((tmp_path / "FNO" / "metrics.json").read_text())["samples"] == 7
    assert len(found.rows) == 1


@pytest.mark.parametrize("when", ["always", "at the larger rate", "after the trials"])
def test_a_model_that_diverges_does_not_end_the_comparison(flow, tmp_path, monkeypatch, when):
    real = module.train

    def train(model, *data, output, **options):
        run = real(model, *data, output=output, **options)
        larger = options["learning_rate"] > 2e-3
        if (
            isinstance(model, t1.FNO)
            and {
                "always": True,
                "at the larger rate": larger and "trial" in output.name,
                "after the trials": "trial" not in output.name,
            }[when]
        ):
            raise FloatingPointError("the loss is nan")
        return run

    monkeypatch.setattr(module, "train", train)
    found = t1.compare(flow, 0.2, models=("FNO", "T1"), output=tmp_path, progress=False, device="cpu")
    json.dumps(found.rows, allow_nan=False)
    assert not list(tmp_path.glob("*trial*"))
    if when == "at the larger rate":
        [row] = [row for row in found.rows if row["model"] == "FNO"]
        assert list(row["trials"].values()) == [pytest.approx(row["trials"]["0.001"]), None]
        assert row["learning_rate"] == 1e-3
        return
    assert [row["model"] for row in found.rows] == ["T1", "FNO"]
    assert found.rows[1]["relative_l2"] is None
    reason = (
        "its errors were not finite at the learning rates 0.001 and 0.004" if when == "always" else "the loss is nan"
    )
    assert found.rows[1]["diverged"].startswith(reason)
    assert len(found.runs) == 1
    assert found.advice.startswith("T1 is the only one measured")
    assert found.advice.endswith("FNO gave no finite error.")


def test_a_signal_ends_the_whole_comparison(flow, tmp_path, monkeypatch):
    trained, train = [], module.train

    def interrupted(*given, **settings):
        trained.append(train(*given, **settings))
        trained[-1].description["status"] = "interrupted"
        return trained[-1]

    monkeypatch.setattr(module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        t1.compare(flow, 0.5, models=("T1", "FNO"), output=tmp_path, progress=False, device="cpu")
    assert len(trained) == 1


def test_bad_input_is_one_sentence(flow, tmp_path):
    with pytest.raises(ValueError, match="budget is the seconds that each model may train; got -1"):
        t1.compare(flow, -1, output=tmp_path)
    with pytest.raises(ValueError, match="needs 10 samples or more, or trajectories of 6 frames or more; got Fields"):
        t1.compare(flow[:5], 1, output=tmp_path)
