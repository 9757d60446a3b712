"""Exporting transformers' own module: its attention becomes the canonical op while it is traced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn

from onboard.errors import OnboardError
from onboard.graph.cache_init.attention_probe import check_calls
from onboard.graph.context import TransformContext
from onboard.graph.export.guards import fit_or_refuse
from onboard.graph.export.hf_attention import AttentionCall, attention_recorded


def with_canonical_attention(
    model: nn.Module, export: Callable[[], nn.Module], context: TransformContext
) -> nn.Module:
    """Run `export` while the attention of `model` is `torch_attention`; raise `OnboardError` where
    that is wrong.
    """
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return canonical_attention(call)

    try:
        with attention_recorded(model, attend, context.runtime.max_seq_len):
            graph = export()
    except OnboardError:
        raise
    except Exception as error:  # a model's own code may raise anything while it is traced
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise OnboardError(
            f"transformers' {context.factory.config.model_type} cannot be exported ({reason})",
            hint="Try --mode transformers, which needs no export",
        ) from error
    assert isinstance(graph, fx.GraphModule)
    fit_or_refuse(graph, type(model).__name__, context, "max_num_tokens")
    if calls:
        check_calls(model, calls)
    else:
        context.facts.append(
            "no attention goes through transformers' interface: it is left to the pattern matcher"
        )
    return graph


def canonical_attention(call: AttentionCall) -> torch.Tensor:
    """Compute a call with `torch_attention`, whatever its mask was: `check_calls` judges that."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    out: torch.Tensor = torch.ops.onboard.torch_attention(
        query,
        key,
        value,
        None,
        0.0,
        True,
        call.scale,
        call.sinks,
        call.window,
        call.logit_cap,
        "bsnd",
    )
    return out
