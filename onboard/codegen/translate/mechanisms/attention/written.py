"""What modeling code does with attention's scores, operator by operator and call by call."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import nn

from onboard.analysis.source import find_method, module_source, multiplies
from onboard.codegen.translate.language.args import Args, is_static_call, plain_call
from onboard.codegen.translate.language.forms import TRIANGLE, ZEROS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.program.inline import inline
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    name,
)
from onboard.codegen.translate.language.values import NONE, Code, Items, Mask, Value
from onboard.codegen.translate.mechanisms import numbers
from onboard.codegen.translate.mechanisms.attention.biases import KeyBias
from onboard.codegen.translate.mechanisms.attention.products import added, call_of, product
from onboard.codegen.translate.mechanisms.attention.scores import (
    SOFTMAXES,
    Scores,
    Weights,
    capped,
    combined,
    handed,
    method,
    softmax,
    taken,
)
from onboard.codegen.translate.mechanisms.attention.windows import of_mask
from onboard.codegen.translate.mechanisms.layouts.one_head import (
    is_of_one_head,
    with_head,
    without_head,
)
from onboard.codegen.translate.mechanisms.masks.score_bounds import (
    BOUNDING,
    bounds_nothing,
    is_bound,
    is_clamp,
)

_FUNCTIONS = (
    torch.bmm,
    torch.matmul,
    *SOFTMAXES,
    torch.tanh,
    torch.where,
    *BOUNDING,
    torch.baddbmm,
    torch.masked_fill,
    torch.einsum,
)


def _of_products_alone(cls: type, args: Args, frame: Frame) -> Value | None:
    """Return what a module that only multiplies makes of queries and keys, or of weights and values;
    None where it makes something else, or of something else.
    """
    found = find_method(cls, "forward") if multiplies(cls) else None
    if found is None:
        return None
    given = Args([NONE, *args.positional], args.keywords, args.stars)
    source = module_source(found[0].__module__)
    result = inline(frame.translator, found[1], source, given, frame.cls or frame.caller)
    attends = any(isinstance(item, Scores) for item in (*args.positional, result))
    return result if attends else None


def without_weights(value: Value) -> Value:
    """Return what a function returns without attention's weights, which canonical ops do not
    give.
    """
    match value:
        case Scores(normed=True) | Weights():
            return NONE
        case Items() | Output():
            return value.mapped(without_weights)
    return value


class WrittenAttention(Mechanism):
    """Attention that modeling code writes out."""

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Products of queries and keys, of weights and values; scores that are scaled, biased,
        masked.
        """
        if isinstance(op, ast.MatMult):
            left = taken(left) if isinstance(left, Weights) else left
            if isinstance(left, Scores) and left.normed:
                return _attended(left, right, frame)
            return product(left, right, ast.BinOp(left.code(), op, right.code()))
        _refuse_handed(left, right)
        sides = [side for side in (left, right) if isinstance(side, Scores)]
        if not sides or not all(side.attends for side in sides):
            return None
        left, right = (numbers.of_unpacked_sizes(side, frame) for side in (left, right))
        bare = [
            replace(side, masked=False) if isinstance(side, Code) else side
            for side in (left, right)
        ]
        codes = [
            ast.Constant(None) if isinstance(side, Mask | KeyBias) else side.code() for side in bare
        ]
        return combined(op, left, right, ast.BinOp(codes[0], op, codes[1]))

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """PyTorch's functions for all of these."""
        if function is torch.zeros and not is_static_call(function, args):
            return replace(plain_call(expr, args), form=ZEROS)
        attends = all(item.attends for item in args.positional if isinstance(item, Scores))
        if function not in _FUNCTIONS or not attends or is_static_call(function, args):
            return None
        if function in (torch.matmul, torch.bmm, torch.einsum):
            given = [taken(x) if isinstance(x, Weights) else x for x in args.positional]
            args = replace(args, positional=given)
        match args.positional:
            case [Scores(normed=True) as weights, value] if function in (torch.matmul, torch.bmm):
                if isinstance(value, Code) and is_of_one_head(weights, value, frame):
                    return _attended(weights, value, frame)
            case [Scores(causal=True, normed=False) as scores, *bounds] if bounds_nothing(
                function, Args(bounds, args.keywords, []), frame
            ):
                return scores
            case [Scores(normed=False) as scores, *bounds] if not bounds_nothing(
                function, Args(bounds, args.keywords, []), frame
            ) and is_clamp(function):
                if _is_of_weights(scores):
                    return None  # a router's, say
                raise Untranslatable("attention whose scores have bounds, which no op of it has")
        return with_window(call_of(function, args, unmasked_call(expr, args)), frame)

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """A module that is a softmax, or that only multiplies what it is given."""
        match callee, args.positional:
            case Instance(classes=(cls,)), [first, *_] if cls is nn.Softmax:
                return with_window(softmax(first), frame)
            case Instance(classes=(cls,), expr=expr), [Scores() as scores] if cls is nn.Tanh:
                return capped(scores, unmasked_call(expr, args)) if scores.attends else None
            case Instance(classes=(cls,)), [_, _]:
                return _of_products_alone(cls, args, frame)
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Products, methods of scores, and of biases to which they are added."""
        if attr in ("matmul", "bmm") and isinstance(owner, Code) and len(args.positional) == 1:
            both = Args([owner, *args.positional], args.keywords, args.stars)
            return self.call(getattr(torch, attr), attribute(name("torch"), attr), both, frame)
        if isinstance(owner, Scores) and (owner.causal and is_bound(attr) or is_clamp(attr)):
            both = Args([owner, *args.positional], args.keywords, args.stars)
            return self.call(getattr(torch, attr), attribute(name("torch"), attr), both, frame)
        if isinstance(owner, Scores) and owner.attends:
            return with_window(method(owner, attr, args, unmasked_method(owner, attr, args)), frame)
        if isinstance(owner, KeyBias) and attr == "baddbmm":
            keys = ("batch1", "batch2")
            first, second = (
                args.keywords.get(key) or args.positional[i] for i, key in enumerate(keys)
            )
            return added(owner, first, second, args.keywords)
        return None

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """No part of weights that a function has returned."""
        _refuse_handed(owner)
        return None

    def own_attribute(
        self, cls: ClassState, attr: str, path: ast.expr, frame: Frame
    ) -> Value | None:
        """A buffer that is a causal mask of zeros and ones."""
        match cls.attributes.get(attr):
            case Code(static=static, optional=optional) if frame.kind == "forward" and _is_triangle(
                cls, attr, frame
            ):
                return Code(path, static, optional=optional, form=TRIANGLE)
        return None

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """There are as many queries as keys: generated code has no cache of its own."""
        parts = node.test.values if _is_and(node.test) else [node.test]
        square = [_asks_for_square(part, frame) for part in parts]
        if not any(square):
            return None
        others = [part for part, asks in zip(parts, square, strict=True) if not asks]
        known = {frame.evaluate(part).truth() for part in others}
        return False if False in known else None if None in known else True

    def returned(self, value: Value) -> Value | None:
        """Nothing of attention's weights, or what they are made of where they are all there is."""
        if isinstance(value, Scores) and value.normed and (weights := handed(value)) is not None:
            return weights
        changed = without_weights(value)
        return None if changed.equals(value) else changed


def _is_of_weights(scores: Scores) -> bool:
    """Whether a product is one with weights of the module."""
    assert scores.key is not None
    names = {each.id for each in ast.walk(scores.key.code()) if isinstance(each, ast.Name)}
    return names == {"self"}


def _refuse_handed(*values: Value) -> None:
    """Refuse whatever is done to weights that a function has returned, but for their product."""
    if any(isinstance(value, Weights) for value in values):
        raise Untranslatable("attention's weights, of which no product with values is made")


def _attended(weights: Scores, value: Value, frame: Frame) -> Value | None:
    """Return weights times values, of one head where these have no dimension of heads."""
    if not isinstance(value, Code) or not is_of_one_head(weights, value, frame):
        return product(weights, value, weights.expr)
    weights, value = with_head(weights, value)
    attended = product(weights, value, weights.expr)
    return without_head(attended) if isinstance(attended, Code) else None


def _is_and(test: ast.expr) -> TypeGuard[ast.BoolOp]:
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)


def _asks_for_square(test: ast.expr, frame: Frame) -> bool:
    """Whether a test is `scores.shape[2] == scores.shape[3]` of attention's scores."""
    match test:
        case ast.Compare(
            left=ast.Subscript(value=ast.Attribute(value=ast.Name(id=one), attr="shape")) as rows,
            ops=[ast.Eq()],
            comparators=[
                ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id=other), attr="shape")
                ) as columns
            ],
        ) if one == other and isinstance(frame.env.values.get(one), Scores):
            return {ast.unparse(rows.slice), ast.unparse(columns.slice)} in (
                {"2", "3"},
                {"-2", "-1"},
            )
    return False


def with_window(value: Value | None, frame: Frame) -> Value | None:
    """Return attention's weights with the window of their mask, as the class that attends has it."""
    if isinstance(value, Scores) and value.normed and value.beyond is not None:
        return replace(value, window=of_mask(value.beyond, frame).code())
    return value


def unmasked_call(expr: ast.expr, args: Args) -> ast.expr:
    """Return a call's code with scores as they are before the mask."""
    return plain_call(expr, Args(_unmasked(args), args.keywords, [])).expr


def unmasked_method(owner: Scores, attr: str, args: Args) -> ast.expr:
    """Return the code of a method's call with scores as they are before the mask."""
    return plain_call(
        attribute(owner.expr, attr), Args(_unmasked(args), args.keywords, args.stars)
    ).expr


def _unmasked(args: Args) -> list[Value]:
    bare = [
        replace(item, masked=False) if isinstance(item, Code) else item for item in args.positional
    ]
    return [item for item in bare if not isinstance(item, Mask)]


def _is_triangle(cls: ClassState, attr: str, frame: Frame) -> bool:
    """Whether a buffer is a causal mask of zeros and ones in all modules of this class."""
    buffers = [module._buffers.get(attr) for module in frame.translator.modules_of(cls.cls)]
    return bool(buffers) and all(
        buffer is not None and _is_triangular(buffer) for buffer in buffers
    )


def _is_triangular(buffer: torch.Tensor) -> bool:
    rows, columns = buffer.shape[-2:] if buffer.dim() > 1 else (0, 1)
    return rows == columns and bool((buffer == torch.ones_like(buffer).tril()).all())
