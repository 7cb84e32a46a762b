"""One run in words and numbers: what learned what, how well, and what made it."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from transform_once.messages import counted
from transform_once.reports.curves import line_plot
from transform_once.reports.examples import EVALUATE
from transform_once.reports.runs import Run, figures, short

MB = 1e6
BASES = {"dct": "DCT", "dst": "DST", "fourier": "real Fourier basis", "dft": "DFT"}
ERRORS = {
    "relative_l2": "relative L2",
    "relative_l2_std": "± over samples",
    "mse": "MSE",
    "mae": "MAE",
    "psnr": "PSNR in dB",
    "smape": "SMAPE",
}


def account(run: Run) -> str:
    """What was trained on what, in sentences, with all settings to unfold."""
    model, data, training = run.part("model"), run.part("data"), run.part("training")
    sentences = [_learner(run, model), _lesson(data), _course(run, training)]
    if run.about.get("status") in ("running", "stopped"):
        sentences.append(f"The run is not finished: its files say that it is {run.about['status']}.")
    config = settings_table(model.get("config") or {})
    shown = f"<h5>Model</h5>{config}" if config else ""
    shown += f"<h5>Training</h5>{settings_table(training)}" if training else ""
    details = f"<details><summary>All settings</summary>{shown}</details>" if shown else ""
    return f"<p>{escape(' '.join(filter(None, sentences)))}</p>{details}"


def _learner(run: Run, model: Mapping[str, Any]) -> str:
    members = run.about.get("members") or 1
    who = f"An ensemble of {members} {run.model} models" if members > 1 else f"One {run.model} model"
    size = [f"{figures(model['parameters'])} parameters"] if "parameters" in model else []
    size += [f"{figures(model['bytes'] / MB, 3)} MB"] if "bytes" in model else []
    seeds = run.about.get("seeds") or []
    words = f"{who}{' with ' if size else ''}{' in '.join(size)}{' each' if members > 1 and size else ''}"
    return words + (f" (seed {', '.join(map(str, seeds))})" if seeds else "") + " was trained."


def _lesson(data: Mapping[str, Any]) -> str:
    if not data:
        return ""
    kind = data.get("kind") or "samples"
    channels = data.get("channels") or {}
    names = {role: ", ".join(map(str, channels.get(role) or ())) for role in ("input", "target", "trajectory")}
    what = f" of {names['trajectory']}" if names["trajectory"] else ""
    what = f" from {names['input']} to {names['target']}" if names["input"] and names["target"] else what
    words = f"It saw {figures(data.get('train'))} {kind}{what}"
    words += f" on {short(data['resolution'])} points" if data.get("resolution") else ""
    periodic = data.get("periodic") or ()
    border = ["periodic"] if periodic and all(periodic) else []
    grid = [{"cell": "cell centres", "node": "nodes"}.get(str(data.get("grid")), "")] if data.get("grid") else []
    words += f" ({', '.join(filter(None, grid + border))})" if grid + border else ""
    words += f" from {data['source']}" if data.get("source") else ""
    return words + (f"; {figures(data['validation'])} others judged it on the way." if data.get("validation") else ".")


def _course(run: Run, training: Mapping[str, Any]) -> str:
    about = run.about
    words = f"Training took {counted(about.get('epochs_done') or 0, 'epoch')}"
    words += f" and {figures(about['seconds'], 3)} s" if "seconds" in about else ""
    words += f", {figures(1e3 * about['seconds_per_step'], 3)} ms a step" if "seconds_per_step" in about else ""
    words += f" ({about['captured']})" if about.get("captured") else ""
    words += f", in {about['space']}" if about.get("space") else ""
    words += f": {about['reason']}" if about.get("reason") else ""
    best = [one for one in about.get("best") or () if isinstance(one, Mapping) and "epoch" in one]
    kept = [f"epoch {one['epoch']} (validation {figures(one.get('validation'), 3)})" for one in best]
    kept = list(dict.fromkeys(kept))
    words = words.rstrip(".") + "."
    if "batch_size" in training and "learning_rate" in training:
        batch = counted(training["batch_size"], "sample")
        words += f" Steps of {batch} went with a learning rate of {training['learning_rate']:g}."
    setbacks = [one["epoch"] for one in about.get("setbacks") or () if isinstance(one, Mapping) and "epoch" in one]
    if setbacks:
        where = ", ".join(map(str, setbacks))
        words += f" The loss ran away in epoch {where}: from weights before that it went on at half the rate."
    return words + (f" The best weights are those of {', '.join(kept)}." if kept else "")


def errors(run: Run) -> str:
    """The errors of the test data, all together and by channel, their split, and by time step."""
    if not run.metrics:
        return f"<p>This run has no metrics.json: it was not evaluated on test data. {EVALUATE}</p>"
    channels = run.metrics.get("per_channel") or {}
    rows = {"all": run.metrics} if len(channels) < 2 else {"all": run.metrics, **channels}
    units = run.part("data").get("units") or {}
    names = [name for name in ERRORS if run.number(name) is not None]
    head = "".join(f'<th scope="col">{ERRORS[name]}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(f"{row} in {units[row]}" if row in units else str(row))}</th>'
        + "".join(f"<td>{_number(values.get(name))}</td>" for name in names)
        + "</tr>"
        for row, values in rows.items()
    )
    samples = run.number("samples")
    words = "" if samples is None else f"On {figures(samples)} test {'sample' if samples == 1 else 'samples'}"
    words += ", for the mean of the members:" if run.metrics.get("members") else ":"
    table = f'<div class="scroll"><table><thead><tr><th scope="col">channel</th>{head}</tr></thead>'
    return f"<p>{words}</p>{table}<tbody>{body}</tbody></table></div>{_split(run)}{_members(run)}{_over_time(run)}"


def _number(value: Any) -> str:
    return figures(value if isinstance(value, int | float) else math.nan)


def _split(run: Run) -> str:
    """J² + R_o² = L² as a bar of two parts."""
    learnt, floor = run.number("kspace", "J"), run.number("kspace", "R_o")
    if learnt is None or floor is None:
        return "<p>The metrics have no split of the error into J and R<sub>o</sub>.</p>"
    whole = learnt**2 + floor**2
    if not math.isfinite(whole) or whole == 0:
        return f"<p>J is {_number(learnt)} and R<sub>o</sub> is {_number(floor)}: there is nothing to split.</p>"
    share = learnt**2 / whole
    words = f"J² + R_o² = L²: {figures(learnt, 3)}² + {figures(floor, 3)}² = {figures(math.sqrt(whole), 3)}²"
    split = run.metrics["kspace"]
    where = (
        f", split at the {short(split['modes'])} lowest modes of the {BASES.get(run.transform, run.transform)}"
        if split.get("modes")
        else ""
    )
    # Only a model that is confined to its kept modes has a part that cannot be learned.
    other = "no model keeping these modes can beat it" if "kept" in run.examples else "on the other modes"
    return (
        f"<p>{words.replace('R_o', 'R<sub>o</sub>')}, where L² is the mean square of the relative error{escape(where)}."
        "</p>"
        f'<div class="split"><div class="whole" role="img" aria-label="{share:.0%} of the squared error is J², '
        f'{1 - share:.0%} is R_o²"><span class="learnt" style="flex:{share:.4f}"></span>'
        f'<span class="floor" style="flex:{1 - share:.4f}"></span></div><ul class="legend">'
        f'<li><i class="learnt"></i>J², on the kept modes: {_percent(share)}</li>'
        f'<li><i class="floor"></i>R<sub>o</sub>², {other}: {_percent(1 - share)}</li>'
        "</ul></div>"
    )


def _percent(share: float) -> str:
    return "under 0.1%" if share < 0.001 else "over 99.9%" if share > 0.999 else f"{share:.1%}"


def _members(run: Run) -> str:
    members = run.metrics.get("members") or []
    sentences = []
    if members:
        own = ", ".join(figures(number) for number in run.numbers("relative_l2"))
        sentences.append(f"Its {len(members)} members alone have relative L2 errors of {own}.")
    if run.metrics.get("calibration"):
        ratio, inside, expected, together = (
            run.number("calibration", name)
            for name in ("spread_to_error", "coverage_2sigma", "coverage_expected", "correlation")
        )
        sentences.append(
            f"The spread of the ensemble is {_number(ratio)} of its error (1 is calibrated), {_number(inside)} of the "
            f"points lie within two deviations ({figures(expected or 0.95, 2)} for a normal error), and the "
            f"correlation of spread and error over samples is {_number(together)}."
        )
    return f"<p>{escape(' '.join(sentences))}</p>" if sentences else ""


def _over_time(run: Run) -> str:
    steps = (run.metrics.get("per_step") or {}).get("relative_l2")
    if not steps:
        return ""
    values = np.array([math.nan if value is None else value for value in steps], dtype=float)
    times = run.metrics.get("times") or []
    known = len(times) == len(values)
    x = np.array(times) if known else np.arange(1, len(values) + 1)
    label = "time" if known else "step of the rollout"
    plot = line_plot({run.model: (x, values)}, (label, "relative L2"), f"relative L2 error against {label}")
    if not plot:
        return "<p>The error over time cannot be drawn: none of its numbers is finite and above zero.</p>"
    return f'<div class="plots">{plot}</div>'


def origin(run: Run) -> str:
    """Hardware, versions and the command that makes the run again."""
    table = settings_table(run.part("environment"))
    command = run.about.get("command")
    again = (
        f"<p>To train it again:</p><pre><code>{escape(str(command))}</code></pre>"
        if command
        else "<p>The command that made it is not recorded.</p>"
    )
    return (table or "<p>Hardware and versions are not recorded.</p>") + again


def settings_table(values: Mapping[str, Any]) -> str:
    """Names and values as a table of two columns."""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name).replace("_", " "))}</th><td>{escape(short(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<div class="scroll"><table class="settings"><tbody>{rows}</tbody></table></div>' if rows else ""
