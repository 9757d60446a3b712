# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""act(gate) * up over the two halves of the last dimension: one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onboard.config import suggest
from onboard.errors import UsageError
from onboard.ops.library import register_op
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.triton.launch import last_contiguous, power_of_two, require_device

BLOCK = 1024


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of x by its formula's name, a value of `KERNEL_ACTIVATIONS`."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)


@triton.jit
def _act_and_mul_kernel(
    out_ptr, x_ptr, stride, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * size + column,
        (activate(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def _fake_silu_and_mul(x: Tensor, activation: str = "silu") -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@register_op(_fake_silu_and_mul, row_wise=True)
def triton_silu_and_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """`torch_silu_and_mul` as one kernel, in float32, for the activations of `KERNEL_ACTIVATIONS`.

    Raises:
        UsageError: the kernel does not know the activation.
    """
    require_device(x)
    if activation not in KERNEL_ACTIVATIONS:
        hint = suggest(activation, KERNEL_ACTIVATIONS)
        raise UsageError(f"triton_silu_and_mul has no activation {activation!r}", hint=hint)
    out = _fake_silu_and_mul(x)
    size = out.shape[-1]
    rows = last_contiguous(x).reshape(-1, 2 * size)
    block = min(BLOCK, power_of_two(size))
    if out.numel():
        _act_and_mul_kernel[(len(rows), triton.cdiv(size, block))](
            out, rows, rows.stride(0), size, ACTIVATION=KERNEL_ACTIVATIONS[activation], BLOCK=block
        )
    return out
