"""The kernels of quantised weights on a GPU: their interpreted tests as they are, and four-bit
linears of real size.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onboard.ops.four_bits.four_bits import unpacked
from tests.support.apart import run_apart
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = Path(__file__).resolve().parents[1] / "unit" / "ops"
ops = torch.ops.onboard


@pytest.mark.parametrize("name", ["fp8", "four_bits", "int8", "codes", "rope_attention"])
def test_kernels_are_right_on_the_device(name: str) -> None:
    run_apart(UNIT, f"interpreted_{name}.py", interpreted=False, ONBOARD_TEST_DEVICE="cuda")


def test_mixtures_are_right_on_the_device() -> None:
    """They place their tensors themselves."""
    run_apart(UNIT, "interpreted_quantised_moe.py", interpreted=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 64, 300])
@pytest.mark.parametrize(
    ("levels", "group", "zeros"),
    [("int4", 128, False), ("int4", 64, True), ("e2m1", 32, False), ("e2m1", 16, False)],
)
def test_four_bit_linears_of_real_size(
    levels: str, group: int, zeros: bool, rows: int, dtype: torch.dtype
) -> None:
    seeded()
    outputs, inputs = 4096, 14336
    words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), device="cuda").int()
    groups = (outputs, inputs // group)
    scale = torch.rand(groups, device="cuda").half() / 100
    zero = torch.randint(0, 16, groups, device="cuda", dtype=torch.uint8) if zeros else None
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    residual = torch.randn(rows, outputs, device="cuda").to(dtype)
    form = (scale, zero, None, levels, group)
    actual = ops.triton_fused_four_bit_linear(x, words, None, *form, residual)
    expected = x.double() @ unpacked(words, *form, inputs).double().T + residual.double()
    assert relative_error(actual, expected) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
