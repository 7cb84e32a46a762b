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
