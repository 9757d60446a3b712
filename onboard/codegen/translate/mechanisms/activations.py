"""Tables of activations of a modeling file's own, in terms of transformers' table of all of
them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from onboard.analysis.source import module_source
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import Untranslatable, constant, name
from onboard.codegen.translate.language.values import Code, Value


def activation(table: Mapping[Any, Any], index: Code, frame: Frame) -> Code | None:
    """Return the entry that this config takes from a table, as one of `ACT2FN`; None for what is no
    such table.

    An entry of the same class computes the same, for activations in these tables have neither
    weights nor options.
    """
    if frame.cls is None or not all(isinstance(entry, nn.Module) for entry in table.values()):
        return None
    names = {
        key: known
        for key, entry in table.items()
        if (known := next((own for own in ACT2FN if _same(ACT2FN[own], entry)), None)) is not None
    }
    taken = _taken(names, index, frame)
    if taken is None:
        return None
    frame.translator.globals["ACT2FN"] = ACT2FN, module_source("transformers.activations")
    return Code(ast.Subscript(name("ACT2FN"), taken, ast.Load()), static=True)


def _taken(names: Mapping[Any, str], index: Code, frame: Frame) -> ast.expr | None:
    """Return which of the names in `ACT2FN` this config takes, by those of a table, or what looks it
    up, where a constructor is told by an argument that it does not keep; None: no name is known.
    """
    for key, known in names.items():
        test = ast.Compare(index.expr, [ast.Eq()], [constant(key)])
        try:
            chosen = frame.translator.decide(test, Code(test, static=True), frame)
        except Untranslatable:
            table = ast.Dict([*map(constant, names)], [*map(constant, names.values())])
            return ast.Subscript(table, index.expr, ast.Load())
        if chosen:
            frame.translator.guard(test, frame)
            return constant(known)
    return None


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two activations without weights are of one class and have the same options."""
    options = [
        repr(
            {
                key: value
                for key, value in sorted(vars(item).items())
                if not key.startswith("_") and key != "training"
            }
        )
        for item in (one, other)
    ]
    return type(one) is type(other) and options[0] == options[1] and not list(one.parameters())


class Activations(Mechanism):
    """Tables of activations."""

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """The entry of a table."""
        match owner, index:
            case Global(obj=dict() as table), Code(static=True):
                return activation(table, index, frame)
        return None
