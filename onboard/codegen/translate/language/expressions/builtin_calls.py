"""Calls of Python's own functions."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from onboard.codegen.translate.language import config_values
from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.expressions import module_lists, objects
from onboard.codegen.translate.language.expressions.decisions import written_out
from onboard.codegen.translate.language.forms import LIST, TUPLE
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import attributes, gathered
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.holes import Result
from onboard.codegen.translate.language.object_values import (
    Closure,
    Config,
    Global,
    Instance,
    ModuleList,
    Repeated,
    Self,
    Super,
)
from onboard.codegen.translate.language.partial_classes import partial_class
from onboard.codegen.translate.language.sequences import is_one_of, sequence_of
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Mapping, Mask, Value

_CALLED = "function"


def _isinstance(expr: ast.expr, args: Args, frame: Frame) -> Value:
    value, asked = args.positional
    classes = _classes(asked)
    match value:
        case Known(value=known) if classes:
            return Known(isinstance(known, classes))
        case Mapping() if classes:
            return Known(issubclass(dict, classes))
        case Mask():
            return Known(False)
        case Self() if classes and frame.cls is not None:
            return Known(issubclass(frame.cls.cls, classes))
        case Output(cls=type() as cls) | Result(shape=Output(cls=type() as cls)) if classes:
            return Known(issubclass(cls, classes))
        case Output() if {tuple, list, torch.Tensor}.issuperset(classes) and classes:
            return Known(False)
        case Instance() if isinstance(asked, Global):
            among = {issubclass(cls, classes) for cls in value.classes}
            if len(among) == 1 and not value.optional:
                return Known(among.pop())
            return plain_call(expr, args, static=True)
        case ModuleList() if classes and (kinds := _kinds_of(value, frame)):
            among = {issubclass(kind, classes) for kind in kinds}
            return Known(among.pop()) if len(among) == 1 else plain_call(expr, args, static=True)
        case Items() | Result() | Code() if classes and _is_decided(value, classes):
            decided = is_one_of(value, classes, has_lists=frame.kind == "init")
            if decided is None:
                return plain_call(expr, args)
            there = ast.Compare(value.code(), [ast.IsNot()], [ast.Constant(None)])
            return Code(there) if decided and value.may_be_none else Known(decided)
    return plain_call(expr, args, args.static())


def _kinds_of(modules: ModuleList, frame: Frame) -> set[type]:
    """Return the classes that an own list of modules has in the small model; none: it is another's."""
    owner, _, path = ast.unparse(modules.expr).partition(".")
    if owner != "self" or frame.cls is None or not re.fullmatch(r"\w+(\.\w+)*", path):
        return set()
    made = frame.translator.modules_of(frame.cls.cls)
    try:
        return {type(operator.attrgetter(path)(each)) for each in made}
    except AttributeError:
        return set()


def _classes(asked: Value) -> tuple[type, ...]:
    """Return the classes that code asks for; none: they are not known."""
    options = asked.items if isinstance(asked, Items) else (asked,)
    known = [item.obj for item in options if isinstance(item, Global)]
    return tuple(known) if len(known) == len(options) else ()


def _is_decided(value: Value, classes: tuple[type, ...]) -> bool:
    """Whether what is known of a value tells its class: a tensor may be a parameter."""
    if sequence_of(value) is not None:
        return True
    return not value.is_static and nn.Parameter not in classes


def _getattr(expr: ast.expr, args: Args, frame: Frame) -> Value:
    owner, key, *default = args.positional
    if isinstance(owner, Global):
        key = config_values.as_name(key, frame)
    if not (isinstance(key, Known) and isinstance(key.value, str)):
        if isinstance(owner, Self):
            raise Untranslatable("an attribute with a computed name")
        return plain_call(expr, args, args.static())
    if isinstance(owner, Config):
        if objects.declares(owner.obj, key.value) or key.value in objects.CONFIG_FACTS:
            return objects.get_attribute(owner, key.value, frame)
        return plain_call(expr, args, True)
    if isinstance(owner, Global) and default and not hasattr(owner.obj, key.value):
        return default[0]
    if isinstance(owner, Known) and default and not hasattr(owner.value, key.value):
        return default[0]
    if (
        isinstance(owner, Self)
        and frame.cls is not None
        and not frame.cls.has(key.value)
        and default
    ):
        return default[0]
    if isinstance(owner, Instance) and default and _lacks(owner, key.value, frame):
        return default[0]
    if isinstance(owner, ByName) and default and not attributes.has(owner, key.value):
        return default[0]
    return objects.get_attribute(owner, key.value, frame)


def _lacks(module: Instance, attr: str, frame: Frame) -> bool:
    """Whether no module of repositories' code that this may be has an attribute, which none of their
    methods makes.
    """
    if not frame.translator.specialised or module.optional:
        return False
    if not all(map(frame.translator.translates, module.classes)):
        return False
    made = [frame.translator.modules_of(cls) for cls in module.classes]
    return all(made) and not any(
        hasattr(each, attr) or objects.leaves(type(each), attr) for part in made for each in part
    )


def _has(module: Instance, attr: str, frame: Frame) -> bool:
    """Whether the constructors of repositories' code make an attribute of all that a module may be."""
    if not frame.translator.specialised or module.optional:
        return False
    if not all(map(frame.translator.translates, module.classes)):
        return False
    states = frame.translator.reached(module)
    return all(each.has(attr) and attr not in each.sometimes for each in states)


def _hasattr(expr: ast.expr, args: Args, frame: Frame) -> Value:
    if isinstance(args.positional[0], Global):
        args.positional[1] = config_values.as_name(args.positional[1], frame)
    match args.positional:
        case [Config(obj=config), Known(value=str() as key)] if objects.declares(config, key):
            return Known(True)
        case [
            Global(obj=ModuleType() as known) | Known(value=known),
            Known(value=str() as key),
        ]:
            return Known(hasattr(known, key))
        case [Self(), Known(value=str() as key)] if (
            frame.cls is not None and key not in frame.cls.sometimes
        ):
            made = frame.kind == "init" and f"self.{key}" in frame.env.values
            return Known(made or frame.cls.has(key))
        case [Self(), Known(value=str())]:
            return plain_call(expr, args, static=True)
        case [Global(obj=ModuleType() as module), Known(value=str() as key)]:
            return Known(hasattr(module, key))
        case [ByName() as owner, Known(value=str() as key)]:
            return Known(attributes.has(owner, key))
        case [Instance() as part, Known(value=str() as key)] if _lacks(part, key, frame):
            return Known(False)
        case [Instance() as part, Known(value=str() as key)] if _has(part, key, frame):
            return Known(True)
    return plain_call(expr, args, args.static())


def _len(expr: ast.expr, args: Args, frame: Frame) -> Value:
    match args.positional:
        case [Items() | Mapping() as value]:
            return Known(len(value.items))
        case [Output() as value] if hasattr(value.cls, "__len__"):
            return attributes.asked(value, frame)
        case [ModuleList()] if frame.turns and frame.turns[-1].start is None:
            return plain_call(expr, args, static=True)  # which turn is the last one has to be known
    return _fold(len)(expr, args, frame)


def _listing(form: str) -> Callable[[ast.expr, Args, Frame], Value]:
    def handle(expr: ast.expr, args: Args, frame: Frame) -> Value:
        match args.positional:
            case []:
                return Items((), kind=form)
            case [Items() as items]:
                return replace(items, kind=form)
            case [Repeated()]:
                return args.positional[0]
        return replace(plain_call(expr, args, args.static()), form=form)

    return handle


def _smallest(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return `min(a, b)`; of sizes that are symbols in an exported graph it must not compare
    them.
    """
    if len(args.positional) == 2 and not args.static():
        return plain_call(attribute(name("torch"), "sym_min"), args)
    return _fold(min)(expr, args, frame)


def _dict(expr: ast.expr, args: Args, frame: Frame) -> Value:
    base = args.positional[0] if args.positional else Mapping({})
    base = gathered.of_pairs(base) or base
    if not isinstance(base, Mapping):
        raise Untranslatable("dict() of an unknown value")
    return Mapping({**base.items, **args.keywords})


def _defaults(expr: ast.expr, args: Args, frame: Frame) -> Value:
    raise Untranslatable("a defaultdict, whose entries come to be when they are read")


def _queue(expr: ast.expr, args: Args, frame: Frame) -> Value:
    raise Untranslatable("a deque")


def _entries(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return the fields of an object as a dict."""
    match args.positional:
        case [Output(fields=kept)]:
            return Mapping(dict(kept))
    return plain_call(expr, args, args.static())


def _all_entries(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return the fields of a dataclass as a dict, of those in it, too."""
    match args.positional:
        case [Output() as owner]:
            return _as_dict(owner)
    return plain_call(expr, args, args.static())


def _as_dict(value: Value) -> Value:
    if isinstance(value, Output):
        return Mapping({key: _as_dict(part) for key, part in value.fields.items()})
    return value.mapped(_as_dict)


def _partial(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return a function of one argument that calls another one with further keywords, or a class of
    modules with some of its arguments.
    """
    if (cls := partial_class(args)) is not None:
        return cls
    given = config_values.as_constants(args, frame)
    function, *rest = given.positional
    if (
        rest
        or not isinstance(function, Global)
        or not all(isinstance(item, Known) for item in given.keywords.values())
    ):
        return plain_call(expr, args, args.static())
    if not given.keywords:
        return function
    body = ast.Return(
        call(name(_CALLED), name("x"), **{k: v.code() for k, v in given.keywords.items()})
    )
    node = ast.parse("def partial(x): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    node.body = [ast.copy_location(body, node)]
    return Closure(ast.fix_missing_locations(node), frame.source, {_CALLED: function})


def _fold(function: Callable[..., Any]) -> Callable[[ast.expr, Args, Frame], Value]:
    def handle(expr: ast.expr, args: Args, frame: Frame) -> Value:
        if args.known():
            keywords = {key: value.value for key, value in args.keywords.items()}  # type: ignore[attr-defined]
            return Known(function(*(value.value for value in args.positional), **keywords))  # type: ignore[attr-defined]
        return plain_call(expr, args, args.static())

    return handle


def _of_texts(function: Callable[..., Any]) -> Callable[[ast.expr, Args, Frame], Value]:
    """Return what asks constants and texts of the config by a pattern, guarded by what those are."""

    def handle(expr: ast.expr, args: Args, frame: Frame) -> Value:
        given = Args([_text(item, frame) for item in args.positional], {}, [])
        if args.keywords or args.stars or not given.known():
            raise Untranslatable(f"{ast.unparse(expr)} of what is no text of the config")
        return Known(function(*(item.value for item in given.positional)))  # type: ignore[attr-defined]

    return handle


def _text(value: Value, frame: Frame) -> Value:
    read = Code(written_out(value.expr, frame), static=True) if type(value) is Code else value
    return config_values.as_name(read, frame)


def _super(args: Args) -> Super:
    match args.positional:
        case [Global(obj=type() as named), *_]:
            return Super(named)
    return Super()


BUILTINS: dict[Any, Callable[[ast.expr, Args, Frame], Value]] = {
    isinstance: _isinstance,
    getattr: _getattr,
    hasattr: _hasattr,
    len: _len,
    tuple: _listing(TUPLE),
    list: _listing(LIST),
    dict: _dict,
    collections.OrderedDict: _dict,
    collections.defaultdict: _defaults,
    collections.deque: _queue,
    **gathered.FUNCTIONS,
    functools.partial: _partial,
    vars: _entries,
    dataclasses.asdict: _all_entries,
    super: lambda expr, args, frame: _super(args),
    iter: module_lists.begun,
    next: module_lists.taken,
    print: lambda expr, args, frame: NONE,
    **{item: _fold(item) for item in (int, float, str, bool, max, abs, round, slice)},
    **{item: _of_texts(item) for item in (re.match, re.fullmatch, re.search)},
    min: _smallest,
    **{
        item: lambda expr, args, frame: plain_call(expr, args, args.static())
        for item in (range, set, sorted, sum)
    },
}
