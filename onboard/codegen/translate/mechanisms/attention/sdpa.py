"""PyTorch's `scaled_dot_product_attention` with a mask that is causal: the canonical op is so by
itself.
"""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from typing import Any

from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.expressions.decisions import (
    WrittenOut,
    assigned,
    local_values,
    statements_of,
)
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import Untranslatable, constant, op
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Known,
    Mask,
    Value,
    untransposed,
)
from onboard.codegen.translate.mechanisms.attention.biases import KeyBias
from onboard.codegen.translate.mechanisms.attention.causal import Windowed

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
_SIZE = re.compile(r".+\.(shape\[-?[12]\]|size\(-?[12]\))")


class CausalSdpa(Mechanism):
    """`scaled_dot_product_attention(query, key, value, mask)`, [batch, heads, sequence, dim]."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """That with a causal mask, perhaps with a bias that is linear in the key's position; in code of
        repositories also that which is told to be causal, where its layer's forward was not recorded.
        """
        if function is not nn.functional.scaled_dot_product_attention:
            return None
        given = dict(zip(_PARAMETERS, args.positional, strict=False)) | args.keywords
        mask = given.get("attn_mask", NONE)
        if mask.equals(NONE) and is_of_several(given.get("is_causal", NONE), frame):
            keywords = {key: item for key, item in given.items() if key not in _PARAMETERS[:3]}
            return plain_call(
                expr,
                Args(
                    [given[key] for key in _PARAMETERS[:3]],
                    {**keywords, "is_causal": Known(True)},
                    [],
                ),
            )
        if mask.equals(NONE) and _is_causal(given, args, frame):
            return _attention(given, None)
        if not isinstance(mask, Mask | KeyBias) or isinstance(mask, Windowed) or args.stars:
            return None
        if isinstance(mask, KeyBias) and not mask.causal:
            raise Untranslatable("attention with a bias of positions that sees later keys")
        if not given.get("is_causal", Known(False)).equals(Known(False)):
            raise Untranslatable("attention that is causal twice")
        return _attention(given, mask.expr if isinstance(mask, KeyBias) else None)


def _is_causal(given: dict[str, Value], args: Args, frame: Frame) -> bool:
    told = given.get("is_causal", NONE).equals(Known(True))
    return told and frame.translator.specialised and not args.stars


def is_of_several(causal: Value, frame: Frame) -> bool:
    """Whether attention is said to be causal where a text has several tokens: `x.shape[1] > 1`, or
    `!= 1`. The last token of one sees all of it, too.
    """
    if not (frame.translator.specialised and type(causal) is Code and not causal.static):
        return False
    match WrittenOut(local_values(frame)).visit(deepcopy(causal.expr)):
        case ast.Compare(
            left=length, ops=[ast.Gt() | ast.NotEq()], comparators=[ast.Constant(value=1)]
        ):
            written = ast.unparse(length)
            sizes = unpacked_sizes(frame) | _given_numbers(frame)
            return _SIZE.fullmatch(written) is not None or written in sizes
    return False


def _given_numbers(frame: Frame) -> set[str]:
    """Return what a method is handed, and does not assign: compared with a number, it is a size that
    the caller read. That it is not the batch's the generated tests see.
    """
    made = assigned(frame)
    return {key for key in frame.env.values if key.isidentifier() and key not in made}


def unpacked_sizes(frame: Frame) -> set[str]:
    """Return the variables that are a tensor's sizes but for the first: `_, length, _ = x.shape`."""
    return {
        item.id
        for statement in statements_of(frame)
        if isinstance(statement, ast.Assign)
        and isinstance(targets := statement.targets[0], ast.Tuple)
        and ast.unparse(statement.value).endswith((".shape", ".size()"))
        for item in targets.elts[1:]
        if isinstance(item, ast.Name)
    }


def _attention(given: dict[str, Value], slopes: ast.expr | None) -> Code:
    heads_first = [given[key] for key in _PARAMETERS[:3]]
    by_sequence = all(isinstance(item, Code) and item.transposed for item in heads_first)
    qkv = [(untransposed(item) if by_sequence else item).code() for item in heads_first]
    scale = given.get("scale", NONE).code()
    settings = [constant(None), constant(0.0), constant(True), scale, *[constant(None)] * 3]
    layout = constant("bsnd" if by_sequence else "bnsd")
    keywords = [] if slopes is None else [ast.keyword("alibi_slopes", slopes)]
    called = ast.Call(op("torch_attention"), [*qkv, *settings, layout], keywords)
    return Code(called, transposed=by_sequence)
