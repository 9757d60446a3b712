"""The canonical op of the functions of flash_attn and xformers: what they compute is known where they
are stood in for.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import (
    WrittenOut,
    local_values,
    statements_of,
)
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import (
    attribute,
    call,
    constant,
    op,
    same_code,
)
from onboard.codegen.translate.language.trees.token_counts import as_many
from onboard.codegen.translate.language.values import Code, Items, Known, Mask, Value
from onboard.codegen.translate.mechanisms.attention.sdpa import is_of_several
from onboard.codegen.translate.mechanisms.layouts.laid import Laid, permuted
from onboard.codegen.translate.mechanisms.library_attention.unpadded import Ends, in_a_row
from onboard.codegen.translate.mechanisms.recurrent import bound
from onboard.hf.old.attention_forms import (
    LowerTriangularMask,
    flash_attn_func,
    flash_attn_varlen_func,
    memory_efficient_attention,
)
from onboard.hf.old.layers.kernel_casts import without_cast

_NAMES = {*inspect.signature(flash_attn_varlen_func).parameters} - {"kwargs"}
_PLAIN = {"alibi_slopes": None, "return_attn_probs": False}
"""What other arguments must be, but for those that change nothing in inference."""


class FlashCalls(Mechanism):
    """`flash_attn_func(q, k, v, ..., causal=True)`, [batch, sequence, heads, dim], that of texts one
    after the other, and `memory_efficient_attention(q, k, v, LowerTriangularMask())`.
    """

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """That where a text is causal, perhaps in a window or with a cap of its scores."""
        if args.stars:
            return None
        if (rows := in_a_row(function, args, frame)) is not None:
            return rows
        if function is LowerTriangularMask:
            return Mask()
        if function is memory_efficient_attention:
            return _under_a_bias(bound(function, args), frame)
        if function is flash_attn_varlen_func and args.keywords.keys() <= _NAMES:
            return _of_one_length(bound(function, args), frame)
        return _attended(bound(function, args), frame) if function is flash_attn_func else None


def _under_a_bias(given: Mapping[str, Value], frame: Frame) -> Code | None:
    """Return the canonical op where what is added to scores is a causal mask."""
    if type(given["attn_bias"]) is not Mask:
        return None
    causal = {"softmax_scale": given["scale"], "causal": Known(True)}
    positional = [given[key] for key in ("query", "key", "value")]
    return _attended(bound(flash_attn_func, Args(positional, causal, [])), frame)


def _attended(given: Mapping[str, Value], frame: Frame) -> Code | None:
    """Return the canonical op, [batch, sequence, heads, dim]."""
    causal = given["causal"]
    if not (causal.equals(Known(True)) or is_of_several(causal, frame)):
        return None
    if not all(given[key].equals(Known(value)) for key, value in _PLAIN.items()):
        return None
    cap, seen = given["softcap"], _seen(given["window_size"], frame)
    if seen is None or not isinstance(cap, Known):
        return None
    q, k, v = _without_casts([given[key].code() for key in ("q", "k", "v")])
    scale = given["softmax_scale"].code()
    if _is_tensor(scale, frame):  # the op takes a number
        q, scale = ast.BinOp(q, ast.Mult(), scale), constant(1.0)
    fixed = [constant(None), constant(0.0), constant(True)]
    settings = [scale, constant(None), seen]
    last = [constant(cap.value or None), constant("bsnd")]
    return Code(ast.Call(op("torch_attention"), [q, k, v, *fixed, *settings, *last], []))


def _is_tensor(scale: ast.expr, frame: Frame) -> bool:
    """Whether scores are multiplied by what a function of torch makes: `1 / torch.full([], size)`."""
    whole = WrittenOut(local_values(frame)).visit(deepcopy(scale))
    calls = (node.func for node in ast.walk(whole) if isinstance(node, ast.Call))
    return any(ast.unparse(called).startswith("torch.") for called in calls)


def _without_casts(tensors: Sequence[ast.expr]) -> Sequence[ast.expr]:
    """Return tensors without the casts that are there for kernels: the code runs without them."""
    bare = [inner for inner in map(without_cast, tensors) if inner is not None]
    return bare if len(bare) == len(tensors) else tensors


def _of_one_length(given: Mapping[str, Value], frame: Frame) -> Code | None:
    """Return that of texts which lie one after the other, [texts * tokens, heads, dim], and have as many
    tokens each; None for texts of several lengths.
    """
    found = [_each(given[f"cu_seqlens_{x}"], given[f"max_seqlen_{x}"], frame) for x in "qk"]
    sizes = [item for item in found if item is not None]
    if len(sizes) < len(found):
        return None
    qkv = {
        key: _apart(given[key], size) for key, size in zip("qkv", sizes + sizes[1:], strict=True)
    }
    settings = {key: given[key] for key in ("softmax_scale", "causal", "window_size")}
    if _asks_for_as_many(given["causal"], sizes, frame):
        settings["causal"] = Known(True)
    attended = _attended(bound(flash_attn_func, Args([], {**qkv, **settings}, [])), frame)
    return attended and Laid(attended.expr, dims=((0, 1), (2,), (3,)), axes=4)


def _asks_for_as_many(causal: Value, sizes: Sequence[ast.Tuple], frame: Frame) -> bool:
    """Whether what is causal is asked by `queries == keys`, the tokens of each text of either: without
    a cache of the code's own there are as many.
    """
    code, values = causal.code(), local_values(frame)
    while isinstance(code, ast.Name) and code.id in values:
        code = values.pop(code.id)
    match code:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            asked = {ast.dump(left), ast.dump(right)}
            return asked == {ast.dump(size.elts[1]) for size in sizes}
    return False


def _each(ends: Value, length: Value, frame: Frame) -> ast.Tuple | None:
    """Return how many texts there are, and how many tokens each has, where their ends are
    `torch.arange(0, (texts + 1) * length, step=length)`; None for others.
    """
    if isinstance(ends, Ends):
        return ends.sizes
    code, values = ends.code(), local_values(frame)
    while isinstance(code, ast.Name) and code.id in values:
        code = values.pop(code.id)
    match code:
        case (
            ast.Call(
                args=[
                    ast.Constant(value=0),
                    ast.BinOp(
                        left=ast.BinOp(left=texts, op=ast.Add(), right=ast.Constant(value=1)),
                        op=ast.Mult(),
                        right=each,
                    ),
                ],
                keywords=[ast.keyword(arg="step", value=step), *_],
            ) as made
        ) if ast.unparse(made.func) == "torch.arange" and same_code(each, step):
            same = same_code(each, length.code()) or as_many(
                each, length.code(), statements_of(frame)
            )
            return ast.Tuple([texts, each], ast.Load()) if same else None
    return None


def _apart(value: Value, sizes: ast.Tuple) -> Code:
    """Return [texts, tokens, heads, dim] of what code sees as [texts * tokens, heads, dim]."""
    match value:
        case Laid(dims=((texts, tokens), (heads,), (dim,))):
            return Code(permuted(value.expr, [texts, tokens, heads, dim]))
    return Code(call(attribute(value.code(), "unflatten"), constant(0), deepcopy(sizes)))


def _seen(window: Value, frame: Frame) -> ast.expr | None:
    """Return how many keys a query sees, itself among them, of the window (keys before it, keys behind
    it), None as code: all; None for what is no such window. A number of the config's is asserted to be
    one.
    """
    match window:
        case Known(value=(int() as before, *_)) | Items(items=(Known(value=int() as before), *_)):
            return constant(None if before < 0 else before + 1)
        case Items(items=(Code(static=True) as before, *_)) if frame.cls is not None:
            zero = ast.Constant(0)
            frame.translator.guard(ast.Compare(before.expr, [ast.GtE()], [zero]), frame)
            return ast.BinOp(before.expr, ast.Add(), ast.Constant(1))
    return None
