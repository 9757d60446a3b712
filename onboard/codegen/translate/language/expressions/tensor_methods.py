"""Calls of a tensor's methods."""

from __future__ import annotations

import ast
from dataclasses import replace

import torch

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import (
    CHANNELS,
    EVERY,
    POSITIONS,
    ROWS,
    ROWS_OF_HEADS,
    ROWS_OF_TEXT,
    TABLE,
    TENSORS,
    TRIANGLE,
    UPCAST,
)
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import attribute, call
from onboard.codegen.translate.language.values import NONE, Code, Known, Value

_POINTWISE = {
    "to",
    "float",
    "type",
    "type_as",
    "half",
    "bfloat16",
    "sigmoid",
    "tanh",
    "abs",
    "neg",
    "clamp",
}
_CASTS = {"to", "type", "bool", "contiguous"}
_OF_EACH_ROW = {"to", "float", "type", "type_as", "half", "bfloat16", "cos", "sin", "contiguous"}
_WITH_ROWS = (ROWS, ROWS_OF_TEXT, ROWS_OF_HEADS, TABLE, EVERY)
_MOVES = {"transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "expand"}
_PARTS = {"chunk", "split", "tensor_split", "unbind"}
_AXES_BATCH_TOKENS = 3
_ALONG_LAST = {"chunk", "split", "mean", "sum", "norm", "softmax"}


def tensor_method(owner: Code, attr: str, args: Args) -> Value:
    """Return a tensor method's result; a transposition of heads and sequence is put off as long as
    it can be.
    """
    known = [value.value for value in args.positional if isinstance(value, Known)]
    if (
        (attr == "float" or (attr == "to" and _is_float32(args)))
        and owner.form is None
        and not owner.static
    ):
        return replace(_cast(owner, attr, args), form=UPCAST)
    swaps = attr == "transpose" and sorted(map(str, known)) == ["1", "2"]
    if swaps and not owner.static and owner.form != CHANNELS:
        return Code(owner.expr, transposed=not owner.transposed)
    if owner.form == POSITIONS and (axes := _of_several_axes(owner, attr, args)):
        return axes
    if owner.form == POSITIONS and (
        attr in ("expand", "long", "to", "repeat", "type_as", "float", "contiguous")
        or (attr == "unsqueeze" and known == [0])
        or (attr in ("view", "reshape") and known in ([-1], [1, -1], [1, 1, -1]))
    ):
        return owner
    if owner.form in _WITH_ROWS and attr in _OF_EACH_ROW:
        return replace(plain_call(attribute(owner.expr, attr), args), form=owner.form)
    if owner.form in (ROWS, ROWS_OF_TEXT) and (added := _with_dimensions(owner, attr, args)):
        return added
    if owner.form == TRIANGLE and (
        attr in _CASTS or (attr == "unsqueeze" and known in ([0], [1], [-3]))
    ):
        return replace(plain_call(attribute(owner.expr, attr), args, owner.static), form=TRIANGLE)
    if attr == "index_select" and (rows := _rows_at_positions(owner, args)) is not None:
        return rows
    if attr == "permute" and known == [0, 2, 1, 3] and len(args.positional) == 4:
        return Code(owner.expr, transposed=not owner.transposed)
    if attr in ("view", "reshape") and (swapped := _single_head(owner, attr, args)) is not None:
        return swapped
    if attr == "contiguous" and (owner.transposed or _is_reshaped(owner.expr)):
        return owner
    if (
        attr in ("to", "type")  # the latter of no dtype: a constructor's is what the builder says
        and len(args.positional) == 1
        and not args.keywords
        and _is_device(args.positional[0])
    ):
        return owner
    if owner.transposed and (attr in _POINTWISE or (attr in _ALONG_LAST and _last_dim(args))):
        called = plain_call(attribute(owner.expr, attr), args)
        return Code(called.expr, transposed=True, form=TENSORS if attr in _PARTS else None)
    if owner.transposed and attr == "view":
        attr = "reshape"  # a transposed tensor has no view of another shape
    called = plain_call(attribute(owner.code(), attr), args, owner.static and args.static())
    if attr in _PARTS:
        return replace(called, form=TENSORS)
    return replace(called, form=UPCAST) if owner.form == UPCAST and attr in _MOVES else called


def _with_dimensions(rows: Code, attr: str, args: Args) -> Code | None:
    """Return rows of a table with dimensions of size one more; the batch is in front of them."""
    match attr, args.positional:
        case "unsqueeze", [Known(value=int() as dim)]:
            return _unsqueezed(rows, dim)
        case "view" | "reshape", [Known(value=1), *_] if rows.form == ROWS:
            return _viewed(rows, args.positional)
    return None


def _viewed(rows: Code, sizes: list[Value]) -> Code | None:
    """Return `rows.view(1, ..., sequence, 1, ..., size)`."""
    own = [place for place, size in enumerate(sizes) if not size.equals(Known(1))]
    if len(own) < 2 or sizes[own[0]].is_static:
        return None
    if len(own) > 2 or own[1] != len(sizes) - 1:
        return _reshaped(rows, own[0], sizes[own[0] + 1 :])
    ahead, inside = own[0], own[1] - own[0] - 1
    viewed: Value = replace(rows, form=ROWS_OF_TEXT)
    for place in [0] * (ahead - 1) + [ahead + 1] * inside:
        added = Args([Known(place or 1)], {}, [])
        viewed = plain_call(attribute(viewed.code(), "unsqueeze"), added)
    return viewed if isinstance(viewed, Code) else None


def _reshaped(rows: Code, ahead: int, behind: list[Value]) -> Code:
    """Return `rows.view(1, ..., sequence, *behind)`, of rows that are no vectors or become none."""
    shape = attribute(rows.expr, "shape")
    batch, tokens = (ast.Subscript(shape, ast.Constant(dim), ast.Load()) for dim in (0, 1))
    ones = [Known(1)] * (ahead - 1)
    return plain_call(
        attribute(rows.expr, "reshape"), Args([Code(batch), *ones, Code(tokens), *behind], {}, [])
    )


def _unsqueezed(rows: Code, dim: int) -> Code | None:
    """Return `rows.unsqueeze(dim)`."""
    ahead = rows.form == ROWS
    if dim == 0 and ahead:
        return Code(rows.expr, form=ROWS_OF_TEXT)
    if dim < 0 or (dim and not ahead):
        return None
    added = plain_call(attribute(rows.expr, "unsqueeze"), Args([Known(dim + 1)], {}, []))
    return replace(added, form=ROWS) if ahead else added


def _of_several_axes(positions: Code, attr: str, args: Args) -> Code | None:
    """Return `positions.expand(axes, batch, -1)`, or `repeat`, of positions that are the same on all
    axes, [axes, batch, sequence]: they have the batch before.
    """
    if attr not in ("expand", "repeat") or len(args.positional) != _AXES_BATCH_TOKENS:
        return None
    rest = Known(-1 if attr == "expand" else 1)
    ahead = call(attribute(positions.expr, "unsqueeze"), ast.Constant(0))
    return plain_call(attribute(ahead, attr), Args([args.positional[0], rest, rest], {}, []))


def _rows_at_positions(owner: Code, args: Args) -> Code | None:
    """Return `table.index_select(0, positions)` for positions of each text, which have a dimension
    more.
    """
    match args.positional:
        case [Known(value=0), Code(form=str() as form) as positions] if form == POSITIONS:
            return Code(ast.Subscript(owner.code(), positions.code(), ast.Load()), form=ROWS)
    return None


def _is_float32(args: Args) -> bool:
    return (
        len(args.positional) == 1
        and isinstance(args.positional[0], Global)
        and args.positional[0].obj is torch.float32
    )


def _cast(owner: Code, attr: str, args: Args) -> Code:
    return Code(plain_call(attribute(owner.expr, attr), args).expr, transposed=owner.transposed)


def _single_head(owner: Code, attr: str, args: Args) -> Code | None:
    """Return `x.view(batch, 1, sequence, size)` as the transposed `x.view(batch, sequence, 1,
    size)`.
    """
    match args.positional:
        case [batch, Known(value=1) as head, sequence, size] if (
            not owner.transposed and not args.keywords
        ):
            turned = Args([batch, sequence, head, size], {}, [])
            return Code(plain_call(attribute(owner.expr, attr), turned).expr, transposed=True)
    return None


def _is_device(value: Value) -> bool:
    """Whether a value is no device or a tensor's: the model lies on one, so that moving changes
    nothing.
    """
    if isinstance(value, Known):
        return value.value is None
    return (
        isinstance(value, Code)
        and isinstance(value.expr, ast.Attribute)
        and value.expr.attr == "device"
    )


def _is_reshaped(expr: ast.expr) -> bool:
    return (
        isinstance(expr, ast.Call)
        and isinstance(expr.func, ast.Attribute)
        and expr.func.attr == "reshape"
    )


def _last_dim(args: Args) -> bool:
    dim = args.keywords.get("dim", args.positional[-1] if args.positional else NONE)
    return isinstance(dim, Known) and dim.value == -1
