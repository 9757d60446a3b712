"""What a generated class computes, in the words of its field: read off the ops that it calls and
what it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_MIXERS = {
    "torch_gated_delta_rule": "Gated delta rule mixer",
    "torch_delta_rule": "Delta rule mixer",
    "torch_kda": "Delta rule mixer with a decay for each channel",
    "torch_ssm": "State-space mixer with one decay a head",
    "torch_selective_scan": "Selective state-space mixer",
    "torch_lightning_attention": "Linear attention with constant decay",
    "torch_linear_recurrence": "Gated linear recurrence (RG-LRU)",
    "torch_mlstm": "Matrix LSTM mixer",
    "torch_wkv": "WKV mixer",
}
"""Recurrences; a convolution in front of one belongs to it."""
_ATTENTION = {
    "torch_sparse_mla": "Multi-head latent attention to the keys that an indexer chose",
    "torch_mla": "Multi-head latent attention",
    "torch_sparse_attention": "Attention to the keys that an indexer chose",
    "torch_compressed_attention": "Attention to a window of tokens and to compressed blocks before it",
    "torch_relative_attention": "Attention with a bias of relative positions",
    "torch_dynamic_mask_attention": "Attention to the keys of the largest bias",
}
_OTHERS = {
    "torch_lightning_indexer": "Indexer: chooses the keys that each query attends to.",
    "torch_block_indexer": "Indexer: chooses the blocks of keys that each query attends to.",
    "torch_causal_conv1d": "Short convolution mixer, [batch, seq, hidden] to the same.",
    "torch_moe": "Mixture of experts, [batch, seq, hidden] to the same.",
    "torch_layernorm": "Layer norm over the last dimension.",
    "torch_rmsnorm": "Root-mean-square norm over the last dimension.",
}
_FEATURES = {
    r"torch_\w*rope_with_": "rotary embeddings",
    r"\balibi_slopes=": "ALiBi",
    r"\bsinks=": "sinks",
    r"\bsliding_window=": "a sliding window",
    r"\bchunk_size=": "a chunked mask",
    r"\blogit_cap=": "soft-capped scores",
}
"""What of attention's code shows a feature -> its name."""
_ROOM = 58
"""Columns of a sentence that leave room for the shape in a line."""
_SAME = "[batch, seq, hidden] to the same"


@dataclass(frozen=True)
class Code:
    """A class's code: the text of `__init__`, of all other methods, and the last name of its path
    in the model.
    """

    init: str
    methods: str
    attribute: str = ""


def described(code: Code, others: Mapping[str, Code], experts: Collection[str]) -> str | None:
    """Return what a class computes; None where its code does not say.

    `others`: the model's other classes; `experts`: those of them that are experts.
    """
    ops = set(re.findall(r"torch\.ops\.onboard\.(\w+)\(", code.methods))
    if (mixer := next((_MIXERS[op] for op in _MIXERS if op in ops), None)) is not None:
        return _on_states(mixer)
    if (kind := _attention(code, ops)) is not None:
        return _on_states(f"{kind}{_with(code)}")
    if _makes(code, experts):
        return _on_states(
            "Mixture of experts"
            + (" and one that all tokens share" if "self.shared_" in code.init else "")
        )
    if "topk(" in code.methods and any(
        _makes(other, experts) for other in others.values() if other is not code
    ):
        return "Router: the experts of each token, and their weights."
    found = next((_OTHERS[op] for op in _OTHERS if op in ops), None)
    if (
        found is None
        and not ops
        and code.init.count("nn.Linear(") > 1
        and re.search("mlp|ffn|feed", code.attribute)
    ):
        return _on_states("Feed-forward network")
    return found


def _on_states(what: str) -> str:
    """Return a sentence of one line that says, where there is room, of which shape hidden states
    are.
    """
    return f"{what}, {_SAME}." if len(what) < _ROOM else f"{what}."


def _attention(code: Code, ops: Collection[str]) -> str | None:
    if (kind := next((_ATTENTION[op] for op in _ATTENTION if op in ops), None)) is not None:
        return kind
    if "torch_attention" not in ops:
        return None
    grouped = re.search(r"num_key_value_heads|num_kv_heads|n_kv_heads|num_query_groups", code.init)
    return "Grouped-query attention" if grouped else "Causal self-attention"


def _with(code: Code) -> str:
    """Return ` with rotary embeddings and sinks`, what of these there is."""
    found = [name for pattern, name in _FEATURES.items() if re.search(pattern, code.methods)]
    return (
        f" with {' and '.join(filter(None, [', '.join(found[:-1]), found[-1]]))}" if found else ""
    )


def _makes(code: Code, classes: Collection[str]) -> bool:
    return any(re.search(rf"\b{name}\(", code.init) for name in classes)
