"""Syntax trees: how they are made, compared and renamed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

E = TypeVar("E", bound=Callable[..., Any])

TOO_LONG = "not covered: texts of more tokens"
"""What a generated file says of texts that it refuses, as this one begins."""


class Untranslatable(Exception):
    """A construct that has no translation; the message says which."""

    def __init__(self, message: str, blocks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.blocks = blocks
        """The classes whose code led there, the innermost first."""

    block = ""
    """The class of the modeling code that has it, where that is known."""
    place = ""
    """`file.py:12` of the innermost statement that has it, where that is known."""


class NothingThere(Untranslatable):
    """What the code does fails in Python, too, as an item of None: no text of a model gets there."""


def noted(execute: E) -> E:
    """Have what executes statements in a frame note the innermost class whose code has a construct
    without translation.
    """

    @wraps(execute)
    def executed(statements: Any, frame: Any) -> Any:
        try:
            return execute(statements, frame)
        except Untranslatable as error:
            error.block = error.block or getattr(frame.owner, "__name__", "")
            error.blocks = led_by(error, frame)
            raise

    return cast(E, executed)


def led_by(error: Untranslatable, frame: Any) -> tuple[str, ...]:
    """Return the classes whose code led to an error, that of a frame with them."""
    owner = getattr(frame.owner, "__name__", "")
    return tuple(dict.fromkeys(item for item in (*error.blocks, owner) if item))


def as_load(target: ast.expr) -> ast.expr:
    """Return the expression that reads what an assignment stores."""
    return ast.parse(ast.unparse(target), mode="eval").body


def note_place(error: Exception, place: str) -> None:
    """Note the innermost statement that an error comes from, as `file.py:12`."""
    if not place.endswith(":0") and not getattr(error, "place", ""):
        vars(error)["place"] = place


def with_place(error: Exception, reason: str) -> str:
    """Return a reason that says where it is."""
    place = getattr(error, "place", "")
    return reason if not place or re.search(r"\.py:\d", reason) else f"{reason} at {place}"


def name(identifier: str, store: bool = False) -> ast.Name:
    """Return a name node."""
    return ast.Name(identifier, ast.Store() if store else ast.Load())


def attribute(owner: ast.expr, *names: str) -> ast.expr:
    """Return `owner.a.b...`."""
    for item in names:
        owner = ast.Attribute(owner, item, ast.Load())
    return owner


def call(function: ast.expr, *args: ast.expr, **keywords: ast.expr) -> ast.Call:
    """Return a call node."""
    return ast.Call(
        function, list(args), [ast.keyword(key, value) for key, value in keywords.items()]
    )


def constant(value: Any) -> ast.expr:
    """Return a literal; values without one are untranslatable."""
    if isinstance(value, tuple | list):
        items = [constant(item) for item in value]
        return (
            ast.Tuple(items, ast.Load())
            if isinstance(value, tuple)
            else ast.List(items, ast.Load())
        )
    if isinstance(value, slice):
        return call(
            name("slice"), constant(value.start), constant(value.stop), constant(value.step)
        )
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return call(name("float"), ast.Constant(str(value)))
    if value is None or value is Ellipsis or isinstance(value, str | bytes | int | float | bool):
        return ast.Constant(value)
    raise Untranslatable(f"a constant of type {type(value).__name__}")


def op(op_name: str) -> ast.expr:
    """Return `torch.ops.onboard.<name>`."""
    return attribute(name("torch"), "ops", "onboard", op_name)


def same_code(first: ast.AST, second: ast.AST) -> bool:
    """Whether two trees are the same code."""
    return ast.dump(first) == ast.dump(second)


def mentions(tree: ast.AST, variable: str) -> bool:
    """Whether code reads a variable."""
    return any(isinstance(node, ast.Name) and node.id == variable for node in ast.walk(tree))


def stored_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the variables that statements assign."""
    nodes = (node for statement in body for node in ast.walk(statement))
    names = (node for node in nodes if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def renamed(expr: ast.expr, old: str, new: str) -> ast.expr:
    """Return code with another name for a variable."""
    changed: ast.expr = _Rename(old, new).visit(expr)
    return changed


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return name(self.new) if node.id == self.old else node


def works_in_place(node: ast.Call) -> bool:
    """Whether a call of a method changes its owner, by its name."""
    return isinstance(node.func, ast.Attribute) and (
        (node.func.attr.endswith("_") and not node.func.attr.endswith("__"))
        or node.func.attr == "append"
    )


def only_raises(body: Sequence[ast.stmt]) -> bool:
    """Whether statements do nothing but raise, perhaps with a text that is put together before."""
    raises = bool(body) and isinstance(body[-1], ast.Raise)
    return raises and all(isinstance(item, ast.Assign) for item in body[:-1])


def if_statement(test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> ast.If:
    """Return a branch, the other way round where its first side is empty."""
    if body:
        return ast.If(test, body, orelse)
    return ast.If(ast.UnaryOp(ast.Not(), test), orelse, [])
