"""Paths that texts of one token take alone: left out where such a text has what the first token of a
longer one has.
"""

from __future__ import annotations

import ast

from onboard.analysis.tiny.tiny_prompts import first_token_is_plain
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.values import Code, Value
from onboard.codegen.translate.mechanisms.attention.sdpa import is_of_several


class OneTokenPaths(Mechanism):
    """`if x.shape[1] == 1: ... return ...`, behind which the same is computed for any length."""

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """It is not taken."""
        ends = isinstance(node.body[-1], ast.Return) and not node.orelse
        if not ends or frame.kind != "forward" or not frame.translator.specialised:
            return None
        match _without_false(frame.evaluate(node.test)):
            case ast.Compare(left=size, ops=[ast.Eq()], comparators=[ast.Constant(value=1)]):
                several = ast.Compare(size, [ast.NotEq()], [ast.Constant(1)])
                plain = first_token_is_plain(frame.translator.model)
                return False if is_of_several(Code(several), frame) and plain else None
        return None


def _without_false(test: Value) -> ast.expr | None:
    """Return the only part of `a or False` that is not known."""
    match test.expr if isinstance(test, Code) else None:
        case ast.BoolOp(op=ast.Or(), values=[first, ast.Constant(value=False)]):
            return first
        case whole:
            return whole
