"""Keys and values as inputs and outputs of a graph: the static cache.

A graph with one takes `input_ids` and `position_ids` [batch, tokens], a cache of keys and one of
values for each attention call, [batch, kv_heads, length, head_dim], and the places `start_idx` to
`end_idx` that the tokens take in them. It returns the logits and the caches with the tokens in
their places. It keeps nothing itself: whoever calls it holds the caches. The two forms, and the
order and names of inputs and outputs, are those of Torch-TensorRT's `static_cache_v1` and
`static_cache_v2`; sliding windows, caps, sinks and chunked prompts are not there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from onboard.errors import NoCachedFormError
from onboard.graph.cache_init.descriptor import AttentionDescriptor, refuse_unless, source_nodes
from onboard.graph.cache_init.token_mixing import token_mixing
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, fake_mode, is_op, placeholders, replace_with
from onboard.graph.invariants import uncached_attention, uncached_mixers
from onboard.graph.transform import GraphTransform, TransformConfig, TransformInfo

START, END = "start_idx", "end_idx"
FORMS = ("static_v1", "static_v2")

_aten = torch.ops.aten
Make = Callable[..., fx.Node]
"""Puts a call into the graph: a function and its arguments."""


class InsertStaticCache(GraphTransform[TransformConfig]):
    """Give each attention call a static cache, in one of the forms."""

    keeps_shapes = False
    form: ClassVar[str]

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Rewrite the graph; raises `NoCachedFormError` where tokens meet by anything else than
        attention.
        """
        _refuse_other_mixers(gm, context.device)
        count = insert_static_cache(gm, self.form, context.runtime.max_seq_len)
        return TransformInfo(num_matches=count, is_clean=False, has_valid_shapes=False)


def insert_static_cache(gm: fx.GraphModule, form: str, length: int) -> int:
    """Give each `torch_attention` of a graph of (input_ids, position_ids) a static cache; return
    how many there are.

    `form` is one of `FORMS`; `length` is that of the caches in `meta["val"]`, to which nothing in
    the graph is bound. Raises `OnboardError` for attention that is not causal, or has a mask.
    """
    descriptor = AttentionDescriptor()
    nodes = source_nodes(gm, descriptor)
    for node in nodes:
        descriptor.check(node)
        refuse_unless(node, k_scale=None, v_scale=None)
    batch = placeholders(gm)[0].meta["val"].shape[0]
    caches = [
        _cache_input(gm, f"{kind}_cache_{index}", _heads_and_size(node, kind), batch, length)
        for index, node in enumerate(nodes)
        for kind in ("key", "value")
    ]
    start, end = (_number_input(gm, name) for name in (START, END))
    updated: list[fx.Node] = []
    for index, node in enumerate(nodes):
        updated += _attend(gm, node, form, caches[2 * index : 2 * index + 2], start, end)
    output = gm.graph.output_node()
    output.args = ((output.args[0], *updated),)
    output.meta.pop("val", None)
    gm.recompile()
    return len(nodes)


def cache_shapes(gm: fx.GraphModule) -> list[tuple[int, int, torch.dtype]]:
    """Return kv_heads, head_dim and dtype of each cache of such a graph, in the order of its
    inputs.
    """
    values = [node.meta["val"] for node in placeholders(gm)[2:-2]]
    return [(int(each.shape[1]), int(each.shape[3]), each.dtype) for each in values]


def _attend(
    gm: fx.GraphModule,
    node: fx.Node,
    form: str,
    caches: list[fx.Node],
    start: fx.Node,
    end: fx.Node,
) -> list[fx.Node]:
    """Let a node attend to its caches and its own tokens; return the caches with these in their
    places.
    """
    found = arguments(node)
    with gm.graph.inserting_before(node):
        make = gm.graph.call_function
        query, key, value = (_by_head(make, found[name], found) for name in _TENSORS)
        first = _first_seen(make, found, start)
        join = _v1 if form == "static_v1" else _v2
        pairs = [
            join(make, *each, first, start, end) for each in zip(caches, (key, value), strict=True)
        ]
        seen = [pair[0] for pair in pairs]
        options = {name: found[name] for name in found if name not in (*_TENSORS, "layout")}
        mixed = make(
            AttentionDescriptor.source.default, (query, *seen), {**options, "layout": "bnsd"}
        )
        if found["layout"] == "bsnd":
            mixed = make(_aten.transpose.int, (mixed, 1, 2))
    mixed.meta.update(node.meta)
    replace_with(node, mixed)
    return [pair[1] for pair in pairs]


_TENSORS = ("query", "key", "value")


def _v1(
    make: Make, cache: fx.Node, new: fx.Node, first: Any, start: fx.Node, end: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """One concatenation; attention reads a slice of the new cache."""
    before = make(_aten.slice.Tensor, (cache, 2, 0, start))
    after = make(_aten.slice.Tensor, (cache, 2, end))
    updated = make(_aten.cat.default, ([before, new, after], 2))
    return make(_aten.slice.Tensor, (updated, 2, first, end)), updated


def _v2(
    make: Make, cache: fx.Node, new: fx.Node, first: Any, start: fx.Node, end: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Two concatenations; attention reads the result of the first."""
    before = make(_aten.slice.Tensor, (cache, 2, 0, start))
    joined = make(_aten.cat.default, ([before, new], 2))
    after = make(_aten.slice.Tensor, (cache, 2, end))
    updated = make(_aten.cat.default, ([joined, after], 2))
    return (joined if first == 0 else make(_aten.slice.Tensor, (joined, 2, first))), updated


def _first_seen(make: Make, found: dict[str, Any], start: fx.Node) -> Any:
    """Return the first place that the window of some token of the step reaches; 0 where places are
    counted from the first.
    """
    window = found["sliding_window"]
    if window is None or found["chunk_size"] is not None:
        return 0
    return make(torch.sym_max, (make(operator.sub, (start, window - 1)), 0))


def _by_head(make: Make, tensor: fx.Node, found: dict[str, Any]) -> fx.Node:
    """Return a tensor in layout bnsd."""
    return tensor if found["layout"] == "bnsd" else make(_aten.transpose.int, (tensor, 1, 2))


def _heads_and_size(node: fx.Node, kind: str) -> tuple[int, int, torch.dtype]:
    found = arguments(node)
    val = found[kind].meta["val"]
    return int(val.shape[1 if found["layout"] == "bnsd" else 2]), int(val.shape[3]), val.dtype


def _cache_input(
    gm: fx.GraphModule, name: str, sizes: tuple[int, int, torch.dtype], batch: Any, length: int
) -> fx.Node:
    heads, size, dtype = sizes
    device = placeholders(gm)[0].meta["val"].device
    with fake_mode(gm):
        val = torch.empty(batch, heads, length, size, dtype=dtype, device=device)
    return _input(gm, name, val)


def _number_input(gm: fx.GraphModule, name: str) -> fx.Node:
    env = fake_mode(gm).shape_env
    return _input(gm, name, None if env is None else env.create_unbacked_symint())


def _input(gm: fx.GraphModule, name: str, val: Any) -> fx.Node:
    with gm.graph.inserting_after(placeholders(gm)[-1]):
        node = gm.graph.placeholder(name)
    node.meta["val"] = val
    return node


def _refuse_other_mixers(gm: fx.GraphModule, device: torch.device) -> None:
    """Raise `NoCachedFormError` unless attention is all through which tokens meet."""
    calls = [*uncached_attention(gm), *uncached_mixers(gm)]
    others = [node.target for node in calls if not is_op(node, AttentionDescriptor.source)]
    mixing = others[0] if others else token_mixing(gm, device)
    if mixing is not None:
        raise NoCachedFormError(
            f"{mixing} mixes tokens, and a static cache has the keys and values of attention alone",
            hint="Use the paged cache",
        )
