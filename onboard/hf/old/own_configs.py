"""Config classes of transformers that a repository's code is made with, as that code reads them."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from onboard.hf.young_fields import plain_default
from onboard.plain_config import OldFields, moved_field

_MADE = inspect.getfile(PretrainedConfig)
"""Where the code of a constructor lies that was made of fields."""
_ENDING = "OwnCodeConfig"
_AFTER = "__post_init__"
_CONFIGS = ("config", "self.config")
LENT = "_fields_of_transformers"
"""Where a repository's config class keeps the fields that it has been lent, with their values."""


def is_of_transformers(config_class: type) -> bool:
    """Whether a class is a config class that transformers itself has."""
    return issubclass(config_class, PretrainedConfig) and (
        config_class.__module__.split(".")[0] == "transformers"
    )


def own_config_class(base: Any, model_type: str, module: str) -> Any:
    """Return a class of its own, in the repository's module, for models whose config class is
    transformers': it reads as configs of transformers 4 did, and transformers' stays as it is.
    """
    made = _of_its_year(base, f"{base.__name__.removesuffix('Config')}{_ENDING}", module)
    made.model_type = model_type
    setattr(sys.modules[module], made.__name__, made)
    return made


def _of_its_year(base: Any, name: str, module: str) -> Any:
    """Return a class of a name whose objects read as those of `base` did."""
    return type(name, (OldFields, base), {"__module__": module, "__qualname__": name})


def read_made_configs(package: str) -> Iterator[str]:
    """Have configs of transformers that functions of a repository's modules make read as configs of
    transformers 4 did, as the main one does. Yield what was changed.
    """
    for name in [key for key in sys.modules if key.startswith(f"{package}.")]:
        space = vars(sys.modules[name])
        for key in sorted(_called(_text(sys.modules[name])) & space.keys()):
            base = space[key]
            if isinstance(base, type) and is_of_transformers(base) and base is not PretrainedConfig:
                space[key] = _of_its_year(base, key, name)
                yield f"{name.rpartition('.')[2]} makes a {key}, which reads as of its year"


def _called(text: str) -> set[str]:
    """Return the names that code calls, or methods of which, `Name(...)` and `Name.method(...)`."""
    called = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    owners = (item.value if isinstance(item, ast.Attribute) else item for item in called)
    return {item.id for item in owners if isinstance(item, ast.Name)}


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


def lend_fields(config_class: Any, made: Any, package: str) -> Iterator[str]:
    """Give a repository's config class the fields that it lacks and that classes of transformers
    which the repository's files import read: those of later years than its own, with the defaults
    of transformers' own config class. Yield what was given.

    Args:
        config_class: changed in place.
        made: a config of it.
        package: of the repository's modules; a field that any of them mentions stays theirs.
    """
    own = [item for key, item in sys.modules.items() if key.startswith(f"{package}.")]
    mentioned = {word for item in own for word in re.findall(r"\w+", _text(item))}
    lent: dict[str, Any] = {}
    for theirs, fields in _asked_for(own):
        for field in sorted(fields - mentioned):
            value = plain_default(theirs, field)
            if value is not None and not hasattr(made, field):
                lent[field] = value
                by = f"the default of {theirs.__name__}"
                yield f"{config_class.__name__} has no {field}: {value!r}, {by}"
    for field, value in lent.items():
        setattr(config_class, field, value)
    if lent:
        setattr(config_class, LENT, lent)


def _text(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""  # a stand-in


def _asked_for(own: Collection[Any]) -> Iterator[tuple[Any, set[str]]]:
    """Yield the config classes of transformers whose modeling files' classes these modules import,
    and the names of the fields that those classes read, and the classes that they make.
    """
    imported = [value for module in own for value in vars(module).values()]
    classes = [value for value in imported if isinstance(value, type) and _is_modeling(value)]
    for name in sorted({cls.__module__ for cls in classes}):
        space = vars(sys.modules[name])
        configs = (value for value in space.values() if _is_beside(value, name))
        config = next(configs, None)
        known, waiting = set[str](), {cls.__name__ for cls in classes if cls.__module__ == name}
        fields: set[str] = set()
        while waiting:
            key = waiting.pop()
            known.add(key)
            for node in ast.walk(ast.parse(_text(space.get(key)))):
                match node:
                    case ast.Name(id=other) if isinstance(space.get(other), type):
                        waiting |= {other} - known if _is_modeling(space[other]) else set()
                    case ast.Attribute(value=owner, attr=attr):
                        fields |= {attr} if ast.unparse(owner) in _CONFIGS else set()
        if config is not None:
            yield config, fields


def _is_modeling(cls: type) -> bool:
    own, _, file = cls.__module__.rpartition(".")
    return own.startswith("transformers.models.") and file.startswith("modeling_")


def _is_beside(value: Any, modeling: str) -> bool:
    """Whether a value is a config class of the folder of a modeling file."""
    folder = modeling.rpartition(".")[0]
    is_config = isinstance(value, type) and issubclass(value, PretrainedConfig)
    return is_config and value.__module__.startswith(f"{folder}.")
