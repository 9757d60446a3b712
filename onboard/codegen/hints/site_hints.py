"""What a file is to say of views, splits, ops and sums."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from onboard.codegen.hints.marked_sites import Site, called
from onboard.codegen.hints.output_blocks import Sites, shape_given, shape_parts
from onboard.codegen.hints.small_division import Division
from onboard.graph.fx import arguments, is_op
from onboard.graph.sharding.detect import VOCABULARY
from onboard.graph.sharding.signatures import is_cast, shape
from onboard.ops.library import NAMESPACE, declared

aten = torch.ops.aten
_OPS = f"torch.ops.{NAMESPACE}."


def view_hint(division: Division, site: Site, node: Node) -> str | None:
    """Return what is said of a reshape which names the size of a dimension that ranks divide, and
    leaves another one to the rest (-1).
    """
    dim = _named_dim(division, site, node)
    if dim is None or _may_be_left_out(site):
        return None
    return f'tp_scaled_dim={dim}, layer_type="{division.kind(node)}"'


def left_out(division: Division, site: Site, node: Node) -> int | None:
    """Return which size a reshape may leave to the others (-1), so that nothing has to be said of
    it: that of the dimension which ranks divide.
    """
    dim = _named_dim(division, site, node)
    return dim if _may_be_left_out(site) else None


def _may_be_left_out(site: Site) -> bool:
    """Whether a reshape says all sizes, itself."""
    sizes = shape_given(site.expression)
    return bool(sizes) and not any(
        isinstance(each, ast.Starred) or ast.unparse(each) == "-1" for each in sizes
    )


def _named_dim(division: Division, site: Site, node: Node) -> int | None:
    """Return the one dimension that ranks divide and a reshape names the size of."""
    call = site.expression
    if called(call) not in ("view", "reshape") or not is_op(node, aten.view, aten.reshape):
        return None
    if (
        not isinstance(call, ast.Call)
        or call.keywords
        or ast.unparse(call.func).startswith("torch.")
    ):
        return None
    named: Sequence[Any] = list(arguments(node).values())[1]
    parts = shape_parts(call, site.function)
    dims = [
        dim
        for dim in division.layouts[node][0].cuts
        if named[dim] != -1 and _is_number(parts, dim - len(named))
    ]
    return dims[0] if len(dims) == 1 else None


def _is_number(parts: Sequence[ast.expr], place: int) -> bool:
    """Whether a shape says a size there, and not that of another tensor, which is a share, too."""
    return len(parts) >= -place and ".shape" not in ast.unparse(parts[place])


def split_hint(division: Division, site: Site, node: Node) -> str | None:
    """Return the kind of layer of a split that names the sizes of pieces of which ranks have
    shares.
    """
    call = site.expression
    is_split = called(call) == "split" and is_op(node, aten.split_with_sizes)
    if not is_split or not isinstance(call, ast.Call):
        return None
    dim = arguments(node)["dim"] % len(shape(node.all_input_nodes[0]))
    if not any(dim in layout.cuts for layout in division.layouts[node]):
        return None
    return division.kind(node)


def op_hint(division: Division, site: Site, node: Node) -> str | None:
    """Return the kind of layer of an op that does its work on a share of it."""
    call, source = site.expression, declared(node.target)
    is_call = isinstance(call, ast.Call) and ast.unparse(call.func).startswith(_OPS)
    if not source.hinted or not is_call:
        return None
    if not any(each.cuts or each.partial for each in division.layouts[node]):
        return None
    return division.kind(node)


def sums(division: Division, sites: Sites) -> list[tuple[Site, str]]:
    """Return the expressions whose values are to be added up over ranks, and kinds of layers: for
    each sum the innermost one all of whose calls are sums, and none inside another.

    Where a sum is put off into a class that others call, too (a norm's cast), it is made where that
    is called.
    """
    ends = [
        end
        for node, kind in division.summed.items()
        if kind != VOCABULARY
        for end in _summands(division, node)
    ]
    total = {part: node for node in ends for part in _put_off(division, node)}
    chosen = [
        site
        for node in dict.fromkeys(total.values())
        if (site := _place(node, total, sites)) is not None
    ]
    alone = [each for each in chosen if not any(_is_inside(each, other, total) for other in chosen)]
    unique = {id(site): site for site in alone}.values()
    return [(site, division.kind(total[site.nodes[0]])) for site in unique]


def _place(node: Node, total: Mapping[Node, Node], sites: Sites) -> Site | None:
    for part in [each for each, end in total.items() if end is node]:
        for site in sites.get(part, []):
            if all(each in total for each in site.nodes):
                return site
    return None


def _summands(division: Division, node: Node) -> list[Node]:
    """Return the node, or where something whole is added on the way to it, the summands that are
    added to that.
    """
    if not _adds_whole(division, node):
        return [node]
    return [end for each in _partial(division, node) for end in _summands(division, each)]


def _adds_whole(division: Division, node: Node) -> bool:
    partial = _partial(division, node)
    tensors = [each for each in node.all_input_nodes if each in division.layouts]
    own = is_op(node, aten.add, aten.sub) and 0 < len(partial) < len(tensors)
    return own or any(_adds_whole(division, each) for each in partial)


def _partial(division: Division, node: Node) -> list[Node]:
    """Return the inputs that are summands still."""
    return [
        each
        for each in node.all_input_nodes
        if each not in division.summed
        and any(own.partial for own in division.layouts.get(each, ()))
    ]


def _put_off(division: Division, node: Node) -> Iterator[Node]:
    """Yield a node whose summands are added up, and those whose summands become its own alone."""
    yield node
    partial = _partial(division, node)
    if len(partial) == 1 and all(
        user is node or _reads_none(user, partial[0]) for user in partial[0].users
    ):
        yield from _put_off(division, partial[0])


def _reads_none(node: Node, of: Node) -> bool:
    """Whether a node reads of another one its dtype alone, or is a check."""
    return not node.users or (is_cast(node) and node.all_input_nodes[0] is not of)


def _is_inside(site: Site, other: Site, total: Mapping[Node, Node]) -> bool:
    """Whether another expression has the sums of all calls of this one, and more."""
    return {total[each] for each in site.nodes} < {total[each] for each in other.nodes}
