"""Surrogates of physical systems, learned in the frequency domain: transform once, learn on the kept modes.

The public names are listed in `_HOMES` and loaded when first used, so that importing the package costs nothing.
"""

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transform_once.data.fields import Fields as Fields
    from transform_once.data.formats import read as read
    from transform_once.data.spectra import spectra as spectra
    from transform_once.data.symmetries import Symmetry as Symmetry
    from transform_once.evaluation.analysis import analyze as analyze
    from transform_once.evaluation.evaluate import evaluate as evaluate
    from transform_once.evaluation.evaluate import predict as predict
    from transform_once.evaluation.rollout import rollout as rollout
    from transform_once.models.export import export as export
    from transform_once.models.ffno import FFNO as FFNO
    from transform_once.models.fno import FNO as FNO
    from transform_once.models.operator import Dynamics as Dynamics
    from transform_once.models.operator import Operator as Operator
    from transform_once.models.operator import SpectralOperator as SpectralOperator
    from transform_once.models.operator import load as load
    from transform_once.models.operator import save as save
    from transform_once.models.t1 import T1 as T1
    from transform_once.models.t1 import T1Plus as T1Plus
    from transform_once.models.t1_grid import T1Grid as T1Grid
    from transform_once.models.unet import UNet as UNet
    from transform_once.reports.page import report as report
    from transform_once.spectral.holes import fill as fill
    from transform_once.spectral.initialization import vp_init_ as vp_init_
    from transform_once.spectral.modes import LowPass as LowPass
    from transform_once.spectral.modes import ModeSet as ModeSet
    from transform_once.spectral.modes import TopM as TopM
    from transform_once.spectral.modes import choose_modes as choose_modes
    from transform_once.spectral.modes import irreducible_curve as irreducible_curve
    from transform_once.spectral.modes import irreducible_loss as irreducible_loss
    from transform_once.spectral.modes import split_loss as split_loss
    from transform_once.spectral.modes import tail_energy as tail_energy
    from transform_once.spectral.sensitivity import gradient_mismatch as gradient_mismatch
    from transform_once.spectral.sensitivity import squared_mismatch as squared_mismatch
    from transform_once.spectral.transforms import dct as dct
    from transform_once.spectral.transforms import get_transform as get_transform
    from transform_once.spectral.transforms import idct as idct
    from transform_once.training.compare import compare as compare
    from transform_once.training.run import load_models as load_models
    from transform_once.training.train import train as train

# What torch reads when it is loaded (docs/performance.md). Threads that wait for one another spin, by default for so
# long that a step takes many times as long where others want the cores too; and a large array on a CPU comes as pages
# of 4 kB, which the system makes one by one, where it could come as pages of 2 MB.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOMES = {
    "spectral.transforms": ("dct", "idct", "get_transform"),
    "spectral.modes": (
        "LowPass",
        "TopM",
        "ModeSet",
        "irreducible_loss",
        "irreducible_curve",
        "choose_modes",
        "split_loss",
        "tail_energy",
    ),
    "spectral.holes": ("fill",),
    "spectral.sensitivity": ("gradient_mismatch", "squared_mismatch"),
    "spectral.initialization": ("vp_init_",),
    "data.fields": ("Fields",),
    "data.formats": ("read",),
    "data.spectra": ("spectra",),
    "data.symmetries": ("Symmetry",),
    "models.operator": ("Operator", "SpectralOperator", "Dynamics", "save", "load"),
    "models.t1": ("T1", "T1Plus"),
    "models.t1_grid": ("T1Grid",),
    "models.fno": ("FNO",),
    "models.ffno": ("FFNO",),
    "models.unet": ("UNet",),
    "models.export": ("export",),
    "evaluation.analysis": ("analyze",),
    "evaluation.evaluate": ("evaluate", "predict"),
    "evaluation.rollout": ("rollout",),
    "training.train": ("train",),
    "training.run": ("load_models",),
    "training.compare": ("compare",),
    "reports.page": ("report",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

try:
    __version__ = version("transform-once")
except PackageNotFoundError:  # run from a source folder
    __version__ = "unknown"

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'transform_once' has no attribute {name!r}")
    value = getattr(import_module(f"transform_once.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
