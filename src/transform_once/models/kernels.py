"""A T1 layer in two dimensions for NVIDIA GPUs: activation, both mixings and the residual in one kernel (Triton).

For each channel and some samples, with A = W_k z_k the state after the channel matrices, as (m₁, m₂, samples):

    forward    out = z + W₁ · gelu(A) · W₂ᵀ
    backward   dA = (W₁ᵀ · dout · W₂) ∘ gelu'(A), and the sums of dW₁ and dW₂ over these samples

The block of modes stays on the chip between the two products, so that a layer moves its state twice instead of seven
times. `layers.T1Layer` computes the same with plain products: that is the reference, and what runs everywhere else.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_MODES = 32  # of an axis: a block of modes of some samples must fit on the chip

# Samples and warps of one program, by kernel and precision: the fastest on an H200.
TUNED = {
    (kernel, precision): (8, 8)
    for kernel in ("forward", "backward", "weights")
    for precision in ("bfloat16", "tf32", "tf32x3")
}


@triton.jit
def _gelu(x):  # type: ignore[no-untyped-def]
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x):  # type: ignore[no-untyped-def]
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    if PRECISION == "bfloat16":
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def _matrix(pointer, channel, size, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mixing matrix of a channel, filled up with zeros."""
    rows, columns = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    inside = (rows < size) & (columns < size)
    return tl.load(pointer + channel * size * size + rows * size + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _places(m1, m2, batch, channel, channel_stride, mode_stride, P: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the block (P, P, S) of this program lies in a state with these strides, and what of it is there."""
    i, j = tl.arange(0, P)[:, None, None], tl.arange(0, P)[None, :, None]
    sample = tl.program_id(1) * S + tl.arange(0, S)[None, None, :]
    inside = (i < m1) & (j < m2) & (sample < batch)
    return channel * channel_stride + (i * m2 + j) * mode_stride + sample, inside


@triton.jit(do_not_specialize=["m1", "m2", "batch"])
def _forward(
    A, Z, out, W1, W2, m1, m2, batch, a_channel, a_mode, z_channel, z_mode, o_channel, o_mode,
    P: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    channel = tl.program_id(0)
    place, inside = _places(m1, m2, batch, channel, a_channel, a_mode, P, S)
    H = _gelu(tl.load(A + place, mask=inside, other=0.0).to(tl.float32))
    first, second = _matrix(W1, channel, m1, P), _matrix(W2, channel, m2, P)
    Y = tl.reshape(_product(first, tl.reshape(H, (P, P * S)), PRECISION), (P, P, S))
    Y = tl.reshape(tl.permute(Y, (1, 0, 2)), (P, P * S))
    Y = tl.permute(tl.reshape(_product(second, Y, PRECISION), (P, P, S)), (1, 0, 2))
    place, inside = _places(m1, m2, batch, channel, z_channel, z_mode, P, S)
    Y += tl.load(Z + place, mask=inside, other=0.0).to(tl.float32)
    place, inside = _places(m1, m2, batch, channel, o_channel, o_mode, P, S)
    tl.store(out + place, Y, mask=inside)


@triton.jit(do_not_specialize=["m1", "m2", "batch"])
def _backward(
    A, dout, dA, W1, W2, m1, m2, batch, a_channel, a_mode, d_channel, d_mode,
    P: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    channel = tl.program_id(0)
    place, inside = _places(m1, m2, batch, channel, d_channel, d_mode, P, S)
    G = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    first, second = _matrix(W1, channel, m1, P), _matrix(W2, channel, m2, P)
    D = tl.reshape(_product(tl.trans(first), tl.reshape(G, (P, P * S)), PRECISION), (P, P, S))
    D = tl.reshape(tl.permute(D, (1, 0, 2)), (P, P * S))
    D = tl.permute(tl.reshape(_product(tl.trans(second), D, PRECISION), (P, P, S)), (1, 0, 2))
    place, inside = _places(m1, m2, batch, channel, a_channel, a_mode, P, S)
    D *= _gelu_slope(tl.load(A + place, mask=inside, other=0.0).to(tl.float32))
    tl.store(dA + place, D, mask=inside)


@triton.jit(do_not_specialize=["m1", "m2", "batch", "channels"])
def _backward_weights(
    A, dout, dW, W1, W2, m1, m2, batch, channels, a_channel, a_mode, d_channel, d_mode,
    P: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    channel = tl.program_id(0)
    place, inside = _places(m1, m2, batch, channel, a_channel, a_mode, P, S)
    H = tl.reshape(_gelu(tl.load(A + place, mask=inside, other=0.0).to(tl.float32)), (P, P * S))
    Y = tl.reshape(_product(_matrix(W1, channel, m1, P), H, PRECISION), (P, P, S))
    Y = tl.reshape(tl.permute(Y, (1, 0, 2)), (P, P * S))
    place, inside = _places(m1, m2, batch, channel, d_channel, d_mode, P, S)
    G = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    G = tl.reshape(tl.permute(G, (1, 0, 2)), (P, P * S))  # (m₂, m₁ · samples)
    d_second = _product(G, tl.trans(Y), PRECISION)
    D = tl.reshape(_product(tl.trans(_matrix(W2, channel, m2, P)), G, PRECISION), (P, P, S))
    D = tl.reshape(tl.permute(D, (1, 0, 2)), (P, P * S))  # (m₁, m₂ · samples)
    d_first = _product(D, tl.trans(H), PRECISION)
    rows, columns = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    # Partial sums of every program, added up later: always in the same order, unlike atomic additions.
    own = dW + (tl.program_id(1) * channels + channel) * 2 * P * P
    tl.store(own + rows * P + columns, d_first)
    tl.store(own + P * P + rows * P + columns, d_second)


class FusedLayer(torch.autograd.Function):
    """z + mixing(gelu(W z)) of a state (channels, modes, batch), contiguous; weights as `T1Layer` has them."""

    @staticmethod
    def forward(ctx: Any, Z: Tensor, weight: Tensor, W1: Tensor, W2: Tensor) -> Tensor:
        """The new state (channels, modes, batch)."""
        A = torch.bmm(weight.to(Z.dtype), Z.transpose(0, 1))  # (modes, channels, batch)
        out = torch.empty_like(Z, memory_format=torch.contiguous_format)
        options = _options(Z.dtype, "forward")
        grid = (len(W1), triton.cdiv(Z.shape[2], options["S"]))
        _forward[grid](
            *(A, Z, out, W1, W2, W1.shape[1], W2.shape[1], Z.shape[2]),
            *(A.stride(1), A.stride(0), Z.stride(0), Z.stride(1), out.stride(0), out.stride(1)),
            **options,
        )
        ctx.save_for_backward(Z, A, weight, W1, W2)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Of the state and of the three weights."""
        Z, A, weight, W1, W2 = ctx.saved_tensors
        dout = gradients[0] if gradients[0].stride(2) == 1 else gradients[0].contiguous()
        m1, m2, channels, batch = W1.shape[1], W2.shape[1], len(W1), Z.shape[2]
        strides = (A.stride(1), A.stride(0), dout.stride(0), dout.stride(1))
        options = _options(Z.dtype, "backward")
        dA = torch.empty_like(A)
        grid = (channels, triton.cdiv(batch, options["S"]))
        _backward[grid](A, dout, dA, W1, W2, m1, m2, batch, *strides, **options)
        options = _options(Z.dtype, "weights")
        grid, P = (channels, triton.cdiv(batch, options["S"])), options["P"]
        dW = torch.empty(grid[1], channels, 2, P, P, device=A.device)
        _backward_weights[grid](A, dout, dW, W1, W2, m1, m2, batch, channels, *strides, **options)
        first, second = dW.sum(0).unbind(1)
        of_weight = torch.bmm(dA, Z.permute(1, 2, 0)).to(weight.dtype)
        of_state = torch.baddbmm(dout.transpose(0, 1).to(dA.dtype), weight.to(dA.dtype).mT, dA).transpose(0, 1)
        return of_state, of_weight, first[:, :m1, :m1], second[:, :m2, :m2]


def _options(dtype: torch.dtype, kernel: str) -> dict[str, Any]:
    exact = torch.get_float32_matmul_precision() == "highest"
    # Three products in tf32 are as exact as one in float32, and run on the matrix units.
    precision = "bfloat16" if dtype == torch.bfloat16 else "tf32x3" if exact else "tf32"
    samples, warps = TUNED[kernel, precision]
    return {"P": MOST_MODES, "S": samples, "PRECISION": precision, "num_warps": warps}
