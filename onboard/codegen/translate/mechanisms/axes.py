"""Changes of shape that name the axes, as einops writes them: `rearrange(x, "b s (h d) -> b h s d")`
becomes PyTorch's own methods.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.calls import call_value
from onboard.codegen.translate.language.expressions.tensor_methods import tensor_method
from onboard.codegen.translate.language.forms import ROWS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name
from onboard.codegen.translate.language.values import Code, Items, Known, Value
from onboard.hf.old.einops_forms import in_letters

_TOKEN = re.compile(r"\.\.\.|\w+|\([^()]*\)")
_REST = "..."


@dataclass(frozen=True)
class Pattern:
    """Groups of axes of the two sides; a group is one dimension of the tensor."""

    left: list[list[str]]
    right: list[list[str]]

    @property
    def has_rest(self) -> bool:
        """Whether `...` stands for axes without names."""
        return any(_REST in group for side in (self.left, self.right) for group in side)


def parsed(text: str) -> Pattern:
    """Return the groups of a pattern; `()` and 1 are the same."""
    left, right = (
        [token.strip("()").split() or ["1"] for token in _TOKEN.findall(side)]
        for side in text.split("->")
    )
    return Pattern(left, right)


_NAMES = ("tensor", "pattern")
"""Parameters of einops' functions; all others are sizes of axes."""


class NamedAxes(Mechanism):
    """Functions of einops."""

    def call(self, function: Any, expr: Any, args: Args, frame: Frame) -> Value | None:
        """`rearrange` and `repeat` of a tensor, `einsum` of several."""
        einops = sys.modules.get("einops")
        match _by_position(args):
            case [*tensors, Known(value=str() as text)] if (
                einops is not None and function is getattr(einops, "einsum", None)
            ):
                letters = ast.Constant(in_letters(text))
                made = attribute(name("torch"), "einsum")
                return Code(call(made, letters, *(tensor.code() for tensor in tensors)))
            case [Code(static=False) as tensor, pattern] if einops is not None:
                if (spelled := _spelled(pattern)) is None:
                    return None
                text, numbers = spelled
                numbers |= {key: args.keywords[key] for key in args.keywords if key not in _NAMES}
                if function is getattr(einops, "rearrange", None):
                    return rearranged(tensor, parsed(text), numbers, frame)
                if function is getattr(einops, "repeat", None):
                    return repeated(tensor, parsed(text), numbers, frame)
        return None


def _by_position(args: Args) -> list[Value]:
    """Return a tensor and its pattern, which calls may name."""
    return [*args.positional, *(args.keywords[key] for key in _NAMES if key in args.keywords)]


def _spelled(pattern: Value) -> tuple[str, dict[str, Value]] | None:
    """Return a pattern, and the sizes that stand in it as numbers or, in an f-string, as values,
    which get names there.
    """
    match pattern:
        case Known(value=str() as text):
            return text, {
                one: Known(int(one)) for one in re.findall(r"\b\d+\b", text) if one != "1"
            }
        case Code(expr=ast.JoinedStr(values=parts)):
            sizes: dict[str, Value] = {}
            words = []
            for number, part in enumerate(parts):
                if isinstance(part, ast.FormattedValue):
                    sizes[f"_{number}"] = Code(part.value)
                words.append(f"_{number}" if isinstance(part, ast.FormattedValue) else part.value)  # type: ignore[attr-defined]
            return "".join(words), sizes
    return None


def rearranged(tensor: Code, pattern: Pattern, sizes: dict[str, Value], frame: Frame) -> Value:
    """Return the tensor with its axes taken apart, moved and put together."""
    value = _apart(tensor, pattern, sizes, frame)
    have = [axis for group in pattern.left for axis in group if axis != "1"]
    want = [axis for group in pattern.right for axis in group if axis != "1"]
    if sorted(have) != sorted(want):
        raise Untranslatable("an einops pattern whose sides have different axes")
    value = _moved(value, have, want, frame)
    return _together(value, pattern, frame)


def repeated(tensor: Code, pattern: Pattern, sizes: dict[str, Value], frame: Frame) -> Value:
    """Return `... h d -> ... (h g) d`: each of an axis's parts several times in a row; or
    `b 1 d -> b h d`: the only part as often; `s d -> 1 s 1 (d j)` with new axes of size one, too; all of
    them in a row, `s d -> s (2 d)`; or as `_spread` does.
    """
    old = [group for group in pattern.right if group != ["1"]]
    if old != pattern.right and ["1"] not in pattern.left:
        value = repeated(tensor, Pattern(pattern.left, old), sizes, frame)
        return _together(value, Pattern(old, [group[:1] for group in pattern.right]), frame)
    for place, group in enumerate(pattern.right):
        before = pattern.left[place : place + 1]
        match group:
            case [new] if new in sizes and before == [["1"]] and not pattern.has_rest:
                if [*pattern.right[:place], ["1"], *pattern.right[place + 1 :]] == pattern.left:
                    sizes_of = [Known(-1)] * len(pattern.left)
                    every = [*sizes_of[:place], sizes[new], *sizes_of[place + 1 :]]
                    return _method(tensor, "expand", every, frame)
            case [axis, new] if new in sizes and [axis] == pattern.left[place : place + 1][0]:
                plain = [*pattern.right[:place], [axis], *pattern.right[place + 1 :]]
                if plain == pattern.left:
                    return _each_in_a_row(tensor, sizes[new], pattern.left, place, frame)
            case [new, axis] if new in sizes and [axis] == pattern.left[place : place + 1][0]:
                plain = [*pattern.right[:place], [axis], *pattern.right[place + 1 :]]
                times = sizes[new]
                if plain == pattern.left and isinstance(times, Known):
                    return _in_a_row(tensor, times.value, pattern.left, place, frame)
    if (spread := _spread(tensor, pattern, sizes, frame)) is not None:
        return spread
    raise Untranslatable("an einops pattern that repeats in another way")


def _each_in_a_row(
    tensor: Code, times: Value, groups: list[list[str]], place: int, frame: Frame
) -> Value:
    """Return a tensor with each part of a dimension several times; rows of a table, which have the
    batch in front, stay that.
    """
    rows = tensor.form == ROWS and place > 0
    dim = Known(place - len(groups) if rows else _dimension(groups, place))
    value = _method(tensor, "repeat_interleave", [times, dim], frame)
    return replace(value, form=ROWS) if rows and isinstance(value, Code) else value


def _in_a_row(tensor: Code, times: int, groups: list[list[str]], place: int, frame: Frame) -> Value:
    """Return the tensor several times along a dimension, one whole after the other."""
    rest = any(_REST in group for group in groups[place:])
    dim = Known(_dimension(groups, place) if rest else place - len(groups))
    made = Global(torch.cat, attribute(name("torch"), "cat"))
    return call_value(made, Args([Items((tensor,) * times), dim], {}, []), frame)


def _spread(tensor: Code, pattern: Pattern, sizes: dict[str, Value], frame: Frame) -> Value | None:
    """Return `n -> d n`, or `... n -> ... n d`: the tensor along new axes; None for another pattern."""
    new = [group for group in pattern.right if group not in pattern.left]
    kept = [group for group in pattern.right if group in pattern.left]
    if pattern.has_rest and pattern.right == [*pattern.left, *new]:
        return _along_last(tensor, [sizes.get(group[0]) for group in new], frame)
    if pattern.has_rest or kept != pattern.left or not all(group[0] in sizes for group in new):
        return None
    value: Value = tensor
    for place, group in enumerate(pattern.right):
        value = _method(value, "unsqueeze", [Known(place)], frame) if group in new else value
    every = [sizes[group[0]] if group in new else Known(-1) for group in pattern.right]
    return _method(value, "expand", every, frame)


def _along_last(tensor: Code, sizes: Sequence[Value | None], frame: Frame) -> Value | None:
    """Return a tensor along new last axes; None where the size of one is not said."""
    value: Value = tensor
    for size in sizes:
        if size is None:
            return None
        value = _method(value, "unsqueeze", [Known(-1)], frame)
        value = _method(value, "repeat_interleave", [size, Known(-1)], frame)
    return value


def _dimension(groups: list[list[str]], place: int) -> int:
    """Return the number of a group's dimension, counted from the end behind `...`."""
    rest = next((at for at, group in enumerate(groups) if _REST in group), len(groups))
    if place == rest or groups[rest : rest + 1] not in ([], [[_REST]]):
        raise Untranslatable("an einops pattern with ... beside other axes of a dimension")
    return place if place < rest else place - len(groups)


def _apart(tensor: Code, pattern: Pattern, sizes: dict[str, Value], frame: Frame) -> Value:
    value: Value = tensor
    groups = [list(group) for group in pattern.left]
    for place in reversed(range(len(groups))):
        group = groups[place]
        if group == ["1"]:
            value = _method(value, "squeeze", [Known(_dimension(groups, place))], frame)
        elif len(group) > 1:
            dim = Known(_dimension(groups, place))
            parts = tuple(sizes.get(axis, Known(-1)) for axis in group)
            value = _method(value, "unflatten", [dim, Items(parts)], frame)
        groups[place : place + 1] = [[axis] for axis in group if axis != "1"]
    return value


def _moved(value: Value, have: list[str], want: list[str], frame: Frame) -> Value:
    if have == want:
        return value
    if _REST in have:
        return _swapped_ahead(value, have, want, frame)
    order = [have.index(axis) for axis in want]
    if order == [0, 2, 1, *range(3, len(order))]:
        return _method(value, "transpose", [Known(1), Known(2)], frame)
    if order == [0, 2, 3, 1]:  # heads first, and keys turned for a product
        value = _method(value, "transpose", [Known(1), Known(2)], frame)
        return _method(value, "transpose", [Known(-1), Known(-2)], frame)
    return _method(value, "permute", [Known(item) for item in order], frame)


def _swapped_ahead(value: Value, have: list[str], want: list[str], frame: Frame) -> Value:
    """Return a tensor of any rank of whose first axes two change places."""
    moved = [place for place, (old, new) in enumerate(zip(have, want, strict=True)) if old != new]
    if not have[-1] == want[-1] == _REST or len(moved) != 2:
        raise Untranslatable("an einops pattern that moves axes behind ...")
    return _method(value, "transpose", list(map(Known, moved)), frame)


def _together(value: Value, pattern: Pattern, frame: Frame) -> Value:
    done: list[list[str]] = []
    left = [axis for group in pattern.right for axis in group if axis != "1"]
    for group in pattern.right:
        place = len(done)
        if group == ["1"]:
            value = _new_dimension(value, [*done, group, *[[a] for a in left]], frame)
        elif len(group) > 1:
            groups = [*done, *[[axis] for axis in left]]
            first = _dimension(groups, place)
            bounds = [Known(first), Known(first + len(group) - 1)]
            value = _method(value, "flatten", bounds, frame)
        left = left[0 if group == ["1"] else len(group) :]
        done.append(group)
    ahead = isinstance(value, Code) and value.form == ROWS and pattern.right[0] == ["1"]
    return Code(value.code()) if ahead else value  # the batch is where the 1 is


def _new_dimension(value: Value, groups: list[list[str]], frame: Frame) -> Value:
    """Return it with a dimension of size one; rows of a table have the batch in front."""
    place = groups.index(["1"])
    while [*groups[place + 1 :]].count(["1"]):
        place = groups.index(["1"], place + 1)
    if isinstance(value, Code) and value.form == ROWS:
        if place == 0:
            return value
        place -= groups[0] == ["1"]
        if place == 0:  # the batch is where the first 1 is, and this one is behind it
            return Code(call(attribute(value.expr, "unsqueeze"), ast.Constant(1)))
        return _method(value, "unsqueeze", [Known(place)], frame)
    return _method(value, "unsqueeze", [Known(_dimension(groups, place))], frame)


def _method(value: Value, attr: str, positional: list[Any], frame: Frame) -> Value:
    args = Args(positional, {}, [])
    known = frame.mechanisms.call_method(value, attr, args, frame)
    assert isinstance(value, Code)
    return known if known is not None else tensor_method(value, attr, args)
