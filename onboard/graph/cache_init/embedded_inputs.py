"""The graph for steps with more than tokens: embeddings and rotary tables that come from outside
take their places.

A multimodal model's towers turn images into rows of embeddings, and with them some models count
positions along several axes. Such a step runs a copy of the text graph, with the same weights and
caches, in which these rows are inputs; steps of text alone go on with the text graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from onboard.errors import OnboardError
from onboard.graph.fx import add_placeholder, arguments, copy_graphs, nodes_of, replace_with
from onboard.graph.pattern_matcher.layer_ends import members, results
from onboard.ops.attention.rope_attention import turned
from onboard.ops.library import cached_forms, declared

_TURNED = (
    *("query", "key", "value", "cos", "sin", "turns", "heads"),
    *("q_norm", "k_norm", "norm_eps"),
)
EMBEDS, COS, SIN, BLOCKS = "image_embeds", "image_cos", "image_sin", "attention_blocks"
HAS_EMBEDS, HAS_TABLES = "has_embeds", "has_tables"
"""Inputs of such a graph: rows [1, tokens, size], blocks [tokens] int32, and of which tokens the
embeddings, or cos and sin, count, [1, tokens] bool."""


def name_of_added(layer: str) -> str:
    """Return the input that has what is added behind a layer, given its path."""
    return f"added_behind_{layer.replace('.', '_')}"


def with_image_inputs(
    gm: fx.GraphModule, embedding: str, *, rope: bool, blocks: bool, added: Sequence[str] = ()
) -> fx.GraphModule:
    """Return a copy of a cached graph that takes embeddings from outside.

    Args:
        gm: the text graph; it is left as it is.
        embedding: path of the module that embeds tokens.
        rope: cos and sin of the rotary embedding come from outside, too.
        blocks: tokens of one block attend to each other in both directions.
        added: paths of the layers behind which rows from outside are added.

    Raises:
        OnboardError: the graph's embedding, its one rotary table or where a layer ends cannot be
            told.
    """
    twin = copy_graphs(gm)
    assert isinstance(twin, fx.GraphModule)
    _choose(twin, _embedded(twin, embedding), EMBEDS, HAS_EMBEDS)
    if rope:
        for node, name in zip(_tables(twin), (COS, SIN), strict=True):
            _choose(twin, node, name, HAS_TABLES)
    for layer in added:
        _add_behind(twin, layer)
    if blocks:
        _attend_in_blocks(twin)
    twin.graph.lint()
    twin.recompile()
    return twin


def _embedded(gm: fx.GraphModule, path: str) -> fx.Node:
    """Return the node that is the output of the embedding module: the last one that was traced in
    it.
    """
    nodes: list[fx.Node] = [node for node in gm.graph.nodes if _traced_in(node) == path]
    if not nodes:
        raise OnboardError(
            f"the graph has no trace of {path}", hint="This model runs with text alone"
        )
    return nodes[-1]


def _traced_in(node: fx.Node) -> str | None:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack and node.op == "call_function" else None


def _tables(gm: fx.GraphModule) -> tuple[fx.Node, fx.Node]:
    """Return the cos and the sin that all rotations read, whichever of our own ops they are."""
    tables = ((node, declared(node.target).rotary) for node in gm.graph.nodes)
    found = {
        tuple(arguments(node)[name] for name in names) for node, names in tables if len(names) == 2
    }
    if len(found) != 1:
        raise OnboardError(
            f"positions along several axes need one rotary table, and the graph has {len(found)}",
            hint="This model runs with text alone",
        )
    cos, sin = found.pop()
    return cos, sin


def _choose(gm: fx.GraphModule, node: fx.Node, name: str, which: str) -> None:
    """Replace a node's rows by those of an input, where the mask input says so."""
    value, rows_in = node.meta["val"], _rows(gm, node, name)
    rows = add_placeholder(gm, which, torch.empty((1, 7), dtype=torch.bool, device=value.device))
    with gm.graph.inserting_after(node):
        mask = gm.graph.call_function(torch.ops.aten.unsqueeze.default, (rows, -1))
    with gm.graph.inserting_after(mask):
        chosen = gm.graph.call_function(torch.ops.aten.where.self, (mask, rows_in, node))
    chosen.meta["val"] = value
    node.replace_all_uses_with(chosen, delete_user_cb=lambda user: user is not chosen)


def _add_behind(gm: fx.GraphModule, layer: str) -> None:
    """Add rows to what comes out of a layer, after its own last sum as the multimodal model does."""
    own, read = members(gm, layer), results(gm, layer)
    readers = {user for node in read for user in node.users if user not in own}
    if len(readers) == 1 and declared((pair := next(iter(readers))).target).adds_residual:
        _add_to_pair(gm, pair, layer)
    elif len(read) == 1:
        _add_to(gm, read[0], layer)
    else:
        raise OnboardError(
            f"rows are added behind {layer}, and {len(read)} of its results are read",
            hint="This model runs with text alone",
        )


def _add_to_pair(gm: fx.GraphModule, pair: fx.Node, layer: str) -> None:
    """The layer's last sum and the next norm are one op: it adds the rows to that sum instead."""
    with gm.graph.inserting_before(pair):
        total = gm.graph.call_function(torch.ops.aten.add.Tensor, pair.args[:2])
    total.meta["val"] = pair.meta["val"][1]
    pair.args = (total, _rows(gm, total, name_of_added(layer)), *pair.args[2:])


def _add_to(gm: fx.GraphModule, end: fx.Node, layer: str) -> None:
    rows_in = _rows(gm, end, name_of_added(layer))
    with gm.graph.inserting_after(end):
        total = gm.graph.call_function(torch.ops.aten.add.Tensor, (end, rows_in))
    total.meta["val"] = end.meta["val"]
    end.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def _rows(gm: fx.GraphModule, node: fx.Node, name: str) -> fx.Node:
    """Return the input that has rows like a node's."""
    value = node.meta["val"]
    return add_placeholder(
        gm, name, torch.empty((1, 7, *value.shape[2:]), dtype=value.dtype, device=value.device)
    )


def _attend_in_blocks(gm: fx.GraphModule) -> None:
    """Replace cached attention by the one that knows blocks, of the same arguments and one more."""
    for node in nodes_of(gm, *_cached("torch_rope_attention")):
        _rotate_before(gm, node)
    for node in nodes_of(gm, *_cached("torch_attention")):
        blocks = add_placeholder(
            gm, BLOCKS, torch.empty(7, dtype=torch.int32, device=node.meta["val"].device)
        )
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(
                torch.ops.onboard.torch_cached_block_attention.default,
                (blocks, *node.args),
                node.kwargs,
            )
        _replace(node, new)


def _cached(op: str) -> list[Any]:
    return [getattr(torch.ops.onboard, name) for name in cached_forms(op).values()]


def _rotate_before(gm: fx.GraphModule, node: fx.Node) -> None:
    """Replace a cached attention that rotates by itself by one behind a rotation."""
    op = torch.ops.onboard.torch_cached_attention.default
    values = dict(arguments(node))
    with gm.graph.inserting_before(node):
        given = tuple(values[name] for name in _TURNED)
        parts = gm.graph.call_function(turned, given)
        for place, name in enumerate(("query", "key", "value")):
            values[name] = gm.graph.call_function(operator.getitem, (parts, place))
        new = gm.graph.call_function(op, tuple(values[each.name] for each in op._schema.arguments))
    _replace(node, new)


def _replace(node: fx.Node, new: fx.Node) -> None:
    new.meta.update(node.meta)
    replace_with(node, new)
