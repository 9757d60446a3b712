"""Attention to a window of tokens and to keys of blocks: modeling code puts both into one tensor,
with a mask for both.

The mask tells which keys of blocks a query sees, and generated code has no masks: the canonical op
is given the choice among these keys instead.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onboard.analysis.recognise.compressors import COMPRESSOR as COMPRESSOR
from onboard.analysis.recognise.compressors import INDEXER
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism, Sides
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    constant,
    name,
    same_code,
)
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Value

KINDS = (COMPRESSOR, INDEXER)


@dataclass(frozen=True, eq=False)
class Entries(Code):
    """Keys that stand for blocks of tokens, `expr` [batch, sequence, dim], as modeling code has
    them behind others.
    """

    unread = "keys of blocks that more than attention reads"
    chosen: ast.expr = field(default_factory=lambda: constant(None))
    """The numbers of the blocks that each query sees, or None."""
    size: ast.expr = field(default_factory=lambda: constant(None))
    """The tokens of a block."""

    def of_result(self, parts: Sequence[Code], index: int) -> Code:
        """Return the entries of a compressor's result: they, and what was chosen of them."""
        return replace(self, expr=parts[index].expr, chosen=parts[index + 1].expr)


@dataclass(frozen=True, eq=False)
class WithEntries(Code):
    """Keys of one head, `expr`, with those of blocks behind them; or without, where `optional`
    entries are None.
    """

    unread = "keys of blocks that more than attention reads"
    entries: Entries = field(default_factory=lambda: Entries(constant(None)))


def inputs(parameters: Mapping[str, Any], names: list[str]) -> list[str]:
    """Return which of a forward's parameters `names` the template of a block reads."""
    read = {parameters["x"], parameters["positions"], *parameters.get("passed", {}).values()}
    read |= {parameters["other"]} if "query" in parameters else set()
    return [item for item in names if item in read]


def shape(parameters: Mapping[str, Any]) -> Items:
    """Return what a compressor gives: entries, and a choice among them; `owned` tells whose they
    are.
    """
    size = ast.Subscript(
        attribute(name("self"), parameters["bias"], "shape"), constant(0), ast.Load()
    )
    return Items((Hole(0, like=Entries(constant(None), size=size)), Hole(1, optional=True)))


def owned(result: Value, module: Instance) -> Value:
    """Return a compressor's result with the size of a block as its caller reads it; any other as it
    is.
    """
    match result:
        case Result(shape=Items(items=(Hole(like=Entries(size=size) as like) as hole, choice))):
            path = ast.unparse(size).removeprefix("self.")
            own = ast.parse(f"{ast.unparse(module.expr)}.{path}", mode="eval").body
            return replace(
                result, shape=Items((replace(hole, like=replace(like, size=own)), choice))
            )
    return result


def joined(obj: object, args: Args) -> WithEntries | None:
    """Return `torch.cat([keys, entries], dim=2)` of keys [batch, 1, sequence, dim]; None for
    anything else.
    """
    match args.positional:
        case [Items(items=(Code() as keys, Entries() as entries))] if obj is torch.cat:
            if args.keywords.get("dim", NONE).equals(Known(2)):
                return WithEntries(keys.expr, transposed=keys.transposed, entries=entries)
    return None


def with_or_without(sides: Sides) -> WithEntries | None:
    """Return keys that have entries behind them after one branch only; the other one leaves None in
    their place.
    """
    for (one, _), (other, statements) in (sides, list(reversed(sides))):
        match one, other:
            case WithEntries(entries=Entries(expr=ast.Name(id=variable))), Code() if _same_tokens(
                one, other
            ):
                statements.append(ast.Assign([name(variable, store=True)], constant(None)))
                return replace(one, optional=True)
    return None


def _same_tokens(one: Code, other: Code) -> bool:
    return (
        type(other) is Code
        and one.transposed == other.transposed
        and same_code(one.expr, other.expr)
    )


def attention(keys: list[Value], plain: Items, query: Code, settings: list[Value]) -> Items:
    """Return attention to keys and values `keys` that have those of blocks behind them.

    `plain` is what attention to the tokens alone gives, `query` [batch, sequence, heads, dim];
    `settings` are scale, sinks, window and soft cap.
    """
    key, value = keys
    scale, sinks, window, cap = settings
    if not (
        isinstance(key, WithEntries)
        and isinstance(value, WithEntries)
        and same_code(key.expr, value.expr)
    ) or window.equals(NONE):
        raise Untranslatable("attention to keys of blocks with other values, or without a window")
    if not cap.equals(NONE):
        raise Untranslatable("attention to keys of blocks with a soft cap")
    tokens = Code(key.expr, transposed=not key.transposed)
    entries = key.entries
    given = [query.code(), tokens.code(), entries.expr, entries.chosen, entries.size]
    operator = attribute(name("torch"), "ops", "onboard", "torch_compressed_attention")
    called: ast.expr = ast.Call(
        operator, [*given, *(each.code() for each in (window, scale, sinks))], []
    )
    if key.optional:
        absent = ast.Compare(entries.expr, [ast.Is()], [constant(None)])
        called = ast.IfExp(absent, plain.items[0].code(), called)
    return Items((Code(called), NONE))


class CompressedKeys(Mechanism):
    """Keys of blocks."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Keys of tokens with those of blocks behind them."""
        return joined(function, args)

    def given(self, result: Value, module: Instance) -> Value | None:
        """What a compressor gives."""
        return owned(result, module)

    def joined(self, sides: Sides) -> Value | None:
        """Keys with or without those of blocks."""
        return with_or_without(sides)
