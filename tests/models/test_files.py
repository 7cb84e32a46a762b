"""Saving, loading and exporting models; what is wrong with a file is said in one sentence."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import transform_once as t1
from transform_once.models.fno import ReleasedFNO
from transform_once.models.operator import METADATA, load_weights

MODELS = {
    "T1": lambda: t1.T1(2, 1, (16, 12), modes=5, width=6, depth=2, transform="fourier", activation="sine"),
    "T1 top-m": lambda: t1.T1(1, 1, (16, 12), modes=t1.TopM(30).fit(torch.randn(4, 1, 16, 12)), width=6, depth=2),
    "T1 low-pass": lambda: t1.T1(1, 1, (16, 12), modes=t1.LowPass((5, 4)), width=6, depth=1),
    "T1 local": lambda: t1.T1(1, 1, (16, 12), modes=5, width=6, depth=2, local="conv"),
    "T1Plus": lambda: t1.T1Plus(1, 2, (16, 12), modes=8, width=4),
    "T1Grid": lambda: t1.T1Grid(1, 2, (16, 12), modes=(8, 7), width=4, depth=2),
    "FNO": lambda: t1.FNO(1, 1, (16, 12), modes=4, width=6, depth=2),
    "ReleasedFNO": lambda: ReleasedFNO(1, 1, (16, 12), modes=4, width=6, depth=2),
    "FFNO": lambda: t1.FFNO(1, 1, (16, 12), modes=4, width=6, depth=2),
    "UNet": lambda: t1.UNet(1, 1, (16, 12), width=4),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_as_it_was(name, tmp_path):
    model = MODELS[name]()
    x = torch.randn(3, model.in_channels, 16, 12)
    model(x)  # moves the running statistics of the UNet
    t1.save(model, tmp_path / "model.safetensors")
    loaded = t1.load(tmp_path / "model.safetensors")
    assert type(loaded) is type(model)
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    t1.save(loaded, tmp_path / "again.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.safetensors", "model.safetensors"]
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_in_the_dtype_it_was_saved_with(name, dtype, tmp_path):
    model = MODELS[name]().to(dtype)
    inputs, outputs = model.in_channels, model.out_channels
    model.set_normalization(torch.zeros(inputs), torch.ones(inputs), torch.zeros(outputs), torch.ones(outputs))
    t1.save(model, tmp_path / "model.safetensors")
    loaded = t1.load(tmp_path / "model.safetensors")
    for one, other in ((model.parameters(), loaded.parameters()), (model.buffers(), loaded.buffers())):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))
    if dtype == torch.float64:
        x = torch.randn(2, inputs, 16, 12, dtype=dtype)
        assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_mixed_and_complex_weights_load_as_they_were(tmp_path):
    class Body(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.gain = torch.nn.Parameter(torch.randn(3))
            self.register_buffer("fixed", torch.ones(3), persistent=False)

    body = Body().double()  # leaves complex numbers as they are
    model = t1.T1Grid(1, 1, (16, 12), modes=8, body=body)
    t1.save(model, tmp_path / "model.safetensors")
    loaded = t1.load(tmp_path / "model.safetensors", body=Body()).body
    assert torch.equal(loaded.turn, body.turn)
    assert torch.equal(loaded.gain, body.gain)
    assert (loaded.turn.dtype, loaded.gain.dtype, loaded.fixed.dtype) == (torch.complex64, *[torch.float64] * 2)


@pytest.mark.parametrize(
    "modes", [np.int64(5), (np.int64(5), 4), [np.int64(5), 4], t1.LowPass((np.int64(5), np.int32(4)))], ids=repr
)
def test_numpy_integers_are_saved_as_numbers(modes, tmp_path):
    model = t1.T1(1, 1, (16, 12), modes=modes, width=np.int64(6), depth=1)
    t1.save(model, tmp_path / "model.safetensors")
    loaded = t1.load(tmp_path / "model.safetensors")
    assert loaded.block == model.block
    assert loaded.config["width"] == 6


def test_bad_files_are_refused_in_one_sentence(tmp_path):
    good = tmp_path / "good.safetensors"
    t1.save(MODELS["T1"](), good)
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-100])
    (tmp_path / "text.safetensors").write_text("weights?")
    save_file({"weight": torch.zeros(3)}, tmp_path / "foreign.safetensors")
    with safe_open(good, framework="pt") as file:
        description = json.loads(file.metadata()[METADATA])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def write(name, tensors, **changes):
        save_file(tensors, tmp_path / f"{name}.safetensors", {METADATA: json.dumps(description | changes)})

    write("other", tensors, config=description["config"] | {"width": 8})
    older = {name: value for name, value in description["config"].items() if name != "head_activation"}
    write("older", tensors, config=older)
    write("newer", tensors, config=description["config"] | {"wings": 2})
    write("missing", dict(list(tensors.items())[1:]))
    write("unknown", tensors, **{"class": "T9"})
    for name, sentence in {
        "cut": "expected a model written by save; cannot read",
        "text": "expected a model written by save; cannot read",
        "foreign": "holds something else",
        "unknown": "holds something else",
        "other": "are not of this T1: 0 tensors are missing, 0 unknown",
        "older": "was saved by another version of transform_once, whose T1 differs in head_activation",
        "newer": "whose T1 differs in wings: use that version, or train again",
        "missing": "are not of this T1: 1 tensors are missing",
    }.items():
        with pytest.raises(ValueError, match=sentence) as raised:
            t1.load(tmp_path / f"{name}.safetensors")
        assert "\n" not in str(raised.value)


def test_weights_that_do_not_fit_leave_the_model_as_it_was():
    model = MODELS["T1"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    foreign = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    foreign["lift.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="1 of another shape, such as lift"):
        load_weights(model, foreign, "there")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["T1", "T1 top-m", "T1 local", "T1Plus", "T1Grid", "FNO", "FFNO", "UNet"])
def test_onnx_agrees_for_any_batch(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    model = MODELS[name]()
    t1.export(model, tmp_path / "model.onnx")
    assert model.training
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    model.eval()
    for batch in (1, 2, 5):
        x = torch.randn(batch, model.in_channels, 16, 12)
        (y,) = session.run(None, {"input": x.numpy()})
        assert np.abs(y - model(x).detach().numpy()).max() < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("name", ["T1", "T1Plus", "T1Grid"])
def test_torch_export_agrees_for_any_batch(name):
    model = MODELS[name]().eval()
    example = torch.randn(2, model.in_channels, 16, 12)
    exported = torch.export.export(model, (example,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}}).module()
    x = torch.randn(7, model.in_channels, 16, 12)
    assert torch.allclose(exported(x), model(x), atol=1e-5)


def test_a_model_of_complex_numbers_cannot_be_exported(tmp_path):
    with pytest.raises(ValueError, match=r"^a T1 with the transform dft computes with complex numbers") as raised:
        t1.export(t1.T1(1, 1, (16, 12), modes=4, width=4, depth=1, transform="dft"), tmp_path / "model.onnx")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
