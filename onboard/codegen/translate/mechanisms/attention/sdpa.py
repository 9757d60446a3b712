"""PyTorch's `scaled_dot_product_attention` with a mask that is causal: the canonical op is so by
itself.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from onboard.codegen.translate.language.args import Args
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


class CausalSdpa(Mechanism):
    """`scaled_dot_product_attention(query, key, value, mask)`, [batch, heads, sequence, dim]."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """That with a causal mask, perhaps with a bias that is linear in the key's position."""
        if function is not nn.functional.scaled_dot_product_attention:
            return None
        given = dict(zip(_PARAMETERS, args.positional, strict=False)) | args.keywords
        mask = given.get("attn_mask", NONE)
        if not isinstance(mask, Mask | KeyBias) or isinstance(mask, Windowed) or args.stars:
            return None
        if isinstance(mask, KeyBias) and not mask.causal:
            raise Untranslatable("attention with a bias of positions that sees later keys")
        if not given.get("is_causal", Known(False)).equals(Known(False)):
            raise Untranslatable("attention that is causal twice")
        return _attention(given, mask.expr if isinstance(mask, KeyBias) else None)


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
