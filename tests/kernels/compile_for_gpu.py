"""Compiles every kernel for an NVIDIA H100 or H200, which needs none: the interpreter accepts what a compiler refuses.

Run by `test_kernels.py` in a process of its own, where nothing is interpreted.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transform_once.kernels import (
    layer,
    layout,
    lift,
    loss,
    motion,
    muon,
    neighbours,
    norm,
    perceptron,
    transform,
    waves,
)

LOW, FULL = "*bf16", "*fp32"
# In low precision:
STATE = {
    "A",
    "B",
    "dA",
    "Z",
    "dZ",
    "G",
    "slopes",
    "dout",
    "X",
    "Y",
    "dX",
    "dY",
    "S",
    "V",
    "T",
    "U",
    "dS",
    "dV",
    "dT",
    "dU",
}
UNROUNDED = {muon._update, motion._move, transform._inner, transform._last, waves._of_matrices}
NUMBERS = {"momentum", "decay", "size", "a", "b", "c", "epsilon"}
GRID = {"N1": 1, "N2": 20, "N3": 20}
FORMS = [  # of its layers
    {"AXES": 2, "PERIODIC": True, "ROWS": 16, "Q": 16, "BACK": False},
    {"AXES": 2, "PERIODIC": False, "ROWS": 0, "Q": 16, "BACK": True},
    {"AXES": 0, "PERIODIC": True, "ROWS": 0, "Q": 16, "BACK": True},
]
CONSTANTS = {
    layer._channels: {"WIDTH": 48, "P": 64, "S": 64, "SINE": False, "SLOPES": True},
    layer._channels_backward: {"WIDTH": 48, "P": 64, "S": 64},
    layer._mix: {"SIZE": 23, "P": 32, "C": 64, "LAST": True},
    layer._mix_backward: {"SIZE": 23, "P": 32, "C": 64, "FIRST": True},
    layer._single: {"WIDTH": 8, "P": 8, "K": 64},
    layer._single_backward: {"WIDTH": 8, "P": 8, "K": 64},
    layout._copy: {"R": 64, "C": 32},
    lift._forward: {"INPUTS": 1, "TOTAL": 4, "WIDTH": 48, "P": 64, "C": 128, "ROWS": 16},
    lift._backward: {"INPUTS": 1, "TOTAL": 4, "WIDTH": 48, "P": 64, "C": 128, "ROWS": 16},
    loss._forward: {"BLOCK": 1024},
    loss._backward: {"BLOCK": 1024},
    motion._move: {
        "M1": 23, "M2": 23, "COUNT": 3, "FACTORS": 1, "SWAPS": True, "CONSTANTS": True, "COSINES": False,
        "BLOCK": 1024,
    },
    muon._update: {"ROWS": 32, "COLUMNS": 32, "PAIRS": True, "P": 32, "Q": 32, "ROUNDS": 5},
    neighbours._forward: {"WIDTH": 32, "P": 32, "C": 64, **GRID},
    neighbours._backward_gate: {"WIDTH": 32, "P": 32, "C": 64},
    neighbours._backward_maps: {"WIDTH": 32, "P": 32, "C": 64, **GRID},
    neighbours._backward_input: {"WIDTH": 32, "P": 32, "C": 64, **GRID},
    norm._sums: {"BACKWARD": True, "ROWS": 64, "CHANNELS": 32},
    norm._normalize: {"PARTS": 32, "ROWS": 64, "CHANNELS": 32},
    norm._gradient: {"PARTS": 32, "ROWS": 64, "CHANNELS": 32},
    perceptron._perceptron: {
        "IN": 32, "HIDDEN": 128, "OUT": 1, "P": 32, "H": 128, "Q": 16, "BIASES": True, "SINE": False, "C": 64,
    },
    perceptron._perceptron_backward: {
        "IN": 32, "HIDDEN": 128, "OUT": 1, "P": 32, "H": 128, "Q": 16, "BIASES": True, "SINE": False, "C": 64,
        "OF_INPUT": True,
    },
    perceptron._pointwise: {"WIDTH": 32, "HIDDEN": 32, "P": 32, "H": 32, "C": 64, "PERCEPTRON": True},
    perceptron._pointwise_backward: {"WIDTH": 32, "HIDDEN": 32, "P": 32, "H": 32, "C": 64, "PERCEPTRON": True},
    perceptron._sum: {"R": 512, "C": 32},
    transform._inner: {"N": 64, "M": 48, "TRANSPOSED": True, "P": 64, "C": 64, "STEP": 32},
    transform._last: {"N": 64, "M": 48, "TRANSPOSED": False, "P": 64, "C": 128, "STEP": 64},
    waves._mixed: {"WIDTH": 32, "P": 32, "WAVES": 8, "COUNT": 4, "Q": 16, "C": 512},
    waves._of_matrices: {"WIDTH": 32, "P": 32, "WAVES": 8, "S": 64},
}  # fmt: skip
WHOLE = {"modes", "batch", "left", "right", "stride", "rows", "channels", "columns", "count", "points", "samples"}
WHOLE |= {"seconds", "thirds", "size"}
WHOLE |= {"sample", "first", "second", "third", "row", "column", "mode"}  # strides
DOUBLE = {"energy", "tail", "scales", "shift", "signs", "offsets", "directions", "factors", "constants"}


def kind(kernel, name):
    """The type of an argument that is no constant."""
    if name == "choice":
        return "*i64"
    if name == "swapped":
        return "*i1"
    if name in DOUBLE:
        return "*fp64"
    if name in NUMBERS and kernel in (muon._update, norm._normalize):
        return "fp32"
    if name.split("_")[-1] in WHOLE:
        return "i32"
    low = name in STATE and kernel not in UNROUNDED and not (kernel is waves._mixed and name in ("Z", "Y"))
    return LOW if low else FULL


def main():
    for kernel, given, form in ((*one, form) for one in CONSTANTS.items() for form in FORMS):
        if {"PERIODIC", "BACK"}.isdisjoint(kernel.arg_names) and form != FORMS[0]:
            continue
        constants = {**{name: value for name, value in form.items() if name in kernel.arg_names}, **given}
        if "PRECISION" in kernel.arg_names:
            constants = {**constants, "PRECISION": "bfloat16"}
        signature = {n: "constexpr" if n in constants else kind(kernel, n) for n in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert "ptx" in compiled.asm
    modules = (layer, layout, lift, loss, motion, muon, neighbours, norm, perceptron, transform, waves)
    found = {f for one in modules for f in vars(one).values() if isinstance(f, triton.runtime.JITFunction)}
    launched = {f for f in found if any("program_id" in line for line in f.src.splitlines())}
    assert launched <= set(CONSTANTS), [f.__name__ for f in launched - set(CONSTANTS)]
    print(len(CONSTANTS), "kernels")


if __name__ == "__main__":
    main()
