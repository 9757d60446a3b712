"""Branches of a forward that make a table anew where a text is longer than what the last one made:
what it holds is the same, so that nothing is left of them.
"""

from __future__ import annotations

import ast
from copy import deepcopy

from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.values import Code, Known, Unread, Value


def without_regrowth(start: Env, after: Env, body: list[ast.stmt], frame: Frame) -> Env | None:
    """Return the variables behind a branch that leaves in attributes of `self` what was there, and
    numbers of what that is made for, which nothing may read from there on; None for another.
    """
    if frame.kind != "forward" or not frame.translator.specialised:
        return None
    changed = {
        key: (start.values.get(key), value)
        for key, value in after.values.items()
        if not (key in start.values and value.equals(start.values[key]))
    }
    attributes = {key: pair for key, pair in changed.items() if key.startswith("self.")}
    values = local_values(frame), local_values(frame, body)
    same = [
        key
        for key, (before, now) in attributes.items()
        if before is not None and _same(before, now, *values)
    ]
    counts = [key for key, (before, now) in attributes.items() if _counts(key, before, now, frame)]
    if not same or len(same) + len(counts) != len(attributes) or _stores_more(body, changed):
        return None
    unread: dict[str, Value] = {
        key: Unread(f"{key}, which a longer text changes") for key in counts
    }
    return Env(start.values | unread)


def begins_with_a_number(start: Env, after: Env, frame: Frame) -> bool:
    """Whether an attribute that a branch gives the text's length began as a number that no config
    says: a table of that length has fewer rows than there are positions, in some checkpoint.
    """
    return any(
        isinstance(before := _before(key, start.values.get(key), frame), Known)
        and type(before.value) is int
        and _counts(key, before, now, frame)
        for key, now in after.values.items()
        if key.startswith("self.") and now is not start.values.get(key)
    )


def makes_first(start: Env, after: Env, frame: Frame) -> bool:
    """Whether a branch of a forward gives `self` an attribute that nothing else has made: a new model
    takes it, and each call of generated code is the first.
    """
    if frame.kind != "forward" or not frame.translator.specialised or frame.cls is None:
        return False
    new = {key.removeprefix("self.") for key in after.values.keys() - start.values.keys()}
    return any(f"self.{key}" in after.values and not frame.cls.has(key) for key in new)


def _same(
    before: Value, now: Value, values: dict[str, ast.expr], values_now: dict[str, ast.expr]
) -> bool:
    """Whether two values are of one class and the same code, variables written out."""
    if type(before) is not type(now) or not isinstance(before, Code) or not isinstance(now, Code):
        return False
    one = WrittenOut(values).visit(deepcopy(before.expr))
    return ast.dump(one) == ast.dump(WrittenOut(values_now).visit(deepcopy(now.expr)))


def _counts(key: str, before: Value | None, now: Value, frame: Frame) -> bool:
    """Whether an attribute was a number of the config, or none, and is one that the text has."""
    before = _before(key, before, frame)
    return before is not None and before.is_static and type(now) is Code and not now.transposed


def _before(key: str, known: Value | None, frame: Frame) -> Value | None:
    """Return what an attribute of `self` was, or was made."""
    made = {} if frame.cls is None else frame.cls.attributes
    return known or made.get(key.removeprefix("self."))


def _stores_more(body: list[ast.stmt], changed: dict[str, tuple[Value | None, Value]]) -> bool:
    """Whether anything but new variables and attributes is assigned."""
    plain = all(
        isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name) for item in body
    )
    names = [key for key, (before, _) in changed.items() if not key.startswith("self.") and before]
    return not plain or bool(names)
