"""Models: maps from fields to fields, learned on kept modes (T1, T1+, T1Grid) or the baselines (FNO, FFNO, UNet)."""

from transform_once.models.ffno import FFNO
from transform_once.models.fno import FNO
from transform_once.models.operator import Operator, SpectralOperator, load, save
from transform_once.models.t1 import T1, T1Plus
from transform_once.models.t1_grid import T1Grid
from transform_once.models.unet import UNet

__all__ = ["FFNO", "FNO", "T1", "Operator", "SpectralOperator", "T1Grid", "T1Plus", "UNet", "load", "save"]
