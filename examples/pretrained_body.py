"""A pretrained image network as the body of T1+: the kept modes of a real transform are an image.

    python examples/pretrained_body.py resnet18.safetensors

The weights are a local file in the layout of timm (`pip install timm`); without one the network starts from scratch.
"""

import sys

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import transform_once as t1


class PretrainedBody(nn.Module):
    """Features of a timm backbone at all its scales, brought back to the block and summed into the output channels."""

    def __init__(self, name: str, in_channels: int, out_channels: int, weights: str | None = None) -> None:
        super().__init__()
        self.to_image = nn.Conv2d(in_channels, 3, 1)
        backbone = timm.create_model(name)
        if weights is not None:
            backbone.load_state_dict(load_file(weights))
        self.features = timm.models.FeatureListNet(backbone)
        self.outputs = nn.ModuleList(nn.Conv2d(n, out_channels, 1) for n in self.features.feature_info.channels())

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, rows, columns) to (batch, out_channels, rows, columns)."""
        scales = [output(f) for output, f in zip(self.outputs, self.features(self.to_image(x)), strict=True)]
        return sum(nn.functional.interpolate(s, x.shape[2:], mode="bilinear") for s in scales)


def make_model(name: str = "resnet18", weights: str | None = None) -> t1.T1Plus:
    """T1+ on 64×64 fields whose 32×32 kept modes go through the backbone, which sees the field and two coordinates."""
    body = PretrainedBody(name, in_channels=1 + 2, out_channels=1, weights=weights)
    return t1.T1Plus(1, 1, resolution=(64, 64), modes=32, body=body)


if __name__ == "__main__":
    model = make_model(weights=sys.argv[1] if len(sys.argv) > 1 else None)
    y = model(torch.randn(2, 1, 64, 64))
    y.square().mean().backward()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, output {tuple(y.shape)}")
