import json

import pytest

import transform_once as t1
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


def test_bad_input_is_one_sentence(flow, tmp_path):
    with pytest.raises(ValueError, match="budget is the seconds that each model may train; got -1"):
        t1.compare(flow, -1, output=tmp_path)
    with pytest.raises(ValueError, match="needs 10 samples or more; got 5"):
        t1.compare(flow[:5], 1, output=tmp_path)
