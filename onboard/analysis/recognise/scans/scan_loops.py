"""Recognise recurrences that modeling code writes as a loop inside a method.

There is no function to call again. So loops are watched: the variables before a loop and after it
are noted whenever it runs, and it is a canonical op when the op makes of some of the former, in
some order, what is among the latter, in every call that was seen.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from types import CodeType
from typing import Any

import torch

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.recognise.scans.loop_bodies import filled_in, is_guarded, read_in
from onboard.analysis.recognise.scans.watch import Loop, LoopCall, loops_of
from onboard.analysis.spec_blocks import Block, make_block
from onboard.ops.library import op_sources
from onboard.ops.written_forms import LoopForm
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME

_MOST = 500
"""Ways to read a loop's variables that are tried."""


def loop_forms() -> dict[str, tuple[LoopForm, ...]]:
    """Return the ways in which modeling code may write ops as loops."""
    found = {op: source.looped_as for op, source in op_sources().items()}
    return {op: forms for op, forms in found.items() if forms}


@dataclass(frozen=True)
class Match:
    """How a loop is an op."""

    op: str
    way: int
    """Which of its forms."""
    arguments: tuple[str, ...]
    """Variables, or attributes `self.x`."""
    turned: tuple[str, ...]
    """Which of these and of the result are [batch, channels or heads, sequence, ...], unlike the
    op's.
    """
    result: str
    """The variable that holds the result."""
    joined: int | None
    """The dimension along which a list, which the result is then, makes up the whole."""
    stacked: bool
    """The tensors of the list lack that dimension."""
    error: float


def loop_blocks(recordings: Sequence[Recording], file: str) -> list[Block]:
    """Return a block for each loop in a method that is a canonical op."""
    return matched_blocks(recordings, file, match_loop, stretch=False)


def matched_blocks(
    recordings: Sequence[Recording],
    file: str,
    match_calls: Callable[[list[LoopCall]], Match | None],
    *,
    stretch: bool,
) -> list[Block]:
    """Return a block for each loop, or each stretch of statements, that a function says is an op."""
    found: dict[Loop, list[LoopCall]] = {}
    for call in [call for recording in recordings for call in recording.loops]:
        if call.loop.stretch == stretch:
            found.setdefault(call.loop, []).append(call)
    matches = {
        loop: match for loop, calls in found.items() if (match := match_calls(calls)) is not None
    }
    return [_block(loop, match, file) for loop, match in matches.items()]


def _block(loop: Loop, match: Match, file: str) -> Block:
    settings = {key: value for key, value in asdict(match).items() if key != "error"}
    return make_block(
        class_name=loop.class_name,
        kind="loop",
        path="",
        source=f"{file}:{loop.line}",
        parameters={
            **settings,
            "arguments": list(match.arguments),
            "turned": list(match.turned),
            "method": loop.method,
            "index": loop.index,
        },
        evidence=[f"probe: {match.op} fits with rmse ratio {match.error:.1e}"],
    )


def match_loop(calls: list[LoopCall]) -> Match | None:
    """Return which op the calls of one loop are; None when they are none, or when what they show may
    not be all that the loop does.
    """
    first = calls[0]
    node = loops_of(first.owner, first.loop.method)[first.loop.index]
    if is_guarded(node) or any(call.guarded for call in calls) or not _goes_on(calls):
        return None
    for op, way, form in _ways():
        for arguments in islice(_candidates(form, first, node), _MOST):
            for match in _results(op, way, form, arguments, first):
                errors = [_error(match, form, call) for call in calls]
                if worst(errors) < SAME and _is_shown(match, node, calls):
                    return replace(match, error=worst(errors))
    return None


def _ways() -> Iterator[tuple[str, int, LoopForm]]:
    for op, forms in loop_forms().items():
        yield from ((op, way, form) for way, form in enumerate(forms))


def _candidates(
    form: LoopForm, call: LoopCall, node: ast.For
) -> Iterator[tuple[tuple[str, bool], ...]]:
    """Yield variables that may be the arguments: first of those alone that the loop reads."""
    sizes = {} if call.tokens is None else {"s": call.tokens}
    floats, read = _floats(call, node), read_in(node)
    own = {key: value for key, value in floats.items() if key in read}
    yield from _arguments(form.shapes, own, sizes)
    if len(own) < len(floats):
        yield from _arguments(form.shapes, floats, sizes)


def _goes_on(calls: list[LoopCall]) -> bool:
    """Whether a loop was seen to carry something on: two turns are one step."""
    return any(call.turns > 2 for call in calls)


def _is_shown(match: Match, node: ast.For, calls: list[LoopCall]) -> bool:
    """Whether values that a loop reads and that are no arguments were made of these without bounds."""
    return set(match.arguments) <= read_in(node) or not any(call.guarded_ahead for call in calls)


def _floats(call: LoopCall, node: ast.For) -> dict[str, torch.Tensor]:
    """Return the variables that may be arguments: not those that the loop fills alone."""
    filled = filled_in(node) - read_in(node)
    return {
        key: value
        for key, value in call.before.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key not in filled
    }


def _arguments(
    shapes: Sequence[str], floats: dict[str, torch.Tensor], sizes: dict[str, int]
) -> Iterator[tuple[tuple[str, bool], ...]]:
    """Yield variables that may be an op's arguments, in every order, and whether each is turned.

    `sizes` are those that the letters of shapes have so far.
    """
    if not shapes:
        yield ()
        return
    shape, *others = shapes
    for key, value in floats.items():
        rest = {name: item for name, item in floats.items() if name != key}
        for turned in (True, False) if shape.startswith("bs") else (False,):
            known = _known_sizes(shape, key, value, turned, sizes)
            if known is not None:
                for more in _arguments(others, rest, known):
                    yield ((key, turned), *more)


def _known_sizes(
    shape: str, key: str, value: torch.Tensor, turned: bool, sizes: dict[str, int]
) -> dict[str, int] | None:
    """Return the sizes with those of an argument; None where it cannot be that."""
    is_vector = len(shape) == 1
    found = [value.numel()] if is_vector else list(value.shape)
    if len(found) != len(shape) or (key.startswith("self.") and "b" in shape):
        return None
    if turned:
        found[1], found[2] = found[2], found[1]
    known = dict(sizes)
    fits = [
        known.setdefault(letter, size) == size for letter, size in zip(shape, found, strict=True)
    ]
    return known if all(fits) else None


def _results(
    op: str,
    way: int,
    form: LoopForm,
    arguments: tuple[tuple[str, bool], ...],
    call: LoopCall,
) -> Iterator[Match]:
    """Yield what of a call's results is the op's; the error is that of this call."""
    names = tuple(key for key, _ in arguments)
    turned = tuple(key for key, is_turned in arguments if is_turned)
    for key, value in call.after.items():
        if key in call.before and _is_same(value, call.before[key]):
            continue
        for mine, joined, stacked in _forms_of(key, value, form):
            match = Match(op, way, names, (*turned, *mine), key, joined, stacked, 0.0)
            if _error(match, form, call) < SAME:
                yield match


def _forms_of(
    key: str, value: Any, form: LoopForm
) -> Iterator[tuple[tuple[str, ...], int | None, bool]]:
    """Yield how a result may hold the op's: whether turned, joined along which dimension, or
    stacked.
    """
    if isinstance(value, torch.Tensor):
        yield from (((key,), None, False), ((), None, False))
    elif value and value[0].dim() == form.dims - 1:
        yield (), 1, True
    elif value:
        yield from (((key,), 2, False), ((), 1, False))


def _error(match: Match, form: LoopForm, call: LoopCall) -> float:
    if match.result not in call.after or not call.before.keys() >= set(match.arguments):
        return float("inf")
    try:
        expected = _whole(match, call.after[match.result])
        given = dict(zip(form.variables, _inputs(match, form, call), strict=True))
        actual = eval(_compiled(form.expression), {"torch": torch}, given)
    except REFUSED:
        return float("inf")  # another loop, with variables of these shapes
    same = actual.shape == expected.shape and bool(expected.any())
    return rmse_ratio(actual, expected) if same else float("inf")


def _inputs(match: Match, form: LoopForm, call: LoopCall) -> Iterator[torch.Tensor]:
    """Yield what the op gets of a call's variables."""
    for place, (key, shape) in enumerate(zip(match.arguments, form.shapes, strict=True)):
        value = call.before[key]
        value = value.flatten() if len(shape) == 1 else value
        value = _turn(value) if key in match.turned else value
        yield _before_softplus(value) if place == form.softplus else value


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<loop>", "eval")


def _before_softplus(value: torch.Tensor) -> torch.Tensor:
    wide = value.double()
    return (wide + (-torch.expm1(-wide)).log()).to(value.dtype)


def _whole(match: Match, output: Any) -> torch.Tensor:
    """Return a loop's result as the op gives it."""
    if match.joined is not None:
        join = torch.stack if match.stacked else torch.cat
        output = join(output, dim=match.joined)
    return _turn(output) if match.result in match.turned else output


def _is_same(one: Any, other: Any) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and torch.equal(one, other)
    )


def _turn(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(1, 2)
