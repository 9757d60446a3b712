# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Four-bit weights in tiles: what words and scales stand for (`four_bits.py` has their layout)."""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.triton.launch import INTERPRETED

HAS_PTX = not INTERPRETED
"""Whether words may be decoded by the GPU's own instructions, which the interpreter does not have."""

_SELECT = (0x4400, 0x5511, 0x6622, 0x7733)
"""For `prmt`: byte 0, 1, 2 or 3 of one word, twice, and of another, twice."""
_INTEGERS = tl.constexpr(
    tuple(
        f"""{{
        .reg .b32 low, high, one;
        mov.b32 one, 0x3F803F80;
        prmt.b32 low, $2, $3, {select:#x};
        shr.u32 high, low, 4;
        lop3.b32 low, low, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 high, high, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, low, one, $4;
        fma.rn.bf16x2 $1, high, one, $4;
        }}"""
        for select in _SELECT
    )
)
"""By byte: two words, and -(128 + zero) twice, to a pair of each of the byte's planes.

A code in the last bits of 128 is 128 and the code.
"""
_FLOAT_BITS = """
        .reg .b32 both, sign, low, high, big, none;
        mov.b32 big, 0x7E807E80;
        mov.b32 none, 0x80008000;
        prmt.b32 both, $2, $3, {select:#x};
        shl.b32 sign, both, 12;
        shl.b32 low, both, 6;
        shl.b32 high, both, 2;
        and.b32 sign, sign, 0x80008000;
        and.b32 both, both, 0x80008000;
        lop3.b32 low, low, 0x01C001C0, sign, 0xEA;
        lop3.b32 high, high, 0x01C001C0, both, 0xEA;
"""
"""By byte: a pair of each of the byte's planes, in the last bits of exponent and first of mantissa of
bfloat16, where a code is what it stands for times 2^-126.
"""
_FLOATS = tl.constexpr(
    tuple(
        f"""{{
        {_FLOAT_BITS.format(select=select)}
        fma.rn.bf16x2 $0, low, big, none;
        fma.rn.bf16x2 $1, high, big, none;
        }}"""
        for select in _SELECT
    )
)
"""By byte: two words to a pair of each of the byte's planes."""
_EXPONENT_SCALED = tl.constexpr(
    tuple(
        f"""{{
        {_FLOAT_BITS.format(select=select)}
        fma.rn.bf16x2 low, low, big, none;
        fma.rn.bf16x2 high, high, big, none;
        fma.rn.bf16x2 $0, low, $4, none;
        fma.rn.bf16x2 $1, high, $5, none;
        }}"""
        for select in _SELECT
    )
)
"""The same times a scale of each plane, a power of two twice: as far as bfloat16 reaches no product is
rounded.
"""
_FACTOR_SCALED = tl.constexpr(
    tuple(
        f"""{{
        {_FLOAT_BITS.format(select=select)}
        fma.rn.bf16x2 $0, low, $4, none;
        fma.rn.bf16x2 $1, high, $5, none;
        }}"""
        for select in _SELECT
    )
)
"""The same times 2^-10, given scales in E4M3 times 2^116: their four bits and the code's two make six
of the eight that bfloat16 has, and no exponent is beyond it.
"""
_FACTOR, BACK = tl.constexpr(2.0**116), tl.constexpr(2.0**10)


@triton.jit
def planes(words, zero, BYTE: tl.constexpr, E2M1: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Return what the codes in a byte of words [rows, 16] stand for: those of the inputs 32 BYTE +
    (0 .. 15) of their run, and of the 16 behind, [rows, 16] each in TYPE.

    `zero` [rows, 1] float32 is the code of zero, for integers. PTX, for bfloat16 on a GPU, computes
    the same in fewer instructions, given that a thread has words by pairs.
    """
    if PTX and tl.bfloat16 == TYPE:
        if E2M1:
            return tl.inline_asm_elementwise(
                _FLOATS[BYTE], "=r,=r,r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )  # fmt: skip
        else:
            minus = (-128.0 - zero).to(tl.bfloat16)
            return tl.inline_asm_elementwise(
                _INTEGERS[BYTE], "=r,=r,r,r,r", [words, minus], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )  # fmt: skip
    else:
        low = level(words >> (8 * BYTE), zero, E2M1)
        high = level(words >> (8 * BYTE + 4), zero, E2M1)
        return low.to(TYPE), high.to(TYPE)


@triton.jit
def scale_factor(scale, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Return scales in E8M0 or E4M3 as `scaled_planes` takes them."""
    if scale.dtype == tl.uint8:
        if PTX and tl.bfloat16 == TYPE:
            bits = tl.maximum(scale.to(tl.int32) << 7, 64)  # 2^-127 is no normal bfloat16
            return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return scale_values(scale).to(TYPE)
    elif PTX and tl.bfloat16 == TYPE:
        return (scale.to(tl.float32) * _FACTOR).to(tl.bfloat16)
    else:
        return scale.to(TYPE)


@triton.jit
def scaled_planes(
    words, low_scale, high_scale, BYTE: tl.constexpr, IS_EXPONENT: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Return `planes` of four-bit floats, times the scales [rows, 1] of the inputs in each, exactly:
    with PTX and scales in E4M3 they are a `BACK`th of it.
    """
    if PTX and tl.bfloat16 == TYPE:
        ASM: tl.constexpr = _EXPONENT_SCALED[BYTE] if IS_EXPONENT else _FACTOR_SCALED[BYTE]
        return tl.inline_asm_elementwise(
            ASM, "=&r,=&r,r,r,r,r", [words, low_scale, high_scale],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = planes(words, 0.0, BYTE, True, TYPE, False)
        return low * low_scale, high * high_scale


@triton.jit
def level(words, zero, E2M1: tl.constexpr):
    """Return what the last four bits of words stand for, in float32."""
    if E2M1:
        exponent, mantissa = (words >> 1) & 3, words & 1
        # Twice the magnitude is an integer
        twice = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
        return tl.where((words & 8) != 0, -0.5, 0.5) * twice.to(tl.float32)
    else:
        return (words & 15).to(tl.float32) - zero


@triton.jit
def scale_values(scale):
    """Return scales in float32; those in uint8 are exponents of 2 with 127 added (E8M0)."""
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32)
        # 2^-127 is no normal float32
        return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)
