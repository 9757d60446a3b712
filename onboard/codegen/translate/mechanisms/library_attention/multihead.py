"""PyTorch's own modules with attention, written out: `nn.MultiheadAttention` of a text with itself,
`nn.TransformerEncoderLayer`, and `nn.TransformerEncoder`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import functional as F

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import (
    Closure,
    Global,
    Instance,
    Made,
    ModuleList,
)
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import NONE, Items, Known, Mask, Value
from onboard.codegen.translate.mechanisms.attention.causal import Seen, Windowed

_ATTEND = """
def run(x):
    batch, length, width = x.shape
    sizes = (batch, length, module.num_heads, module.head_dim)
    query, key, value = linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
    query = query.view(sizes).transpose(1, 2)
    key = key.view(sizes).transpose(1, 2)
    value = value.view(sizes).transpose(1, 2)
    attended = sdpa(query, key, value, is_causal=True)
    return module.out_proj(attended.transpose(1, 2).reshape(batch, length, width))
"""
_BEFORE = """
def run(x):
    normed = block.norm1(x)
    x = x + attend(normed, normed, normed, is_causal=True)[0]
    return x + block.linear2(block.activation(block.linear1(block.norm2(x))))
"""
_AFTER = """
def run(x):
    x = block.norm1(x + attend(x, x, x, is_causal=True)[0])
    return block.norm2(x + block.linear2(block.activation(block.linear1(x))))
"""
_STACK = """
def run(x):
    for layer in layers:
        x = layer(x, is_causal=True)
    return x
"""
_NORMED = _STACK.replace("return x", "return encoder.norm(x)")
_PARAMETERS: Mapping[type, tuple[str, ...]] = {
    nn.MultiheadAttention: (
        *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"),
        *("average_attn_weights", "is_causal"),
    ),
    nn.TransformerEncoderLayer: ("src", "src_mask", "src_key_padding_mask", "is_causal"),
    nn.TransformerEncoder: ("src", "mask", "src_key_padding_mask", "is_causal"),
}
_MASKS = ("attn_mask", "src_mask", "mask")
_HIDING = ("key_padding_mask", "src_key_padding_mask")


class TorchAttention(Mechanism):
    """Calls of these modules with a causal mask."""

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """What they do, in terms of their parts."""
        match callee:
            case Instance(classes=(cls,)) if cls in _PARAMETERS and frame.kind == "forward":
                given = dict(zip(_PARAMETERS[cls], args.positional, strict=False)) | args.keywords
                made = [item for item in frame.translator.model.modules() if type(item) is cls]
                _check_causal(cls, given, frame)
                return _written(cls, callee, given, made, frame)
        return None


def _written(
    cls: type, callee: Instance, given: Mapping[str, Value], made: list[Any], frame: Frame
) -> Value:
    if cls is nn.MultiheadAttention:
        return Items((_attended(callee, given, made, frame), NONE))
    if cls is nn.TransformerEncoderLayer:
        return _layer(callee, given["src"], made, frame)
    normed = [item.norm is not None for item in made]
    layers = ModuleList((Made(nn.TransformerEncoderLayer),), attribute(callee.expr, "layers"))
    text = _NORMED if _all_alike(normed) else _STACK
    return _run(text, given["src"], {"encoder": callee, "layers": layers}, frame)


def _attended(callee: Instance, given: Mapping[str, Value], made: list[Any], frame: Frame) -> Value:
    query, key, value = (given[each] for each in ("query", "key", "value"))
    if not (query.equals(key) and query.equals(value)):
        raise Untranslatable("nn.MultiheadAttention of other keys than queries")
    if not all(_is_plain(item) for item in made):
        raise Untranslatable("nn.MultiheadAttention with batches second, or keys of its own")
    functions: dict[str, Value] = {
        "linear": Global(F.linear, attribute(name("F"), "linear")),
        "sdpa": Global(
            F.scaled_dot_product_attention, attribute(name("F"), "scaled_dot_product_attention")
        ),
    }
    frame.translator.remember_global("F", F, frame.source)
    return _run(_ATTEND, query, {"module": callee, **functions}, frame)


def _layer(callee: Instance, given: Value, made: list[Any], frame: Frame) -> Value:
    first = _all_alike([item.norm_first for item in made])
    text = _BEFORE if first else _AFTER
    attention = Instance((Made(nn.MultiheadAttention),), attribute(callee.expr, "self_attn"))
    return _run(text, given, {"block": callee, "attend": attention}, frame)


def _run(text: str, given: Value, seen: Mapping[str, Value], frame: Frame) -> Value:
    """Return what a function of one tensor gives, run where a module is called."""
    [node] = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    function = Closure(node, frame.source, dict(seen))
    return frame.translator.call_closure(function, Args([given], {}, []), frame)


def _check_causal(cls: type, given: Mapping[str, Value], frame: Frame) -> None:
    """Refuse masks that are not causal ones alone; PyTorch's hide where they are true."""
    masks = [given[key] for key in _MASKS if key in given and not given[key].equals(NONE)]
    hiding = [given[key] for key in _HIDING if key in given and not given[key].equals(NONE)]
    causal = given.get("is_causal", Known(False)).equals(Known(True))
    known = all(isinstance(mask, Mask) and not isinstance(mask, Seen | Windowed) for mask in masks)
    if hiding or not known or not (masks or causal):
        raise Untranslatable(f"nn.{cls.__name__} with a mask that is not causal")


def _is_plain(item: Any) -> bool:
    """Whether an attention has texts first, one projection, and nothing that it adds to keys."""
    added = item.bias_k is not None or item.bias_v is not None or item.add_zero_attn
    return item.batch_first and item.in_proj_weight is not None and not added


def _all_alike(found: list[bool]) -> bool:
    if len({*found}) > 1:
        raise Untranslatable("modules of PyTorch's that differ in where their norms are")
    return found[0]
