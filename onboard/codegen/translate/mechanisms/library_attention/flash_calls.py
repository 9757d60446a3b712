"""The canonical op of flash_attn's function: what it computes is known where it is stood in for."""

from __future__ import annotations

import ast
from typing import Any

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import constant, op
from onboard.codegen.translate.language.values import Code, Items, Known, Value
from onboard.codegen.translate.mechanisms.attention.sdpa import is_of_several
from onboard.codegen.translate.mechanisms.recurrent import bound
from onboard.hf.old.attention_forms import flash_attn_func

_PLAIN = {"alibi_slopes": None, "return_attn_probs": False}
"""What other arguments must be, but for those that change nothing in inference."""


class FlashCalls(Mechanism):
    """`flash_attn_func(q, k, v, ..., causal=True)`, [batch, sequence, heads, dim]."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """That where a text is causal, perhaps in a window or with a cap of its scores."""
        if function is not flash_attn_func or args.stars:
            return None
        given = bound(function, args)
        causal = given["causal"]
        if not (causal.equals(Known(True)) or is_of_several(causal, frame)):
            return None
        if not all(given[key].equals(Known(value)) for key, value in _PLAIN.items()):
            return None
        window, cap = _numbers(given["window_size"]), given["softcap"]
        if window is None or not isinstance(cap, Known):
            return None
        qkv = [given[key].code() for key in ("q", "k", "v")]
        seen = None if window[0] < 0 else window[0] + 1  # the key of the query itself is one more
        fixed = [constant(None), constant(0.0), constant(True)]
        settings = [given["softmax_scale"].code(), constant(None), constant(seen)]
        last = [constant(cap.value or None), constant("bsnd")]
        return Code(ast.Call(op("torch_attention"), [*qkv, *fixed, *settings, *last], []))


def _numbers(value: Value) -> tuple[int, ...] | None:
    """Return a tuple of numbers; None for anything else."""
    match value:
        case Known(value=tuple() as numbers):
            return numbers
        case Items(items=items) if all(isinstance(item, Known) for item in items):
            return tuple(item.value for item in items if isinstance(item, Known))
    return None
