"""`t1 reproduce airfoils`: UNet (DFPNet), FNO and T1+vp on steady flow around airfoils, split by the airfoils' shapes.

FOLDER/airfoil/openfoam.npz holds our own solutions: `fields` = p/|v|², u/|v|, v/|v| as [x, y], `mask`, `freestream` v
and `name`; FOLDER/airfoil/dfp_original six samples that another group computed. Pressure is known up to a constant, and
nearly scales with |v|², the velocity with |v|, so models see the direction of the free stream and the mask, and give
p/|v|² less its mean over the fluid, u/|v| and v/|v|; inside the airfoil all are zero. The mirror y → −y takes solutions
to solutions. The error is the relative L2 over the whole image, as in the paper, of these dimensionless fields,
whatever a model was trained on. Where the airfoil is, is known, so every prediction is zero there, and the loss is that
of the points outside: a model that keeps few modes need not spend them on the jump at the wall. In an ablation the loss
is of the whole image, as in the paper. Every model trains for a budget of seconds, the T1s for a quarter of it. Each of
the five seeds has another fifth of the shapes for its test, so that every flow is judged once.
"""

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transform_once.data.formats import read
from transform_once.evaluation.evaluate import full_evaluation, predict, save_evaluation
from transform_once.models.fno import FNO
from transform_once.models.operator import Operator
from transform_once.models.t1 import T1Plus
from transform_once.models.t1_grid import T1Grid
from transform_once.models.unet import UNet
from transform_once.processes import choose_device
from transform_once.reports.curves import STYLE, colour_of, line_figure, logarithmic
from transform_once.reports.figures import save_figure
from transform_once.reports.page import report
from transform_once.reports.panels import Scale
from transform_once.reports.paper_data import shown
from transform_once.reports.paper_spectrum import spectrum_figure
from transform_once.reports.paper_table import draw_image
from transform_once.reports.paper_truncation import truncation_figure
from transform_once.studies.airfoil_flows import (
    FOLDS,
    Flows,
    errors,
    errors_of_each,
    of_fields,
    read_flows,
    rebuilt,
    shapes_of,
    split,
)
from transform_once.studies.airfoils_page import write_page
from transform_once.studies.study import Case, Results, Row, run_study
from transform_once.training.run import load_models
from transform_once.training.train import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = (25, 50, 100, 200)  # fewer than all, for the error against the number of samples
SEEDS = tuple(range(FOLDS))  # each with a split of its own
FEWER_SEEDS = SEEDS[:3]  # of fewer samples, and of ablations
CANDIDATES = (("adamw", 3e-3), ("muon", 1e-2))  # optimisers and learning rates that every model tries
BATCH = 8
QUARTER = 0.25  # of the budget, for the T1s
COLOURED = 0.995  # of the errors in the picture; larger ones have the last colour
DEGREES = 4  # of the free stream's angle, whose flows have a median in the picture
Candidate = tuple[str, float]


class Make(NamedTuple):
    """A model, and its share of the budget."""

    kind: type[Operator]
    options: dict[str, Any]
    share: float = 1.0


MODELS = {
    "UNet": Make(UNet, {"width": 64}),
    "FNO": Make(FNO, {"modes": 24, "width": 48, "depth": 6}),
    "T1+vp": Make(T1Plus, {"modes": 100, "width": 32, "init": "vp"}, QUARTER),
    "T1+vp, 48 modes": Make(T1Plus, {"modes": 48, "width": 32, "init": "vp"}, QUARTER),  # as all below, ours
    "T1Grid": Make(T1Grid, {"modes": 48, "width": 32, "depth": 8, "waves": 4}, QUARTER),
    "T1Grid, 32 modes": Make(T1Grid, {"modes": 32, "width": 32, "depth": 8, "waves": 4}, QUARTER),
}
QUICK_STRIDE, QUICK_BUDGET = 4, 0.1
QUICK = {
    "UNet": Make(UNet, {"width": 8}),
    "FNO": Make(FNO, {"modes": 6, "width": 8, "depth": 2}),
    "T1+vp": Make(T1Plus, {"modes": 24, "width": 8, "init": "vp"}, QUARTER),
    "T1Grid": Make(T1Grid, {"modes": 24, "width": 8, "depth": 2}, QUARTER),
}


def airfoils(
    data: Path,
    output: Path = Path("docs/results"),
    runs: Path = Path("runs/airfoils"),
    further: list[Path] | None = None,
    budget: float = 180.0,
    seconds: float | None = None,
    device: str = "auto",
    quick: bool = False,
) -> None:
    """UNet, FNO and T1+vp on flow around airfoils: errors, training time, number of samples, symmetry and scaling.

    Args:
        data: Folder of the data sets; airfoil/openfoam.npz and airfoil/dfp_original are read.
        output: Folder of airfoils.csv and of the report of the runs, airfoils.html; figures go to figures beside it.
        runs: Folder for the run folders.
        further: Files that `t1 generate airfoils` wrote, as further samples.
        budget: Seconds of training of every model; the T1s have a quarter of it.
        seconds: Begin no case that would last longer, judged by the one before; the same command continues.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1 or mps.
        quick: Whether to train for 0.1 s at a quarter of the resolution: a check of the pipeline, not a result.
    """
    began = time.monotonic()
    name, stride, models = ("airfoils-quick", QUICK_STRIDE, QUICK) if quick else ("airfoils", 1, MODELS)
    results, pictures = Results(output / f"{name}.csv"), output.parent / "figures"
    flows = read_flows(data / "airfoil" / "openfoam.npz", further or (), stride)
    original = of_fields(read(data / "airfoil" / "dfp_original", stride=stride))
    parts = [split(flows, shapes_of(original.names), fold) for fold in range(FOLDS)]
    budget = QUICK_BUDGET if quick else budget
    study = Study(parts, original, models, runs / name, str(choose_device(device)), budget, quick)
    search = study.search()
    left = run_study(search, results, study.work, seconds=seconds)
    if not left:
        best = {model: _best(results, search, model) for model in models}
        rest = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        left = run_study(study.cases(best), results, study.work, seconds=rest)
    pictures.mkdir(parents=True, exist_ok=True)
    for stem, figure in study.figures(results).items():
        print(save_figure(figure, pictures / f"{name}-{stem}.png"))
    if trained := study.trained(results):
        print(report(list(trained.values()), output / f"{name}.html"))
    if not quick:
        write_page(results.path, output.parent / "reproduction.md")
    if left:
        print(f"{left} cases or more are left: the same command continues")


@dataclass(frozen=True, eq=False)
class Study:
    """The cases, and the work that each of them is; `parts` are those of each fold."""

    parts: Sequence[Mapping[str, Flows]]
    original: Flows
    models: Mapping[str, Make]
    runs: Path
    device: str
    budget: float
    quick: bool

    def search(self) -> list[Case]:
        """What dropping modes costs; then every model with every candidate, judged on the validation part."""
        candidates = CANDIDATES[:1] if self.quick else CANDIDATES
        spectral = {name: make.options["modes"] for name, make in self.models.items() if make.share < 1}
        floors = [Case("airfoils", "floor", name, {"modes": modes}) for name, modes in spectral.items()]
        pairs = itertools.product(self.models, candidates)
        return floors + [self._case("search", model, candidate, 0) for model, candidate in pairs]

    def cases(self, best: Mapping[str, Candidate]) -> list[Case]:
        """The main table; then fewer samples, and without symmetry, scaling and mask, seed by seed."""
        seeds, fewer = (SEEDS[:1], SEEDS[:1]) if self.quick else (SEEDS, FEWER_SEEDS)
        known = min(len(parts["train"]) for parts in self.parts)
        changes = [("samples", {"train": count}) for count in SAMPLES if count < known]
        changes += [("ablation", {what: False}) for what in ("symmetric", "scaled", "masked")]
        cases = [self._case("main", model, best[model], seed) for seed in seeds for model in self.models]
        return cases + [
            self._case(table, model, best[model], seed, **changed)
            for seed, model, (table, changed) in itertools.product(fewer, reversed(list(self.models)), changes)
        ]

    def _case(self, table: str, model: str, candidate: Candidate, seed: int, **changed: Any) -> Case:
        optimizer, rate = candidate
        make = self.models[model]
        options = {
            "fold": seed % FOLDS,
            "train": len(self.parts[seed % FOLDS]["train"]),
            **dict.fromkeys(("symmetric", "scaled", "masked"), True),
            **changed,
            **make.options,
            "budget": self.budget * make.share,
            "optimizer": optimizer,
            "learning_rate": rate,
            "seed": seed,
        }
        return Case("airfoils", table, model, options)

    def work(self, case: Case) -> list[Row]:
        """Train and judge one case: a row for the test part and one for the original samples."""
        options = case.options
        parts = self.parts[options.get("fold", 0)]
        test = parts["test"]
        if case.table == "floor":
            return [{"part": "test", "modes": options["modes"], **errors(rebuilt(test, options["modes"]), test)}]
        own = parts["train"][range(options["train"])]
        sigma = None if options["scaled"] else own.physical.std((0, 2, 3))
        made = partial(Flows.pairs, sigma=sigma, symmetric=options["symmetric"], masked=options["masked"])
        torch.manual_seed(options["seed"])
        make = self.models[case.label]
        model = make.kind(3, 3, own.fields.shape[2:], **make.options)
        settings: dict[str, Any] = {
            "seconds": options["budget"],
            "batch_size": min(BATCH, len(own)),
            **{name: options[name] for name in ("optimizer", "learning_rate", "seed")},
            "device": self.device,
        }
        held, folder = made(parts["validation"]), case.folder(self.runs)
        try:
            run = train(model, made(own), held, output=folder, progress=False, **settings)
        except FloatingPointError as error:  # a rate that is too large is a result too
            print(f"{case.label} diverged: {error}")
            return [{"part": "test", "seed": options["seed"], "validation": math.inf, "relative_l2": math.inf}]
        if not run.finished:
            raise SystemExit(130)
        facts = run.description
        asked = ("fold", "train", "symmetric", "scaled", "masked", "optimizer", "learning_rate", "seed")
        about: Row = {key: options[key] for key in asked}
        about |= {
            "updates": run.history[-1]["step"],
            "validation": facts["best"][0]["validation"],
            "seconds": facts["seconds"],
            "milliseconds_per_step": 1e3 * facts["seconds_per_step"],
            "parameters": facts["model"]["parameters"],
            "hardware": facts["environment"]["hardware"],
        }
        if case.table == "main":
            save_evaluation(folder, full_evaluation(run.models, made(test), device=self.device, progress=False))
        rows = []
        for part, flows in (("test", test), ("original", self.original)):
            found = flows.dimensionless(_predicted(run.model, flows.pairs(sigma).input, self.device), sigma)
            rows.append({"part": part, **about, **errors(found, flows)})
        return rows

    def trained(self, results: Results, seed: int = 0) -> dict[str, Path]:
        """The run folder of each model with a seed in the main table, as far as it is here and was judged."""
        done = [row for row in results.rows if row["table"] == "main" and row.get("learning_rate")]
        best = {row["label"]: (row["optimizer"], float(row["learning_rate"])) for row in done}
        found = {
            model: self._case("main", model, candidate, seed).folder(self.runs) for model, candidate in best.items()
        }
        return {model: folder for model, folder in found.items() if (folder / "metrics.json").exists()}

    def figures(self, results: Results) -> dict[str, "Figure"]:
        """Truncation and spectrum of the data; predictions of first seeds; errors against angle, number of samples."""
        test, modes = self.parts[0]["test"].pairs(masked=False), self.models["T1+vp"].options["modes"]
        both = [(array, shown(test, array, [0])) for array in ("input", "target")]
        made = {
            "truncation": truncation_figure(shown(test), modes).pictures[""],
            "spectrum": spectrum_figure(both, 0).pictures[""],
        }
        if trained := self.trained(results):
            made["predictions"] = self._predictions(trained)
            made["angles"] = self._angles(results)
        rows = _by_samples([row for row in results.rows if row["part"] == "test"])
        titles = ("training samples", "relative L2, unseen shapes")
        return made | ({"samples": line_figure(rows, "train", "relative_l2", titles)} if rows else {})

    def _angles(self, results: Results) -> "Figure":
        """The error of every flow in the test of the split that it is in, against the angle of the free stream."""
        found: dict[str, list[Tensor]] = {}
        for seed in SEEDS:
            flows = self.parts[seed % FOLDS]["test"]
            for name, folder in self.trained(results, seed).items():
                predicted = _predicted(load_models(folder)[0], flows.pairs().input, self.device)
                found.setdefault(name, []).append(torch.stack([flows.angle.double(), errors_of_each(predicted, flows)]))
        return _draw_angles({name: torch.cat(parts, 1) for name, parts in found.items()})

    def _predictions(self, folders: Mapping[str, Path]) -> "Figure":
        """Pressure with arrows of the velocity, x to the right and y up: truth, predictions, errors of the pressure."""
        flows = self.parts[0]["test"][[0]]  # any: their order is random
        pictures = {"truth": flows.fields[0].double()}
        for name, folder in folders.items():
            found = _predicted(load_models(folder)[0], flows.pairs().input, self.device)
            pictures[name] = (found * ~flows.inside)[0].double()
        return _draw_flows(flows.names[0], pictures, flows.inside[0, 0])


def _predicted(model: Operator, x: Tensor, device: str) -> Tensor:
    found = predict(model, x, device=device)
    assert isinstance(found, Tensor)  # of one model there is no spread
    return found


def _best(results: Results, search: Sequence[Case], model: str) -> Candidate:
    own = [case for case in search if case.table == "search" and case.label == model]
    chosen = min(own, key=lambda case: float(results.of(case)[0]["validation"])).options
    return chosen["optimizer"], chosen["learning_rate"]


def _by_samples(rows: Sequence[Row]) -> list[Row]:
    """The runs with fewer samples, and with all of them those of the same seeds, whose number differs by fold."""
    fewer = [row for row in rows if row["table"] == "samples"]
    same = {(row["label"], row["seed"]) for row in fewer}
    whole = [row for row in rows if row["table"] == "main" and (row["label"], row["seed"]) in same]
    count = round(statistics.fmean(int(row["train"]) for row in whole)) if whole else 0
    return fewer + [{**row, "train": count} for row in whole]


def _draw_angles(found: Mapping[str, Tensor]) -> "Figure":
    """A point for each flow, (angle, error), and a line through the medians of every four degrees."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        for number, (name, (angle, error)) in enumerate(found.items()):
            colour, style = colour_of(number)
            axes.plot(angle, error, ".", color=colour, markersize=2.5, alpha=0.4)
            groups = angle.div(DEGREES).long()
            middle = [float(error[groups == group].median()) for group in groups.unique()]
            axes.plot(DEGREES * (groups.unique() + 0.5), middle, style, color=colour, label=name)
        logarithmic(axes.yaxis)
        axes.set(xlabel="angle of the free stream in degrees", ylabel="relative L2 of a flow, unseen shapes")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return figure


def _draw_flows(name: str, pictures: Mapping[str, Tensor], inside: Tensor) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    truth = pictures["truth"]
    bound = float(truth[0].abs().max())
    found = torch.stack([values[0] - truth[0] for values in pictures.values()][1:])
    wrong = float(found[:, ~inside].abs().quantile(COLOURED))  # single points at the wall would whiten the rest
    points = torch.arange(len(inside) // 32, len(inside), max(1, len(inside) // 16))
    with rc_context(STYLE):
        figure = Figure(figsize=(3.1 * len(pictures) + 0.6, 6.0), layout="constrained")
        panels = figure.subplots(2, len(pictures), squeeze=False)
        for column, (title, values) in enumerate(pictures.items()):
            hidden = values[0].masked_fill(inside, math.nan)
            upper = draw_image(panels[0, column], hidden.T.numpy(), Scale(-bound, bound, "RdBu_r"), title)
            u, v = (values[c][points][:, points].T for c in (1, 2))
            panels[0, column].quiver(
                points, points, u, v, torch.hypot(u, v), cmap="viridis", clim=(0, 1.5), scale=22, width=0.006
            )
            if column:
                error = (values[0] - truth[0]).masked_fill(inside, math.nan)
                heading = f"pressure error, relative L2 {float((values[0] - truth[0]).norm() / truth[0].norm()):.3f}"
                lower = draw_image(panels[1, column], error.T.numpy(), Scale(-wrong, wrong, "PuOr_r"), heading)
                panels[1, column].invert_yaxis()
            panels[0, column].invert_yaxis()
        panels[1, 0].axis("off")
        figure.colorbar(upper, ax=panels[0, :], shrink=0.9, pad=0.01, label="p/|v|² (arrows: velocity)")
        figure.colorbar(lower, ax=panels[1, 1:], shrink=0.9, pad=0.01, label="error of p/|v|²", extend="both")
        figure.suptitle(f"{name}, of a shape not trained on", fontsize=10)
    return figure
