"""Linear layers that are computed slice by slice, as training on several devices did: taken whole
where this config has them whole.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from onboard.codegen.translate.language.expressions.decisions import deciding, of_config
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.cleanup import negated
from onboard.codegen.translate.language.trees.syntax import Untranslatable


class SlicedLinears(Mechanism):
    """Sums over slices of a weight."""

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """The side without them, guarded, if the config takes it."""
        sides = {True: _sums_slices(node.body), False: _sums_slices(node.orelse)}
        if sides[True] == sides[False] or frame.cls is None:
            return None
        test = frame.evaluate(node.test)
        if not test.is_static:
            return None
        try:
            _, chosen = deciding(test.code(), frame)
        except Untranslatable:
            return None
        if sides[chosen]:
            return None
        reason = of_config(test.code(), frame)
        frame.translator.guard(reason if chosen else negated(reason), frame)
        return chosen


def _sums_slices(body: Sequence[ast.stmt]) -> bool:
    """Whether a loop multiplies with one slice of a layer's weight after the other."""
    loops = [node for item in body for node in ast.walk(item) if isinstance(node, ast.For)]
    return any(_is_sliced(node) for loop in loops for node in ast.walk(loop))


def _is_sliced(node: ast.AST) -> bool:
    match node:
        case ast.Call(
            func=ast.Attribute(attr="linear"),
            args=[_, ast.Subscript(value=ast.Attribute(attr="weight")), *_],
        ):
            return True
    return False
