"""Models for other runtimes: ONNX, with a free batch size."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from transform_once.files import atomic_path
from transform_once.models.operator import Operator, SpectralOperator


def export(model: Operator, path: str | Path) -> Path:
    """Write the model as ONNX, from fields to fields on the grid it was trained on, for any batch size.

    Transforms are products of real matrices, so models need nothing that ONNX lacks. Needs the extra `onnx`.
    """
    if Path(path).suffix != ".onnx":
        raise ValueError(f"a model is exported to a file that ends in .onnx; got {path}")
    if isinstance(model, SpectralOperator) and model.transform.is_complex:
        raise ValueError(
            f"a {type(model).__name__} with the transform {model.transform.name} computes with complex numbers, which "
            "ONNX does not have: export one with the transform dct or fourier instead"
        )
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError('export needs the ONNX packages: pip install "transform-once[onnx]"') from None
    parameter = next(model.parameters())
    example = torch.zeros(2, model.in_channels, *model.resolution, dtype=parameter.dtype, device=parameter.device)
    training = model.training
    model.eval()
    try:
        with atomic_path(path) as temporary, _quiet():
            torch.onnx.export(
                model,
                (example,),
                temporary,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        model.train(training)
    return Path(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notices about its inner workings, and about packages that no model here needs."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
