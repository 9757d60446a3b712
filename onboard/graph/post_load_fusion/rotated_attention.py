"""Rotations of queries and keys that attention can do itself, and norms of heads before them."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import arguments, attr_tensor, is_op, only_user
from onboard.graph.new_nodes import insert_call
from onboard.ops.library import declared

aten = torch.ops.aten
_HEADS_DIM = 2


class Rotated(NamedTuple):
    """A rotation in layout bsnd that one attention reads, and nothing else."""

    rotation: fx.Node
    query: fx.Node
    """Not rotated, as `key`."""
    key: fx.Node

    def tables(self, gm: fx.GraphModule) -> tuple[fx.Node, fx.Node, str]:
        """Return cos, sin and what turns together; complex tables are read in parts, once."""
        values, turns = arguments(self.rotation), declared(self.rotation.target).fused_form
        if "cos" in values:
            return values["cos"], values["sin"], turns
        cos, sin = _parts(gm, values["freqs_cis"])
        return cos, sin, turns


def is_norm(node: Any) -> TypeGuard[fx.Node]:
    """Whether a node is an RMSNorm, of either back end."""
    return is_op(node, torch.ops.onboard.torch_rmsnorm, torch.ops.onboard.triton_rmsnorm)


class NormsOfHeads(NamedTuple):
    """RMSNorms of queries' and keys' heads with one eps, whose results one node reads."""

    query: fx.Node
    """Not normalised, as `key`."""
    key: fx.Node
    query_weight: fx.Node
    key_weight: fx.Node
    eps: float


def norms_before(gm: fx.GraphModule, query: Any, key: Any) -> NormsOfHeads | None:
    """Return the norms whose results these are, None where they are something else, or norms that a
    kernel of the rotation cannot take in.
    """
    if not (_is_norm_of_heads(query, gm) and _is_norm_of_heads(key, gm)):
        return None
    of_q, of_k = arguments(query), arguments(key)
    if of_q["eps"] != of_k["eps"]:
        return None
    return NormsOfHeads(of_q["input"], of_k["input"], of_q["weight"], of_k["weight"], of_q["eps"])


def _is_norm_of_heads(node: Any, gm: fx.GraphModule) -> TypeGuard[fx.Node]:
    """Whether it is an RMSNorm that keeps the dtype (kernels round to it) and that only one node
    reads.
    """
    if not is_norm(node) or only_user(node) is None:
        return False
    values = arguments(node)
    value, weight = values["input"].meta.get("val"), attr_tensor(gm, values["weight"])
    return value is not None and weight is not None and value.dtype == weight.dtype


def rotation_before(attention: fx.Node, query: Any, key: Any) -> Rotated | None:
    """Return the rotation whose results are an attention's arguments `query` and `key`, None where
    something else reads these, too.
    """
    if not all(
        is_op(each, operator.getitem) and only_user(each) is attention for each in (query, key)
    ):
        return None
    rotation = query.args[0]
    if not declared(rotation.target).fused_form or (query.args[1], *key.args) != (0, rotation, 1):
        return None
    values = list(arguments(rotation).items())
    tables = [value.meta.get("val") for name, value in values[2:] if name != "unsqueeze_dim"]
    fits = all(table is not None and table.dim() == 3 for table in tables)
    if arguments(rotation)["unsqueeze_dim"] != _HEADS_DIM or not fits:
        return None
    return Rotated(rotation, values[0][1], values[1][1])


def _parts(gm: fx.GraphModule, table: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the real and the imaginary part of a complex table, which all its readers share."""
    known = next((user for user in table.users if is_op(user, aten.view_as_real)), None)
    if known is None:
        known = insert_call(gm, table.next, aten.view_as_real.default, table, like=table)
        for part in (0, 1):
            insert_call(gm, known.next, aten.select.int, known, -1, part, like=table)
    real, imaginary = sorted(known.users, key=lambda part: part.args[2])  # type: ignore[arg-type, return-value]
    return real, imaginary
