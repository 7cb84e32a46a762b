"""One page for one or several runs: HTML with everything inside it, to be opened from disk."""

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from transform_once.files import atomic_path
from transform_once.reports.runs import Group, Run, group_runs, mean_and_deviation, read_runs, short

BYTES = 5.5e6  # of pictures on a page, before they become text, which makes them a third longer
BYTES_OF_A_RUN = 1.2e6
MB = 1e6

HEADINGS = (
    "model",
    "runs",
    "relative L2",
    "J",
    "R_o",
    "MAE",
    "PSNR in dB",
    "parameters",
    "size in MB",
    "epochs",
    "training in s",
    "ms per step",
)
METRICS = (("relative_l2",), ("kspace", "J"), ("kspace", "R_o"), ("mae",), ("psnr",))
ABOUT = (
    (("model", "parameters"), 1.0),
    (("model", "bytes"), 1 / MB),
    (("epochs_done",), 1.0),
    (("seconds",), 1.0),
    (("seconds_per_step",), 1e3),
)


def report(runs: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write one self-contained HTML page on the runs and return its path, by default `report.html` in this folder.

    A run is a folder that training wrote: run.json and weights must be there; what else is missing is said on the page
    (history.csv for learning curves, metrics.json and examples.npz from `evaluate`). Runs that differ in their seed
    only are one line of the comparison: mean ± standard deviation (n − 1) over the runs, and over members of ensembles.
    """
    output = Path("report.html" if output is None else output)
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the name of the page to write, such as {output / 'report.html'}")
    page = _page(read_runs(runs), shlex.join(["t1", "report", *map(str, runs), "--output", str(output)]))
    with atomic_path(output) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return output


def report_verb(runs: list[Path], output: Path = Path("report.html")) -> None:
    """Show runs on one self-contained HTML page, side by side: errors, learning curves, predictions, k-space.

    Args:
        runs: Folders written by `t1 train`; runs that differ in their seed only are one line, mean ± deviation.
        output: The page to write (.html); it needs no network and opens from disk.
    """
    path = report(runs, output)
    print(f"{path}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {path.stat().st_size / MB:.1f} MB")


def _page(runs: Sequence[Run], command: str) -> str:
    from transform_once import __version__

    groups = group_runs(runs)
    first = runs[0]
    title = f"{first.model} on {first.source}" if len(runs) == 1 else f"{len(runs)} runs compared"
    allowed = min(BYTES_OF_A_RUN, BYTES / len(runs))
    anchors = {run.name: f"run-{number}" for number, run in enumerate(runs, start=1)}
    sections = "".join(_run(run, anchors[run.name], allowed) for run in runs)
    folder = files("transform_once.reports")
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p class="lede">{escape(_summary(groups))}</p></header>
<main>
<section>{_comparison(groups, anchors)}</section>
<section><h2>Learning curves</h2>{_curves(groups)}</section>
{sections}
</main>
<footer><p>Made by transform-once {escape(__version__)} from the files of the runs. To make this page again:</p>
<pre><code>{escape(command)}</code></pre></footer>
<script>
{script}</script>
</body>
</html>
"""


def _summary(groups: Sequence[Group]) -> str:
    """The best of the runs in a sentence, where they can be compared."""
    errors = [group.numbers("relative_l2") for group in groups]
    judged = [(float(np.mean(e)), g, e) for e, g in zip(errors, groups, strict=True) if e and np.isfinite(e).all()]
    if not judged:
        return "None of these runs has been evaluated on test data." if not any(errors) else ""
    _, best, values = min(judged, key=lambda entry: entry[0])
    if len(groups) == 1:
        return f"Relative L2 error on test data: {mean_and_deviation(values)}."
    if len({(run.source, str(run.part("data").get("fingerprint"))) for group in groups for run in group.runs}) > 1:
        return "The runs were trained on different data: compare errors within the same data only."
    return f"Lowest mean relative L2 error on test data: {mean_and_deviation(values)}, by {best.label}."


def _comparison(groups: Sequence[Group], anchors: Mapping[str, str]) -> str:
    head = "".join(f'<th scope="col">{_symbol(name)}</th>' for name in HEADINGS)
    rows = []
    for group in groups:
        single = group.runs[0] if len(group.runs) == 1 else None
        name, small = escape(group.label), _data(group.runs[0])
        if single is not None:
            name, small = f'<a href="#{anchors[single.name]}">{name}</a>', f"{single.name}, {small}"
        name += f" <small>{escape(small)}</small>"
        rows.append(_row("", name, group, [group.numbers(*path) for path in METRICS]))
        for run in group.runs if single is None or len(single.numbers("relative_l2")) > 1 else ():
            own = [[] if (n := run.number(*path)) is None else [n] for path in METRICS]
            words = ", mean prediction" if len(run.numbers("relative_l2")) > 1 else ""
            link = f'<a href="#{anchors[run.name]}">{escape(run.name)}</a>{words}'
            rows.append(_row(' class="one"', link, Group(run.name, [run]), own))
    note = (
        "Errors are of the test data, in physical units. ± is the standard deviation (n − 1) over runs that differ in "
        "their seed only, or over the members of an ensemble, whose mean prediction has a line of its own. The error "
        "splits into J on the kept modes and R_o on the others."
    )
    return (
        '<div class="scroll runs" tabindex="0" role="region" aria-label="comparison of runs"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div><p class=folder>{_symbol(note)}</p>"
    )


def _row(kind: str, name: str, group: Group, metrics: Sequence[Sequence[float]]) -> str:
    about = [[factor * number for number in group.settings(*path)] for path, factor in ABOUT]
    texts = [mean_and_deviation(values).partition(" ± ") for values in (*metrics, *about)]
    cells = "".join(
        f"<td>{mean}{f' <small>± {deviation}</small>' if sign else ''}</td>" for mean, sign, deviation in texts
    )
    count = max(len(group.runs), *(len(values) for values in metrics))
    return f'<tr{kind}><th scope="row">{name}</th><td>{count}</td>{cells}</tr>'


def _data(run: Run) -> str:
    resolution = run.part("data").get("resolution")
    return f"{run.source}, {short(resolution)}" if resolution else run.source


def _symbol(text: str) -> str:
    return escape(text).replace("R_o", "R<sub>o</sub>")


def _curves(groups: Sequence[Group]) -> str:
    from transform_once.reports.curves import colour_of, learning_curves

    runs = [run for group in groups for run in group.runs]
    notes = [f"{run.name} has no history.csv, which training writes." for run in runs if not run.history]
    for run in runs:
        bad = [e for h in run.history.values() for e in h["epoch"][~np.isfinite(h["loss"])]]
        if bad:
            notes.append(f"The loss of {run.name} is not finite at {len(bad)} points, first in epoch {min(bad):.0f}.")
    plots = "".join(learning_curves([group.runs for group in groups], against) for against in ("epoch", "seconds"))
    if not plots:
        notes.insert(0, "There is no learning curve to draw: no run has a finite loss in its history.")
    legend = "".join(
        f'<li><svg viewBox="0 0 36 8" aria-hidden="true"><path d="M0 4H36" stroke="{colour}" stroke-width="3"'
        f' stroke-dasharray="{_DASHES[style]}"/></svg>{escape(group.label)}</li>'
        for number, group in enumerate(groups)
        for colour, style in (colour_of(number),)
    )
    shown = f'<ul class="legend">{legend}</ul><div class="plots">{plots}</div>' if plots else ""
    return shown + "".join(f"<p>{escape(note)}</p>" for note in notes)


_DASHES = {"-": "none", "--": "8 4", "-.": "8 4 2 4", ":": "2 4"}


def _run(run: Run, anchor: str, bytes_allowed: float) -> str:
    from transform_once.reports.account import account, errors, origin
    from transform_once.reports.examples import Pictures

    pictures = Pictures(run, bytes_allowed)
    return (
        f'<section class="run" id="{anchor}"><h2>{escape(f"{run.model} on {run.source}")}</h2>'
        f'<p class="folder">{escape(run.name)}</p>{account(run)}'
        f"<h3>Errors</h3>{errors(run)}"
        f"<h3>{'Rollout' if pictures.is_sequence else 'Predictions'}</h3>{pictures.samples()}"
        f"<h3>In k-space</h3>{pictures.spectra()}"
        f"<h3>How it was made</h3>{origin(run)}</section>"
    )
