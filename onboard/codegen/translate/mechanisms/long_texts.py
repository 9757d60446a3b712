"""Branches that a forward takes for texts beyond a length, as LongRoPE has them (Ding et al. 2024,
arXiv:2402.13753): both tables are there, and the largest position chooses.

A cache holds keys that were turned by the one table or the other: that all tokens of a text have the
same is seen to by what runs the model, which knows the length from the config.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name
from onboard.codegen.translate.language.values import Code
from onboard.runtime.length_dependent_rope import length_dependent_rope

_LENGTH = re.compile(r"(torch\.max\(position_ids\)|position_ids\.a?max\(\)) \+ 1")


class LongTexts(Mechanism):
    """`if torch.max(position_ids) + 1 > length: a = x else: a = y`."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """`a = torch.where(test, x, y)`."""
        node, *rest = statements
        if not isinstance(node, ast.If) or not _is_asked(node.test, frame):
            return None
        long, short = _assigned(node.body), _assigned(node.orelse)
        if not long or long.keys() != short.keys():
            return None
        chosen = [
            ast.Assign([name(key, store=True)], _either(node.test, long[key], short[key]))
            for key in long
        ]
        located = [ast.fix_missing_locations(ast.copy_location(item, node)) for item in chosen]
        return [*located, *rest]


def _is_asked(test: ast.expr, frame: Frame) -> bool:
    """Whether a test is that of the largest position for the length at which the config's rotary
    tables change.
    """
    if not (frame.translator.specialised and frame.kind == "forward" and frame.cls):
        return False
    match test:
        case ast.Compare(left=ast.Name() as left, ops=[ast.Gt()], comparators=[right]):
            whole = WrittenOut(local_values(frame)).visit(deepcopy(left))
        case _:
            return False
    if not _LENGTH.fullmatch(ast.unparse(whole)):
        return False
    known, limit = length_dependent_rope(frame.translator.config.to_dict()), _limit(right, frame)
    return known is not None and limit == known.switch_length


def _limit(expr: ast.expr, frame: Frame) -> object:
    """Return the number that all modules of the class have for an expression, if any."""
    try:
        value = frame.evaluate(expr)
    except Untranslatable:
        return None
    if not isinstance(value, Code) or not value.static or frame.cls is None:
        return None
    code, source = ast.unparse(value.expr), frame.source.namespace
    modules = frame.translator.modules_of(frame.cls.cls)
    found = {eval(code, {**source, "self": module}) for module in modules}
    return found.pop() if len(found) == 1 else None


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the values of statements that are all assignments of variables; {} for others."""
    found = {
        item.targets[0].id: item.value
        for item in body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    }
    return found if len(found) == len(body) else {}


def _either(test: ast.expr, one: ast.expr, other: ast.expr) -> ast.expr:
    return call(attribute(name("torch"), "where"), *map(deepcopy, (test, one, other)))
