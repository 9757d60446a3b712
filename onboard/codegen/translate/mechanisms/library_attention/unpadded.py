"""Texts without their padding (`_upad_input` of transformers, `pad_input` of flash_attn) under a mask of
ones that code makes itself: all tokens of all texts, one text after the other.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import modeling_flash_attention_utils

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.program.uses import Ones
from onboard.codegen.translate.language.trees.syntax import attribute
from onboard.codegen.translate.language.values import Code, Items, Unread, Value
from onboard.codegen.translate.mechanisms.layouts.laid import Laid
from onboard.codegen.translate.mechanisms.recurrent import bound
from onboard.hf.old.attention_forms import pad_input

_UNPAD = getattr(modeling_flash_attention_utils, "_upad_input", None)
_IN_A_ROW = ((0, 1), (2,), (3,))
"""[texts * tokens, heads, dim] of [texts, tokens, heads, dim]."""
_CASTS = {"to", "long", "int", "bool", "type_as"}


@dataclass(frozen=True, eq=False)
class Ends(Value):
    """The ends of texts of one length, or that length."""

    sizes: ast.Tuple
    """How many texts there are, and how many tokens each has."""


def in_a_row(function: Any, args: Args, frame: Frame) -> Value | None:
    """Return queries, keys and values [texts * tokens, heads, dim] and what tells the texts apart, or
    tokens as texts again; None for another function, or a mask that may hide something.
    """
    if _UNPAD is not None and function is _UNPAD:
        return _unpadded(bound(function, args), frame)
    if function is pad_input and args.positional:
        match args.positional[0]:
            case Laid(expr=expr, dims=dims) if dims == _IN_A_ROW:
                return Code(expr)
    return None


def _unpadded(given: dict[str, Value], frame: Frame) -> Value | None:
    tensors = [given[f"{key}_layer"] for key in ("query", "key", "value")]
    if not _hides_nothing(given["attention_mask"], frame):
        return None
    rows = [Laid(item.code(), dims=_IN_A_ROW, axes=4) for item in tensors]
    ends = [Ends(_sizes(item.expr)) for item in rows[:2]]
    places = Unread("the places of tokens in texts without padding")
    return Items((*rows, places, Items((*ends,)), Items((*ends,))))


def _sizes(tensor: ast.expr) -> ast.Tuple:
    shape = attribute(tensor, "shape")
    sizes = [ast.Subscript(deepcopy(shape), ast.Constant(dim), ast.Load()) for dim in (0, 1)]
    return ast.Tuple([*sizes], ast.Load())


def _hides_nothing(mask: Value, frame: Frame) -> bool:
    """Whether a mask [texts, tokens] is of ones: `torch.ones(x.shape[:2])`, of any dtype."""
    if isinstance(mask, Ones):
        return True
    code = WrittenOut(local_values(frame)).visit(deepcopy(mask.code()))
    while isinstance(code, ast.Call) and isinstance(code.func, ast.Attribute):
        if ast.unparse(code.func) == "torch.ones":
            sizes = [ast.unparse(item) for item in code.args]
            return len(sizes) == 2 or len(sizes) == 1 and sizes[0].endswith(".shape[:2]")
        if code.func.attr not in _CASTS:
            return False
        code = code.func.value
    return False
