"""The run folder: what was trained on what and how, its history, its weights, and the state to continue from."""

import csv
import hashlib
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transform_once.data.fields import Fields
from transform_once.data.spectra import Spectra
from transform_once.files import atomic_path
from transform_once.models.operator import Operator, load, save
from transform_once.training.distributed import whole

FORMAT = "transform-once run 1"
STATE = "transform_once_state"  # the one key of a checkpoint's metadata
COLUMNS = ("member", "epoch", "step", "seconds", "learning_rate", "loss", "validation")

# Settings that say where and how fast, not what: a run continues under others.
FREE = ("device", "capture", "sharding")

Row = dict[str, float | int | None]


@dataclass
class Run:
    """What `train` gives back: the models with their best weights, the history, and the folder if there is one.

    Without validation data the best weights are the last ones.
    """

    models: list[Operator]
    history: list[Row]
    description: dict[str, Any]
    folder: Path | None = None

    @property
    def model(self) -> Operator:
        """The model, or the first of an ensemble."""
        return self.models[0]

    @property
    def finished(self) -> bool:
        """Whether training came to its end, or was interrupted."""
        return bool(self.description["status"] == "finished")


@dataclass
class State:
    """Where a run stands: everything but tensors."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    waited: int = 0  # validations since the best one
    best: list[Row] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)  # of the present epoch, by member
    history: list[Row] = field(default_factory=list)
    lowest: list[float | None] = field(default_factory=list)  # mean loss of an epoch so far, by member
    remembered: int = 0  # hundredths of the run after which weights were remembered
    setbacks: list[Row] = field(default_factory=list)  # where a loss ran away: member and epoch


def describe(
    models: Sequence[Operator], plan_facts: dict[str, Any], data: Spectra | Fields, validation: Spectra | Fields | None
) -> dict[str, Any]:
    """The facts of run.json that are known before the first step."""
    model, metadata = models[0], data.metadata
    numbers = [p.numel() * (1 + p.is_complex()) for p in model.parameters()]
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    config = {name: value for name, value in model.config.items() if not isinstance(value, torch.nn.Module)}
    facts = {
        "source": metadata.source,
        "fingerprint": fingerprint(data),
        "train": len(data),
        "validation": 0 if validation is None else len(validation),
        "validation_fingerprint": None if validation is None else fingerprint(validation),
        "kind": data.kind,
        "resolution": list(data.resolution),
        "grid": metadata.grid,
        "periodic": list(metadata.periodic),
        "channels": {name: list(names) for name, names in metadata.channels.items()},
        "units": dict(metadata.units),
    }
    return {
        "format": FORMAT,
        "model": {
            "class": type(model).__name__,
            "config": json.loads(json.dumps(config, default=repr)),
            "parameters": sum(numbers),
            "bytes": size,
        },
        "data": facts,
        "members": len(models),
        **plan_facts,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware."""
    from transform_once import __version__

    return {
        "transform_once": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hardware": hardware(device),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def hardware(device: torch.device) -> str:
    """The name of the processor behind a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def fingerprint(data: Spectra | Fields) -> str:
    """What tells data apart: of spectra the energies, tails and mean modes of all samples stand for them."""
    if isinstance(data, Fields):
        return data.fingerprint()
    digest = hashlib.sha256(f"{data.transform} {data.resolution}".encode())
    for name in ("energy", "tail"):
        digest.update(data.tensors[name].cpu().numpy().tobytes())
    for name in sorted(data.tensors.keys() - {"energy", "tail"}):
        means = [modes.to(torch.complex128).mean() for modes in data.tensors[name]]
        digest.update(torch.stack(means).cpu().numpy().tobytes())
    return digest.hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Where two descriptions of a run differ so that one cannot continue the other."""
    found = [f"training.{name}" for name in new["training"] if name not in FREE]
    found = [name for name in found if old["training"].get(name[9:]) != new["training"][name[9:]]]
    found += ["model"] if any(old["model"][key] != new["model"][key] for key in ("class", "config")) else []
    kinds = {"fingerprint": "data", "validation_fingerprint": "validation data"}
    found += [what for name, what in kinds.items() if name in old["data"] and old["data"][name] != new["data"][name]]
    return found


def read_run(folder: str | Path) -> dict[str, Any]:
    """The description of a run, or one sentence on why there is none."""
    path = Path(folder) / "run.json"
    try:
        description = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no run folder: it has no run.json; give the folder that train wrote") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} cannot be read as JSON: the run folder is damaged") from None
    if description.get("format") != FORMAT:
        raise ValueError(f"{path} is not a {FORMAT}: it says {description.get('format', 'nothing')!r}")
    return dict(description)


def load_models(path: str | Path, which: str = "model") -> list[Operator]:
    """The models of a run folder, several of an ensemble, or of one weights file; `which` is "model" or "last"."""
    path = Path(path)
    if path.is_file():
        return [load(path)]
    read_run(path)
    files = sorted(path.glob(f"{which}.safetensors")) or sorted(path.glob(f"{which}-[0-9]*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no weights: the run did not reach its first validation; run it again to continue")
    return [load(file) for file in files]


def weights_path(folder: Path, which: str, number: int, members: int) -> Path:
    """Where the weights of a member lie."""
    return folder / (f"{which}.safetensors" if members == 1 else f"{which}-{number:02d}.safetensors")


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write run.json."""
    with atomic_path(folder / "run.json") as temporary:
        temporary.write_text(json.dumps(description, indent=1) + "\n")


def write_history(folder: Path, history: Sequence[Row]) -> None:
    """Write history.csv."""
    with atomic_path(folder / "history.csv") as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(history)


def read_history(folder: Path) -> list[Row]:
    """The rows of history.csv as numbers."""
    whole = ("member", "epoch", "step")
    with (folder / "history.csv").open(newline="") as file:
        return [
            {name: (int(text) if name in whole else float(text)) if text else None for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], state: State) -> None:
    """Write weights, optimisers and state as one file, so that they always belong together."""
    with atomic_path(folder / "checkpoint.safetensors") as temporary:
        save_file(tensors, temporary, {STATE: json.dumps(state.__dict__)})


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], State] | None:
    """What `write_checkpoint` wrote last, or None."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            state = State(**json.loads(file.metadata()[STATE]))
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read, so the run cannot continue: {error}; remove the folder") from None


def save_whole(folder: Path, which: str, models: Sequence[Operator], number: int, leads: bool) -> None:
    """Write the weights of one member, put together from their shards; all processes must ask, one writes."""
    model = models[number]
    tensors = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if leads:
        save(model, weights_path(folder, which, number, len(models)), tensors)
