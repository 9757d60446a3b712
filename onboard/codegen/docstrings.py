"""Docstrings of generated classes and methods, by the kind of the block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLASSES = {
    "attention": "Causal self-attention, [batch, seq, hidden] to the same.",
    "decoder_layer": "One decoder layer, [batch, seq, hidden] to the same.",
    "model": "Embedding, decoder layers and final norm.",
    "causal_lm": "The model with a language modeling head.",
    "embedding": "Token embedding, [batch, seq] to [batch, seq, hidden].",
    "layernorm": "Layer norm over the last dimension.",
    "gated_rmsnorm": "Root-mean-square norm over groups of channels, with a SiLU gate.",
    "compressor": "Keys that stand for blocks of tokens, with the blocks that each query sees; None: all that ended.",
    "pooled_indexer": "Chooses among keys that stand for blocks of tokens, by keys of its own.",
    "l2norm": "Scales the last dimension to length one.",
}
_FORWARDS = {
    "model": "Return the final hidden states [batch, seq, hidden] of `input_ids` at `position_ids` [batch, seq].",
    "causal_lm": "Return the logits [batch, seq, vocab] of `input_ids` at `position_ids` [batch, seq].",
}
_CODEBOOKS = {
    "codebooks": "How a token stands for the codes of a position.",
    "forward": "Return the logits [batch, seq, codebooks * codes] of `input_ids` at `position_ids` [batch, seq].",
}


def class_docstring(kind: str, parameters: Mapping[str, Any], name: str) -> str:
    """Return the docstring of a class."""
    if kind == "rmsnorm":
        offset = " with weight 1 + w" if parameters["unit_offset"] else ""
        return f"Root-mean-square norm over the last dimension{offset}."
    if kind == "mlp":
        return f"{str(parameters['mlp']).capitalize()} feed-forward network, [batch, seq, hidden] to the same."
    if kind == "experts":
        others = " Further ids return their input." if parameters["identity"] else ""
        return f"The experts of a mixture; all run together, in one op.{others}"
    return _CLASSES.get(kind, f"Counterpart of the {name} of transformers.")


def method_docstring(kind: str, method: str, *, codebooks: bool = False) -> str:
    """Return the docstring of a method, empty where the class's says it all.

    `codebooks`: a position holds a code of each of several.
    """
    if kind == "causal_lm" and codebooks:
        return _CODEBOOKS.get(method, "")
    return _FORWARDS.get(kind, "") if method == "forward" else ""
