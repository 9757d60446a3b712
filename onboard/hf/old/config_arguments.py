"""Arguments that constructors of config classes of transformers 4 took by position: keywords today."""

from __future__ import annotations

import ast
import dataclasses
from copy import deepcopy
from typing import Any, ClassVar

from transformers import PretrainedConfig

from onboard.hf.old.own_configs import is_of_transformers
from onboard.hf.parsed_code import parsed_code

_WERE_TWO = {"rope_parameters": ("rope_theta", "rope_scaling")}


def have_own_defaults(config_class: Any) -> None:
    """Have each config of a repository's class get dicts, lists and sets of its own as defaults of the
    constructor: models change them in place, and a process that begins has none that was changed.
    """
    own = [each for each in config_class.__mro__ if issubclass(each, PretrainedConfig)]
    made = [vars(each).get("__init__") for each in own if not is_of_transformers(each)]
    kept = [
        (init, deepcopy(_defaults(init))) for init in made if any(map(_changes, _defaults(init)))
    ]
    if not kept:
        return
    made_by = config_class.__new__

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for init, defaults in kept:
            given = init.__defaults__ or ()
            every = deepcopy(defaults)
            init.__defaults__ = tuple(every[: len(given)])
            if init.__kwdefaults__:
                init.__kwdefaults__ = dict(
                    zip(init.__kwdefaults__, every[len(given) :], strict=True)
                )
        return made_by(cls)

    config_class.__new__ = __new__


def _defaults(function: Any) -> list[Any]:
    by_name = getattr(function, "__kwdefaults__", None) or {}
    return [*(getattr(function, "__defaults__", None) or ()), *by_name.values()]


def _changes(default: Any) -> bool:
    return isinstance(default, dict | list | set)


class ByPosition:
    """A base, before transformers', whose constructor takes arguments by position."""

    names: ClassVar[list[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**dict(zip(self.names, args, strict=True)), **kwargs)


def _in_old_order(base: Any) -> list[str]:
    """Return the arguments of transformers' class `base` in the order that they had: that of its
    own fields today.
    """
    fields = [item.name for item in dataclasses.fields(base) if item.kw_only and item.init]
    return [old for name in fields for old in _WERE_TWO.get(name, (name,))]


def given_by_position(call: ast.Call, config_class: Any) -> list[str]:
    """Return the names of the arguments that a repository's constructor gives that of its base by
    position: variables that are called as the arguments are, in their order; none: it gives none,
    or others.
    """
    base = next(cls for cls in config_class.__mro__[1:] if issubclass(cls, PretrainedConfig))
    names = [item.id for item in call.args if isinstance(item, ast.Name)]
    known = _in_old_order(base) if is_of_transformers(base) else []
    return names if len(names) == len(call.args) and names == known[: len(names)] else []


def take_by_position(config_class: Any) -> None:
    """Have the constructor of a repository's config class find a base that takes such arguments."""
    try:
        nodes = [*ast.walk(parsed_code(vars(config_class).get("__init__")))]
    except (OSError, TypeError, SyntaxError):
        return  # it has no constructor, or one that a decorator made
    calls = [node for node in nodes if isinstance(node, ast.Call) and is_of_base(node)]
    names = given_by_position(calls[0], config_class) if len(calls) == 1 else []
    if not names:
        return

    taking = type("Taking", (ByPosition,), {"names": names})
    config_class.__bases__ = (taking, *config_class.__bases__)


def is_of_base(call: ast.Call) -> bool:
    """Whether code calls the constructor of the base."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
            return True
    return False
