"""Evaluate calls partially."""

from __future__ import annotations

import ast
import copy
import os
from collections import UserDict
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, is_typeddict

import torch
from torch import nn
from transformers.utils import is_torch_fx_proxy, is_torchdynamo_compiling

from onboard.analysis.source import gives_its_input, plain_class
from onboard.codegen.translate.language import config_values
from onboard.codegen.translate.language.args import Args, is_static_call, plain_call
from onboard.codegen.translate.language.config_methods import call_config
from onboard.codegen.translate.language.config_values import Setting
from onboard.codegen.translate.language.expressions import dicts, multimodal_configs, objects
from onboard.codegen.translate.language.expressions.builtin_calls import BUILTINS
from onboard.codegen.translate.language.expressions.decisions import switched
from onboard.codegen.translate.language.expressions.module_lists import (
    as_function,
    is_own_list,
    items_in,
    joined,
    module_copy,
    module_table,
    named_in_sequence,
    one_after_the_other,
    own_method,
    parts_of,
    table_method,
)
from onboard.codegen.translate.language.expressions.tensor_methods import tensor_method
from onboard.codegen.translate.language.forms import MAYBE, SHARED
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import (
    attributes,
    containers,
    returned_objects,
    variables,
)
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.object_values import (
    Choice,
    Closure,
    Config,
    Global,
    Instance,
    Made,
    Method,
    ModuleList,
    ModuleRows,
    ModuleTable,
    NamedModules,
    PlainObject,
    Repeated,
    Self,
    Super,
)
from onboard.codegen.translate.language.partial_classes import Partial
from onboard.codegen.translate.language.records import record
from onboard.codegen.translate.language.statements.probed_records import made_by_call
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Items,
    Known,
    Mapping,
    Unread,
    Value,
)

_DROPOUTS = (nn.functional.dropout, torch.dropout)
_AUTOCAST = (torch.is_autocast_enabled, torch.is_autocast_cpu_enabled)
_OTHER_TRACERS = (torch.jit._trace.is_tracing, torch._jit_internal.is_scripting, is_torch_fx_proxy)
_ENVIRONMENT = (os.getenv, os.environ.get)
_OF_DICTS = ("items", "keys", "values", "get", "copy")
_GIVE_THE_MODULE = ("to_empty", "cuda", "cpu", "eval")
"""Methods of modules that change no dtype: who builds a model says where it is."""


def evaluate_call(node: ast.Call, frame: Frame) -> Value:
    """Return the value of a call."""
    if isinstance(node.func, ast.Attribute):
        if (given := containers.gives(node, frame)) is not None:
            return given
        owner = frame.settle(frame.evaluate(node.func.value))
        if objects.is_logger(owner):
            return NONE
        owner = config_values.changed_copy(owner, node.func, frame)
        return _call_method(owner, node.func.attr, _arguments(node, frame), frame)
    callee = frame.evaluate(node.func)
    if isinstance(callee, Known):
        raise Untranslatable(
            f"{ast.unparse(node.func)} at {frame.source.location(node)}, no function"
        )
    try:
        args = _arguments(node, frame)
    except Untranslatable:
        if not (node.keywords and (made := made_by_call(node, frame))):
            raise
        return made
    return call_value(callee, args, frame)


def _arguments(node: ast.Call, frame: Frame) -> Args:
    args = Args([], {}, [])
    for item in node.args:
        value = frame.settle(frame.evaluate(item.value if isinstance(item, ast.Starred) else item))
        if isinstance(item, ast.Starred) and isinstance(value, Items):
            args.positional.extend(value.items)
            continue
        if isinstance(item, ast.Starred):
            args.stars.append(len(args.positional))
        args.positional.append(value)
    for keyword in node.keywords:
        value = frame.settle(frame.evaluate(keyword.value))
        if keyword.arg is not None:
            args.keywords[keyword.arg] = value
        elif isinstance(value, Mapping):
            args.keywords.update(value.items)
        elif isinstance(value, Setting) and isinstance(value.value, dict):
            args.keywords.update(config_values.as_mapping(value, frame).items)
        elif not _is_empty(value, frame):
            raise Untranslatable(f"** of an unknown dict at {frame.source.location(node)}")
    return args


def _is_empty(value: Value, frame: Frame) -> bool:
    """Whether a value is an attribute that is an empty dict in every module of the small model."""
    match value:
        case Code(expr=ast.Attribute(value=ast.Name(id="self"), attr=attr)) if frame.cls:
            found = [getattr(m, attr, None) for m in frame.translator.modules_of(frame.cls.cls)]
            return bool(found) and all(item == {} for item in found)
    return False


def call_value(callee: Value, args: Args, frame: Frame) -> Value:
    """Return `callee(*args)`."""
    if (
        not isinstance(callee, Global)
        and (known_as := frame.mechanisms.call_value(callee, args, frame)) is not None
    ):
        return known_as
    match callee:
        case Global(obj=obj, expr=expr):
            return _call_global(obj, expr, args, frame)
        case Instance() if all(map(gives_its_input, callee.classes)):
            return args.positional[0]
        case Instance():
            if _has_functions(callee, args, frame) and (forward := as_function(callee)):
                return frame.translator.call_closure(forward, args, frame)
            return frame.translator.call_module(callee, switched(args, frame), frame)
        case ModuleList() if (forward := own_method(callee, "forward", frame)) is not None:
            return frame.translator.call_closure(forward, args, frame)
        case ModuleList():
            in_order = one_after_the_other(callee, frame)
            return frame.translator.call_closure(in_order, args, frame)
        case Choice():
            return _chosen(callee, args, frame)
        case Closure():
            return frame.translator.call_closure(callee, args, frame)
        case Partial():
            return call_value(callee.called, callee.whole(args), frame)
        case Method(owner=owner, name=attr):
            return _call_method(owner, attr, args, frame)
        case Code(expr=expr, static=static):
            return plain_call(expr, args, static and args.static())
        case ByName() if (given := attributes.called(callee, "__call__", args, frame)) is not None:
            return given
        case Unread():
            callee.code()  # which raises what is in the way of it
    raise Untranslatable(f"a call of a {type(callee).__name__}")


def _has_functions(module: Instance, args: Args, frame: Frame) -> bool:
    """Whether a module of one class is given functions, which do not exist in generated code."""
    given = (*args.positional, *args.keywords.values())
    one = len(module.classes) == 1 and frame.translator.translates(module.classes[0])
    return one and any(isinstance(item, Closure | Method) for item in given)


def _chosen(choice: Choice, args: Args, frame: Frame) -> Value:
    """Return what a call of one of two functions gives, as `a() if test else b()`."""
    first, second = (call_value(option, args, frame) for option in (choice.first, choice.second))
    expr = ast.IfExp(choice.test, first.code(), second.code())
    if isinstance(first, Instance) and isinstance(second, Instance):
        return Instance(first.made + second.made, expr, first.optional or second.optional)
    return Code(expr)


def _call_method(owner: Value, attr: str, args: Args, frame: Frame) -> Value:
    if (known_as := frame.mechanisms.call_method(owner, attr, args, frame)) is not None:
        return known_as
    if attr == "requires_grad_" and isinstance(owner, Self | Instance):
        return owner  # nothing here has gradients
    match owner:
        case Self():
            return frame.translator.call_own_method(attr, args, frame)
        case Super(after=after):
            return _call_super(after, attr, args, frame)
        case Global(obj=type() as cls) if args.positional[:1] and _is_base(cls, args, frame):
            rest = replace(args, positional=args.positional[1:])
            return frame.translator.call_super(attr, rest, frame, cls)
        case PlainObject():
            return frame.translator.call_object(owner, attr, args, frame)
        case Repeated(item=item) if attr == "pop":
            return item
        case Mapping():
            return dicts.method(owner, attr, _by_name(args, frame))
        case ByName() | Global() if given := _method_of_object(owner, attr, args, frame):
            return given
        case ModuleTable() if listed := table_method(owner, attr, args, frame):
            return listed
        case ModuleList() if (method := own_method(owner, attr, frame)) is not None:
            return frame.translator.call_closure(method, args, frame)
        case ModuleList(made=made) if attr == "values":
            return ModuleList(made, plain_call(attribute(owner.expr, attr), args).expr)
        case ModuleList() if attr == "keys":
            return Code(plain_call(attribute(owner.expr, attr), args).expr, static=True)
        case Setting(value=dict()) if attr in _OF_DICTS:
            return dicts.method(config_values.as_mapping(owner, frame), attr, args)
        case Code(static=True) if text := config_values.text_method(owner, attr, args, frame):
            return text
        case Code(static=False) if attr == "get":
            return _got(owner, args)
        case Code():
            return tensor_method(owner, attr, args)
        case Known(value=value) if args.known():
            return Known(getattr(value, attr)(*(item.value for item in args.positional)))  # type: ignore[attr-defined]
        case Config() if (given := call_config(owner, attr, args, frame)) is not None:
            return given
        case Global(obj=type() as cls) if attr == "apply" and issubclass(
            cls, torch.autograd.Function
        ):
            return frame.translator.call_autograd(cls, args, frame)
        case Instance() if attr == "forward":
            return call_value(owner, args, frame)
        case Instance(expr=ast.Call()) if attr in _GIVE_THE_MODULE:
            return owner
        case Instance(classes=classes) if all(
            frame.translator.has_method(cls, attr) for cls in classes
        ):
            return frame.translator.call_module(owner, switched(args, frame), frame, attr)
        case Instance() if attr == "register_buffer":
            frame.emit(ast.Expr(plain_call(attribute(owner.code(), attr), args).expr))
            return NONE
    found = objects.get_attribute(owner, attr, frame)
    if isinstance(found, Method) and found.owner is owner:
        raise Untranslatable(f"the method {attr} of a {type(owner).__name__}")
    return call_value(found, args, frame)


def _call_super(after: type | None, attr: str, args: Args, frame: Frame) -> Value:
    known = attr == "__init__" or frame.translator.specialised
    if after not in (None, frame.owner) and not known:
        raise Untranslatable(f"super() of another class, of which {attr} is called")
    behind = frame if after is None else replace(frame, owner=after)
    return frame.translator.call_super(attr, args, behind)


def _is_base(cls: type, args: Args, frame: Frame) -> bool:
    """Whether a method of a class is called of the module itself, which inherits it."""
    own = isinstance(args.positional[0], Self) and frame.cls is not None
    return own and frame.cls is not None and issubclass(frame.cls.cls, cls)


def _got(owner: Code, args: Args) -> Code:
    """Return `owner.get(key, default)` of a dict that exists at run time, which may lack the key."""
    default = args.positional[1] if len(args.positional) > 1 else NONE
    kind = (owner.form or "").removeprefix("dict of ")
    form = kind if kind not in ("", MAYBE) and kind != owner.form else None
    optional = default.may_be_none or owner.form == f"dict of {MAYBE}"
    return replace(plain_call(attribute(owner.expr, "get"), args), form=form, optional=optional)


def _method_of_object(owner: ByName | Global, attr: str, args: Args, frame: Frame) -> Value | None:
    """Return what a method of an object gives, or a class method of its class; None for others."""
    if isinstance(owner, Output) and attr == "__setitem__":
        return _set_item(owner, *args.positional, frame=frame)
    if isinstance(owner, Output) and attr in _OF_DICTS and not attributes.has_own(owner, attr):
        there = {key: item for key, item in owner.fields.items() if not item.equals(NONE)}
        return dicts.method(Mapping(there), attr, _by_name(args, frame))
    return attributes.called(owner, attr, args, frame)


def _set_item(output: Output, key: Value, value: Value, *, frame: Frame) -> Value:
    """Put a field into an output."""
    if not isinstance(key, Known):
        raise Untranslatable("an output's field with a computed name")
    variables.put(output, key.value, value, frame)
    return NONE


def _by_name(args: Args, frame: Frame) -> Args:
    """Return the arguments of a dict's method with a text of the config, which is a key, known."""
    if not args.positional or args.stars:
        return args
    first = config_values.as_name(args.positional[0], frame)
    return replace(args, positional=[first, *args.positional[1:]])


def _unset_variable(args: Args) -> Value | None:
    """Return what code gets that asks for an environment variable without a value, as it runs with
    none of the user's; None where it has one.
    """
    match args.positional:
        case [Known(value=str() as variable), *default] if variable not in os.environ:
            return default[0] if default else args.keywords.get("default", NONE)
    return None


def _call_global(obj: Any, expr: ast.expr, args: Args, frame: Frame) -> Value:
    if obj in _DROPOUTS:
        return args.positional[0]
    if obj is copy.deepcopy and isinstance(given := args.positional[0], Config):
        return replace(given, copy=plain_call(expr, args).expr)
    if obj is copy.deepcopy and isinstance(given, Setting | Mapping):
        return config_values.own_copy(given, frame)
    if obj is copy.deepcopy and (made := module_copy(expr, args, frame)) is not None:
        return made
    if obj in (*_AUTOCAST, *_OTHER_TRACERS, is_torchdynamo_compiling):
        # Who runs generated code chooses its dtype; it is made for export, which alone traces it
        return Known(obj is is_torchdynamo_compiling)
    if obj is find_spec and args.known():
        spec = find_spec(*(item.value for item in args.positional))  # type: ignore[attr-defined]
        return NONE if spec is None else Global(spec, expr)
    if obj in _ENVIRONMENT and (unset := _unset_variable(args)) is not None:
        return unset
    if objects.asks_for_package(obj):
        return Known(False)  # kernels of other packages: generated code has its own
    if getattr(obj, "__module__", None) == "time" and frame.translator.specialised:
        return Known(0.0)  # how long something took, for who reads the output
    if getattr(obj, "__module__", None) in ("transformers.initialization", "torch.nn.init"):
        return NONE  # weights come from a checkpoint
    if (known_as := frame.mechanisms.call(obj, expr, args, frame)) is not None:
        return known_as
    if (changed := _in_place(obj, args, frame)) is not None:
        return changed
    if (
        handler := BUILTINS.get(dict if is_typeddict(obj) else obj) if callable(obj) else None
    ) is not None:
        return handler(expr, args, frame)
    if objects.makes_cache(obj):
        return NONE  # nothing was before the text
    if (made := returned_objects.output(obj, args, frame)) is not None:
        return made
    if settings := record(obj, args, frame) or returned_objects.kept_by(obj, args, frame):
        return settings
    if (whole := objects.named_tuple(obj, args)) is not None:
        return whole
    if obj is nn.utils.skip_init and args.positional:  # weights come from a checkpoint
        others = {key: value for key, value in args.keywords.items() if key != "device"}
        return call_value(args.positional[0], Args(args.positional[1:], others, []), frame)
    if objects.is_module(obj):
        return _construct(obj, expr, args, frame)
    if (chosen := multimodal_configs.chosen_class(obj, args)) is not None:
        return frame.translator.construct(chosen, args)
    if isinstance(obj, torch.jit.ScriptFunction):
        # What was compiled, in whichever module it is written
        obj = obj._torchdynamo_inline  # type: ignore[attr-defined]
    if frame.translator.is_helper(obj):
        return frame.translator.call_function(obj, args, frame)
    if (
        isinstance(obj, type)
        and issubclass(obj, UserDict)
        and all(item.equals(NONE) for item in args.positional)
    ):
        return Code(ast.Dict([], []), form=SHARED)
    if objects.is_plain(obj, frame):
        return PlainObject(obj, args)
    return plain_call(expr, args, is_static_call(obj, args))


def _in_place(function: Any, args: Args, frame: Frame) -> Value | None:
    """Return what `torch.sigmoid_(x)` gives, with x bound to it; None for other calls."""
    leaf = getattr(function, "__name__", "")
    plain = leaf.removesuffix("_")
    if leaf == plain or getattr(torch, leaf, None) is not function or not hasattr(torch, plain):
        return None
    match args.positional:
        case [Code(expr=ast.Name(id=variable), static=False), *_]:
            made = plain_call(attribute(name("torch"), plain), args)
            frame.bind(variable, made)
            return frame.env.values[variable]
    return None


def _construct(cls: type, expr: ast.expr, args: Args, frame: Frame) -> Value:
    if frame.translator.specialised and (base := plain_class(cls)) is not cls:
        return _construct(base, attribute(name("nn"), base.__name__), args, frame)
    if cls is nn.ModuleList:
        return _module_list(expr, args)
    if cls is nn.Sequential and (made := _in_sequence(args, frame)) is not None:
        return made
    if cls is nn.Sequential and (listed := named_in_sequence(expr, args, frame)) is not None:
        return listed
    if cls is nn.ModuleDict and all(item.equals(Mapping({})) for item in args.positional):
        return ModuleList((), ast.Call(expr, [], []))
    if cls is nn.ModuleDict and (table := module_table(expr, args)) is not None:
        return table
    if cls is nn.ModuleDict and isinstance(named := [*args.positional, None][0], NamedModules):
        return ModuleList(named.made, plain_call(expr, args).expr)
    if is_own_list(cls, frame):
        modules = _module_list(attribute(name("nn"), "ModuleList"), items_in(cls, args, frame))
        return replace(modules, own=cls) if isinstance(modules, ModuleList) else modules
    if frame.translator.translates(cls):
        return frame.translator.construct(cls, args)
    if frame.translator.specialised:  # who builds a model says where it is, and in which dtype
        args = args.anywhere()
    return Instance((Made(cls),), plain_call(expr, args).expr)


def _in_sequence(args: Args, frame: Frame) -> ModuleList | None:
    """Return the modules of an nn.Sequential of which some are translated, and so run one by one."""
    stretches = [
        parts_of(Items((item,)) if isinstance(item, Instance) else item) for item in args.positional
    ]
    parts = tuple(part for stretch in stretches for part in stretch or ())
    own = any(frame.translator.translates(way.cls) for part in parts for way in part.made)
    if not own or None in stretches:
        return None
    whole = joined(parts)
    listed = attribute(name("nn"), "ModuleList")
    return replace(whole, expr=ast.Call(listed, [whole.expr], []))


def _module_list(expr: ast.expr, args: Args) -> ModuleList | ModuleRows:
    match args.positional:
        case []:
            return ModuleList((), ast.Call(expr, [], []))
        case [ModuleList(expr=items) | ModuleRows(expr=items) as listed]:
            return replace(listed, expr=ast.Call(expr, [items], []))
        case [Items(items=tuple() as items)] if all(isinstance(item, Instance) for item in items):
            whole = joined(tuple(item for item in items if isinstance(item, Instance)))
            return replace(whole, expr=ast.Call(expr, [whole.expr], []))
    raise Untranslatable("a ModuleList of unknown modules")
