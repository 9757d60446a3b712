"""Calls of modules whose classes give different things, a tensor here, a tuple there: the code that
tells them apart is written once for each class.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.trees.syntax import Untranslatable, call, name


class Differing(Untranslatable):
    """A module was called that may be of several classes, which give different things."""

    def __init__(self, module: Instance) -> None:
        super().__init__(f"{ast.unparse(module.expr)}, whose classes give different things")
        self.module = module


def by_class(error: Differing, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt]:
    """Return statements that do the same as those whose first one failed: the ones up to the last
    that asks what was given stand under a test of the module's class, and once more for the others.
    What is taken apart at once needs no one to ask.

    Raises:
        Differing: nothing asks, or the class cannot be told.
    """
    first, module = statements[0], error.module
    cls = module.classes[0]
    target = first.targets[0] if isinstance(first, ast.Assign) else None
    known = frame.source.namespace.get(cls.__name__) is cls
    if target is None or not known or not _is_told_apart(module, frame):
        raise error
    asked = (target, module.expr)
    count = max((i for i, item in enumerate(statements) if _asks(item, asked)), default=0) + 1
    if not isinstance(target, ast.Tuple) and (count == 1 or not isinstance(target, ast.Name)):
        raise error
    test = call(name("isinstance"), module.expr, name(cls.__name__))
    sides = [list(statements[:count]), deepcopy(list(statements[:count]))]
    return [ast.copy_location(ast.If(test, *sides), first), *statements[count:]]


def _is_told_apart(module: Instance, frame: Frame) -> bool:
    """Whether layers that get here have the module `self.x`, some of its first class, some of
    another.
    """
    if frame.cls is None or not isinstance(module.expr, ast.Attribute):
        return False
    layers = frame.layers or frame.translator.modules_of(frame.cls.cls)
    classes = {type(getattr(layer, module.expr.attr, None)) for layer in layers}
    return module.classes[0] in classes and len(classes) > 1


def _asks(tree: ast.AST, asked: Sequence[ast.expr]) -> bool:
    """Whether code asks for the class of one of some expressions."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    about = [ast.unparse(node.args[0]) for node in calls if ast.unparse(node.func) == "isinstance"]
    return any(ast.unparse(item) in about for item in asked)
