"""`t1 reproduce smoke`: FNO, T1, T1+, T1+vp and T1Grid on rising smoke at 1062 × 600, simulated and filmed.

Training as in the paper: models see two frames (H = 1) and predict the change to the next (order 1), rolled out over
three steps in the loss; they are judged on ten. Every model gets the same seconds of training. The data are plumes of
our own solver, in the shares 64, 20 and 20 of the paper's 104 recordings, and the one real recording in FOLDER/smoke,
`scalarflow_camera{0,1,2,3}.mp4`: trained on cameras 0, 1 and 3, tested on camera 2. That is a test of the view, not of
the plume, since all cameras film the same one; the last fifth of the frames of the training cameras is for validation.
Persistence, which says that nothing moves, is judged on the same windows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from transform_once.data.fields import Fields
from transform_once.data.formats import read
from transform_once.evaluation.evaluate import full_evaluation, save_evaluation
from transform_once.evaluation.metrics import Metrics
from transform_once.models.fno import FNO
from transform_once.models.operator import Dynamics, Operator
from transform_once.models.t1 import T1, T1Plus
from transform_once.models.t1_grid import T1Grid
from transform_once.processes import choose_device
from transform_once.reports.curves import STYLE, line_figure
from transform_once.reports.figures import save_figure
from transform_once.reports.page import report
from transform_once.reports.panels import spectrum_scale
from transform_once.reports.paper_data import shown
from transform_once.reports.paper_rollout import rollout_figure
from transform_once.reports.paper_runs import read_groups
from transform_once.reports.paper_selection import selection_figure
from transform_once.reports.paper_table import draw_image, picture_size
from transform_once.solvers import datasets
from transform_once.spectral.transforms import dct, idct
from transform_once.studies.smoke_page import write_page
from transform_once.studies.study import Case, Results, Row, run_study
from transform_once.training.train import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_SPLIT = (64, 20, 20)  # recordings for training, validation and test
TRAIN_CAMERAS, TEST_CAMERA = (0, 1, 3), 2
STEPS, JUDGED = 3, 10  # of rollouts in the loss, and in the test
GIVEN = 3  # frames before the first judged one: as many as any history and order here need
WINDOWS = 4  # of each plume in validation and test; of the recording FILM_WINDOWS
FILM_WINDOWS = 12
FIRST = 0.2  # windows begin after this share of the frames: before, there is next to no smoke
RATE = 1e-3
Make = tuple[type[Operator], dict[str, Any]]
MODELS: dict[str, Make] = {
    "FNO": (FNO, {"modes": 48, "width": 48, "depth": 4}),
    "T1": (T1, {"modes": 512, "width": 8, "depth": 4, "init": "xavier", "head_activation": "sine"}),
    "T1+": (T1Plus, {"modes": 224, "width": 128, "init": "xavier"}),
    "T1+vp": (T1Plus, {"modes": 224, "width": 128, "init": "vp"}),
    "T1Grid": (T1Grid, {"modes": (170, 96), "width": 32, "depth": 4}),  # ours; as many modes a length along both axes
}
QUICK: dict[str, Make] = {
    "FNO": (FNO, {"modes": 6, "width": 8, "depth": 2}),
    "T1": (T1, {"modes": 24, "width": 4, "depth": 2, "init": "xavier", "head_activation": "sine"}),
    "T1+": (T1Plus, {"modes": 24, "width": 8, "init": "xavier"}),
    "T1+vp": (T1Plus, {"modes": 24, "width": 8, "init": "vp"}),
    "T1Grid": (T1Grid, {"modes": 24, "width": 8, "depth": 2}),
}
RESOLUTION, QUICK_RESOLUTION = (1062, 600), (66, 38)
KEPT = (16, 32, 48, 64, 96, 128, 192, 224, 256, 384, 512, 600)  # low-passes whose loss is shown
INTEGRATORS = ((0, 1), (1, 1), (2, 1), (1, 0), (1, 2))  # order and history
SHORT = {"plumes": (0.1, 0.25), "recording": (0.25,)}  # of the budget: runs of their own, with schedules to the end


def smoke(
    data: Path,
    output: Path = Path("docs/results"),
    runs: Path = Path("runs/smoke"),
    plumes: int = 26,
    frames: int = 150,
    budget: float = 300.0,
    seeds: int = 1,
    seconds: float | None = None,
    device: str = "auto",
    quick: bool = False,
) -> None:
    """FNO, T1, T1+ and T1+vp on rising smoke at 1062 × 600: errors of ten-step rollouts after equal training time.

    Args:
        data: Folder of the data sets; the videos smoke/scalarflow_camera*.mp4 are read where they are.
        output: Folder of smoke.csv and of the report of the runs, smoke.html; figures go to the folder figures beside.
        runs: Folder for the plumes, which are simulated once, and the run folders.
        plumes: How many are simulated, for training, validation and test as 64, 20 and 20; the paper has 104 films. 0:
            none, for the recording alone, since a plume takes a CPU minutes.
        frames: Frames of each plume. 26 plumes of 150 frames take 10 GB, 104 take 40.
        budget: Seconds of training of every model; comparisons of integrators take a quarter of it each.
        seeds: Runs of every model.
        seconds: Begin no case that would last longer, judged by the one before; the same command continues.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1 or mps.
        quick: Whether to work at 66 × 38 with small models: a check of the pipeline, not a result.
    """
    name = "smoke-quick" if quick else "smoke"
    results, pictures = Results(output / f"{name}.csv"), output.parent / "figures"
    study = Study(data / "smoke", runs / name, (plumes, frames), budget, seeds, str(choose_device(device)), quick)
    if not study.sources:
        raise ValueError(f"nothing to learn from: there is no recording in {data / 'smoke'}, and no plumes are wanted")
    left = run_study(study.cases(), results, study.work, seconds=seconds)
    pictures.mkdir(parents=True, exist_ok=True)
    for stem, figure in study.figures(results).items():
        print(save_figure(figure, pictures / f"{name}-{stem}.png"))
    if trained := study.trained("plumes") + study.trained("recording"):
        print(report(trained, output / f"{name}.html"))
    if not quick:
        write_page(results.path, output.parent / "reproduction.md")
    if left:
        print(f"{left} cases are left: the same command continues")


class Parts(NamedTuple):
    """Training trajectories, and windows of GIVEN and further frames, for validation STEPS, for the test JUDGED."""

    train: Fields
    validation: Fields
    test: Fields


def shares(plumes: int) -> tuple[int, int, int]:
    """How many are for training, validation and test, in the paper's proportions, one at least."""
    held = [max(1, round(plumes * part / sum(PAPER_SPLIT))) for part in PAPER_SPLIT[1:]]
    if sum(held) >= plumes:
        raise ValueError(f"three plumes or more are needed, one for each part; got {plumes}")
    return plumes - sum(held), held[0], held[1]


def windows(fields: Fields, count: int, steps: int) -> Fields:
    """`count` windows of each trajectory, evenly spread, of GIVEN frames and `steps` more, in memory."""
    length = GIVEN + steps
    last, first = fields.frames - length, int(FIRST * fields.frames)
    if last < first:
        raise ValueError(f"trajectories of {fields.frames} frames are too short for windows of {length}: make more")
    starts = np.unique(np.linspace(first, last, count).round().astype(int)).tolist()
    parts = [
        fields[[number]].select(frames=slice(start, start + length)).trajectory
        for number in range(len(fields))
        for start in starts
    ]
    facts = fields.metadata
    return Fields(
        trajectory=torch.cat(parts),
        dt=facts.dt,
        grid=facts.grid,
        channels=facts.channels["trajectory"],
        source=facts.source,
    )


def simulated(path: Path, plumes: int, frames: int, resolution: tuple[int, int], device: str) -> Parts:
    """Plumes of our own solver, made where they are not there yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.smoke(path, samples=plumes, frames=frames, resolution=resolution, device=device)
    train_part, validation, test = Fields.open(path).split(*shares(plumes))
    return Parts(train_part, windows(validation, WINDOWS, STEPS), windows(test, WINDOWS, JUDGED))


def filmed(folder: Path, resolution: tuple[int, int]) -> Parts:
    """The real recording: cameras 0, 1 and 3 for training, the end of their films for validation, camera 2 as test."""
    films = {
        number: read(folder / f"scalarflow_camera{number}.mp4", resize=resolution).trajectory
        for number in (*TRAIN_CAMERAS, TEST_CAMERA)
    }
    facts: dict[str, Any] = {"channels": ("grey",), "dt": 1 / 60, "source": "ScalarFlow, one recording"}
    own = torch.cat([films[number] for number in TRAIN_CAMERAS])
    border = int(0.8 * own.shape[1])
    ends = Fields(trajectory=own[:, border:], **facts)
    test = Fields(trajectory=films[TEST_CAMERA], **facts)
    return Parts(
        Fields(trajectory=own[:, :border], **facts),
        windows(ends, WINDOWS, STEPS),
        windows(test, FILM_WINDOWS, JUDGED),
    )


def persistence(test: Fields) -> dict[str, Any]:
    """The numbers of `evaluate` for the prediction that nothing moves: the last given frame, again and again."""
    metrics = Metrics(test.metadata.channels["trajectory"], JUDGED)
    for batch in test.batches(4):
        seen = batch.trajectory
        metrics.add(seen[:, GIVEN - 1 : GIVEN].expand(-1, JUDGED, *seen.shape[2:]), seen[:, GIVEN:])
    return metrics.result()


def truncations(fields: Fields, kept: Sequence[int]) -> list[Row]:
    """MAE, PSNR and relative L2 of the judged frames after the lowest m × m DCT modes alone."""
    rows = []
    for m in kept:
        metrics = Metrics(fields.metadata.channels["trajectory"])
        for batch in fields.batches(4):
            y = batch.trajectory[:, GIVEN:].flatten(0, 1)
            modes = tuple(min(m, n) for n in fields.resolution)
            metrics.add(idct(dct(y, 2, modes), 2, fields.resolution), y)
        found = metrics.result()
        rows.append({"modes": m, **{key: _known(found[key]) for key in ("mae", "psnr", "relative_l2")}})
    return rows


@dataclass
class Study:
    """The cases, and the work that each of them is; data are made when the first case needs them."""

    folder: Path
    runs: Path
    plumes: tuple[int, int]
    budget: float
    seeds: int
    device: str
    quick: bool
    made: dict[str, Parts] = field(default_factory=dict)

    @property
    def resolution(self) -> tuple[int, int]:
        """Rows and columns."""
        return QUICK_RESOLUTION if self.quick else RESOLUTION

    @property
    def models(self) -> dict[str, Make]:
        """The paper's models, or small ones."""
        return QUICK if self.quick else MODELS

    @property
    def sources(self) -> list[str]:
        """The data that are there."""
        films = [self.folder / f"scalarflow_camera{number}.mp4" for number in (*TRAIN_CAMERAS, TEST_CAMERA)]
        return ["plumes"] * (self.plumes[0] > 0) + ["recording"] * all(film.exists() for film in films)

    def parts(self, source: str) -> Parts:
        """The data of a source, kept for the next case."""
        if source not in self.made and source == "recording":
            self.made[source] = filmed(self.folder, self.resolution)
        elif source not in self.made:
            path = self.runs / f"plumes-{self.plumes[0]}-{self.plumes[1]}.h5"
            self.made[source] = simulated(path, *self.plumes, self.resolution, self.device.split(":")[0])
        return self.made[source]

    def cases(self) -> list[Case]:
        """Persistence, what truncation costs, and the models, by source; then shorter runs and the integrators."""
        numbers = range(self.seeds)
        cases = []
        for source in self.sources:
            size = list(self.plumes) if source == "plumes" else "cameras 0, 1, 3"
            about = {"size": size, "resolution": list(self.resolution)}
            trained = {**about, "budget": self.budget, "learning_rate": RATE, "order": 1, "history": 1}
            cases += [Case("smoke", source, "persistence", about), Case("smoke", f"{source}: truncation", "DCT", about)]
            cases += [Case("smoke", source, m, {**trained, "seed": s}) for s in numbers for m in self.models]
            brief = [{**trained, "budget": self.budget * share, "seed": 0} for share in SHORT[source]]
            cases += [Case("smoke", f"{source}: time", m, options) for options in brief for m in self.models]
            if source == "plumes":
                steps = [{**brief[-1], "order": order, "history": history} for order, history in INTEGRATORS]
                cases += [Case("smoke", "plumes: integrator", "T1", options) for options in steps]
        return cases

    def run_folder(self, case: Case) -> Path:
        """The run folder of a case, named after its source."""
        return case.folder(self.runs, case.table.split(":")[0])

    def trained(self, table: str) -> list[Path]:
        """The run folders of the first seed of a main table that have been judged."""
        own = [case for case in self.cases() if case.table == table and case.options.get("seed") == 0]
        return [folder for folder in map(self.run_folder, own) if (folder / "metrics.json").exists()]

    def work(self, case: Case) -> list[Row]:
        """The rows of a case: `kind` is "all" of the whole rollout, "step" of one of its steps."""
        parts = self.parts(case.table.split(":")[0])
        if "truncation" in case.table:
            return truncations(parts.test, [m for m in KEPT if m <= max(self.resolution)])
        if case.label == "persistence":
            return _rows(persistence(parts.test), {})
        return self._trained(case, parts)

    def _trained(self, case: Case, parts: Parts) -> list[Row]:
        options, folder = case.options, self.run_folder(case)
        dynamics = Dynamics(options["order"], options["history"])
        make, arguments = self.models[case.label]
        torch.manual_seed(options["seed"])
        model = make(dynamics.history + 1, 1, self.resolution, **arguments)
        run = train(
            model,
            parts.train,
            _from(parts.validation, dynamics),
            output=folder,
            progress=False,
            seconds=options["budget"],
            batch_size=1,
            optimizer="adamw",
            learning_rate=options["learning_rate"],
            order=dynamics.order,
            history=dynamics.history,
            steps=STEPS,
            symmetries=False,  # as in the paper
            seed=options["seed"],
            device=self.device,
        )
        if not run.finished:
            raise SystemExit(130)
        found = full_evaluation(run.models, _from(parts.test, dynamics), count=2, device=self.device, progress=False)
        save_evaluation(folder, found)
        facts = run.description
        about = {
            "seed": options["seed"],
            "order": dynamics.order,
            "history": dynamics.history,
            "budget": options["budget"],
            "seconds": facts["seconds"],
            "milliseconds_per_step": 1e3 * facts["seconds_per_step"],
            "updates": run.history[-1]["step"],
            "parameters": facts["model"]["parameters"],
            "hardware": facts["environment"]["hardware"],
        }
        return _rows(found.numbers, about)

    def figures(self, results: Results) -> dict[str, "Figure"]:
        """Errors against time, step and modes, low-pass against top-m; rollouts and k-space errors of first seeds."""
        made: dict[str, Figure] = {}
        for source in self.sources:
            rows = [row for row in results.rows if row["table"] in (source, f"{source}: time")]
            by_time = [row for row in rows if row["kind"] == "all" and row.get("budget")]
            by_step = [row for row in rows if row["kind"] == "step" and row["table"] == source]
            kept = [row for row in results.rows if row["table"] == f"{source}: truncation"]
            if len({row["budget"] for row in by_time}) > 1:
                titles = ("seconds of training", "relative L2, 10 steps, test")
                made[f"{source}-time"] = line_figure(by_time, "budget", "relative_l2", titles)
            if by_step:
                titles = ("step of the rollout", "mean absolute error")
                made[f"{source}-steps"] = line_figure(by_step, "step", "mae", titles, ("linear", "linear"))
            if kept:
                x = "DCT modes kept along each axis"
                made[f"{source}-modes-mae"] = line_figure(kept, "modes", "mae", (x, "MAE of a frame"))
                made[f"{source}-modes-psnr"] = line_figure(kept, "modes", "psnr", (x, "PSNR in dB"), ("log", "linear"))
            if folders := self.trained(source):
                groups = [replace(read_groups([folder], "rollout")[0], label=_model(folder)) for folder in folders]
                test = _from(self.parts(source).test, Dynamics(1, 1))
                drawn = rollout_figure(groups, test, len(test) // 2, 0, torch.device(self.device))
                made[f"{source}-rollout"] = drawn.pictures[""]
                made[f"{source}-k-space"] = _spectra(folders)
            if source in self.made:  # no data are made for a picture of them alone
                test = self.made[source].test
                last = len(test) * test.frames - 1
                drawn = selection_figure(shown(test, samples=8), shown(test, samples=[last]), last)
                made[f"{source}-selection"] = drawn.pictures[""]
        return made


def _from(fields: Fields, dynamics: Dynamics) -> Fields:
    """Windows that begin with the frames that a model needs, so that all models are judged on the same frames."""
    return fields.select(frames=slice(GIVEN - dynamics.frames, None))


def _rows(numbers: Mapping[str, Any], about: Mapping[str, Any]) -> list[Row]:
    """A row of the whole rollout, with the errors of the first and the last step, and a row of each step."""
    steps = numbers["per_step"]
    ends = {"mae_1": steps["mae"][0], "mae_10": steps["mae"][-1]}
    split = {key: numbers["kspace"][key] for key in ("J", "R_o")} if "kspace" in numbers else {}
    whole = {key: _known(numbers[key]) for key in ("relative_l2", "mae", "psnr")}
    rows: list[Row] = [{"kind": "all", **about, **whole, **{k: _known(v) for k, v in {**ends, **split}.items()}}]
    for step, (mae, relative) in enumerate(zip(steps["mae"], steps["relative_l2"], strict=True), start=1):
        about_step = {"kind": "step", "seed": about.get("seed", ""), "step": step}
        rows.append({**about_step, "mae": _known(mae), "relative_l2": _known(relative)})
    return rows


def _known(value: float | None) -> float:
    """An error that is not finite is written so."""
    return math.inf if value is None else value


def _model(folder: Path) -> str:
    """The model of a run folder, as the study calls it."""
    return folder.name.split("-")[1]


def _spectra(folders: Sequence[Path]) -> "Figure":
    """The error of the last step in k-space, root mean square over the test windows, of each run."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    spectra: dict[str, Any] = {}
    for folder in folders:
        with np.load(folder / "examples.npz", allow_pickle=False) as file:
            spectra.setdefault("truth", file["target_spectrum"][0])
            spectra[_model(folder)] = file["error_spectrum"][0]
    scale = spectrum_scale(*spectra.values())
    width, height = picture_size(next(iter(spectra.values())).shape, 4.0)
    with rc_context(STYLE):
        figure = Figure(figsize=(len(spectra) * (width + 0.2) + 1.0, height + 0.8), layout="constrained")
        panels = figure.subplots(1, len(spectra), squeeze=False)[0]
        for axes, (name, values) in zip(panels, spectra.items(), strict=True):
            image = draw_image(axes, values, scale, name if name == "truth" else f"error of {name}")
        figure.colorbar(image, ax=panels, shrink=0.8, label="log₁₀ |DCT|, last step")
    return figure
