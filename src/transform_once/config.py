"""An experiment as configuration: data, model and training, the same in YAML, on the command line and in a run folder.

The paper's configurations are YAML files in `experiments/`; `--config navier_stokes/t1.yaml` finds them there.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transform_once.data.options import ReadOptions
from transform_once.messages import nearest

if TYPE_CHECKING:
    from transform_once.data.fields import Fields
    from transform_once.models.operator import Operator

EXPERIMENTS = Path(__file__).parent / "experiments"


@dataclass(frozen=True, kw_only=True)
class Data(ReadOptions):
    """Which fields, and how they are split: the first samples to train, then to validate, then to test.

    Args:
        path: A file or folder in any format that `t1 import` reads.
        train: Samples to train on; null: all that the others leave.
        validation: Samples to choose the best weights by; null: a tenth. Of fewer than ten trajectories the last tenth
            of the frames, where no number is given; of fewer than ten pairs none.
        test: Samples to test on, never looked at before the end; null: none.
    """

    path: Path
    train: int | None = None
    validation: int | None = None
    test: int | None = None

    def read(self) -> "Fields":
        """All of the fields."""
        from transform_once.data.formats import read

        return read(self.path, **self.given())

    def parts(self, frames: int = 1) -> tuple["Fields", "Fields | None", "Fields | None"]:
        """The fields to train on, to validate with and to test on; `frames`: as many as a part has at least."""
        fields = self.read()
        if self.train is None and self.validation is None and self.test is None:
            to_train, *held_out = fields.hold_out(1, frames)
            return to_train, held_out[0] if held_out else None, None
        count, test = len(fields), self.test or 0
        held = self.validation
        if held is None:
            rest = count - test if self.train is None else count - test - self.train
            held = (count - test) // 10 if self.train is None and count >= 10 else 0
            held = max(0, min(held, rest))
        train = count - held - test if self.train is None else self.train
        if train < 1 or train + held + test > count:
            raise ValueError(
                f"{self.path} holds {count} samples, too few for {max(train, 1)} to train, {held} to validate and "
                f"{test} to test"
            )
        first, second = train + held, train + held + test
        return fields[:train], fields[train:first] if held else None, fields[first:second] if test else None


@dataclass(frozen=True)
class Model:
    """Which model; what is left null is chosen for the data by stated rules (`training.choose`).

    Args:
        name: T1Grid, T1, T1Plus, FNO, FFNO or UNet; ReleasedFNO and ReleasedFFNO are the research code's, with errors.
        modes: Kept modes, a number or one per axis; for FNO and FFNO wave numbers on both sides.
        top_modes: Keep so many modes of largest energy instead, one set for all samples; T1 only.
        width: Channels inside; of a UNet and of T1Plus the first.
        depth: Number of layers.
        waves: Wave numbers on both sides that a layer of a T1Grid acts on, a number or one per axis.
        transform: dct, fourier or dft.
        out_transform: dst, for outputs of a T1Grid with the dct that are zero at the walls.
        init: vp, xavier or kaiming.
        activation: gelu or sine, of the layers of T1 and T1Plus.
        head_activation: gelu or sine, of the head of a T1; sine as in the released research code.
        local: pointwise or conv: small maps of the fields around a T1, for fields with jumps.
        coordinates: Whether an FFNO sees the coordinates; the paper's does not.
        phase_blind: Whether a ReleasedFNO loses the imaginary part, as released.
    """

    name: Literal["T1Grid", "T1", "T1Plus", "FNO", "FFNO", "UNet", "ReleasedFNO", "ReleasedFFNO"] = "T1Grid"
    modes: int | list[int] | None = None
    top_modes: int | None = None
    width: int | None = None
    depth: int | None = None
    waves: int | list[int] | None = None
    transform: Literal["dct", "fourier", "dft"] | None = None
    out_transform: Literal["dst"] | None = None
    init: Literal["vp", "xavier", "kaiming", "dfpnet"] | None = None
    activation: Literal["gelu", "sine"] | None = None
    head_activation: Literal["gelu", "sine"] | None = None
    local: Literal["pointwise", "conv"] | None = None
    coordinates: bool | None = None
    phase_blind: bool | None = None

    def build(self, fields: "Fields", history: int, seed: int, device: str = "auto") -> tuple["Operator", list[str]]:
        """The model for these fields and this device, its weights drawn from the seed, and what was chosen."""
        import torch

        from transform_once.training.choose import choose_model

        given: dict[str, Any] = {k: v for k, v in dataclasses.asdict(self).items() if k != "name"}
        given |= {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return choose_model(fields, self.name, history, given, device)


def find_config(name: str) -> str:
    """The path of a configuration: a file, or one of our experiments by its name."""
    if Path(name).exists():
        return name
    own = EXPERIMENTS / name
    if own.exists():
        return str(own)
    known = [str(path.relative_to(EXPERIMENTS)) for path in EXPERIMENTS.rglob("*.yaml")]
    raise ValueError(
        f"there is no configuration {name}, neither here nor among the experiments; {nearest(name, known)}"
    )
