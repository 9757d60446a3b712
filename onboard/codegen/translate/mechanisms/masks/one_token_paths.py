"""Paths that texts of one token take alone: left out where such a text has what the first token of a
longer one has, or where they read what a longer text has left at the module.
"""

from __future__ import annotations

import ast

from onboard.analysis.tiny.tiny_prompts import first_token_is_plain
from onboard.codegen.translate.language.expressions.decisions import decided_here, statements_of
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.values import Code, Value
from onboard.codegen.translate.mechanisms.attention.sdpa import is_of_several


class OneTokenPaths(Mechanism):
    """`if x.shape[1] == 1: ... return ...`, behind which, or in whose other branch, the same is computed
    for any length; of one text alone where the condition is `batch * length == 1`. So is
    `if x.shape[1] != 1: self.first = ... else: ... self.first`, which generation of tokens takes one by one.
    """

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """It is not taken."""
        if _goes_on_from_texts(node, frame):
            return True
        sides = [node.body, *([node.orelse] if node.orelse else [])]
        ends = all(isinstance(side[-1], ast.Return) for side in sides)
        if not ends or frame.kind != "forward" or not frame.translator.specialised:
            return None
        match _without_false(frame.evaluate(node.test)):
            case ast.Compare(left=size, ops=[ast.Eq()], comparators=[ast.Constant(value=1)]):
                length = _length_of(size, frame)
                several = ast.Compare(length, [ast.NotEq()], [ast.Constant(1)])
                plain = first_token_is_plain(frame.translator.model)
                return False if is_of_several(Code(several), frame) and plain else None
        return None


def _goes_on_from_texts(node: ast.If, frame: Frame) -> bool:
    """Whether a branch of several tokens leaves something at the module that the other one reads, and
    is taken in this config.
    """
    if frame.kind != "forward" or not frame.translator.specialised:
        return False
    left = _own_attributes(node.body, ast.Store)
    if not left & _own_attributes(node.orelse, ast.Load):
        return False
    both = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
    tests = node.test.values if both and isinstance(node.test, ast.BoolOp) else [node.test]
    values = [frame.evaluate(each) for each in tests]
    several = [is_of_several(value, frame) for value in values]
    if several.count(True) != 1:
        return False
    others = [value for value, it_is in zip(values, several, strict=True) if not it_is]
    return all(value.is_static and decided_here(value, frame) for value in others)


def _own_attributes(body: list[ast.stmt], ctx: type[ast.expr_context]) -> set[str]:
    """Return the attributes of `self` that statements read, or set."""
    return {
        node.attr
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ctx)
        and ast.unparse(node.value) == "self"
    }


def _without_false(test: Value) -> ast.expr | None:
    """Return the only part of `a or False` that is not known."""
    match test.expr if isinstance(test, Code) else None:
        case ast.BoolOp(op=ast.Or(), values=[first, ast.Constant(value=False)]):
            return first
        case whole:
            return whole


def _length_of(size: ast.expr, frame: Frame) -> ast.expr:
    """Return the length of `batch * length`, which are sizes of one tensor; another size as it is."""
    match size:
        case ast.BinOp(left=ast.Name(batch), op=ast.Mult(), right=ast.Name(length)):
            for statement in statements_of(frame):
                match statement:
                    case ast.Assign(
                        targets=[ast.Tuple(elts=[ast.Name(first), ast.Name(second), *_])]
                    ):
                        if (first, second) == (batch, length) and _reads_sizes(statement.value):
                            return size.right
    return size


def _reads_sizes(value: ast.expr) -> bool:
    return ast.unparse(value).endswith((".shape", ".size()"))
