"""Recognise recurrences that modeling code writes as a loop inside a method.

There is no function to call again. So loops are watched: the variables before a loop and after it
are noted whenever it runs, and it is a canonical op when the op makes of some of the former, in
some order, what is among the latter, in every call that was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations, product
from typing import Any

import torch

from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.recognise.watch import Loop, LoopCall
from onboard.analysis.spec_blocks import Block, make_block
from onboard.ops.library import op_sources
from onboard.ops.written_forms import LoopForm
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME


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
    turned: bool
    """Arguments along the sequence, and the result, are [batch, heads, sequence, ...], unlike the
    op's.
    """
    result: str
    """The variable that holds the result."""
    joined: int | None
    """The dimension along which a list, which the result is then, makes up the whole."""
    error: float


def loop_blocks(recordings: Sequence[Recording], file: str) -> list[Block]:
    """Return a block for each loop in a method that is a canonical op."""
    found: dict[Loop, list[LoopCall]] = {}
    for call in [call for recording in recordings for call in recording.loops]:
        found.setdefault(call.loop, []).append(call)
    matches = {
        loop: match for loop, calls in found.items() if (match := match_loop(calls)) is not None
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
            "method": loop.method,
            "index": loop.index,
        },
        evidence=[f"probe: {match.op} fits with rmse ratio {match.error:.1e}"],
    )


def match_loop(calls: list[LoopCall]) -> Match | None:
    """Return which op the calls of one loop are; None when they are none."""
    first = calls[0]
    for op, form in loop_forms().items():
        for turned in (True, False) if form.dims == 4 else (False,):
            for names in _arguments(form, first.before):
                for match in _results(op, form, names, turned, first):
                    errors = [_error(match, form, call) for call in calls]
                    if worst(errors) < SAME:
                        return Match(op, names, turned, match.result, match.joined, worst(errors))
    return None


def _arguments(form: LoopForm, variables: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the variables that may be an op's arguments, in every order."""
    tensors = {key: value for key, value in variables.items() if isinstance(value, torch.Tensor)}
    floats = {key: value for key, value in tensors.items() if value.is_floating_point()}
    long = [
        key
        for key, value in floats.items()
        if value.dim() == form.dims and not key.startswith("self.")
    ]
    for names in permutations(long, form.tensors):
        sizes = floats[names[0]].shape
        heads = [
            key for key, value in floats.items() if form.dims > 3 and value.numel() in sizes[1:3]
        ]
        if all(floats[name].shape[:3] == sizes[:3] for name in names):
            yield from ((*names, *vectors) for vectors in product(heads, repeat=form.vectors))


def _results(
    op: str, form: LoopForm, names: tuple[str, ...], turned: bool, call: LoopCall
) -> Iterator[Match]:
    """Yield what of a call's results is the op's; the error is that of this call."""
    for key, value in call.after.items():
        if key in call.before and _is_same(value, call.before[key]):
            continue
        joined = (
            [None] if isinstance(value, torch.Tensor) else [2 if turned else 1] if value else []
        )
        for dim in joined:
            match = Match(op, names, turned, key, dim, 0.0)
            if _error(match, form, call) < SAME:
                yield match


def _error(match: Match, form: LoopForm, call: LoopCall) -> float:
    if match.result not in call.after or not call.before.keys() >= set(match.arguments):
        return float("inf")
    inputs: list[torch.Tensor] = [call.before[name] for name in match.arguments]
    output = call.after[match.result]
    tensors = [_turn(item) if match.turned else item for item in inputs[: form.tensors]]
    try:
        expected = output if match.joined is None else torch.cat(output, dim=match.joined)
        vectors = [item.flatten() for item in inputs[form.tensors :]]
        actual = getattr(torch.ops.onboard, match.op)(*tensors, *vectors)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return float("inf")  # another loop, with variables of these shapes
    actual = _turn(actual) if match.turned else actual
    same = actual.shape == expected.shape and bool(expected.any())
    return rmse_ratio(actual, expected) if same else float("inf")


def _is_same(one: Any, other: Any) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and torch.equal(one, other)
    )


def _turn(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(1, 2)
