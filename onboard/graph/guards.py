"""Which sizes an exported graph is right for: the decisions about sizes that its model's code took while traced."""

from __future__ import annotations

from collections.abc import Iterator

from sympy import Basic, Expr  # type: ignore[import-untyped]
from torch import SymInt, fx

from onboard.graph.fx import fake_mode, placeholders


def broken_guard(gm: fx.GraphModule, longest: int) -> tuple[str, int] | None:
    """Return a decision that would be another one for some length up to `longest`, and that length; None: none would.

    `torch.export` notes a branch on a size (`if length > 4096`) as a bound of the graph's inputs. Nothing checks those
    bounds later, so a model whose code branches that way must not run on such lengths.
    """
    env = fake_mode(gm).shape_env
    sizes = placeholders(gm)[0].meta["val"].shape
    if env is None or not all(isinstance(size, SymInt) for size in sizes):
        return None
    batch, length = (size.node for size in sizes)
    for guard in env.guards:
        condition = guard.expr.xreplace(env.replacements)  # sizes that turned out to be equal are one
        for tokens in _lengths(length.hint, longest):
            if not _holds(condition, {batch.expr: batch.hint, length.expr: tokens}, length.expr):
                return str(condition), tokens
    return None


def _lengths(traced: int, longest: int) -> Iterator[int]:
    """Yield the ends of the range and what lies about each power of two: where code is likely to branch."""
    yield from {
        size
        for power in range(longest.bit_length() + 1)
        for size in (2**power - 1, 2**power, 2**power + 1, longest)
        if traced <= size <= longest
    }


def _holds(condition: Basic, sizes: dict[Expr, int], length: Expr) -> bool:
    """Return whether a condition holds; one on the length that cannot be told does not."""
    value = condition.xreplace(sizes)
    return length not in condition.free_symbols if value.free_symbols else bool(value)
