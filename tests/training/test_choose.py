import pytest
import torch

import transform_once as t1
from transform_once.training import choose
from transform_once.training.choose import choose_model


def smooth(size, seed=0, power=3.0):
    """Fields that do not repeat at their borders, with modes that decay as a power."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(12, 1, *size, generator=generator)
    for axis, n in enumerate(size):
        shape = [1] * (2 + len(size))
        shape[2 + axis] = n
        X = X * (1 + torch.arange(n).float()).pow(-power).reshape(shape)
    return t1.idct(X, len(size), size)


@pytest.mark.parametrize("size", [(64,), (32, 24), (12, 10, 8)], ids=str)
@pytest.mark.parametrize("name", ["T1", "T1Plus", "T1Grid", "FNO", "FFNO", "UNet"])
def test_a_model_is_chosen_for_any_fields(size, name):
    if len(size) == 1 and name == "T1Plus":
        pytest.skip("T1+ is for two and three dimensions")
    y = smooth(size)
    model, said = choose_model(t1.Fields(input=y, target=y), name)
    assert model(y).shape == y.shape
    assert said
    if name == "T1":
        modes = model.config["modes"]
        assert model.config["transform"] == "dct"
        assert t1.irreducible_loss(y - y.mean((2,) if len(size) == 1 else (2, 3), keepdim=True), modes) < 0.05
        assert min(modes if isinstance(modes, tuple) else (modes,)) >= 8


@pytest.mark.parametrize(("size", "least", "most"), [((64,), 16, 64), ((64, 64), 8, 48), ((20, 20, 20), 8, 16)])
def test_on_a_gpu_t1_grid_keeps_more_modes_than_the_others(size, least, most, monkeypatch):
    y = smooth(size)
    fields = t1.Fields(input=y, target=y)
    kept = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(choose, "choose_device", lambda _, device=device: torch.device(device))
        for name in ("T1", "T1Grid"):
            kept[device, name] = max(choose_model(fields, name, device=device)[0].block)
    assert least <= kept["cpu", "T1"] == kept["cuda", "T1"] == kept["cpu", "T1Grid"] < kept["cuda", "T1Grid"] <= most


def test_t1_grid_is_the_default(flow):
    assert isinstance(choose_model(flow)[0], t1.T1Grid)
    with pytest.raises(ValueError, match=r"T1Grid has no option 'local'.*T1 would have 'local'"):
        choose_model(flow, given={"local": "conv"})


def rough(size, seed=0):
    """Periodic fields that are white up to the tenth wave."""
    k = torch.stack(torch.meshgrid(*(torch.fft.fftfreq(n, 1 / n).abs() for n in size), indexing="ij")).amax(0)
    X = torch.fft.fftn(torch.randn(40, 1, *size, generator=torch.Generator().manual_seed(seed)), dim=(2, 3))
    return torch.fft.ifftn(X * (k < 11), dim=(2, 3)).real


@pytest.mark.parametrize(("device", "deep"), [("cpu", choose.DEPTH), ("cuda", choose.DEEP)])
def test_t1_grid_acts_on_the_waves_that_follow_from_the_same_ones_of_the_input(device, deep, monkeypatch):
    """Of squares none do, and two are the fewest; of a convolution all do, and nothing is chosen."""
    monkeypatch.setattr(choose, "choose_device", lambda _: torch.device(device))
    x = rough((32, 32))
    model, said = choose_model(t1.Fields(input=x, target=x**2, grid="node", periodic=True))
    assert (model.config["waves"], model.config["depth"]) == (2, deep)
    assert any(sentence.startswith("waves 2: higher ones of the target do not follow") for sentence in said)
    assert any(sentence.startswith("depth 8") for sentence in said) == (device == "cuda")
    model, said = choose_model(t1.Fields(input=x, target=x.roll(3, -1), grid="node", periodic=True))
    assert (model.config["waves"], model.config["depth"]) == (None, choose.DEPTH)
    assert not any("waves" in sentence for sentence in said)


def test_waves_and_depth_that_are_given_stay(monkeypatch):
    monkeypatch.setattr(choose, "choose_device", lambda _: torch.device("cuda"))
    x = rough((32, 32))
    fields = t1.Fields(input=x, target=x**2, grid="node", periodic=True)
    model, said = choose_model(fields, given={"waves": 5})
    assert (model.config["waves"], model.config["depth"]) == (5, choose.DEPTH)
    assert not any("waves" in sentence for sentence in said)
    model, said = choose_model(fields, given={"depth": 3})
    assert (model.config["waves"], model.config["depth"]) == (2, 3)
    assert not any("depth" in sentence for sentence in said)
    body = torch.nn.Conv2d(1, 1, 1)
    assert choose_model(fields, given={"body": body})[0].body is body


@pytest.mark.parametrize("given", [{"top_modes": 20}, {"transform": "dct", "modes": t1.TopM(9).fit(smooth((16, 16)))}])
def test_single_modes_are_not_for_t1_grid(flow, given):
    with pytest.raises(ValueError, match="T1Grid works on a block of real modes"):
        choose_model(flow, given=given)


def test_periodic_fields_get_the_fourier_basis(flow):
    model, said = choose_model(flow, "T1")
    assert model.transform.name == "fourier"
    assert any("fourier" in sentence for sentence in said)


def test_many_modes_make_a_narrow_model():
    y = torch.randn(4, 1, 48, 48)
    model, said = choose_model(t1.Fields(input=y, target=y), "T1")
    count = sum(p.numel() for p in model.parameters())
    assert model.config["modes"] == 48
    assert model.config["width"] < 48
    assert 5e6 < count < 25e6
    assert any("million parameters" in sentence for sentence in said)


def test_what_is_given_is_not_chosen(flow):
    model, _ = choose_model(
        flow, "T1", given={"modes": 5, "transform": "dct", "width": 8, "depth": 1, "init": "xavier"}
    )
    wanted = {"modes": 5, "transform": "dct", "width": 8, "depth": 1, "init": "xavier"}
    assert {key: model.config[key] for key in wanted} == wanted
    some, _ = choose_model(flow, "T1", given={"top_modes": 20, "width": 4, "depth": 1})
    assert len(some.config["modes"]) == 20
    assert torch.equal(some.config["modes"].indices, t1.TopM(20).fit(flow.target, "fourier").indices)


def test_an_even_number_of_fourier_modes_is_said_to_mean_one_less(flow):
    given = {"transform": "fourier", "modes": 6, "width": 4, "depth": 1}
    _, said = choose_model(flow, "T1", given=given)
    assert said == ["kept modes 5×5: sines and cosines come in pairs, so an even number means one less"]
    for exact in ({"modes": 5}, {"transform": "dct"}, {"modes": (5, 7)}):
        assert choose_model(flow, "T1", given=given | exact)[1] == []


def test_top_modes_are_of_the_basis_that_needs_fewest_modes(flow):
    model, said = choose_model(flow, "T1", given={"top_modes": 20})
    assert model.transform.name == "fourier"
    assert said[0].startswith("transform fourier: it needs fewest modes")
    assert said[1] == "modes: the 20 of largest energy"
    model, said = choose_model(flow, "T1", given={"top_modes": 20, "transform": "dct"})
    assert model.transform.name == "dct"
    assert torch.equal(model.config["modes"].indices, t1.TopM(20).fit(flow.target, "dct").indices)
    assert not any("transform" in sentence for sentence in said)


def test_top_modes_do_not_read_whole_trajectories(film, monkeypatch):
    """The energies come from blocks of bounded size, here of one frame."""
    monkeypatch.setattr("transform_once.evaluation.analysis.BLOCK_MEGABYTES", 1e-6)
    real, read = t1.Fields.counted, []

    def counted(fields, name):
        read.append(len(fields) * fields.frames)
        return real(fields, name)

    monkeypatch.setattr(t1.Fields, "counted", counted)
    model, _ = choose_model(film, "T1", given={"top_modes": 20})
    assert set(read) == {1}
    monkeypatch.undo()
    expected = t1.TopM(20).fit(film.trajectory.flatten(0, 1), model.transform.name)
    assert torch.equal(model.config["modes"].indices, expected.indices)


def test_history_becomes_channels(film):
    model, _ = choose_model(film, "T1", history=2)
    assert (model.in_channels, model.out_channels) == (3, 1)


def test_bad_names_are_one_sentence(flow):
    with pytest.raises(ValueError, match="the model's name must be one of 'T1'"):
        choose_model(flow, "T2")
    with pytest.raises(ValueError, match="top_modes chooses the modes of a T1"):
        choose_model(flow, "FNO", given={"top_modes": 5})
