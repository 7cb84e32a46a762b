import importlib
import math
import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from transform_once.data.fields import Fields
from transform_once.data.formats import convert, read

RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array).astype(np.float32))


# NumPy and PyTorch


def test_npz_pairs_and_trajectories(tmp_path):
    x, y, w = normal(5, 1, 6, 7), normal(5, 2, 6, 7), normal(2, 4, 1, 8)
    np.savez(tmp_path / "pairs.npz", input=x, target=y, note=np.array("text"))
    np.savez_compressed(tmp_path / "films.npz", trajectory=w)
    fields = read(tmp_path / "pairs.npz", grid="node", periodic=True, units={"channel_0": "K"})
    assert torch.equal(fields.input, tensor(x))
    assert torch.equal(fields[1:3].target, tensor(y[1:3]))
    assert (fields.metadata.grid, fields.metadata.periodic) == ("node", (True, True))
    assert torch.equal(read(tmp_path / "films.npz").trajectory, tensor(w))
    np.savez(tmp_path / "inputs.npz", input=x)
    assert read(tmp_path / "inputs.npz").shapes == {"input": (5, 1, 6, 7)}


def test_keys_axes_and_constants_are_chosen_by_option(tmp_path):
    speed, shape, flow = normal(3, 2), normal(3, 4, 5), normal(3, 3, 4, 5).astype(np.float16)
    np.savez(tmp_path / "x.npz", speed=speed, shape=shape, flow=flow)
    fields = read(tmp_path / "x.npz", input_key="speed,shape", target_key="flow", axes="nc,nxy,ncxy")
    assert fields.metadata.channels == {
        "input": ("speed_0", "speed_1", "shape"),
        "target": ("flow_0", "flow_1", "flow_2"),
    }
    assert torch.equal(fields.input[:, 2], tensor(shape))
    assert (fields.input[:, :2] == tensor(speed)[:, :, None, None]).all()
    assert torch.equal(fields.target, tensor(flow))
    chosen = read(tmp_path / "x.npz", input_key="shape", target_key="flow", axes="nxy,ncxy", target_channels=["flow_1"])
    assert torch.equal(chosen.target, tensor(flow[:, 1:2]))
    turned = read(tmp_path / "x.npz", input_key=["shape"], axes="nyx")
    assert torch.equal(turned.input, tensor(shape.transpose(0, 2, 1)[:, None]))
    masked = read(tmp_path / "x.npz", input_key="shape", target_key="flow", mask_key="shape", axes="nxy,ncxy")
    assert torch.equal(masked.mask, tensor(shape[:, None]) != 0)


def test_one_film_without_sample_axis(tmp_path):
    np.savez(tmp_path / "x.npz", t2m=normal(12, 5, 6), rain=normal(12, 5, 6), land=normal(5, 6) > 0)
    fields = read(
        tmp_path / "x.npz", trajectory_key="t2m,rain", axes="txy,xy", mask_key="land", frame_stride=3, stride=2
    )
    assert fields.shapes == {"trajectory": (1, 4, 2, 2, 3)}
    assert fields.mask.shape == (1, 1, 1, 2, 3)
    both = read(tmp_path / "x.npz", trajectory_key="t2m", axes="txy", times=(3, 7))
    assert both.metadata.times == (3, 4, 5, 6, 7)
    pairs = read(tmp_path / "x.npz", input_key="t2m", target_key="t2m", axes="txy", input_time=0, target_time=11)
    with np.load(tmp_path / "x.npz") as archive:
        assert torch.equal(pairs.target[0, 0], tensor(archive["t2m"][11]))


def test_npy_is_a_trajectory_or_inputs(tmp_path):
    w = normal(2, 5, 1, 6)
    np.save(tmp_path / "x.npy", w)
    fields = read(tmp_path / "x.npy")
    assert torch.equal(fields.trajectory, tensor(w))
    assert isinstance(fields._first.base, np.memmap)  # not loaded
    assert torch.equal(read(tmp_path / "x.npy", input_key="array").input, tensor(w))
    assert read(tmp_path / "x.npy", input_key="array").resolution == (1, 6)


def test_pt_of_tensors(tmp_path):
    x, y = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    torch.save({"x": x, "y": y, "comment": "text"}, tmp_path / "x.pt")
    fields = read(tmp_path / "x.pt", input_key="x", target_key="y", axes="nxy")
    assert torch.equal(fields.input[:, 0], x)
    assert torch.equal(fields.target[:, 0], y)
    torch.save(torch.ones(1, 2, 3, 4), tmp_path / "one.pt")
    assert read(tmp_path / "one.pt").shapes == {"trajectory": (1, 2, 3, 4)}


def test_pickles_are_never_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    torch.save({"input": Trap()}, tmp_path / "x.pt")
    np.savez(tmp_path / "x.npz", input=np.array([Trap()], dtype=object))
    np.save(tmp_path / "x.npy", np.array([Trap()], dtype=object))
    for name in ("x.pt", "x.npz", "x.npy"):
        with pytest.raises(OSError, match=r"(pickled objects are never loaded|nothing else is ever unpickled)"):
            read(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


# MATLAB, as Li et al. publish it


def li(tmp_path, version):
    a, u, t = normal(3, 8, 6), normal(3, 8, 6, 5), np.arange(10.0, 60.0, 10.0)
    path = tmp_path / f"ns_{version}.mat"
    if version == "v5":
        scipy_io = pytest.importorskip("scipy.io", reason="reads MATLAB files older than 7.3")
        scipy_io.savemat(path, {"a": a, "u": u, "t": t})
    else:  # MATLAB 7.3: HDF5 behind a header of 512 bytes, axes reversed
        with h5py.File(path, "w", userblock_size=512) as file:
            file["a"], file["u"], file["t"] = a.T, u.T, t[:, None]
        with open(path, "r+b") as file:
            file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(512))
    return a, u, path


@pytest.mark.parametrize("version", ["v5", "v7.3"])
def test_li_et_al(version, tmp_path):
    a, u, path = li(tmp_path, version)
    fields = read(path)
    assert torch.equal(fields.trajectory, tensor(u.transpose(0, 3, 1, 2)[:, :, None]))
    assert fields.metadata.times == (10, 20, 30, 40, 50)
    assert (fields.metadata.grid, fields.metadata.periodic) == ("node", (True, True))
    pairs = read(path, input_key="a", target_key="u", target_time=50)
    assert torch.equal(pairs.input, tensor(a[:, None]))
    assert torch.equal(pairs.target, tensor(u[..., 4][:, None]))
    assert torch.equal(read(path, target_time=30).target, tensor(u[..., 2][:, None]))
    later = read(path, input_time=10, target_time=20, stride=2)
    assert torch.equal(later.input, tensor(u[:, ::2, ::2, 0][:, None]))
    with pytest.raises(ValueError, match="no frame at time 55: there are 5 from 10 to 50"):
        read(path, target_time=55)
    with pytest.raises(ValueError, match="u has 5 frames from 10 to 50: choose input_time and target_time"):
        read(path, input_key="a", target_key="u")


def test_li_et_al_without_time(tmp_path):
    scipy_io = pytest.importorskip("scipy.io", reason="reads MATLAB files older than 7.3")
    a, u = normal(3, 16), normal(3, 16)
    scipy_io.savemat(tmp_path / "burgers.mat", {"a": a, "u": u, "visc": 0.1})
    fields = read(tmp_path / "burgers.mat")
    assert torch.equal(fields.target, tensor(u[:, None]))
    coefficient, solution = normal(2, 5, 7), normal(2, 5, 7)
    scipy_io.savemat(tmp_path / "darcy.mat", {"coeff": coefficient, "sol": solution})
    fields = read(tmp_path / "darcy.mat", input_key="coeff", target_key="sol")
    assert torch.equal(fields.input, tensor(coefficient[:, None]))


def test_v73_is_read_by_slices(tmp_path):
    _, u, path = li(tmp_path, "v7.3")
    fields = pickle.loads(pickle.dumps(read(path)))
    part = fields[[2, 0]].select(frames=[3])
    assert torch.equal(part.trajectory, tensor(u.transpose(0, 3, 1, 2)[[2, 0], 3:4, None]))


# PDEBench


def test_pdebench_one_tensor(tmp_path):
    w = normal(3, 5, 8)
    with h5py.File(tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5", "w") as file:
        file["tensor"] = w
        file["x-coordinate"] = (np.arange(8) + 0.5) / 8
        file["t-coordinate"] = np.arange(6) * 0.01  # one more than frames, as published
    fields = read(tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5", periodic=True)
    assert torch.equal(fields.trajectory, tensor(w[:, :, None]))
    assert fields.metadata.dt == pytest.approx(0.01)
    assert (fields.metadata.grid, fields.metadata.periodic) == ("cell", (True,))
    pairs = read(tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5", input_time=0, target_time=0.04)
    assert torch.equal(pairs.target, tensor(w[:, 4:]))


@pytest.mark.parametrize("grid", [(6,), (6, 5), (4, 5, 3)])
def test_pdebench_compressible_flow(grid, tmp_path):
    names = ("density", "pressure", "Vx", "Vy", "Vz")[: 2 + len(grid)]
    arrays = {name: normal(2, 4, *grid) for name in names}
    with h5py.File(tmp_path / "CFD.hdf5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
        for letter, n in zip("xyz", grid, strict=False):
            file[f"{letter}-coordinate"] = (np.arange(n) + 0.5) / n
        file["t-coordinate"] = np.arange(5) * 0.1
    fields = read(tmp_path / "CFD.hdf5")
    assert fields.metadata.channels == {"trajectory": names}
    assert torch.equal(fields.trajectory, tensor(np.stack(list(arrays.values()), axis=2)))
    one = read(tmp_path / "CFD.hdf5", channels=["Vx", "density"])
    assert torch.equal(one[1].trajectory, tensor(np.stack([arrays["Vx"], arrays["density"]], axis=2)[1:]))


def test_pdebench_darcy(tmp_path):
    nu, u = normal(3, 8, 8), normal(3, 1, 8, 8)
    with h5py.File(tmp_path / "2D_DarcyFlow_beta1.0_Train.hdf5", "w") as file:
        file["nu"], file["tensor"] = nu, u
        file["x-coordinate"] = file["y-coordinate"] = (np.arange(8) + 0.5) / 8
    fields = read(tmp_path / "2D_DarcyFlow_beta1.0_Train.hdf5")
    assert torch.equal(fields.input, tensor(nu[:, None]))
    assert torch.equal(fields.target, tensor(u))


def test_pdebench_groups_per_sample(tmp_path):
    data = normal(3, 5, 8, 6, 2)
    with h5py.File(tmp_path / "2D_diff-react_NA_NA.h5", "w") as file:
        for i, sample in enumerate(data):
            file[f"{i:04d}/data"] = sample
            file[f"{i:04d}/grid/x"] = (np.arange(8) + 0.5) / 4 - 1
            file[f"{i:04d}/grid/y"] = (np.arange(6) + 0.5) / 3 - 1
            file[f"{i:04d}/grid/t"] = np.arange(5) * 0.05
    fields = read(tmp_path / "2D_diff-react_NA_NA.h5")
    assert torch.equal(fields.trajectory, tensor(data.transpose(0, 1, 4, 2, 3)))
    assert (fields.names, fields.metadata.dt) == (("0000", "0001", "0002"), pytest.approx(0.05))
    assert torch.equal(fields[[2, 1]].select(frames=[1]).trajectory, tensor(data.transpose(0, 1, 4, 2, 3)[[2, 1], 1:2]))


def test_pdebench_incompressible_flow(tmp_path):
    velocity, particles, force = normal(2, 4, 6, 6, 2), normal(2, 4, 6, 6, 1), normal(2, 6, 6, 2)
    with h5py.File(tmp_path / "ns_incom_inhom_2d_512-0.h5", "w") as file:
        file["velocity"], file["particles"], file["force"] = velocity, particles, force
        file["t"] = np.tile(np.arange(4) * 0.005, (2, 1))
    fields = read(tmp_path / "ns_incom_inhom_2d_512-0.h5")
    joined = np.concatenate([velocity, particles], axis=-1).transpose(0, 1, 4, 2, 3)
    assert torch.equal(fields.trajectory, tensor(joined))
    pairs = read(tmp_path / "ns_incom_inhom_2d_512-0.h5", input_key="force", target_key="particles", target_time=0.015)
    assert torch.equal(pairs.input, tensor(force.transpose(0, 3, 1, 2)))


# The Well


def well(path, n=2, grid=(6, 5)):
    arrays = {
        "t0_fields/density": (normal(n, 4, *grid), True, True, (True, True)),
        "t0_fields/ground": (normal(*grid), False, False, (True, True)),
        "t0_fields/column": (normal(n, 4, grid[0]), True, True, (True, False)),
        "t1_fields/velocity": (normal(n, 4, *grid, 2), True, True, (True, True)),
        "t2_fields/stress": (normal(n, 4, *grid, 2, 2), True, True, (True, True)),
    }
    with h5py.File(path, "w") as file:
        file.attrs.update(
            {"dataset_name": "example", "grid_type": "cartesian", "n_spatial_dims": 2, "n_trajectories": n}
        )
        dimensions = file.create_group("dimensions")
        dimensions.attrs["spatial_dims"] = ["x", "y"]
        dimensions["time"] = np.arange(4, dtype=np.float32) * 0.25
        for letter, size in zip("xy", grid, strict=True):
            dimensions[letter] = np.arange(size, dtype=np.float32) / size
        for letter, kind in (("x", "periodic"), ("y", "wall")):
            border = file.create_group(f"boundary_conditions/{letter}_{kind}")
            border.attrs["associated_dims"], border.attrs["bc_type"] = [letter], kind
            border["mask"] = np.ones(3, dtype=bool)
        for key, (array, sample, time, dims) in arrays.items():
            file[key] = array
            file[key].attrs.update({"sample_varying": sample, "time_varying": time, "dim_varying": dims})
    return {key.split("/")[1]: array for key, (array, *_) in arrays.items()}


def test_the_well(tmp_path):
    arrays = well(tmp_path / "x.hdf5")
    fields = read(tmp_path / "x.hdf5")
    names = ("column", "density", "velocity_x", "velocity_y", "stress_xx", "stress_xy", "stress_yx", "stress_yy")
    assert fields.metadata.channels == {"trajectory": names}
    assert (fields.metadata.periodic, fields.metadata.grid, fields.metadata.dt) == ((True, False), "node", 0.25)
    w = fields.trajectory
    assert torch.equal(w[:, :, 1], tensor(arrays["density"]))
    assert torch.equal(w[:, :, 0], tensor(arrays["column"])[..., None].expand(2, 4, 6, 5))
    assert torch.equal(w[:, :, 2:4], tensor(np.moveaxis(arrays["velocity"], -1, 2)))
    assert torch.equal(w[:, :, 6], tensor(arrays["stress"][..., 1, 0]))
    with_ground = read(tmp_path / "x.hdf5", trajectory_key=["density", "ground"])
    assert torch.equal(with_ground.trajectory[1, 3, 1], tensor(arrays["ground"]))
    pairs = read(tmp_path / "x.hdf5", input_key="ground,density", target_key="velocity", input_time=0, target_time=0.75)
    assert torch.equal(pairs.target, tensor(np.moveaxis(arrays["velocity"][:, 3], -1, 1)))


def test_a_folder_of_the_well_is_joined_and_checked(tmp_path):
    one, two = well(tmp_path / "a.hdf5"), well(tmp_path / "b.hdf5", n=3)
    fields = read(tmp_path, trajectory_key="density")
    assert torch.equal(fields.trajectory[:, :, 0], tensor(np.concatenate([one["density"], two["density"]])))
    well(tmp_path / "c.hdf5", grid=(7, 5))
    with pytest.raises(ValueError, match=r"differ in resolution or length: .* in a.hdf5 and .* in c.hdf5"):
        read(tmp_path, trajectory_key="density")


# HDF5 by name, NetCDF, Zarr


def test_hdf5_by_name(tmp_path):
    x, y = normal(3, 1, 5), normal(3, 1, 5)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["input"], file["target"] = x, y
        file["group/truth"] = y + 1
    assert torch.equal(read(tmp_path / "x.h5").target, tensor(y))
    assert torch.equal(read(tmp_path / "x.h5", target_key="group/truth").target, tensor(y + 1))


@pytest.mark.parametrize("name", ["x.nc", "x.zarr"])
def test_xarray(name, tmp_path):
    xarray = pytest.importorskip("xarray", reason="reads NetCDF and Zarr")
    pytest.importorskip("netCDF4" if name == "x.nc" else "zarr", reason="xarray reads through it")
    days = np.array(["2020-01-01", "2020-01-02", "2020-01-03"], dtype="datetime64[ns]")
    u, v = normal(3, 4, 6), normal(3, 4, 6)
    u[1, 2, 3] = math.nan
    coordinates = {"time": days, "latitude": np.arange(4.0), "longitude": np.arange(6.0)}
    dims = ("time", "latitude", "longitude")
    dataset = xarray.Dataset({"u": (dims, u), "v": (dims, v), "land": (dims[1:], normal(4, 6))}, coordinates)
    if name == "x.nc":
        dataset.to_netcdf(tmp_path / name, encoding={"u": {"_FillValue": -9999.0}})
    else:
        dataset.to_zarr(tmp_path / name, consolidated=False)
    with pytest.raises(ValueError, match=r"sample 0 of trajectory from .* NaN"):
        read(tmp_path / name).load()
    fields = read(tmp_path / name, missing=math.nan)
    assert fields.metadata.channels == {"trajectory": ("u", "v")}
    assert (fields.metadata.grid, fields.metadata.dt) == ("node", 86400)
    assert torch.equal(fields.trajectory[0, :, 1], tensor(v))
    assert fields.mask.sum() == 1
    assert fields.mask[0, 1, 0, 2, 3]
    land = read(tmp_path / name, input_key="land")
    assert land.shapes == {"input": (1, 1, 4, 6)}
    saved = convert(tmp_path / name, tmp_path / "y.h5", missing=math.nan)
    assert torch.equal(saved.mask, fields.mask)


@pytest.mark.parametrize("name", ["x.nc", "x.zarr"])
def test_a_rewritten_xarray_is_read_anew(name, tmp_path):
    xarray = pytest.importorskip("xarray", reason="reads NetCDF and Zarr")
    pytest.importorskip("netCDF4" if name == "x.nc" else "zarr", reason="xarray reads through it")
    path, dims = tmp_path / name, ("sample", "time", "px", "py")
    first = xarray.Dataset({"u": (dims, normal(2, 3, 4, 4))}, {"time": np.arange(3.0)})
    if name == "x.nc":
        first.to_netcdf(path)
    else:
        first.to_zarr(path, consolidated=False)
    fields = read(path)
    before, mark = fields.trajectory, fields.fingerprint()
    assert read(path).fingerprint() == mark
    second = first.assign_coords(time=2 * np.arange(3.0)) * 0 + 7
    if name == "x.nc":
        path.unlink()
        second.to_netcdf(path)
    else:
        second.to_zarr(path, mode="r+", consolidated=False)
    assert not torch.equal(before, fields.trajectory)
    assert (read(path).trajectory == 7).all()
    assert read(path).metadata.times == (0.0, 2.0, 4.0)
    assert read(path).fingerprint() != mark


# Folders


def airfoil(path, shape=(6, 128, 128)):
    array = normal(*shape, dtype=np.float64)
    array[2] = array[2] > 0
    np.savez_compressed(path, a=array)
    return array


def test_deep_flow_prediction(tmp_path):
    arrays = [airfoil(tmp_path / f"2032c_{speed}_113.npz") for speed in (4460, 6367, 7403)]
    fields = read(tmp_path)
    assert fields.names == ("2032c_4460_113", "2032c_6367_113", "2032c_7403_113")
    assert fields.metadata.channels["target"] == ("pressure", "velocity_x", "velocity_y")
    assert torch.equal(fields.input, tensor(np.stack(arrays)[:, :3]))
    assert torch.equal(fields[2].target, tensor(arrays[2][None, 3:]))
    assert fields.mask is None  # declared, never guessed
    masked = read(tmp_path, mask_key="mask", dtype="float64", target_channels=["pressure"])
    assert torch.equal(masked.mask, torch.from_numpy(np.stack(arrays)[:, 2:3] != 0))
    assert torch.equal(masked.target, torch.from_numpy(np.stack(arrays)[:, 3:4]))
    saved = convert(tmp_path, tmp_path / "airfoils.h5")
    assert torch.equal(saved.target, fields.target)
    assert saved.names == fields.names


def test_a_folder_of_mixed_or_broken_files_is_refused(tmp_path):
    airfoil(tmp_path / "a.npz")
    airfoil(tmp_path / "b.npz", (6, 64, 64))
    with pytest.raises(ValueError, match=r"differ in resolution: \(6, 128, 128\) in a.npz; \(6, 64, 64\) in b.npz"):
        read(tmp_path)
    np.savez(tmp_path / "b.npz", data=np.zeros((6, 128, 128)))
    with pytest.raises(ValueError, match=r"b.npz has no a: it has data"):
        read(tmp_path)
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:5000])
    with pytest.raises(OSError, match=r"b.npz is no readable NumPy file"):
        read(tmp_path)
    (tmp_path / "b.npz").unlink()
    airfoil(tmp_path / "a.npz", (5, 8, 8))
    with pytest.raises(ValueError, match=r"expected \(6, rows, columns\)"):
        read(tmp_path)


def recording(folder, frames, size=(12, 7)):
    folder.mkdir(parents=True)
    images = normal(frames, 5, *size, 1)
    for i, image in enumerate(images):
        np.savez_compressed(folder / f"imgsTarget_{i:06d}.npz", data=image)
        (folder / f"imgsTarget_noInflow_{i:06d}.npz").touch()  # lies beside them and is not read
        (folder / f"density_{i:06d}.npz").touch()
    return images[..., 0]


def test_scalarflow(tmp_path):
    images = np.stack([recording(tmp_path / f"sim_{i:06d}", 3) for i in range(2)])
    fields = read(tmp_path)
    assert fields.shapes == {"trajectory": (2, 3, 1, 12, 7)}
    assert torch.equal(fields.trajectory, tensor(images[:, :, 2:3]))  # the central camera
    assert fields.metadata.dt == pytest.approx(1 / 60)
    assert fields.names == ("sim_000000", "sim_000001")
    other = read(tmp_path, camera=4, frame_stride=2)
    assert torch.equal(other[1].trajectory, tensor(images[1:, ::2, 4:]))
    with pytest.raises(ValueError, match="camera 5"):
        read(tmp_path, camera=5)
    with pytest.raises(ValueError, match="of all 104 recordings; asked for 'train' of 2"):
        read(tmp_path, split="train")
    np.savez(tmp_path / "sim_000001" / "imgsTarget_000002.npz", data=normal(5, 6, 7, 1))
    with pytest.raises(ValueError, match=r"imgsTarget_000002.npz holds data of shape"):
        fields.load()
    (tmp_path / "sim_000001" / "imgsTarget_000002.npz").unlink()
    with pytest.raises(ValueError, match=r"differ in their number of frames .* 3 in sim_000000, 2 in sim_000001"):
        read(tmp_path)


def test_scalarflow_splits_and_size(tmp_path):
    frame = normal(5, 1062, 600, 1)
    for i in range(104):
        (tmp_path / f"sim_{i:06d}").mkdir()
        (tmp_path / f"sim_{i:06d}" / "imgsTarget_000000.npz").touch()
    for i in (0, 64, 103):
        np.savez(tmp_path / f"sim_{i:06d}" / "imgsTarget_000000.npz", data=frame * i)
    splits = {name: read(tmp_path, split=name) for name in ("train", "validation")}
    assert {name: len(split) for name, split in splits.items()} == {"train": 64, "validation": 20}
    assert splits["train"].resolution == (1062, 600)
    assert torch.equal(splits["validation"][0].trajectory[0, 0, 0], tensor(frame[2, ..., 0] * 64))
    with pytest.raises(OSError, match=r"imgsTarget_000000.npz is no readable NumPy file"):
        splits["train"][1].load()
    np.savez(tmp_path / "sim_000084" / "imgsTarget_000000.npz", data=frame)
    assert len(read(tmp_path, split="test")) == 20


# Videos


def film(path, frames, codec, pixels, rate=25, **options):
    av = pytest.importorskip("av", reason="reads videos")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="gray" if frame.ndim == 2 else "rgb24")
            container.mux(stream.encode(picture.reformat(format=pixels)))
        container.mux(stream.encode())


def moving(count, height=48, width=32):
    rows, columns = np.mgrid[:height, :width]
    return np.stack([120 + 100 * np.sin((rows + 2 * i) / 9) * np.cos(columns / 7) for i in range(count)]).astype(
        np.uint8
    )


def test_video_frames_are_exact_in_any_order(tmp_path):
    frames = moving(40)
    film(tmp_path / "x.mkv", frames, "ffv1", "gray")  # lossless
    fields = read(tmp_path / "x.mkv")
    assert fields.shapes == {"trajectory": (1, 40, 1, 48, 32)}
    assert fields.metadata.dt == pytest.approx(1 / 25, rel=1e-3)
    expected = tensor(frames) / 255
    for chosen in ([5, 6, 7], [30, 31], [3], [39, 0, 20]):  # on, forward, back, scattered
        torch.testing.assert_close(fields.select(frames=chosen).trajectory[0, :, 0], expected[chosen])
    torch.testing.assert_close(fields.select(frames=slice(1, None, 3)).trajectory[0, :, 0], expected[1::3])
    again = pickle.loads(pickle.dumps(fields))
    torch.testing.assert_close(again.select(frames=[8]).trajectory[0, :, 0], expected[[8]])


def test_mp4_with_reordered_frames(tmp_path):
    frames = moving(40)
    film(tmp_path / "x.mp4", frames, "libx264", "yuv420p", crf="10", bf="3", g="12")
    fields = read(tmp_path / "x.mp4")
    expected = tensor(frames) / 255
    found = fields.trajectory[0, :, 0]
    assert (found - expected).abs().max() < 0.06
    for i in (0, 17, 39):  # each frame is nearest to itself, so none is lost or swapped
        assert (found[i] - expected).square().mean((1, 2)).argmin() == i
        torch.testing.assert_close(fields.select(frames=[i]).trajectory[0, 0, 0], found[i])


def test_video_in_colour_resized_and_converted(tmp_path):
    grey = moving(6)
    frames = np.stack([grey, grey // 2, 255 - grey], axis=-1)
    film(tmp_path / "x.mkv", frames, "ffv1", "bgr0")
    fields = read(tmp_path / "x.mkv", colour=True)
    assert fields.metadata.channels == {"trajectory": ("red", "green", "blue")}
    expected = tensor(np.moveaxis(frames, -1, 1)) / 255
    torch.testing.assert_close(fields.trajectory[0], expected)
    small = read(tmp_path / "x.mkv", colour=True, resize=(24, 16))
    resized = torch.nn.functional.interpolate(expected, (24, 16), mode="bilinear", antialias=True)
    torch.testing.assert_close(small.trajectory[0], resized)
    torch.testing.assert_close(small[0].select(stride=3).trajectory[0], resized[..., 1::3, 1::3])
    saved = convert(tmp_path / "x.mkv", tmp_path / "x.h5", resize=(24, 16), colour=True)
    assert torch.equal(saved.trajectory, small.trajectory)
    assert saved.metadata.settings["read"] == {"resize": [24, 16], "colour": True}


def test_a_long_video_is_streamed_not_loaded(tmp_path, monkeypatch):
    film(tmp_path / "x.mkv", moving(50), "ffv1", "gray")
    from transform_once.data.formats.folders import Video

    sizes = []
    original = Video.__getitem__

    def watched(self, index):
        values = original(self, index)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(Video, "__getitem__", watched)
    monkeypatch.setattr(Fields.blocks, "__defaults__", (8 * 48 * 32 * 4 / 2**20, (0, 0)))
    convert(tmp_path / "x.mkv", tmp_path / "x.h5")
    assert len(sizes) == 7
    assert max(sizes) <= 8 * 48 * 32 * 4


# Bad input


def test_missing_and_unknown(tmp_path):
    np.savez(tmp_path / "x.npz", a=normal(3, 1, 5), b=normal(3, 1, 5))
    with pytest.raises(ValueError, match=r"choose input_key and target_key .* from a, b"):
        read(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="has no c, d: it has a, b"):
        read(tmp_path / "x.npz", input_key="c", target_key="d")
    with pytest.raises(TypeError, match="unknown option inputkey: known are input_key, target_key"):
        read(tmp_path / "x.npz", inputkey="a")
    with pytest.raises(FileNotFoundError, match=r"there is no /.*absent.h5: check the path"):
        read(tmp_path / "absent.h5")
    with pytest.raises(FileNotFoundError, match=f"there is no absent.h5 in {Path.cwd()}: check the path"):
        read("absent.h5")  # such as the data of a run that was trained elsewhere
    (tmp_path / "x.dat").touch()
    with pytest.raises(ValueError, match="has no known ending: say format"):
        read(tmp_path / "x.dat")
    with pytest.raises(ValueError, match="unknown format 'csv': known are fields, npz"):
        read(tmp_path / "x.dat", format="csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no known data"):
        read(tmp_path / "empty")


def test_wrong_axis_order(tmp_path):
    np.savez(tmp_path / "x.npz", input=normal(2, 32, 32, 3), target=normal(2, 3, 32, 32))
    with pytest.raises(ValueError, match=r'if its channels come last say axes="nxyc"') as error:
        read(tmp_path / "x.npz")
    assert "\n" not in str(error.value)
    np.savez(tmp_path / "y.npz", trajectory=normal(30, 8, 9))
    with pytest.raises(ValueError, match=r'name its axes with axes, .* such as axes="nxyt"|has no grid axes'):
        read(tmp_path / "y.npz")
    with pytest.raises(ValueError, match="which is not txx"):
        read(tmp_path / "y.npz", axes="txx")
    np.savez(tmp_path / "z.npz", input=normal(2, 1, 8, 9), target=normal(2, 1, 9, 8))
    with pytest.raises(ValueError, match=r"do not fit together along x: input \(2, 1, 8, 9\) read as ncxy; target"):
        read(tmp_path / "z.npz")
    np.savez(tmp_path / "line.npz", input=normal(2, 1, 8))
    with pytest.raises(ValueError, match=r"resize is for fields of two dimensions, those of .* have 1"):
        read(tmp_path / "line.npz", resize=(4, 4))


def test_frames_of_arrays_in_memory_are_checked(tmp_path):
    u = normal(3, 5, 1, 6, 6)
    u[0, 4, 0, 0, 0] = -9999
    np.savez(tmp_path / "x.npz", trajectory=u)
    fields = read(tmp_path / "x.npz", axes="ntcxy", input_time=0, target_time=4, missing=-9999)
    assert fields.mask.nonzero().tolist() == [[0, 0, 0, 0]]
    assert fields.target.min() > -9999
    u[1, 4, 0, 2, 2] = math.nan
    np.savez(tmp_path / "y.npz", trajectory=u)
    with pytest.raises(ValueError, match=r"sample 1 of target from .* holds a value that is NaN"):
        read(tmp_path / "y.npz", axes="ntcxy", input_time=0, target_time=4).load()


@pytest.mark.parametrize("marker", [-9999.0, math.nan])
def test_resizing_spreads_missing_points_and_keeps_precision(marker, tmp_path):
    u = 1 + RNG.random((2, 3, 1, 16, 16))
    resize = torch.nn.functional.interpolate
    expected = resize(torch.from_numpy(u[:, 0]), (12, 12), mode="bilinear", antialias=True)
    gone = torch.zeros(1, 1, 16, 16)
    gone[..., 5, 5] = 1
    touched = resize(gone, (12, 12), mode="bilinear", antialias=True) > 0
    u[:, 0, :, 5, 5] = marker
    np.savez(tmp_path / "x.npz", trajectory=u)
    fields = read(tmp_path / "x.npz", missing=marker, resize=(12, 12), dtype="float64")
    assert torch.equal(fields.mask[:, 0], touched.expand(2, 1, 12, 12))
    assert not fields.mask[:, 1:].any()
    torch.testing.assert_close(
        fields.trajectory[:, 0][~fields.mask[:, 0]], expected[~fields.mask[:, 0]], rtol=1e-12, atol=0
    )
    same = read(tmp_path / "x.npz", missing=marker, resize=(16, 16), dtype="float64")
    assert same.mask.sum() == 2


def test_nan_is_named_by_sample_and_file(tmp_path):
    x = normal(4, 1, 5)
    x[2, 0, 3] = math.nan
    np.savez(tmp_path / "x.npz", input=x)
    with pytest.raises(ValueError, match=r"sample 2 of input from .*x.npz holds a value that is NaN or Inf"):
        convert(tmp_path / "x.npz", tmp_path / "x.h5")
    assert not (tmp_path / "x.h5").exists()
    assert convert(tmp_path / "x.npz", tmp_path / "y.h5", missing=math.nan)[2].mask.sum() == 1


@pytest.mark.parametrize("suffix", ["npz", "npy", "pt", "mat", "h5", "hdf5", "mp4", "nc"])
@pytest.mark.parametrize("content", ["truncated", "garbage", "empty"])
def test_unreadable_files_are_one_sentence(suffix, content, tmp_path):
    for module in {"mat": ["scipy"], "mp4": ["av"], "nc": ["xarray", "netCDF4"]}.get(suffix, []):
        pytest.importorskip(module, reason=f"reads .{suffix}")
    x = normal(3, 1, 64)
    path = tmp_path / f"x.{suffix}"
    if suffix == "npz":
        np.savez(path, input=x)
    elif suffix == "npy":
        np.save(path, x)
    elif suffix == "pt":
        torch.save({"input": torch.from_numpy(x)}, path)
    elif suffix == "mat":
        importlib.import_module("scipy.io").savemat(path, {"a": x, "u": x})
    elif suffix == "mp4":
        film(path, moving(5), "libx264", "yuv420p")
    elif suffix == "nc":
        importlib.import_module("xarray").Dataset({"u": (("n", "x", "y"), x)}).to_netcdf(path)
    else:
        with h5py.File(path, "w") as file:
            file["input"] = x
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "garbage": b"nonsense" * 99, "empty": b""}[content])
    with pytest.raises((OSError, ValueError)) as error:
        read(path, axes="ncx,nxy").load()
    assert f"x.{suffix}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("x.mp4", "av", "video"), ("x.nc", "xarray", "xarray"), ("x.mat", "scipy.io", "mat")]
)
def test_a_missing_extra_names_the_command(name, module, extra, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(b"anything")
    original = importlib.import_module

    def absent(wanted):
        if wanted == module:
            raise ImportError(wanted)
        return original(wanted)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=rf'needs {module}: pip install "transform-once\[{extra}\]"'):
        read(tmp_path / name)


# Our own


def test_our_own_files_are_narrowed_by_option(tmp_path):
    w = torch.randn(3, 6, 2, 8)
    Fields(trajectory=w, dt=0.5, channels=("u", "v")).save(tmp_path / "x.h5")
    assert torch.equal(read(tmp_path / "x.h5").trajectory, w)
    assert torch.equal(read(tmp_path / "x.h5", channels=["v"], times=(0.5, 1.5)).trajectory, w[:, 1:4, 1:])
    assert torch.equal(read(tmp_path / "x.h5", input_time=0, target_time=2.5).target, w[:, 5])
    with pytest.raises(ValueError, match="a file of our own, so axes does not apply"):
        read(tmp_path / "x.h5", axes="nxy")
    (tmp_path / "x.h5.partial").touch()
    with pytest.raises(ValueError, match=r"x.h5.partial is unfinished"):
        read(tmp_path / "x.h5.partial")
    with pytest.raises(ValueError, match="together make pairs"):
        read(tmp_path / "x.h5", target_time=1)


# The real files, where they are


@pytest.fixture
def real():
    folder = os.environ.get("TRANSFORM_ONCE_DATA")
    if not folder:
        pytest.skip("TRANSFORM_ONCE_DATA does not name a folder with the real data sets")
    return Path(folder)


def test_real_airfoils(real, tmp_path):
    fields = convert(real / "airfoil" / "dfp_original", tmp_path / "x.h5", mask_key="mask")
    assert fields.shapes == {"input": (6, 3, 128, 128), "target": (6, 3, 128, 128)}
    for name, x in zip(fields.names, fields.input, strict=True):
        speed = [float(part) / 100 for part in name.split("_")[1:]]  # the name tells the free stream
        assert x[0].abs().amax() == pytest.approx(abs(speed[0]), rel=0.01)
        assert x[1].abs().amax() == pytest.approx(abs(speed[1]), rel=0.01)
    assert (fields.target[:, 1:] * fields.mask == 0).all()  # no flow inside the airfoil
    options = {"input_key": "freestream,mask", "target_key": "fields", "axes": "nc,nxy,ncxy", "mask_key": "mask"}
    ours = read(real / "airfoil" / "openfoam.npz", **options)
    assert ours.shapes == {"input": (136, 3, 128, 128), "target": (136, 3, 128, 128)}
    assert torch.equal(ours[:4].mask, ours[:4].input[:, 2:] != 0)


def test_real_climate(real):
    fields = read(real / "climate" / "era5_t2m_uk_hourly_2019-03.npz", trajectory_key="t2m", axes="txy")
    assert fields.shapes == {"trajectory": (1, 744, 1, 33, 49)}
    assert 250 < fields.trajectory.mean() < 300
    zuv = read(real / "climate" / "erainterim_zuv.npz", trajectory_key="z,u,v", axes="tcxy", periodic=(False, True))
    assert zuv.shapes == {"trajectory": (1, 2, 9, 241, 480)}
    assert zuv.metadata.channels["trajectory"][3:6] == ("u_0", "u_1", "u_2")


def test_real_video(real):
    pytest.importorskip("av", reason="reads videos")
    fields = read(real / "smoke" / "scalarflow_camera2.mp4", resize=(1062, 600))
    assert fields.shapes == {"trajectory": (1, 120, 1, 1062, 600)}
    early, late = fields.select(frames=[0, 100]).trajectory[0, :, 0]
    assert 0 <= early.min() <= late.max() <= 1
    assert late.sum() > early.sum() > 0  # the plume grows


def test_times_make_pairs_of_any_trajectory(tmp_path):
    film = normal(4, 6, 2, 8, 7)
    np.savez(tmp_path / "x.npz", trajectory=film, u=film)
    np.save(tmp_path / "x.npy", film)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["trajectory"] = film
    expected = film[:, 1], film[:, 4]
    sources = {"x.npz": {}, "x.npy": {"trajectory_key": "array"}, "x.h5": {}}
    for name, options in (*sources.items(), ("x.npz", {"trajectory_key": "u"})):
        fields = read(tmp_path / name, input_time=1, target_time=4, **options)
        for found, exact in zip((fields.input, fields.target), expected, strict=True):
            np.testing.assert_allclose(found.numpy(), exact, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "options", "sentence"),
    [
        ((5, 32, 20, 6), {}, 'if its channels come last say axes="nxyc", otherwise axes="ncxy"'),
        ((5, 32, 32), {}, 'would have 32 channels on a line of 32 points: .* say axes="nxy"'),
        ((5, 2, 8, 7), {"axes": "nxycc"}, "axes 'nxycc' fits no array"),
        ((5, 2, 8, 7), {"times": (0, 1)}, "these are pairs: leave times out"),
        ((5, 2, 8, 7), {"stride": -1}, "stride must be at least 1; got -1"),
        ((5, 2, 8, 7), {"frame_stride": 0}, "frame_stride must be at least 1; got 0"),
    ],
)
def test_doubtful_layouts_are_asked_about(tmp_path, shape, options, sentence):
    values = normal(*shape)
    np.savez(tmp_path / "x.npz", input=values, target=values)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path / "x.npz", **options)
