"""How statements end, and what leaves a loop's turn before its end: `break` and `continue`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager

from onboard.codegen.translate.language.env import Env, Turn
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.statements.loops import loop_changes
from onboard.codegen.translate.language.trees.syntax import Untranslatable

GOES_ON, RETURNS, RAISES = "goes on", "returns", "raises"
BREAKS, CONTINUES = "breaks", "continues"
AWAY = (RETURNS, BREAKS, CONTINUES)
"""Endings behind which a side of a condition has nothing more to do here."""


@contextmanager
def turn(node: ast.For | ast.While, start: Env | None, frame: Frame) -> Iterator[Turn]:
    """Evaluate the body of a loop; `start` are the variables before it, None where it is run turn by
    turn.
    """
    frame.turns.append(Turn(node, start, frame.branches))
    if start is not None:
        frame.loops.append(start)
    try:
        yield frame.turns[-1]
    finally:
        frame.turns.pop()
        if start is not None:
            frame.loops.pop()


def leave(node: ast.Break | ast.Continue, frame: Frame) -> str:
    """End a turn, or the loop, with what the variables are there."""
    around = frame.turns[-1]
    ending = BREAKS if isinstance(node, ast.Break) else CONTINUES
    if around.start is not None:
        note_end(around, frame)
        frame.emit(type(node)(), node)
    elif frame.branches > around.branches:
        raise Untranslatable(
            f"{type(node).__name__} at {frame.source.location(node)}, under a condition that is not known"
        )
    return ending


def note_end(around: Turn, frame: Frame) -> None:
    """Note what a loop's variables are where a turn of it ends."""
    assert around.start is not None
    changed = loop_changes.changed(around.node, around.start, frame)
    around.ends.append((changed, frame.env))
