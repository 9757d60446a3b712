"""Objects with a meaning of their own: namespaces, attributes, transformers' masks, outputs and
attention dispatch.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import logging
import re
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from onboard.analysis.source import find_method
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.config_values import Setting, of_field, plain_field
from onboard.codegen.translate.language.expressions import branch_types
from onboard.codegen.translate.language.expressions.module_lists import attribute_of_list
from onboard.codegen.translate.language.expressions.usual_names import usual_item, usual_name
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import attributes, of_file
from onboard.codegen.translate.language.handed.by_name import ByName, Named
from onboard.codegen.translate.language.handed.listed import Objects
from onboard.codegen.translate.language.object_values import (
    Choice,
    Closure,
    Config,
    Global,
    Instance,
    Method,
    ModuleList,
    ModuleRows,
    ModuleTable,
    PlainObject,
    Self,
)
from onboard.codegen.translate.language.records import Record
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.statements.assignments.between_layers import left_behind
from onboard.codegen.translate.language.statements.assignments.between_methods import left_before
from onboard.codegen.translate.language.statements.assignments.own_objects import holds_objects
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    constant,
    name,
)
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Known,
    Mapping,
    Mask,
    Unread,
    Value,
)
from onboard.hf.config_field import config_field

CONFIG_FACTS: dict[str, Any] = {
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
    "use_return_dict": True,
    "is_encoder_decoder": False,
    "is_decoder": True,
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "gradient_checkpointing": False,
    "_attn_implementation": "onboard",
}
"""Config attributes that say how transformers runs a model, not what it computes; fixed in
generated code.
"""
_DTYPES = ("dtype", "torch_dtype")
_BRINGS_WEIGHTS = ("add_cross_attention",)
_MODULE_FACTS: dict[str, Any] = {"training": False, "gradient_checkpointing": False}
_STAND_INS = "onboard.hf.old."
_OF_ANY_SHAPE = ("dtype", "device", "is_cuda", "requires_grad")


def from_namespace(obj: object, identifier: str, frame: Frame) -> Value:
    """Return the value of a global name; what a function keeps of earlier calls is what it gives."""
    if frame.translator.specialised and isinstance(obj, functools._lru_cache_wrapper):
        obj = obj.__wrapped__
    if (known_as := frame.mechanisms.name(obj, frame)) is not None:
        return known_as
    if obj is None or isinstance(obj, bool | int | float | str):
        return Known(obj)
    usual = usual_name(obj, identifier) or of_file.written_out(obj, identifier, frame.source.tree)
    if frame.translator.specialised and usual is not None:
        return Global(obj, usual)
    named = functools.partial(of_table, frame=frame)
    if isinstance(obj, functools.partial) and (whole := of_file.partial_of(obj, named)) is not None:
        return whole
    package = type(frame.translator.model).__module__.split(".")[0]
    if (made := of_file.object_of(obj, package, named)) is not None:
        if not frame.translator.specialised:
            raise Untranslatable(f"{identifier}, an object that the file makes")
        return made
    frame.translator.remember_global(identifier, obj, frame.source)
    return Global(obj, name(identifier))


def is_own(entry: object, frame: Frame) -> bool:
    """Whether an entry of a table is a class or a function of the repository's, a stand-in for what
    it had, or PyTorch's.
    """
    package = type(frame.translator.model).__module__.split(".")[0]
    module = str(getattr(entry, "__module__", ""))
    if inspect.isbuiltin(entry):  # torch's, as torch.tanh
        return usual_name(entry, entry.__name__) is not None
    known = module.split(".")[0] in (package, "torch") or module.startswith(_STAND_INS)
    return known and (inspect.isclass(entry) or inspect.isfunction(entry))


def of_table(obj: Any, frame: Frame) -> Value:
    """Return an entry of a table of the module: a class or function, PyTorch's by its own name."""
    own = str(getattr(obj, "__name__", "entry"))
    if getattr(nn, own, None) is obj:
        return Global(obj, attribute(name("nn"), own))
    return from_namespace(obj, own, frame)


def imported(node: ast.Import | ast.ImportFrom, alias: ast.alias, module: ModuleType) -> Any:
    """Return what an import inside a function binds a name to; None for what is not there."""
    try:
        if isinstance(node, ast.Import):
            whole = importlib.import_module(alias.name)
            return whole if alias.asname else sys.modules[alias.name.split(".")[0]]
        source = importlib.import_module("." * node.level + (node.module or ""), module.__package__)
        return getattr(source, alias.name)
    except (ImportError, AttributeError):
        return None


def choice(table: dict[Any, Any], key: Value, frame: Frame) -> Value | None:
    """Return `table[key]`, with a key that is known once the config is; None when it is no table of
    classes, or one of transformers that code of a repository looks up, which files have, too.
    """
    if frame.translator.specialised and any(map(_is_of_transformers, table.values())):
        return None
    # None is none that can be called
    made = {item: obj for item, obj in table.items() if obj is not None}
    if not (
        made and all(inspect.isclass(item) or inspect.isfunction(item) for item in made.values())
    ):
        return None
    chosen, *others = [
        (item, from_namespace(obj, obj.__name__, frame)) for item, obj in reversed(made.items())
    ]
    value = chosen[1]
    for item, option in others:
        value = Choice(ast.Compare(key.code(), [ast.Eq()], [constant(item)]), option, value)
    return value


def _is_of_transformers(entry: object) -> bool:
    """Whether it is a function of transformers' shared code."""
    module = getattr(entry, "__module__", None) or ""
    shared = module.startswith("transformers.") and not module.startswith("transformers.models.")
    return shared and inspect.isfunction(entry)


def is_logger(value: Value) -> bool:
    """Whether a value is a logger or the module warnings."""
    return isinstance(value, Global) and (
        isinstance(value.obj, logging.Logger | logging.LoggerAdapter)
        or getattr(value.obj, "__name__", "") == "warnings"
    )


def get_attribute(owner: Value, attr: str, frame: Frame) -> Value:
    """Return `owner.attr`."""
    if (known_as := frame.mechanisms.attribute(owner, attr, frame)) is not None:
        return known_as
    match owner:
        case Self():
            state = frame.cls or frame.caller
            if state is None:
                raise Untranslatable(f"{attr} of a module that a function is given")
            found = attribute_of(state, attr, name("self"), frame)
            if not is_own_property(state.cls, attr, frame):
                return found
            return frame.translator.call_own_method(attr, Args([], {}, []), frame)
        case Config():
            return _of_config(owner, attr, frame)
        case Global(obj=obj) if (left := left_behind(obj, attr, frame)) is not None:
            return left
        case Global(obj=type() as cls) if (
            is_own(cls, frame) and not is_module(cls) and (known := attributes.constant(cls, attr))
        ):
            return known
        case Global(obj=obj, expr=expr):
            return _global_attribute(obj, attr, expr)
        case ByName():
            return attributes.attribute_of(owner, attr, frame)
        case Instance(expr=expr) if f"{ast.unparse(expr)}.{attr}" in frame.env.values:
            return frame.env.values[f"{ast.unparse(expr)}.{attr}"]  # as this forward left it
        case Instance(classes=classes) if classes and all(
            is_own_property(cls, attr, frame) for cls in classes
        ):
            return frame.translator.call_module(owner, Args([], {}, []), frame, attr)
        case Instance(classes=(cls,), expr=expr) if frame.translator.translates(cls):
            return attribute_of(frame.translator.reached(owner)[0], attr, expr, frame)
        case Instance(classes=classes, expr=expr) if len(classes) > 1 and all(
            map(frame.translator.translates, classes)
        ):
            values = [
                attribute_of(state, attr, expr, frame) for state in frame.translator.reached(owner)
            ]
            return Code(attribute(expr, attr), static=all(each.is_static for each in values))
        case Record() | ModuleTable() if isinstance(owner, Record) or attr in owner.entries:
            return owner.entry(attr)
        case ModuleList():
            return attribute_of_list(owner, attr)
        case Mapping() | ModuleRows() | ModuleTable():
            return Method(owner, attr)
        case PlainObject(attr=kept) if kept:
            return get_attribute(Self(), f"{kept}_{attr}", frame)
        case Code() if attr == "data" and frame.translator.specialised:
            return owner  # nothing here has gradients
        case Code(expr=expr, masked=True) if attr in (*_OF_ANY_SHAPE, "shape"):
            return Code(attribute(expr, attr))
        case Code(expr=expr, transposed=True) if attr in _OF_ANY_SHAPE:
            return Code(attribute(expr, attr))
        case Code(static=static):
            return Code(attribute(owner.code(), attr), static)
        case Known(value=value) if hasattr(value, attr):
            return Known(getattr(value, attr))
    return Code(attribute(owner.code(), attr))


def _of_config(owner: Config, attr: str, frame: Frame) -> Value:
    expr, obj = owner.expr, owner.obj
    if (kept := frame.env.values.get(f"{ast.unparse(expr)}.{attr}")) is not None:
        return kept  # as this constructor left it
    if attr in CONFIG_FACTS:
        return _config_fact(attr, expr, obj, frame)
    if attr in _DTYPES and frame.kind == "init" and frame.translator.specialised:
        return NONE  # what loads weights decides it
    if (changed := _changed(attr, obj, frame)) is not None:
        return changed
    # Other fields may differ from layer to layer
    if (part := _part(obj, attr, frame)) is not None:
        return Config(attribute(expr, attr), part)
    return of_field(attribute(expr, attr), obj, frame) or plain_field(expr, attr, obj)


def _part(config: Any, attr: str, frame: Frame) -> PretrainedConfig | None:
    """Return a config inside a config, which repositories' classes need not declare."""
    declared = attr in getattr(config, "sub_configs", {}) or frame.translator.specialised
    part = config_field(config, attr) if declared else None
    return part if isinstance(part, PretrainedConfig) else None


def _changed(attr: str, obj: Any, frame: Frame) -> Value | None:
    """Return what the model's constructor makes of an attribute of the config, as the classes see
    it that it makes things of.
    """
    program = frame.translator
    own = frame.cls is not None and frame.cls.cls is type(program.model) and frame.kind == "init"
    return None if own or obj is not program.config else program.changed.get(attr)


def _config_fact(attr: str, expr: ast.expr, config: Any, frame: Frame) -> Known:
    """Return a fixed attribute; one that brings weights, which nothing runs then, is as the config
    has it.
    """
    if attr in _BRINGS_WEIGHTS and frame.kind == "init" and getattr(config, attr, False):
        frame.translator.guard(attribute(expr, attr), frame)
        return Known(True)
    if attr == "_attn_implementation":
        return Known(frame.translator.implementation)
    turned = frame.translator.changed.get(attr) if config is frame.translator.config else None
    return turned if isinstance(turned, Known) else Known(CONFIG_FACTS[attr])


def asks_for_package(obj: Any) -> bool:
    """Whether a function of transformers tells if a package besides PyTorch, or its kernels, or a
    version of it, can be used here.
    """
    module, function = str(getattr(obj, "__module__", "")), str(getattr(obj, "__name__", ""))
    is_question = _PACKAGE_QUESTION.fullmatch(function) is not None
    return is_question and module.split(".")[0] == "transformers"


_PACKAGE_QUESTION = re.compile(
    r"is_(?!torch_available)\w+_available|is_(?!torch_)\w+_greater(_or_equal\w*)?"
)


def _global_attribute(obj: Any, attr: str, expr: ast.expr) -> Value:
    if not hasattr(obj, attr):
        raise Untranslatable(f"the missing attribute {attr} of {ast.unparse(expr)}")
    value, path = usual_item(obj, attr) or (getattr(obj, attr), attribute(expr, attr))
    if attr == "__version__":
        return Known(str(value))
    return (
        Code(path, static=True)
        if isinstance(value, bool | int | float | str)
        else Global(value, path)
    )


def module_fact(attr: str) -> Known | None:
    """Return the fixed value of an attribute that every module has in inference."""
    return Known(_MODULE_FACTS[attr]) if attr in _MODULE_FACTS else None


def declares(config: object, attr: str) -> bool:
    """Whether every config of this class has `attr`, so that getattr and hasattr of it are
    decided.
    """
    cls = type(config)
    fields = (
        {field.name for field in dataclasses.fields(cls)}
        if dataclasses.is_dataclass(cls)
        else set()
    )
    return attr in fields or attr in cls.attribute_map or hasattr(cls, attr)  # type: ignore[attr-defined]


def named_tuple(cls: object, args: Args) -> Named | None:
    """Return the value of `cls(...)` for a class of named tuples; None for any other class."""
    names = getattr(cls, "_fields", None)
    if not (isinstance(cls, type) and issubclass(cls, tuple) and names) or args.stars:
        return None
    defaults = {key: Known(value) for key, value in getattr(cls, "_field_defaults", {}).items()}
    given = defaults | dict(zip(names, args.positional, strict=False)) | args.keywords
    return Named(tuple(given[name] for name in names), names=names, cls=cls)


def makes_cache(obj: object) -> bool:
    """Tell whether `obj` is a class of caches, or a method of one that makes it of what a forward is
    given (`from_legacy_cache`): a new one is empty.
    """
    cls = getattr(obj, "__self__", obj)
    return isinstance(cls, type) and issubclass(cls, Cache)


def is_module(cls: object) -> bool:
    """Whether a class is a module."""
    return isinstance(cls, type) and issubclass(cls, nn.Module)


def is_plain(cls: object, frame: Frame) -> bool:
    """Whether a class of repositories' code is none of PyTorch's or transformers': its objects keep
    things and compute.
    """
    if not (isinstance(cls, type) and frame.translator.specialised and frame.kind == "init"):
        return False
    package = type(frame.translator.model).__module__.split(".")[0]
    bases = [base.__module__.split(".")[0] for base in cls.__mro__[:-1]]
    return set(bases) == {package} and find_method(cls, "__init__") is not None


def attribute_of(state: ClassState, attr: str, owner: ast.expr, frame: Frame) -> Value:
    """Return `owner.attr` for an instance `owner` of a class."""
    path = attribute(owner, attr)
    own = isinstance(owner, ast.Name) and owner.id == "self"
    if not own:
        state.read_outside.add(attr)
    elif f"self.{attr}" in frame.env.values:
        return frame.env.values[f"self.{attr}"]
    if (known_as := frame.mechanisms.own_attribute(state, attr, path, frame)) is not None:
        return known_as
    match value := state.attributes.get(attr):
        case Known() | Mask() | Global() | Closure() | Unread():
            return value
        case Value() if own and holds_objects(value):
            return value
        case Instance():
            return (
                branch_types.possible(replace(value, expr=path), attr, frame)
                if own
                else replace(value, expr=path)
            )
        case ModuleList() | ModuleRows() | ModuleTable() | Record() | Objects():
            return replace(value, expr=path)
        case Config(obj=obj):
            return Config(path, obj)
        case Setting() if own:
            return replace(value, expr=path)
        case Code(static=static, optional=optional):
            return Code(path, static or _is_number(state, attr, frame), optional=optional)
    if not own and frame.translator.specialised and _is_left(state.cls, attr):
        return Unread(f"{state.cls.__name__}.{attr}, which its forward leaves there")
    if own and value is None and (left := left_before(attr, frame)) is not None:
        return left
    return module_fact(attr) or _class_attribute(state, attr, path, frame)


def _is_left(cls: type, attr: str) -> bool:
    """Whether a forward assigns an attribute of its module."""
    found = find_method(cls, "forward")
    nodes = [] if found is None else [*ast.walk(found[1])]
    stored = [item for item in nodes if isinstance(getattr(item, "ctx", None), ast.Store)]
    return any(ast.unparse(item) == f"self.{attr}" for item in stored)


def leaves(cls: type, attr: str) -> bool:
    """Whether a method of a class, or of its bases, assigns an attribute of its module."""
    found = (find_method(cls, key) for key, _ in inspect.getmembers(cls, inspect.isfunction))
    methods = [each[1] for each in found if each is not None and each[0] is not nn.Module]
    nodes = (node for method in methods for node in ast.walk(method))
    stored = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store))
    return any(ast.unparse(node) == f"self.{attr}" for node in stored)


def _is_number(state: ClassState, attr: str, frame: Frame) -> bool:
    """Whether what a constructor of repositories' code has worked out is a number in each module."""
    made = [getattr(module, attr, None) for module in frame.translator.modules_of(state.cls)]
    return frame.translator.specialised and {type(value) for value in made} in ({int}, {float})


def _class_attribute(state: ClassState, attr: str, path: ast.expr, frame: Frame) -> Value:
    value = inspect.getattr_static(state.cls, attr, None)
    if isinstance(value, bool | int | float | str):
        return Known(value)
    is_method = inspect.isroutine(value) or isinstance(value, staticmethod | classmethod)
    if is_method or is_own_property(state.cls, attr, frame):
        return Method(Self(), attr)
    modules = frame.translator.modules_of(state.cls)
    if modules and not any(hasattr(module, attr) for module in modules):
        raise Untranslatable(f"{state.cls.__name__}.{attr}, which its constructor does not make")
    of_torch = state.inherits_init or (
        frame.translator.specialised and any(getattr(each, attr, path) is None for each in modules)
    )
    texts = [isinstance(getattr(module, attr, None), str) for module in modules]
    static = frame.translator.specialised and bool(texts) and all(texts)
    return Code(path, static, optional=of_torch)  # a bias may be None


def is_own_property(cls: type, attr: str, frame: Frame) -> bool:
    """Whether a class of repositories' code computes an attribute whenever it is read."""
    found = inspect.getattr_static(cls, attr, None)
    if not isinstance(found, property) or not frame.translator.specialised:
        return False
    return str(found.fget.__module__).split(".")[0] not in ("torch", "transformers", "onboard")
