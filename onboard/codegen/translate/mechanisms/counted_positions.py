"""Positions that transformers counts: `position_ids` in generated code."""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from onboard.analysis.tiny.tiny_prompts import positions_below_length
from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.expressions.items import item_of
from onboard.codegen.translate.language.forms import (
    COUNTED,
    EVERY,
    FIRST,
    KEYS,
    POSITIONS,
    ROWS,
    ROWS_OF_HEADS,
    ROWS_OF_TEXT,
    SCALED,
    TABLE,
)
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.state import Restart
from onboard.codegen.translate.language.trees.syntax import attribute, call, name
from onboard.codegen.translate.language.values import Code, Items, Known, Value
from onboard.codegen.translate.mechanisms.layouts.lookup_ranks import lookup_ranks

_MADE = {POSITIONS: ROWS, SCALED: ROWS, EVERY: TABLE}
"""What is made of positions and a vector."""


_SIZES_BESIDE = re.compile(
    r"\[(?P<d>\w+) if (?P<i>\w+) == 1 or (?P=i) == "
    r"(?:(?P<tensor>.+)\.(?:ndim|dim\(\))|len\((?P<sizes>.+)\)) - 1 else 1"
    r" for (?P=i), (?P=d) in enumerate\((?P<all>.+)\)\]"
)
"""Sizes that broadcast a table to a tensor, as code of the first LLaMA works them out."""


class CountedPositions(Mechanism):
    """`torch.arange(sequence)` in a model that counts positions by itself."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Positions for `torch.arange([0,] length)` of a length that is known at run time only."""
        if (rows := _of_rows(function, expr, args)) is not None:
            return rows
        if frame.translator.is_helper(function):
            return _doubled(function, args)
        match args.positional:
            case [Code(static=False) as length] | [
                Known(value=0),
                Code(static=False) as length,
            ] if function is torch.arange and "step" not in args.keywords:
                if _is_part(length, frame):
                    return None
                _know_as_given(frame)
                return positions(frame)
            case [length] | [Known(value=0), length] if function is torch.arange:
                counted = positions(frame) if length.is_static else None
                if counted is not None and counted.form == POSITIONS:
                    return replace(plain_call(expr, args), form=EVERY)
        return None

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """Rows of a table, one for each token, that are cut to the text's length or looked up by
        the positions that they are those of.
        """
        if isinstance(owner, Code) and owner.form == ROWS_OF_HEADS:
            return owner if _is_cut_behind_heads(index) else None
        if not isinstance(owner, Code) or owner.form not in (ROWS, TABLE):
            return None
        if owner.form == ROWS and _is_from_first(node.slice, frame):
            return owner
        if owner.form == TABLE:
            return _looked_up(owner, index, node, frame)
        match index:
            case Code(form=str() as form) if form == POSITIONS:
                return _of_text(owner, frame)
            case _ if is_cut(index):
                return owner
            case Items(items=(Known(value=slice() as every), cut, *rest)) if every == slice(None):
                # A dimension of size one is before the rows: generated code has the batch there
                if is_cut(cut) and all(isinstance(part, Known) for part in rest):
                    return owner
        return None

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """The shape of rows, which have the batch in front."""
        if attr == "shape" and isinstance(owner, Code) and owner.form == ROWS:
            behind = ast.Slice(lower=ast.Constant(1))
            return Code(ast.Subscript(attribute(owner.code(), attr), behind, ast.Load()))
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """The sizes of rows, rows with dimensions of size one for what they are multiplied with, and
        the least of all positions.
        """
        if attr == "min" and isinstance(owner, Code) and not (args.positional or args.keywords):
            counted = positions(frame)
            if counted is not None and ast.unparse(owner.expr) == ast.unparse(counted.expr):
                return replace(plain_call(attribute(owner.expr, attr), args), form=FIRST)
            return None
        if attr in ("view", "reshape") and isinstance(owner, Code) and owner.form == ROWS:
            return _beside_heads(owner, args, frame)
        if attr == "squeeze" and isinstance(owner, Code):
            return _squeezed(owner, args)
        if attr != "size" or not isinstance(owner, Code) or owner.form != ROWS:
            return None
        match args.positional:
            case [Known(value=int() as dim)]:
                behind = Args([Known(dim + 1 if dim >= 0 else dim)], {}, [])
                return plain_call(attribute(owner.code(), attr), behind)
            case []:
                return self.attribute(owner, "shape", frame)
        return None

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Rows with a number, and positions that are scaled."""
        for rows, other in ((left, right), (right, left)):
            if isinstance(rows, Code) and rows.form in (ROWS, TABLE) and other.is_static:
                return Code(ast.BinOp(left.code(), op, right.code()), form=rows.form)
        if not isinstance(left, Code) or not right.is_static:
            return None
        if left.form in COUNTED and isinstance(op, ast.Mult | ast.Div):
            return Code(ast.BinOp(left.code(), op, right.code()), form=SCALED)
        return None


def _of_text(rows: Code, frame: Frame) -> Code:
    """Return rows that code looks up by positions [1, sequence], which gives them a dimension in
    front, or by positions [sequence].
    """
    ahead = frame.translator.specialised and lookup_ranks(frame.translator.model) == {2}
    return replace(rows, form=ROWS_OF_TEXT) if ahead else rows


def _squeezed(rows: Code, args: Args) -> Code | None:
    """Return rows without one of the dimensions of size one in front; None where they are none."""
    match rows.form, args.positional:
        case form, [Known(value=1)] if form == ROWS_OF_HEADS:
            return Code(plain_call(attribute(rows.expr, "squeeze"), args).expr, form=ROWS_OF_TEXT)
        case form, [Known(value=0)] if form == ROWS_OF_TEXT:
            return replace(rows, form=ROWS)
    return None


def _know_as_given(frame: Frame) -> None:
    """Begin anew where a module without parameters makes a table as long as the text, in a model that
    fails at positions beyond: those that it counts are those that it is given.
    """
    program = frame.translator
    if program.counts_positions or not program.specialised or frame.cls is None:
        return
    modules = program.modules_of(frame.cls.cls)
    learns = any(True for module in modules for _ in module.parameters())
    if modules and not learns and positions_below_length(program.model):
        program.positions = POSITIONS
        vars(program)["counts_positions"] = True
        program.argument_facts.clear()
        raise Restart


def _beside_heads(rows: Code, args: Args, frame: Frame) -> Code | None:
    """Return `rows.view(*sizes)` where the sizes are those of a tensor [batch, sequence, heads,
    size], with ones in place of batch and heads.
    """
    match args:
        case Args(positional=[Code() as sizes], stars=[] | [0], keywords={}):
            whole = WrittenOut(local_values(frame)).visit(deepcopy(sizes.expr))
            found = _SIZES_BESIDE.fullmatch(ast.unparse(whole))
            if found is None:
                return None
            same = (found["sizes"], f"{found['tensor']}.shape", f"{found['tensor']}.size()")
            if found["all"] in same:
                return Code(call(attribute(rows.expr, "unsqueeze"), ast.Constant(2)))
    return None


def _is_part(length: Code, frame: Frame) -> bool:
    """Whether a number is a part of a size, as half of a head is: a text is counted whole."""
    whole = WrittenOut(local_values(frame)).visit(deepcopy(length.expr))
    return any(isinstance(node, ast.FloorDiv) for node in ast.walk(whole))


def is_cut(index: Value) -> bool:
    """Whether an index is that of as many rows as are known at run time, or of all."""
    match index:
        case Known(value=slice(start=None | 0, stop=None, step=None)):
            return True
        case Code(expr=ast.Slice(lower=None | ast.Constant(value=0), step=None), static=False):
            return True
    return False


def _is_from_first(index: ast.expr, frame: Frame) -> bool:
    """Whether an index is `first:` of the first position."""
    match index:
        case ast.Slice(lower=ast.Name() as lower, upper=None, step=None):
            value = frame.evaluate(lower)
            return isinstance(value, Code) and value.form == FIRST
    return False


def _is_cut_behind_heads(index: Value) -> bool:
    """Whether an index of rows beside heads is that of as many rows as are known at run time."""
    match index:
        case Items(items=(Known(value=slice() as one), Known(value=slice() as other), cut, *rest)):
            every = all(isinstance(part, Known) for part in rest) and one == other == slice(None)
            return every and is_cut(cut)
    return False


def _looked_up(table: Code, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
    """Return the rows of a table of every position that an index cuts to the text, or looks up."""
    counted = positions(frame)
    if counted is None:
        return None
    rows = Code(ast.Subscript(table.code(), counted.expr, ast.Load()), form=ROWS)
    match index:
        case Code(form=str() as form) if form == POSITIONS:
            return rows
        case Code() if is_cut(index):
            return rows
        case Items(items=(cut, *rest)) if isinstance(cut, Code) and is_cut(cut):
            every = Items((Known(slice(None)), *rest))
            return item_of(rows, every, node, frame)
        case Items(items=(Known(value=None) as new, cut, *rest)) if isinstance(
            cut, Code
        ) and is_cut(cut):
            return item_of(rows, Items((new, Known(slice(None)), *rest)), node, frame)
    return None


def _of_rows(function: Any, expr: ast.expr, args: Args) -> Value | None:
    """Return rows that are made of positions and a vector, or of other rows."""
    match args.positional:
        case [Code(form=str() as form) as where, Code() as vector] if form in _MADE:
            if function is torch.outer:
                return _outer(where, vector)
        case [Known(value=str() as axes), Code(form=str() as form) as where, Code() as vector] if (
            form in _MADE and function is torch.einsum
        ):
            inputs, _, output = axes.replace(" ", "").partition("->")
            if output and inputs == ",".join(output) and len(output) == 2:
                return _outer(where, vector)
        case [Code(form=str() as form)] if form in _MADE.values() and function in (
            torch.cos,
            torch.sin,
        ):
            return replace(plain_call(expr, args), form=form)
        case [Items(items=parts), *last] if function in (torch.cat, torch.stack) and parts:
            dim = last[0] if last else args.keywords.get("dim", args.keywords.get("axis"))
            forms = {part.form if isinstance(part, Code) else None for part in parts}
            of_rows = forms in ({ROWS}, {TABLE})
            if of_rows and isinstance(dim, Known) and dim.value == -1:
                return replace(plain_call(expr, args), form=forms.pop())
    return None


def _doubled(function: Any, args: Args) -> Code | None:
    """Return what a helper makes of rows [sequence, dim] that has each number twice, in pairs: it
    is written for two dimensions, and generated code has the batch before them.
    """
    match args.positional:
        case [Code(form=str() as form) as rows] if form in _MADE.values() and not args.keywords:
            table = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
            try:
                made = function(table.clone())
            except Exception:  # it is for other tables, or for something else
                return None
            if isinstance(made, torch.Tensor) and torch.equal(made, table.repeat_interleave(2, -1)):
                last = ast.UnaryOp(ast.USub(), ast.Constant(1))
                repeat = attribute(rows.code(), "repeat_interleave")
                return Code(call(repeat, ast.Constant(2), dim=last), form=form)
    return None


def _outer(where: Code, vector: Code) -> Code:
    rows = call(attribute(where.code(), "unsqueeze"), ast.UnaryOp(ast.USub(), ast.Constant(1)))
    return Code(ast.BinOp(rows, ast.Mult(), vector.code()), form=_MADE[where.form or ""])


def positions(frame: Frame) -> Code | None:
    """Return what stands for counted positions.

    A forward that does not get `position_ids` is given them by its callers, see `Translator`.
    """
    program = frame.translator
    # What a helper counts in a model with ALiBi is keys, see `biases`
    helper = frame.kind == "function" and program.specialised and not program.findings.alibi
    if not (frame.kind == "forward" or helper) or not program.counts_positions:
        return None
    if program.writes_positions:
        return None
    return Code(name("position_ids"), form=KEYS if program.findings.alibi else POSITIONS)
