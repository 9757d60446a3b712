"""The size of a quantised checkpoint: on disk, decoded, and as a GPU keeps it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors import safe_open

from onboard.hub import LocalSource
from onboard.workflow.checkpoint.parameter_count import build_on_meta, estimate_size
from tests.support import quantised

VARIANTS = ("hf_fp8_llama", "ct_w4a16", "gptq", "mxfp4_gpt_oss", "bnb_nf4", "ct_fp8_qwen3_moe")


def in_files(folder: Path) -> int:
    """Bytes of all tensors, by the library that wrote them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("variant", VARIANTS)
def test_elements_are_those_of_the_model(variant: str) -> None:
    folder = quantised.FOLDER / variant
    size = estimate_size(LocalSource(str(folder)), "bfloat16")
    model = build_on_meta(folder)
    assert size.parameters == sum(math.prod(each.shape) for each in model.parameters())
    assert size.stored == in_files(folder)
    assert size.bytes == 2 * size.parameters  # decoded, as a CPU does
    assert estimate_size(LocalSource(str(folder)), "float32").bytes == 4 * size.parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpu_keeps_codes_that_it_has_kernels_for(variant: str) -> None:
    folder = quantised.FOLDER / variant
    decoded, kept, exact = (
        estimate_size(LocalSource(str(folder)), dtype, gpu=gpu).bytes
        for dtype, gpu in (("bfloat16", False), ("bfloat16", True), ("float32", True))
    )
    assert exact == 2 * decoded
    assert (kept < decoded) == (variant != "bnb_nf4")
    # But for what is stored in another dtype, and parts that stand for nothing, the files' bytes
    assert variant == "bnb_nf4" or abs(kept - in_files(folder)) < 0.1 * decoded


def test_it_is_said() -> None:
    size = estimate_size(LocalSource(str(quantised.FOLDER / "hf_fp8_llama")), "bfloat16")
    assert "GB in quantised files" in str(size)
