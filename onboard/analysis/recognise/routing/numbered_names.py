"""Experts that are attributes of a mixture under numbered names: `expert_0`, `expert_1`, ..."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

ASKED = ("getattr", "get_submodule", "_modules", "children", "named_children")
"""How code asks a module for one of a name that it makes."""
_NAME = re.compile(r"([A-Za-z_]\w*?)(\d+)")


def numbered_names(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield what the names of children begin with that go on with numbers one after the other, in the
    order in which the module has them, and these children.
    """
    found: dict[str, list[tuple[int, nn.Module]]] = {}
    for name, child in module.named_children():
        if parts := _NAME.fullmatch(name):
            found.setdefault(parts[1], []).append((int(parts[2]), child))
    for prefix, children in found.items():
        numbers = [number for number, _ in children]
        if len(children) > 1 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
            yield prefix, nn.ModuleList(child for _, child in children)
