"""`onboard verify` of checkpoints whose inputs a run quantises: measured by transformers' own model with
inputs quantised alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onboard.errors import UsageError
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.context import TransformContext
from onboard.graph.fx import graph_modules
from onboard.graph.transform import BaseTransform, Stages, TransformConfig, TransformInfo
from onboard.verify.quantised_inputs import EIGHT_BIT_KEYS, EXPERT_KEYS
from onboard.verify.tolerances import SAME
from onboard.verify.transforms.stage_limits import Limit, limit_of
from onboard.verify.transforms.stages import Check, VerifyReport, verify_model
from tests.support.quantised import FOLDER

BY_REFERENCE = {
    "transforms": {key: {"backend": "torch"} for key in (*EIGHT_BIT_KEYS, *EXPERT_KEYS)}
}
"""So that a run on a CPU, too, computes with codes."""


def _verify(name: str, **options: Any) -> VerifyReport:
    settings = {"device": "cpu", "dtype": "bfloat16", "config": BY_REFERENCE, **options}
    return verify_model(FOLDER / name, **settings)


@pytest.mark.parametrize("name", ["modelopt_fp8", "hf_fp8_qwen3_moe", "ct_w8a8_qwen3_moe"])
def test_inputs_in_eight_bits_have_a_limit_of_their_own(name: str) -> None:
    report = _verify(name)
    assert report.passed, (report.first_failure, report.seed)
    limits = {check.transform: check.limit for check in report.checks}
    quantising = [
        check for check in report.checks if "quantize_" in check.transform and check.matched
    ]
    assert limits["build_model"] == limits["export_to_gm"] != quantising[0].limit
    assert report.limit == quantising[-1].limit == limits["compile_model"]
    usual = (
        report.limit.usual or report.limit.error,
        limits["build_model"].usual or limits["build_model"].error,
    )
    assert usual[0] > usual[1], report.seed


class _Shift(BaseTransform[TransformConfig]):
    """A broken transform: all weights' scales are half as large again."""

    key = "shift"

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        [(_, graph)] = graph_modules(gm)
        found = 0
        for name, tensor in (*graph.named_parameters(), *graph.named_buffers()):
            if name.endswith("scale"):
                tensor.data.mul_(1.5)
                found += 1
        assert found
        return gm, TransformInfo(num_matches=found)


def test_an_error_beyond_it_is_found() -> None:
    transforms = load_pipeline(BY_REFERENCE["transforms"])
    at = next(i for i, transform in enumerate(transforms) if transform.key == "load_weights")
    shift = _Shift(TransformConfig(stage=Stages.WEIGHT_LOAD, run_per_gm=False))
    report = _verify(
        "modelopt_fp8", transforms=[*transforms[: at + 1], shift, *transforms[at + 1 :]]
    )
    assert report.first_failure is not None
    assert report.first_failure.transform == "shift"


def test_quantising_on_load_is_no_matter_of_verify() -> None:
    with pytest.raises(UsageError, match="quantize changes the weights"):
        _verify("modelopt_fp8", config={"quantize": "fp8"})


def _rows(errors: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """One text's rows that err so much, and what is exact."""
    exact = torch.randn(len(errors), 50, dtype=torch.float64)
    away = torch.nn.functional.normalize(torch.randn_like(exact), dim=-1)
    size = exact.norm(dim=-1, keepdim=True)
    return [exact + away * size * torch.tensor(errors)[:, None]], [exact]


def test_torn_rows_are_judged_by_the_median() -> None:
    """A reference whose rows rounding tears gives a limit for the rows that it does not tear."""
    assert limit_of(None, [torch.ones(1, 1)]) == Limit(SAME)
    even = limit_of(*_rows([0.01] * 20))
    assert even.usual is None
    assert 0.015 < even.error < 0.03
    torn = limit_of(*_rows([0.01] * 19 + [0.9]))
    assert torn.error > 0.2
    assert torn.usual is not None
    assert 0.015 < torn.usual < 0.025
    assert Check("x", {"prefill": 0.3}, usual={"prefill": 0.02}, limit=torn).passes
    assert not Check("x", {"prefill": 0.3}, usual={"prefill": 0.04}, limit=torn).passes
    assert not Check("x", {"prefill": torn.error * 1.1}, usual={"prefill": 0.02}, limit=torn).passes
    assert not Check(
        "x", {"prefill": float("nan")}, usual={"prefill": float("nan")}, limit=torn
    ).passes
