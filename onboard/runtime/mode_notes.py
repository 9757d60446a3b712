"""What modes `hf` and `transformers` lose compared with a generated model file, as sentences for
the run's facts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import graph_modules, is_op
from onboard.graph.pattern_matcher.patterns import CASTS, aten
from onboard.graph.transform import Stages

_CACHING = ("insert_cached_attention", "transformers_replace_cached_attn")
_OPTIMISING = (Stages.PATTERN_MATCHER, Stages.POST_LOAD_FUSION)
_GATES = (aten.silu, aten.gelu, aten.sigmoid, aten.relu)


def mode_notes(gm: nn.Module, context: TransformContext) -> list[str]:
    """Return one sentence for each thing that a run without a model file keeps or loses."""
    cached = sum(entry.num_matches for entry in context.history if entry.key in _CACHING)
    if context.factory.mode == "transformers":
        return [
            f"mode transformers: {cached} attention calls are cached, transformers' eager code runs all else",
            "mode transformers: there is no graph, so nothing is matched, fused, compiled or captured",
        ]
    found = [
        f"mode hf: {cached} attention calls are cached in transformers' own model, which no generated test proves"
    ]
    for what, is_left in _LEFT.items():
        if count := sum(
            is_left(node) for _, graph in graph_modules(gm) for node in graph.graph.nodes
        ):
            found.append(f"mode hf: {count} {what}")
    if idle := idle_transforms(context):
        found.append(f"mode hf: these transforms found nothing: {', '.join(idle)}")
    return found


def idle_transforms(context: TransformContext) -> list[str]:
    """Return the keys of the pattern matchers and fusions that ran and matched nothing."""
    entries = (entry for entry in context.history if entry.stage in _OPTIMISING and entry.enabled)
    return [entry.key for entry in entries if not entry.num_matches]


def _is_norm(node: fx.Node) -> bool:
    return is_op(node, aten.rsqrt)


def _is_rotation(node: fx.Node) -> bool:
    """Whether a node concatenates the negated second half and the first one, as rotary embeddings
    do.
    """
    parts: Any = node.args[0] if is_op(node, aten.cat) else ()
    return len(parts) == 2 and is_op(parts[0], aten.neg)


def _is_gate(node: fx.Node) -> bool:
    users = [
        user for each in node.users for user in (each.users if is_op(each, *CASTS) else (each,))
    ]
    return is_op(node, *_GATES) and any(is_op(user, aten.mul) for user in users)


def _is_expert_product(node: fx.Node) -> bool:
    return node.op == "call_function" and "grouped_mm" in str(node.target)


_LEFT: dict[str, Callable[[fx.Node], bool]] = {
    "norms were not matched": _is_norm,
    "rotations of queries and keys were not matched": _is_rotation,
    "gated products were not matched": _is_gate,
    "products of experts are transformers' grouped ones, not torch_moe": _is_expert_product,
}
"""What was not matched, in words -> whether a node is of that kind."""
