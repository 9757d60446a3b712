"""Recognise Mamba 2's scan where modeling code writes it out, chunk by chunk, inside a method.

There is neither a function to call again nor a loop: a stretch of statements begins with the
softplus of the steps and ends with their block. It is the op when the op makes of variables that
the stretch reads, in some order, one that it leaves, in every call that was seen. How the steps are
bounded, which need not show in a call, its calls of `clamp` say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations
from types import SimpleNamespace
from typing import Any

import torch

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.recognise.scans.scan_loops import Match, matched_blocks
from onboard.analysis.recognise.scans.watch import LoopCall, stretches_of
from onboard.analysis.spec_blocks import Block
from onboard.ops.library import op_sources
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME

_MOST = 500
"""Ways to read a stretch's variables that are tried."""


def stretch_forms() -> dict[str, str]:
    """Return the expressions of ops that modeling code may write out, by op."""
    found = {op: source.written_out_as for op, source in op_sources().items()}
    return {op: form for op, form in found.items() if form}


def stretch_blocks(recordings: Sequence[Recording], file: str) -> list[Block]:
    """Return a block for each stretch of statements that is a canonical op."""
    return matched_blocks(recordings, file, match_stretch, stretch=True)


def match_stretch(calls: Sequence[LoopCall]) -> Match | None:
    """Return which op the calls of one stretch are; None when they are none."""
    first = calls[0]
    statements = stretches_of(first.owner, first.loop.method)[first.loop.index]
    bounds = bounds_of(statements)
    if bounds is None:
        return None
    for op in stretch_forms():
        for arguments in islice(_arguments(statements, first), _MOST):
            for result in _results(first, arguments):
                match = Match(op, 0, arguments, (), result, None, False, 0.0)
                errors = [_error(match, bounds, call) for call in calls]
                if worst(errors) < SAME:
                    return replace(match, error=worst(errors))
    return None


def bounds_of(statements: Sequence[ast.stmt]) -> tuple[ast.expr, ast.expr] | None:
    """Return the least and the largest step that a stretch's only `clamp` allows; None where
    several calls do.
    """
    calls = [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".clamp", ".clip"))
    ]
    if len(calls) > 1:
        return None
    given: dict[str, ast.expr] = {}
    for node in calls:
        of_torch = ast.unparse(node.func).startswith("torch.")
        given = dict(zip(("min", "max"), node.args[1 if of_torch else 0 :], strict=False))
        given |= {item.arg: item.value for item in node.keywords if item.arg is not None}
    infinite = ast.parse('float("inf")', mode="eval").body
    return given.get("min", ast.Constant(0.0)), given.get("max", infinite)


def _arguments(statements: Sequence[ast.stmt], call: LoopCall) -> Iterator[tuple[str, ...]]:
    """Yield variables that may be x, A, B, C, D, dt, dt_bias and the number of groups, unless that
    is one.
    """
    read = {
        ast.unparse(node)
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    floats = {
        key: value
        for key, value in call.before.items()
        if key in read and isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    sequences = [key for key, value in floats.items() if value.dim() == 3]
    for dt, x, B, C in permutations(sequences, 4):
        heads, size = floats[dt].shape[2], floats[B].shape[2]
        if floats[B].shape != floats[C].shape or floats[x].shape[2] % heads:
            continue
        vectors = [key for key, value in floats.items() if value.shape == (heads,)]
        numbers = [key for key, value in call.numbers.items() if key in read and type(value) is int]
        divide = [key for key in numbers if _divides(call.numbers[key], heads, size)]
        for A, D, dt_bias in permutations(vectors, 3):
            for groups in (*((key,) for key in divide), ()):
                yield x, A, B, C, D, dt, dt_bias, *groups


def _divides(number: int, *sizes: int) -> bool:
    return number > 0 and not any(size % number for size in sizes)


def _results(call: LoopCall, arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield variables that a stretch leaves which are like x."""
    x = call.before[arguments[0]]
    for key, value in call.after.items():
        like_x = isinstance(value, torch.Tensor) and value.shape == x.shape
        if like_x and key.isidentifier() and not _is_same(value, call.before.get(key)):
            yield key


def _is_same(one: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and torch.equal(one, other)


def _error(match: Match, bounds: tuple[ast.expr, ast.expr], call: LoopCall) -> float:
    names = {"self": SimpleNamespace(**{_plain(key): each for key, each in call.numbers.items()})}
    tensors, groups = match.arguments[:7], match.arguments[7:]
    try:
        least, most = (eval(ast.unparse(bound), {"float": float}, names) for bound in bounds)
        values = dict(zip(("x", "A", "B", "C", "D", "dt", "dt_bias"), tensors, strict=True))
        given = {key: call.before[name] for key, name in values.items()}
        given |= {"groups": call.numbers[groups[0]] if groups else 1, "least": least, "most": most}
        actual = eval(stretch_forms()[match.op], {"torch": torch}, {**given, "chunk_size": 8})
    except REFUSED:
        return float("inf")  # another stretch, with variables of these shapes
    expected = call.after.get(match.result)
    if not isinstance(expected, torch.Tensor) or actual.shape != expected.shape:
        return float("inf")
    return rmse_ratio(actual, expected) if bool(expected.any()) else float("inf")


def _plain(key: str) -> str:
    return key.removeprefix("self.")
