"""Which sizes an exported graph is right for: the decisions about sizes that its model's code took
while traced.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sympy import Basic, Expr, Integer, Symbol  # type: ignore[import-untyped]
from torch import SymInt, fx

from onboard.errors import OnboardError, TooLongError
from onboard.graph.fx import fake_mode, placeholders

if TYPE_CHECKING:
    from onboard.graph.context import TransformContext

MOST_ROWS = 4096
"""No batch is larger than this."""
_WORTH_SERVING = 512
"""A graph that is right for no more tokens is refused, unless that is what was asked for, or what
the model file asserts.
"""


@dataclass(frozen=True)
class BrokenGuard:
    """A decision that another size turns round."""

    condition: str
    """In terms of `batch` and `length`, as it was true for the sizes that were traced."""
    batch: int
    length: int
    """Sizes for which it is not."""
    code: str
    """The line that decides; empty when that is not the model's."""

    @property
    def is_asserted(self) -> bool:
        """Whether the code takes no other sizes at all, and says so."""
        return self.code.startswith("assert ")

    def __str__(self) -> str:
        code = f" (`{self.code}`)" if self.code else ""
        return f"unless {self.condition}{code}: at a batch of {self.batch} and a length of {self.length}"


def refuse_broken_guard(gm: fx.GraphModule, name: str, longest: int, option: str) -> None:
    """Raise `OnboardError` when there is a broken guard; `option` is the name of what limits
    lengths to `longest`. A `TooLongError` says up to which length there is none.
    """
    broken = broken_guard(gm, longest)
    if broken is None:
        return
    said, other = f"the code of {name} takes another path {broken}", "or try --mode transformers"
    if broken_guard(gm, broken.length - 1) is None:
        hint = f"Lower {option} below {broken.length}, {other}, which has none"
        raise TooLongError(said, hint=hint, longest=broken.length - 1)
    raise OnboardError(said, hint=f"No graph can follow that, {other}, which has none")


def fit_or_refuse(
    gm: fx.GraphModule, name: str, context: TransformContext, option: str, unread: int = 0
) -> None:
    """Lower a limit that nobody asked for to the lengths that a graph is right for; refuse any
    other broken guard.

    `option` is the limit's name; the last `unread` tokens of as many are no input.
    """
    limit = getattr(context.runtime, option)
    broken = broken_guard(gm, limit - unread)
    if broken is not None and _may_be_lowered(gm, broken) and option in context.chosen:
        context.lower(
            option, broken.length - 1 + unread, f"the code of {name} takes another path {broken}"
        )
    else:
        refuse_broken_guard(gm, name, limit - unread, option)


def _may_be_lowered(gm: fx.GraphModule, broken: BrokenGuard) -> bool:
    """Whether a graph is right for all shorter lengths, and worth to be served with these."""
    enough = broken.is_asserted or broken.length > _WORTH_SERVING
    return enough and broken_guard(gm, broken.length - 1) is None


def broken_guard(gm: fx.GraphModule, longest: int) -> BrokenGuard | None:
    """Return the first of `broken_guards`, None when there is none."""
    return next(broken_guards(gm, longest), None)


def broken_guards(
    gm: fx.GraphModule, longest: int, shortest: int | None = None
) -> Iterator[BrokenGuard]:
    """Yield each decision that would be another one for some batch, or some length from `shortest`
    to `longest`.

    `torch.export` notes a branch on a size (`if length > 4096`) as a bound of the graph's inputs.
    Nothing checks those bounds later, so a model whose code branches that way must not run on such
    sizes. Sizes of 1 are none that an export knows of, and it notes that differences of sizes are
    neither 0 nor 1: what code does with texts shorter than those that were traced has to be tried,
    and they are left out unless `shortest` says otherwise.
    """
    env = fake_mode(gm).shape_env
    shapes = {node.target: node.meta["val"].shape for node in placeholders(gm)}
    found = shapes.get("input_ids", ())
    if env is None or not found or not all(isinstance(size, SymInt) for size in found):
        return
    batch, length = (size.node for size in found)
    same = _of_positions(shapes.get("position_ids", ()), found)
    for guard in env.guards:
        # Sizes that turned out to be equal are one, and positions have the shape of the tokens
        condition = guard.expr.xreplace(env.replacements).xreplace(same)
        tried = _sizes(condition, (batch.hint, length.hint), shortest or length.hint, longest)
        if broken := next(
            (sizes for sizes in tried if not _holds(condition, _known(batch, length, sizes))), None
        ):
            names = {batch.expr: Symbol("batch"), length.expr: Symbol("length")}
            yield BrokenGuard(str(condition.xreplace(names)), *broken, _code(guard))


def _of_positions(positions: Sequence[Any], tokens: Sequence[Any]) -> dict[Expr, Expr]:
    """Return the sizes of the positions, where code does not take them for the tokens', as these."""
    pairs = zip(positions, tokens, strict=False)
    return {size.node.expr: token.node.expr for size, token in pairs if isinstance(size, SymInt)}


def _known(batch: Any, length: Any, sizes: tuple[int, int]) -> dict[Expr, int]:
    return {batch.expr: sizes[0], length.expr: sizes[1]}


def _sizes(
    condition: Basic, traced: tuple[int, int], shortest: int, longest: int
) -> Iterator[tuple[int, int]]:
    """Yield batches and lengths to try: one of them, then both other than what was traced."""
    numbers = sorted({abs(int(item)) for item in condition.atoms(Integer)} - {0})
    batches, lengths = _near(numbers, 2, MOST_ROWS), _near(numbers, shortest, longest)
    yield from ((traced[0], length) for length in lengths)
    yield from ((batch, traced[1]) for batch in batches)
    yield from ((batch, length) for batch in (2, batches[-1]) for length in lengths)


def _near(numbers: list[int], least: int, most: int) -> list[int]:
    """Return the ends of a range and what lies about the numbers there, their quotients and the
    powers of two.
    """
    quotients = [high // low for low in numbers for high in numbers if low < high]
    powers = [2**power for power in range(most.bit_length() + 1)]
    about = {number + step for number in (*numbers, *quotients, *powers) for step in (-1, 0, 1)}
    return sorted({size for size in (*about, least, most) if least <= size <= most})


def _holds(condition: Basic, sizes: dict[Expr, int]) -> bool:
    """Return whether a condition holds; one on these sizes that cannot be told does not."""
    value = condition.xreplace(sizes)
    return not (sizes.keys() & condition.free_symbols) if value.free_symbols else bool(value)


def _code(guard: Any) -> str:
    """Return the line that decides, by what `torch.export` noted of it."""
    location: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    if location is None or isinstance(location, str) or "torch" in Path(location.filename).parts:
        return ""
    return linecache.getline(location.filename, location.lineno).strip()
