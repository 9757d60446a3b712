"""transformers' eager model over our paged caches: the same calls, with the cached op where its
attention was.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onboard.cache.resources import KVPagedResource
from onboard.graph.export.hf_attention import CACHED, AttentionCall, configs, handled

_LOGITS_ROWS = "logits_to_keep"
"""transformers' argument: the rows of the hidden states that the head is applied to."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention call of a forward pass, the nth one in order: what its cache must hold."""

    module: nn.Module
    path: str
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None

    @classmethod
    def of(cls, call: AttentionCall, path: str) -> AttentionLayer:
        """Read a layer off one of its calls."""
        heads, head_dim = call.key.shape[1], call.key.shape[3]
        return cls(
            call.module, path, heads, head_dim, call.value.shape[3], call.key.dtype, call.window
        )

    def resources(self, page_size: int, dtype: torch.dtype | None) -> dict[str, KVPagedResource]:
        """Return the caches of keys and values; `dtype` None: that of the keys."""
        kind = dtype or self.dtype
        sizes = {"k_cache": self.head_dim, "v_cache": self.value_dim}
        return {
            n: KVPagedResource(self.kv_heads, dim, kind, page_size, self.window)
            for n, dim in sizes.items()
        }


class CachedTransformersModel(nn.Module):
    """One flat row of tokens, its metadata and the caches -> logits, through transformers'
    unmodified forward.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        inputs: Sequence[Sequence[str]],
        op: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self.layers = list(layers)
        self.inputs = [list(names) for names in inputs]
        """What the op takes in each layer: the names of its metadata, then of its caches."""
        self.op = op
        self.takes_rows = _LOGITS_ROWS in inspect.signature(model.forward).parameters
        for config in configs(model):
            config._attn_implementation = CACHED

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, as a cached graph's placeholders would be."""
        rows = ["logits_gather_indices"] if self.takes_rows else []
        return [
            "input_ids",
            "position_ids",
            *rows,
            *dict.fromkeys(name for names in self.inputs for name in names),
        ]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_gather_indices: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits [1, tokens or wanted rows, vocabulary]."""
        layers = zip(self.layers, self.inputs, strict=True)

        def attend(call: AttentionCall) -> torch.Tensor:
            layer, names = next(layers)
            assert layer.module is call.module, (
                "the attention layers run in another order than they were found in"
            )
            return self._attend(call, layer, [inputs[name] for name in names])

        rows = {_LOGITS_ROWS: logits_gather_indices} if self.takes_rows else {}
        with handled(attend):
            output = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **rows
            )
        assert next(layers, None) is None, "an attention layer did not run"
        logits: torch.Tensor = output.logits
        return logits

    def _attend(
        self, call: AttentionCall, layer: AttentionLayer, inputs: list[torch.Tensor]
    ) -> torch.Tensor:
        tensors = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
        out: torch.Tensor = self.op(
            *tensors, *inputs, call.sinks, call.scale, layer.window, call.logit_cap
        )
        return out
