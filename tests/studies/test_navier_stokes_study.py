"""The Navier-Stokes study: its protocol, cases that are run once, and a page whose numbers are those of the rows."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from transform_once.data.fields import Fields
from transform_once.evaluation.evaluate import evaluate
from transform_once.spectral.modes import irreducible_loss
from transform_once.studies import navier_stokes as study
from transform_once.studies.navier_stokes_page import write_page
from transform_once.studies.navier_stokes_protocol import FLOOR, PROTOCOL, load_protocol
from transform_once.studies.navier_stokes_results import PAPER
from transform_once.studies.study import Results
from transform_once.training import train as training

CPU = torch.device("cpu")
TIMES = ("milliseconds_per_step", "seconds_per_seed")  # what no two runs have in common
WANTED = {
    "table": ("T1+vp", "FNO"),
    "ablation": ("T1+", "T1+vp"),
    "scaling": ("T1+vp",),
    "transforms": ("T1vp DFT",),
    "modes": ("T1vp, 16 modes", "FNO"),
}


def tiny():
    """A few lines of each table at toy size: two seeds, one data set of 16² that takes no time to make."""
    whole = load_protocol()
    tables = {
        name: [dataclasses.replace(entry, data=["high"]) for entry in entries if entry.label in WANTED[name]]
        for name, entries in whole.tables.items()
    }
    tables["scaling"] = [dataclasses.replace(e, pairs=[200, 400, 800]) for e in tables["scaling"]]
    less = dataclasses.replace(whole.quick, time=0.5, pairs=50, epochs=2)
    data = {"high": whole.data["high"]}
    return dataclasses.replace(whole, tables=tables, data=data, quick=less).reduced()


def rows_in(path):
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMES} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The tiny study, run to its end: (protocol, folder)."""
    folder, protocol = tmp_path_factory.mktemp("study"), tiny()
    assert study.run_protocol(protocol, folder / "results", folder / "data", "cpu") == 0
    return protocol, folder


# The protocol


def test_the_protocol_is_that_of_the_paper():
    protocol = load_protocol()
    assert protocol.resolution == 64
    for flow, (viscosity, time) in zip(protocol.data.values(), ((1e-3, 50), (1e-4, 15)), strict=True):
        assert (flow.viscosity, flow.time) == (viscosity, time)
        assert [b - a for a, b in (flow.test, flow.validation)] == [200, 200]
    seeds = {}
    for job in protocol.jobs("table"):
        assert job.pairs == 1000
        _, settings = job.entry.configuration()
        assert (settings.epochs, settings.batch_size, settings.learning_rate, settings.gamma) == (500, 64, 1e-3, 0.5)
        assert not settings.symmetries
        seeds.setdefault((job.label, job.data), []).extend(job.seeds)
    for (label, _), numbers in seeds.items():
        assert numbers == list(range(len(numbers)))
        least = 20 if label.startswith("T1") else 5 if label in ("FNO", "FNOvp", "FNO, phase-blind as released") else 2
        assert len(numbers) >= least
    sizes = {(job.pairs, job.data) for job in protocol.jobs("scaling")}
    assert sizes == {(n, "low") for n in (1024, 2048, 4096, 8192)}
    assert {job.entry.configuration()[0].init for job in protocol.jobs("ablation")} == {"xavier", "kaiming", "vp"}


def test_transforms_keep_equal_numbers_of_real_coefficients():
    protocol = load_protocol()
    job = next(job for job in protocol.jobs("transforms") if job.label == FLOOR)
    fields = Fields(input=torch.randn(2, 1, 64, 64), target=torch.randn(2, 1, 64, 64))
    rows = {(row["transform"], row["modes"]): row for row in study._floors(job, fields)}
    assert [rows[key]["coefficients"] for key in (("dct", "24"), ("fourier", "25x23"), ("dft", "12"))] == [
        576,
        575,
        576,
    ]


@pytest.mark.parametrize(
    "protocol", [load_protocol(), load_protocol().reduced(), tiny()], ids=["paper", "quick", "tiny"]
)
def test_no_sample_is_in_two_splits_of_any_case(protocol):
    for job in protocol.jobs():
        train, validation, test = (set(job.samples[name]) for name in ("train", "validation", "test"))
        assert validation
        assert test
        assert not train & test
        assert not train & validation
        assert not validation & test


def test_tables_share_their_runs():
    protocol = load_protocol()
    everything = {job.case.name for job in protocol.jobs()}
    assert len(everything) == len(protocol.jobs())
    for table in protocol.tables:
        assert {job.case.name for job in protocol.jobs(table)} <= everything
    shared = {job.case.name for job in protocol.jobs("table")} & {job.case.name for job in protocol.jobs("ablation")}
    assert len(shared) == 2 * (1 + 1 + 2 + 2)  # T1, T1vp, T1+, T1+vp at two viscosities in so many groups of seeds


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.update(resolutoin=64), "has no key 'resolutoin'; did you mean resolution"),
        (lambda p: p.pop("seed"), "lacks the key 'seed'"),
        (lambda p: p["data"]["low"].update(tim=1), "data.low has no key 'tim'; did you mean time"),
        (lambda p: p["data"]["low"].update(test=[300, 500]), "share no sample"),
        (lambda p: p["tables"]["table"][0].update(seed=1), "has no key 'seed'; did you mean seeds"),
        (lambda p: p["tables"]["table"][0].update(data=["lo"]), "did you mean low"),
        (lambda p: p["tables"]["table"][0].update(pairs=[2000]), "high has 1000 to train on"),
        (lambda p: p["tables"]["table"][0].update(config="t1_plu"), "did you mean navier_stokes/t1_plus"),
        (lambda p: p["tables"]["table"][0].update(model={"mode": 3}), "has no key 'mode'; did you mean modes"),
        (lambda p: p["tables"]["table"][0].update(train={"epoch": 3}), "has no key 'epoch'; did you mean epochs"),
        (lambda p: p["tables"]["table"][0].update(seeds=3), "means two things"),
        (lambda p: p.update(quick=3), "quick must be names with values"),
    ],
)
def test_a_wrong_protocol_is_one_sentence(change, sentence, tmp_path):
    stored = yaml.safe_load(PROTOCOL.read_text())
    change(stored)
    path = tmp_path / "navier_stokes.yaml"
    path.write_text(yaml.safe_dump(stored))
    with pytest.raises(ValueError, match=sentence.replace("/", ".")):
        load_protocol(path)


def test_a_case_changes_its_name_with_its_settings_alone():
    protocol = load_protocol()
    names = {job.case.name for job in protocol.jobs()}
    assert names == {job.case.name for job in load_protocol().jobs()}
    assert not names & {job.case.name for job in dataclasses.replace(protocol, seed=1).jobs()}
    longer = dataclasses.replace(protocol.tables["table"][0], train={"epochs": 501})
    other = dataclasses.replace(protocol, tables={"table": [longer]}).jobs("table")
    assert not names & {job.case.name for job in other}


def test_rows_that_are_kept_belong_to_cases_of_the_protocol():
    kept = Results(Path(__file__).parents[2] / "docs" / "results" / "navier_stokes.csv").rows
    assert kept
    assert {row["case"] for row in kept} <= {job.case.name for job in load_protocol().jobs()}


# Running it


def test_the_whole_pipeline_at_toy_size(finished):
    protocol, folder = finished
    rows = Results(folder / "results" / "navier_stokes.csv").rows
    for job in protocol.jobs():
        own = [row for row in rows if row["case"] == job.case.name]
        if job.entry is None:
            assert {row["modes"] for row in own} >= {str(m) for m in protocol.splits}
            continue
        assert [int(row["seed"]) for row in own] == list(job.seeds)
        for row in own:
            assert 0 < float(row["relative_l2"]) < 2
            total = float(row["relative_l2"]) ** 2 + float(row["relative_l2_std"]) ** 2
            assert float(row["J"]) ** 2 + float(row["R_o"]) ** 2 == pytest.approx(total, rel=1e-4)
            assert row["hardware"]
            assert row["torch"] == torch.__version__
            assert row["precision"] == "float32"  # on a CPU
            assert (float(row["milliseconds_per_step"] or 0) > 0) == (job.timed or len(own) == 1)
    page = folder / "reproduction.md"
    write_page(folder / "results" / "navier_stokes.csv", page, protocol)
    text = page.read_text()
    assert "Missing" not in text
    assert "This is a toy" in text
    for name in ("table", "table-predictions-high", "scaling", "modes"):
        assert (folder / "figures" / f"navier-stokes-{name}.png").exists()
        assert f"(figures/navier-stokes-{name}.png)" in text
    assert sum(path.stat().st_size for path in (folder / "results").rglob("*.npz")) < 300_000


def test_rows_and_examples_are_what_direct_computation_gives(finished, monkeypatch, tmp_path):
    """Train one case again, and measure its models by hand."""
    protocol, folder = finished
    job = next(job for job in protocol.jobs("table") if job.label == "T1+vp")
    models, real = [], training.train

    def caught(*arguments, **options):
        run = real(*arguments, **options)
        models.append(run.models)
        return run

    monkeypatch.setattr(training, "train", caught)
    rows = list(study.rows_of(job, folder / "data", tmp_path, CPU))
    fields = Fields.open(folder / "data" / "navier_stokes-high-16.h5")
    test = fields[list(job.samples["test"])]
    with np.load(job.examples(tmp_path), allow_pickle=False) as file:
        kept = {name: file[name] for name in file.files}
    stored = Results(folder / "results" / "navier_stokes.csv").of(job.case)
    for row, old, model in zip(rows, stored, models[0], strict=True):
        with torch.no_grad():
            error = model.eval()(test.input) - test.target
        relative = (error.flatten(1).norm(dim=1) / test.target.flatten(1).norm(dim=1)).mean().item()
        assert row["relative_l2"] == pytest.approx(relative, rel=1e-5)
        assert float(old["relative_l2"]) == pytest.approx(relative, rel=1e-4)  # the same again
        held = evaluate(model, fields[list(job.samples["validation"])], progress=False)
        assert row["validation_l2"] == pytest.approx(held["relative_l2"])
        # T1+ predicts nothing outside its modes: there its error is what the target has.
        assert row[f"outside_{job.entry.configuration()[0].modes}"] == pytest.approx(row["R_o"])
    with torch.no_grad():
        np.testing.assert_allclose(kept["prediction"], models[0][0](test.input[:1]).numpy(), atol=1e-6)
    floors = {(row["transform"], row["modes"]): row for row in study._floors(job, test)}
    assert floors["dct", "4"]["relative_l2"] == pytest.approx(irreducible_loss(test.target, 4))


def test_seeds_side_by_side_are_seeds_alone(finished, tmp_path):
    protocol, folder = finished
    job = next(job for job in protocol.jobs("table") if job.label == "FNO")
    together = Results(folder / "results" / "navier_stokes.csv").of(job.case)
    alone = list(study.rows_of(dataclasses.replace(job, seeds=(1,)), folder / "data", tmp_path, CPU))
    assert alone[0]["relative_l2"] == pytest.approx(float(together[1]["relative_l2"]), rel=1e-4)
    assert float(together[0]["relative_l2"]) != float(together[1]["relative_l2"])


def test_training_sees_training_pairs_alone(finished, monkeypatch, tmp_path):
    protocol, folder = finished
    fields, real, seen = Fields.open(folder / "data" / "navier_stokes-high-16.h5"), training.train, []

    def caught(model, data, validation=None, **options):
        seen.append(data)
        assert validation is None  # the last weights are taken: nothing is chosen
        return real(model, data, validation, **options)

    monkeypatch.setattr(training, "train", caught)
    jobs = protocol.jobs("scaling")
    for job in jobs:
        seen.clear()
        list(study.rows_of(job, folder / "data", tmp_path, CPU))
        assert len(seen) == 1
        for data in seen:
            assert torch.equal(data.input, fields[list(job.samples["train"])].input)
            others = fields[[*job.samples["test"], *job.samples["validation"]]].input
            assert not (data.input[:, None] == others[None]).flatten(2).all(2).any()
    assert len({job.pairs for job in jobs}) == 3


def test_a_study_killed_between_cases_continues_to_the_same_rows(finished, monkeypatch, tmp_path):
    protocol, folder = finished
    real, done = study.rows_of, []

    def killed(job, *rest):
        if done:
            raise KeyboardInterrupt
        done.append(job.label)
        return real(job, *rest)

    monkeypatch.setattr(study, "rows_of", killed)
    with pytest.raises(KeyboardInterrupt):
        study.run_protocol(protocol, tmp_path, folder / "data", "cpu", "ablation")
    half = rows_in(tmp_path / "navier_stokes.csv")
    assert len({row["case"] for row in half}) == 1 < len(protocol.jobs("ablation"))
    monkeypatch.setattr(study, "rows_of", real)
    assert study.run_protocol(protocol, tmp_path, folder / "data", "cpu", seconds=0.0) == len(protocol.jobs()) - 1
    assert rows_in(tmp_path / "navier_stokes.csv") == half
    assert study.run_protocol(protocol, tmp_path, folder / "data", "cpu") == 0
    key = lambda row: (row["case"], row["seed"], row["transform"], row["modes"])  # noqa: E731
    rows = sorted(rows_in(tmp_path / "navier_stokes.csv"), key=key)
    assert rows == sorted(rows_in(folder / "results" / "navier_stokes.csv"), key=key)


def test_a_seed_that_diverges_is_told_and_the_others_count(finished, monkeypatch, tmp_path):
    protocol, folder = finished
    real = training.train

    def diverging(model, data, **options):
        if options.get("ensemble", 1) > 1 or options["seed"] == 1:
            raise FloatingPointError("the loss is nan")
        return real(model, data, **options)

    monkeypatch.setattr(training, "train", diverging)
    job = next(job for job in protocol.jobs("table") if job.label == "FNO")
    results = Results(tmp_path / "navier_stokes.csv")
    results.add(job.case, study.rows_of(job, folder / "data", tmp_path, CPU))
    assert [row.get("failed", "") for row in results.rows] == ["", "the loss is nan"]
    write_page(results.path, tmp_path / "page.md", protocol)
    assert "(1), 1 diverged" in (tmp_path / "page.md").read_text()


def test_other_data_are_not_taken_for_ours(finished):
    protocol, folder = finished
    with pytest.raises(ValueError, match="remove it or choose another folder"):
        study.make_data(dataclasses.replace(protocol, seed=3), "high", folder / "data", CPU)


# The page


def synthetic(path, errors, **columns):
    """Rows of the paper's protocol as if its cases had been run; `errors` gives that of (label, data, pairs, seed)."""
    protocol, results = load_protocol(), Results(path)
    for job in protocol.jobs():
        found = {seed: errors(job.label, job.data, job.pairs, seed) for seed in job.seeds}
        rows = [
            {
                "seed": seed,
                "relative_l2": e,
                "pairs": job.pairs,
                "data": job.data,
                **{k: v(job) for k, v in columns.items()},
            }
            for seed, e in found.items()
            if e is not None
        ]
        if rows:
            results.add(job.case, rows)
    return protocol


def line_of(text, heading, label):
    """The cells of a table's row below a heading."""
    part = text.split(f"### {heading}")[1].split("\n### ")[0]
    line = next(line for line in part.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_an_empty_csv_says_what_is_missing(tmp_path):
    write_page(tmp_path / "none.csv", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    jobs = load_protocol().jobs()
    assert f"0 of {len(jobs)} cases have been run. Missing: table: T1+vp (4 cases), T1+ (4 cases)" in text
    for label in {job.label for job in jobs}:
        assert f"{label} (" in text
    assert "Not run yet." in line_of(text, "Table 1", "T1+vp")[-1]
    assert "![" not in text


def test_means_deviations_and_verdicts_are_those_of_the_rows(tmp_path):
    generator = np.random.default_rng(0)
    drawn = {}

    def errors(label, data, pairs, seed):
        if pairs != 1000:
            return None
        factor = {"T1+vp": 1.02, "FNO": 0.6 if data == "high" else 1.01, "FNO, phase-blind as released": 0.97}
        paper = PAPER.get(label, {"high": (0.3,), "low": (0.3,)})[data][0]
        value = float(f"{paper * factor.get(label, 1.5) * (1 + 0.002 * generator.standard_normal()):.6g}")
        drawn.setdefault((label, data), []).append(value)
        return value

    synthetic(tmp_path / "r.csv", errors, seconds_per_seed=lambda job: 12.0)
    write_page(tmp_path / "r.csv", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    cells = line_of(text, "Table 1", "T1+vp")
    for place, data in ((2, "high"), (4, "low")):
        mean, deviation = cells[place].removesuffix(" (20)").split(" ± ")
        assert float(mean) == pytest.approx(np.mean(drawn["T1+vp", data]), abs=1e-4)
        assert float(deviation) == pytest.approx(np.std(drawn["T1+vp", data], ddof=1), rel=0.1)
    assert cells[1] == "0.257 ± 0.007"
    assert cells[3] == "0.240 ± 0.004"
    assert cells[-1].startswith("Reproduced within 2.")
    assert line_of(text, "Table 1", "FNO, phase-blind as released")[-1].startswith("Reproduced within 3.")
    words = line_of(text, "Table 1", "FNO")[-1]
    assert words.startswith("Reproduced at low ν within ")
    assert "not reproduced: high ν 40% lower" in words
    assert "loses its imaginary part" in words
    assert line_of(text, "Table 1", "T1")[-1].startswith("Not reproduced: high ν 50% higher, low ν 50% higher")
    assert line_of(text, "Table 1", "FNO, modern")[-1].startswith("Not in the paper.")
    assert "Training T1+vp takes 12 s and 12 s a seed" in text


def test_the_fno_to_compare_with_is_chosen_on_validation_pairs(tmp_path):
    """On the test pairs FNOvp would be the strongest; the validation pairs say FNO."""
    test = {"FNO": 0.30, "FNOvp": 0.20, "T1+vp": 0.25}
    held = {"FNO": 0.10, "FNOvp": 0.40, "T1+vp": 0.25}
    synthetic(
        tmp_path / "r.csv",
        lambda label, data, pairs, seed: test[label] + 1e-4 * seed if label in test and pairs == 1000 else None,
        validation_l2=lambda job: held[job.label],
    )
    write_page(tmp_path / "r.csv", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert text.count("lowest error on the validation pairs is “FNO” (0.1000)") == 2
    assert "T1+vp's error is 16.4% lower than FNO's" in text  # 0.25095 against 0.3002


def test_scaling_exponents_and_the_share_of_vp(tmp_path):
    factors = {"T1+vp": 1.0, "T1+": 2.0, "FNO": 4.0, "FNOvp": 3.0}
    law = lambda label, data, pairs, seed: factors[label] * (1 + 0.001 * seed) * pairs**-0.5 if pairs > 1000 else None  # noqa: E731
    synthetic(tmp_path / "r.csv", law)
    write_page(tmp_path / "r.csv", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    cells = line_of(text, "Scaling laws", "T1+vp")
    assert "pairs^−0.50" in cells[-1]
    assert "At 1024 pairs 50.0% lower than T1+'s. At 8192 pairs 50.0% lower than T1+'s." in cells[-1]
    assert cells[1].startswith(f"{1.001 * 1024**-0.5:.3f}")
    assert "one seed" in line_of(text, "Scaling laws", "FNOvp")[-1]
    assert (tmp_path / "figures" / "navier-stokes-scaling.png").exists()


def test_level_models_are_called_level(tmp_path):
    spread = lambda label, data, pairs, seed: 0.3 + 0.01 * (seed % 5) if pairs == 1000 else None  # noqa: E731
    synthetic(tmp_path / "r.csv", spread)
    write_page(tmp_path / "r.csv", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert line_of(text, "Ablation", "T1 Kaiming")[-1].count("level with T1's within two standard errors") == 2


def test_the_rest_of_the_page_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Reproduction\n\nbefore\n\n## Airfoils\n\nafter\n")
    write_page(tmp_path / "none.csv", page)
    first = page.read_text()
    assert first.startswith("# Reproduction\n\nbefore\n\n## Airfoils\n\nafter\n")
    page.write_text(first.replace("## Airfoils", "").rstrip() + "\n\nlast words\n")
    kept = page.read_text()
    write_page(tmp_path / "none.csv", page)
    assert page.read_text() == kept
    page.write_text(first.replace("<!-- navier-stokes: end -->", ""))
    with pytest.raises(ValueError, match="only one of the comments"):
        write_page(tmp_path / "none.csv", page)
    assert "<!-- navier-stokes: begin" in page.read_text()


@pytest.mark.slow
def test_quick_runs_every_table(tmp_path):
    study.navier_stokes(tmp_path / "results", quick=True, device="cpu", data=tmp_path / "data")
    folder = tmp_path / "results" / "quick"
    rows = Results(folder / "navier_stokes.csv").rows
    assert {row["table"] for row in rows} == {*load_protocol().tables, FLOOR}
    text = (folder / "reproduction.md").read_text()
    assert "Missing" not in text
    assert text.count("![") == 5
    before = (folder / "navier_stokes.csv").read_bytes()
    study.navier_stokes(tmp_path / "results", quick=True, device="cpu", data=tmp_path / "data")
    assert (folder / "navier_stokes.csv").read_bytes() == before
