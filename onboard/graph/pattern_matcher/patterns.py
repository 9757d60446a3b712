"""A small matcher for expressions in FX graphs.

A pattern is an object with `match(value, bound)`, which yields every way to match, as a dict of
what its variables stand for. A plain value (a number, None, a list of patterns) matches an equal
value:

    x, eps = Var("x"), Var("eps", where=is_number)
    pattern = Op(aten.rsqrt, Op(aten.add, Op(aten.mean, Op(aten.pow, x, 2), [-1], True), eps,
    commutes=True)) if found := find(pattern, node): ... found["x"], found["eps"]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from onboard.graph.fx import Target, arguments, is_op

aten = torch.ops.aten

Bound = dict[str, Any]


class Pattern(ABC):
    """Something that a node or an argument can match."""

    @abstractmethod
    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        """Yield `bound` extended by each way in which `value` matches."""


class Var(Pattern):
    """Matches anything that satisfies `where`; every place of one name must hold the same thing."""

    def __init__(self, name: str, where: Callable[[Any], bool] | None = None) -> None:
        self.name = name
        self.where = where

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        """Bind the variable, or compare with what it is bound to."""
        if self.name in bound:
            if _same(bound[self.name], value):
                yield bound
        elif self.where is None or self.where(value):
            yield {**bound, self.name: value}


class Op(Pattern):
    """Matches a call of `target` (an operator, a packet for all its overloads, or several of them).

    Positional patterns stand for the leading arguments in schema order, defaults filled in; keyword
    patterns for arguments by name. `commutes` also tries the first two arguments swapped; `bind`
    names the node itself.
    """

    def __init__(
        self,
        target: Target | Sequence[Target],
        *args: Any,
        commutes: bool = False,
        bind: str = "",
        **kwargs: Any,
    ) -> None:
        self.targets = tuple(target) if isinstance(target, Sequence) else (target,)
        self.args = args
        self.kwargs = kwargs
        self.commutes = commutes
        self.bind = bind

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        """Match the call and its arguments."""
        if not is_op(value, *self.targets):
            return
        named = arguments(value) if isinstance(value.target, OpOverload) else {}
        actual = list(named.values()) if named else list(value.args)
        if len(actual) < len(self.args) or not self.kwargs.keys() <= named.keys():
            return
        if self.bind:
            bound = {**bound, self.bind: value}
        orders = [actual, [actual[1], actual[0], *actual[2:]]] if self.commutes else [actual]
        by_name = [named[name] for name in self.kwargs]
        for order in orders:
            yield from _match_all(
                [*self.args, *self.kwargs.values()], [*order[: len(self.args)], *by_name], bound
            )


class Either(Pattern):
    """Matches what one of several patterns matches, tried in order."""

    def __init__(self, *patterns: Any) -> None:
        self.patterns = patterns

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        """Try each pattern."""
        for pattern in self.patterns:
            yield from match(pattern, value, bound)


class Through(Pattern):
    """Matches `inner` below any number (also none) of calls that only pass on their first
    argument.
    """

    def __init__(self, targets: Sequence[Target], inner: Any) -> None:
        self.targets = tuple(targets)
        self.inner = inner

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        """Try the value itself, then what it passes on."""
        yield from match(self.inner, value, bound)
        if is_op(value, *self.targets):
            yield from self.match(value.args[0], bound)


CASTS = (aten.to, aten._to_copy, aten.type_as)
"""Changes of dtype (and of device, which a graph for one device does not have)."""


def cast(inner: Any) -> Through:
    """Match `inner` below any number of dtype changes."""
    return Through(CASTS, inner)


def match(pattern: Any, value: Any, bound: Bound) -> Iterator[Bound]:
    """Yield every way in which `value` matches `pattern`, extending `bound`."""
    if isinstance(pattern, Pattern):
        yield from pattern.match(value, bound)
    elif isinstance(pattern, list):
        if isinstance(value, list | tuple) and len(value) == len(pattern):
            yield from _match_all(pattern, value, bound)
    elif _same(pattern, value):
        yield bound


def find(pattern: Any, value: Any) -> Bound | None:
    """Return the first way in which `value` matches `pattern`, None when it does not."""
    return next(match(pattern, value, {}), None)


def _match_all(patterns: Sequence[Any], values: Sequence[Any], bound: Bound) -> Iterator[Bound]:
    if not patterns:
        yield bound
        return
    for extended in match(patterns[0], values[0], bound):
        yield from _match_all(patterns[1:], values[1:], extended)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return left is right
    return bool(left == right)


def is_number(value: Any) -> bool:
    """Tell whether an argument is a literal number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_node(value: Any) -> bool:
    """Tell whether an argument is a node."""
    return isinstance(value, fx.Node)


def rank(node: fx.Node) -> int:
    """Return the number of dimensions of a node's value; a symbolic size has none."""
    value = node.meta["val"]
    return value.dim() if isinstance(value, torch.Tensor) else 0


def dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node's value."""
    value = node.meta["val"].dtype
    assert isinstance(value, torch.dtype)
    return value


def same_shape(left: fx.Node, right: fx.Node) -> bool:
    """Tell whether two nodes' values have the same shape for all sizes of the dynamic
    dimensions.
    """
    # Imports a computer algebra system
    from torch.fx.experimental.symbolic_shapes import (
        statically_known_true,
    )

    one, other = left.meta["val"].shape, right.meta["val"].shape
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def same_dim(value: Any, node: fx.Node, dim: int) -> bool:
    """Tell whether the argument `value` means dimension `dim` (>= 0) of `node`, counted from either
    end.
    """
    return isinstance(value, int) and value % rank(node) == dim
