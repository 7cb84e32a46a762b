"""The paper's Navier-Stokes study: data from our own solver, trained models, one CSV file of results, and its page.

What is run is in `protocols/navier_stokes.yaml`. A case is one model on one data set with some seeds, trained side by
side; its last weights are measured on the test pairs and, apart, on the validation pairs. Weights are not kept.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transform_once.files import atomic_path
from transform_once.studies.navier_stokes_protocol import STUDY, Job, Protocol, load_protocol, modes_text
from transform_once.studies.study import Results, Row, run_study

if TYPE_CHECKING:
    import torch

    from transform_once.data.fields import Fields
    from transform_once.models.operator import Operator

TIMED_EPOCHS = 8  # of one seed alone; the last half is timed, when its steps are captured


def navier_stokes(
    output: Path = Path("docs/results"),
    quick: bool = False,
    only: Literal["table", "ablation", "scaling", "transforms", "modes"] | None = None,
    seconds: float | None = None,
    device: str = "auto",
    data: Path = Path("data"),
) -> None:
    """Run the paper's Navier-Stokes study, or what is left of it, and write its page.

    Args:
        output: Folder for navier_stokes.csv, whose finished cases are not run again; the page reproduction.md lies
            beside that folder.
        quick: Run a toy of the study instead, minutes on a CPU, in the folder quick of the output, page included.
        only: One table instead of all.
        seconds: Begin no case that would last longer, judged by the one before; the same command continues.
        device: Where to solve and train: auto (a GPU where there is one), cpu, cuda, cuda:1.
        data: Folder for the solver's data, which are made where they are missing.
    """
    from transform_once.studies.navier_stokes_page import write_page

    protocol, page = load_protocol(), output.parent / "reproduction.md"
    if quick:
        protocol, output = protocol.reduced(), output / "quick"
        page = output / "reproduction.md"
    with _threads(1 if quick else None):  # threads that wait for one another cost a toy more than they bring
        left = run_protocol(protocol, output, data, device, only, seconds)
    write_page(output / f"{STUDY}.csv", page, protocol)
    print(f"{page}: {f'{left} cases are left, the same command continues' if left else 'all that was asked is done'}")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Within, torch uses so many threads; as many as before for None."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_protocol(
    protocol: Protocol,
    output: Path,
    data: Path,
    device: str = "auto",
    only: str | None = None,
    seconds: float | None = None,
) -> int:
    """Run the cases that have no rows in `output`/navier_stokes.csv yet; returns how many are left."""
    from transform_once.processes import choose_device

    place = choose_device(device)
    jobs = {job.case.name: job for job in protocol.jobs(only)}
    output.mkdir(parents=True, exist_ok=True)
    return run_study(
        [job.case for job in jobs.values()],
        Results(output / f"{STUDY}.csv"),
        lambda case: list(rows_of(jobs[case.name], data, output, place)),
        seconds=seconds,
    )


def make_data(protocol: Protocol, name: str, data: Path, device: "torch.device") -> "Fields":
    """The fields of a data set, solved for where they are not there yet."""
    from transform_once.data.fields import Fields
    from transform_once.solvers import datasets

    flow, path = protocol.data[name], data / f"{STUDY}-{name}-{protocol.resolution}.h5"
    told = {"viscosity": flow.viscosity, "time": flow.time, "tolerance": protocol.tolerance}
    if not path.exists():
        data.mkdir(parents=True, exist_ok=True)
        whole = {"samples": flow.samples, "resolution": protocol.resolution, "seed": protocol.seed}
        datasets.navier_stokes(path, device=str(device), **whole, **told)  # type: ignore[arg-type]
    fields = Fields.open(path)
    known = {key: fields.metadata.settings.get(key) for key in told}
    if known != told or fields.metadata.seed != protocol.seed or len(fields) < flow.samples:
        raise ValueError(
            f"{path} holds {len(fields)} samples of seed {fields.metadata.seed} with {known}, the protocol asks for "
            f"{flow.samples} of seed {protocol.seed} with {told}: remove it or choose another folder for the data"
        )
    return fields


def rows_of(job: Job, data: Path, output: Path, device: "torch.device") -> Iterator[Row]:
    """Train and measure a case: a row for each seed; of the floor one for each kind of kept modes."""
    import torch

    fields = make_data(job.protocol, job.data, data, device)
    parts = {name: fields[numbers.start : numbers.stop].load() for name, numbers in job.samples.items() if numbers}
    if job.entry is None:
        yield from _floors(job, parts["test"])
        return
    yield from _trained(job, parts, job.seeds, output, device)
    gc.collect()
    if device.type == "cuda":  # what captured steps held is free for the data of the next case
        torch.cuda.empty_cache()


def _trained(
    job: Job, parts: Mapping[str, "Fields"], seeds: tuple[int, ...], output: Path, device: "torch.device"
) -> Iterator[Row]:
    """These seeds side by side; where one of them diverges each is trained alone, and that one has no errors."""
    from transform_once.training.train import train

    assert job.entry is not None  # told to the type checker
    configured, training = job.entry.configuration()
    settings = {**training.to_dict(), "device": str(device), "seed": seeds[0]}
    about: Row = {"data": job.data, "pairs": job.pairs, "epochs": training.epochs, "together": len(seeds)}
    model, _ = configured.build(parts["train"], 0, seeds[0])
    try:
        run = train(model, parts["train"], progress=False, **{**settings, "ensemble": len(seeds)})
    except FloatingPointError as error:
        if len(seeds) == 1:
            yield {**about, "seed": seeds[0], "failed": str(error)}
            return
        for seed in seeds:
            yield from _trained(job, parts, (seed,), output, device)
        return
    if not run.finished:
        raise KeyboardInterrupt
    if len(seeds) == 1:
        about["milliseconds_per_step"] = 1000 * _step_seconds(run.history)
    elif job.timed:
        settings["epochs"] = min(TIMED_EPOCHS, training.epochs or 1)
        model, _ = configured.build(parts["train"], 0, seeds[0])
        alone = train(model, parts["train"], progress=False, **settings)
        about["milliseconds_per_step"] = 1000 * _step_seconds(alone.history)
    about |= {
        "transform": configured.transform or "",
        "modes": modes_text(configured.modes),
        "seconds_per_seed": run.description["seconds"] / len(seeds),
        **_facts(run.description),
    }
    for number, (seed, member) in enumerate(zip(seeds, run.models, strict=True)):
        last = [row["loss"] for row in run.history if row["member"] == number][-1]
        path = job.examples(output) if seed == 0 else None
        yield {"seed": seed, **_measured(member, parts, job.protocol, path), "train_l2": last, **about}


def _facts(description: Mapping[str, Any]) -> Row:
    """What a row tells of the model and the machine."""
    model, environment = description["model"], description["environment"]
    return {
        "model": model["class"],
        "parameters": model["parameters"],
        "megabytes": model["bytes"] / 1e6,
        "space": description["space"],
        "captured": description["captured"],
        "precision": description["training"]["precision"],
        "set_up_seconds": description["set_up_seconds"],
        **{name: environment[name] for name in ("hardware", "torch", "python", "transform_once")},
    }


def _measured(model: "Operator", parts: Mapping[str, "Fields"], protocol: Protocol, path: Path | None) -> Row:
    """The errors of a model on the test pairs, also outside the lowest DCT modes, and on the validation pairs."""
    from transform_once.evaluation.evaluate import evaluate, predict
    from transform_once.evaluation.metrics import KSpaceError

    test = parts["test"]
    numbers = evaluate(model, test, progress=False)
    row: Row = {name: numbers[name] for name in ("relative_l2", "relative_l2_std")}
    row |= {name: numbers["kspace"][name] for name in ("J", "R_o")} | {"basis": numbers["kspace"]["transform"]}
    row["validation_l2"] = evaluate(model, parts["validation"], progress=False)["relative_l2"]
    prediction = predict(model, test.input)
    assert not isinstance(prediction, tuple)  # told to the type checker
    for modes in protocol.splits:
        split = KSpaceError("dct", modes, test.resolution)
        split.add(prediction, test.target)
        row[f"outside_{modes}"] = split.result()["R_o"]
    if path is not None:
        one = slice(protocol.example, protocol.example + 1)
        shown = {"input": test.input[one], "target": test.target[one], "prediction": prediction[one]}
        spectra = dict(zip(("error_spectrum", "target_spectrum"), split.spectra(), strict=True))
        _keep(path, {"index": [protocol.example], **shown, **spectra})
    return row


def _keep(path: Path, arrays: Mapping[str, Any]) -> None:
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **{name: np.asarray(values) for name, values in arrays.items()})  # type: ignore[arg-type]


def _floors(job: Job, test: "Fields") -> Iterator[Row]:
    """The errors that no model keeping these modes can beat: mean over samples, and R_o, the root mean square."""
    from transform_once.spectral.modes import irreducible_loss, tail_energy
    from transform_once.spectral.transforms import get_transform

    energy = test.target.double().square().flatten(1).sum(1)
    for transform, modes in job.protocol.bases():
        T, kept = get_transform(transform), tuple(modes) if isinstance(modes, list) else modes
        share = tail_energy(test.target, kept, transform).sum(1) / energy
        coefficients = (1 + T.is_complex) * prod(T.block(kept, test.resolution))
        errors = {"relative_l2": irreducible_loss(test.target, kept, transform), "R_o": share.mean().sqrt().item()}
        about = {"data": job.data, "transform": transform, "modes": modes_text(modes), "coefficients": coefficients}
        yield {**about, **errors}


def _step_seconds(history: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a step in the second half of a run, where steps are captured and caches warm."""
    rows = [row for row in history if row["member"] == 0]
    first, last = rows[(len(rows) - 1) // 2], rows[-1]
    if first is last:
        return float(last["seconds"] / last["step"])
    return float((last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))
