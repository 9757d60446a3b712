"""Evaluate expressions partially."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onboard.codegen.translate.language import config_values
from onboard.codegen.translate.language.expressions import calls, half_tests, objects
from onboard.codegen.translate.language.expressions.comprehensions import (
    comprehension,
    dict_comprehension,
)
from onboard.codegen.translate.language.expressions.conditional import conditional
from onboard.codegen.translate.language.expressions.decisions import (
    decided_by_part,
    same_number,
)
from onboard.codegen.translate.language.expressions.items import item_of, slice_code
from onboard.codegen.translate.language.expressions.module_lists import (
    joined,
    parts_of,
    slice_modules,
)
from onboard.codegen.translate.language.forms import LIST, TENSORS, TUPLE, TUPLE_OR_NOT
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import attributes
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.object_values import (
    Closure,
    Global,
    Instance,
    MaskMaker,
    ModuleList,
    ModuleRows,
    Repeated,
    SetApart,
)
from onboard.codegen.translate.language.sequences import joined_lists, sequence_of, sequence_of_all
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Items,
    Known,
    Mapping,
    Mask,
    PaddingMask,
    Unread,
    Value,
    untransposed,
)

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}


def evaluate(node: ast.expr, frame: Frame) -> Value:
    """Return what is known of an expression's value; statements that it needs first are emitted."""
    handler = _NODES.get(type(node))
    if handler is None:
        raise Untranslatable(f"{type(node).__name__} at {frame.source.location(node)}")
    return handler(node, frame)


def condition(value: Value) -> Value:
    """Return a value of which only the truth matters: `a and True` is `a`, `a or False` too."""
    match value:
        case Code(expr=ast.BoolOp(op=op, values=[*values, ast.Constant(value=bool() as last)])):
            if last is isinstance(op, ast.And):
                return condition(
                    replace(value, expr=values[0] if len(values) == 1 else ast.BoolOp(op, values))
                )
    return value


def _constant(node: ast.Constant, frame: Frame) -> Value:
    return Known(node.value)


def _name(node: ast.Name, frame: Frame) -> Value:
    if node.id in frame.env.values:
        return frame.items.get(node.id, frame.env.values[node.id])
    if node.id in frame.source.namespace:
        return objects.from_namespace(frame.source.namespace[node.id], node.id, frame)
    if hasattr(builtins, node.id):
        return Global(getattr(builtins, node.id), name(node.id))
    raise Untranslatable(f"the unknown name {node.id} at {frame.source.location(node)}")


def _attribute(node: ast.Attribute, frame: Frame) -> Value:
    return objects.get_attribute(frame.settle(frame.evaluate(node.value)), node.attr, frame)


def _subscript(node: ast.Subscript, frame: Frame) -> Value:
    owner = frame.settle(frame.evaluate(node.value))
    if (kept := frame.mechanisms.subscript(owner, node.slice, frame)) is not None:
        return kept
    if isinstance(node.slice, ast.Slice) and isinstance(owner, ModuleList):
        return slice_modules(owner, node.slice, frame)
    if isinstance(node.slice, ast.Slice) and isinstance(owner, ModuleRows):
        return replace(
            owner, expr=ast.Subscript(owner.expr, slice_code(node.slice, frame), ast.Load())
        )
    return item_of(owner, frame.evaluate(node.slice), node, frame)


def _slice(node: ast.Slice, frame: Frame) -> Value:
    bounds = [
        NONE if item is None else frame.evaluate(item)
        for item in (node.lower, node.upper, node.step)
    ]
    if all(isinstance(bound, Known) for bound in bounds):
        return Known(slice(*(bound.value for bound in bounds)))  # type: ignore[attr-defined]
    return Code(slice_code(node, frame), all(each.is_static for each in bounds))


def _call(node: ast.Call, frame: Frame) -> Value:
    return calls.evaluate_call(node, frame)


def _binop(node: ast.BinOp, frame: Frame) -> Value:
    left, right = frame.evaluate(node.left), frame.evaluate(node.right)
    match node, left, right:
        # [x] + others
        case ast.BinOp(left=ast.List(), op=ast.Add()), Items(items=items), Code(expr=others):
            return Code(
                ast.List(
                    [*(each.code() for each in items), ast.Starred(others, ast.Load())], ast.Load()
                )
            )
    if isinstance(node.op, ast.Add) and (whole := joined_lists(left, right)) is not None:
        return whole
    return binary(node.op, left, right, frame)


def binary(op: ast.operator, left: Value, right: Value, frame: Frame) -> Value:
    """Return `left op right`."""
    if unread := [side for side in (left, right) if isinstance(side, Unread)]:
        return unread[0]
    if (known_as := frame.mechanisms.binary(op, left, right, frame)) is not None:
        return known_as
    if isinstance(left, Known) and isinstance(right, Known) and type(op) in _BINARY:
        try:
            return Known(_BINARY[type(op)](left.value, right.value))
        except TypeError as error:  # in a branch that no config with these values takes
            raise Untranslatable(f"an operation on {left.value!r} and {right.value!r}") from error
    if isinstance(op, ast.Add) and right.equals(Known(0)) and isinstance(left, Code):
        return left
    if isinstance(op, ast.Add) and left.equals(Known(0)) and isinstance(right, Code):
        return right
    if isinstance(op, ast.Add) and isinstance(left, Items) and isinstance(right, Items):
        return Items(left.items + right.items, kind=left.kind)
    if isinstance(op, ast.Add) and left.equals(NONE) and isinstance(right, Items):
        return Unread("a tuple of outputs nobody asks for, to which code adds all the same")
    if isinstance(op, ast.Add) and any(isinstance(side, ModuleList) for side in (left, right)):
        before, after = parts_of(left), parts_of(right)
        if before is not None and after is not None:
            return joined((*before, *after))
    match op, left, right:
        case ast.Mult(), Items(items=(Known(value=None) as item,)), Code() | Known():
            return Repeated(item, ast.BinOp(ast.List([item.code()], ast.Load()), op, right.code()))
    transposed = [isinstance(side, Code) and side.transposed for side in (left, right)]
    if all(transposed) or (any(transposed) and any(side.is_static for side in (left, right))):
        sides = [
            untransposed(side) if lies else side
            for side, lies in zip((left, right), transposed, strict=True)
        ]
        return Code(ast.BinOp(sides[0].code(), op, sides[1].code()), transposed=True)
    base = left.code()
    if isinstance(op, ast.Pow) and isinstance(left, Known) and left.value < 0:
        base = ast.UnaryOp(ast.USub(), Known(-left.value).code())  # -2 ** x would be -(2 ** x)
    longer = _added(left, right) if isinstance(op, ast.Add) else None
    static = left.is_static and right.is_static
    return Code(ast.BinOp(base, op, right.code()), static, form=longer)


def _added(left: Value, right: Value) -> str | None:
    """Return the form of a sum: a tuple that is longer, or a number, as what is added to it."""
    if sequence_of(left) == TUPLE_OR_NOT and sequence_of(right) is None:
        return None
    both = sequence_of_all((left, right))
    return both if both == TENSORS else sequence_of(left)


def _unary(node: ast.UnaryOp, frame: Frame) -> Value:
    operand = frame.evaluate(node.operand)
    if (known_as := frame.mechanisms.unary(node.op, operand)) is not None:
        return known_as
    if isinstance(node.op, ast.Not):
        if (decided := config_values.denied(operand, frame)) is not None:
            return decided
        operand = attributes.asked(operand, frame)
        known = operand.truth()
        operand = condition(operand)
        return (
            Code(ast.UnaryOp(node.op, operand.code()), operand.is_static)
            if known is None
            else Known(not known)
        )
    if isinstance(operand, Known):
        return Known(-operand.value if isinstance(node.op, ast.USub) else +operand.value)
    return Code(ast.UnaryOp(node.op, operand.code()), operand.is_static)


def _boolop(node: ast.BoolOp, frame: Frame) -> Value:
    """`and` stops at the first false value, `or` at the first true one; what is decided leaves no
    code.
    """
    stop = isinstance(node.op, ast.Or)
    left: list[Value] = []
    for item in node.values:
        value = frame.evaluate(item)
        decided = attributes.asked(value, frame).truth()
        said = any(type(other) is Code and other.equals(value) for other in left)
        if (decided is None or decided is stop) and not said:
            left.append(value)
        if decided is stop:
            break
    else:
        if not left or value.truth() is not None:
            left.append(value)
    if stop is False and any(isinstance(value, Known) and not value.value for value in left):
        return Known(False)  # evaluation of conditions has no side effects
    if len(left) == 1:
        return left[0]
    whole = Code(
        ast.BoolOp(node.op, [value.code() for value in left]), all(each.is_static for each in left)
    )
    told = decided_by_part(whole, frame) if _is_handed_on(whole, frame) else None
    return whole if told is None else Known(told)


def _is_handed_on(whole: Code, frame: Frame) -> bool:
    """Whether a condition, known at run time alone, is no test that execution decides by itself."""
    assert isinstance(whole.expr, ast.BoolOp)
    truths = all(isinstance(part, ast.Compare | ast.UnaryOp) for part in whole.expr.values)
    return truths and not whole.static and frame.translator.specialised and frame.kind == "forward"


def _compare(node: ast.Compare, frame: Frame) -> Value:
    left = frame.evaluate(node.left)
    if isinstance(left, SetApart):
        left.code()  # which raises: it may be None here, and something there
    if len(node.ops) > 1:
        rest = [frame.evaluate(item) for item in node.comparators]
        return Code(
            ast.Compare(left.code(), node.ops, [each.code() for each in rest]),
            all(each.is_static for each in (left, *rest)),
        )
    op, right = node.ops[0], _constants(frame.evaluate(node.comparators[0]))
    if isinstance(left, Known) and isinstance(right, Known):
        return Known(_COMPARE[type(op)](left.value, right.value))
    if isinstance(op, ast.Eq) and (same := attributes.are_equal(left, right, frame)) is not None:
        return same
    if (decided := config_values.compared(op, left, right, frame)) is not None:
        return decided
    if (decided := config_values.is_entry(op, left, right, frame)) is not None:
        return decided
    if (decided := half_tests.is_of_a_half(op, left, right, frame)) is not None:
        return decided
    if (known_as := frame.mechanisms.compare(op, left, right)) is not None:
        return known_as
    specialised = frame.translator.specialised
    if specialised and isinstance(op, ast.Eq | ast.NotEq) and is_device(left) and is_device(right):
        return Known(isinstance(op, ast.Eq))  # the model lies on one
    if specialised and isinstance(op, ast.Eq | ast.NotEq) and same_number(left, right, frame):
        return Known(isinstance(op, ast.Eq))
    if isinstance(op, ast.Eq) and isinstance(left, Global) and isinstance(right, Global):
        return Known(left.obj == right.obj)
    if isinstance(op, ast.Is | ast.IsNot) and isinstance(right, Known) and right.value is None:
        if isinstance(left, PaddingMask):
            return Known(isinstance(op, ast.Is))
        if isinstance(left, Output) and left.told:
            left = left.fields[left.told]
        optional = isinstance(left, Instance) and left.optional
        if optional:
            return Code(ast.Compare(left.code(), [op], [right.code()]), static=True)
        maybe_none = isinstance(left, Code) and (left.static or left.optional)
        if not maybe_none:
            return Known(isinstance(op, ast.IsNot))
    match op, left, right:
        case ast.In() | ast.NotIn(), Known(value=str() as key), (
            Mapping(items=entries) | Global(obj=dict() as entries)
        ):
            return Known((key in entries) is isinstance(op, ast.In))
        case ast.In() | ast.NotIn(), _, Global(obj=dict() as table) if specialised and all(
            isinstance(key, str) for key in table
        ):
            right = Code(ast.Tuple([ast.Constant(key) for key in table], ast.Load()), static=True)
    static = right.is_static and (left.is_static or isinstance(left, Instance))
    return Code(ast.Compare(left.code(), [op], [right.code()]), static)


def is_device(value: Value) -> bool:
    """Whether a value is the device of a tensor."""
    match value:
        case Code(expr=ast.Attribute(attr="device"), static=False):
            return True
    return False


def _constants(value: Value) -> Value:
    """Return a tuple of constants as one."""
    items = value.items if isinstance(value, Items) else ()
    known = tuple(item.value for item in items if isinstance(item, Known))
    return Known(known) if items and len(known) == len(items) else value


def _sequence(node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
    if any(isinstance(item, ast.Starred) for item in node.elts):
        return _starred(node, frame)
    items = tuple(frame.settle(frame.evaluate(item)) for item in node.elts)
    return Items(items, kind=_kind(node))


def _starred(node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
    """Return a sequence with `*parts` in it."""
    items: list[Value] = []
    out: list[ast.expr] = []
    opaque = False
    for item in node.elts:
        value = frame.settle(frame.evaluate(item.value if isinstance(item, ast.Starred) else item))
        if isinstance(item, ast.Starred) and not isinstance(value, Items):
            opaque = True
            out.append(ast.Starred(value.code(), ast.Load()))
            continue
        new = (
            value.items if isinstance(item, ast.Starred) and isinstance(value, Items) else (value,)
        )
        items.extend(new)
        out.extend(each.code() for each in new)
    return (
        Code(ast.Set(out) if isinstance(node, ast.Set) else type(node)(out, ast.Load()))
        if opaque
        else Items(tuple(items), kind=_kind(node))
    )


def _kind(node: ast.expr) -> str:
    return LIST if isinstance(node, ast.List) else TUPLE


def _dict(node: ast.Dict, frame: Frame) -> Value:
    keys = [None if key is None else frame.evaluate(key) for key in node.keys]
    values = [frame.settle(frame.evaluate(item)) for item in node.values]
    entries: dict[str, Value] = {}
    for key, value in zip(keys, values, strict=True):
        match key, value:
            case None, Mapping(items=items):
                entries.update(items)
            case None, config_values.Setting(value=dict()):
                entries.update(config_values.as_mapping(value, frame).items)
            case Known(value=str() as known), _:
                entries[known] = value
            case _:
                return _opaque_dict(keys, values)
    return Mapping(entries)


def _opaque_dict(keys: list[Value | None], values: list[Value]) -> Code:
    """Return a dict whose keys are known at run time only."""
    codes = [None if key is None else key.code() for key in keys]
    static = all(item.is_static for item in (*(key for key in keys if key is not None), *values))
    return Code(ast.Dict(codes, [each.code() for each in values]), static)


def _formatted(node: ast.JoinedStr, frame: Frame) -> Value:
    parts: list[ast.expr] = []
    static = True
    for item in node.values:
        if isinstance(item, ast.FormattedValue):
            value = frame.evaluate(item.value)
            static = static and value.is_static
            parts.append(ast.FormattedValue(value.code(), item.conversion, item.format_spec))
        else:
            parts.append(item)
    return Code(ast.JoinedStr(parts), static)


def _walrus(node: ast.NamedExpr, frame: Frame) -> Value:
    frame.bind(node.target.id, frame.settle(frame.evaluate(node.value)), node)
    return frame.env.values[node.target.id]


def _lambda(node: ast.Lambda, frame: Frame) -> Value:
    """Return a function; one without parameters that makes a mask is known as that."""
    if not (node.args.args or node.args.kwonlyargs) and isinstance(
        mask := frame.evaluate(node.body), Mask
    ):
        return MaskMaker(padding=isinstance(mask, PaddingMask))
    if not frame.translator.specialised:  # what a function makes of a mask, say, would be lost
        raise Untranslatable(f"a <lambda> at {frame.source.location(node)}")
    body: list[ast.stmt] = [ast.copy_location(ast.Return(node.body), node)]
    function = ast.FunctionDef("<lambda>", node.args, body, [], None, None)
    return Closure(ast.copy_location(function, node), frame.source, dict(frame.env.values), frame)


_NODES: dict[type[ast.expr], Callable[[Any, Frame], Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.Call: _call,
    ast.BinOp: _binop,
    ast.UnaryOp: _unary,
    ast.BoolOp: _boolop,
    ast.Compare: _compare,
    ast.IfExp: conditional,
    ast.Tuple: _sequence,
    ast.List: _sequence,
    ast.Set: _sequence,
    ast.Dict: _dict,
    ast.JoinedStr: _formatted,
    ast.NamedExpr: _walrus,
    ast.Lambda: _lambda,
    ast.ListComp: comprehension,
    ast.GeneratorExp: comprehension,
    ast.SetComp: comprehension,
    ast.DictComp: dict_comprehension,
}
