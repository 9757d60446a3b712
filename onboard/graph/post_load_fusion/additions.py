"""Residual additions that the node before them can take in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from onboard.graph.fx import is_op, only_user


class Addition(NamedTuple):
    """What is added to a node, and where."""

    total: fx.Node
    other: fx.Node


def only_addition(node: fx.Node) -> Addition | None:
    """Return the addition that is all that reads a node, if what it adds has the node's shape and
    dtype.
    """
    total = only_user(node)
    if (
        total is None
        or not is_op(total, torch.ops.aten.add.Tensor)
        or total.kwargs.get("alpha", 1) != 1
    ):
        return None
    left, right = total.args[:2]
    other = right if left is node else left
    if other is node or not isinstance(other, fx.Node) or not are_alike(other, node):
        return None
    return Addition(total, other)


def are_alike(left: fx.Node, right: fx.Node) -> bool:
    """Whether the values of two nodes are known, and have one shape and dtype."""
    one, other = left.meta.get("val"), right.meta.get("val")
    return (
        one is not None
        and other is not None
        and one.shape == other.shape
        and one.dtype == other.dtype
    )
