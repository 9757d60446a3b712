"""Recognise attention that is written out as matmul, softmax, matmul."""

from __future__ import annotations

from typing import Any

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import MaskReader, insert_attention
from onboard.graph.pattern_matcher.masks import evaluate
from onboard.graph.pattern_matcher.patterns import (
    Bound,
    Either,
    Op,
    Through,
    Var,
    aten,
    cast,
    find,
    is_node,
    is_number,
    rank,
    same_dim,
)
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_QUERY, _KEY, _VALUE = (Var(name, where=is_node) for name in ("query", "key", "value"))
_PRODUCT = Op(
    aten.matmul,
    _QUERY,
    Through((aten.contiguous, aten.clone), Op(aten.transpose, _KEY, Var("dim0"), Var("dim1"))),
)
_SCALED = Either(
    Op(aten.mul, _PRODUCT, Var("scale", where=is_number)),
    Op(aten.div, _PRODUCT, Var("divisor", where=is_number)),
    _PRODUCT,
)
_CAP = Var("cap", where=is_number)
_CAPPED = Either(Op(aten.mul, Op(aten.tanh, Op(aten.div, _SCALED, _CAP)), _CAP), _SCALED)
_MASKED = Either(
    Op(aten.add, cast(_CAPPED), Var("mask", where=is_node)),
    Op(aten.masked_fill, cast(_CAPPED), Var("hidden", where=is_node), Var("least")),
    Op(aten.where, Var("seen", where=is_node), cast(_CAPPED), Var("least")),
    _CAPPED,
)
_SCALED_LAST = Either(
    _MASKED,
    Op(aten.mul, cast(_MASKED), Var("last_scale", where=is_number)),
    Op(aten.div, cast(_MASKED), Var("last_divisor", where=is_number)),
)
_WEIGHTS = Op((aten.softmax, aten._softmax), cast(_SCALED_LAST), Var("dim"))
_PATTERN = Op(aten.matmul, cast(_WEIGHTS), _VALUE)


_LEAST = -1e4
"""A score this low is no weight beside any other, in every dtype that scores have."""


@register_transform("match_eager_attention")
class MatchEagerAttention(GraphTransform[TransformConfig]):
    """Replace softmax(cap(scale * q k^T) + mask) v by `torch_attention` in layout bnsd, and what
    puts a lowest number in place of masked scores.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such expression."""
        masks = MaskReader(gm)
        matches = 0
        for node in nodes_of(gm, aten.matmul):
            found = find(_PATTERN, node)
            if (
                found is None
                or not _is_attention(found)
                or (mask := _mask(found, gm, masks)) is None
            ):
                continue
            options = {
                **mask,
                "scale": _scale(found),
                "logit_cap": found.get("cap"),
            }
            inputs = (found["query"], found["key"], found["value"])
            replace_with(node, insert_attention(gm, node, inputs, **options, layout="bnsd"))
            matches += 1
        return matches


def _is_attention(found: Bound) -> bool:
    key: Any = found["key"]
    if any(rank(found[name]) != 4 for name in ("query", "key", "value")):
        return False
    over_keys = same_dim(found["dim"], key, 3)
    return over_keys and {found["dim0"] % 4, found["dim1"] % 4} == {2, 3}


def _mask(found: Bound, gm: fx.GraphModule, masks: MaskReader) -> dict[str, Any] | None:
    """Return attention's options for its mask; None for scores that are replaced otherwise."""
    last: Any = found.get("last_scale", found.get("last_divisor", 1.0))
    if last <= 0.0 or (last != 1.0 and ("least" not in found or "cap" in found)):
        return None  # attention hides keys before it scales, which a negative number turns round
    if "least" not in found:
        return masks.read(found.get("mask"))
    least = found["least"]
    if is_node(least):
        constant = evaluate(gm, least, 1, {})
        least = float(constant) if constant is not None and constant.numel() == 1 else 0.0
    if not least * _last_scale(found) <= _LEAST:
        return None
    if "hidden" in found:
        return masks.read_hidden(found["hidden"])
    seen = masks.read(found["seen"])
    return seen if seen["attn_mask"] is None else None


def _scale(found: Bound) -> float:
    first = float(found["scale"]) if "scale" in found else 1.0 / float(found.get("divisor", 1.0))
    return first * _last_scale(found)


def _last_scale(found: Bound) -> float:
    """Return by what scores are multiplied that have their mask."""
    if "last_scale" in found:
        return float(found["last_scale"])
    return 1.0 / float(found.get("last_divisor", 1.0))
