"""Loops along the sequence that the analysis found to be a canonical op."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Literal

import torch

from onboard.analysis.recognise.watch import loops_of
from onboard.analysis.spec_blocks import LoopParameters
from onboard.analysis.tiny.tiny_model import first_token_is_plain
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, op
from onboard.codegen.translate.language.values import NONE, Code, Known, Unread, Value
from onboard.codegen.translate.mechanisms.recurrent import argument


@dataclass(frozen=True, eq=False)
class Pieces(Value):
    """A list of tensors that a loop along the sequence fills: together, along dimension `dim`, they
    are `whole`.
    """

    whole: Code
    dim: int


def scan(node: ast.For, frame: Frame) -> bool:
    """Write a loop as the canonical op that it is; return whether it is one.

    What the loop carries from token to token is None behind it: generated code keeps it in caches,
        if at all.
    """
    found = _found(node, frame)
    if found is None:
        return False
    turned, result = found.turned, found.result
    arguments = [_argument(key, turned, frame) for key in found.arguments]
    made = Code(ast.Call(op(found.op), arguments, []), transposed=turned)
    assigned = [
        item.id
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    ]
    frame.env.values.update(
        dict.fromkeys(_filled(node), Unread(f"what the loop before leaves besides {result}"))
    )
    frame.env.values.update(dict.fromkeys(assigned, NONE))
    if found.joined is None:
        frame.bind(result, made, node)
    else:
        frame.env.values[result] = Pieces(made, found.joined)
    return True


def _filled(node: ast.For) -> list[str]:
    """Return the variables whose items a loop sets or to which it appends."""
    inside = list(ast.walk(node))
    stores = [
        item.value
        for item in inside
        if isinstance(item, ast.Subscript) and isinstance(item.ctx, ast.Store)
    ]
    grown = [
        item.value for item in inside if isinstance(item, ast.Attribute) and item.attr == "append"
    ]
    return [owner.id for owner in (*stores, *grown) if isinstance(owner, ast.Name)]


def joined(function: Any, args: Args) -> Value | None:
    """Return what `torch.cat(pieces, dim)` gives of the pieces that a loop leaves."""
    match args.positional:
        case [Pieces(whole=whole, dim=dim), *rest] if function in (
            torch.cat,
            torch.concat,
            torch.concatenate,
        ):
            along = args.keywords.get("dim", rest[0] if rest else Known(0))
            if any(along.equals(Known(place)) for place in (dim, dim - 4)):
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
    is_plain = all(not found.turned for found in loops)
    return (
        is_plain
        and ast.unparse(node.test) in tests
        and first_token_is_plain(frame.translator.model)
    )


def _found(node: ast.For, frame: Frame) -> LoopParameters | None:
    """Return what the analysis found of a loop."""
    if frame.cls is None:
        return None
    for found in frame.translator.findings.loops.get(frame.cls.cls.__name__, []):
        places = loops_of(frame.cls.cls, found.method)
        index = found.index
        if index < len(places) and places[index].lineno == node.lineno:
            return found
    return None


def _argument(key: str, turned: bool, frame: Frame) -> ast.expr:
    value = frame.evaluate(ast.parse(key, mode="eval").body)
    if key.startswith("self."):
        return call(attribute(value.code(), "flatten"))
    return argument(value, turned)


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
