"""Which implementation of a fused op a run uses."""

from __future__ import annotations

from typing import Any, Literal

import torch

from onboard.graph.context import TransformContext
from onboard.ops import has_triton

Backend = Literal["auto", "flashinfer", "trtllm", "triton", "torch"]
"""What a transform's configuration may ask for; auto: the best that there is."""


def choose_backend(requested: str, context: TransformContext, asked_by: str) -> str:
    """Return "triton" or "torch": the one requested, else the best on the run's device, which is then a fact."""
    best = "triton" if has_triton() and context.device.type == "cuda" else "torch"
    if requested == "auto":
        return best
    if requested == "torch" or (requested == "triton" and _triton_runs_on(context.device)):
        return requested
    context.facts.append(f"{asked_by}: back end {requested} is not available here, {best} is used")
    return best


def fused_op(backend: str, name: str) -> Any:
    """Return the operator `name` of a back end, for example "silu_and_mul"."""
    return getattr(torch.ops.onboard, f"{backend}_{name}").default


def _triton_runs_on(device: torch.device) -> bool:
    if not has_triton():
        return False
    from onboard.ops.triton.launch import INTERPRETED

    return device.type == "cuda" or INTERPRETED
