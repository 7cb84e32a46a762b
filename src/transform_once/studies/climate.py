"""`t1 reproduce climate`: low-pass against top-m on reanalysis fields, and forecasts of temperature from one month.

Two files are read from FOLDER/climate: `erainterim_zuv.npz` (z, u, v, each (month, level, rows, columns)) and
`era5_t2m_uk_hourly_2019-03.npz` (t2m, (hours, rows, columns)).

Forecasts: the first 60% of the hours are for training, the next 20% for validation, the last 20% for the test; all
frames of a window lie in one part. With c_h the mean of the training part at hour h of the day (the diurnal
climatology) models learn the anomaly x − c_h: from those of a day (an hour) and two before to that of the target, with
an integrator of order 1. Modes and learning rate are chosen on the validation part, of as many candidates for every
model, and the epochs by early stopping there.
"""

import itertools
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.formats import read
from transform_once.evaluation.rollout import rollout
from transform_once.models.fno import FNO
from transform_once.models.operator import Operator
from transform_once.models.t1 import T1
from transform_once.models.t1_grid import T1Grid
from transform_once.reports.curves import STYLE, colour_of
from transform_once.reports.figures import save_figure
from transform_once.reports.paper_data import Shown, varying
from transform_once.reports.paper_selection import TOLERANCE, selection_curves, selection_figure
from transform_once.spectral.transforms import dct
from transform_once.studies.climate_page import write_page
from transform_once.studies.study import Case, Results, Row, run_study
from transform_once.training.train import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = {"z": "geopotential", "u": "eastward wind", "v": "northward wind"}
BASELINES = ("persistence", "climatology", "diurnal climatology", "anomaly persistence", "damped persistence")
SINGLE, OTHER = "top-m chosen per field", "top-m of the other month"
BOXES = (8, 16, 32, 64, 128)  # low-passes at whose numbers of coefficients errors are compared

DAY = 24
LEADS = (1, DAY)  # hours ahead
SHARES = (0.6, 0.2)  # of the hours, for training and validation; the rest is the test
HISTORY = 1  # frames before the present one that models see
SEEDS = (0, 1, 2)
RATES = (1e-3, 4e-3)
MODELS: dict[str, type[Operator]] = {"T1": T1, "T1Grid": T1Grid, "FNO": FNO}
SIZES = {"width": 8, "depth": 3}
TRAINING: dict[str, Any] = {"epochs": 40, "batch_size": 32, "patience": 6, "validate_every": 1, "history": HISTORY}


def climate(
    data: Path,
    output: Path = Path("docs/results"),
    seconds: float | None = None,
    device: str = "auto",
    quick: bool = False,
) -> None:
    """Low-pass against top-m on ERA-Interim fields, and forecasts of an ERA5 month for the next hour and the next day.

    Args:
        data: Folder of the data sets; climate/erainterim_zuv.npz and climate/era5_t2m_uk_hourly_2019-03.npz are read.
        output: Folder of climate.csv; figures go to the folder figures beside it.
        seconds: Begin no case that would last longer, judged by the one before; the same command continues.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1 or mps.
        quick: Whether to train briefly, with one seed and one learning rate: a check of the pipeline, not a result.
    """
    began = time.monotonic()
    name = "climate-quick" if quick else "climate"
    results, pictures = Results(output / f"{name}.csv"), output.parent / "figures"
    winds, month = _winds(data), Month.read(data)
    candidates = _candidates(month, quick)
    work = partial(_work, winds, month, device)
    left = run_study([*_given(), *candidates], results, work, seconds=seconds)
    if not left:
        chosen = [_best(results, candidates, model, lead) for model in MODELS for lead in LEADS]
        finals = [
            Case("climate", "forecast", str(case.options["model"]), {**case.options, "seed": seed})
            for case in chosen
            for seed in (SEEDS[:1] if quick else SEEDS)
        ]
        rest = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        left = run_study(finals, results, work, seconds=rest)
    pictures.mkdir(parents=True, exist_ok=True)
    for stem, figure in _figures(winds, results).items():
        print(save_figure(figure, pictures / f"{name}-{stem}.png"))
    if not quick:
        write_page(results.path, output.parent / "reproduction.md")
    if left:
        print(f"{left} cases or more are left: the same command continues")


@dataclass(frozen=True, eq=False)
class Month:
    """Hourly fields (hours, 1, rows, columns), the hours of each part, and what the training part has as its mean."""

    fields: Tensor
    parts: Mapping[str, range]

    @classmethod
    def read(cls, folder: Path) -> "Month":
        """The month of t2m in a folder of data sets."""
        path = folder / "climate" / "era5_t2m_uk_hourly_2019-03.npz"
        return cls.split(read(path, trajectory_key="t2m", axes="txy").trajectory[0])

    @classmethod
    def split(cls, fields: Tensor) -> "Month":
        """Cut the hours into three parts, in order; each must hold a window of the longest lead."""
        hours = len(fields)
        first, second = int(SHARES[0] * hours), int(SHARES[1] * hours)
        borders = (0, first, first + second, hours)
        names = ("train", "validation", "test")
        parts = {name: range(*ends) for name, ends in zip(names, itertools.pairwise(borders), strict=True)}
        needed = max(LEADS) * (HISTORY + 1) + 1
        if min(map(len, parts.values())) < needed:
            raise ValueError(f"every part needs {needed} hours or more, which takes {5 * needed} in all; got {hours}")
        return cls(fields, parts)

    @property
    def mean(self) -> Tensor:
        """The mean over the training part, (1, rows, columns): the climatology."""
        return self.fields[self.parts["train"].start : self.parts["train"].stop].mean(0)

    @property
    def diurnal(self) -> Tensor:
        """The mean over the training part of each hour of the day, (24, 1, rows, columns)."""
        own = self.fields[: self.parts["train"].stop]
        return torch.stack([own[hour::DAY].mean(0) for hour in range(DAY)])

    @property
    def anomalies(self) -> Tensor:
        """The fields less the diurnal climatology."""
        return self.fields - self.diurnal[torch.arange(len(self.fields)) % DAY]

    def targets(self, part: str, lead: int) -> Tensor:
        """The hours of a part that are forecast: those whose whole window lies in the part."""
        hours = self.parts[part]
        return torch.arange(hours.start + lead * (HISTORY + 1), hours.stop)

    def windows(self, part: str, lead: int) -> Tensor:
        """Anomalies of each target hour and of those it is forecast from: (targets, history + 2, 1, rows, columns)."""
        targets, anomalies = self.targets(part, lead), self.anomalies
        return torch.stack([anomalies[targets - lead * back] for back in range(HISTORY + 1, -1, -1)], 1)


def baselines(month: Month, part: str, lead: int) -> dict[str, Tensor]:
    """Forecasts (targets, 1, rows, columns) that need no model.

    persistence           what is: x(t)
    climatology           the mean of the training part
    diurnal climatology   its mean at that hour of the day
    anomaly persistence   diurnal climatology, plus the anomaly that is
    damped persistence    the same with the anomaly times a, the least-squares fit of one number on the training part
    """
    targets, own = month.targets(part, lead), month.targets("train", lead)
    diurnal, anomalies = month.diurnal[targets % DAY], month.anomalies
    before, after = anomalies[own - lead].double(), anomalies[own].double()
    damping = float((before * after).sum() / before.square().sum())
    return {
        "persistence": month.fields[targets - lead],
        "climatology": month.mean.expand(len(targets), *month.mean.shape),
        "diurnal climatology": diurnal,
        "anomaly persistence": diurnal + anomalies[targets - lead],
        "damped persistence": torch.add(diurnal, anomalies[targets - lead], alpha=damping),
    }


def scores(month: Month, part: str, lead: int, forecast: Tensor) -> Row:
    """Errors of a forecast (targets, 1, rows, columns).

    rmse        in kelvin, over all hours and points
    relative    mean over the hours of ‖forecast − x‖/‖x − mean of the training part‖
    skill       1 − MSE/MSE of persistence
    """
    targets = month.targets(part, lead)
    truth = month.fields[targets].double()
    error, anomaly = forecast.double() - truth, truth - month.mean
    persisted = (month.fields[targets - lead].double() - truth).square().mean()
    mse = error.square().mean()
    relative = (error.flatten(1).norm(dim=1) / anomaly.flatten(1).norm(dim=1)).mean()
    skill = float(1 - mse / persisted)
    return {"hours": len(targets), "rmse": math.sqrt(mse), "relative": float(relative), "skill": skill}


def _winds(folder: Path) -> dict[str, Tensor]:
    """The fields of each variable, (months · levels, rows, columns), month by month."""
    path = folder / "climate" / "erainterim_zuv.npz"
    return {
        name: read(path, trajectory_key=name, axes="tcxy").trajectory[0].double().flatten(0, 1) for name in VARIABLES
    }


def _given() -> list[Case]:
    """The cases that need no choice."""
    cases = [Case("climate", "reconstruction", words, {"variable": name}) for name, words in VARIABLES.items()]
    return cases + [Case("climate", "forecast", name, {"lead": lead}) for lead in LEADS for name in BASELINES]


def _candidates(month: Month, quick: bool) -> list[Case]:
    """What is tried on the validation part: three low-passes and two learning rates of each model."""
    size = tuple(month.fields.shape[-2:])
    least = min(size)
    modes: dict[str, list[Any]] = {
        "T1": [least // 2, 3 * least // 4, list(size)],  # the last keeps all: nothing is lost to truncation
        "T1Grid": [least // 2, 3 * least // 4, list(size)],
        "FNO": [least // 8, least // 4, 3 * least // 8],  # wave numbers on both sides: half as many
    }
    rates = RATES[:1] if quick else RATES
    training = TRAINING | ({"epochs": 1} if quick else {})
    return [
        Case(
            "climate",
            "search",
            f"{name}, modes {kept}, learning rate {rate:g}",
            {"model": name, "lead": lead, "modes": kept, "learning_rate": rate, **SIZES, **training, "seed": 0},
        )
        for name in MODELS
        for lead in LEADS
        for kept in (modes[name][-1:] if quick else modes[name])
        for rate in rates
    ]


def _best(results: Results, candidates: list[Case], name: str, lead: int) -> Case:
    own = [case for case in candidates if (case.options["model"], case.options["lead"]) == (name, lead)]
    return min(own, key=lambda case: float(results.of(case)[0]["rmse"]))


def _work(winds: Mapping[str, Tensor], month: Month, device: str, case: Case) -> list[Row]:
    if case.table == "reconstruction":
        return reconstruction(winds[case.options["variable"]])
    if "model" not in case.options:
        lead = case.options["lead"]
        return [{"lead": lead, "seed": "", **scores(month, "test", lead, baselines(month, "test", lead)[case.label])}]
    return _trained(month, device, case)


def reconstruction(fields: Tensor) -> list[Row]:
    """Errors of low-pass, of one shared top-m set, and of top-m per field, at equal numbers of coefficients.

    `fields` are (n, rows, columns), the first half of another month than the second; their means are aside. The set
    "of the other month" is chosen by the energy of one half and judged on the other, as a fixed set of a model would
    be; all others are chosen on the very fields that they are judged on. Coefficients are counted for a mean error of
    1%, the same number for every field.
    """
    fields = varying(fields)
    curves, half = selection_curves(fields), len(fields) // 2
    energy = dct(fields, 2).square().flatten(1)
    share = energy / energy.sum(1, keepdim=True)
    first, second = (part.sum(0).sort(descending=True, stable=True).indices for part in (energy[:half], energy[half:]))
    other = torch.cat([share[:half, second], share[half:, first]])
    left_out = {SINGLE: _left_out(share.sort(1, descending=True).values), OTHER: _left_out(other)}
    needed = curves.needed | {name: float((errors <= TOLERANCE).nonzero()[0]) for name, errors in left_out.items()}
    rows: list[Row] = [
        {"selection": series, "error": TOLERANCE, "coefficients": count, "box": ""} for series, count in needed.items()
    ]
    for side in (side for side in BOXES if side < min(fields.shape[1:])):
        box = min(curves.boxes, key=lambda one: abs(max(one) - side))
        place, count = curves.boxes.index(box), math.prod(box)
        errors = {series: values[place] for series, values in curves.errors.items()}
        errors[OTHER] = float(left_out[OTHER][count])
        about = {"coefficients": count, "box": "×".join(map(str, box))}
        rows += [{"selection": series, "error": error, **about} for series, error in errors.items()]
    return rows


def _left_out(share: Tensor) -> Tensor:
    """Mean relative L2 of fields after their first 0, 1, … coefficients, of shares of the energy (n, M): (M + 1,)."""
    tails = share.flip(1).cumsum(1).flip(1)
    return torch.cat([tails, tails.new_zeros(len(tails), 1)], 1).sqrt().mean(0)


def _trained(month: Month, device: str, case: Case) -> list[Row]:
    """Train one model and judge it: a candidate on the validation part, a chosen one on the test part."""
    options = case.options
    lead, seed, kept = options["lead"], options["seed"], options["modes"]
    torch.manual_seed(seed)
    make: Any = MODELS[options["model"]]
    size = tuple(month.fields.shape[-2:])
    modes = tuple(kept) if isinstance(kept, list) else kept
    model = make(HISTORY + 1, 1, size, modes, width=options["width"], depth=options["depth"])
    own, held = (
        Fields(trajectory=month.windows(part, lead), channels=("temperature",), units={"temperature": "K"})
        for part in ("train", "validation")
    )
    settings = {name: options[name] for name in ("learning_rate", *TRAINING)}
    run = train(model, own, held, progress=False, device=device, seed=seed, optimizer="adamw", **settings)
    if not run.finished:
        raise KeyboardInterrupt
    part = "validation" if case.table == "search" else "test"
    about: Row = {
        "seed": seed,
        "seconds": run.description["seconds"],
        "epochs": run.description["epochs_done"],
        "parameters": run.description["model"]["parameters"],
        "modes": kept,
        "learning_rate": options["learning_rate"],
    }
    ahead = _forecast(run.model, month, part, lead, lead)
    rows = [{"lead": lead, "way": "directly", **about, **scores(month, part, lead, ahead)}]
    if part == "test" and lead == 1:
        far = _forecast(run.model, month, part, DAY, 1)
        rows.append({"lead": DAY, "way": "hour by hour", **about, **scores(month, part, DAY, far)})
    return rows


def _forecast(model: Operator, month: Month, part: str, lead: int, step: int) -> Tensor:
    """Forecasts of the targets of a lead, by a model that goes `step` hours at a time."""
    targets, anomalies = month.targets(part, lead), month.anomalies
    first = torch.stack([anomalies[targets - lead - step * back] for back in range(HISTORY, -1, -1)], 1)
    place = next(model.parameters()).device
    with torch.no_grad():
        ahead = rollout(model.eval(), first.to(place), lead // step, frames=[lead // step])
    return ahead[:, 0].cpu() + month.diurnal[targets % DAY]


def _figures(winds: Mapping[str, Tensor], results: Results) -> dict[str, "Figure"]:
    """The wind after low-pass and top-m, the errors of the three variables, and those of the forecasts."""
    fields = winds["u"][:, None]
    wind = Shown("ERA-Interim", fields, (VARIABLES["u"],), ("m/s",))
    one = Shown("ERA-Interim", fields[:1], (VARIABLES["u"],), ("m/s",))
    made = {"selection": selection_figure(wind, one, 0).pictures[""], "curves": _curves(winds)}
    forecasts = [row for row in results.rows if row["table"] == "forecast"]
    return made | ({"forecast": _bars(forecasts)} if forecasts else {})


def _curves(winds: Mapping[str, Tensor]) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        for axes, (name, fields) in zip(figure.subplots(1, len(winds), sharey=True), winds.items(), strict=True):
            curves = selection_curves(varying(fields))
            for number, (series, errors) in enumerate(curves.errors.items()):
                colour, _ = colour_of(number)
                axes.plot([math.prod(box) for box in curves.boxes], errors, color=colour, label=series)
            axes.axhline(TOLERANCE, color="#888888", lw=0.8)
            axes.set(xscale="log", yscale="log", ylim=(1e-3, 1.2), xlabel="coefficients kept of a field")
            axes.set_title(VARIABLES[name], fontsize=9)
        figure.axes[0].set_ylabel("mean relative L2 (grey: 1%)")
        figure.axes[0].legend()
    return figure


def _bars(rows: list[Row]) -> "Figure":
    """RMSE of every way to forecast, by lead, with the deviation over seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 3.4), layout="constrained")
        for axes, lead in zip(figure.subplots(1, len(LEADS)), LEADS, strict=True):
            found: dict[str, list[float]] = {}
            for row in rows:
                if int(row["lead"]) == lead:
                    label = row["label"] + (", hour by hour" if row.get("way") == "hour by hour" else "")
                    found.setdefault(label, []).append(float(row["rmse"]))
            for number, (label, values) in enumerate(reversed(found.items())):
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                trained = label.split(",")[0] in MODELS
                mean = statistics.fmean(values)
                axes.barh(number, mean, xerr=spread, color=colour_of(0 if trained else 7)[0], alpha=0.8)
                axes.text(mean + spread, number, f" {mean:.2f}", va="center", fontsize=8)
            axes.set_yticks(range(len(found)), list(reversed(found)))
            axes.set(xlabel="RMSE in K", title="next hour" if lead == 1 else f"{lead} hours ahead")
            axes.margins(x=0.12)
            axes.grid(axis="y", visible=False)
    return figure
