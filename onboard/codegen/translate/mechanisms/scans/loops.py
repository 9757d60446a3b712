"""Loops along the sequence that the analysis found to be a canonical op."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from onboard.analysis.recognise.scans.loop_bodies import filled_in
from onboard.analysis.recognise.scans.scan_loops import loop_forms
from onboard.analysis.recognise.scans.watch import loops_in, loops_of
from onboard.analysis.spec_blocks import LoopParameters
from onboard.analysis.tiny.tiny_prompts import first_token_is_plain
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    name,
    stored_names,
)
from onboard.codegen.translate.language.values import NONE, Code, Known, Unread, Value
from onboard.codegen.translate.mechanisms.recurrent import argument, substituted
from onboard.ops.written_forms import LoopForm

_JOINING = (torch.cat, torch.concat, torch.concatenate)
_STACKING = (torch.stack,)


@dataclass(frozen=True, eq=False)
class Pieces(Value):
    """A list of tensors that a loop along the sequence fills: together, along dimension `dim`, they
    are `whole`.
    """

    whole: Code
    dim: int
    stacked: bool
    """They lack that dimension."""
    dims: int
    """Dimensions of the whole."""

    def along(self, dim: Value) -> Code | None:
        """Return what they make along a dimension; None where that is another."""
        if any(dim.equals(Known(place)) for place in (self.dim, self.dim - self.dims)):
            return self.whole
        if self.stacked and any(dim.equals(Known(place)) for place in (2, 2 - self.dims)):
            return replace(self.whole, transposed=True)
        return None


def scan(node: ast.For, frame: Frame) -> bool:
    """Write a loop as the canonical op that it is; return whether it is one.

    What the loop carries from token to token is None behind it: generated code keeps it in caches,
        if at all.
    """
    found = _found(node, frame)
    if found is None:
        return False
    form, result = loop_forms()[found.op][found.way], frame.name_of(found.result)
    given = dict(zip(form.variables, _arguments(found, form, frame), strict=True))
    made = Code(substituted(form.expression, given), transposed=found.result in found.turned)
    assigned = [
        item.id
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    ]
    frame.env.values.update(
        dict.fromkeys(filled_in(node), Unread(f"what the loop before leaves besides {result}"))
    )
    frame.env.values.update(dict.fromkeys(assigned, NONE))
    if found.joined is None:
        frame.bind(result, made, node)
    else:
        frame.env.values[result] = Pieces(made, found.joined, found.stacked, form.dims)
    return True


def _arguments(found: LoopParameters, form: LoopForm, frame: Frame) -> Iterator[ast.expr]:
    """Yield what the form's variables are in generated code."""
    for place, key in enumerate(found.arguments):
        value = frame.evaluate(frame.reading(key))
        value = _before_softplus(value, frame) if place == form.softplus else value
        if len(form.shapes[place]) == 1:
            yield call(attribute(value.code(), "flatten"))
        else:
            yield argument(value, key in found.turned)


def joined(function: Any, args: Args) -> Value | None:
    """Return what `torch.cat(pieces, dim)`, or `torch.stack`, gives of the pieces that a loop
    leaves.
    """
    match args.positional:
        case [Pieces() as pieces, *rest] if function in (_STACKING if pieces.stacked else _JOINING):
            dim = args.keywords.get("dim", rest[0] if rest else Known(0))
            if (whole := pieces.along(dim)) is not None:
                return whole
            raise Untranslatable(
                "the results of a loop, joined along another dimension than the sequence"
            )
    return None


def is_short_cut(node: ast.If, frame: Frame) -> bool:
    """Whether `if x.shape[1] == 1: ... else: loop` takes a short cut for a single token, which
    changes nothing.
    """
    inner = [item for side in node.orelse for item in ast.walk(side) if isinstance(item, ast.For)]
    loops = [found for item in inner if (found := _found(item, frame)) is not None]
    tests = {
        f"{key}.{form} == 1"
        for found in loops
        for key in found.arguments
        for form in ("shape[1]", "size(1)")
    }
    is_plain = not any(found.turned for found in loops)
    return (
        is_plain
        and ast.unparse(node.test) in tests
        and first_token_is_plain(frame.translator.model)
    )


def _found(node: ast.For, frame: Frame) -> LoopParameters | None:
    """Return what the analysis found of a loop."""
    for found, places in _known(frame):
        if found.index < len(places) and places[found.index].lineno == node.lineno:
            return found
    return None


def _known(frame: Frame) -> Iterator[tuple[LoopParameters, list[ast.For]]]:
    """Yield what the analysis found of loops of a class, or of a file's functions, and the loops of
    the method or function.
    """
    known = frame.translator.findings.loops
    owners = frame.source.functions if frame.cls is None else [frame.cls.cls.__name__]
    for owner in owners:
        for found in (each for each in known.get(owner, []) if each.op in loop_forms()):
            if frame.cls is not None:
                yield found, loops_of(frame.cls.cls, found.method)
            elif found.method == owner:
                yield found, loops_in(frame.source.functions[owner])


def _before_softplus(value: Value, frame: Frame) -> Value:
    """Return what a variable is the softplus of: under a name of its own, where the method says it,
    else worked out.
    """
    if isinstance(value, Code) and isinstance(value.expr, ast.Name):
        variable = value.expr.id
        stores = [item for item in frame.out if variable in stored_names([item])]
        match stores[-1:]:
            case [
                ast.Assign(
                    targets=[ast.Name()], value=ast.Call(func=function, args=[inner], keywords=[])
                ) as made
            ] if ast.unparse(function).endswith("functional.softplus"):
                own = frame.fresh(f"{variable}_before")
                before = ast.Assign([name(own, store=True)], inner)
                made.value = call(function, name(own))
                frame.out.insert(frame.out.index(made), ast.copy_location(before, made))
                frame.env.values[own] = replace(value, expr=name(own))
                return frame.env.values[own]
    wide = frame.fresh("steps")
    frame.emit(ast.Assign([name(wide, store=True)], call(attribute(value.code(), "float"))))
    inverse = ast.parse(f"{wide} + torch.log(-torch.expm1(-{wide}))", mode="eval").body
    return Code(inverse)


class Loops(Mechanism):
    """Loops along the sequence."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """The results of all steps, joined."""
        return joined(function, args)

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """No short cut is taken."""
        return False if is_short_cut(node, frame) else None

    def loop(self, node: ast.For, frame: Frame) -> Literal[True] | None:
        """The op that a loop is."""
        return True if scan(node, frame) else None
