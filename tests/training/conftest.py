import pytest

import transform_once as t1
from transform_once.solvers.navier_stokes import NAVIER_STOKES_SYMMETRIES, generate


@pytest.fixture(scope="session")
def flow():
    """Thirty pairs of Navier-Stokes at 16², with their symmetries."""
    x, y, _ = generate(30, 1e-3, 2.0, 16)
    symmetries = [symmetry.to_dict() for symmetry in NAVIER_STOKES_SYMMETRIES]
    return t1.Fields(input=x, target=y, grid="node", periodic=True, symmetries=symmetries, source="test")


@pytest.fixture(scope="session")
def film():
    """Four trajectories of nine frames of Navier-Stokes at 12²."""
    _, w, _ = generate(4, 1e-3, [0.5 * i for i in range(1, 10)], 12)
    return t1.Fields(trajectory=w, grid="node", periodic=True, times=[0.5 * i for i in range(1, 10)])
