"""The section on airfoils of the page of reproductions, made of airfoils.csv."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from transform_once.studies.page import Paper, aimed, finite, hardware, labels, markdown, mean, spread, write_study
from transform_once.studies.study import Row

PHYSICAL = "physical units"
PAPER = {  # section 4.2
    "UNet": Paper(0.023, None, 1.3),
    "FNO": Paper(0.020, None, 6.0),
    "T1+vp": Paper(0.024, None, 1.3),
}


def write_page(table: Path, page: Path) -> None:
    """Write the section into a page, from the rows of a table."""
    write_study("airfoils", "Flow around airfoils", table, page, _paragraphs)


def _paragraphs(rows: Sequence[Row]) -> Iterator[str]:
    main = [row for row in rows if row["table"] == "main" and row["part"] == "test"]
    yield (
        f"Steady flow around airfoils at 128², from our own OpenFOAM runs: {mean(main, 'train')} training samples and "
        f"{mean(main, 'samples')} for the test, the paper has 8000 and 1000; no shape is in two parts, and each seed "
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
        for label in labels(main):
            group = [row for row in main if row["label"] == label]
            errors = (spread(group, c) for c in ("relative_l2", "median", "pressure", "velocity_x", "velocity_y"))
            how = (group[0]["optimizer"], mean(group, "updates"), mean(group, "seconds"))
            lines.append([label, *errors, *how, str(PAPER.get(label, "–")), _verdict(main, label)])
        yield markdown(heading, lines)
        yield hardware(main)
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
        own_units = what != PHYSICAL  # otherwise the validation part was judged in others than the lines beside it
        held = spread(group, "validation") if own_units else "–"
        lines.append([label, what, *(spread(group, c) for c in ("relative_l2", "median")), held, words])
    columns = ("model", "changed", "relative L2", "median", "on validation shapes", "in words")
    yield markdown(columns, lines) if lines else "Missing: not run yet."
    yield "### On samples of another group"
    original, lines = [row for row in rows if row["table"] == "main" and row["part"] == "original"], []
    for label in labels(original):
        group, ours = ([row for row in part if row["label"] == label] for part in (original, main))
        errors = (spread(group, c) for c in ("relative_l2", "median", "pressure"))
        lines.append([label, *errors, f"{_ratio(group, ours)} times the error on our own test samples."])
    yield markdown(("model", "relative L2", "median", "p", "in words"), lines) if lines else "Missing: not run yet."


def _changed(row: Row) -> str:
    if row["table"] == "samples":
        return f"{row['train']} samples"
    changes = {"symmetric": "no mirror symmetry", "scaled": PHYSICAL, "masked": "zeros inside to be learned"}
    return next(words for what, words in changes.items() if row[what] == "False")


def _verdict(rows: Sequence[Row], label: str) -> str:
    """What a line of the main table says: a T1 against the baselines, a baseline against the paper."""
    means = {name: finite([row for row in rows if row["label"] == name], "relative_l2") for name in labels(rows)}
    error, paper = means[label], PAPER.get(label)
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
    slow = finite([row for row in rows if row["label"] == "FNO"], "seconds") or 1.0
    words = aimed(error / other, own / slow, best) + f" Of the medians the ratio is {middle / half:.2f}."
    if len(both) > 1:
        ratios = [float(ours["relative_l2"]) / float(theirs["relative_l2"]) for ours, theirs in both]
        words += f" Split by split it is {min(ratios):.2f} to {max(ratios):.2f}."
    return words if paper else f"{words} Not in the paper."


def _ratio(rows: Sequence[Row], others: Sequence[Row]) -> str:
    above, below = finite(rows, "relative_l2"), finite(others, "relative_l2")
    return f"{above / below:.2f}" if above is not None and below is not None else "?"
