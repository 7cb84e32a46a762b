"""The Navier-Stokes section of the page of reproductions: tables from the CSV file, the paper's numbers beside ours.

Every sentence about a row is built from its numbers; what is known about a model beforehand stands in `KNOWN`.
"""

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from transform_once.reports.runs import figures, mean_and_deviation
from transform_once.studies.navier_stokes_protocol import Protocol, load_protocol, modes_text
from transform_once.studies.navier_stokes_results import PAPER, PAPER_COST, Section, draw_all
from transform_once.studies.page import markdown, put_section
from transform_once.studies.study import Results

NEAR = 0.05  # relative difference within which a number of the paper is reproduced
KNOWN = {
    "FFNO": "Each layer's branch is added, as its authors describe it; the released code subtracts it. As in the paper "
    "it sees no coordinates: it commutes with shifts and cannot know where the force is.",
    "FFNO, as released": "Each layer's branch is subtracted, as in the released code; it sees no coordinates either.",
    "FFNO, coordinates": "Its lift sees the coordinates, as its authors and every FNO here have it.",
    "FNO": "The whole complex spectrum is kept; in the released code every layer loses its imaginary part.",
    "FNO, phase-blind as released": "Every layer loses the imaginary part of its spectrum, as in the released code.",
    "FNO, float32": "All products in float32: how much of the error of the others is of bfloat16.",
    "FNO, modern": "Stronger than the paper's FNO: a perceptron in every layer.",
    "T1Grid": "Ours: gated layers on the grid of 24 kept modes.",
    "FNOvp": "vp in all layers, the whole spectrum kept.",
    "FNOvp, phase-blind": "vp in all layers, the imaginary part lost as in the released code.",
    "T1": "Six layers as the paper prints; the released code has eight.",
    "T1vp": "vp in the first layer and Kaiming in the others, as the paper says; the released code has vp in all.",
    "T1+": "In the released code the flag never reaches the layer: its T1+ and T1+vp are one model.",
    "T1+vp": "vp in the one T1 layer in front of the UNet.",
}

# What a line of the ablation is compared with.
BEFORE = {
    "T1 Kaiming": "T1",
    "T1vp": "T1 Kaiming",
    "T1vp, GELU in the head": "T1vp",
    "T1+": "T1",
    "T1+ Kaiming": "T1+",
    "T1+vp": "T1+ Kaiming",
}
FNOS = ("FNO, phase-blind as released", "FNO", "FNOvp", "FNO, modern")
Lines = list[Sequence[str]]


def write_page(results_csv: Path, page: Path, protocol: Protocol | None = None) -> None:
    """Write the section on Navier-Stokes into a page; figures go into the folder beside it."""
    section = Section(Results(results_csv), protocol or load_protocol())
    pictures = draw_all(section, results_csv.parent, page.parent / "figures")
    links = {name: os.path.relpath(path, page.parent) for name, path in pictures.items()}
    put_section(page, "navier-stokes", _paragraphs(section, os.path.relpath(results_csv, page.parent), links))


def _paragraphs(section: Section, source: str, pictures: Mapping[str, str]) -> Iterator[str]:
    """The section, paragraph by paragraph."""
    protocol = section.protocol
    yield "## Navier-Stokes"
    flows = "; ".join(f"{section.title(n)}: ν={f.viscosity:g}, T={f.time:g}" for n, f in protocol.data.items())
    tests = " and ".join(str(flow.test[1] - flow.test[0]) for flow in protocol.data.values())
    yield (
        f"Pairs (initial field, field at time T) at {protocol.resolution}², from our own solver; {flows}. The error is "
        f"the relative L2, which the paper calls N-MSE, on {tests} test pairs: mean ± standard deviation over (seeds). "
        "Weights are those after the last epoch; nothing was chosen on test pairs. Every row: "
        f"[{Path(source).name}]({source}); what was to be run was fixed in `studies/protocols/navier_stokes.yaml`."
    )
    if protocol.quick is None:
        yield "This is a toy, to see the pipeline run: its numbers say nothing about the models."
    yield _state(section)
    parts = {
        "table": ("Table 1", _table(section)),
        "ablation": ("Ablation: initialisation and architecture", _ablation(section)),
        "scaling": ("Scaling laws", _scaling(section)),
        "transforms": ("Transforms at equal numbers of real coefficients", _transforms(section)),
        "modes": ("Kept modes", _modes(section)),
    }
    for table, (title, paragraphs) in parts.items():
        if table in protocol.tables:
            yield f"### {title}"
            yield from paragraphs
            for name in (name for name in pictures if name.startswith(table)):
                yield f"![{title}: {name}]({pictures[name]})"


def _state(section: Section) -> str:
    """How much of it has been run, and where."""
    done = len(section.jobs) - len(section.missing)
    machines = {f"{row['hardware']}, torch {row['torch']}" for row in section.all_rows if row.get("hardware")}
    ran = f"{done} of {len(section.jobs)} cases have been run" + (
        f" on {'; '.join(sorted(machines))}." if machines else "."
    )
    left: dict[str, Counter[str]] = {}
    for job in section.missing:
        left.setdefault(job.table, Counter())[job.label] += 1
    lines = {table: ", ".join(f"{label} ({n} cases)" for label, n in counts.items()) for table, counts in left.items()}
    missing = "; ".join(f"{table}: {line}" for table, line in lines.items())
    return f"{ran} Missing: {missing}." if missing else ran


def _table(section: Section) -> Iterator[str]:
    header = ["model"]
    for data in section.data:
        header += [f"paper, {section.title(data)}", f"ours, {section.title(data)}"]
    header += ["parameters", "MB", "ms a step", "s a seed", "paper: M, MB, ms", "in words"]
    lines: Lines = []
    for label in section.labels("table"):
        cost = [section.mean(name, label, section.data[0]) for name in ("parameters", "megabytes")]
        slow = [
            "–" if not (known := _means(section, name, label)) else f"{statistics.fmean(known):.3g}"
            for name in ("milliseconds_per_step", "seconds_per_seed")
        ]
        words = f"{verdict(section, label)} {KNOWN.get(label, '')}".strip()
        numbers = [figures(cost[0]), figures(cost[1], 3), *slow, PAPER_COST.get(label, "–")]
        lines.append([label, *_errors(section, label), *numbers, words])
    yield markdown(header, lines)
    yield (
        "A step is one of training with a batch, of one seed alone; s a seed is the time of a whole training with the "
        "seeds of a group side by side, divided by their number; compiling and capturing, some seconds, comes on top."
    )
    for data in section.data:
        fits = {label: section.mean("train_l2", label, data) for label in section.labels("table")}
        if told := ", ".join(f"{fit:.3f} ({label})" for label, fit in fits.items() if fit is not None):
            yield f"On the training pairs of {section.title(data)} the error of the last epoch is {told}."
    times = [section.mean("seconds_per_seed", "T1+vp", data) for data in section.data]
    if spent := [f"{time:.3g} s" for time in times if time is not None]:
        yield f"Training T1+vp takes {' and '.join(spent)} a seed here, 20 minutes on an A100 in the paper."
    for data in section.data:
        if sentence := _against_the_strongest(section, data):
            yield sentence


def _against_the_strongest(section: Section, data: str) -> str:
    """T1+vp against the FNO that is best on validation pairs."""
    found = {name: error for name in FNOS if (error := section.mean("validation_l2", name, data)) is not None}
    ours = section.mean("relative_l2", "T1+vp", data)
    if not found or ours is None:
        return ""
    best = min(found, key=lambda name: found[name])
    return (
        f"At {section.title(data)} the FNO with the lowest error on the validation pairs is “{best}” "
        f"({found[best]:.4f}); on the test pairs T1+vp's error is {difference(section, 'T1+vp', best, data)}."
    )


def _ablation(section: Section) -> Iterator[str]:
    header = ["model"]
    for data in section.data:
        header += [f"paper, {section.title(data)}", f"ours, {section.title(data)}"]
    lines: Lines = []
    for label in section.labels("ablation"):
        words = verdict(section, label)
        if label in BEFORE:
            words = f"{words} {_apart(section, label, BEFORE[label])}".strip()
        lines.append([label, *_errors(section, label), words])
    yield "The paper's vp changes two things at once, vp in the first layer and Kaiming in the others."
    yield markdown([*header, "in words"], lines)


def _scaling(section: Section) -> Iterator[str]:
    entries = {entry.label: entry for entry in section.protocol.tables["scaling"]}
    data = next(iter(entries.values())).data[0]
    sizes = sorted({pairs for entry in entries.values() for pairs in entry.pairs})
    lines: Lines = []
    for label, entry in entries.items():
        law = section.law(label, data, entry.pairs)
        cells = [_ours(section, label, data, pairs) for pairs in sizes]
        words = "Not run yet." if law is None else f"The error goes as pairs^{law.exponent:.2f}.".replace("-", "−")
        base = label.removesuffix("vp") if label.endswith("vp") else "FNO"
        known = [n for n in sizes if all(section.numbers("relative_l2", one, data, n) for one in (label, base))]
        if known and base != label:
            apart = [f"At {n} pairs {difference(section, label, base, data, n)}" for n in {known[0]: 0, known[-1]: 0}]
            words += f" {'. '.join(apart)}."
        lines.append([label, *cells, words])
    epochs = " or ".join(sorted({str(entry.configuration()[1].epochs) for entry in entries.values()}))
    yield (
        f"{epochs} epochs at every size. The paper, with 500, has a figure without numbers: it says that gaps narrow "
        "slightly and that vp improves both models."
    )
    yield markdown(["model", *(f"{n} pairs" for n in sizes), "in words"], lines)


def _transforms(section: Section) -> Iterator[str]:
    header, lines = ["model", "real numbers", "parameters"], list[Sequence[str]]()
    for data in section.data:
        header += [f"floor, {section.title(data)}", f"ours, {section.title(data)}"]
    first = section.labels("transforms")[0]
    for entry in section.protocol.tables["transforms"]:
        model, _ = entry.configuration()
        kept = (str(model.transform), modes_text(model.modes))
        cells = [figures(section.floor(section.data[0], *kept, "coefficients"))]
        cells.append(figures(section.mean("parameters", entry.label, section.data[0])))
        for data in section.data:
            cells += [figures(section.floor(data, *kept, "relative_l2"), 3), _ours(section, entry.label, data)]
        words = "What the others are compared with." if entry.label == first else _apart(section, entry.label, first)
        lines.append([entry.label, *cells, words])
    yield "Not in the paper as a table. The floor is the mean error that no model keeping those modes can beat."
    yield markdown([*header, "in words"], lines)


def _modes(section: Section) -> Iterator[str]:
    header, lines = ["model"], list[Sequence[str]]()
    for data in section.data:
        header += [f"{word}, {section.title(data)}" for word in ("ours", "J", "R_o")]
    for label in section.labels("modes"):
        cells, words = [], []
        for data in section.data:
            inside, outside = (section.mean(name, label, data) for name in ("J", "R_o"))
            cells += [_ours(section, label, data), figures(inside, 3), figures(outside, 3)]
            if inside is not None and outside is not None:
                share = outside**2 / (inside**2 + outside**2)
                words.append(f"{section.title(data)} {100 * share:.2g}%")
        lines.append(
            [label, *cells, f"Share of R_o² in the square error: {', '.join(words)}." if words else "Not run yet."]
        )
    yield "Error, its part J in the kept modes and its part R_o outside, L² = J² + R_o² (root mean squares)."
    yield markdown([*header, "in words"], lines)
    yield from _outside(section)


def _outside(section: Section) -> Iterator[str]:
    """The FNO inside and outside the DCT modes that a T1 would keep, against the R_o that a T1 has there."""
    lines: Lines = []
    for data in section.data:
        for modes in section.protocol.splits:
            floor, error = section.floor(data, "dct", str(modes)), section.mean(f"outside_{modes}", "FNO", data)
            parts = [section.mean(name, "FNO", data) for name in ("J", "R_o")]
            if floor is None or error is None or parts[0] is None or parts[1] is None:
                continue
            inside = math.sqrt(max(0.0, parts[0] ** 2 + parts[1] ** 2 - error**2))
            words = "lower" if error < floor else "higher"
            words = f"Outside, its error is {100 * abs(error / floor - 1):.0f}% {words} than that of predicting zero."
            lines.append([section.title(data), str(modes), f"{inside:.3g}", f"{error:.3g}", f"{floor:.3g}", words])
    if lines:
        yield "The correct FNO, its error inside and outside the m lowest DCT modes, against a T1's R_o:"
        yield markdown(["data", "m", "FNO inside", "FNO outside", "R_o", "in words"], lines)


def verdict(section: Section, label: str) -> str:
    """Whether the paper's numbers are reproduced, in one sentence."""
    found = {}
    for data in section.data:
        ours = section.mean("relative_l2", label, data)
        if ours is not None:
            found[data] = None if label not in PAPER else ours / PAPER[label][data][0] - 1
    if not found:
        return "Not run yet."
    if label not in PAPER:
        return "Not in the paper."
    apart = {data: change for data, change in found.items() if change is not None}
    near = [data for data, change in apart.items() if abs(change) <= NEAR]
    words = [
        f"{section.title(data)} {100 * abs(change):.0f}% {'lower' if change < 0 else 'higher'}"
        for data, change in apart.items()
        if data not in near
    ]
    if not words:
        return f"Reproduced within {100 * max(map(abs, apart.values())):.1f}%."
    if not near:
        return f"Not reproduced: {', '.join(words)} than the paper."
    same = ", ".join(f"{section.title(data)} within {100 * abs(apart[data]):.1f}%" for data in near)
    return f"Reproduced at {same}; not reproduced: {', '.join(words)}."


def difference(section: Section, label: str, other: str, data: str, pairs: int | None = None) -> str:
    """How a model's error differs from another's; level where two standard errors of the seeds cover it."""
    own, others = (section.numbers("relative_l2", one, data, pairs) for one in (label, other))
    change = statistics.fmean(own) / statistics.fmean(others) - 1
    amount = f"{100 * abs(change):.1f}% {'lower' if change < 0 else 'higher'}"
    if min(len(own), len(others)) < 2:
        return f"{amount} than {other}'s (one seed: no telling how sure)"
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (own, others)))
    if abs(statistics.fmean(own) - statistics.fmean(others)) > 2 * error:
        return f"{amount} than {other}'s"
    return f"level with {other}'s within two standard errors ({amount})"


def _apart(section: Section, label: str, other: str) -> str:
    known = [d for d in section.data if all(section.numbers("relative_l2", one, d) for one in (label, other))]
    words = "; ".join(f"at {section.title(d)} {difference(section, label, other, d)}" for d in known)
    return f"Its error is {words}." if known else ""


def _errors(section: Section, label: str) -> list[str]:
    """The paper's and our error on each data set."""
    cells = []
    for data in section.data:
        mean, deviation = PAPER.get(label, {}).get(data, (None, None))
        cells.append("–" if mean is None else f"{mean:.3f}" + (f" ± {deviation:.3f}" if deviation else ""))
        cells.append(_ours(section, label, data))
    return cells


def _ours(section: Section, label: str, data: str, pairs: int | None = None) -> str:
    values = section.numbers("relative_l2", label, data, pairs)
    failed = sum(bool(row.get("failed")) for row in section.of(label, data, pairs))
    text = f"{mean_and_deviation(values)} ({len(values)})" if values else "–"
    return f"{text}, {failed} diverged" if failed else text


def _means(section: Section, column: str, label: str) -> list[float]:
    return [mean for data in section.data if (mean := section.mean(column, label, data)) is not None]
