"""Latent attention: what leads to the keys and values beside what leads to the queries, on an
auxiliary stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from onboard.experiments.side_branches import (
    bring_forward,
    computes,
    cone,
    is_product,
    own_part,
    run_aside,
    sources,
)
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, op_name
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_ROOTS = ("q_nope", "q_pe", "query"), ("compressed_kv", "kpe", "key", "value")
"""Arguments of attention operators: queries, and keys and values."""
_LATENT = "compressed_kv"
"""The one that the operator expands to keys and values itself."""
_PRODUCTS_OF_A_LATENT = 2
"""The one that makes it and the one that expands it."""


@register_transform("multi_stream_mla_attn")
class MultiStreamMLAAttn(GraphTransform[TransformConfig]):
    """Overlap the two paths into latent attention, by the first of three patterns that matches any
    layer.

    Where queries and keys have projections of their own from the hidden states, the whole path of
    the keys runs beside that of the queries. Where one product makes both latents (`fuse_gemms`),
    the product that expands the keys runs beside the queries' chain; where the operator expands
    them itself, the latent's norm does.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each attention layer."""
        layers = [node for node in gm.graph.nodes if _is_attention(node)]
        matches = 0
        for pattern in (_whole_path, _projection, _latent):
            matches = matches or _overlap(gm, map(pattern, layers))
        return matches


def _is_attention(node: fx.Node) -> bool:
    name = op_name(node)
    return "mla" in name or "attention" in name


def _overlap(gm: fx.GraphModule, branches: Iterable[set[fx.Node]]) -> int:
    return sum(run_aside(gm, branch) for branch in branches if branch)


def _whole_path(attention: fx.Node) -> set[fx.Node]:
    """Return everything that only keys and values need, back to their own projection of the hidden
    states.

    Empty unless that path has a latent and the queries start, with another product, from the same
    hidden states.
    """
    queries, keys = _roots(attention)
    for product in _products_before(keys):
        fork = product.all_input_nodes[0]
        beside = cone(queries, fork)
        starts = [node for node in beside if is_product(node) and node.all_input_nodes[0] is fork]
        if starts and product not in beside:
            return own_part(keys, queries, fork) if _has_latent(attention, keys, product) else set()
    return set()


def _projection(attention: fx.Node) -> set[fx.Node]:
    """Return the keys' own calls after the product that also makes the queries' latent, if both
    have products there.
    """
    queries, keys = _roots(attention)
    for product in _products_before(keys):
        branch, beside = own_part(keys, queries, product), own_part(queries, keys, product)
        if any(map(is_product, beside)) and cone(queries, product):
            return branch if any(map(is_product, branch)) else set()
    return set()


def _latent(attention: fx.Node) -> set[fx.Node]:
    """Return what makes an operator's latent of its part of the product that also makes the
    queries' latent.

    Empty unless the queries have a product of their own after that one. The latent's part is taken
    as early as it is known, whatever the order of the calls was; all that the branch would wait for
    else is the queries' path.
    """
    queries, keys = _roots(attention)
    latent = arguments(attention).get(_LATENT)
    product = next(_products_before([latent]), None) if isinstance(latent, fx.Node) else None
    if latent is None or product is None:
        return set()
    others = [*queries, *(node for node in keys if node is not latent)]
    if not any(map(is_product, own_part(others, [latent], product))):
        return set()
    branch = _from_first_result(own_part([latent], others, product))
    given = {source for node in branch for source in node.all_input_nodes} - branch
    bring_forward(cone(given, product))
    return branch


def _from_first_result(branch: set[fx.Node]) -> set[fx.Node]:
    """Leave out the views at a branch's beginning, which no stream has to wait for."""
    kept: set[fx.Node] = set()
    for node in sorted(branch):
        if computes(node) or kept & set(node.all_input_nodes):
            kept.add(node)
    return kept


def _roots(attention: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what an attention operator takes as queries, and as keys and values."""
    found = arguments(attention)
    queries, keys = (
        [found[name] for name in names if isinstance(found.get(name), fx.Node)] for names in _ROOTS
    )
    return queries, keys


def _has_latent(attention: fx.Node, keys: list[fx.Node], product: fx.Node) -> bool:
    """Whether a product yields a latent: the operator takes one, or another product expands it."""
    return "mla" in op_name(attention) or any(map(is_product, cone(keys, product)))


def _products_before(keys: list[fx.Node]) -> Iterator[fx.Node]:
    """Yield the last two products on the keys' path, the last one first."""
    pending, found = set(keys), 0
    while pending and found < _PRODUCTS_OF_A_LATENT:
        node = max(pending)
        pending.remove(node)
        if is_product(node):
            found += 1
            yield node
        pending |= {source for source in sources(node) if source.op == "call_function"}
