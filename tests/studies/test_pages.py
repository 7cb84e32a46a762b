"""The sections of docs/reproduction.md, from rows that are made up."""

import pytest

from transform_once.studies import airfoils_page, climate_page, page, smoke_page
from transform_once.studies.study import Case, Results

PAGES = {"climate": climate_page, "airfoils": airfoils_page, "smoke": smoke_page}


def test_pages_say_what_is_missing(tmp_path):
    page = tmp_path / "docs" / "reproduction.md"
    page.parent.mkdir()
    page.write_text("# Reproduction\n\nBefore.\n")
    for name in PAGES:
        PAGES[name].write_page(tmp_path / f"{name}.csv", page)
        PAGES[name].write_page(tmp_path / f"{name}.csv", page)  # written again, not twice
    text = page.read_text()
    assert text.startswith("# Reproduction\n\nBefore.\n")
    for name in PAGES:
        assert text.count(f"<!-- {name}: begin") == 1
        assert f"{name}.csv is missing. To make it: `t1 reproduce {name} --data FOLDER`" in text
    page.write_text(text.replace("<!-- smoke: end -->", ""))
    with pytest.raises(ValueError, match="only one of the comments"):
        smoke_page.write_page(tmp_path / "smoke.csv", page)


def test_a_page_from_made_up_airfoils(tmp_path):
    results = Results(tmp_path / "airfoils.csv")
    errors = {"UNet": (0.10, 40.0), "FNO": (0.08, 100.0), "T1+vp": (0.082, 20.0)}
    for model, (error, seconds) in errors.items():
        for seed in range(5):
            own = {"seed": seed, "train": 90, "samples": 26, "seconds": seconds, "updates": 700, "optimizer": "muon"}
            own |= {"relative_l2": error + 0.001 * seed, "median": error / 2, "validation": 0.3}
            rows = [{**own, "part": "test"}, {**own, "part": "original", "relative_l2": 2 * error}]
            results.add(Case("airfoils", "main", model, {"seed": seed}), rows)
    fewer = {"part": "test", "train": 25, "relative_l2": 0.164, "median": 0.1, "validation": 0.5, "seed": 0}
    results.add(Case("airfoils", "samples", "T1+vp", {}), [fewer])
    learned = {**fewer, "symmetric": True, "scaled": True, "masked": False, "relative_l2": 0.123}
    results.add(Case("airfoils", "ablation", "T1+vp", {}), [learned])
    results.add(Case("airfoils", "floor", "T1+vp", {}), [{"relative_l2": 0.0066, "modes": 100}])
    airfoils_page.write_page(results.path, tmp_path / "reproduction.md")
    text = (tmp_path / "reproduction.md").read_text()
    assert "| T1+vp | 0.0840 ± 0.0016 (5) |" in text
    assert "1.024 times the error of FNO, the best baseline, in 0.20 of FNO's training time" in text
    assert "is met. Of the medians the ratio is 1.02. Split by split it is 1.02 to 1.02." in text
    assert "0.024, 1.3 h" in text
    assert "4.1 times the paper's error" in text
    assert "| T1+vp | 25 samples | 0.164 | 0.1 | 0.5 | 2.00 times" in text
    assert "2.00 times the error of the same seeds" in text
    assert "| T1+vp | zeros inside to be learned | 0.123 |" in text
    assert "hold: 0.0066 with 100 modes." in text
    assert "physical units" not in text


def test_a_page_from_made_up_smoke(tmp_path):
    results = Results(tmp_path / "smoke.csv")
    found = {"persistence": 0.5, "FNO": 0.4, "T1+vp": 0.3}
    for model, error in found.items():
        row = {"kind": "all", "relative_l2": error, "mae": 0.1, "mae_1": 0.01, "mae_10": 0.2, "psnr": 30.0}
        row |= {} if model == "persistence" else {"budget": 300.0, "seconds": 300.0, "updates": 1000, "hardware": "H"}
        results.add(Case("smoke", "plumes", model, {"size": [5, 90]}), [row])
    for model, error in {"T1": 0.38, "T1+vp": 0.5}.items():
        early = {"kind": "all", "relative_l2": error, "budget": 75.0}
        results.add(Case("smoke", "plumes: time", model, {}), [early])
    for model, error, budget in (("FNO", 0.6, 300.0), ("FNO", 0.8, 75.0), ("T1+vp", 0.3, 75.0)):
        row = {"kind": "all", "relative_l2": error, "budget": budget}
        results.add(Case("smoke", "recording" if budget > 100 else "recording: time", model, {}), [row])
    smoke_page.write_page(results.path, tmp_path / "reproduction.md")
    text = (tmp_path / "reproduction.md").read_text()
    assert "40% better than persistence, 25% better than FNO, after the same seconds." in text
    assert "0.228 ± 0.009, 4.7 h" in text
    assert "T1+vp after 75 s: 1.250 times the error of FNO" in text
    assert "is not met." in text
    assert "The others after 75 s, in errors of the FNO after 300 s: T1 0.950." in text
    assert "5 plumes of 90 frames; for training, validation and test as 64 to 20 to 20." in text
    assert "| FNO | 0.8 | 0.6 |" in text.split("### The real recording")[1]
    assert "T1+vp after 75 s: 0.500 times the error of FNO" in text.split("### The real recording")[1]
    results = Results(tmp_path / "recording.csv")
    results.add(Case("smoke", "recording", "FNO", {}), [{"kind": "all", "relative_l2": 0.6}])
    smoke_page.write_page(results.path, tmp_path / "reproduction.md")
    assert "Missing: not run yet." in (tmp_path / "reproduction.md").read_text()


@pytest.mark.parametrize(("error", "seconds", "met"), [(1.05, 0.2504, True), (1.051, 0.2, False), (0.9, 0.26, False)])
def test_an_aim_is_met_within_the_last_step(error, seconds, met):
    assert page.aimed(error, seconds, "FNO").endswith("is met." if met else "is not met.")
