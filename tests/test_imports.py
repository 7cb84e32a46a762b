"""The house: a folder imports only from folders to its left, and the package loads light."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import transform_once

PACKAGE = Path(transform_once.__file__).parent
ORDER = [
    "files",
    "processes",
    "messages",
    "kernels",
    "spectral",
    "data",
    "solvers",
    "models",
    "evaluation",
    "training",
    "reports",
    "config",
    "studies",
    "verbs",
    "demo",
    "cli",
    "__main__",
]


def imports_of(path):
    """Names of the package's modules that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_flow_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "transform_once" and len(parts) > 1:
            assert ORDER.index(parts[1]) <= ORDER.index(own), (
                f"{path.name} in {own} imports {name}, which lies to its right"
            )


def test_every_folder_has_its_place_in_the_order():
    folders = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert folders - {"__pycache__", "__init__", "experiments"} <= set(ORDER)


def test_every_public_name_loads():
    for name in transform_once.__all__:
        assert getattr(transform_once, name) is not None
    assert set(transform_once.__all__) <= set(dir(transform_once))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = transform_once.nonsense


def test_the_package_imports_without_torch():
    code = "import sys, transform_once.cli; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_see_the_same_public_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(transform_once.__all__)


SEEN = """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("THP_MEM_ALLOC_ENABLE"))
sys.meta_path.insert(0, Watch())
import transform_once
transform_once.dct
"""


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, ["20000", "1"]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", "1"]),
        ({"OMP_WAIT_POLICY": "passive"}, ["None", "1"]),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, ["20000", "0"]),
    ],
    ids=str,
)
def test_how_threads_spin_and_arrays_come_is_set_before_torch_is_loaded_unless_the_user_says(given, seen):
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    words = [sys.executable, "-c", SEEN]
    found = subprocess.run(words, env={**kept, **given}, check=True, capture_output=True, text=True).stdout
    assert found.split() == seen
