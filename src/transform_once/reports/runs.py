"""Run folders as the report sees them: what is in their files, checked, and grouped by everything but the seed."""

import csv
import json
import math
import statistics
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FORMAT = "transform-once run 1"
HISTORY = ("member", "epoch", "step", "seconds", "loss", "validation")
SEEDS = ("seed", "seeds")  # what runs of one group may differ in


@dataclass(frozen=True)
class Run:
    """One run folder. What was never written is empty: `history` {}, `metrics` {}, `examples` {}.

    `history` holds for every member of an ensemble the columns of history.csv as arrays, nan where a cell is empty.
    """

    folder: Path
    name: str
    about: Mapping[str, Any]
    history: Mapping[int, Mapping[str, Array]] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, Array] = field(default_factory=dict)

    def part(self, name: str) -> Mapping[str, Any]:
        """An object of run.json, such as "model" or "training"; empty where it is missing."""
        value = self.about.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def model(self) -> str:
        """The class of the model."""
        return str(self.part("model").get("class", "model"))

    @property
    def source(self) -> str:
        """The data by name: the last part of a path, otherwise the text as it is."""
        text = str(self.part("data").get("source") or "unnamed data")
        return Path(text).name if Path(text).suffix else text

    @property
    def transform(self) -> str:
        """The basis of the spectra, "dct" where nothing else is said."""
        split = self.metrics.get("kspace") or {}
        return str(split.get("transform") or (self.part("model").get("config") or {}).get("transform") or "dct")

    def numbers(self, *path: str) -> list[float]:
        """A metric such as ("relative_l2",) or ("kspace", "J"); of ensembles the relative L2 of each member only."""
        if self.metrics.get("members"):
            members = self.metrics["members"] if path == ("relative_l2",) else []
            return [math.nan if number is None else float(number) for number in members]
        return [] if (number := self.number(*path)) is None else [number]

    def number(self, *path: str) -> float | None:
        """A metric of the run itself; for an ensemble that of the mean prediction of its members."""
        return _at(self.metrics, path)


def _at(value: Any, path: Sequence[str]) -> float | None:
    """The number at the end of a path; nan for null, which stands for a number that is not finite; None if absent."""
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_runs(folders: Sequence[Path | str]) -> list[Run]:
    """All runs, under names that tell them apart; a folder that is not a run is one sentence."""
    if isinstance(folders, str | Path):
        raise TypeError(f"expected a list of run folders; got {folders!r}: put it into a list")
    if not folders:
        raise ValueError("expected at least one run folder, such as those that `t1 train` writes; got none")
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    names = [path.name for path in paths]
    longer = [f"{path.parent.name}/{path.name}" for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else other if longer.count(other) == 1 else str(path))
        for path, name, other in zip(paths, names, longer, strict=True)
    ]


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the folders that `t1 train` wrote")
    if not (folder / "run.json").is_file():
        raise ValueError(f"{folder} has no run.json: give a folder that `t1 train` wrote")
    if not any(folder.glob("model*.safetensors")) and not any(folder.glob("last*.safetensors")):
        raise ValueError(f"{folder} has no weights (model.safetensors): train it, or leave it out of the report")
    about, metrics = _read_json(folder / "run.json"), folder / "metrics.json"
    if about.get("format") != FORMAT:
        raise ValueError(f"{folder / 'run.json'} is not a {FORMAT}: it says {about.get('format', 'nothing')!r}")
    return Run(
        folder=folder,
        name=name,
        about=about,
        history=_read_history(folder / "history.csv"),
        metrics=_read_json(metrics) if metrics.is_file() else {},
        examples=_read_examples(folder / "examples.npz"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): write it again or leave this run out") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object with names")
    return value


def _read_history(path: Path) -> dict[int, dict[str, Array]]:
    """Columns by member. A line cut short, as a run that is still going may leave it, is not read."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in HISTORY if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]}: expected {', '.join(HISTORY)}")
        rows = [row for row in reader if None not in row.values()]
    try:
        table = np.array([[float(row[name] or "nan") for name in HISTORY] for row in rows]).reshape(-1, len(HISTORY))
    except ValueError as error:
        raise ValueError(f"{path} must hold numbers only: {error}") from None
    members = [int(member) for member in np.unique(table[:, 0]) if np.isfinite(member)]
    return {m: dict(zip(HISTORY[1:], table[table[:, 0] == m, 1:].T, strict=True)) for m in members}


def _read_examples(path: Path) -> dict[str, Array]:
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}): evaluate the run again") from None
    target, prediction = arrays.get("target"), arrays.get("prediction")
    if target is not None and prediction is not None and target.shape != prediction.shape:
        raise ValueError(
            f"{path} has targets of shape {target.shape} and predictions of shape {prediction.shape}: they must agree"
        )
    return arrays


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    runs: list[Run]

    def numbers(self, *path: str) -> list[float]:
        """A metric of every run, and of every member of an ensemble."""
        return [number for run in self.runs for number in run.numbers(*path)]

    def settings(self, *path: str) -> list[float]:
        """A number of run.json, such as ("model", "parameters"), one for each run that has it."""
        return [number for run in self.runs if (number := _at(run.about, path)) is not None]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of equal model, data and settings, in the order they came; named by what sets the groups apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_settings(run), sort_keys=True, default=str), []).append(run)
    settings = [(members[0].model, _settings(members[0])) for members in groups.values()]
    labels = [_label(model, own, [s for m, s in settings if m == model]) for model, own in settings]
    return [Group(label, members) for label, members in zip(labels, groups.values(), strict=True)]


def _settings(run: Run) -> dict[str, Any]:
    """Everything that makes runs alike, flat, under names such as model.modes and training.epochs."""
    parts = {
        "model": {"class": run.model, **(run.part("model").get("config") or {})},
        "training": {**run.part("training"), "space": run.about.get("space")},
        "data": {name: run.part("data").get(name) for name in ("source", "fingerprint", "train", "resolution")},
    }
    flat = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    return {name: value for name, value in flat.items() if name.partition(".")[2] not in SEEDS}


def _label(model: str, own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """The model and what sets it apart from its rivals; the data stand in a column of their own."""
    names = [name for name in own if name not in ("data.source", "data.fingerprint", "data.resolution")]
    apart = [name for name in names if any(rival.get(name) != own[name] for rival in rivals)]
    words = [f"{name.partition('.')[2].replace('_', ' ')} {short(own[name])}" for name in apart[:4]]
    return ", ".join([model, *words])


def short(value: Any) -> str:
    """A setting as a person writes it: 64×64, 1e-3, yes; long ones are cut."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple) and value and all(isinstance(n, int) for n in value) and len(value) < 4:
        return "×".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"


def figures(value: float | None, digits: int = 4) -> str:
    """A number for people: whole and large ones with thin spaces, others with so many digits; a dash for none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if (float(value).is_integer() and abs(value) < 1e15) or 1e3 <= abs(value) < 1e6:
        return f"{round(value):,}".replace(",", "\u202f")
    return f"{value:.{digits}g}"


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean ± standard deviation (n − 1); without the second part for a single value or equal ones."""
    if not values:
        return "–"
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean) or min(values) == max(values):
        return figures(mean)
    deviation = statistics.stdev(values)
    decimals = 1 - math.floor(math.log10(deviation))
    if 0 <= decimals <= 6:  # both to the second digit of the deviation
        return f"{mean:.{decimals}f} ± {deviation:.{decimals}f}"
    return f"{figures(mean)} ± {figures(deviation, 2)}"
