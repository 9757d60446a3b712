"""What kernels have of a checkpoint's four-bit weights stands for the same weights."""

from __future__ import annotations

import pytest

from onboard.graph.quantise.four_bit_parts import LINEARS, fits_kernels, four_bit_part
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.ops.four_bits.four_bits import unpacked
from tests.support import quantised

EXACT = 1e-6


@pytest.mark.parametrize(
    "variant",
    ["ct_w4a16", "ct_w4a16_asym", "ct_mxfp4", "ct_nvfp4", "modelopt_nvfp4", "modelopt_int4_awq",
     "gptq", "gptq_asym", "gptq_desc_act", "awq", "auto_round", "mxfp4_gpt_oss"],
)  # fmt: skip
def test_parts_are_the_weight(variant: str) -> None:
    checkpoint = open_checkpoint(quantised.FOLDER / variant)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    name, weight = next(each for each in checkpoint.weights.items() if each[1].kind in LINEARS)
    encoded = checkpoint.encoded(name)
    inputs = encoded.codes.shape[-1]
    assert fits_kernels(encoded.columns, inputs)
    kinds = [kind for kind in ("zero", "whole") if getattr(encoded, kind) is not None]
    zero, whole = (four_bit_part(encoded, k) if k in kinds else None for k in ("zero", "whole"))
    words, scale = four_bit_part(encoded, "words"), four_bit_part(encoded, "scale")
    levels = "int4" if weight.kind == "int4" else "e2m1"
    found = unpacked(words, scale, zero, whole, levels, encoded.columns, inputs)
    if encoded.inputs is not None:
        found = found * four_bit_part(encoded, "inputs")
    expected = encoded.values().mT if encoded.transposed else encoded.values()
    if encoded.groups is not None:
        expected = expected[:, four_bit_part(encoded, "order")]
    assert float((found - expected).norm() / expected.norm()) < EXACT


def test_groups_that_kernels_do_not_read() -> None:
    assert [fits_kernels(group, 512) for group in (16, 48, 128, 192, 256, 512)] == [
        *(True, False, True, False, True, True)
    ]
