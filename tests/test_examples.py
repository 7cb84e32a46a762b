"""The examples run."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_timm_backbone_with_weights_from_a_file(tmp_path):
    timm = pytest.importorskip("timm", reason="needs timm, which the project does not install", exc_type=ImportError)
    example = load_example("pretrained_body")
    torch.manual_seed(0)
    pretrained = timm.create_model("resnet18")
    save_file(pretrained.state_dict(), tmp_path / "resnet18.safetensors")
    model = example.make_model("resnet18", str(tmp_path / "resnet18.safetensors"))
    inside = dict(model.body.features.named_parameters())
    assert torch.equal(inside["conv1.weight"], pretrained.conv1.weight)  # the file's weights are in the body
    y = model(torch.randn(2, 1, 64, 64))
    assert y.shape == (2, 1, 64, 64)
    y.square().mean().backward()
    assert inside["conv1.weight"].grad.abs().sum() > 0
