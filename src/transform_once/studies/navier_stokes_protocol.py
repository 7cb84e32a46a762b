"""The protocol of the Navier-Stokes study: what is trained on what, fixed in a file before the runs, and its cases."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from transform_once.config import Model, find_config
from transform_once.messages import nearest
from transform_once.studies.study import Case
from transform_once.training.settings import Training

STUDY = "navier_stokes"
FLOOR = "irreducible floor"
PROTOCOL = Path(__file__).parent / "protocols" / f"{STUDY}.yaml"
SPLITS = ("train", "validation", "test")
Made = TypeVar("Made")
Range = tuple[int, int]


@dataclass(frozen=True)
class Flow:
    """A data set: viscosity, time of the target, and the samples [first, last + 1) of each split, none in two."""

    viscosity: float
    time: float
    train: Range
    validation: Range
    test: Range

    def __post_init__(self) -> None:
        for name in SPLITS:
            object.__setattr__(self, name, tuple(getattr(self, name)))  # YAML has lists
        parts = sorted(getattr(self, name) for name in SPLITS)
        if any(first >= last for first, last in parts) or any(a[1] > b[0] for a, b in itertools.pairwise(parts)):
            raise ValueError(f"the splits must be ranges [first, last + 1] that share no sample; got {parts}")

    @property
    def samples(self) -> int:
        """How many have to be made."""
        return max(getattr(self, name)[1] for name in SPLITS)


@dataclass(frozen=True)
class Entry:
    """A line of a table: a configuration by name, on which data, on how many pairs, with how many seeds.

    `model` and `train` are settings that differ from the configuration's.
    """

    label: str
    config: str
    data: Sequence[str]
    pairs: Sequence[int]
    seeds: int
    together: int
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, dict[str, Any]]:
        """What is said of the model and the training: by the configuration, with what the line changes."""
        stored = _stored(self.config)
        return {"model": {**stored["model"], **self.model}, "train": {**stored["train"], **self.train}}

    def configuration(self) -> tuple[Model, Training]:
        """Model and training; what is not told is left at its default."""
        model, training = self.told["model"], self.told["train"]
        return strict(Model, model, f"model of {self.label!r}"), strict(Training, training, f"train of {self.label!r}")


@dataclass(frozen=True)
class Quick:
    """The toy: pairs and modes are divided by these numbers; time, widths, depths and seeds are at most these."""

    resolution: int
    tolerance: float
    time: float
    pairs: int
    modes: int
    width: int
    depth: int
    epochs: int
    batch_size: int
    seeds: int

    def flow(self, flow: Flow) -> Flow:
        """The same splits of fewer samples, at an earlier time."""
        train, validation, test = (
            (a // self.pairs, b // self.pairs) for a, b in (flow.train, flow.validation, flow.test)
        )
        return Flow(flow.viscosity, min(flow.time, self.time), train, validation, test)

    def entry(self, entry: Entry) -> Entry:
        """The same line with a small model of its kind, few pairs and few seeds."""
        model, _ = entry.configuration()
        small: dict[str, Any] = dict(entry.model)
        if model.modes is not None:
            small["modes"] = (
                [self.fewer(m) for m in model.modes] if isinstance(model.modes, list) else self.fewer(model.modes)
            )
        small |= {
            name: min(value, getattr(self, name)) for name in ("width", "depth") if (value := getattr(model, name))
        }
        return dataclasses.replace(
            entry,
            pairs=[pairs // self.pairs for pairs in entry.pairs],
            seeds=min(entry.seeds, self.seeds),
            model=small,
            train={**entry.train, "epochs": self.epochs, "batch_size": self.batch_size},
        )

    def fewer(self, modes: int) -> int:
        """Modes of the toy."""
        return max(1, modes // self.modes)


@dataclass(frozen=True)
class Protocol:
    """Everything that is fixed before the runs; the comments in the file say what each entry is."""

    resolution: int
    seed: int
    tolerance: float
    data: Mapping[str, Flow]
    splits: Sequence[int]
    example: int
    tables: Mapping[str, Sequence[Entry]]
    quick: Quick | None  # None: this is the toy

    def reduced(self) -> "Protocol":
        """The toy of this study: the same tables and code."""
        less = self.quick
        if less is None:
            raise ValueError("this protocol is that of a toy already")
        return dataclasses.replace(
            self,
            resolution=less.resolution,
            tolerance=less.tolerance,
            data={name: less.flow(flow) for name, flow in self.data.items()},
            splits=[less.fewer(modes) for modes in self.splits],
            tables={name: [less.entry(entry) for entry in entries] for name, entries in self.tables.items()},
            quick=None,
        )

    def bases(self) -> list[tuple[str, Any]]:
        """All kept modes whose irreducible floor is wanted: (transform, modes)."""
        models = [entry.configuration()[0] for entries in self.tables.values() for entry in entries]
        found = [("dct", m) for m in self.splits] + [(m.transform, m.modes) for m in models if m.transform]
        return list({json.dumps(basis): basis for basis in found}.values())

    def jobs(self, only: str | None = None) -> list["Job"]:
        """All cases, or those of one table; one that several tables share is there once, and the same in each."""
        found: dict[str, Job] = {}
        homes: dict[str, str] = {}
        for table, entries in self.tables.items():
            for job in (job for entry in entries for job in self._of_entry(table, entry)):
                home = homes.setdefault(json.dumps([job.label, job.options]), table)
                if only in (None, table):
                    job = dataclasses.replace(job, table=home)
                    found.setdefault(job.case.name, job)
        if only in (None, "transforms", "modes"):
            found |= {job.case.name: job for job in (Job(FLOOR, FLOOR, name, self) for name in self.data)}
        return list(found.values())

    def _of_entry(self, table: str, entry: Entry) -> Iterator["Job"]:
        for name, pairs in itertools.product(entry.data, entry.pairs):
            for first in range(0, entry.seeds, entry.together):
                seeds = tuple(range(first, min(first + entry.together, entry.seeds)))
                yield Job(table, entry.label, name, self, pairs, seeds, entry)


@dataclass(frozen=True, eq=False)
class Job:
    """A case with all that it takes: a model, some training pairs of a data set, seeds that are trained together.

    Without an entry it is the irreducible floor of the data set.
    """

    table: str
    label: str
    data: str
    protocol: Protocol
    pairs: int = 0
    seeds: tuple[int, ...] = ()
    entry: Entry | None = None

    @property
    def samples(self) -> dict[str, range]:
        """The samples that are trained on, that something may be chosen by, and that are tested on."""
        flow = self.protocol.data[self.data]
        first = flow.train[0]
        return {
            "train": range(first, first + self.pairs),
            "validation": range(*flow.validation),
            "test": range(*flow.test),
        }

    @property
    def options(self) -> dict[str, Any]:
        """What tells cases apart; the digest stands for all settings that are told, whatever the others' defaults."""
        everything: dict[str, Any] = {
            "flow": dataclasses.asdict(self.protocol.data[self.data]),
            "grid": (self.protocol.resolution, self.protocol.seed, self.protocol.tolerance),
            "entry": self.entry.told if self.entry else None,
            "bases": None if self.entry else self.protocol.bases(),
        }
        digest = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:12]
        return {"data": self.data, "pairs": self.pairs, "seeds": list(self.seeds), "settings": digest}

    @property
    def case(self) -> Case:
        """The case under its name in the table of results."""
        return Case(STUDY, self.table, self.label, self.options)

    @property
    def timed(self) -> bool:
        """Whether one seed is also timed alone: once for each model of the first table, what it learns aside."""
        return self.table == "table" and 0 in self.seeds and self.data == next(iter(self.protocol.data))

    def examples(self, folder: Path) -> Path | None:
        """Where the prediction of seed 0 is kept, if it is: one for each model and data set of the first table."""
        if self.table != "table" or 0 not in self.seeds:
            return None
        words = re.sub("[^a-z0-9]+", "-", self.label.lower().replace("+", "-plus-"))
        return folder / STUDY / f"{self.data}-{words.strip('-')}.npz"


def load_protocol(path: Path = PROTOCOL) -> Protocol:
    """The protocol of a YAML file; an unknown key is an error that names the nearest known ones."""
    import yaml

    made = strict(Protocol, yaml.safe_load(path.read_text()), path.name)
    protocol = dataclasses.replace(
        made,
        data={name: strict(Flow, flow, f"data.{name}") for name, flow in made.data.items()},
        tables={
            name: [strict(Entry, entry, f"a line of tables.{name}") for entry in entries]
            for name, entries in made.tables.items()
        },
        quick=strict(Quick, made.quick, "quick"),
    )
    meanings: dict[tuple[str, str, int], list[Any]] = {}
    for entry in itertools.chain(*protocol.tables.values()):
        _check(entry, protocol)
        meaning = [entry.config, entry.seeds, entry.together, entry.model, entry.train]
        for name, pairs in itertools.product(entry.data, entry.pairs):
            if meanings.setdefault((entry.label, name, pairs), meaning) != meaning:
                raise ValueError(f"{entry.label!r} on {pairs} pairs of {name} means two things: give one another label")
    return protocol


def _check(entry: Entry, protocol: Protocol) -> None:
    entry.configuration()  # complains about settings that do not exist
    if min(entry.seeds, entry.together, *entry.pairs) < 1:
        raise ValueError(f"pairs, seeds and together of {entry.label!r} must be at least 1")
    for name in entry.data:
        if name not in protocol.data:
            raise ValueError(f"{entry.label!r} asks for the data {name!r}; {nearest(name, protocol.data)}")
        first, last = protocol.data[name].train
        if max(entry.pairs) > last - first:
            raise ValueError(
                f"{entry.label!r} asks for {max(entry.pairs)} pairs; {name} has {last - first} to train on"
            )


def strict(make: type[Made], given: Any, where: str) -> Made:
    """A dataclass of these entries, all of them known and none missing."""
    known = {one.name: one for one in dataclasses.fields(make)}  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be names with values; got {given!r}")
    for name in given:
        if name not in known:
            raise ValueError(f"{where} has no key {name!r}; {nearest(name, known)}")
    absent = dataclasses.MISSING
    for name, one in known.items():
        if name not in given and one.default is absent and one.default_factory is absent:
            raise ValueError(f"{where} lacks the key {name!r}: add it")
    return make(**given)


@cache
def _stored(config: str) -> dict[str, Any]:
    """An experiment of the package, as it is in its file."""
    import yaml

    return dict(yaml.safe_load(Path(find_config(f"{STUDY}/{config}.yaml")).read_text()))


def modes_text(modes: int | Sequence[int] | None) -> str:
    """Kept modes as they stand in the CSV file: 24, 25x23, or nothing."""
    return "x".join(map(str, modes)) if isinstance(modes, Sequence) else str(modes or "")
