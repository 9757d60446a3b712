"""Linears with four-bit weights. Run by test_triton_kernels.py in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.four_bits import triton_four_bit_linear as launcher
from onboard.ops.four_bits.four_bits import unpacked
from onboard.ops.linear.triton_linear import Tiles
from tests.support.ops import four_bits
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

ops = torch.ops.onboard
EXACT, ROUNDED = 1e-6, 4e-2
"""Of float32, and of bfloat16, which the interpreter cuts off."""
KINDS = [
    ("int4", 128),
    ("int4", 256),
    ("zeros", 32),
    ("zeros", 64),
    ("added", 16),
    ("added", 32),
    ("added", 128),
    ("mxfp4", 32),
    ("nvfp4", 16),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 256), (5, 320)])
def test_products(rows: int, inputs: int, kind: str, group: int) -> None:
    seeded()
    weight = four_bits.weight(kind, 72, inputs, group)
    x, bias, residual = torch.randn(rows, inputs), torch.randn(72), torch.randn(rows, 72)
    actual = ops.triton_fused_four_bit_linear(x, weight.words, bias, *weight.form(), residual)
    expected = x.double() @ weight.values.T + bias.double() + residual.double()
    assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, EXACT), (torch.bfloat16, ROUNDED)])
def test_what_stands_around_a_linear(dtype: torch.dtype, limit: float) -> None:
    seeded()
    weight = four_bits.weight("int4", 96, 256, 128)
    x, residual = torch.randn(2, 4, 256).to(dtype), torch.randn(2, 4, 48).to(dtype)
    rest = (None, *weight.form(), residual, torch.rand(256).to(dtype), 1e-6, "silu")
    actual = ops.triton_fused_four_bit_linear(x, weight.words, *rest)
    expected = ops.torch_fused_four_bit_linear(x, weight.words, *rest)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < limit


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("kind", "group", "inputs"), [("int4", 128, 320), ("zeros", 128, 256), ("int4", 512, 200)]
)
@pytest.mark.parametrize("activation", ["", "silu"])
def test_one_token_over_rows_of_integers(
    kind: str, group: int, inputs: int, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than programs take at a time."""
    seeded()
    monkeypatch.setattr(launcher, "_WARPS", 1)
    weight = four_bits.weight(kind, 26, inputs, group)
    outputs = 13 if activation else 26
    x, norm, residual = torch.randn(1, inputs), torch.rand(inputs), torch.randn(1, outputs)
    form = weight.form()
    assert launcher.takes_rows(form[1], form[2], form[3], form[4], inputs)
    rest = (torch.randn(26), *form, residual, norm, 1e-6, activation)
    actual = ops.triton_fused_four_bit_linear(x, weight.words, *rest)
    expected = ops.torch_fused_four_bit_linear(x, weight.words, *rest)
    assert relative_error(actual, expected) < 4 * EXACT


@pytest.mark.drawn
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_block_with_nvfp4_weights(rows: int, biased: bool) -> None:
    seeded()
    both, down = four_bits.weight("nvfp4", 96, 64, 16), four_bits.weight("nvfp4", 72, 48, 16)
    biases = (torch.randn(96), torch.randn(72)) if biased else (None, None)
    scales = both.scale, down.scale, both.whole, down.whole
    x = torch.randn(1, rows, 64)
    gate, up = (x.double() @ both.values.T + (biases[0].double() if biased else 0)).chunk(2, -1)
    expected = gate * gate.sigmoid() * up @ down.values.T + (biases[1].double() if biased else 0)
    for backend in ("torch", "triton"):
        op = getattr(ops, f"{backend}_fused_nvfp4_swiglu_mlp")
        actual = op(x, both.words, down.words, *scales, *biases)
        assert relative_error(actual, expected) < EXACT


def test_parts_of_the_inputs_and_blocks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded()
    weight = four_bits.weight("zeros", 72, 640, 128)
    for rows, splits in ((3, 4), (70, 1)):
        tiles = Tiles(16, 64, 128, 4, 2, splits=splits)
        monkeypatch.setattr(launcher, "choose_four_bit_tiles", lambda *_, tiles=tiles: tiles)
        x = torch.randn(rows, 640)
        actual = ops.triton_fused_four_bit_linear(x, weight.words, None, *weight.form())
        assert relative_error(actual, x.double() @ weight.values.T) < EXACT


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_many_tokens_have_the_weight_written_out(kind: str, group: int) -> None:
    seeded()
    weight = four_bits.weight(kind, 40, 320, group)
    values = launcher.write_out(weight.words, *weight.form(), 320, torch.float32)
    assert torch.equal(values, unpacked(weight.words, *weight.form(), 320))
    assert relative_error(values, weight.values) < EXACT
    x = torch.randn(launcher.MOST_ROWS + 1, 320)
    actual = ops.triton_fused_four_bit_linear(x, weight.words, None, *weight.form())
    assert relative_error(actual, x.double() @ weight.values.T) < EXACT
