"""Linears with four-bit weights: what the reference computes."""

from __future__ import annotations

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.four_bits.four_bits import pack, unpack, unpacked
from tests.support.ops import four_bits
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

ops = torch.ops.onboard
EXACT = 1e-6
KINDS = [
    ("int4", 128),
    ("int4", 64),
    ("int4", 384),
    ("zeros", 32),
    ("zeros", 128),
    ("added", 32),
    ("mxfp4", 32),
    ("nvfp4", 16),
]


@pytest.mark.parametrize("shape", [(3, 128), (2, 300), (2, 3, 16)])
def test_words_hold_codes(shape: tuple[int, ...]) -> None:
    seeded()
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    words = pack(codes)
    assert words.dtype == torch.int32
    assert words.shape == (*shape[:-1], -(-shape[-1] // 128) * 16)
    flat = four_bits.words_of(codes.flatten(0, -2).int())
    assert torch.equal(words.flatten(0, -2), flat)
    assert torch.equal(unpack(words, shape[-1]), codes)


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("inputs", [384, 320])
def test_products_are_those_of_the_weights_values(kind: str, group: int, inputs: int) -> None:
    seeded()
    weight = four_bits.weight(kind, 24, inputs, group)
    values = unpacked(weight.words, *weight.form(), inputs)
    assert relative_error(values, weight.values) < EXACT
    x, bias = torch.randn(2, 5, inputs), torch.randn(24)
    op = {"mxfp4": ops.torch_mxfp4_linear, "nvfp4": ops.torch_nvfp4_linear}
    actual = op.get(kind, ops.torch_int4_linear)(x, weight.words, bias, *weight.form())
    expected = x.double() @ weight.values.T + bias.double()
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < EXACT


def test_what_stands_around_a_linear() -> None:
    seeded()
    weight = four_bits.weight("zeros", 24, 256, 128)
    x, norm, residual = torch.randn(3, 256), torch.rand(256), torch.randn(3, 12)
    form = weight.form()
    actual = ops.torch_fused_four_bit_linear(
        x, weight.words, None, *form, residual, norm, 1e-5, "silu"
    )
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, True) + 1e-5) * norm.double()
    gate, up = (normed @ weight.values.T).chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up + residual.double()
    assert relative_error(actual, expected) < EXACT
