"""Masks that code other than attention reads: an indexer keeps its scores causal with attention's
own mask.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.expressions.items import index_code
from onboard.codegen.translate.language.forms import CHUNKED, SQUARE
from onboard.codegen.translate.language.frame import Frame, Mechanism, Sides
from onboard.codegen.translate.language.object_values import Global, MaskMaker
from onboard.codegen.translate.language.program.uses import Ones
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    constant,
    mentions,
    name,
    renamed,
)
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
    either,
)


@dataclass(frozen=True, eq=False)
class Seen(Mask):
    """A causal mask of truth values: true of the keys that a query sees."""


@dataclass(frozen=True, eq=False)
class Windowed(Mask):
    """A causal mask that hides what lies before the config's window, too."""

    beyond: int = 0
    """How many keys more than the window's it shows."""

    def same_as(self, other: Mask) -> bool:
        """Whether both show as many keys."""
        return isinstance(other, Windowed) and self.beyond == other.beyond

    def joined(self, other: Value) -> Value:
        """Return it where both are the same; what only one use has a window of cannot be told."""
        return self if self.equals(other) else either(self, other)


@dataclass(frozen=True, eq=False)
class Hidden(Mask):
    """A causal mask of truth values, or ones: of the keys that a query does not see."""


@dataclass(frozen=True, eq=False)
class Drawn(Mask):
    """Such a mask that is written out as a triangle: the numbers that it is are there to be read."""

    expr: ast.expr
    lazy = True

    def code(self) -> ast.expr:
        """Return the triangle."""
        return self.expr

    def mentions(self, variable: str) -> bool:
        """Whether its code reads a variable."""
        return mentions(self.expr, variable)

    def renamed(self, old: str, new: str) -> Value:
        """Return it with another name for a variable."""
        return replace(self, expr=renamed(self.expr, old, new))


@dataclass(frozen=True, eq=False)
class DrawnSeen(Drawn, Seen):
    """A triangle of ones where a query sees a key."""


@dataclass(frozen=True, eq=False)
class DrawnHidden(Drawn, Hidden):
    """A triangle of ones where a query does not see a key."""


@dataclass(frozen=True, eq=False)
class Total(Value):
    """The sum of a mask [batch, 1, queries, keys] that is added: far below zero, but for a text of one
    token, whose query sees all keys under a causal mask, too.
    """


@dataclass(frozen=True, eq=False)
class LastRow(Value):
    """What the last query's scores get of a mask [batch, keys]: zeros, for it sees all keys."""


def made(kinds: Sequence[str]) -> Value:
    """Return what a function returns that makes masks of these kinds, as `analysis.masks` names
    them.
    """
    values: dict[str, Value] = {
        "added": Mask(whole=True),
        "square": Mask(),
        "window": Windowed(),
        "window+1": Windowed(1),
        "seen": Seen(),
        "hidden": Hidden(),
        "ones": Ones(),
    }
    return values[kinds[0]] if len(kinds) == 1 else Items(tuple(values[kind] for kind in kinds))


def mask_attribute(attr: str) -> Value | None:
    """Return an attribute of an attention mask that is known without one: transformers' eager masks
    are added.
    """
    return Global(torch.float32, attribute(name("torch"), "float32")) if attr == "dtype" else None


def filled(owner: Code, value: ast.expr, window: ast.expr | None = None) -> Code:
    """Return `x.masked_fill(hidden, value)` for x [..., queries, keys] of one text's tokens: those
    after each query.

    With a window, those that lie so far back, too.
    """
    expr = owner.code()
    ones = call(attribute(name("torch"), "ones_like"), expr, dtype=attribute(name("torch"), "bool"))
    hidden: ast.expr = call(attribute(ones, "triu"), ast.Constant(1))
    if window is not None:
        before = call(attribute(ones, "tril"), ast.UnaryOp(ast.USub(), window))
        hidden = ast.BinOp(hidden, ast.BitOr(), before)
    return Code(call(attribute(expr, "masked_fill"), hidden, value))


def masked(scores: Code) -> Code:
    """Return `scores + mask` for scores [..., queries, keys] of one text's tokens: later keys get
    the least number.
    """
    return filled(scores, constant(float("-inf")))


def same_chunk(keywords: dict[str, Value], frame: Frame) -> Code:
    """Return which tokens lie in one chunk, [sequence, sequence], for
    `create_chunked_causal_mask(**keywords)`.
    """
    if not {"config", "inputs_embeds"} <= keywords.keys():
        raise Untranslatable("a mask of chunks without a config")
    text = keywords["inputs_embeds"].code()
    length = ast.Subscript(attribute(text, "shape"), ast.Constant(1), ast.Load())
    positions = call(attribute(name("torch"), "arange"), length, device=attribute(text, "device"))
    size = attribute(keywords["config"].code(), "attention_chunk_size")
    variable = frame.fresh("chunks")
    frame.bind(variable, Code(ast.BinOp(positions, ast.FloorDiv(), size)))
    rows = call(attribute(name(variable), "unsqueeze"), ast.Constant(1))
    return Code(ast.Compare(rows, [ast.Eq()], [name(variable)]), form=CHUNKED)


def stands_at_run_time(value: Value) -> Code | None:
    """Return a dict of masks, one of which exists at run time, as the code of a dict; None for any
    other value.
    """
    masks = value.items.values() if isinstance(value, Mapping) else ()
    chunked = [isinstance(item, Code) and item.form == CHUNKED for item in masks]
    if not isinstance(value, Mapping) or not any(chunked):
        return None
    parts = [NONE if isinstance(item, Mask) else item for item in masks]
    keys: list[ast.expr | None] = [ast.Constant(key) for key in value.items]
    return Code(ast.Dict(keys, [each.code() for each in parts]), form=f"dict of {CHUNKED}")


_CASTS = {"to", "float", "half", "type", "type_as"}
_NEW = {"torch.zeros", "torch.ones", "torch.empty"}
OF_MASKS = {
    "to",
    "bool",
    "type",
    "type_as",
    "float",
    "contiguous",
    "view",
    "expand",
    "expand_as",
    "unsqueeze",
}
"""Methods that leave a mask the mask that it is."""
_KEEP_SHAPES = {"to", "bool", "type", "contiguous"}


class CausalMasks(Mechanism):
    """Causal masks, which the canonical ops have by themselves."""

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """What a query sees is what is not hidden from it."""
        if not isinstance(operand, Seen | Hidden) or not isinstance(op, ast.Invert):
            return None
        if isinstance(operand, Drawn):
            other = DrawnHidden if isinstance(operand, DrawnSeen) else DrawnSeen
            return other(ast.UnaryOp(op, operand.expr))
        return Hidden() if isinstance(operand, Seen) else Seen()

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """A tensor to which a mask is added is filled behind each query."""
        if isinstance(op, ast.Mult) and isinstance(left, Hidden) and _is_one(right):
            return left
        if isinstance(op, ast.Sub) and _is_one(left) and isinstance(right, DrawnSeen):
            return DrawnHidden(ast.BinOp(left.code(), op, right.expr))
        added = isinstance(op, ast.Add) and isinstance(right, Mask)
        added = added and not isinstance(right, Windowed)
        return masked(left) if added and isinstance(left, Code) and not left.static else None

    def compare(self, op: ast.cmpop, left: Value, right: Value) -> Value | None:
        """The keys that a text's last token sees are all; a mask's sum is not zero."""
        match left, right:
            case Total(), Known(value=0):
                return (
                    Known(isinstance(op, ast.NotEq)) if isinstance(op, ast.Eq | ast.NotEq) else None
                )
            case LastRow(), Known(value=float() | int() as number) if number < 0:
                return Ones() if isinstance(op, ast.Gt | ast.GtE) else None
        return None

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """What is known of a mask without one."""
        if isinstance(owner, Mask) and owner.whole and attr == "shape":
            sizes = Unread("a size of a mask")
            return Items((sizes, Known(1), sizes, sizes))
        return mask_attribute(attr) if isinstance(owner, Mask) else None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Functions that make masks, as the analysis found, and `torch.triu(full(least), 1)`."""
        match [*args.positional, *args.keywords.values()]:
            case [Code(form=str() as form) as made, *rest] if (
                function in (torch.tril, torch.triu) and form == SQUARE
            ):
                return _drawn(made, function.__name__, Args(rest, {}, []))
            case [Code() as made, first] if function is torch.triu and frame.kind != "init":
                return Mask() if _hides_later(made, first, frame) else None
        if function is nn.Transformer.generate_square_subsequent_mask:
            return Mask()
        if function is torch.ones:
            return _square(plain_call(expr, args), args, frame)
        return _found(function.__name__, frame) if inspect.isfunction(function) else None

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """Methods that make masks."""
        return _found(attr, frame)

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """The rows and columns of a triangle that are those of the text; the last row."""
        if isinstance(owner, Mask) and owner.whole:
            last = ast.unparse(node.slice).strip("()").replace(" ", "") == ":,0,-1,:"
            return LastRow() if last and type(owner) is Mask else None
        if not isinstance(owner, Drawn):
            return None
        return replace(
            owner, expr=ast.Subscript(owner.expr, index_code(node.slice, frame), ast.Load())
        )

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Functions of transformers that make masks."""
        match callee:
            case MaskMaker(chunked=True):
                return same_chunk(args.keywords, frame)
            case MaskMaker(padding=padding):
                return PaddingMask() if padding else Mask(whole=frame.translator.specialised)
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """One of a dict of masks, or a mask in another shape or dtype, is a mask."""
        match owner, args.positional:
            case Code() as ones, [] if attr == "tril_" and _is_ones(ones, frame, "torch.bool"):
                return Seen()
            case Code() as ones, [] if attr == "tril_" and _is_ones(ones, frame, "torch.float32"):
                return DrawnSeen(call(attribute(ones.code(), "tril")))
        if attr == "new_ones" and type(owner) is Code:
            return _square(plain_call(attribute(owner.code(), attr), args), args, frame)
        if (drawn := _drawn(owner, attr, args)) is not None:
            return drawn
        match owner:
            case Mask(whole=True) if attr == "dim":
                return Known(4)
            case Mask(whole=True) if attr == "sum" and type(owner) is Mask:
                return None if args.positional or args.keywords else Total()
            case Mask(whole=True) if attr in OF_MASKS - _KEEP_SHAPES:
                return replace(owner, whole=False)
            case Mask() | LastRow() if attr == "get" or attr in OF_MASKS:
                return owner
            case Mapping(items=items) if (
                attr == "get" and items and all(isinstance(v, Mask) for v in items.values())
            ):
                match args.positional:
                    case [Known(value=key), *_] if key is not None:
                        return None
                return PaddingMask()
        return None

    def joined(self, sides: Sides) -> Value | None:
        """A mask on one side and ones on the other: nothing may read it."""
        values = [value for value, _ in sides]
        masks = all(isinstance(value, Mask | Ones) for value in values)
        ones = any(isinstance(value, Ones) for value in values)
        return Unread("attention that reads its mask") if masks and ones else None

    def stored(self, value: Value) -> Value | None:
        """A dict of masks, one of which exists at run time."""
        return stands_at_run_time(value)


def _is_ones(made: Code, frame: Frame, dtype: str) -> bool:
    """Whether a tensor of a dtype was made of ones, or truth values that are true, for queries and
    keys of one text.
    """
    match WrittenOut(local_values(frame)).visit(deepcopy(made.expr)):
        case ast.Call(func=function, args=[_, _, ast.expr() as queries, ast.expr() as keys]) as new:
            sizes = (queries, keys)
            counted = not any(isinstance(each, ast.Constant | ast.Starred) for each in sizes)
            dtypes = [ast.unparse(item.value) for item in new.keywords if item.arg == "dtype"]
            return ast.unparse(function) == "torch.ones" and counted and dtypes == [dtype]
    return False


def _square(made: Value, args: Args, frame: Frame) -> Value | None:
    """Return `ones(length, length)` as what a mask may be made of."""
    sizes = [item.code() for item in args.positional] if len(args.positional) == 2 else []
    if not frame.translator.specialised or not isinstance(made, Code):
        return None
    square = len({ast.dump(size) for size in sizes}) == 1 and not isinstance(sizes[0], ast.Constant)
    return replace(made, form=SQUARE) if square else None


def _drawn(owner: Value, attr: str, args: Args) -> Value | None:
    """Return a triangle of such a matrix, in another shape or dtype too, as the mask it may be."""
    match owner, attr, args.positional:
        case Drawn(), _, _ if attr in OF_MASKS:
            return replace(owner, expr=plain_call(attribute(owner.expr, attr), args).expr)
        case Code(form=str() as form), "tril", [] if form == SQUARE:
            return DrawnSeen(plain_call(attribute(owner.expr, attr), args).expr)
        case Code(form=str() as form), "triu", [Known(value=1)] if form == SQUARE:
            return DrawnHidden(plain_call(attribute(owner.expr, attr), args).expr)
    return None


def _hides_later(made: Code, first: Value, frame: Frame) -> bool:
    """Whether what is left of `made` from its diagonal `first` on hides the keys after each query:
    the queries are the last of [queries, keys] tokens, or there are as many of both.
    """
    written = WrittenOut(local_values(frame))
    whole, diagonal = (written.visit(deepcopy(item.code())) for item in (made, first))
    size, least = _filled(whole) if isinstance(whole, ast.Call) else (None, None)
    if size is None or least is None or not is_least(least):
        return False
    match size:
        case ast.Tuple(elts=[*texts, queries, keys]) | ast.List(elts=[*texts, queries, keys]):
            if isinstance(queries, ast.Constant) or any(ast.unparse(each) != "1" for each in texts):
                return False
            last = Counter({ast.dump(keys): 1})
            last.subtract({ast.dump(queries): 1, "": -1})
            return _sum_of(diagonal) == last
    return False


def _sum_of(expr: ast.expr, sign: int = 1) -> Counter[str]:
    """Return how often each part of a sum occurs in it; "" is the number one."""
    match expr:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            parts = _sum_of(left, sign)
            parts.update(_sum_of(right, sign if isinstance(op, ast.Add) else -sign))
            return parts
        case ast.Constant(value=int() as number):
            return Counter({"": sign * number})
    return Counter({ast.dump(expr): sign})


def _filled(made: ast.Call) -> tuple[ast.expr | None, ast.expr | None]:
    """Return size and number of `torch.full(size, number)`, or of a new tensor that is filled."""
    match made:
        case ast.Call(func=ast.Attribute(attr="fill_", value=new), args=[number]):
            return _size_of_new(new), number
        case ast.Call(func=ast.Attribute(attr=cast, value=ast.Call() as inner)) if cast in _CASTS:
            return _filled(inner)
        case ast.Call(func=inner, args=[size, number, *_]) if ast.unparse(inner) == "torch.full":
            return size, number
    return None, None


def _size_of_new(new: ast.expr) -> ast.expr | None:
    match new:
        case ast.Call(func=ast.Attribute(attr=cast, value=inner)) if cast in _CASTS:
            return _size_of_new(inner)
        case ast.Call(func=function, args=[size, *_]) if ast.unparse(function) in _NEW:
            return size
    return None


def _is_one(value: Value) -> bool:
    return isinstance(value, Known) and value.value == 1


def is_least(number: ast.expr) -> bool:
    """Whether a number is so low that its exponential is zero beside any score's."""
    text = ast.unparse(number)
    if text in ("float('-inf')", "-float('inf')", "-torch.inf", "-math.inf"):
        return True
    try:
        return bool(ast.literal_eval(number) <= -1e4)
    except (ValueError, TypeError):
        return False


def _found(function: str, frame: Frame) -> Value | None:
    kinds = frame.translator.findings.masks.get(function) if frame.translator.knows_masks else None
    if kinds is None:
        return None
    if isinstance(mask := made(kinds), Windowed):
        frame.translator.windowed.add(owner_of(frame))
    return mask


def owner_of(frame: Frame) -> ClassState:
    """Return the class whose code makes a mask; code of no class counts as the model's own."""
    program = frame.translator
    return frame.cls or frame.caller or program.states[type(program.model)]
