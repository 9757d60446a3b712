"""Config classes of transformers that a repository's code is made with, as that code reads them."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from onboard.plain_config import OldFields, moved_field

_MADE = inspect.getfile(PretrainedConfig)
"""Where the code of a constructor lies that was made of fields."""
_ENDING = "OwnCodeConfig"
_AFTER = "__post_init__"


def is_of_transformers(config_class: type) -> bool:
    """Whether a class is a config class that transformers itself has."""
    return issubclass(config_class, PretrainedConfig) and (
        config_class.__module__.split(".")[0] == "transformers"
    )


def own_config_class(base: Any, model_type: str, module: str) -> Any:
    """Return a class of its own, in the repository's module, for models whose config class is
    transformers': it reads as configs of transformers 4 did, and transformers' stays as it is.
    """
    name = f"{base.__name__.removesuffix('Config')}{_ENDING}"
    values = {"model_type": model_type, "__module__": module, "__qualname__": name}
    made = type(name, (OldFields, base), values)
    setattr(sys.modules[module], name, made)
    return made


def is_own_of_transformers(name: str) -> bool:
    """Whether `own_config_class` gives this name to a class of its own."""
    base = f"{name.removesuffix(_ENDING)}Config"
    return name.endswith(_ENDING) and base in CONFIG_MAPPING_NAMES.values()


def read_moved_fields(config_class: Any) -> None:
    """Have a repository's config class show the fields that have moved, where it lacks them."""
    if "__getattr__" not in dir(config_class):
        config_class.__getattr__ = moved_field


def inherit_constructors(config_class: Any) -> list[str]:
    """Have classes that declare neither constructor nor fields take the constructor that a base
    declares, as in transformers 4: transformers 5 makes each class one of its fields. Return what
    was changed.
    """
    heirs = [cls for cls in config_class.__mro__ if _has_a_made_one(cls)]
    for cls in heirs:
        del cls.__init__
    return [f"{cls.__name__} has the constructor of its base" for cls in heirs]


def _has_a_made_one(cls: Any) -> bool:
    """Whether a class of a repository has a constructor made of no fields, and a base of the
    repository one that is code.
    """
    own = issubclass(cls, PretrainedConfig) and not is_of_transformers(cls)
    if not own or _AFTER in vars(cls) or inspect.get_annotations(cls):
        return False
    bases = (base for base in cls.__mro__[1:] if "__init__" in vars(base) and not _is_made(base))
    return _is_made(cls) and not is_of_transformers(next(bases, PretrainedConfig))


def _is_made(cls: Any) -> bool:
    """Whether a class has a constructor that was made of fields."""
    code = getattr(vars(cls).get("__init__"), "__code__", None)
    return code is not None and code.co_filename == _MADE


def keep_own_steps(config_class: Any) -> None:
    """Have a class whose own constructor calls a method that has the name of one of transformers'
    today call it there alone; where transformers calls it, transformers' runs.
    """
    own, made = vars(config_class).get(_AFTER), vars(config_class).get("__init__")
    if own is None or made is None or _takes_keywords(own):
        return

    @functools.wraps(own)
    def step(self: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_code is made.__code__:
            own(self)
        else:
            getattr(super(config_class, self), _AFTER)(**kwargs)

    setattr(config_class, _AFTER, step)


def _takes_keywords(method: Any) -> bool:
    """Whether a method takes what else a config.json says, as transformers' does."""
    parameters = inspect.signature(method).parameters.values()
    return any(item.kind is item.VAR_KEYWORD for item in parameters)
