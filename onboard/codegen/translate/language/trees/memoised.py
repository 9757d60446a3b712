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
Entry = tuple[str, str]


def without_memory(found: Found | None) -> Found | None:
    """Return a method of a class that makes anew what it would find in a dict under a key, where nothing
    else of the class knows the dict, which is empty at first.
    """
    if found is None:
        return None
    owner, method = found
    kept = [each for item in ast.walk(method) for each in (*_fills(item), *_returns(item))]
    if not kept or not all(_is_own(attr, key, owner, method) for attr, key in kept):
        return found
    node = _Anew(dict(kept)).visit(deepcopy(method))
    return owner, ast.fix_missing_locations(node)


def _fills(node: ast.AST) -> Sequence[Entry]:
    """Return the entries that a branch makes where none of several is there: `if key not in self.attr`,
    or one of several such with one key.
    """
    if not isinstance(node, ast.If) or node.orelse:
        return ()
    tests = [node.test]
    if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
        tests = node.test.values
    found = [_asked(test, there=False) for test in tests]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) and len({key for _, key in known}) == 1 else ()


def _returns(node: ast.AST) -> Sequence[Entry]:
    """Return the entry that a branch does nothing but return where it is there: `if key in self.attr`,
    perhaps where something else holds, too.
    """
    match node:
        case ast.If(test=test, body=[ast.Return(value=ast.Subscript() as entry)], orelse=[]):
            both = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
            tests = test.values if isinstance(test, ast.BoolOp) and both else [test]
            found = (_asked(each, there=True) for each in tests)
            return [each for each in found if each is not None and _is_use(entry, *each)]
    return ()


def _asked(test: ast.expr, there: bool) -> Entry | None:
    """Return the attribute and the key of `key in self.attr` or `self.attr.get(key) is not None`; of
    the contrary, where an entry is asked for that is not `there`.
    """
    match test:
        case ast.Compare(
            left=key,
            ops=[ast.In() | ast.NotIn() as operator],
            comparators=[ast.Attribute(value=ast.Name(id="self"), attr=attr)],
        ):
            return (attr, ast.unparse(key)) if isinstance(operator, ast.In) == there else None
        case ast.Compare(
            left=ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(value=ast.Name(id="self"), attr=attr), attr="get"
                ),
                args=[key],
            ),
            ops=[ast.Is() | ast.IsNot() as operator],
            comparators=[ast.Constant(value=None)],
        ):
            return (attr, ast.unparse(key)) if isinstance(operator, ast.IsNot) == there else None
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
    if not isinstance(node, ast.Compare):
        return False
    return (attr, key) in (_asked(node, there=False), _asked(node, there=True))


class _Anew(ast.NodeTransformer):
    """Makes entries always, each in a variable in its place."""

    def __init__(self, kept: dict[str, str]) -> None:
        self.kept = kept

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """Take the branch that makes an entry, never the one that returns it."""
        taken, left = bool(_fills(node)), bool(_returns(node))
        self.generic_visit(node)
        return ast.Pass() if left else node.body if taken else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Write the variable."""
        match node:
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=attr)):
                if attr in self.kept:
                    return name(f"{attr}_entry", store=isinstance(node.ctx, ast.Store))
        self.generic_visit(node)
        return node
