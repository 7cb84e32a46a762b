"""The report page: its numbers against direct computation, what is missing, what is wrong, and a real browser."""

import csv
import json
import math
import re
import shutil
import statistics
import subprocess
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from transform_once.data.fields import Fields
from transform_once.evaluation.evaluate import full_evaluation, save_evaluation
from transform_once.models.t1 import T1
from transform_once.reports.page import report, report_verb
from transform_once.reports.runs import figures, group_runs, mean_and_deviation, read_runs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
COLUMNS = ("member", "epoch", "step", "seconds", "learning_rate", "loss", "validation")


def fake_run(
    folder, *, seed=0, error=0.1, grid=(16, 12), channels=("vorticity",), frames=None, model="T1", members=0, **about
):
    """A run folder with known numbers: predictions are the target times 1 + error."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    names = list(channels)
    description = {
        "format": "transform-once run 1",
        "command": f"t1 train data.h5 --training.seed {seed}",
        "model": {"class": model, "config": {"modes": 4, "transform": "dct"}, "parameters": 1000, "bytes": 4000},
        "data": {
            "source": "data.h5",
            "fingerprint": "f",
            "train": 10,
            "validation": 2,
            "resolution": list(grid),
            "grid": "cell",
            "periodic": [False] * len(grid),
            "channels": {"trajectory": names} if frames else {"input": names, "target": names},
            "units": {"vorticity": "1/s"},
            "kind": "trajectories" if frames else "pairs",
        },
        "training": {"epochs": 3, "batch_size": 5, "learning_rate": 0.001, "seed": seed},
        "space": "k-space",
        "environment": {"torch": "2.6", "hardware": "abacus"},
        "members": max(1, members),
        "seeds": [seed],
        "status": "finished",
        "epochs_done": 3,
        "seconds": 1.5 + seed,
        "seconds_per_step": 0.25,
        "best": [{"epoch": 3, "validation": error}],
    }
    (folder / "run.json").write_text(json.dumps(description | about))
    write_history(
        folder, [(m, e, e, e / 2, 0.001, error / e, error) for m in range(max(1, members)) for e in (1, 2, 3)]
    )
    shape = (2, *((frames,) if frames else ()), len(names), *grid)
    target = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    metrics = {
        "samples": 2,
        "relative_l2": error,
        "relative_l2_std": 0.0,
        "mse": error**2,
        "mae": 0.8 * error,
        "psnr": 20 - seed,
        "smape": error,
        "per_channel": {name: {"relative_l2": error, "mae": 0.8 * error} for name in names},
        "kspace": {"J": 0.6 * error, "R_o": 0.8 * error, "transform": "dct", "modes": [4] * len(grid)},
    }
    if frames:
        metrics |= {"per_step": {"relative_l2": [error] * frames}, "times": [0.5 * t for t in range(frames)]}
    if members:
        metrics |= {"members": [error * (1 + m) for m in range(members)]}
        metrics |= {"calibration": {"spread_to_error": 0.9, "coverage_2sigma": 0.8, "correlation": None}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    kept = np.zeros(grid, dtype=bool)
    kept[tuple(slice(0, 4) for _ in grid)] = True
    arrays = {
        "input": target[:, :1] if frames else target,
        "target": target,
        "prediction": (1 + error) * target,
        "index": np.array([1, 0]),
        "relative_l2": np.array([error, error]),
        "target_spectrum": np.ones((len(names), *grid)),
        "error_spectrum": np.where(kept, 0.1, 1.0) * np.ones((len(names), *grid)),
        "kept": kept,
    }
    if frames:
        arrays["times"] = np.array(metrics["times"])
    np.savez(folder / "examples.npz", **arrays)
    return folder


def write_history(folder, rows):
    with (folder / "history.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([COLUMNS, *rows])


class Page(HTMLParser):
    """The tags, attributes and text of a page; complains where tags do not match."""

    EMPTY = ("meta", "link", "img", "input", "br")

    def __init__(self, path):
        super().__init__()
        self.open, self.attributes, self.words, self.rows = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self):
        return " ".join("".join(self.words).split())


def make(tmp_path, *folders):
    return Page(report(folders, tmp_path / "report.html"))


def row_of(page, start):
    return next(row for row in page.rows if row and row[0].startswith(start))


def stated(cell):
    """The numbers of a cell: mean, or mean and deviation."""
    return [float(part.replace("\u202f", "")) for part in cell.split("±")]


def test_the_table_holds_mean_and_deviation_over_seeds(tmp_path):
    errors = [0.1, 0.13, 0.11]
    page = make(tmp_path, *(fake_run(tmp_path / f"s{i}", seed=i, error=e) for i, e in enumerate(errors)))
    row = row_of(page, "T1 data.h5, 16×12")
    assert row[1] == "3"
    seeds = range(3)
    columns = [
        errors,
        [0.6 * e for e in errors],
        [0.8 * e for e in errors],
        [0.8 * e for e in errors],
        [20 - s for s in seeds],
        [1000] * 3,
        [0.004] * 3,
        [3] * 3,
        [1.5 + s for s in seeds],
        [250] * 3,
    ]
    for cell, values in zip(row[2:], columns, strict=True):
        numbers = stated(cell)
        assert numbers[0] == pytest.approx(statistics.fmean(values), rel=5e-3)
        assert len(numbers) == (1 if len(set(values)) == 1 else 2)
        if len(numbers) == 2:
            assert numbers[1] == pytest.approx(statistics.stdev(values), rel=5e-2)
    for name, error in zip(("s0", "s1", "s2"), errors, strict=True):
        assert stated(row_of(page, name)[2]) == [pytest.approx(error, rel=1e-3)]


def test_runs_of_other_settings_are_not_mixed(tmp_path):
    first, second = fake_run(tmp_path / "a"), fake_run(tmp_path / "b", training={"epochs": 4, "seed": 1})
    other = fake_run(tmp_path / "c", seed=2, data={"source": "other.h5", "fingerprint": "g"})
    groups = group_runs(read_runs([first, second, other, fake_run(tmp_path / "d", seed=7)]))
    assert [[run.name for run in group.runs] for group in groups] == [["a", "d"], ["b"], ["c"]]
    assert "epochs 4" in groups[1].label
    assert "different data" in make(tmp_path, first, other).text


def test_an_ensemble_counts_its_members(tmp_path):
    page = make(tmp_path, fake_run(tmp_path / "e", members=3, error=0.1))
    row = row_of(page, "T1 e, data.h5")
    assert row[1] == "3"
    assert stated(row[2]) == [pytest.approx(0.2), pytest.approx(0.1)]
    assert row[3] == "–"  # members have no split of their own
    assert stated(row_of(page, "e, mean prediction")[2]) == [0.1]
    assert "An ensemble of 3 T1 models" in page.text
    assert "correlation of spread and error over samples is not finite" in page.text


def test_the_error_is_split_into_both_parts(tmp_path):
    page = make(tmp_path, fake_run(tmp_path / "a", error=0.5))
    assert "0.3² + 0.4² = 0.5²" in page.text
    assert "J², on the kept modes: 36.0%" in page.text
    assert ("span", "style", "flex:0.3600") in page.attributes


def test_setbacks_are_told(tmp_path):
    setbacks = [{"member": 0, "epoch": 2}, {"member": 0, "epoch": 3}]
    page = make(tmp_path, fake_run(tmp_path / "a", setbacks=setbacks))
    assert "The loss ran away in epoch 2, 3" in page.text
    assert "ran away" not in make(tmp_path, fake_run(tmp_path / "b", setbacks=[])).text


def test_nothing_is_asked_of_a_network_and_all_pictures_have_words(tmp_path):
    page = make(tmp_path, fake_run(tmp_path / "a"), fake_run(tmp_path / "b", frames=4))
    for tag, name, value in page.attributes:
        assert "http://" not in value, (tag, name)
        assert "https://" not in value, (tag, name)
        if name in ("src", "href"):
            assert value.startswith(("data:", "#"))
    images = sum(tag == "img" and name == "src" for tag, name, _ in page.attributes)
    alts = [value for tag, name, value in page.attributes if tag == "img" and name == "alt"]
    assert len(alts) == images > 20
    assert all(alts)


def test_what_users_wrote_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>&\""
    folder = fake_run(
        tmp_path / "<b>run & co",
        channels=(evil,),
        command=evil,
        status=evil,
        data={"source": evil, "channels": {"input": [evil], "target": [evil]}, "units": {evil: evil}},
        environment={evil: evil},
        reason=evil,
    )
    page = make(tmp_path, folder)
    assert (tmp_path / "report.html").read_text().count("<script>") == 1
    assert "<b>run & co" in page.text
    assert "alert('x')" in page.text


def test_what_is_missing_is_said(tmp_path):
    folder = fake_run(tmp_path / "bare")
    for name in ("history.csv", "metrics.json", "examples.npz"):
        (folder / name).unlink()
    page = make(tmp_path, folder)
    for words in ("bare has no history.csv", "no metrics.json", "no predictions to show", "no spectrum of the error"):
        assert words in page.text
    assert "t1 evaluate" in page.text
    assert "None of these runs has been evaluated" in page.text
    assert not any(tag == "img" for tag, _, _ in page.attributes)


def test_a_description_of_its_format_alone_is_enough(tmp_path):
    folder = fake_run(tmp_path / "a")
    (folder / "run.json").write_text('{"format": "transform-once run 1"}')
    page = make(tmp_path, folder)
    assert "The command that made it is not recorded." in page.text


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="at least one run folder"):
        report([])
    with pytest.raises(TypeError, match="list of run folders"):
        report(str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        report([tmp_path / "nothing"])
    with pytest.raises(ValueError, match=r"has no run\.json"):
        report([tmp_path])
    folder = fake_run(tmp_path / "a")
    with pytest.raises(ValueError, match="is a folder: give the name of the page"):
        report([folder], tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights \(model\.safetensors\)"):
        report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", "{", "is not JSON"),
        ("run.json", "[1]", "holds a list"),
        ("run.json", "{}", "is not a transform-once run 1"),
        ("metrics.json", "nonsense", "is not JSON"),
        ("history.csv", "epoch,loss\n1,2\n", "has no column member"),
        ("history.csv", ",".join(COLUMNS) + "\n0,1,1,1,1,high,1\n", "must hold numbers only"),
        ("examples.npz", "nonsense", "cannot be read"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, name, content, words):
    folder = fake_run(tmp_path / "a")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        report([folder], tmp_path / "report.html")
    assert str(folder / name) in str(caught.value)


def test_examples_that_do_not_fit_are_one_sentence(tmp_path):
    folder = fake_run(tmp_path / "a")
    np.savez(folder / "examples.npz", target=np.zeros((1, 1, 4, 4)), prediction=np.zeros((1, 1, 4, 5)))
    with pytest.raises(ValueError, match="they must agree"):
        report([folder], tmp_path / "report.html")
    np.savez(folder / "examples.npz", target=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read"):
        report([folder], tmp_path / "report.html")


def test_a_history_with_nan_is_drawn_and_said(tmp_path):
    folder = fake_run(tmp_path / "a")
    write_history(folder, [(0, 1, 1, 1, 1, 0.5, ""), (0, 2, 2, 2, 1, "nan", "nan"), (0, 3, 3, 3, 1, "nan", 0.2)])
    page = make(tmp_path, folder)
    assert "The loss of a is not finite at 2 points, first in epoch 2." in page.text
    assert ("img", "alt", "training loss and validation error of every run against epoch") in page.attributes
    write_history(folder, [(0, 1, 1, 1, 1, "nan", "")])
    page = make(tmp_path, folder)
    assert "There is no learning curve to draw" in page.text
    assert not any("every run against" in value for _, name, value in page.attributes if name == "alt")
    (folder / "history.csv").write_text(",".join(COLUMNS) + "\n0,1,1")  # a line that is being written
    assert "has no history.csv" in make(tmp_path, folder).text


def test_a_diverged_seed_is_not_averaged_away(tmp_path):
    good, bad = fake_run(tmp_path / "a"), fake_run(tmp_path / "b", seed=1)
    metrics = json.loads((bad / "metrics.json").read_text()) | {"relative_l2": None}
    (bad / "metrics.json").write_text(json.dumps(metrics))
    page = make(tmp_path, good, bad)
    assert row_of(page, "T1 data.h5")[2] == "not finite"
    assert row_of(page, "a")[2] == "0.1"


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_constant_fields_and_a_single_sample_are_shown(tmp_path, value):
    folder = fake_run(tmp_path / "a")
    flat = np.full((1, 1, 16, 12), value)
    with np.load(folder / "examples.npz") as file:
        spectra = {"target_spectrum": 0 * file["target_spectrum"], "error_spectrum": 0 * file["error_spectrum"]}
    np.savez(folder / "examples.npz", input=flat, target=flat, prediction=flat, **spectra)
    page = make(tmp_path, folder)
    assert page.text.count(f"{figures(value)} everywhere") >= 3
    assert "Test sample 0" in page.text


def test_fields_that_are_not_finite_are_grey(tmp_path):
    folder = fake_run(tmp_path / "a")
    field = np.ones((1, 1, 16, 12))
    np.savez(folder / "examples.npz", input=field, target=field, prediction=np.nan * field)
    assert "192 of 192 points are not finite" in make(tmp_path, folder).text


def test_masked_points_are_grey_and_do_not_count(tmp_path):
    folder = fake_run(tmp_path / "a", frames=2)
    target = np.ones((1, 2, 1, 16, 12))
    mask = np.zeros_like(target, dtype=bool)
    mask[..., 0] = True
    np.savez(folder / "examples.npz", target=target, prediction=np.where(mask, 99.0, 1.25), mask=mask)
    text = make(tmp_path, folder).text
    assert "16 of 192 points are masked" in text
    assert "frame 1 of 2: relative L2 0.25" in text


@pytest.mark.parametrize(("grid", "frames"), [((8,), None), ((8,), 3), ((4, 5, 6), None), ((1,), None), ((1, 1), None)])
def test_fields_of_one_and_three_axes_and_a_single_mode_are_shown(tmp_path, grid, frames):
    page = make(tmp_path, fake_run(tmp_path / "a", grid=grid, frames=frames))
    alts = [value for tag, name, value in page.attributes if tag == "img" and name == "alt"]
    assert any(alt.startswith("truth") for alt in alts)
    assert any(alt.startswith("error of vorticity") for alt in alts)
    assert any("by wave number" in alt for alt in alts)
    assert ("plane 2 of 4 along the first axis" in page.text) == (len(grid) == 3)


def test_airfoils_show_velocity_on_pressure(tmp_path):
    page = make(tmp_path, fake_run(tmp_path / "a", channels=("pressure", "velocity_x", "velocity_y")))
    assert "Arrows on the pressure are the velocity." in page.text
    drawings = [value for tag, name, value in page.attributes if tag == "path" and name == "class"]
    assert drawings.count("arrows") == 4  # truth and prediction of two samples


def test_a_rollout_has_a_frame_for_every_stop_of_its_slider(tmp_path):
    page = make(tmp_path, fake_run(tmp_path / "a", frames=30, error=0.125))
    assert ("input", "max", "11") in page.attributes
    frames = [value for _, name, value in page.attributes if name == "data-caption"]
    assert len(frames) == 12
    assert frames[0] == "t = 0: relative L2 0.125"
    assert frames[-1].startswith("t = 14.5")


def test_the_same_runs_give_the_same_page(tmp_path):
    folder = fake_run(tmp_path / "a")
    first = report([folder], tmp_path / "report.html").read_bytes()
    assert report([folder], tmp_path / "report.html").read_bytes() == first


@pytest.mark.parametrize("transform", ["dct", "dft"])
def test_what_evaluate_writes_is_what_the_page_reads(tmp_path, transform):
    folder = fake_run(tmp_path / "a", grid=(8, 8))
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    fields = Fields(input=x, target=2 * x, channels=("vorticity",), grid="node", periodic=True)
    model = T1(in_channels=1, out_channels=1, resolution=(8, 8), modes=3, width=4, depth=1, transform=transform)
    evaluation = full_evaluation(model, fields, progress=False)
    save_evaluation(folder, evaluation)
    page = make(tmp_path, folder)
    split = evaluation.numbers["kspace"]
    expected = [
        evaluation.numbers["relative_l2"],
        split["J"],
        split["R_o"],
        *map(evaluation.numbers.get, ("mae", "psnr")),
    ]
    assert [stated(cell)[0] for cell in row_of(page, "T1 a, data.h5")[2:7]] == pytest.approx(expected, rel=1e-3)
    assert f"{split['kept']} of {evaluation.arrays['kept'].size} coefficients" in page.text
    assert f"Test sample {evaluation.arrays['index'][0]}: relative L2" in page.text


def test_names_of_runs_tell_them_apart(tmp_path):
    folders = [fake_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["a/run", "b/run"]


def test_twenty_runs_stay_small(tmp_path, capsys):
    folder = fake_run(tmp_path / "0", grid=(128, 128), frames=12)
    folders = [folder, *(shutil.copytree(folder, tmp_path / str(i)) for i in range(1, 20))]
    report_verb(folders, tmp_path / "report.html")  # noise, which no PNG can make small
    assert (tmp_path / "report.html").stat().st_size < 10e6
    assert "report.html: 20 runs" in capsys.readouterr().out


def test_numbers_for_people():
    assert figures(None) == "–"
    assert figures(math.nan) == "not finite"
    assert figures(1234567) == "1\u202f234\u202f567"
    assert figures(0.000123456) == "0.0001235"
    assert mean_and_deviation([]) == "–"
    assert mean_and_deviation([0.5, 0.5]) == "0.5"
    assert mean_and_deviation([1.0, 2.0]) == "1.50 ± 0.71"
    assert mean_and_deviation([1e-9, 2e-9]) == "1.5e-09 ± 7.1e-10"


PROBE = """<script>
const problems = [];
window.addEventListener("error", event => problems.push("error: " + (event.message || event.target.src)), true);
window.addEventListener("unhandledrejection", event => problems.push("rejected: " + event.reason));
console.error = (...words) => problems.push("console: " + words.join(" "));
</script>"""
EXAMINE = """<script>
window.addEventListener("load", () => {
  const slider = document.querySelector(".film input"), frames = [...document.querySelectorAll(".film .frame")];
  const visible = () => frames.flatMap((frame, i) => frame.getBoundingClientRect().height > 0 ? [i] : []);
  const before = visible();
  slider.value = 2;
  slider.dispatchEvent(new Event("input"));
  const after = visible(), said = document.querySelector(".film output").value;
  const shown = [...document.images].filter(image => !image.closest("[hidden]"));
  const empty = shown.filter(i => i.clientWidth * i.clientHeight === 0 || i.naturalWidth === 0).map(i => i.alt);
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = text => rgb(text).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if ((rgb(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let contrast = 21, faint = "";
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const pair = [light(getComputedStyle(element).color), light(ground(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < contrast) { contrast = ratio; faint = element.textContent.slice(0, 40); }
  }
  const requests = performance.getEntriesByType("resource").map(entry => entry.name)
    .filter(name => !name.startsWith("data:"));
  parent.postMessage(JSON.stringify({problems, before, after, said, empty, contrast, faint, requests,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, pictures: shown.length, width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth}), "*");
});
</script>"""
# A window cannot be as narrow as a phone; a frame inside it can.
AROUND = """<iframe src="probe.html" style="width:{width}px;height:844px;border:0"></iframe><pre id="result"></pre>
<script>
addEventListener("message", event => {{ document.getElementById("result").textContent = event.data; }});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
@pytest.mark.parametrize(("width", "dark"), [(380, False), (1280, True)])
def test_a_browser_shows_the_page(tmp_path, width, dark):
    long = "a-very-long-name-of-a-run-without-any-place-to-break-it-apart-0123456789"
    folders = [
        fake_run(tmp_path / long, frames=4, members=2),
        fake_run(tmp_path / "b"),
        fake_run(tmp_path / "c", seed=1),
    ]
    html = report(folders, tmp_path / "report.html").read_text().replace("<head>", "<head>" + PROBE, 1)
    (tmp_path / "probe.html").write_text(html.replace("</body>", EXAMINE + "</body>"))
    page = tmp_path / "around.html"
    page.write_text(AROUND.format(width=width))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--window-size=1400,900",
        "--virtual-time-budget=5000",
        "--dump-dom",
        page.as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="result">(.+?)</pre>', shown)
    assert found, "the page did not finish loading"
    result = json.loads(unescape(found[1]))
    assert result["problems"] == []
    assert result["requests"] == []
    assert (result["before"], result["after"]) == ([0], [2])
    assert result["said"] == "t = 1: relative L2 0.1"
    assert result["empty"] == []
    assert result["pictures"] > 20
    assert result["contrast"] >= 4.5, result["faint"]
    assert result["dark"] == dark
    assert result["width"] == width
    assert result["overflow"] <= 0  # wide tables scroll inside their own box


@pytest.mark.parametrize(("number", "words"), [(1, ("1 epoch and", "1 sample went")), (2, ("2 epochs", "2 samples"))])
def test_one_is_not_several(tmp_path, number, words):
    training = {"batch_size": number, "learning_rate": 0.001, "seed": 0}
    folder = fake_run(tmp_path / "a", training=training, epochs_done=number)
    page = report([folder], tmp_path / "report.html").read_text()
    assert all(word in page for word in words)
