"""Which implementation of a fused op a run uses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch

from onboard.errors import OnboardError
from onboard.graph.context import TransformContext
from onboard.ops import has_triton
from onboard.ops.delta_rule.fla_delta_rule import has_fla

Backend = Literal["auto", "flashinfer", "trtllm", "triton", "torch"]
"""What a transform's configuration may ask for; auto: the best that there is."""


NO_TRITON = "it has Triton kernels only, and the run has another back end"
"""Why a transform is skipped that has nothing else to put in."""


def choose_backend(requested: str, context: TransformContext, asked_by: str) -> str:
    """Return "triton" or "torch": the one requested, else the best on the run's device, which is
    then a fact.
    """
    best = "triton" if has_triton() and context.device.type == "cuda" else "torch"
    if requested == "auto":
        return best
    if requested == "torch" or (requested == "triton" and triton_runs_on(context.device)):
        return requested
    context.facts.append(f"{asked_by}: back end {requested} is not available here, {best} is used")
    return best


FOREIGN_BACKENDS = ("cuda", "fla", "flashinfer", "trtllm")
"""Back ends of cached mechanisms, other libraries', that a configuration may name; only "fla" has
an operator.
"""


def cached_backend(
    requested: str | None, known: Collection[str], context: TransformContext, asked_by: str
) -> str:
    """Return the back end that a cached mechanism's `backend` means, of those `known` to it; None
    means the run's.

    A name may carry the mechanism behind it ("triton_mla", "fla_gated_delta"). A foreign one that
    the mechanism has no operator for, or whose library is not there, means the run's, and that is a
    fact.
    """
    if (requested or context.attn_backend) == "triton" and not has_triton():
        raise OnboardError(
            "the attention back end 'triton' is not available here", hint="Use 'torch'"
        )
    if requested is None:
        return context.attn_backend
    family = requested.split("_")[0]
    if family not in FOREIGN_BACKENDS or (
        family in known and has_fla() and context.device.type == "cuda"
    ):
        return family
    fact = f"{asked_by}: back end {requested} is not available here, {context.attn_backend} is used"
    context.facts.extend([fact] if fact not in context.facts else [])
    return context.attn_backend


def kernel_obstacle(dtype: torch.dtype) -> str:
    """Return why no Triton kernel of a cached mechanism works on tensors of this dtype here, ""
    when they do.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its kernels have no {str(dtype).removeprefix('torch.')}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return ""


def fused_op(backend: str, name: str) -> Any:
    """Return the operator `name` of a back end, for example "silu_and_mul"."""
    return getattr(torch.ops.onboard, f"{backend}_{name}").default


def triton_runs_on(device: torch.device) -> bool:
    """Whether kernels run on a device: on a GPU, or anywhere in the interpreter."""
    if not has_triton():
        return False
    from onboard.ops.triton.launch import INTERPRETED

    return device.type == "cuda" or INTERPRETED
