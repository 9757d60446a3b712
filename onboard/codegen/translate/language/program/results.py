"""What a translated function returns, and what its callers know of that."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from onboard.analysis.behaviour.left_at_classes import BETWEEN_LAYERS
from onboard.codegen.translate.language.args import spread
from onboard.codegen.translate.language.expressions.decisions import local_values
from onboard.codegen.translate.language.frame import Frame, Program
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.holes import Hole, Result, fill
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.argument_facts import (
    default_fact,
    default_nodes,
    handed_apart,
)
from onboard.codegen.translate.language.sequences import sequence_of_all
from onboard.codegen.translate.language.state import Routine
from onboard.codegen.translate.language.statements.assignments.between_layers import (
    made_for_each_text,
)
from onboard.codegen.translate.language.statements.assignments.between_methods import (
    BETWEEN_METHODS,
    handed_to,
    made_first,
)
from onboard.codegen.translate.language.statements.assignments.own_entries import OwnEntries
from onboard.codegen.translate.language.trees import cleanup
from onboard.codegen.translate.language.trees.syntax import name, same_code, stored_names
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Half,
    Items,
    Known,
    Mapping,
    Mask,
    Unread,
    Value,
    untransposed,
)
from onboard.hf.old.given_logits import given_by


def finish_routine(routine: Routine, frame: Frame) -> None:
    """Put into a routine what its frame has come to: results, statements, parameters in use."""
    facts = routine.argument_facts = handed_apart(routine.node, routine.argument_facts)
    if frame.cls is not None and routine.node.name == "forward":
        frame.returns = [(statement, _as_seen(value)) for statement, value in frame.returns]
    routine.static = bool(frame.returns) and all(value.is_static for _, value in frame.returns)
    routine.shape, routine.holes = finish_returns(frame)
    routine.body = cleanup.clean(frame.out)
    used = cleanup.free_names(routine.body)
    routine.parameters = [key for key in facts if key in used]
    if "position_ids" in used - facts.keys():
        routine.parameters.append("position_ids")  # counted here by transformers
    if BETWEEN_LAYERS in used:
        if frame.cls is not None and frame.cls.cls is type(frame.translator.model):
            routine.body = made_for_each_text(routine.body)
        else:
            routine.parameters.append(BETWEEN_LAYERS)
    if BETWEEN_METHODS in used and routine.node.name != "forward":
        routine.parameters.append(BETWEEN_METHODS)
    if made := made_first(used, routine.node.name == "forward"):
        routine.body = cleanup.clean([*made, *routine.body])


def _as_seen(value: Value) -> Value:
    """Return what modules give to one another of a value."""
    return value.as_seen() if isinstance(value, Code) else value.mapped(_as_seen)


def finish_returns(frame: Frame) -> tuple[Value, int]:
    """Give every return statement its code; return the shape of what a caller gets and its run-time
    parts.
    """
    if not frame.returns:
        return NONE, 0
    values = [value for _, value in frame.returns]
    for value in values:
        if isinstance(value, Unread):
            value.code()  # which raises: only one of several results may be without a translation
    shape, holes = _shape(values, 0)
    for statement, value in frame.returns:
        parts = _run_time_parts(shape, value)
        codes = [part.code() for part in parts]
        statement.value = (
            codes[0] if len(codes) == 1 else ast.Tuple(codes, ast.Load()) if codes else None
        )
    return shape, holes


def with_logits_alone(value: Value, frame: Frame) -> Value:
    """Return a model's output without what other losses and other modalities read."""
    match _summed(value, frame), given_by(type(frame.translator.model)).place:
        case Output(fields={"logits": logits}), None:
            return _of_logits(logits)
        case Items(items=items), int() as place if place < len(items):
            return _of_logits(items[place])
        case Mapping(items=items), str() as place if place in items:
            return _of_logits(items[place])
        case Code() | Unread(), "":
            return _of_logits(value)
    return value


def _summed(value: Value, frame: Frame) -> Value:
    """Return the items that a tuple begins with which is `(logits, ...) + others`."""
    match value:
        case Code(expr=ast.Name(id=variable)):
            expr = local_values(frame).get(variable, value.expr)
        case Code(expr=expr):
            pass
        case _:
            return value
    match expr:
        case ast.BinOp(left=ast.Tuple(elts=items), op=ast.Add()):
            return Items(tuple(map(Code, items)))
    return value


def _of_logits(logits: Value) -> Output:
    if isinstance(logits, Output):  # one of transformers, in a tuple with something else
        logits = logits.fields.get("logits", logits)
    if isinstance(logits, Unread):
        logits.code()  # which raises what is in the way
    return Output({"logits": logits})


def given_back(frame: Frame) -> Value | None:
    """Return what a function returns whichever way it goes, where that is nothing but what it was
    given.

    It may have decided which part of its arguments to take, and have taken all of them each time.
    """
    values = [value for _, value in frame.returns]
    nodes = [node for statement in frame.out for node in ast.walk(statement)]
    if any(
        isinstance(node, ast.Expr | ast.AugAssign | ast.For | ast.While) or _is_store_inside(node)
        for node in nodes
    ):
        return None
    assigned = stored_names(frame.out)
    if len(values) < 2 or not all(values[0].equals(value) for value in values):
        return None
    return (
        values[0]
        if isinstance(values[0], Code | Items) and _is_given(values[0], assigned)
        else None
    )


def _is_store_inside(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store)


def _is_given(value: Value, assigned: set[str]) -> bool:
    match value:
        case Items(items=items):
            return all(_is_given(item, assigned) for item in items)
        case Mapping(items=items):
            return all(_is_given(item, assigned) for item in items.values())
        case Code(expr=ast.Name(id=variable), transposed=False):
            return variable not in assigned
    return isinstance(value, Mask | Known | Config | OwnEntries)


def in_terms_of(value: Value, arguments: dict[str, Value]) -> Value:
    """Return what a call gets that is given its arguments back."""
    match value:
        case Code(expr=ast.Name(id=parameter)):
            return arguments[parameter]
    return value.mapped(lambda part: in_terms_of(part, arguments))


def called(
    function: ast.expr,
    routine: Routine,
    bound: dict[str, Value],
    program: Program,
    keeps_order: bool = False,
) -> Value:
    """Return the value of a call of translated code.

    Args:
        function: the code of what is called.
        routine: its translation.
        bound: the arguments, by parameter.
        program: what is translated: its model may count `position_ids` by itself.
        keeps_order: dimensions of the only argument that are swapped are so in the result.
    """
    if routine.given is not None:
        return in_terms_of(routine.given, spread(bound) | bound)
    arguments, bound = [], spread(bound) | bound
    for key in routine.omitting(bound):
        given = key in bound and not _is_counted(routine, key, bound[key], program)
        value = bound[key] if given else _absent(routine, key, program, function)
        value = untransposed(value) if keeps_order else value
        arguments.append(value.passed(routine.argument_facts.get(key)))
    code = ast.Call(function, arguments, [])
    if routine.holes > 1 or routine.holes and routine.handed_back:
        return Result(code, routine.shape, routine.holes)
    if routine.holes == 0:
        return routine.shape
    known = program.specialised and routine.static
    return fill(routine.shape, [Code(code, static=known, transposed=keeps_order)])


def _is_counted(routine: Routine, key: str, value: Value, program: Program) -> bool:
    """Whether a call hands on None for positions, which what it calls then counts: what is read by
    this name there are these.
    """
    fact = routine.argument_facts.get(key)
    none_there = fact is not None and fact.equals(NONE) and value.equals(NONE)
    return key == "position_ids" and program.counts_positions and none_there


def _absent(routine: Routine, key: str, program: Program, function: ast.expr) -> Value:
    """Return what a call of `function` that leaves a parameter out passes for it."""
    if key == "position_ids" and program.counts_positions:
        return Code(name("position_ids"))
    if key == BETWEEN_LAYERS:
        return Code(name(BETWEEN_LAYERS))
    if key == BETWEEN_METHODS:
        return Code(handed_to(function))
    default = default_nodes(routine.node).get(key)
    return NONE if default is None else default_fact(default)


def _shape(values: list[Value], index: int) -> tuple[Value, int]:
    """Return the common shape of several results: what all know stays known, the rest are holes."""
    first = values[0]
    if unread := [value for value in values if isinstance(value, Unread)]:
        return unread[0], index
    if all(isinstance(value, OwnEntries) for value in values):
        return first.fact(), index
    if isinstance(first, Known | Mask | Config) and all(first.equals(value) for value in values):
        return first, index
    parts: list[Value] = []
    match first:
        case Items(items=(Half(), Half())):
            return Hole(index, form=first.items[0].whole.form), index + 1  # type: ignore[attr-defined]
        case Items(items=items) if all(
            isinstance(v, Items) and len(v.items) == len(items) for v in values
        ):
            for column in zip(*(value.items for value in values), strict=True):  # type: ignore[attr-defined]
                part, index = _shape(list(column), index)
                parts.append(part)
            return replace(first, items=tuple(parts)), index
        case Output(fields=fields) if all(
            isinstance(v, Output) and v.fields.keys() == fields.keys() for v in values
        ):
            for key in fields:
                part, index = _shape([value.fields[key] for value in values], index)  # type: ignore[attr-defined]
                parts.append(part)
            classes = {value.cls for value in values}  # type: ignore[attr-defined]
            cls = classes.pop() if len(classes) == 1 else None
            return Output(dict(zip(fields, parts, strict=True)), cls), index
        case Mapping(items=items) if items and all(
            isinstance(v, Mapping) and v.items.keys() == items.keys() for v in values
        ):
            for key in items:
                part, index = _shape([value.items[key] for value in values], index)  # type: ignore[attr-defined]
                parts.append(part)
            return Mapping(dict(zip(items, parts, strict=True))), index
    form = sequence_of_all(values) or (first.form if isinstance(first, Code) else None)
    kept = (
        isinstance(first, Code)
        and first.returned
        and all(type(value) is type(first) for value in values)
    )
    like = first if isinstance(first, Code) and kept else None
    optional = any(
        value.equals(NONE) or (isinstance(value, Code) and value.optional) for value in values
    )
    return Hole(index, form, optional, like), index + 1


def _run_time_parts(shape: Value, value: Value) -> list[Value]:
    match shape, value:
        case Hole(like=Code()), Code(expr=expr):
            return [Code(expr)]
        case Hole(), _:
            return [value]
        case Items(items=shapes), Items(items=items):
            return [
                part for item in zip(shapes, items, strict=True) for part in _run_time_parts(*item)
            ]
        case Output(fields=shapes), Output(fields=fields):
            return [part for key in shapes for part in _run_time_parts(shapes[key], fields[key])]
        case Mapping(items=shapes), Mapping(items=items):
            return [part for key in shapes for part in _run_time_parts(shapes[key], items[key])]
    return []


def same_call(first: Value, second: Value) -> bool:
    """Whether two classes' forwards are called by the same code and give results of one shape."""
    match first, second:
        case Result(), Result():
            return same_code(first.expr, second.expr) and first.shape.equals(second.shape)
        case Items(items=a), Items(items=b):
            return len(a) == len(b) and all(map(same_call, a, b))
    return first.equals(second)


def same_code_of(results: Sequence[Value]) -> Code | None:
    """Return calls that are the same code and give a tensor here, a tuple there, as one; None for
    others.

    What is given is as in the original where all of it exists at run time; so the code behind tells
    the cases apart.
    """
    codes = [item.expr for item in results if isinstance(item, Code | Result) and _is_plain(item)]
    same = len(codes) == len(results) and all(same_code(codes[0], item) for item in codes)
    return Code(codes[0], form=sequence_of_all(results)) if same else None


def _is_plain(result: Code | Result) -> bool:
    """Whether a call gives one tensor, or a tuple of nothing but run-time parts."""
    if isinstance(result, Code):
        return not result.transposed and result.form is None
    items = result.shape.items if isinstance(result.shape, Items) else ()
    return (
        not result.transposed
        and bool(items)
        and all(isinstance(item, Hole) and not item.form for item in items)
    )
