"""The kernels run on a GPU where there is one, and elsewhere in Triton's interpreter, slow but as good a witness."""

import os

import pytest
import torch

from transform_once.spectral.precision import matmul_precision

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
pytest.importorskip("triton")


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def full():
    """Products in full float32, so that differences are mistakes."""
    with matmul_precision("highest"):
        yield
