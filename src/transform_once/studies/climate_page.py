"""The section on climate of the page of reproductions, made of climate.csv."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from transform_once.reports.runs import figures
from transform_once.studies.page import against, labels, markdown, mean, spread, values, write_study
from transform_once.studies.study import Row

SELECTIONS = ("low-pass", "one shared top-m set", "top-m of the other month", "top-m chosen per field")


def write_page(table: Path, page: Path) -> None:
    """Write the section into a page, from the rows of a table."""
    write_study("climate", "Climate", table, page, _paragraphs)


def _paragraphs(rows: Sequence[Row]) -> Iterator[str]:
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
        yield markdown(("variable", *SELECTIONS, "in words"), [_needed(own, name) for name in labels(own)])
        yield "The error at equal numbers of coefficients:"
        yield markdown(("variable", "coefficients", *SELECTIONS, "in words"), list(_equal(own)))
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
    yield markdown(heading, list(_forecasts(forecasts)))


def _needed(rows: Sequence[Row], name: str) -> list[str]:
    own = {row["selection"]: float(row["coefficients"]) for row in rows if row["label"] == name and not row["box"]}
    low, shared, other, single = (own[key] for key in SELECTIONS)
    words = (
        f"One shared set needs {shared / low:.2f} of the low-pass's coefficients, a set of the other month "
        f"{other / low:.2f}, one set for each field {single / low:.2f}."
    )
    return [name, *(figures(float(round(value))) for value in (low, shared, other, single)), words]


def _equal(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name in labels(rows):
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
            rmse = statistics.fmean(values(group, "rmse"))
            skill = statistics.fmean(values(group, "skill"))
            words = f"{abs(skill):.0%} of persistence's squared error {'gone' if skill >= 0 else 'added'}"
            words = "What a forecast must beat" if label == "persistence" else words
            if label in trained and best is not None:
                words += f"; {against(rmse, float(best['rmse']))} {best['label']}, the best without a model"
            chosen = f"modes {group[0]['modes']}, rate {group[0]['learning_rate']}" if label in trained else "–"
            title = label if way in ("", "directly") else f"{label}, {way}"
            numbers = [spread(group, column) for column in ("rmse", "relative", "skill")]
            yield [str(lead), title, *numbers, chosen, mean(group, "seconds"), f"{words}."]
