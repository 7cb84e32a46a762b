"""The UNet: published counts and maps, our rule at any size, upsampling by matrices, compile and export."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from transform_once.models.t1 import T1Plus
from transform_once.models.unet import UNet, UNetBody, Upsample, choose_layout, rule_layout

# Written out by hand from the published description, apart from the table in the package:
# encoder (kernel, padding, output side), decoder (factor, kernel, padding, output side), what the last encoder reads.
OUTER = {24: (12, 6, 3), 100: (50, 25, 12), 128: (64, 32, 16), 224: (112, 56, 28)}
ENCODERS = {
    24: ((2, 2, 3), (2, 2, 3), (2, 3, 4), (3, 0, 1)),
    100: ((4, 1, 6), (4, 1, 3), (2, 1, 2), (2, 1, 2)),
    128: ((4, 1, 8), (4, 1, 4), (2, 1, 3), (2, 1, 3)),
    224: ((4, 1, 14), (4, 0, 6), (4, 0, 2), (2, 0, 1)),
}
DECODERS = {
    24: ((2, 1, 1, 4), (1, 2, 0, 3), (1, 3, 1, 3), (1, 3, 1, 3), (2, 3, 1, 6), (2, 3, 1, 12)),
    100: ((1, 3, 1, 2), (1, 2, 1, 3), (2, 3, 1, 6), (2, 3, 1, 12), (2, 2, 1, 25), (2, 3, 1, 50)),
    128: ((1, 3, 1, 3), (1, 2, 1, 4), (2, 3, 1, 8), (2, 3, 1, 16), (2, 3, 1, 32), (2, 3, 1, 64)),
    224: ((2, 1, 0, 2), (3, 1, 0, 6), (3, 5, 0, 14), (2, 3, 1, 28), (2, 3, 1, 56), (2, 3, 1, 112)),
}
BOTTOM_READS = {24: 5, 100: 4, 128: 4, 224: 5}
# Published convolutions before a batch norm have biases, which the norm takes off again; ours have not. In widths:
BIASES = (2 + 2 + 4 + 8 + 8) + (8 + 8 + 4 + 2 + 2 + 1)


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def test_dfpnet_at_128_has_the_published_parameter_count() -> None:
    with torch.device("meta"):
        assert parameter_count(UNetBody(3, 3, (128, 128), 64)) == 12_978_947 - BIASES * 64


@pytest.mark.parametrize(
    ("modes", "width", "in_channels", "out_channels", "published"),
    [(24, 64, 1, 1, 10_230_989), (100, 32, 3, 3, 3_559_633), (224, 128, 2, 1, 67_755_541)],
)
def test_t1_plus_has_the_published_parameter_count(
    modes: int, width: int, in_channels: int, out_channels: int, published: int
) -> None:
    lifted = in_channels + 2
    lifting = lifted * lifted + lifted
    first_layer = lifted**2 * modes**2 + lifted * (modes**2 + modes**2)
    with torch.device("meta"):
        body = UNetBody(lifted, out_channels, (modes, modes), width)
    assert lifting + first_layer + parameter_count(body) == published - BIASES * width


def test_the_rule_is_used_wherever_nothing_is_published_and_on_request() -> None:
    for size in [(25, 25), (24, 100), (24,), (24, 24, 24)]:
        assert choose_layout(size) == rule_layout(size)
    assert choose_layout((24, 24)) == choose_layout((24, 24), "published") != rule_layout((24, 24))
    assert choose_layout((24, 24), "rule") == rule_layout((24, 24))


@pytest.mark.parametrize(("longest", "levels"), [(1, 1), (2, 1), (4, 1), (5, 2), (24, 4), (128, 6), (224, 7), (512, 8)])
def test_the_rule_halves_until_two_cells_are_left(longest: int, levels: int) -> None:
    layout = rule_layout((longest, 1))
    assert len(layout.encoder) == levels == len(layout.decoder) + 1
    assert [block.channels for block in layout.encoder] == [1, 2, 4, 8, 8, 8, 8, 8][:levels]
    for _ in range(levels):
        longest = math.ceil(longest / 2)
    assert longest <= 2


@pytest.mark.parametrize("side", [24, 100, 128, 224])
def test_published_maps_have_the_published_sizes_and_sources(side: int) -> None:
    body = UNetBody(2, 3, (side, side), 1)
    outputs: dict[nn.Module, Tensor] = {}
    inputs: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[module], outputs[module] = arguments[0], output

    for block in (*body.encoder, *body.decoder):
        block.register_forward_hook(record)
    # A batch of one in training mode: no batch norm may meet a map of a single value.
    assert body.train()(torch.randn(1, 2, side, side)).shape == (1, 3, side, side)
    sides = [outputs[block].shape[-1] for block in body.encoder]
    assert sides == [*OUTER[side], *(row[-1] for row in ENCODERS[side])]
    assert [outputs[block].shape[-1] for block in body.decoder] == [row[-1] for row in DECODERS[side]]
    assert inputs[body.encoder[6]] is outputs[body.encoder[BOTTOM_READS[side]]]
    for index in range(1, 6):
        assert inputs[body.encoder[index]] is outputs[body.encoder[index - 1]]


def naive_published_forward(body: UNetBody, side: int, x: Tensor) -> Tensor:
    """Write the published network out with torch's own interpolation, on the weights of `body`."""
    weights = dict(body.named_parameters())

    def normalised(z: Tensor, prefix: str) -> Tensor:
        return functional.batch_norm(z, None, None, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"], True)

    maps = [functional.conv2d(x, weights["encoder.0.0.weight"], weights["encoder.0.0.bias"], stride=2, padding=1)]
    for index, (_, padding, _) in enumerate(((4, 1, 0), (4, 1, 0), *ENCODERS[side]), start=1):
        z = functional.leaky_relu(maps[BOTTOM_READS[side] if index == 6 else index - 1], 0.2)
        bias = weights.get(f"encoder.{index}.1.bias")
        z = functional.conv2d(z, weights[f"encoder.{index}.1.weight"], bias, stride=2, padding=padding)
        maps.append(z if index == 6 else normalised(z, f"encoder.{index}.2"))
    z = maps[6]
    for index, (factor, _, padding, _) in enumerate(DECODERS[side]):
        z = functional.interpolate(functional.relu(z), scale_factor=factor, mode="bilinear", align_corners=False)
        z = functional.conv2d(z, weights[f"decoder.{index}.2.weight"], padding=padding)
        z = torch.cat([normalised(z, f"decoder.{index}.3"), maps[5 - index]], dim=1)
    return functional.conv_transpose2d(
        functional.relu(z), weights["head.1.weight"], weights["head.1.bias"], stride=2, padding=1
    )


@pytest.mark.parametrize("side", [24, 100, 128, 224])
def test_forward_equals_the_naive_network(side: int) -> None:
    body = UNetBody(2, 3, (side, side), 2)
    x = torch.randn(3, 2, side, side)
    torch.testing.assert_close(body(x), naive_published_forward(body, side, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "size", [(24, 24), (128, 128), (7, 7), (17, 30), (1, 1), (2, 5), (33, 20, 9), (1, 6, 3), (13,)]
)
def test_shape_is_kept_and_a_gradient_reaches_every_parameter(size: tuple[int, ...]) -> None:
    body = UNetBody(2, 3, size, 4)
    y = body(torch.randn(2, 2, *size))
    assert y.shape == (2, 3, *size)
    y.square().mean().backward()
    for name, parameter in body.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0, name


@given(size=st.lists(st.integers(1, 20), min_size=1, max_size=3), training=st.booleans())
@settings(max_examples=40)
def test_any_size_works_on_a_batch_of_one(size: list[int], training: bool) -> None:
    body = UNetBody(1, 2, tuple(size), 2).train(training)
    y = body(torch.randn(1, 1, *size))
    assert y.shape == (1, 2, *size)
    assert y.isfinite().all()


@pytest.mark.parametrize("size", [(24, 24), (128, 128), (40, 17)])
def test_skips_bypass_everything_below_them(size: tuple[int, ...]) -> None:
    """Cut the decoder half of a concatenation: the block beside it still gets a gradient, those below it none."""
    depth = len(UNetBody(1, 1, size, 2).encoder)
    for level in range(depth - 1):
        body = UNetBody(1, 1, size, 2)
        above = body.head[1] if level == 0 else body.decoder[depth - 1 - level][2]
        decoder_channels = above.weight.shape[0 if level == 0 else 1] // 2
        with torch.no_grad():
            above.weight.movedim(0 if level == 0 else 1, 0)[:decoder_channels] = 0
        body(torch.randn(2, 1, *size)).square().mean().backward()
        reached = [
            any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in block.parameters())
            for block in body.encoder
        ]
        assert reached == [index <= level for index in range(depth)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_upsampling_equals_interpolate(lengths: list[tuple[int, int]], seed: int) -> None:
    size = tuple(length for length, _ in lengths)
    target = tuple(length + more for length, more in lengths)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    mode = ("linear", "bilinear", "trilinear")[len(size) - 1]
    expected = functional.interpolate(x, size=target, mode=mode, align_corners=False)
    got = Upsample(size, target)(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, x, cotangent)[0] for y in (got, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [2, 3])
def test_upsampling_by_the_published_factors_equals_interpolate(factor: int) -> None:
    x = torch.randn(2, 4, 14, 14)
    # In float64: torch's own float32 weights are off by 2e-6 at factor 3.
    expected = functional.interpolate(x.double(), scale_factor=factor, mode="bilinear", align_corners=False)
    got = Upsample((14, 14), (14 * factor, 14 * factor))(x)
    torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=1e-6)


def test_upsampling_by_one_is_the_identity_itself_and_nothing_is_saved() -> None:
    x = torch.randn(2, 3, 5, 4)
    assert Upsample((5, 4), (5, 4))(x) is x
    assert not Upsample((5, 4), (10, 4)).state_dict()


def train_two_steps() -> list[Tensor]:
    torch.manual_seed(3)
    body = UNetBody(1, 1, (17, 12), 4)
    optimizer = torch.optim.AdamW(body.parameters(), 1e-3)
    for _ in range(2):
        x = torch.randn(4, 1, 17, 12)
        (body(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(body.state_dict().values())


def test_training_on_a_fixed_seed_is_bit_reproducible() -> None:
    assert all(torch.equal(first, second) for first, second in zip(train_two_steps(), train_two_steps(), strict=True))


@pytest.mark.parametrize("size", [(24, 24), (9, 6, 5)])
def test_compile_export_and_autocast_agree_with_eager(size: tuple[int, ...]) -> None:
    body = UNetBody(2, 1, size, 4).eval()
    x = torch.randn(3, 2, *size)
    expected = body(x)
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    exported = torch.export.export(body, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for batch in (1, 5):
        x = torch.randn(batch, 2, *size)
        torch.testing.assert_close(exported(x), body(x), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = body(x)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), body(x), rtol=0.1, atol=0.05)


def test_torch_module_casts_and_memory_formats_work() -> None:
    body = UNetBody(2, 1, (24, 24), 4)
    x = torch.randn(3, 2, 24, 24)
    expected = body(x)
    channels_last = body.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(channels_last, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(body.double()(x.double()).float(), expected, rtol=1e-3, atol=1e-4)


def test_dfpnet_initialisation_has_its_spread() -> None:
    body = UNetBody(3, 3, (24, 24), 32)
    body.initialize("dfpnet")
    assert body.encoder[5][1].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert body.encoder[5][2].weight.mean().item() == pytest.approx(1.0, abs=0.005)
    assert body.encoder[5][2].weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_kaiming_and_xavier_count_what_an_output_sums_over() -> None:
    body = UNetBody(3, 2, (128, 128), 64)
    down, head = body.encoder[1][1], body.head[1]
    body.initialize("kaiming")
    assert down.weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 16)), rel=0.02)
    assert head.weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 16 / 4)), rel=0.05)
    assert not head.bias.any()
    # Kaiming's aim: rectified white noise leaves the head with the mean square of the noise.
    interior = body.head(torch.randn(4, 128, 32, 32))[..., 1:-1, 1:-1]
    assert interior.square().mean().item() == pytest.approx(1.0, rel=0.2)
    body.initialize("xavier")
    assert down.weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 16 + 128 * 4)), rel=0.02)


def test_training_starts_near_zero_but_with_the_published_weights_and_a_body_given_by_hand() -> None:
    x = torch.randn(4, 2, 32, 32)

    def size(model: nn.Module) -> float:
        return float(model(x).detach().square().mean().sqrt())

    assert 0.0 < size(UNet(2, 1, (32, 32), 16)) < 0.25
    assert 0.0 < size(T1Plus(2, 1, (32, 32), 24, 16)) < 0.15
    published = UNet(2, 1, (32, 32), 16, init="dfpnet")
    assert published.body.head[1].weight.std().item() == pytest.approx(0.02, rel=0.1)
    own = UNetBody(4, 1, (24, 24), 16)
    assert size(T1Plus(2, 1, (32, 32), 24, 16, body=own)) > 0.3


def test_default_initialisation_is_that_of_construction() -> None:
    torch.manual_seed(5)
    body = UNetBody(1, 1, (9, 9), 4)
    before = {name: value.clone() for name, value in body.state_dict().items()}
    body.initialize("kaiming")
    assert not torch.equal(before["head.1.weight"], body.head[1].weight)
    torch.manual_seed(5)
    body.initialize("default")
    assert all(torch.equal(value, before[name]) for name, value in body.state_dict().items())


def test_bad_arguments_are_named_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"one to three axis lengths of at least 1; got \(0, 4\)"):
        UNetBody(1, 1, (0, 4))
    with pytest.raises(ValueError, match=r"one to three axis lengths"):
        UNetBody(1, 1, (4, 4, 4, 4))
    with pytest.raises(ValueError, match=r"must be at least 1; got 1, 1 and 0"):
        UNetBody(1, 1, (4, 4), 0)
    with pytest.raises(ValueError, match=r"side 24, 100, 128, 224; got \(25, 25\)"):
        UNetBody(1, 1, (25, 25), layout="published")
    with pytest.raises(ValueError, match=r"layout must be one of auto, published, rule; got 'old'"):
        UNetBody(1, 1, (24, 24), layout="old")  # type: ignore[arg-type]
    body = UNetBody(2, 1, (8, 8), 2)
    with pytest.raises(ValueError, match=r"shape \(batch, 2, 8, 8\); got \(3, 1, 8, 8\)"):
        body(torch.zeros(3, 1, 8, 8))
    with pytest.raises(ValueError, match=r"one of default, dfpnet, xavier, kaiming; got 'vp'"):
        body.initialize("vp")  # type: ignore[arg-type]
