"""Loops with a turn for each token, which no graph for texts of every length can have."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise.scans.watch import Loop, LoopCall, loops_of, loops_watched
from onboard.analysis.tiny.tiny_prompts import prompt

_LENGTHS = (11, 17)


def token_loops(model: nn.Module, tokens: int) -> list[str]:
    """Return the loops of a model's code that take as many turns as the text has tokens: the class, or the
    function, and the loop's first line. None are of a model that does not run.

    Args:
        tokens: size of the vocabulary that the text is drawn of.
    """
    calls: list[LoopCall] = []
    for length in _LENGTHS:
        inputs = prompt(2, length=length, batch=2, tokens=tokens)
        try:
            with loops_watched(model, calls, length), torch.no_grad():
                model(**inputs)
        except Exception:  # what is in its way is said elsewhere
            return []
    turns: dict[Loop, list[bool]] = defaultdict(list)
    for call in calls:
        turns[call.loop].append(call.turns - 1 == call.tokens)
    owners = {call.loop: call.owner for call in calls}
    each = [loop for loop, fits in turns.items() if all(fits) and not loop.stretch]
    return [f"{loop.class_name} (`{_first_line(owners[loop], loop)}`)" for loop in each]


def _first_line(owner: Any, loop: Loop) -> str:
    node = loops_of(owner, loop.method)[loop.index]
    return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
