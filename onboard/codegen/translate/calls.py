"""Evaluate calls partially."""

from __future__ import annotations

import ast
import copy
from collections import UserDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import is_torchdynamo_compiling

from onboard.codegen.translate import (
    biases,
    canonical,
    causal,
    chosen,
    composite,
    compressed,
    indexer,
    latent,
    loops,
    objects,
    recurrent,
    repeats,
    scores,
    windows,
)
from onboard.codegen.translate.args import Args, plain_call
from onboard.codegen.translate.builtin_calls import BUILTINS
from onboard.codegen.translate.forms import ONES, SHARED, ZEROS
from onboard.codegen.translate.object_values import (
    AttentionInterface,
    Choice,
    Config,
    Global,
    Instance,
    Made,
    MaskMaker,
    Method,
    ModuleList,
    Self,
    Super,
)
from onboard.codegen.translate.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.tensor_methods import tensor_method
from onboard.codegen.translate.values import NONE, Code, Items, Known, Mapping, Mask, PaddingMask, Value

if TYPE_CHECKING:
    from onboard.codegen.translate.frame import Frame

_OF_MASKS = {"to", "bool", "type", "contiguous", "view", "expand_as", "unsqueeze"}
_DROPOUTS = (nn.functional.dropout, torch.dropout)
_IDENTITIES = (nn.Dropout, nn.Identity)


def evaluate_call(node: ast.Call, frame: Frame) -> Value:
    """Return the value of a call."""
    from onboard.codegen.translate.evaluate import evaluate, settle

    if isinstance(node.func, ast.Attribute):
        owner = settle(evaluate(node.func.value, frame), frame)
        if objects.is_logger(owner):
            return NONE
        return _call_method(owner, node.func.attr, _arguments(node, frame), frame)
    return call_value(evaluate(node.func, frame), _arguments(node, frame), frame)


def _arguments(node: ast.Call, frame: Frame) -> Args:
    from onboard.codegen.translate.evaluate import evaluate, settle

    args = Args([], {}, [])
    for item in node.args:
        value = settle(evaluate(item.value if isinstance(item, ast.Starred) else item, frame), frame)
        if isinstance(item, ast.Starred) and isinstance(value, Items):
            args.positional.extend(value.items)
            continue
        if isinstance(item, ast.Starred):
            args.stars.append(len(args.positional))
        args.positional.append(value)
    for keyword in node.keywords:
        value = settle(evaluate(keyword.value, frame), frame)
        if keyword.arg is not None:
            args.keywords[keyword.arg] = value
        elif isinstance(value, Mapping):
            args.keywords.update(value.items)
        else:
            raise Untranslatable(f"** of an unknown dict at {frame.source.location(node)}")
    return args


def call_value(callee: Value, args: Args, frame: Frame) -> Value:
    """Return `callee(*args)`."""
    match callee:
        case Global(obj=obj, expr=expr):
            return _call_global(obj, expr, args, frame)
        case Instance() if all(issubclass(cls, _IDENTITIES) for cls in callee.classes):
            return args.positional[0]
        case Instance(classes=(cls,)) if cls is nn.Softmax and isinstance(args.positional[0], scores.Scores):
            return scores.softmax(args.positional[0]) or plain_call(callee.expr, args)
        case Instance(classes=(cls,)) if cls.__name__ in frame.translator.scan_modules:
            return recurrent.scan_module(cls, args, frame)
        case Instance():
            return frame.translator.call_module(callee, args, frame)
        case MaskMaker(chunked=True):
            return causal.same_chunk(args.keywords, frame)
        case Choice():
            return _chosen(callee, args, frame)
        case MaskMaker(padding=padding):
            return PaddingMask() if padding else Mask()
        case AttentionInterface():
            return latent.attention(args) or canonical.attention(windows.with_window(args, frame))
        case Method(owner=owner, name=attr):
            return _call_method(owner, attr, args, frame)
        case Code(expr=expr, static=static):
            return plain_call(expr, args, static and args.static())
    raise Untranslatable(f"a call of a {type(callee).__name__}")


def _chosen(choice: Choice, args: Args, frame: Frame) -> Value:
    """Return what a call of one of two functions gives, as `a() if test else b()`."""
    first, second = (call_value(option, args, frame) for option in (choice.first, choice.second))
    expr = ast.IfExp(choice.test, first.code(), second.code())
    if isinstance(first, Instance) and isinstance(second, Instance):
        return Instance(first.made + second.made, expr, first.optional or second.optional)
    return Code(expr)


def _call_method(owner: Value, attr: str, args: Args, frame: Frame) -> Value:
    match owner:
        case Self():
            return frame.translator.call_own_method(attr, args, frame)
        case Super():
            return frame.translator.call_super(attr, args, frame)
        case Mapping():
            return _mapping_method(owner, attr, args, frame)
        case ModuleList() if attr == "keys":
            return Code(plain_call(attribute(owner.expr, attr), args).expr, static=True)
        case Mask() if attr == "get":
            return owner  # one of a dict of masks
        case Code():
            return tensor_method(owner, attr, args, windows.of_filled(owner, attr, args, frame))
        case Known(value=value) if args.known():
            return Known(getattr(value, attr)(*(item.value for item in args.positional)))  # type: ignore[attr-defined]
        case Global() if objects.is_attention_dispatch(owner) and attr in ("get_interface", "get"):
            return AttentionInterface()
        case Config() if attr == "get_text_config":
            return composite.text_config(owner)
        case Mask() | causal.Ones() if attr in _OF_MASKS:
            return owner
        case Mask() if (shown := chosen.narrowed(owner, attr, args)) is not None:
            return shown
        case Global(obj=type() as cls) if attr == "apply" and issubclass(cls, torch.autograd.Function):
            return frame.translator.call_autograd(cls, args, frame)
        case Instance() if attr == "forward":
            return call_value(owner, args, frame)
        case Instance(classes=classes) if all(frame.translator.has_method(cls, attr) for cls in classes):
            return frame.translator.call_module(owner, args, frame, attr)
        case Instance() if attr == "register_buffer":
            frame.emit(ast.Expr(plain_call(attribute(owner.code(), attr), args).expr))
            return NONE
    return call_value(objects.get_attribute(owner, attr, frame), args, frame)


def _mapping_method(owner: Mapping, attr: str, args: Args, frame: Frame) -> Value:
    key = args.positional[0].value if args.positional and isinstance(args.positional[0], Known) else None
    default = args.positional[1] if len(args.positional) > 1 else NONE
    if attr == "copy":
        return Mapping(dict(owner.items))
    if attr == "get" and key is None and owner.items and all(isinstance(v, Mask) for v in owner.items.values()):
        return PaddingMask()
    if attr in ("get", "pop") and isinstance(key, str):
        value = owner.items.get(key, default)
        if attr == "pop":
            owner.items.pop(key, None)
        return value
    if attr == "update" and not args.stars:
        for item in args.positional:
            if not isinstance(item, Mapping):
                raise Untranslatable("update of a dict by an unknown one")
            owner.items.update(item.items)
        owner.items.update(args.keywords)
        return NONE
    if attr in ("keys", "values", "items"):
        pairs: list[tuple[Value, Value]] = [(Known(entry), value) for entry, value in owner.items.items()]
        if attr == "items":
            return Items(tuple(map(Items, pairs)))
        return Items(tuple(pair[attr == "values"] for pair in pairs))
    raise Untranslatable(f"dict.{attr}")


def _call_global(obj: Any, expr: ast.expr, args: Args, frame: Frame) -> Value:
    if obj in _DROPOUTS:
        return args.positional[0]
    if obj is copy.deepcopy and isinstance(args.positional[0], Config):
        return replace(args.positional[0], copy=plain_call(expr, args).expr)
    if obj is torch.arange and (counted := _counted(args, frame)) is not None:
        return counted
    if (keys := biases.counted(obj, expr, args, frame)) is not None:
        return keys
    if obj is is_torchdynamo_compiling:
        return Known(True)  # generated code is made for export
    if objects.asks_for_package(obj):
        return Known(False)  # kernels of other packages: generated code has its own
    if (handler := BUILTINS.get(obj) if isinstance(obj, type) or callable(obj) else None) is not None:
        return handler(expr, args, frame)
    if getattr(obj, "__module__", None) == "transformers.initialization":
        return NONE  # weights come from a checkpoint
    if objects.is_cache(obj):
        return NONE  # nothing was before the text
    if objects.is_output(obj):
        return objects.output(obj, args.positional, args.keywords)
    if objects.is_module(obj):
        return _construct(obj, expr, args, frame)
    if (chosen := composite.chosen_class(obj, args)) is not None:
        return frame.translator.construct(chosen, args)
    if (op := frame.translator.rope_op(obj)) is not None:
        translator = frame.translator
        dims = translator.rope_dims.get(obj.__name__), translator.rope_tables.get(obj.__name__)
        return canonical.rope(obj, op, args, *dims)
    if (keys := compressed.joined(obj, args)) is not None:
        return keys
    if (whole := loops.joined(obj, args)) is not None:
        return whole
    if (form := recurrent.form_of(obj, frame)) is not None:
        return recurrent.scan(obj, form, args)
    if latent.names_of(frame) and (parts := latent.rearranged(obj, expr, args)) is not None:
        return parts
    if (repeated := repeats.call_of(obj, args)) is not None:
        return repeated
    if frame.translator.is_helper(obj):
        return frame.translator.call_function(obj, args, frame)
    if isinstance(obj, type) and issubclass(obj, UserDict) and all(item.equals(NONE) for item in args.positional):
        return Code(ast.Dict([], []), form=SHARED)
    static = args.static() and not _is_torch(obj)
    if obj is torch.zeros and not static:
        return replace(plain_call(expr, args), form=ZEROS)
    if obj is torch.ones and not static and len(args.positional) == 1 and type(args.positional[0]) is Code:
        return replace(plain_call(expr, args), form=ONES)
    if not static and (attended := _of_scores(obj, args, _unmasked_call(expr, args))) is not None:
        return attended
    return plain_call(expr, args, static)


def _of_scores(obj: Any, args: Args, expr: ast.expr) -> Value | None:
    """Return the result of a function of torch that attention or an indexer is made of; None for others."""
    found = indexer.call_of(obj, args, expr)
    of_indexer = any(isinstance(item, indexer.IndexScores) for item in args.positional)
    return found if found is not None or of_indexer else scores.call_of(obj, args, expr)


def _unmasked_call(expr: ast.expr, args: Args) -> ast.expr:
    """Return a call's code with scores as they are before the mask."""
    bare = [replace(item, masked=False) if isinstance(item, Code) else item for item in args.positional]
    plain = [item for item in bare if not isinstance(item, Mask)]
    return plain_call(expr, Args(plain, args.keywords, [])).expr


def _counted(args: Args, frame: Frame) -> Code | None:
    """Return positions for `torch.arange([0,] length)` of a length that is known at run time only."""
    match args.positional:
        case [Code(static=False)] | [Known(value=0), Code(static=False)]:
            return objects.positions(frame)
    return None


def _is_torch(obj: Any) -> bool:
    return str(getattr(obj, "__module__", None) or type(obj).__module__).startswith("torch")


def _construct(cls: type, expr: ast.expr, args: Args, frame: Frame) -> Value:
    if cls is nn.ModuleList:
        return _module_list(expr, args)
    if cls is nn.ModuleDict and all(item.equals(Mapping({})) for item in args.positional):
        return ModuleList((), ast.Call(expr, [], []))
    if frame.translator.translates(cls):
        return frame.translator.construct(cls, args)
    if cls in canonical.NORMS and args.positional and not isinstance(args.positional[0], Items):
        frame.translator.own_norms.add(cls.__name__)
        return Instance((Made(cls, {"canonical": Known(True)}),), plain_call(name(cls.__name__), args).expr)
    return Instance((Made(cls),), plain_call(expr, args).expr)


def _module_list(expr: ast.expr, args: Args) -> Value:
    match args.positional:
        case []:
            return ModuleList((), ast.Call(expr, [], []))
        case [ModuleList(made=made, expr=items)]:
            return ModuleList(made, ast.Call(expr, [items], []))
        case [Items(items=tuple() as items)] if all(isinstance(item, Instance) for item in items):
            made = tuple(way for item in items if isinstance(item, Instance) for way in item.made)
            elements = ast.List([item.code() for item in items], ast.Load())
            return ModuleList(made, ast.Call(expr, [elements], []))
    raise Untranslatable("a ModuleList of unknown modules")
