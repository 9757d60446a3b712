"""The instructions that decode four-bit weights on a GPU, one by one, against the formats' values in float64."""

from __future__ import annotations

import random

import pytest
import torch

from onboard.ops.four_bits import four_bit_kernels as kernels
from tests.support.ops import ptx
from tests.support.ops.four_bits import FLOATS

BYTES = range(4)


def pair_of(byte: int, low: int, high: int, seed: int) -> tuple[int, int]:
    """Two words whose codes in a byte are `low` and `high`, and the other way round; all others are drawn."""
    draw = random.Random(seed)
    words = []
    for code in (low | high << 4, high | low << 4):
        rest = draw.getrandbits(32) & ~(255 << 8 * byte)
        words.append(rest | code << 8 * byte)
    return words[0], words[1]


def decoded(text: str, *inputs: int) -> list[list[float]]:
    """What assembly makes of two words: the low plane of each, then the high one."""
    return [[ptx.bfloat16(each), ptx.bfloat16(each >> 16)] for each in ptx.run(text, *inputs)]


CODES = [(low, high) for low in range(16) for high in (0, 5, 9, 15)]


@pytest.mark.parametrize("byte", BYTES)
def test_floats(byte: int) -> None:
    for low, high in CODES:
        words = pair_of(byte, low, high, seed=low)
        expected = [[FLOATS[low], FLOATS[high]], [FLOATS[high], FLOATS[low]]]
        assert decoded(kernels._FLOATS.value[byte], *words) == expected


@pytest.mark.parametrize("byte", BYTES)
@pytest.mark.parametrize("zero", [0, 7, 8, 16])
def test_integers(byte: int, zero: int) -> None:
    for low, high in CODES:
        words = pair_of(byte, low, high, seed=low)
        found = decoded(kernels._INTEGERS.value[byte], *words, ptx.bits_of(-128.0 - zero))
        assert found == [[low - zero, high - zero], [high - zero, low - zero]]


def test_floats_times_any_power_of_two_that_bfloat16_reaches() -> None:
    """E8M0: 2^-127 to 2^127. No step rounds; only what is beyond bfloat16 is lost."""
    text = kernels._EXPONENT_SCALED.value[1]
    for exponent in range(255):
        scale, other = 2.0 ** (exponent - 127), 2.0 ** (127 - (exponent or 1))
        operands = ptx.bits_of(scale), ptx.bits_of(other)
        for code in range(16):
            value, second = FLOATS[code], FLOATS[15 - code]
            if (
                max(
                    abs(value * scale), abs(second * scale), abs(second * other), abs(value * other)
                )
                >= 2.0**128
            ):
                continue
            words = pair_of(1, code, 15 - code, seed=code)
            found = decoded(text, *words, *operands)
            assert found == [[value * scale, second * scale], [second * other, value * other]]


def test_floats_times_any_scale_of_eight_bits() -> None:
    """E4M3, each plane its own: no step rounds, and what is left is divided out exactly."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = [float(each) for each in scales if each.isfinite()]
    factor, back = kernels._FACTOR.value, kernels.BACK.value
    assert len(numbers) == 254
    for index, scale in enumerate(numbers):
        other = numbers[-1 - index]
        operands = ptx.bits_of(scale * factor), ptx.bits_of(other * factor)
        for code in range(16):
            first, second = FLOATS[code], FLOATS[15 - code]
            words = pair_of(2, code, 15 - code, seed=code)
            found = decoded(kernels._FACTOR_SCALED.value[2], *words, *operands)
            exact = [[each * back for each in plane] for plane in found]
            assert exact == [[first * scale, second * scale], [second * other, first * other]]


def test_a_product_that_has_to_be_rounded_is_told() -> None:
    words = pair_of(2, 3, 3, seed=0)
    with pytest.raises(ptx.InexactError):
        decoded(
            kernels._FACTOR_SCALED.value[2], *words, ptx.bits_of(255 * 2.0**100), ptx.bits_of(1.0)
        )
