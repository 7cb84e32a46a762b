"""Sections of docs/reproduction.md on climate, airfoils and smoke, made of the studies' CSV files.

Every sentence is built from the numbers of its row; the paper's stand beside ours where it has any.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transform_once.files import atomic_path
from transform_once.reports.runs import figures, mean_and_deviation
from transform_once.studies.study import Results, Row

AIM_ERROR, AIM_TIME = 1.05, 0.25  # of T1+vp: error against the best baseline's, training time against FNO's
SELECTIONS = ("low-pass", "one shared top-m set", "top-m of the other month", "top-m chosen per field")


class Paper(NamedTuple):
    """A line of the paper's tables: relative L2 (there called N-MSE), its deviation over 5 runs, hours of training."""

    error: float
    deviation: float | None
    hours: float

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:g}"
        return f"{self.error:.3f}{spread}, {self.hours:g} h"


# "Transform Once", NeurIPS 2022: the table of section 4.2, and the full benchmark of appendix B.3.
PAPER: dict[str, dict[str, Paper]] = {
    "airfoils": {
        "UNet": Paper(0.023, None, 1.3),
        "FNO": Paper(0.020, None, 6.0),
        "T1+vp": Paper(0.024, None, 1.3),
    },
    "smoke": {
        "FNO": Paper(0.232, 0.002, 32.4),
        "T1": Paper(0.239, 0.002, 8.1),
        "T1+": Paper(0.256, 0.016, 4.7),
        "T1+vp": Paper(0.228, 0.009, 4.7),
    },
}


def write_page(study: str, table: Path, page: Path) -> None:
    """Write the section of a study, "climate", "airfoils" or "smoke", into a page, between two comments.

    The page and the section are begun where they are missing; what stands outside the comments is left alone.
    """
    if study not in SECTIONS:
        raise ValueError(f"there are sections on {', '.join(SECTIONS)}; got {study!r}")
    page.parent.mkdir(parents=True, exist_ok=True)
    command = f"`t1 reproduce {study} --data FOLDER`"
    title, paragraphs = SECTIONS[study]
    rows = Results(table).rows
    if rows:
        source = os.path.relpath(table, page.parent)
        body = [*paragraphs(rows), f"Every number: [{table.name}]({source}), made by {command}."]
        pictures = sorted((page.parent / "figures").glob(f"{study}-[!q]*.png"))
        body += [f"![{path.stem}](figures/{path.name})" for path in pictures]
        if (table.parent / f"{study}.html").exists():
            body.append(
                f"The runs side by side: [{study}.html]({os.path.relpath(table.parent, page.parent)}/{study}.html)."
            )
    else:
        body = [f"Not run yet: {table.name} is missing. To make it: {command}."]
    _put(page, study, [f"## {title}", *body])


def _put(page: Path, study: str, paragraphs: Sequence[str]) -> None:
    begin, end = f"<!-- {study}: begin, written by t1 reproduce {study} -->", f"<!-- {study}: end -->"
    text = page.read_text(encoding="utf-8") if page.exists() else "# Reproduction\n"
    if (begin in text) != (end in text) or text.find(begin) > text.find(end):
        raise ValueError(f"{page} has only one of the comments {begin} and {end}, or in the wrong order: repair it")
    made = "\n\n".join([begin, *paragraphs, end])
    before, _, rest = text.partition(begin)
    text = before + made + rest.partition(end)[2] if rest else f"{text.rstrip()}\n\n{made}\n"
    with atomic_path(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _climate(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "Fields of ERA-Interim (geopotential and winds, two months on three levels, 241 × 480) and one month of hourly "
        "temperature at 2 m from ERA5 (744 hours, 33 × 49). The paper shows reconstructions of ERA5 as a picture, "
        "without numbers, and no forecasts."
    )
    own = [row for row in rows if row["table"] == "reconstruction"]
    yield "### Low-pass against top-m"
    if own:
        yield (
            "DCT coefficients that a field needs for a mean relative L2 of 1%, its mean aside. The shared set and the "
            "low-pass serve all six fields; the set of the other month is chosen on one month and judged on the "
            "other; a set chosen per field is an oracle: it must be stored with every field."
        )
        yield _table(("variable", *SELECTIONS, "in words"), [_needed(own, name) for name in _labels(own)])
        yield "The error at equal numbers of coefficients:"
        yield _table(("variable", "coefficients", *SELECTIONS, "in words"), list(_equal(own)))
    forecasts = [row for row in rows if row["table"] == "forecast"]
    yield "### Forecasts"
    if not forecasts:
        yield "Missing: the forecasts have not been run."
        return
    yield (
        "Split in time: the first 60% of the hours for training, 20% for validation, the last 20% (six days) for the "
        "test; no window crosses a border. Mean ± standard deviation over (seeds). Models learn the anomaly from the "
        "diurnal climatology of the training part. The relative L2 is of the anomaly from the mean of the training "
        "part, the skill 1 − MSE/MSE of persistence. Six days of one place are few: read differences of some percent "
        "with care."
    )
    tried = [row for row in rows if row["table"] == "search"]
    if tried:
        count = len({row["label"] for row in tried if row["label"].startswith("T1,")})
        yield (
            f"Modes and learning rate were chosen on the validation part among {count} candidates of each model. "
            "Seconds were taken one after the other on a machine that did other work too: they are no measure of speed."
        )
    heading = ("hours ahead", "forecast", "RMSE in K", "relative L2", "skill", "chosen", "s a seed", "in words")
    yield _table(heading, list(_forecasts(forecasts)))


def _needed(rows: Sequence[Row], name: str) -> list[str]:
    own = {row["selection"]: float(row["coefficients"]) for row in rows if row["label"] == name and not row["box"]}
    low, shared, other, single = (own[key] for key in SELECTIONS)
    words = (
        f"One shared set needs {shared / low:.2f} of the low-pass's coefficients, a set of the other month "
        f"{other / low:.2f}, one set for each field {single / low:.2f}."
    )
    return [name, *(figures(float(round(value))) for value in (low, shared, other, single)), words]


def _equal(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name in _labels(rows):
        own = [row for row in rows if row["label"] == name and row["box"]]
        for count in dict.fromkeys(row["coefficients"] for row in own):
            errors = {row["selection"]: float(row["error"]) for row in own if row["coefficients"] == count}
            low, _, other, single = (errors[key] for key in SELECTIONS)
            words = f"Of low-pass's error: set of the other month {other / low:.2f}, one per field {single / low:.2f}."
            yield [name, figures(float(count)), *(f"{errors[key]:.3g}" for key in SELECTIONS), words]


def _forecasts(rows: Sequence[Row]) -> Iterator[list[str]]:
    trained = {row["label"] for row in rows if row.get("seconds")}
    for lead in sorted({int(row["lead"]) for row in rows}):
        own = [row for row in rows if int(row["lead"]) == lead]
        simple = [row for row in own if row["label"] not in trained]
        best = min(simple, key=lambda row: float(row["rmse"])) if simple else None
        for label, way in dict.fromkeys((row["label"], row.get("way") or "") for row in own):
            group = [row for row in own if (row["label"], row.get("way") or "") == (label, way)]
            rmse = statistics.fmean(_values(group, "rmse"))
            skill = statistics.fmean(_values(group, "skill"))
            words = f"{abs(skill):.0%} of persistence's squared error {'gone' if skill >= 0 else 'added'}"
            words = "What a forecast must beat" if label == "persistence" else words
            if label in trained and best is not None:
                words += f"; {_against(rmse, float(best['rmse']))} {best['label']}, the best without a model"
            chosen = f"modes {group[0]['modes']}, rate {group[0]['learning_rate']}" if label in trained else "–"
            title = label if way in ("", "directly") else f"{label}, {way}"
            numbers = [_spread(group, column) for column in ("rmse", "relative", "skill")]
            yield [str(lead), title, *numbers, chosen, _mean(group, "seconds"), f"{words}."]


def _airfoils(rows: Sequence[Row]) -> Iterator[str]:
    main = [row for row in rows if row["table"] == "main" and row["part"] == "test"]
    yield (
        f"Steady flow around airfoils at 128², from our own OpenFOAM runs: {_mean(main, 'train')} training samples and "
        f"{_mean(main, 'samples')} for the test, the paper has 8000 and 1000; no shape is in two parts, and each seed "
        "has another fifth of the shapes for the test. Relative L2 of p/|v|², u/|v| and v/|v| over the whole image, as "
        "in the paper, where every prediction is zero inside the airfoil; mean ± standard deviation over (seeds), of "
        "the samples' mean and median. Models learn the points outside, with the mirror symmetry, for seconds of "
        "training and not for epochs, the T1s for a quarter of the others'; the weights were chosen on the validation "
        "part, and the optimiser among two for each on that of the first split."
    )
    if main:
        heading = (
            "model",
            "relative L2",
            "median",
            "p",
            "u",
            "v",
            "optimiser",
            "updates",
            "s a seed",
            "paper",
            "in words",
        )
        lines = []
        for label in _labels(main):
            group = [row for row in main if row["label"] == label]
            errors = (_spread(group, c) for c in ("relative_l2", "median", "pressure", "velocity_x", "velocity_y"))
            how = (group[0]["optimizer"], _mean(group, "updates"), _mean(group, "seconds"))
            lines.append([label, *errors, *how, str(PAPER["airfoils"].get(label, "–")), _verdict(main, label)])
        yield _table(heading, lines)
        yield _hardware(main)
    else:
        yield "Missing: the main table has not been run."
    floors = {row["modes"]: float(row["relative_l2"]) for row in rows if row["table"] == "floor"}
    found = ", ".join(f"{floor:.4f} with {modes} modes" for modes, floor in floors.items())
    yield f"What dropping modes costs, airfoils filled with what the kept modes can hold: {found or 'missing'}."
    yield "### Samples, symmetry, scaling, mask"
    own, lines = [row for row in rows if row["table"] in ("samples", "ablation") and row["part"] == "test"], []
    for label, what in dict.fromkeys((row["label"], _changed(row)) for row in own):
        group = [row for row in own if (row["label"], _changed(row)) == (label, what)]
        seeds = {row["seed"] for row in group}
        whole = [row for row in main if row["label"] == label and row["seed"] in seeds]
        words = f"{_ratio(group, whole)} times the error of the same seeds with all of them."
        lines.append([label, what, *(_spread(group, c) for c in ("relative_l2", "median", "validation")), words])
    columns = ("model", "changed", "relative L2", "median", "on validation shapes", "in words")
    yield _table(columns, lines) if lines else "Missing: not run yet."
    yield "### On samples of another group"
    original, lines = [row for row in rows if row["table"] == "main" and row["part"] == "original"], []
    for label in _labels(original):
        group, ours = ([row for row in part if row["label"] == label] for part in (original, main))
        errors = (_spread(group, c) for c in ("relative_l2", "median", "pressure"))
        lines.append([label, *errors, f"{_ratio(group, ours)} times the error on our own test samples."])
    yield _table(("model", "relative L2", "median", "p", "in words"), lines) if lines else "Missing: not run yet."


def _changed(row: Row) -> str:
    if row["table"] == "samples":
        return f"{row['train']} samples"
    changes = {"symmetric": "no mirror symmetry", "scaled": "physical units", "masked": "zeros inside to be learned"}
    return next(words for what, words in changes.items() if row[what] == "False")


def _verdict(rows: Sequence[Row], label: str) -> str:
    """What a line of the main table says: a T1 against the baselines, a baseline against the paper."""
    means = {name: _finite([row for row in rows if row["label"] == name], "relative_l2") for name in _labels(rows)}
    error, paper = means[label], PAPER["airfoils"].get(label)
    if error is None:
        return "Diverged."
    rivals = {name: mean for name, mean in means.items() if name in ("UNet", "FNO") and mean is not None}
    if not label.startswith("T1") or "FNO" not in rivals:
        return f"{error / paper.error:.1f} times the paper's error, on other data." if paper else "Not in the paper."
    best = min(rivals, key=lambda name: rivals[name])
    columns = ("relative_l2", "median", "seconds")
    pairs = [(o, t) for o in rows for t in rows if (o["label"], t["label"], o["seed"]) == (label, best, t["seed"])]
    both = [pair for pair in pairs if all(math.isfinite(float(row["relative_l2"])) for row in pair)]  # of equal splits
    if not both:
        return "No seed in common with the best baseline yet."
    (error, middle, own), (other, half, _) = (
        [statistics.fmean(float(row[column]) for row in side) for column in columns] for side in zip(*both, strict=True)
    )
    slow = _finite([row for row in rows if row["label"] == "FNO"], "seconds") or 1.0
    words = _aimed(error / other, own / slow, best) + f" Of the medians the ratio is {middle / half:.2f}."
    if len(both) > 1:
        ratios = [float(ours["relative_l2"]) / float(theirs["relative_l2"]) for ours, theirs in both]
        words += f" Split by split it is {min(ratios):.2f} to {max(ratios):.2f}."
    return words if paper else f"{words} Not in the paper."


def _aimed(error: float, seconds: float, best: str) -> str:
    """A sentence on what T1+vp should reach, from ratios to the best baseline's error and to FNO's time."""
    met = "met" if error <= AIM_ERROR and seconds <= AIM_TIME else "not met"
    return (
        f"{error:.3f} times the error of {best}, the best baseline, in {seconds:.2f} of FNO's training time: the aim "
        f"(at most {AIM_ERROR} and {AIM_TIME}) is {met}."
    )


def _smoke(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "Rollouts over ten steps at 1062 × 600 after equal seconds of training, three steps in the loss, H = 1, order "
        "1. The paper trains on 64 recordings for hours; these are other data and minutes, so that only the order of "
        "the models compares. Mean ± standard deviation over (seeds); persistence says that nothing moves."
    )
    for source, words in (
        ("plumes", "Plumes of our own solver"),
        ("recording", "The real recording: trained on cameras 0, 1 and 3, tested on camera 2, the same plume"),
    ):
        yield f"### {words}"
        main = [row for row in rows if row["table"] == source and row["kind"] == "all"]
        if not main:
            yield "Missing: not run yet."
            continue
        size = json.loads(main[0]["case"])["options"].get("size")
        if isinstance(size, list):
            yield f"{size[0]} plumes of {size[1]} frames; for training, validation and test as 64 to 20 to 20."
        heading = ("model", "relative L2", "MAE, step 1", "MAE, step 10", "PSNR in dB", "updates", "s a seed", "paper")
        lines = [_smoke_line(main, label) for label in _labels(main)]
        yield _table((*heading, "in words"), lines)
        yield _hardware(main)
        kept = [row for row in rows if row["table"] == f"{source}: truncation"]
        if kept:
            found = ", ".join(f"{row['modes']}: {float(row['relative_l2']):.3g}" for row in kept)
            yield f"Relative L2 of the judged frames after the lowest m × m DCT modes, by m: {found}."
    yield from _time(rows)
    own = [row for row in rows if row["table"] == "plumes: integrator" and row["kind"] == "all"]
    if own:
        yield f"### Integrators of T1, {float(own[0]['budget']):g} seconds of training each"
        best = min(own, key=lambda row: float(row["relative_l2"]))
        lines = []
        for row in own:
            ratio = float(row["relative_l2"]) / float(best["relative_l2"])
            words = "The best." if row is best else f"{ratio:.2f} times the error of the best."
            numbers = [f"{float(row[c]):.4g}" for c in ("relative_l2", "mae_1", "mae_10")]
            lines.append([row["order"], row["history"], *numbers, words])
        yield _table(("order", "H", "relative L2", "MAE, step 1", "MAE, step 10", "in words"), lines)


def _time(rows: Sequence[Row]) -> Iterator[str]:
    """Errors after less time than the whole budget; what T1+vp has after a quarter of it."""
    tables = ("plumes", "plumes: time")
    own = [row for row in rows if row["table"] in tables and row["kind"] == "all" and row.get("budget")]
    budgets = sorted({float(row["budget"]) for row in own})
    if len(budgets) < 2:
        return
    yield "### Error against seconds of training; every run has its schedule to the end"
    found = {
        (label, budget): [row for row in own if row["label"] == label and float(row["budget"]) == budget]
        for label in _labels(own)
        for budget in budgets
    }
    lines = [[label, *(_spread(found[label, budget], "relative_l2") for budget in budgets)] for label in _labels(own)]
    yield _table(("model", *(f"{budget:g} s" for budget in budgets)), lines)
    reference = _finite(found.get(("FNO", budgets[-1]), []), "relative_l2")
    early = [budget for budget in budgets if budget <= AIM_TIME * budgets[-1]]
    if not early or reference is None:
        return
    after = {label: _finite(found[label, early[-1]], "relative_l2") for label in _labels(own) if label.startswith("T1")}
    ratios = {label: error / reference for label, error in after.items() if error is not None}
    if aimed := ratios.pop("T1+vp", None):
        yield f"T1+vp after {early[-1]:g} s: {_aimed(aimed, early[-1] / budgets[-1], 'FNO')}"
    if ratios:
        others = ", ".join(f"{label} {ratio:.3f}" for label, ratio in ratios.items())
        yield f"The others after {early[-1]:g} s, in errors of the FNO after {budgets[-1]:g} s: {others}."


def _smoke_line(rows: Sequence[Row], label: str) -> list[str]:
    group, still = ([row for row in rows if row["label"] == name] for name in (label, "persistence"))
    numbers = [_spread(group, column) for column in ("relative_l2", "mae_1", "mae_10", "psnr")]
    error, floor = _finite(group, "relative_l2"), _finite(still, "relative_l2")
    fourier = _finite([row for row in rows if row["label"] == "FNO"], "relative_l2")
    words = "The floor of honesty: nothing moves." if label == "persistence" else "Diverged."
    if label != "persistence" and error is not None:
        rivals = {"persistence": floor, **({"FNO": fourier} if label != "FNO" else {})}
        words = ", ".join(f"{_against(error, other)} {name}" for name, other in rivals.items() if other is not None)
        words = f"{words}, after the same seconds."
    return [
        label,
        *numbers,
        _mean(group, "updates"),
        _mean(group, "seconds"),
        str(PAPER["smoke"].get(label, "–")),
        words,
    ]


def _table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _labels(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def _values(rows: Sequence[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row.get(column)]


def _finite(rows: Sequence[Row], column: str) -> float | None:
    """The mean, if there are numbers and all are finite."""
    values = _values(rows, column)
    return statistics.fmean(values) if values and all(map(math.isfinite, values)) else None


def _spread(rows: Sequence[Row], column: str) -> str:
    """Mean ± standard deviation, and the number of seeds."""
    values = _values(rows, column)
    return f"{mean_and_deviation(values)} ({len(values)})" if len(values) > 1 else mean_and_deviation(values)


def _mean(rows: Sequence[Row], column: str) -> str:
    values = _values(rows, column)
    return f"{statistics.fmean(values):.3g}" if values else "–"


def _ratio(rows: Sequence[Row], others: Sequence[Row]) -> str:
    above, below = _finite(rows, "relative_l2"), _finite(others, "relative_l2")
    return f"{above / below:.2f}" if above is not None and below is not None else "?"


def _against(error: float, other: float) -> str:
    """How an error compares with another one, in front of its name."""
    change = error / other - 1
    return f"{abs(change):.0%} {'worse' if change > 0 else 'better'} than"


def _hardware(rows: Sequence[Row]) -> str:
    return (
        f"Measured on {', '.join(sorted({row['hardware'] for row in rows if row.get('hardware')})) or 'nothing yet'}."
    )


SECTIONS: Mapping[str, tuple[str, Callable[[Sequence[Row]], Iterator[str]]]] = {
    "climate": ("Climate", _climate),
    "airfoils": ("Flow around airfoils", _airfoils),
    "smoke": ("Turbulent smoke", _smoke),
}
