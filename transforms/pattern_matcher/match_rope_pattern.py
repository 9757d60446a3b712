"""Recognise rotary position embeddings that are written out."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import call, nodes_of
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.pattern_matcher.rope_nodes import Rotation, find_rotation
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("match_rope_pattern")
class MatchRopePattern(GraphTransform[TransformConfig]):
    """Replace the rotations of a query and its key by one canonical rope op.

    Half rotation (whole heads or their first channels), the same after de-interleaving, and complex
    multiplication.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each pair of rotations."""
        candidates = nodes_of(gm, aten.add, aten.flatten, aten.reshape, aten.view)
        rotations = [
            found for node in candidates if (found := find_rotation(node)) and found.output.users
        ]
        order = {node: index for index, node in enumerate(gm.graph.nodes)}
        pairs = list(_pairs(rotations, order))
        for query, key in pairs:
            _replace(gm, query, key, order)
        if unmatched := len(rotations) - 2 * len(pairs):
            context.facts.append(
                f"match_rope_pattern: {unmatched} rotations have no partner and stay written out"
            )
        return len(pairs)


def _pairs(
    rotations: list[Rotation], order: dict[fx.Node, int]
) -> Iterator[tuple[Rotation, Rotation]]:
    """Pair neighbouring rotations by the same tables: models rotate a query, then its key (or the
    other way round).
    """
    waiting: Rotation | None = None
    for rotation in rotations:
        if waiting is not None and _belong_together(waiting, rotation, order):
            yield waiting, rotation
            waiting = None
        else:
            waiting = rotation


def _belong_together(first: Rotation, second: Rotation, order: dict[fx.Node, int]) -> bool:
    same = (first.op, first.tables, first.unsqueeze_dim) == (
        second.op,
        second.tables,
        second.unsqueeze_dim,
    )
    ready = max(order[node] for node in (first.x, second.x, *first.tables))
    # One op for both needs all inputs before anything that reads either output.
    return same and ready < order[_first_user(first, second, order)]


def _first_user(first: Rotation, second: Rotation, order: dict[fx.Node, int]) -> fx.Node:
    return min((*first.output.users, *second.output.users), key=order.__getitem__)


def _replace(gm: fx.GraphModule, query: Rotation, key: Rotation, order: dict[fx.Node, int]) -> None:
    before = _first_user(query, key, order)
    rope = call(
        gm, before, query.op, query.x, key.x, *query.tables, query.unsqueeze_dim, like=query.output
    )
    for index, rotation in enumerate((query, key)):
        part = call(gm, before, operator.getitem, rope, index, like=rotation.output)
        rotation.output.replace_all_uses_with(part)
        part.meta["val"] = rotation.output.meta["val"]
