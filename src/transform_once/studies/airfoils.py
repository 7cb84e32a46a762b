"""`t1 reproduce airfoils`: UNet (DFPNet), FNO and T1+vp on steady flow around airfoils, split by the airfoils' shapes.

FOLDER/airfoil/openfoam.npz holds our own solutions: `fields` = p/|v|², u/|v|, v/|v| as [x, y], `mask`, `freestream` v
and `name`; FOLDER/airfoil/dfp_original six samples that another group computed. Pressure is known up to a constant, and
nearly scales with |v|², the velocity with |v|, so models see the direction of the free stream and the mask, and give
p/|v|² less its mean over the fluid, u/|v| and v/|v|; inside the airfoil all are zero. The mirror y → −y takes solutions
to solutions. As in the paper the loss is the relative L2 over the whole image; errors outside the airfoil alone stand
beside it. All errors are of these dimensionless fields, whatever a model was trained on.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.formats import read
from transform_once.data.symmetries import Symmetry
from transform_once.evaluation.evaluate import full_evaluation, predict, save_evaluation
from transform_once.models.fno import FNO
from transform_once.models.operator import Operator
from transform_once.models.t1 import T1Plus
from transform_once.models.t1_grid import T1Grid
from transform_once.models.unet import UNet
from transform_once.processes import choose_device
from transform_once.reports.curves import STYLE
from transform_once.reports.figures import save_figure
from transform_once.reports.page import report
from transform_once.reports.panels import Scale
from transform_once.reports.paper_data import shown
from transform_once.reports.paper_spectrum import spectrum_figure
from transform_once.reports.paper_table import draw_image
from transform_once.reports.paper_truncation import truncation_figure
from transform_once.spectral.modes import irreducible_loss
from transform_once.studies.pages import line_figure, write_page
from transform_once.studies.study import Case, Results, Row, run_study
from transform_once.training.run import load_models
from transform_once.training.train import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIRROR = Symmetry(signs=(1, -1), offset=(0.0, 1.0), factors=(1.0, 1.0, -1.0), input_factors=(1.0, -1.0, 1.0))
CHANNELS = ("pressure", "velocity_x", "velocity_y")
SHARES = {"test": 0.2, "validation": 0.15}  # of the shapes; the rest is for training
SAMPLES = (25, 50, 100, 200)  # fewer than all, for the error against the number of samples
SEEDS = (0, 1, 2, 3, 4)
RATES = (1e-3, 3e-3)  # learning rates that every model tries
BATCH = 16
Make = tuple[type[Operator], dict[str, Any]]
MODELS: dict[str, Make] = {
    "UNet": (UNet, {"width": 64}),
    "FNO": (FNO, {"modes": 24, "width": 48, "depth": 6}),
    "T1+vp": (T1Plus, {"modes": 100, "width": 32, "init": "vp"}),
    "T1Grid": (T1Grid, {"modes": 96, "width": 32, "depth": 4}),  # ours
}
QUICK_STRIDE = 4
QUICK: dict[str, Make] = {
    "UNet": (UNet, {"width": 8}),
    "FNO": (FNO, {"modes": 6, "width": 8, "depth": 2}),
    "T1+vp": (T1Plus, {"modes": 24, "width": 8, "init": "vp"}),
    "T1Grid": (T1Grid, {"modes": 24, "width": 8, "depth": 2}),
}


def airfoils(
    data: Path,
    output: Path = Path("docs/results"),
    runs: Path = Path("runs/airfoils"),
    further: list[Path] | None = None,
    steps: int = 2000,
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
        steps: Updates of the weights in every training, whatever the number of samples.
        seconds: Begin no case that would last longer, judged by the one before; the same command continues.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1 or mps.
        quick: Whether to train briefly at a quarter of the resolution: a check of the pipeline, not a result.
    """
    began = time.monotonic()
    name, stride, models = ("airfoils-quick", QUICK_STRIDE, QUICK) if quick else ("airfoils", 1, MODELS)
    results, pictures = Results(output / f"{name}.csv"), output.parent / "figures"
    flows = read_flows(data / "airfoil" / "openfoam.npz", further or (), stride)
    original = of_fields(read(data / "airfoil" / "dfp_original", stride=stride))
    parts = split(flows, shapes_of(original.names))
    study = Study(parts, original, models, runs / name, str(choose_device(device)), steps, quick)
    search = study.search()
    left = run_study(search, results, study.work, seconds=seconds)
    if not left:
        rates = {model: _best(results, search, model) for model in models}
        rest = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        left = run_study(study.cases(rates), results, study.work, seconds=rest)
    pictures.mkdir(parents=True, exist_ok=True)
    for stem, figure in study.figures(results).items():
        print(save_figure(figure, pictures / f"{name}-{stem}.png"))
    if trained := study.trained(results):
        print(report(list(trained.values()), output / f"{name}.html"))
    if not quick:
        write_page("airfoils", results.path, output.parent / "reproduction.md")
    if left:
        print(f"{left} cases or more are left: the same command continues")


@dataclass(frozen=True, eq=False)
class Flows:
    """Flows around airfoils: `fields` (n, 3, x, y) = p/|v|² less its mean `level` (n,), u/|v|, v/|v|; zero inside.

    `stream` (n, 2) is the free stream v, `inside` (n, 1, x, y) the airfoil.
    """

    names: tuple[str, ...]
    stream: Tensor
    inside: Tensor
    fields: Tensor
    level: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, numbers: Sequence[int]) -> "Flows":
        chosen = list(numbers)
        arrays = (self.stream, self.inside, self.fields, self.level)
        return Flows(tuple(self.names[i] for i in chosen), *(array[chosen] for array in arrays))

    @property
    def speed(self) -> Tensor:
        """|v|, (n, 1, 1, 1)."""
        return self.stream.norm(dim=1).reshape(-1, 1, 1, 1)

    @property
    def physical(self) -> Tensor:
        """p, u and v in the units of the free stream, the pressure with its level."""
        units = torch.cat([self.speed**2, self.speed, self.speed], 1)
        level = torch.zeros_like(self.fields)
        level[:, :1] = self.level.reshape(-1, 1, 1, 1) * ~self.inside
        return (self.fields + level) * units

    def pairs(self, sigma: Tensor | None = None, symmetric: bool = True) -> Fields:
        """What models learn: from direction and mask to the dimensionless fields.

        With `sigma` (3,), deviations over the training part, in the paper's way: from the free stream itself to the
        physical fields, each over its deviation, so that no channel rules the loss.
        """
        given = (self.stream if sigma is not None else self.stream / self.speed[..., 0, 0])[..., None, None]
        mask = self.inside.float()
        target = self.fields if sigma is None else self.physical / sigma.reshape(-1, 1, 1)
        return Fields(
            input=torch.cat([given * ~self.inside, mask], 1),
            target=target,
            names=self.names,
            grid="node",
            channels={"input": ("freestream_x", "freestream_y", "mask"), "target": CHANNELS},
            source="steady flow around airfoils",
            symmetries=[MIRROR.to_dict()] if symmetric else [],
        )

    def dimensionless(self, prediction: Tensor, sigma: Tensor | None = None) -> Tensor:
        """A prediction for `pairs(sigma)` as dimensionless fields; of physical ones the mean pressure is removed."""
        if sigma is None:
            return prediction
        units = torch.cat([self.speed**2, self.speed, self.speed], 1)
        return _levelled(prediction * sigma.reshape(-1, 1, 1) / units, self.inside, zero=False)[0]


def _levelled(fields: Tensor, inside: Tensor, zero: bool = True) -> tuple[Tensor, Tensor]:
    """Fields whose pressure has mean zero outside the airfoil, with zeros inside if wanted, and the mean."""
    outside = ~inside[:, 0]
    level = (fields[:, 0] * outside).sum((1, 2)) / outside.sum((1, 2))
    pressure = fields[:, :1] - level.reshape(-1, 1, 1, 1)
    fields = torch.cat([pressure, fields[:, 1:]], 1)
    return (fields * ~inside if zero else fields), level


def _flows(names: Sequence[str], stream: Tensor, inside: Tensor, fields: Tensor) -> Flows:
    return Flows(tuple(names), stream, inside, *_levelled(fields, inside))


def read_flows(path: Path, further: Sequence[Path] = (), stride: int = 1) -> Flows:
    """The solutions of openfoam.npz, and of files that `t1 generate airfoils` wrote; every stride-th point."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in ("mask", "fields", "freestream", "name")}
    points = (..., slice(None, None, stride), slice(None, None, stride))
    inside = torch.from_numpy(arrays["mask"][points] != 0)[:, None]
    fields = torch.from_numpy(arrays["fields"][points].astype(np.float32))
    parts = [_flows(arrays["name"].tolist(), torch.from_numpy(arrays["freestream"]).float(), inside, fields)]
    parts += [of_fields(read(file, stride=stride)) for file in further]
    tensors = ([getattr(part, key) for part in parts] for key in ("stream", "inside", "fields", "level"))
    return Flows(tuple(name for part in parts for name in part.names), *map(torch.cat, tensors))


def of_fields(fields: Fields) -> Flows:
    """Flows of pairs in physical units: (freestream x and y, mask) to (p, u, v), as in Deep-Flow-Prediction."""
    given, target = fields.input.float(), fields.target.float()
    stream = given[:, :2, 0, 0]  # the corner lies outside every airfoil; inside, the free stream is stored as zero
    speed = stream.norm(dim=1).reshape(-1, 1, 1, 1)
    scaled = torch.cat([target[:, :1] / speed**2, target[:, 1:] / speed], 1)
    return _flows(fields.names, stream, given[:, 2:] > 0.5, scaled)


def shapes_of(names: Sequence[str]) -> list[str]:
    """The airfoils of names SHAPE_<100·v_x>_<100·v_y>."""
    return [name.rsplit("_", 2)[0] for name in names]


def split(flows: Flows, for_test: Sequence[str] = ()) -> dict[str, Flows]:
    """Training, validation and test parts, no shape in two of them; shapes `for_test` are kept from the others."""
    own = shapes_of(flows.names)
    drawn = np.random.default_rng(0).permutation(sorted(set(own) - set(for_test))).tolist()
    counts = [max(1, round(share * len(drawn))) for share in SHARES.values()]
    if sum(counts) >= len(drawn):
        raise ValueError(f"flows around 3 different airfoils or more are needed for three parts; got {len(drawn)}")
    test, validation, rest = np.split(np.array(drawn), np.cumsum(counts))
    shapes = {"train": set(rest), "validation": set(validation), "test": {*test, *for_test}}
    order = np.random.default_rng(1).permutation(len(own)).tolist()  # so that the first 25 are any 25
    return {part: flows[[i for i in order if own[i] in chosen]] for part, chosen in shapes.items()}


def errors(prediction: Tensor, flows: Flows) -> Row:
    """Relative L2 of dimensionless fields, means over the samples: all channels, outside the airfoil, each channel."""
    error, truth = prediction.double() - flows.fields, flows.fields.double()

    def relative(e: Tensor, y: Tensor) -> float:
        return float((e.flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean())

    per_channel = {name: relative(error[:, c], truth[:, c]) for c, name in enumerate(CHANNELS)}
    outside = relative(error * ~flows.inside, truth)
    return {"samples": len(flows), "relative_l2": relative(error, truth), "outside": outside, **per_channel}


@dataclass(frozen=True, eq=False)
class Study:
    """The cases, and the work that each of them is."""

    parts: Mapping[str, Flows]
    original: Flows
    models: Mapping[str, Make]
    runs: Path
    device: str
    steps: int
    quick: bool

    def search(self) -> list[Case]:
        """What dropping modes costs; then every model with every learning rate, judged on the validation part."""
        rates = RATES[:1] if self.quick else RATES
        floor = Case("airfoils", "floor", "T1+vp", {"modes": self.models["T1+vp"][1]["modes"]})
        return [floor, *(self._case("search", model, rate, 0) for model in self.models for rate in rates)]

    def cases(self, rates: Mapping[str, float]) -> list[Case]:
        """The main table, then fewer samples, then without symmetry and without scaling."""
        seeds, fewer = (SEEDS[:1], SEEDS[:1]) if self.quick else (SEEDS, SEEDS[:3])
        known = len(self.parts["train"])
        cases = [self._case("main", model, rates[model], seed) for seed in seeds for model in self.models]
        for count in [count for count in SAMPLES if count < known]:
            cases += [self._case("samples", m, rates[m], seed, train=count) for m in self.models for seed in fewer]
        for without in ({"symmetric": False}, {"scaled": False}):
            cases += [self._case("ablation", m, rates[m], seed, **without) for m in self.models for seed in fewer]
        return cases

    def _case(self, table: str, model: str, rate: float, seed: int, **changed: Any) -> Case:
        options = {"train": len(self.parts["train"]), "symmetric": True, "scaled": True, "steps": self.steps, **changed}
        return Case("airfoils", table, model, {**options, **self.models[model][1], "learning_rate": rate, "seed": seed})

    def folder(self, case: Case) -> Path:
        """The run folder of a case; cases of two tables that are trained alike share it, and are trained once."""
        plain = re.sub(r"[^A-Za-z0-9+]+", "-", f"{case.label}-seed-{case.options['seed']}")
        options = json.dumps(dict(case.options), sort_keys=True)
        return self.runs / f"{plain}-{hashlib.sha256(options.encode()).hexdigest()[:6]}"

    def work(self, case: Case) -> list[Row]:
        """Train and judge one case: a row for the test part and one for the original samples."""
        options, test = case.options, self.parts["test"]
        if case.table == "floor":
            return [{"part": "test", "relative_l2": irreducible_loss(test.fields, options["modes"])}]
        own = self.parts["train"][range(options["train"])]
        sigma = None if options["scaled"] else own.physical.std((0, 2, 3))
        made = partial(Flows.pairs, sigma=sigma, symmetric=options["symmetric"])
        torch.manual_seed(options["seed"])
        make, arguments = self.models[case.label]
        model = make(3, 3, own.fields.shape[2:], **arguments)
        batch = min(BATCH, len(own))
        settings: dict[str, Any] = {
            "epochs": math.ceil(options["steps"] / math.ceil(len(own) / batch)),
            "batch_size": batch,
            "optimizer": "adamw",
            **{name: options[name] for name in ("learning_rate", "seed")},
            "device": self.device,
        }
        held, folder = made(self.parts["validation"]), self.folder(case)
        try:
            run = train(model, made(own), held, output=folder, progress=False, **settings)
        except FloatingPointError as error:  # a rate that is too large is a result too
            print(f"{case.label} diverged: {error}")
            return [{"part": "test", "seed": options["seed"], "validation": math.inf, "relative_l2": math.inf}]
        if not run.finished:
            raise SystemExit(130)
        facts = run.description
        about: Row = {key: options[key] for key in ("train", "symmetric", "scaled", "learning_rate", "seed")}
        about |= {
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
            found = flows.dimensionless(_predicted(run.model, made(flows), self.device), sigma)
            rows.append({"part": part, **about, **errors(found, flows)})
        return rows

    def trained(self, results: Results) -> dict[str, Path]:
        """The run folder of each model's first seed in the main table, as far as it is here and was judged."""
        done = [row for row in results.rows if row["table"] == "main" and row.get("learning_rate")]
        rates = {row["label"]: float(row["learning_rate"]) for row in done}
        found = {model: self.folder(self._case("main", model, rate, 0)) for model, rate in rates.items()}
        return {model: folder for model, folder in found.items() if (folder / "metrics.json").exists()}

    def figures(self, results: Results) -> dict[str, "Figure"]:
        """Truncation and spectrum of the data; predictions of the first seeds; error against the number of samples."""
        test, modes = self.parts["test"].pairs(), self.models["T1+vp"][1]["modes"]
        both = [(array, shown(test, array, [0])) for array in ("input", "target")]
        made = {
            "truncation": truncation_figure(shown(test), modes).pictures[""],
            "spectrum": spectrum_figure(both, 0).pictures[""],
        }
        if trained := self.trained(results):
            made["predictions"] = self._predictions(trained)
        rows = [row for row in results.rows if row["table"] in ("main", "samples") and row["part"] == "test"]
        titles = ("training samples", "relative L2, unseen shapes")
        return made | ({"samples": line_figure(rows, "train", "relative_l2", titles)} if rows else {})

    def _predictions(self, folders: Mapping[str, Path]) -> "Figure":
        """Pressure with arrows of the velocity, x to the right and y up: truth, predictions, errors of the pressure."""
        flows = self.parts["test"][[0]]  # any: their order is random
        pictures = {"truth": flows.fields[0].double()}
        for name, folder in folders.items():
            pictures[name] = _predicted(load_models(folder)[0], flows.pairs(), self.device)[0].double()
        return _draw_flows(flows.names[0], pictures, flows.inside[0, 0])


def _predicted(model: Operator, pairs: Fields, device: str) -> Tensor:
    found = predict(model, pairs.input, device=device)
    assert isinstance(found, Tensor)  # of one model there is no spread
    return found


def _best(results: Results, search: Sequence[Case], model: str) -> float:
    own = [case for case in search if case.table == "search" and case.label == model]
    return float(min(own, key=lambda case: float(results.of(case)[0]["validation"])).options["learning_rate"])


def _draw_flows(name: str, pictures: Mapping[str, Tensor], inside: Tensor) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    truth = pictures["truth"]
    bound = float(truth[0].abs().max())
    wrong = max(float((values[0] - truth[0]).abs().max()) for values in pictures.values())
    points = torch.arange(len(inside) // 32, len(inside), max(1, len(inside) // 16))
    with rc_context(STYLE):
        figure = Figure(figsize=(3.1 * len(pictures) + 0.6, 6.0), layout="constrained")
        panels = figure.subplots(2, len(pictures), squeeze=False)
        for column, (title, values) in enumerate(pictures.items()):
            hidden = values[0].masked_fill(inside, math.nan)
            upper = draw_image(panels[0, column], hidden.T.numpy(), Scale(-bound, bound, "RdBu_r"), title)
            u, v = (values[c][points][:, points].T.numpy() for c in (1, 2))
            panels[0, column].quiver(
                points, points, u, v, np.hypot(u, v), cmap="viridis", clim=(0, 1.5), scale=22, width=0.006
            )
            if column:
                error = (values[0] - truth[0]).masked_fill(inside, math.nan)
                heading = f"pressure error, relative L2 {float((values[0] - truth[0]).norm() / truth[0].norm()):.3f}"
                lower = draw_image(panels[1, column], error.T.numpy(), Scale(-wrong, wrong, "PuOr_r"), heading)
                panels[1, column].invert_yaxis()
            panels[0, column].invert_yaxis()
        panels[1, 0].axis("off")
        figure.colorbar(upper, ax=panels[0, :], shrink=0.9, pad=0.01, label="p/|v|² (arrows: velocity)")
        figure.colorbar(lower, ax=panels[1, 1:], shrink=0.9, pad=0.01, label="error of p/|v|²")
        figure.suptitle(f"{name}, of a shape not trained on", fontsize=10)
    return figure
