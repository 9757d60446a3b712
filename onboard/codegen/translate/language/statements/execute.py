"""Execute statements partially: known branches are taken, run-time statements are emitted."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, Literal

from onboard.codegen.translate.language.expressions import decisions
from onboard.codegen.translate.language.expressions.branch_types import narrowed
from onboard.codegen.translate.language.expressions.evaluate import binary, condition
from onboard.codegen.translate.language.expressions.half_tests import only_in_half
from onboard.codegen.translate.language.forms import COUNTED
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import attributes, changes, containers
from onboard.codegen.translate.language.statements import bindings, lists
from onboard.codegen.translate.language.statements.assignments.assign import (
    sets_by_name,
    store,
)
from onboard.codegen.translate.language.statements.assignments.own_attributes import Grows
from onboard.codegen.translate.language.statements.assignments.records_alone import only_records
from onboard.codegen.translate.language.statements.by_class import Differing, by_class
from onboard.codegen.translate.language.statements.first_calls import is_made_first
from onboard.codegen.translate.language.statements.joins import (
    joined_env,
    note_conditional,
    side_taken,
)
from onboard.codegen.translate.language.statements.loops.turn_by_turn import (
    execute_for,
    execute_while,
)
from onboard.codegen.translate.language.statements.loops.turns import (
    AWAY,
    GOES_ON,
    RAISES,
    RETURNS,
    leave,
)
from onboard.codegen.translate.language.statements.not_numbers import chosen_instead, chosen_items
from onboard.codegen.translate.language.statements.one_token import only_masks
from onboard.codegen.translate.language.statements.regrowth import (
    begins_with_a_number,
    makes_first,
    without_regrowth,
)
from onboard.codegen.translate.language.statements.same_sides import of_either_side
from onboard.codegen.translate.language.statements.short_texts import Side, of_values, short_texts
from onboard.codegen.translate.language.trees import selection, syntax
from onboard.codegen.translate.language.trees.casts import casts_alone
from onboard.codegen.translate.language.trees.mapped import each_mapped
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import NONE, Code, Mask, Unread, Value


@syntax.noted
def execute(statements: Sequence[ast.stmt], frame: Frame) -> str:
    """Execute statements; return how they end (`GOES_ON`, `RETURNS`, `RAISES`)."""
    for index, statement in enumerate(statements):
        if (left := frame.mechanisms.instead(statements[index:], frame)) is not None:
            return execute(left, frame)
        handler = _STATEMENTS.get(type(statement))
        if handler is None:
            raise Untranslatable(
                f"{type(statement).__name__} at {frame.source.location(statement)}"
            )
        frame.behind = statements[index + 1 :]
        try:
            ending = handler(statement, frame)
        except Differing as error:
            return execute(by_class(error, statements[index:], frame), frame)
        except Exception as error:
            syntax.note_place(error, frame.source.location(statement))
            if not only_records(statement, error, frame):
                raise
            continue
        if ending is not None:
            return str(ending)
        if (rest := frame.mechanisms.rest(statement, statements[index + 1 :], frame)) is not None:
            return execute([rest], frame)
    return GOES_ON


def _assign(node: ast.Assign, frame: Frame) -> None:
    if chosen_items(node, frame):
        return
    try:
        value = frame.evaluate(each_mapped(node))
    except Untranslatable as error:
        plain = all(isinstance(target, ast.Name | ast.Subscript) for target in node.targets)
        if frame.branches or not plain or isinstance(error, Differing):
            raise
        syntax.note_place(error, frame.source.location(node))
        value = Unread(syntax.with_place(error, str(error)), syntax.led_by(error, frame))
    for target in node.targets:
        store(target, value, frame, node)
        if isinstance(target, ast.Name) and isinstance(value, Code) and not value.static:
            value = frame.env.values[target.id]  # computed once for all names


def _ann_assign(node: ast.AnnAssign, frame: Frame) -> None:
    if node.value is not None:
        store(node.target, frame.evaluate(node.value), frame, node)


def _aug_assign(node: ast.AugAssign, frame: Frame) -> None:
    """A tensor changes in place, as other names for it see; all else is made anew, and positions."""
    old = frame.evaluate(ast.copy_location(syntax.as_load(node.target), node))
    operand = frame.settle(frame.evaluate(node.value))
    if containers.adds(node, operand, frame):
        return
    if isinstance(old, Unread) or frame.mechanisms.binary(node.op, old, operand, frame) is old:
        return
    if (
        isinstance(node.target, ast.Name)
        and node.target.id not in ("input_ids", "position_ids")  # who gave them reads them again
        and type(old) is Code
        and not (old.static or old.transposed or old.form in COUNTED)
    ):
        frame.emit(ast.AugAssign(name(node.target.id, store=True), node.op, operand.code()), node)
        return
    store(node.target, binary(node.op, old, operand, frame), frame, node)


def _expr(node: ast.Expr, frame: Frame) -> None:
    """Keep calls that work in place; everything else an expression statement does is
    bookkeeping.
    """
    kinds = (bindings.says, containers.calls_method, lists.append, sets_by_name)
    if any(executes(node.value, frame) for executes in kinds):
        return
    value = frame.evaluate(node.value)
    of_variable = isinstance(value, Mask) or isinstance(value, Code) and value.lazy
    match node.value, value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=variable))), _ if of_variable:
            if syntax.works_in_place(node.value):
                frame.env.values[variable] = value
        case _, Code(expr=ast.Call() as called) if syntax.works_in_place(called):
            frame.emit(ast.Expr(called), node)


def _return(node: ast.Return, frame: Frame) -> str:
    value = NONE if node.value is None else frame.evaluate(node.value)
    changes.give(frame.mechanisms.returned(value) or value, frame, node)
    return RETURNS


def _if(node: ast.If, frame: Frame) -> str | None:
    if frame.translator.specialised and casts_alone(node):
        execute(node.body, frame)  # which changes nothing where the test does not hold
        return None
    try:
        test = attributes.asked(frame.evaluate(node.test), frame)
    except Untranslatable:
        checks = syntax.only_raises(node.body) and not node.orelse
        if checks or bindings.only_says(node, frame):
            return None  # a check of arguments that generated code does not have
        if frame.translator.specialised and _alike_either_way(node, frame):
            return None
        if (told := frame.mechanisms.decided(node, frame)) is not None:
            return _decided(node, told, frame)
        raise
    decided = frame.mechanisms.decided(node, frame)
    decided, test = test.truth() if decided is None else decided, condition(test)
    if decided is None and frame.translator.specialised and not test.is_static:
        decided = decisions.decided_by_part(test, frame)
    if decided is not False and is_made_first(node, frame):
        return _first_call(node, frame)
    if decided is not None:
        return _decided(node, decided, frame)
    if chosen_instead(node, test, frame):
        return None
    if not test.is_static and (body := selection.always(node)) is not None:
        execute(body, frame)
        return None
    return _branch(node, test, frame)


def _alike_either_way(node: ast.If, frame: Frame) -> bool:
    """Take a branch whose sides leave the same, and no code, whatever its test is."""
    sides = [_side(body, frame) for body in (node.body, node.orelse)]
    if any(isinstance(side, Untranslatable) or side[0] or side[2] != GOES_ON for side in sides):
        return False
    (_, one, _), (_, other, _) = sides
    keys = one.values.keys() | other.values.keys()
    if not all(
        key in one.values and key in other.values and one.values[key].equals(other.values[key])
        for key in keys
    ):
        return False
    frame.env = one
    return True


def _decided(node: ast.If, outcome: bool, frame: Frame) -> str | None:
    """Take a side; one that would make a table anew is not taken, for `__init__` has made it."""
    before = frame.env.copy()
    emitted, returned = len(frame.out), len(frame.returns)
    try:
        ending = execute(node.body if outcome else node.orelse, frame)
    except Grows:
        if node.orelse:
            raise
        frame.env = before
        del frame.out[emitted:], frame.returns[returned:]
        return None
    return None if ending == GOES_ON else ending


def _branch(node: ast.If, test: Value, frame: Frame) -> str | None:
    """Keep both sides; where one has no translation, take this config's side and guard it."""
    if frame.translator.specialised and (chosen := _specialised(node, test, frame)) is not None:
        ending = execute(node.body if chosen else node.orelse, frame)
        return None if ending == GOES_ON else ending
    sides, behind = [], frame.behind
    for body, outcome in ((node.body, True), (node.orelse, False)):
        with narrowed(test, outcome, frame):
            sides.append(_side(body, frame))
    failed = [isinstance(side, Untranslatable) for side in sides]
    if isinstance(sides[0], Grows) and not node.orelse:
        _made_anew(node, frame)
        return None
    if any(failed):
        return _fold(node, test, sides, frame)
    (body, body_env, body_end), (orelse, else_env, else_end) = sides
    if test.is_static and (taken := side_taken(body_env, else_env, frame)) is not None:
        return _take_guarded(test, sides, taken, frame)
    may_grow = not test.is_static and not node.orelse and body_end == GOES_ON
    if may_grow and makes_first(frame.env, body_env, frame):
        return _first_call(node, frame)
    if may_grow and (known := without_regrowth(frame.env, body_env, body, frame)) is not None:
        frame.env = frame.env if _made_anew(node, frame) else known
        return None
    if not node.orelse and only_masks(test, body, frame.env, body_env):
        return _take((body, body_env, body_end), frame)
    if RAISES in (body_end, else_end):  # a check of the config, which transformers made already
        kept = (orelse, else_env, else_end) if body_end == RAISES else (body, body_env, body_end)
        return _take(kept, frame)
    if body_end in AWAY and else_end == GOES_ON:
        frame.emit(ast.If(test.code(), body, []), node)
        return _take((orelse, else_env, else_end), frame)
    if else_end in AWAY:
        frame.emit(ast.If(test.code(), body, orelse), node)
        if body_end in AWAY:
            return str(body_end if else_end == RETURNS else else_end)
        frame.env = body_env
        return None
    note_conditional(body_env, else_env, frame)
    joined = joined_env((body, body_env), (orelse, else_env), test, frame)
    if (same := of_either_side((body, orelse), behind, frame.env, joined)) is not None:
        frame.out.extend(same)
    else:
        frame.emit(syntax.if_statement(test.code(), body, orelse), node)
    frame.env = joined
    return None


def _specialised(node: ast.If, test: Value, frame: Frame) -> bool | None:
    """Return this config's side of a static test and guard it; None where that cannot be told."""
    if syntax.only_raises(node.orelse) and frame.cls is not None:
        return _is_for_none(test, frame)
    if syntax.only_raises(node.body):
        return None
    whole = decisions.decided_here(test, frame)
    return decisions.decided_by_part(test, frame) if whole is None else whole


def _is_for_none(test: Value, frame: Frame) -> Literal[False] | None:
    """Return False, and guard it, where no layer of this config passes a test that the others fail
    at: none gets there, the tests before have sorted out all; None where some do.
    """
    assert frame.cls is not None
    before = list(frame.cls.guards)
    if decisions.decided_here(test, frame) is False:
        return False
    frame.cls.guards[:] = before
    return None


def _side(body: list[ast.stmt], frame: Frame, remembers: bool = False) -> Any:
    if syntax.only_raises(body):
        return [], frame.env, RAISES
    count, before = len(frame.returns), frame.remembers
    ends = frame.turns[-1].ends if frame.turns else []
    ended = len(ends)
    frame.remembers = before or remembers
    env = frame.env.copy()
    try:
        with frame.branch(env) as statements:
            ending = execute(body, frame)
            return statements, frame.env, ending
    except Untranslatable as error:
        del frame.returns[count:], ends[ended:]
        fails = frame.translator.specialised and isinstance(error, syntax.NothingThere)
        return ([], env, RAISES) if fails else error
    finally:
        frame.remembers = before


def _take(side: Side, frame: Frame) -> str | None:
    statements, env, ending = side
    frame.out.extend(statements)
    frame.env = env
    return None if ending == GOES_ON else ending


def _fold(node: ast.If, test: Value, sides: list[Any], frame: Frame) -> str | None:
    if (kept := short_texts(node, test, sides, frame)) is not None:
        return _take(kept, frame)
    if not isinstance(sides[1], Untranslatable) and only_in_half(test, frame):
        return _take(sides[1], frame)
    if not test.is_static or all(isinstance(side, Untranslatable) for side in sides):
        raise of_values(node, sides)
    try:
        index = decisions.side_here(node, test, frame)
    except Untranslatable as error:
        reasons = dict.fromkeys(str(side) for side in sides if isinstance(side, Untranslatable))
        raise Untranslatable(f"{'; '.join(reasons)}, under {error}") from error
    if isinstance(sides[index], Untranslatable):
        raise sides[index]
    return _take_guarded(test, sides, index, frame)


def _take_guarded(test: Value, sides: list[Any], index: int, frame: Frame) -> str | None:
    expr = test.code()
    frame.translator.guard(expr if index == 0 else ast.UnaryOp(ast.Not(), expr), frame)
    return _take(sides[index], frame)


def _first_call(node: ast.If, frame: Frame) -> str | None:
    side = _side(node.body, frame, remembers=True)
    if isinstance(side, Untranslatable):
        raise side
    return _take(side, frame)


def _made_anew(node: ast.If, frame: Frame) -> bool:
    """Take a branch that makes a table as long as the text, where the one that is there may have
    fewer rows than the config has positions.
    """
    side = _side(node.body, frame, remembers=True) if frame.translator.specialised else None
    if not isinstance(side, tuple) or not begins_with_a_number(frame.env, side[1], frame):
        return False
    _take(side, frame)
    return True


def _for(node: ast.For, frame: Frame) -> str | None:
    return execute_for(node, frame, execute)


def _while(node: ast.While, frame: Frame) -> str | None:
    return execute_while(node, frame, execute)


def _with(node: ast.With, frame: Frame) -> str | None:
    """Execute the body: the contexts of modeling code (no_grad, autocast) do not matter in
    inference.
    """
    ending = execute(node.body, frame)
    return None if ending == GOES_ON else ending


def _raise(node: ast.Raise, frame: Frame) -> str:
    return RAISES


def _nothing(node: ast.stmt, frame: Frame) -> None:
    return None


_STATEMENTS: dict[type[ast.stmt], Callable[[Any, Frame], str | None]] = {
    ast.Assign: _assign,
    ast.AnnAssign: _ann_assign,
    ast.AugAssign: _aug_assign,
    ast.Expr: _expr,
    ast.Return: _return,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.Break: leave,
    ast.Continue: leave,
    ast.With: _with,
    ast.Raise: _raise,
    ast.Assert: _nothing,
    ast.Pass: _nothing,
    ast.Delete: containers.deletes,
    ast.Import: bindings.bring,
    ast.ImportFrom: bindings.bring,
    ast.Global: bindings.begin,
    ast.Nonlocal: _nothing,  # whose names are those of the function around
    ast.FunctionDef: bindings.define,
}
