"""Linears with codes are joined and fused as plain ones are, and compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onboard import LLM
from onboard.graph.context import HistoryEntry
from onboard.graph.transform import get_transform
from tests.support import quantised
from tests.support.graph.fusion import apply, exported, targets

KINDS = ("fp8", "finegrained_fp8", "int4", "mxfp4", "nvfp4")
CODES = {f"quantize_{kind}_linear_from_config": {"backend": "torch"} for kind in KINDS}
APART = {key: {"enabled": False} for key in ("fuse_gemms", "match_swiglu_pattern")}
SAME = 1e-6


def run(variant: str, key: str, fields: dict[str, Any], **others: Any) -> tuple[Any, HistoryEntry]:
    """The logits, and what the transform `key` with these fields did."""
    folder = quantised.FOLDER / variant
    ids = load_file(folder / "expected.safetensors")["ids"].tolist()
    config = {"max_seq_len": 64, "transforms": {**CODES, **others, key: fields}}
    llm = LLM(str(folder), device="cpu", dtype="float32", config=config)
    return llm.logits(ids), next(entry for entry in llm.engine.history if entry.key == key)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("key", "variant", "count"),
    [
        ("fuse_gemms_mixed_children", "ct_fp8_dynamic", 4),  # of two layers
        ("fuse_fp8_gemms", "ct_fp8_dynamic", 4),
        ("fuse_fp8_gemms", "ct_fp8_static", 0),  # each has a scale of its input
        ("fuse_gemms_mixed_children", "ct_w4a16_asym", 2),
        ("fuse_fp4_gemms", "ct_nvfp4", 2),
        ("fuse_fp4_gemms", "ct_mxfp4", 2),
        ("fuse_fp4_gemms", "ct_fp8_dynamic", 0),
        ("fuse_fp8_gemms", "ct_mxfp4", 0),
    ],
)
def test_linears_of_one_scheme_are_joined(key: str, variant: str, count: int) -> None:
    apart, off = run(variant, key, {"enabled": False}, **APART)
    joined, on = run(variant, key, {"enabled": True}, **APART)
    assert (off.num_matches, on.num_matches) == (0, count)
    assert error(joined, apart) < SAME


class Blocks(nn.Module):
    """Linears with scales of blocks that share an input, which something else reads, too."""

    def __init__(self, *outputs: int) -> None:
        super().__init__()
        weights = [torch.randn(size, 256).to(torch.float8_e4m3fn) for size in outputs]
        scales = [torch.rand(-(-size // 128), 2) for size in outputs]
        self.weights, self.scales = (
            nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in tensors)
            for tensors in (weights, scales)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        op = torch.ops.onboard.torch_finegrained_fp8_linear
        pairs = zip(self.weights, self.scales, strict=True)
        parts = [op(x, weight, None, scale, None, "group") for weight, scale in pairs]
        return torch.cat([x.relu(), *parts], -1)


def test_parts_of_blocks_are_not_joined() -> None:
    gm = exported(Blocks(256, 192, 128), 2, 3, 256, device="cpu")
    x = torch.randn(2, 3, 256)
    before = gm(x)
    gm, info, _ = apply("fuse_fp8_gemms", gm)
    assert info.num_matches == 1
    assert targets(gm).count("onboard.torch_finegrained_fp8_linear.default") == 2
    sizes = [tuple(each.shape) for each in gm.parameters()]
    assert sorted(sizes) == [(2, 2), (3, 2), (192, 256), (384, 256)]
    assert error(gm(x), before) < SAME


FUSED = [
    ("fuse_fp8_linear", "ct_fp8_dynamic", "torch", "fp8"),
    ("fuse_finegrained_fp8_linear", "ct_fp8_block", "trtllm", "fp8"),
    ("fuse_nvfp4_linear", "ct_nvfp4", "trtllm", "four_bit"),
]


@pytest.mark.parametrize(("key", "variant", "default", "form"), FUSED)
def test_linears_become_fused_ones(key: str, variant: str, default: str, form: str) -> None:
    assert get_transform(key).config_class(stage="post_load_fusion").backend == default
    plain, left = run(variant, key, {"backend": "auto"})  # as on a GPU only
    fused, entry = run(variant, key, {"backend": default})
    assert left.num_matches == 0 < left.skipped
    assert entry.num_matches > 0
    assert entry.ops[f"torch_fused_{form}_linear"] == entry.num_matches
    assert error(fused, plain) < SAME
