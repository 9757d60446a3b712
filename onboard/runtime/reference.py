"""transformers' own logits on a checkpoint's weights: what a run is measured against."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.graph.context import TransformContext
from onboard.graph.reference import load_reference


@dataclass(frozen=True)
class Asked:
    """A sequence of tokens, and the rows of its logits that are wanted."""

    ids: list[int]
    rows: list[int]

    @classmethod
    def whole(cls, ids: Sequence[int]) -> Asked:
        """Ask for all rows."""
        return cls(list(ids), list(range(len(ids))))


@dataclass(frozen=True)
class Reference:
    """Logits of transformers' model, [rows, vocabulary] float32 on the CPU for each sequence."""

    exact: list[torch.Tensor]
    """In float32, with the weights as the run's dtype rounds them."""
    own: list[torch.Tensor] | None
    """In the run's dtype; None when that is float32."""
    how: str


def reference_logits(context: TransformContext, asked: Sequence[Asked]) -> Reference:
    """Run transformers' model of a run's checkpoint on each sequence by itself, without cache.

    Raises:
        OnboardError: transformers cannot load the checkpoint, or finds weights missing.
    """
    own, dtypes = None, None
    if context.dtype != torch.float32:
        own, dtypes = _run(context, asked, context.dtype)
        release()
    exact, _ = _run(context, asked, torch.float32, dtypes)
    release()
    return Reference(exact, own, "whole")


Dtypes = dict[str, torch.dtype]
"""Of a model's parameters, by name: some models keep a few in float32."""


@torch.inference_mode()
def _run(
    context: TransformContext, asked: Sequence[Asked], dtype: torch.dtype, rounded: Dtypes | None = None
) -> tuple[list[torch.Tensor], Dtypes]:
    """Return the logits of the model in a dtype, with its weights `rounded` before, and the weights' dtypes."""
    model = _load(context, dtype)
    if rounded is not None:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(rounded[name]).to(parameter.dtype)
    return _logits(model, asked), {name: parameter.dtype for name, parameter in model.named_parameters()}


def release() -> None:
    """Give back the memory of models that nothing refers to: transformers' hold reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _load(context: TransformContext, dtype: torch.dtype) -> Any:
    config, folder = copy.deepcopy(context.factory.config), context.factory.checkpoint
    try:
        model, report = load_reference(
            config,
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise OnboardError(f"transformers cannot load {folder}: {reason}", hint="Fetch the checkpoint again") from error
    if missing := sorted(report["missing_keys"]):
        raise OnboardError(f"transformers finds no {missing[0]} in {folder}", hint="Fetch the checkpoint again")
    return model.to(context.device).eval()


def _logits(model: nn.Module, asked: Sequence[Asked]) -> list[torch.Tensor]:
    with _exact_products():
        return [_rows(model, each) for each in asked]


def _rows(model: nn.Module, asked: Asked) -> torch.Tensor:
    device = next(model.parameters()).device
    logits: torch.Tensor = model(input_ids=torch.tensor([asked.ids], device=device), use_cache=False).logits
    return logits[0, asked.rows].float().cpu()


@contextmanager
def _exact_products() -> Iterator[None]:
    """Compute products of float32 in float32, which convolutions on a GPU otherwise do not."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [each.allow_tf32 for each in settings]
    try:
        for each in settings:
            each.allow_tf32 = False
        yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.allow_tf32 = value
