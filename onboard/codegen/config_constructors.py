"""The constructor of a config class, as code that assigns fields: that of its own, or what the fields
that the class declares stand for.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from copy import deepcopy
from typing import Any

from transformers import PretrainedConfig

_AFTER = "__post_init__"
_REST = "kwargs"


def constructor_of(node: ast.ClassDef) -> ast.FunctionDef | None:
    """Return the constructor of a class; of one with declared fields, as configs of transformers 5
    are, one that does the same; None where it has that of its base.
    """
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    if "__init__" in methods:
        return methods["__init__"]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and _is_field(item)]
    if not fields and _AFTER not in methods:
        return None
    after = deepcopy(methods.get(_AFTER))
    given = None if after is None else after.args.kwarg
    rest = _REST if given is None else given.arg
    base = ast.parse(f"super().__init__(**{rest})").body
    body = base if after is None else [_with_base(item) for item in after.body]
    names = [ast.unparse(item.target) for item in fields]
    kept = [ast.parse(f"self.{name} = {name}").body[0] for name in names]
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg("self")],
        kwonlyargs=[ast.arg(name) for name in names],
        kw_defaults=[item.value for item in fields],
        kwarg=ast.arg(rest),
        defaults=[],
    )
    made = ast.FunctionDef("__init__", arguments, [*kept, *body], [], None, None)
    return ast.fix_missing_locations(ast.copy_location(made, node))


def defaults_beside(node: ast.ClassDef) -> dict[str, Any]:
    """Return the fields with literal values that a class has beside a constructor of its own: they
    are these where a config.json says nothing of them, and before the constructor assigns them.
    """
    if not any(map(_is_constructor, node.body)):
        return {}
    found = {}
    for item in node.body:
        match item:
            case (
                ast.AnnAssign(target=ast.Name(id=key), value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name(id=key)], value=value)
            ) if not (key.startswith("_") or hasattr(PretrainedConfig, key)):
                with suppress(ValueError):
                    found[key] = ast.literal_eval(value)
    return found


def _is_constructor(item: ast.stmt) -> bool:
    return isinstance(item, ast.FunctionDef) and item.name == "__init__"


def without_positional(node: ast.FunctionDef) -> ast.FunctionDef:
    """Return a constructor without the `*args` that it hands to its base alone: a config.json has
    names for all it says.
    """
    if node.args.vararg is None:
        return node
    taken, node = node.args.vararg.arg, deepcopy(node)
    for call in (item for item in ast.walk(node) if isinstance(item, ast.Call)):
        if ast.unparse(call.func).startswith("super("):
            call.args = [item for item in call.args if ast.unparse(item) != f"*{taken}"]
    used = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    node.args.vararg = ast.arg(taken) if taken in used else None
    return node


def _is_field(node: ast.AnnAssign) -> bool:
    """Whether a statement of a class declares a field with its default."""
    declared = isinstance(node.target, ast.Name) and node.value is not None
    return declared and "ClassVar" not in ast.unparse(node.annotation)


def _with_base(node: ast.stmt) -> ast.stmt:
    """Return a statement that calls the base's constructor where it called what follows it."""
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and item.attr == _AFTER:
            item.attr = "__init__"
    return node
