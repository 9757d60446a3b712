"""Methods that keep what they make in a dict of the module's, for the next call with the same key: each
call of generated code makes it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.analysis.source import class_node
from onboard.codegen.translate.language.trees.syntax import name

Found = tuple[type, ast.FunctionDef]


def without_memory(found: Found | None) -> Found | None:
    """Return a method of a class whose branches on a key that is not in a dict are always taken, where
    nothing else of the class knows the dict, which is empty at first.
    """
    if found is None:
        return None
    owner, method = found
    kept = [(test, key) for item in ast.walk(method) for test, key in _asked(item)]
    if not kept or not all(_is_own(attr, key, owner, method) for attr, key in kept):
        return found
    node = _Anew(dict(kept)).visit(deepcopy(method))
    return owner, ast.fix_missing_locations(node)


def _asked(node: ast.AST) -> Sequence[tuple[str, str]]:
    """Return the attributes, and the key, of a branch without another side on `key not in self.attr`,
    or one of several such.
    """
    if not isinstance(node, ast.If) or node.orelse:
        return ()
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    if isinstance(node.test, ast.BoolOp) and not isinstance(node.test.op, ast.Or):
        return ()
    found = [_lacking(test) for test in tests]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) and len({key for _, key in known}) == 1 else ()


def _lacking(test: ast.expr) -> tuple[str, str] | None:
    """Return the attribute and the key of `key not in self.attr`, or `self.attr.get(key) is None`."""
    match test:
        case ast.Compare(
            left=key,
            ops=[ast.NotIn()],
            comparators=[ast.Attribute(value=ast.Name(id="self"), attr=attr)],
        ):
            return attr, ast.unparse(key)
        case ast.Compare(
            left=ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(value=ast.Name(id="self"), attr=attr), attr="get"
                ),
                args=[key],
            ),
            ops=[ast.Is()],
            comparators=[ast.Constant(value=None)],
        ):
            return attr, ast.unparse(key)
    return None


def _is_own(attr: str, key: str, owner: type, method: ast.FunctionDef) -> bool:
    """Whether a dict of `self` is made empty, and is asked for this key alone, in this method alone."""
    node = class_node(owner)
    everywhere = [item for item in ast.walk(node) if _is_attribute(item, attr)]
    stored = [item for item in ast.walk(node) if _makes_empty(item, attr)]
    inside = [item for item in ast.walk(method) if _is_use(item, attr, key)]
    return len(stored) == 1 and len(everywhere) == len(stored) + len(inside)


def _is_attribute(node: ast.AST, attr: str) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{attr}"


def _makes_empty(node: ast.AST, attr: str) -> bool:
    match node:
        case (
            ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value)
        ) if value is not None:
            own = ast.unparse(target) == f"self.{attr}"
            return own and ast.unparse(value) in ("{}", "dict()")
    return False


def _is_use(node: ast.AST, attr: str, key: str) -> bool:
    """Whether an entry of the dict is asked for, given or taken, under the key."""
    if isinstance(node, ast.Subscript):
        return _is_attribute(node.value, attr) and ast.unparse(node.slice) == key
    return isinstance(node, ast.Compare) and _lacking(node) == (attr, key)


class _Anew(ast.NodeTransformer):
    """Takes branches always, and has a variable in the place of each entry."""

    def __init__(self, kept: dict[str, str]) -> None:
        self.kept = kept

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """Take it."""
        taken = bool(_asked(node))
        self.generic_visit(node)
        return node.body if taken else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Write the variable."""
        match node:
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=attr)):
                if attr in self.kept:
                    return name(f"{attr}_entry", store=isinstance(node.ctx, ast.Store))
        self.generic_visit(node)
        return node
