"""What functions of Python's make of lists, tuples and dicts whose items are known one by one: `Counter`,
dicts of pairs, `chain`, `product` and `accumulate`.
"""

from __future__ import annotations

import ast
import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import LIST
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import Code, Items, Known, Mapping, Value

_Function = Callable[..., Any]


def known_items(value: Value) -> Sequence[Value] | None:
    """Return what a loop over a value goes through: items, keys of a dict; None where they are not known."""
    match value:
        case Items(items=items):
            return items
        case Mapping(items=entries):
            return [*map(Known, entries)]
        case Known(value=tuple() | list() | str() | range() as items):
            return [*map(as_value, items)]
        case Code(expr=ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[])):
            known = [end.value for end in bounds if isinstance(end, ast.Constant)]
            ends = [end for end in known if isinstance(end, int)]
            return [*map(Known, range(*ends))] if len(ends) == len(bounds) else None
        case Global(obj=tuple() | list() as items) if all(map(_is_plain, items)):
            return [*map(as_value, items)]
    return None


def as_value(item: Any) -> Value:
    """Return a constant, or the items of a tuple or list of such, as a value."""
    if not isinstance(item, tuple | list):
        return Known(item)
    return Items((*map(as_value, item),), **({"kind": LIST} if isinstance(item, list) else {}))


def cut(owner: Global, part: slice) -> Value | None:
    """Return a slice of a list or tuple of constants that a file has; None for another."""
    items = known_items(owner)
    return None if items is None else as_value(owner.obj[part])


def of_pairs(value: Value) -> Mapping | None:
    """Return the dict of known pairs of a text and a value; None for another."""
    entries = {}
    for pair in known_items(value) or [value]:
        match pair:
            case Items(items=(Known(value=str() as key), item)):
                entries[key] = item
            case _:
                return None
    return Mapping(entries)


def _is_plain(item: Any) -> bool:
    if isinstance(item, tuple | list):
        return all(map(_is_plain, item))
    return item is None or isinstance(item, bool | int | float | str)


def _counted(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return how often a known list has each text.

    Raises:
        Untranslatable: its items are no constants.
    """
    items = known_items(args.positional[0]) if len(args.positional) == 1 else None
    if items is None or not all(isinstance(x, Known) and isinstance(x.value, str) for x in items):
        raise Untranslatable(f"{ast.unparse(expr)}(...) of what is no list of known texts")
    counts = collections.Counter(x.value for x in items if isinstance(x, Known))
    return Mapping({key: Known(count) for key, count in counts.items()})


def _unrolled(function: _Function) -> Callable[[ast.expr, Args, Frame], Value]:
    """Return what lists the tuples, or the items, that a function of itertools makes of known ones."""

    def handle(expr: ast.expr, args: Args, frame: Frame) -> Value:
        given = [known_items(each) for each in args.positional]
        if args.keywords or args.stars or None in given:
            return plain_call(expr, args, args.static())
        made = [Items(x) if isinstance(x, tuple) else x for x in function(*given)]
        return Items((*made,), kind=LIST)

    return handle


def _summed(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return the sums of the first numbers of a known list."""
    items = known_items(args.positional[0]) if len(args.positional) == 1 else None
    numbers = [x.value for x in items or () if isinstance(x, Known)]
    if args.keywords or items is None or len(numbers) < len(items):
        return plain_call(expr, args, args.static())
    return Items((*map(Known, itertools.accumulate(numbers)),), kind=LIST)


FUNCTIONS: dict[Any, Callable[[ast.expr, Args, Frame], Value]] = {
    collections.Counter: _counted,
    itertools.chain: _unrolled(itertools.chain),
    itertools.product: _unrolled(itertools.product),
    itertools.accumulate: _summed,
}
