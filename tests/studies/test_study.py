"""A list of cases, run as far as time allows."""

from transform_once.studies import study


def test_no_case_is_begun_that_would_not_be_over_in_time(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(study.time, "monotonic", lambda: clock[0])
    done = []

    def work(case):
        done.append(case.label)
        clock[0] += float(case.label)
        return [{"error": 0.1}]

    cases = [study.Case("toy", "table", label) for label in ("4", "3", "2", "1")]
    results = study.Results(tmp_path / "toy.csv")
    assert study.run_study(cases, results, work, seconds=10.0, say=lambda _: None) == 1
    assert done == ["4", "3", "2"]  # after nine seconds another two would be too long
    assert study.run_study(cases, study.Results(tmp_path / "toy.csv"), work, say=lambda _: None) == 0
    assert done[3:] == ["1"]


def test_finished_cases_are_said_to_be_so(tmp_path):
    said = []
    cases = [study.Case("toy", "table", label) for label in ("first", "second", "third")]
    results, row = study.Results(tmp_path / "toy.csv"), {"error": 0.1}
    study.run_study(cases[:1], results, lambda _: [{**row, "hardware": "a large machine"}], say=said.append)
    assert said == ["[1/1] table: first"]  # nothing had been finished
    study.run_study(cases[:2], study.Results(results.path), lambda _: [row], say=said.append)
    anew = "for all anew give another --output and --runs"
    told = f"1 of 2 cases are in {results.path}, measured on a large machine; {anew}"
    assert said[1:] == [told, "[2/2] table: second"]
    study.run_study(cases[1:], study.Results(results.path), lambda _: [row], say=said.append)
    assert said[3] == f"1 of 2 cases are in {results.path}; {anew}"
