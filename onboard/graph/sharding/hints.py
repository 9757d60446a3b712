"""What `detect_sharding` says of a node, for `apply_sharding_hints` to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch.fx import Node

from onboard.graph.sharding.cuts import Cut, Layout

KEY = "sharding"
"""Under which a node's `meta` has its hint."""


@dataclass(frozen=True)
class Hint:
    """How a node's results are to lie on the ranks."""

    layer_type: str
    results: Mapping[int, Layout] = field(default_factory=lambda: MappingProxyType({}))
    """By the index of the result; an op with one has index 0."""
    letters: Mapping[str, Cut] = field(default_factory=lambda: MappingProxyType({}))
    """Cuts of the letters of its signature that no result shows."""
    gathered: bool = False
    """The result is made whole at once."""
    refused: str = ""
    """Why the op cannot be cut; "" if it can."""
    sizes: tuple[int, ...] = ()
    """World sizes with which it could."""


def hint_of(node: Node) -> Hint | None:
    """Return a node's hint, None without one."""
    hint: Hint | None = node.meta.get(KEY)
    return hint
