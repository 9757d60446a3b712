"""Dicts that layers hand on, in which each has an entry of its own, under its own number: a text's
layers find nothing there, for each entry is read before it is made, if at all.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torch import nn

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Mapping, Value, either


@dataclass(frozen=True, eq=False)
class OwnEntries(Value):
    """Such a dict, which generated code has not; or None, of which it is made."""

    filled: bool = False
    """Whether the layer whose code is evaluated has made its entry."""
    lazy = True

    def code(self) -> ast.expr:
        """Raise: generated code has none."""
        raise Untranslatable("a dict in which each layer leaves something of its own")

    def same_as(self, other: OwnEntries) -> bool:
        """Whether both are such dicts."""
        return True

    def fact(self) -> Value:
        """Return that it is one, in which another layer has no entry."""
        return OwnEntries()

    def joined(self, other: Value) -> Value:
        """Return the same where the first layer gets None."""
        none = isinstance(other, OwnEntries) or other.equals(NONE)
        return OwnEntries() if none else either(self, other)


def is_own_key(key: Value, modules: list[nn.Module]) -> bool:
    """Whether a key is the number of a layer, `self.layer_idx`, each of which has another one."""
    match key:
        case Code(expr=ast.Attribute(value=ast.Name(id="self"), attr=attr)):
            numbers = [getattr(module, attr, None) for module in modules]
            whole = all(type(number) is int for number in numbers)
            return whole and len(modules) > 1 and len({*numbers}) == len(numbers)
    return False


def holds_own_entries(owner: Value) -> bool:
    """Whether a dict may become one: it is, or is empty."""
    return isinstance(owner, OwnEntries) or (isinstance(owner, Mapping) and not owner.items)
