"""Recognise recurrences that modeling code writes as a loop inside a method.

There is no function to call again. So loops are watched: the variables before a loop and after it
are noted whenever it runs, and it is a canonical op when the op makes of some of the former, in
some order, what is among the latter, in every call that was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.recognise.scans.watch import Loop, LoopCall
from onboard.analysis.spec_blocks import Block, make_block
from onboard.ops.library import op_sources
from onboard.ops.written_forms import LoopForm
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME

_MOST = 500
"""Ways to read a loop's variables that are tried."""


def loop_forms() -> dict[str, LoopForm]:
    """Return what the ops take that modeling code may write as a loop."""
    found = {op: source.looped_as for op, source in op_sources().items()}
    return {op: form for op, form in found.items() if form is not None}


@dataclass(frozen=True)
class Match:
    """How a loop is an op."""

    op: str
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
    """Return which op the calls of one loop are; None when they are none."""
    first = calls[0]
    for op, form in loop_forms().items():
        for arguments in islice(_arguments(form.shapes, _floats(first.before), {}), _MOST):
            for match in _results(op, form, arguments, first):
                errors = [_error(match, form, call) for call in calls]
                if worst(errors) < SAME:
                    return replace(match, error=worst(errors))
    return None


def _floats(variables: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        key: value
        for key, value in variables.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
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
    if len(found) != len(shape) or (key.startswith("self.") and not is_vector):
        return None
    if turned:
        found[1], found[2] = found[2], found[1]
    known = dict(sizes)
    fits = [
        known.setdefault(letter, size) == size for letter, size in zip(shape, found, strict=True)
    ]
    return known if all(fits) else None


def _results(
    op: str, form: LoopForm, arguments: tuple[tuple[str, bool], ...], call: LoopCall
) -> Iterator[Match]:
    """Yield what of a call's results is the op's; the error is that of this call."""
    names = tuple(key for key, _ in arguments)
    turned = tuple(key for key, is_turned in arguments if is_turned)
    for key, value in call.after.items():
        if key in call.before and _is_same(value, call.before[key]):
            continue
        for mine, joined, stacked in _forms_of(key, value, form):
            match = Match(op, names, (*turned, *mine), key, joined, stacked, 0.0)
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
        actual = getattr(torch.ops.onboard, match.op)(*_inputs(match, form, call), *form.settings)
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
