"""The section on smoke of the page of reproductions, made of smoke.csv."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from transform_once.studies.page import (
    AIM_TIME,
    Paper,
    against,
    aimed,
    finite,
    hardware,
    labels,
    markdown,
    mean,
    spread,
    write_study,
)
from transform_once.studies.study import Row

PAPER = {  # the full benchmark of appendix B.3
    "FNO": Paper(0.232, 0.002, 32.4),
    "T1": Paper(0.239, 0.002, 8.1),
    "T1+": Paper(0.256, 0.016, 4.7),
    "T1+vp": Paper(0.228, 0.009, 4.7),
}


def write_page(table: Path, page: Path) -> None:
    """Write the section into a page, from the rows of a table."""
    write_study("smoke", "Turbulent smoke", table, page, _paragraphs)


def _paragraphs(rows: Sequence[Row]) -> Iterator[str]:
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
        lines = [_smoke_line(main, label) for label in labels(main)]
        yield markdown((*heading, "in words"), lines)
        yield hardware(main)
        kept = [row for row in rows if row["table"] == f"{source}: truncation"]
        if kept:
            found = ", ".join(f"{row['modes']}: {float(row['relative_l2']):.3g}" for row in kept)
            yield f"Relative L2 of the judged frames after the lowest m × m DCT modes, by m: {found}."
        yield from _time(rows, source)
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
        yield markdown(("order", "H", "relative L2", "MAE, step 1", "MAE, step 10", "in words"), lines)


def _time(rows: Sequence[Row], source: str) -> Iterator[str]:
    """Errors after less time than the whole budget; what T1+vp has after a quarter of it."""
    tables = (source, f"{source}: time")
    own = [row for row in rows if row["table"] in tables and row["kind"] == "all" and row.get("budget")]
    budgets = sorted({float(row["budget"]) for row in own})
    if len(budgets) < 2:
        return
    yield "The relative L2 after so many seconds of training; every run has its schedule to the end:"
    found = {
        (label, budget): [row for row in own if row["label"] == label and float(row["budget"]) == budget]
        for label in labels(own)
        for budget in budgets
    }
    lines = [[label, *(spread(found[label, budget], "relative_l2") for budget in budgets)] for label in labels(own)]
    yield markdown(("model", *(f"{budget:g} s" for budget in budgets)), lines)
    reference = finite(found.get(("FNO", budgets[-1]), []), "relative_l2")
    early = [budget for budget in budgets if budget <= AIM_TIME * budgets[-1]]
    if not early or reference is None:
        return
    after = {label: finite(found[label, early[-1]], "relative_l2") for label in labels(own) if label.startswith("T1")}
    ratios = {label: error / reference for label, error in after.items() if error is not None}
    if own_ratio := ratios.pop("T1+vp", None):
        yield f"T1+vp after {early[-1]:g} s: {aimed(own_ratio, early[-1] / budgets[-1], 'FNO')}"
    if ratios:
        others = ", ".join(f"{label} {ratio:.3f}" for label, ratio in ratios.items())
        yield f"The others after {early[-1]:g} s, in errors of the FNO after {budgets[-1]:g} s: {others}."


def _smoke_line(rows: Sequence[Row], label: str) -> list[str]:
    group, still = ([row for row in rows if row["label"] == name] for name in (label, "persistence"))
    numbers = [spread(group, column) for column in ("relative_l2", "mae_1", "mae_10", "psnr")]
    error, floor = finite(group, "relative_l2"), finite(still, "relative_l2")
    fourier = finite([row for row in rows if row["label"] == "FNO"], "relative_l2")
    words = "The floor of honesty: nothing moves." if label == "persistence" else "Diverged."
    if label != "persistence" and error is not None:
        rivals = {"persistence": floor, **({"FNO": fourier} if label != "FNO" else {})}
        words = ", ".join(f"{against(error, other)} {name}" for name, other in rivals.items() if other is not None)
        words = f"{words}, after the same seconds."
    return [
        label,
        *numbers,
        mean(group, "updates"),
        mean(group, "seconds"),
        str(PAPER.get(label, "–")),
        words,
    ]
