"""The most accurate surrogate per second of training: relative L2 against seconds, for T1, T1+, T1Grid and an FNO.

    python benchmarks/speedrun.py search --seconds 560    # every candidate, 8 s each, judged on validation pairs
    python benchmarks/speedrun.py final --seconds 560     # the best of each model: all budgets, three seeds, test pairs
    python benchmarks/speedrun.py li --seconds 560        # both for ten frames to ten frames; or search --only li, …
    python benchmarks/speedrun.py records --page docs/speedrun.md
    python benchmarks/speedrun.py search --device cpu --resolution 16 --samples 40 --held-out 10 --budgets 1    # a toy

The rules are in docs/speedrun.md, what is tried in speedrun.yaml. Finished rows are skipped, and no run is begun that
would not end within `--seconds`: the same command continues. `--change` names what is new in the code; its rows are
new ones. `--together 4` runs four at a time, for as many steps as each would take alone in its budget: at the pace of
the rows that ran alone, or of two seconds alone where there is none.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from common import results_folder
from orbits import elements, orbit_average, predictor
from speedrun_records import PACE, write_records
from timed_runs import Deadline, Row, Table, run_rows, text, train_for

import transform_once as t1
from transform_once.config import Model
from transform_once.evaluation.rollout import dynamics_of
from transform_once.models.operator import Operator
from transform_once.processes import choose_device
from transform_once.solvers import datasets
from transform_once.studies.navier_stokes_protocol import strict
from transform_once.training.loss import relative_l2
from transform_once.training.settings import settings_from

PROTOCOL = Path(__file__).with_suffix(".yaml")
FIRST = "first"  # the change of rows without another name
PACE_SECONDS = 2.0  # of runs that show how many steps a second a configuration takes
KEY = ("flow", "model", "candidate", "change", "budget", "seed", "resolution", "train", "configuration")


@dataclass(frozen=True)
class Candidate:
    """One way to make and train a model: what is not left at its default."""

    model: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def configuration(self) -> str:
        return json.dumps({"model": dict(self.model), "train": dict(self.train)}, sort_keys=True)


@dataclass(frozen=True)
class Flow:
    """A task: its data, the budgets in seconds, and the candidates by model and name."""

    viscosity: float
    time: float
    search: Sequence[float]
    budgets: Sequence[float]
    candidates: Mapping[str, Mapping[str, Any]]
    frames: int = 0
    tolerance: float | None = None  # of the solver, where it is not the protocol's
    targets: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Protocol:
    """What is fixed before the runs; the comments in the file say what each entry is."""

    resolution: int
    seed: int
    tolerance: float
    train: int
    held_out: int
    search_seed: int
    finalists: int
    seeds: Sequence[int]
    shifts: int
    common: Mapping[str, Any]
    flows: Mapping[str, Flow]

    def candidates(self, flow: str, model: str) -> dict[str, Candidate]:
        """By name, the settings that all have in common among them."""
        found = {}
        for name, given in self.flows[flow].candidates[model].items():
            made = strict(Candidate, given, f"candidate {name} of {model}")
            found[name] = Candidate({"name": model, **made.model}, {**self.common, **made.train})
        return found


def load_protocol(path: Path = PROTOCOL, **changed: Any) -> Protocol:
    """The protocol of a file with some entries changed, after a check that all models may try equally much."""
    given = {**yaml.safe_load(path.read_text()), **changed}
    flows = {name: strict(Flow, flow, f"flow {name}") for name, flow in given["flows"].items()}
    if "tolerance" in changed:
        flows = {name: replace(flow, tolerance=None) for name, flow in flows.items()}
    protocol = strict(Protocol, {**given, "flows": flows}, path.name)
    for name, flow in flows.items():
        counts = {model: len(candidates) for model, candidates in flow.candidates.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"all models of {name} must have the same number of candidates; got {counts}")
        for model in counts:
            for candidate in protocol.candidates(name, model).values():
                strict(Model, candidate.model, f"a model of {name}")
                settings_from(dict(candidate.train))
    return protocol


@dataclass(frozen=True)
class Speedrun:
    """The protocol at work: where its data and rows are, and on which device it runs."""

    protocol: Protocol
    output: Path
    data: Path
    device: torch.device
    change: str
    only: Sequence[str]
    deadline: Deadline
    together: int = 1  # runs at a time

    @cached_property
    def searched(self) -> Table:
        return Table(self.output / "speedrun_search.csv", KEY)

    @cached_property
    def finals(self) -> Table:
        return Table(self.output / "speedrun.csv", KEY)

    def search(self, flow: str, budgets: Sequence[float] = ()) -> int:
        """Try candidates, budget after budget; returns how many runs are left."""
        seed, left = self.protocol.search_seed, 0
        for budget in sorted(budgets or self.protocol.flows[flow].search):
            jobs = [
                self._job(flow, model, name, budget, seed)
                for model in self._models(flow)
                for name in self._round(flow, model, budget)
            ]
            left += self._run(flow, self.searched, jobs, tested=False)
        return left

    def final(self, flow: str, budgets: Sequence[float] = ()) -> int:
        """Train the chosen candidates with all seeds and test them, once each; returns how many runs are left."""
        jobs = [
            self._job(flow, model, self._chosen(flow, model, budget), budget, seed)
            for budget in budgets or self.protocol.flows[flow].budgets
            for seed in self.protocol.seeds
            for model in self._models(flow)
        ]
        return self._run(flow, self.finals, jobs, tested=True)

    def _models(self, flow: str) -> list[str]:
        """The flow's models, or those of them that were asked for."""
        models = self.protocol.flows[flow].candidates
        return [model for model in models if model in self.only] or list(models)

    def _chosen(self, flow: str, model: str, budget: float) -> str:
        """The candidate with the lowest validation error at the nearest budget of which the model's search is done."""
        done = self._done(flow, model)
        if not done:
            raise ValueError(
                f"the search of {model} on {flow} is not complete in {self.searched.path}: run search first"
            )
        return self._best(flow, model, min(done, key=lambda at: abs(math.log(at / budget))))[0]

    def _round(self, flow: str, model: str, budget: float) -> list[str]:
        """The candidates that are tried with this budget: all, or the best ones of the last smaller budget done."""
        smaller = [at for at in self._done(flow, model) if at < budget]
        if not smaller:
            return list(self.protocol.candidates(flow, model))
        return self._best(flow, model, smaller[-1])[: self.protocol.finalists]

    def _done(self, flow: str, model: str) -> list[float]:
        """Budgets with which every candidate of their round was tried, the smallest first."""
        rows = [row for row in self.searched.rows if (row["flow"], row["model"]) == (flow, model)]
        done: list[float] = []
        for at in sorted({float(row["budget"]) for row in rows}):
            names = self.protocol.candidates(flow, model)
            wanted = self._best(flow, model, done[-1])[: self.protocol.finalists] if done else names
            if all(self._tried(flow, model, name, at) for name in wanted):
                done.append(at)
        return done

    def _best(self, flow: str, model: str, budget: float) -> list[str]:
        """The candidates that were tried with this budget, from the lowest validation error to the highest."""
        errors = {}
        for name in self.protocol.candidates(flow, model):
            row = self._tried(flow, model, name, budget)
            if row is not None:
                errors[name] = float(row["validation"]) if row["validation"] else math.inf
        return sorted(errors, key=lambda name: errors[name])

    def _tried(self, flow: str, model: str, candidate: str, budget: float) -> Row | None:
        """The row of a candidate; what was not tried again under a change counts as it was before."""
        job = self._job(flow, model, candidate, budget, self.protocol.search_seed)
        changes = dict.fromkeys(row["change"] for row in reversed(self.searched.rows))  # the last one first
        counted = (self.change, *(change for change in changes if not change.startswith(PACE)))
        return next(filter(None, (self.searched.find({**job, "change": change}) for change in counted)), None)

    def _job(self, flow: str, model: str, candidate: str, budget: float, seed: int) -> Row:
        protocol = self.protocol
        about = {"flow": flow, "model": model, "candidate": candidate, "change": self.change, "budget": float(budget)}
        about |= {"seed": seed, "resolution": protocol.resolution, "train": protocol.train}
        return {**about, "configuration": protocol.candidates(flow, model)[candidate].configuration}

    def _run(self, flow: str, table: Table, jobs: Sequence[Row], tested: bool) -> int:
        wanted = [job for job in jobs if set(self.only) <= {flow, job["model"], job["candidate"]}]
        if all(table.finished(job) for job in wanted):
            return 0
        self._solve(flow)
        work = partial(self._row, tested=tested)
        if self.together > 1:
            unknown = {_work(job): job for job in wanted if not table.finished(job) and not self._pace(job)}
            short = [{**job, "change": PACE + self.change, "budget": PACE_SECONDS} for job in unknown.values()]
            run_rows(self.searched, short, partial(self._row, tested=False), self.deadline, self.device)
            wanted = [{**job, "pace": self._pace(job)} for job in wanted]
        ready = [job for job in wanted if self.together == 1 or job["pace"]]
        left = run_rows(table, ready, work, self.deadline, self.device, self.together)
        return left + len(wanted) - len(ready)

    def _pace(self, job: Row) -> float | None:
        """Steps a second of such a run when it has the device for itself: the median of the rows that had."""
        rows = [row for row in (*self.searched.rows, *self.finals.rows) if row.get("steps") and not row.get("pace")]
        for change in (self.change, FIRST):
            ours = [row for row in rows if row["change"] in (change, PACE + change) and _work(row) == _work(job)]
            if ours:
                return statistics.median(float(row["steps"]) / float(row["seconds"]) for row in ours)
        return None

    def _row(self, job: Row, tested: bool) -> Row:
        protocol, budget = self.protocol, float(job["budget"])
        candidate = protocol.candidates(job["flow"], job["model"])[job["candidate"]]
        parts = load_parts(self._solve(job["flow"]), protocol.held_out, protocol.train, candidate.train.get("history"))

        def make() -> Operator:
            given = strict(Model, at_resolution(candidate.model, protocol.resolution), "a model")
            return given.build(parts["train"], candidate.train.get("history", 0), job["seed"])[0]

        settings = {**candidate.train, "seed": job["seed"]}
        model, row = train_for(budget, make, parts["train"], None, settings, self.device, job.get("pace"))
        row |= {"viscosity": protocol.flows[job["flow"]].viscosity, "validation": _error(model, parts["validation"])}
        if tested:
            row |= {
                "test": _error(model, parts["test"]),
                "test_orbit": _orbit_error(model, parts["test"], protocol.shifts),
            }
        return row

    def _solve(self, name: str) -> Path:
        """The file with a flow's samples, which are solved for where it is not there yet."""
        protocol, flow = self.protocol, self.protocol.flows[name]
        samples = 2 * protocol.held_out + protocol.train
        tolerance = flow.tolerance or protocol.tolerance
        about = f"{samples}-{protocol.resolution}-{tolerance:g}-{protocol.seed}"
        path = self.data / f"speedrun-{name}-{about}.h5"
        if not path.exists():
            self.data.mkdir(parents=True, exist_ok=True)
            datasets.navier_stokes(
                path,
                flow.viscosity,
                flow.time,
                samples,
                protocol.resolution,
                flow.frames,
                protocol.seed,
                tolerance=tolerance,
                device=str(self.device),
            )
        return path


def _work(row: Row) -> tuple[str, ...]:
    """What the time of a step depends on: all of a configuration but rates and decay."""
    given = json.loads(row["configuration"])
    train = {name: value for name, value in given["train"].items() if name not in ("learning_rate", "weight_decay")}
    about = (text(row[name]) for name in ("flow", "resolution", "train"))
    return (*about, json.dumps([given["model"], train], sort_keys=True))


@lru_cache(maxsize=2)
def load_parts(path: Path, held_out: int, train: int, history: int | None) -> dict[str, t1.Fields]:
    """The samples to train on, to choose by and to test on, in the form that a candidate takes them in."""
    fields = t1.Fields.open(path)
    if fields.kind == "trajectories":
        fields = fields.select(frames=slice(1, None))  # the initial field is none of them
    parts = zip(("test", "validation", "train"), fields.split(held_out, held_out, train), strict=True)
    return {name: task(part.load(), history, judged=name != "train") for name, part in parts}


def task(fields: t1.Fields, history: int | None, judged: bool) -> t1.Fields:
    """Pairs, half of the frames to the others; for a model that is rolled out, which has a history, trajectories.

    Those that are judged begin with the frames that the model sees of the first half: the second half is predicted.
    """
    if fields.kind == "pairs":
        return fields
    half = fields.frames // 2
    if history is not None:
        return fields.select(frames=slice(half - 1 - history, None)) if judged else fields
    frames = fields.trajectory[:, :, 0]
    about = {name: getattr(fields.metadata, name) for name in ("grid", "periodic", "source", "seed", "symmetries")}
    return t1.Fields(input=frames[:, :half], target=frames[:, half:], **about)


def at_resolution(model: Mapping[str, Any], resolution: int) -> dict[str, Any]:
    """The model with modes and waves in proportion to the resolution; they are given for 64."""
    return {**model, **{n: max(1, model[n] * resolution // 64) for n in ("modes", "waves") if n in model}}


def _error(model: Operator, fields: t1.Fields) -> float:
    found: float | None = t1.evaluate(model, fields, progress=False)["relative_l2"]
    if found is None:
        raise FloatingPointError("the trained model's predictions are not finite")
    return found


def _orbit_error(model: Operator, fields: t1.Fields, shifts: int) -> float:
    """The error of predictions that are averaged over the symmetric orbit of their input."""
    orbit = elements([t1.Symmetry.from_dict(one) for one in fields.metadata.symmetries], shifts)
    if fields.kind == "pairs":
        prediction = orbit_average(predictor(model), fields.input, fields, orbit)
        return float(relative_l2(prediction, fields.target.double()).mean())
    seen = dynamics_of(model).frames
    first, last = fields.trajectory.split([seen, fields.frames - seen], 1)
    prediction = orbit_average(predictor(model, fields.frames - seen), first, fields, orbit)
    return float(relative_l2(prediction, last.double()).mean())


def _stages(speedrun: Speedrun, stage: str, budgets: Sequence[float]) -> Iterator[int]:
    """Runs that are left, stage by stage."""
    flows = speedrun.protocol.flows
    asked = set(speedrun.only) & set(flows) or {name for name in flows if bool(flows[name].frames) == (stage == "li")}
    for flow in (name for name in flows if name in asked):
        left = speedrun.search(flow, budgets) if stage in ("search", "li") else 0
        yield left
        if stage == "final" or (stage == "li" and not left):
            yield speedrun.final(flow, budgets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("search", "final", "li", "records"))
    parser.add_argument("--seconds", type=float, help="begin no run that would not end within so many seconds")
    parser.add_argument("--only", nargs="+", default=[], help="names that a run must have: of a flow, model, candidate")
    parser.add_argument("--budgets", type=float, nargs="+", default=[], help="instead of the protocol's")
    parser.add_argument("--change", default=FIRST, help="what is new in the code; the rows of each change are kept")
    parser.add_argument("--together", type=int, default=1, help="runs at a time, by steps instead of seconds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="folder of the rows; by default that of the hardware")
    parser.add_argument("--data", type=Path, default=Path("runs/data"), help="folder for the solver's data")
    parser.add_argument("--page", type=Path, help="records: the page whose tables are filled")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="records: folder of the picture")
    parser.add_argument("--protocol", type=Path, default=PROTOCOL)
    parser.add_argument("--resolution", type=int, help="these five instead of the protocol's, for a toy")
    parser.add_argument("--samples", type=int, help="to train on")
    parser.add_argument("--held-out", type=int)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--seeds", type=int, nargs="+")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("resolution", "held_out", "tolerance", "seeds")}
    given["train"] = options.samples
    changed = {name: value for name, value in given.items() if value is not None}
    protocol = load_protocol(options.protocol, **changed)
    device = choose_device(options.device)
    output = options.output or results_folder(device.type)
    deadline = Deadline(options.seconds)
    speedrun = Speedrun(
        protocol, output, options.data, device, options.change, options.only, deadline, options.together
    )
    if options.stage == "records":
        print(write_records(protocol, speedrun.searched.rows, speedrun.finals.rows, options.figures, options.page))
        return
    left = sum(_stages(speedrun, options.stage, options.budgets))
    print(f"{left} runs are left, the same command continues" if left else "all that was asked is done")


if __name__ == "__main__":
    main()
