"""What a generated class computes, in the words of its field: read off the ops that it calls and
what it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from onboard.ops.library import op_sources

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
    mixers, attention, sentences = _of_ops(ops)
    if mixers:
        return _on_states(mixers[0])
    if (kind := _attention(code, ops, attention)) is not None:
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
    found = next(iter(sentences), None)
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


def _of_ops(names: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """Return what classes are that call ops: mixers, attention, and whole sentences of others.

    What carries a state says most of a class, then what has weights of its own, then what has the
    longest name, which says more than a part of it.
    """
    sources = op_sources()
    known = [(sources[name], name) for name in names if name in sources and sources[name].described]
    known.sort(
        key=lambda item: (not item[0].carries_state, not item[0].feed_forward, -len(item[1]))
    )
    parts = [item for item, _ in known if not item.described.endswith(".")]
    return (
        [item.described for item in parts if not item.attends],
        [item.described for item in parts if item.attends],
        [item.described for item, _ in known if item.described.endswith(".")],
    )


def _attention(code: Code, ops: Collection[str], special: Sequence[str]) -> str | None:
    if special:
        return special[0]
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
