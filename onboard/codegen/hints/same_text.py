"""Whether two model files are the same but for what they say of several ranks."""

from __future__ import annotations

import ast
import io
import tokenize
from contextlib import suppress
from itertools import pairwise

from onboard.codegen.hints.unhinted_text import LINEAR, without_hints


def same_but_hints(first: str, second: str) -> bool:
    """Whether two model files differ in what they say of ranks at most."""
    with suppress(SyntaxError):  # what is no Python is no model file
        (one, comments), (other, others) = map(_canonical, (first, second))
        return comments == others and _same(one, other)
    return False


def _canonical(text: str) -> tuple[ast.AST, list[str]]:
    """Return what a text says without hints, and its comments."""
    plain = without_hints(text)
    words = tokenize.generate_tokens(io.StringIO(plain).readline)
    comments = [word.string for word in words if word.type == tokenize.COMMENT]
    tree = _OneWay().visit(ast.parse(plain))
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        inline_once_read(function)
    return tree, comments


def _same(one: object, other: object) -> bool:
    """Whether two trees are the same; a size in a reshape may be left to the others (-1) in one."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if not isinstance(one, ast.AST) or type(one) is not type(other):
        return one == other
    return all(
        _same_field(one, name, getattr(one, name, None), getattr(other, name, None))
        for name in one._fields
    )


def _same_field(owner: ast.AST, name: str, one: object, other: object) -> bool:
    if name == "args" and isinstance(one, list) and isinstance(other, list) and _reshapes(owner):
        pairs = zip(one, other, strict=False)
        left = [pair for pair in pairs if {"-1"} & {ast.unparse(each) for each in pair}]
        if len(one) == len(other) and len(left) == 1:
            kept = [[each for each in sizes if each not in left[0]] for sizes in (one, other)]
            return _same(*kept)
    return _same(one, other)


def _reshapes(node: ast.AST) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr == "reshape"  # type: ignore[attr-defined]


class _OneWay(ast.NodeTransformer):
    """Writes reshapes and the function of linear layers in one way: of what hints were on, the way
    is not known any more.
    """

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("view", "reshape"):
            node.func.attr = "reshape"
            if len(node.args) == 1 and isinstance(node.args[0], ast.Tuple):
                node.args = list(node.args[0].elts)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        is_short = isinstance(node.value, ast.Name) and node.value.id == "F"
        if is_short and node.attr == "linear":
            return ast.parse(LINEAR, mode="eval").body
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None  # of functions that hints take the place of

    def visit_Import(self, node: ast.Import) -> None:
        return None


def inline_once_read(function: ast.FunctionDef) -> None:
    """Put values that have a name for the next statement alone in the place of the name: the text
    as it would be without lines of their own, in one form whoever named them.
    """
    while any(_inlined(block, function) for block in _blocks(function)):
        pass


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    found = [getattr(node, name, []) for node in ast.walk(function) for name in ("body", "orelse")]
    return [each for each in found if isinstance(each, list)]


def _inlined(block: list[ast.stmt], function: ast.FunctionDef) -> bool:
    for place, (first, second) in enumerate(pairwise(block)):
        if not isinstance(first, ast.Assign) or not isinstance(second, ast.Assign | ast.Return):
            continue
        name = ast.unparse(first.targets[0])
        uses = [
            node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name
        ]
        here = [node for node in ast.walk(second) if node in uses]
        if len(uses) == 2 and len(here) == 1 and isinstance(here[0].ctx, ast.Load):
            _Replacing(here[0], first.value).visit(second)
            del block[place]
            return True
    return False


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.Name, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.new if node is self.old else node
