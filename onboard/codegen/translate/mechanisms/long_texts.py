"""Branches that a forward takes for texts beyond a length, as LongRoPE has them (Ding et al. 2024,
arXiv:2402.13753): both tables are there, and the largest position chooses.

A cache holds keys that were turned by the one table or the other: that all tokens of a text have the
same is seen to by what runs the model, which knows the length from the config.

Beyond the number of positions, where dynamic NTK makes its table anew, no text goes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from copy import deepcopy

from onboard.analysis.behaviour.position_fields import USUAL
from onboard.analysis.source import find_method
from onboard.codegen.translate.language.expressions.decisions import (
    WrittenOut,
    local_values,
    of_config,
)
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

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """No position is beyond the last one that the config has."""
        match node.test:
            case ast.Compare(left=ast.Name() as left, ops=[ast.Gt()], comparators=[limit]) if (
                _is_of_forward(frame) and _is_length(left, frame)
            ):
                return False if _is_number_of_positions(limit, frame) else None
            case ast.Compare(left=ast.Name() as left, ops=[ast.Gt()], comparators=[limit]) if (
                _is_of_forward(frame) and _counts_on(node, left, limit)
            ):
                return False if _has_all_positions(limit, frame) else None
        return None


def _is_of_forward(frame: Frame) -> bool:
    return frame.translator.specialised and frame.kind == "forward" and frame.cls is not None


def _is_length(variable: ast.Name, frame: Frame) -> bool:
    whole = WrittenOut(local_values(frame)).visit(deepcopy(variable))
    return _LENGTH.fullmatch(ast.unparse(whole)) is not None


def _is_number_of_positions(limit: ast.expr, frame: Frame) -> bool:
    """Whether an attribute that a constructor sets is the config's number of positions."""
    try:
        field = of_config(frame.code(limit), frame)
    except Untranslatable:
        return False
    return ast.unparse(field) == f"config.{USUAL}"


def _counts_on(node: ast.If, length: ast.Name, limit: ast.expr) -> bool:
    """Whether a branch that texts beyond a limit take has the limit be their length."""
    grown = any(
        isinstance(each, ast.Assign)
        and ast.unparse(each.targets[0]) == ast.unparse(limit)
        and ast.unparse(each.value) == length.id
        for each in node.body
    )
    return grown and not node.orelse and ast.unparse(limit).startswith("self.")


def _has_all_positions(limit: ast.expr, frame: Frame) -> bool:
    """Whether an attribute is a field of the config that is no less than the number of positions, which
    is guarded.
    """
    field = _set_to(limit, frame)
    config = frame.translator.config
    if not isinstance(field, ast.Attribute) or ast.unparse(field.value) != "config":
        return False
    number, positions = (getattr(config, key, None) for key in (field.attr, USUAL))
    if type(number) is not int or type(positions) is not int or number < positions:
        return False
    if config.attribute_map.get(USUAL, USUAL) != field.attr:
        known = attribute(name("config"), USUAL)
        frame.translator.guard(ast.Compare(field, [ast.GtE()], [known]), frame)
    return True


def _set_to(attr: ast.expr, frame: Frame) -> ast.expr | None:
    """Return what a constructor assigns to an attribute, once."""
    found = find_method(frame.cls.cls, "__init__") if frame.cls is not None else None
    assigned = [
        each.value
        for each in (ast.walk(found[1]) if found else ())
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == ast.unparse(attr)
    ]
    return assigned[0] if len(assigned) == 1 else None


def _is_asked(test: ast.expr, frame: Frame) -> bool:
    """Whether a test is that of the largest position for the length at which the config's rotary
    tables change.
    """
    match test:
        case ast.Compare(left=ast.Name() as left, ops=[ast.Gt()], comparators=[right]) if (
            _is_of_forward(frame) and _is_length(left, frame)
        ):
            known = length_dependent_rope(frame.translator.config.to_dict())
            return known is not None and _limit(right, frame) == known.switch_length
    return False


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
