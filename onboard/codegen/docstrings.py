"""Docstrings of generated classes and methods, by the kind of the block."""

from __future__ import annotations

from onboard.analysis.blocks.spec_mixtures import Experts
from onboard.analysis.spec_blocks import Block, Mlp, RMSNorm

_CLASSES = {
    "attention": "Causal self-attention, [batch, seq, hidden] to the same.",
    "mixture": "A router and its experts, which run together, in one op; [batch, seq, hidden] to the same.",
    "decoder_layer": "One decoder layer, [batch, seq, hidden] to the same.",
    "model": "Embedding, decoder layers and final norm.",
    "causal_lm": "The model with a language modeling head.",
    "embedding": "Token embedding, [batch, seq] to [batch, seq, hidden].",
    "layernorm": "Layer norm over the last dimension.",
    "gated_rmsnorm": "Root-mean-square norm over groups of channels, with a SiLU gate.",
    "compressor": "Keys that stand for blocks of tokens, and the blocks that each query sees (None: all).",
    "pooled_indexer": "Chooses among keys that stand for blocks of tokens, by keys of its own.",
    "l2norm": "Scales the last dimension to length one.",
}
_FORWARDS = {
    "model": "Return the final hidden states [batch, seq, hidden] of `input_ids` at `position_ids`.",
    "causal_lm": "Return the logits [batch, seq, vocab] of `input_ids` at `position_ids` [batch, seq].",
}
_CODEBOOKS = {
    "codebooks": "How a token stands for the codes of a position.",
    "forward": "Return the logits [batch, seq, codebooks * codes] of `input_ids` at `position_ids` [batch, seq].",
}


def class_docstring(role: str, block: Block | None, name: str) -> str:
    """Return the docstring of a class, by its role: the kind of its block, or its place in the
    model.
    """
    match block:
        case RMSNorm(parameters=found):
            offset = " with weight 1 + w" if found.unit_offset else ""
            return f"Root-mean-square norm over the last dimension{offset}."
        case Mlp(parameters=found):
            return (
                f"{found.mlp.capitalize()} feed-forward network, [batch, seq, hidden] to the same."
            )
        case Experts(parameters=found):
            others = " Further ids return their input." if found.identity else ""
            return f"The experts of a mixture; all run together, in one op.{others}"
    return _CLASSES.get(role, f"Counterpart of the {name} of transformers.")


def method_docstring(
    kind: str, method: str, *, codebooks: bool = False, positions: bool = True
) -> str:
    """Return the docstring of a method, empty where the class's says it all.

    `codebooks`: a position holds a code of each of several; `positions`: the method takes them.
    """
    if kind == "causal_lm" and codebooks:
        return _CODEBOOKS.get(method, "")
    text = _FORWARDS.get(kind, "") if method == "forward" else ""
    return text if positions else text.replace(" at `position_ids`", "")
