"""Loop bodies with `continue`, written without it."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def without_continue(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return a loop's statements with what follows `if test: continue` under the opposite test.

    A `continue` that is not the end of one side of a condition stays.
    """
    for index, statement in enumerate(body):
        after = list(body[index + 1 :])
        match statement:
            case ast.Continue():
                return list(body[:index])
            case ast.If(test=test, body=inside, orelse=other) if _skips(inside):
                kept = ast.If(
                    test,
                    without_continue(inside) or [ast.Pass()],
                    without_continue([*other, *after]),
                )
            case ast.If(test=test, body=inside, orelse=other) if _skips(other):
                kept = ast.If(test, without_continue([*inside, *after]), without_continue(other))
            case _:
                continue
        return [*body[:index], ast.copy_location(kept, statement)]
    return list(body)


def _skips(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Continue)
