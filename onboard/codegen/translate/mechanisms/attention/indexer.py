"""The lightning indexer: top_k(sum over heads of weight * relu(q k^T * scale) + mask) becomes the
canonical op.

It begins like attention, so that its scores are known as `Scores` up to the relu, and from there on
as `IndexScores`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.trees.syntax import (
    attribute,
    constant,
    name,
    op,
    renamed,
    same_code,
)
from onboard.codegen.translate.language.values import Code, Known, Mask, Unread, Value
from onboard.codegen.translate.mechanisms.attention.scores import Scores, capped
from onboard.codegen.translate.mechanisms.attention.written import unmasked_call, unmasked_method

_RECTIFIERS = (nn.functional.relu, torch.relu)
_FUNCTIONS = (*_RECTIFIERS, torch.matmul, torch.topk)


@dataclass(frozen=True, eq=False)
class IndexScores(Scores):
    """Rectified scores [batch, queries, heads, keys] of keys that all heads share, or their
    weighted sum over heads.
    """

    weights: ast.expr | None = None
    """[batch, queries, heads]; None: not summed yet."""
    attends = False

    def made_of(self) -> list[ast.expr]:
        """Return the code of what it is made of."""
        return [*super().made_of(), *([] if self.weights is None else [self.weights])]

    def renamed(self, old: str, new: str) -> Scores:
        """Return the scores with another name for a variable in what they are made of."""
        changed = super().renamed(old, new)
        assert isinstance(changed, IndexScores)
        return replace(
            changed, weights=None if self.weights is None else renamed(self.weights, old, new)
        )


@dataclass(frozen=True, eq=False)
class AtMost(Code):
    """`torch.sym_min(limit, size)`."""

    limit: ast.expr | None = None
    size: ast.expr | None = None


def call_of(obj: object, args: Args, expr: ast.expr) -> Value | None:
    """Return the result of a function of torch that an indexer is made of; None for others."""
    match args.positional:
        case [Scores() as scores] if obj in _RECTIFIERS and not isinstance(scores, IndexScores):
            return _rectified(scores, expr)
        case [Code() as weights, IndexScores(weights=None, masked=False) as scores] if (
            obj is torch.matmul
        ):
            inner = _unsqueezed(weights)
            return None if inner is None else replace(scores, expr=expr, weights=inner)
        case [IndexScores() as scores, top] if obj is torch.topk:
            return _chosen(scores, top, args)
    return None


def combined(operator: ast.operator, left: Value, right: Value) -> IndexScores | None:
    """Return `left + mask` for the scores of an indexer; None for anything else."""
    if isinstance(left, IndexScores) and type(right) is Mask and isinstance(operator, ast.Add):
        return replace(left, masked=True, causal=True)
    return None


def _rectified(scores: Scores, expr: ast.expr) -> IndexScores | None:
    """Return `relu(scores)`, None where the keys are not the same for all heads or something was
    added.
    """
    key = None if scores.key is None else _shared(scores.key.expr)
    if key is None or capped(scores, scores.expr) is None:
        return None
    return IndexScores(expr, query=scores.query, key=Code(key), scale=scores.scale)


def _shared(expr: ast.expr) -> ast.expr | None:
    """Return k of `k.transpose(-1, -2).float().unsqueeze(1).transpose(-1, -2)`, keys that have no
    heads.
    """
    match expr:
        case ast.Call(func=ast.Attribute(value=inner, attr="transpose")) if _numbers(expr) == [
            -2,
            -1,
        ]:
            return _turned_back(inner)
    return None


def _turned_back(expr: ast.expr) -> ast.expr | None:
    match expr:
        case ast.Call(func=ast.Attribute(value=inner, attr="unsqueeze")) if _numbers(expr) == [1]:
            inner = _narrow(inner)
            if (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and inner.func.attr == "transpose"
            ):
                return _narrow(inner.func.value) if _numbers(inner) == [-2, -1] else None
    return None


def _numbers(expr: ast.Call) -> list[int]:
    """Return a call's arguments, sorted, when all are integers."""
    try:
        return sorted(int(ast.literal_eval(item)) for item in expr.args)
    except (ValueError, TypeError):
        return []


def _narrow(expr: ast.expr) -> ast.expr:
    """Return a tensor without its cast to float32, which the op does by itself."""
    match expr:
        case ast.Call(func=ast.Attribute(value=inner, attr="float"), args=[]):
            return inner
    return expr


def _unsqueezed(weights: Code) -> ast.expr | None:
    """Return w of `w.unsqueeze(-2)`."""
    match weights.expr:
        case ast.Call(func=ast.Attribute(value=inner, attr="unsqueeze")) as called if _numbers(
            called
        ) == [-2]:
            return inner if not weights.transposed else None
    return None


def method(scores: IndexScores, attr: str, args: Args, expr: ast.expr) -> Value | None:
    """Return what a method of an indexer's scores gives; None where that is nothing known."""
    if attr == "squeeze" and scores.weights is not None and args.positional[0].equals(Known(-2)):
        return replace(scores, expr=expr)
    if attr == "topk":
        return _chosen(scores, args.positional[0], args)
    return None


def _chosen(scores: IndexScores, top: Value, args: Args) -> Output | None:
    """Return the result of `topk(top, dim=-1)` of masked scores, whose values nothing may read."""
    if not (
        scores.causal
        and scores.weights is not None
        and args.keywords.get("dim", Known(-1)).equals(Known(-1))
    ):
        return None
    assert scores.query is not None
    assert scores.key is not None
    query = _narrow(scores.query.code())
    scale = scores.scale or constant(1.0)
    called = ast.Call(
        op("torch_lightning_indexer"),
        [query, scores.key.expr, scores.weights, _limit(scores, top), scale],
        [],
    )
    return Output({"values": Unread("the scores of an indexer's keys"), "indices": Code(called)})


def _limit(scores: IndexScores, top: Value) -> ast.expr:
    """Return the number of keys to choose; that there may be fewer is known to the op."""
    keys = ast.Subscript(attribute(scores.expr, "shape"), constant(-1), ast.Load())
    match top:
        case AtMost(limit=ast.expr() as limit, size=ast.expr() as size) if same_code(size, keys):
            return limit
    return top.code()


def at_most(args: Args, expr: ast.expr) -> AtMost:
    """Return `torch.sym_min(first, second)`."""
    first, second = args.positional
    limit, size = (first, second) if first.is_static else (second, first)
    return AtMost(expr, limit=limit.code(), size=size.code())


class LightningIndexer(Mechanism):
    """Scores that choose keys."""

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Scores with a mask."""
        return combined(op, left, right)

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Rectified scores, their sum over heads, the best of them."""
        if function is min and len(args.positional) == 2 and not args.static():
            return at_most(args, plain_call(attribute(name("torch"), "sym_min"), args).expr)
        return (
            call_of(function, args, unmasked_call(expr, args)) if function in _FUNCTIONS else None
        )

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Methods of such scores."""
        if not isinstance(owner, IndexScores):
            return None
        return method(owner, attr, args, unmasked_method(owner, attr, args))
