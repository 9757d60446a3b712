# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""What generated pointwise kernels call: float32 functions that round as PyTorch's own CUDA kernels
do.

Those call CUDA's math library, so these do; Triton's own exponential and division are faster and
less exact. The interpreter has no such library: there functions are computed in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from onboard.ops.triton.launch import INTERPRETED

if INTERPRETED:

    @triton.jit
    def to_bfloat16(x):
        """Return x rounded to the nearest bfloat16, ties to even; the interpreter's own cast
        truncates.
        """
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)

    @triton.jit
    def exp(x):
        """e^x."""
        return tl.exp(x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def log(x):
        """The natural logarithm."""
        return tl.log(x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def log1p(x):
        """log(1 + x)."""
        return tl.log(1 + x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def sin(x):
        """The sine."""
        return tl.sin(x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def cos(x):
        """The cosine."""
        return tl.cos(x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def tanh(x):
        """The hyperbolic tangent."""
        shrunk = tl.exp(-2 * tl.abs(x.to(tl.float64)))
        size = (1 - shrunk) / (1 + shrunk)
        return tl.where(x < 0, -size, size).to(tl.float32)

    @triton.jit
    def div_by_number(x, number):
        """x / number."""
        return tl.div_rn(x, number)

else:

    @triton.jit
    def to_bfloat16(x):
        """Return x rounded to the nearest bfloat16, ties to even."""
        return x.to(tl.bfloat16).to(tl.float32)

    @triton.jit
    def exp(x):
        """e^x."""
        return libdevice.exp(x)

    @triton.jit
    def log(x):
        """The natural logarithm."""
        return libdevice.log(x)

    @triton.jit
    def log1p(x):
        """log(1 + x)."""
        return libdevice.log1p(x)

    @triton.jit
    def sin(x):
        """The sine."""
        return libdevice.sin(x)

    @triton.jit
    def cos(x):
        """The cosine."""
        return libdevice.cos(x)

    @triton.jit
    def tanh(x):
        """The hyperbolic tangent."""
        return libdevice.tanh(x)

    @triton.jit
    def div_by_number(x, number):
        """x / number, which PyTorch computes on the GPU with the number's reciprocal."""
        return x * tl.div_rn(1.0, number)


@triton.jit
def to_float16(x):
    """Return x rounded to the nearest float16, ties to even."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def row_sum(x, inside):
    """The sum of each row of a tile, as a column, of what lies inside the tensor."""
    return tl.sum(tl.where(inside, x, 0.0), 1)[:, None]


@triton.jit
def div(x, y):
    """x / y, rounded to the nearest."""
    return tl.div_rn(x, y)


@triton.jit
def sqrt(x):
    """The square root, rounded to the nearest."""
    return tl.sqrt_rn(x)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x)."""
    return tl.rsqrt(x)


@triton.jit
def erf(x):
    """The error function."""
    return tl.erf(x)


@triton.jit
def maximum(x, y):
    """The larger one, NaN when either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """The smaller one, NaN when either is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def gelu(x):
    """x times the normal distribution's share below x."""
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """The approximation of `gelu` by a hyperbolic tangent."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


@triton.jit
def softplus(x):
    """log(1 + e^x), x itself above 20."""
    return tl.where(x > 20.0, x, log1p(exp(x)))
