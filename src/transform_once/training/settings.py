"""How to train: one frozen set of settings, the same in Python, in YAML and on the command line."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from transform_once.data.normalization import KINDS
from transform_once.messages import nearest
from transform_once.models.operator import Dynamics, check_choice
from transform_once.training.optimizers import OPTIMIZERS, SCHEDULES

PRECISIONS = ("float32", "tf32", "bfloat16")
SHARDINGS = ("ddp", "fsdp")

STEPS = 6000  # of a run whose epochs are left open: enough to come close to its best, minutes on a CPU
MOST_SAMPLES = 64  # of a batch whose size is left open
RATES = {"adamw": 4e-3, "muon": 1e-2}  # learning rates where they are left open
DECAYS = {"adamw": 1e-4, "muon": 3e-2}


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Args:
        epochs: Passes over the training data; null: as many as make 6000 steps, 20 to 500.
        seconds: Stop after so many seconds of training, and let schedules run to that end; null: after the epochs.
        batch_size: Samples of a step, over all processes; null: a twentieth of the training data, 4 to 64.
        optimizer: "adamw", or "muon" for matrix weights (the rest by adamw); null: muon on a GPU, where a step of it
            costs little more and learns far more, adamw elsewhere and with fsdp.
        learning_rate: The largest rate; null: 4e-3 of adamw, 1e-2 of muon.
        weight_decay: Decoupled weight decay; null: 1e-4 of adamw, 3e-2 of muon.
        schedule: "constant", "step" (times gamma every step_size epochs), "cosine" (to zero at the end) or "restarts"
            (cosine with warm restarts every `period` steps).
        warmup: Fraction of the run over which the rate rises to its value.
        step_size: Epochs between two steps of the "step" schedule.
        gamma: Factor of the "step" schedule.
        period: Optimiser steps between restarts.
        clip: Largest norm of the gradient; null: not clipped.
        average: Decay of the exponential moving average of the weights, such as 0.999, which is then what is validated
            and kept; null: none.
        precision: Of the products inside the model: "float32", "tf32" (on GPUs) or "bfloat16"; weights, transforms and
            errors are always in float32. null: on GPUs that have both, tf32 in one dimension, where products are small
            and errors too, and bfloat16 otherwise; float32 elsewhere.
        normalization: "none", "standard" (mean 0, variance 1, for T1 of its kept modes) or "unit" (range 0 to 1), per
            channel of the training data.
        symmetries: Whether to move each sample by a random symmetry that the data set declares.
        order: Order of the integrator, 0, 1 or 2; for trajectories.
        history: Frames before the present one that the model sees; for trajectories.
        steps: Steps that the model is rolled out over in the loss; for trajectories.
        validate_every: Epochs between two validations; 0: fifty times in the run.
        patience: Stop when so many validations in a row brought nothing better; null: never. Needs validation data.
        ensemble: Models trained side by side, with seeds seed, seed + 1, ...
        seed: Seed of weights, data order and random motions.
        device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", "mps".
        capture: Whether to run each step as one captured CUDA graph on a GPU.
        sharding: With several processes: "ddp" copies the model to each, "fsdp" cuts it into shards.
    """

    epochs: int | None = None
    seconds: float | None = None
    batch_size: int | None = None
    optimizer: Literal["adamw", "muon"] | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    schedule: Literal["constant", "step", "cosine", "restarts"] = "cosine"
    warmup: float = 0.05
    step_size: int = 100
    gamma: float = 0.5
    period: int = 32
    clip: float | None = None
    average: float | None = None
    precision: Literal["float32", "tf32", "bfloat16"] | None = None
    normalization: Literal["none", "standard", "unit"] = "standard"
    symmetries: bool = True
    order: int = 1
    history: int = 0
    steps: int = 1
    validate_every: int = 0
    patience: int | None = None
    ensemble: int = 1
    seed: int = 0
    device: str = "auto"
    capture: bool = True
    sharding: Literal["ddp", "fsdp"] = "ddp"

    def __post_init__(self) -> None:
        for name, choices in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("normalization", KINDS),
            ("sharding", SHARDINGS),
            ("order", (0, 1, 2)),
        ):
            value = getattr(self, name)
            if value is not None or getattr(Training, name) is not None:  # what is null by default may be left open
                check_choice(value, choices, name)
        for name, least in (
            ("epochs", 1),
            ("batch_size", 1),
            ("step_size", 1),
            ("period", 1),
            ("steps", 1),
            ("ensemble", 1),
            ("history", 0),
            ("validate_every", 0),
        ):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative; got {self.weight_decay}")
        if not 0 <= self.warmup < 1 or not 0 < self.gamma <= 1:
            raise ValueError(f"warmup is in [0, 1) and gamma in (0, 1]; got {self.warmup} and {self.gamma}")
        for name in ("learning_rate", "seconds", "clip", "patience"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, or null; got {getattr(self, name)}")
        if self.average is not None and not 0 < self.average < 1:
            raise ValueError(f"average is a decay between 0 and 1, such as 0.999; got {self.average}")

    @property
    def window(self) -> int:
        """How many frames of a trajectory a sample takes."""
        return Dynamics(self.order, self.history).frames + self.steps

    def resolved(
        self, samples: int, device: torch.device, dtype: torch.dtype = torch.float32, ndim: int = 2
    ) -> "Training":
        """The same with nothing left open: for so many samples, a device, the dtype of weights and the grid's axes."""
        batch_size = self.batch_size or min(MOST_SAMPLES, max(4, samples // 20))
        per_epoch = math.ceil(samples / batch_size)
        epochs = self.epochs or min(500, max(20, math.ceil(STEPS / per_epoch)))
        has_both = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        lower: Literal["tf32", "bfloat16"] = "tf32" if ndim == 1 else "bfloat16"
        optimizer = self.optimizer or ("muon" if device.type == "cuda" and self.sharding != "fsdp" else "adamw")
        return dataclasses.replace(
            self,
            batch_size=batch_size,
            epochs=epochs,
            precision=self.precision or (lower if has_both and dtype == torch.float32 else "float32"),
            optimizer=optimizer,
            learning_rate=self.learning_rate or RATES[optimizer],
            weight_decay=DECAYS[optimizer] if self.weight_decay is None else self.weight_decay,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def settings_from(given: dict[str, Any]) -> Training:
    """The settings of a dictionary; an unknown name is an error that names the nearest known ones."""
    known = [field.name for field in dataclasses.fields(Training)]
    for name in given:
        if name not in known:
            raise ValueError(f"there is no setting {name!r}; {nearest(name, known)}")
    return Training(**given)
