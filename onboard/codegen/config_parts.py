"""Config classes of a repository's own that another one makes, for its parts."""

from __future__ import annotations

import ast
import sys

from transformers import PretrainedConfig

from onboard.hf.old.own_configs import is_of_transformers


def is_part(config_class: type, name: str) -> bool:
    """Whether a name is one of another config class of the repository's in a class's module."""
    found = getattr(sys.modules[config_class.__module__], name, None)
    return (
        isinstance(found, type)
        and issubclass(found, PretrainedConfig)
        and found is not config_class
        and not is_of_transformers(found)
    )


def parts_made(config_class: type, text: str) -> list[type[PretrainedConfig]]:
    """Return the classes of its parts that a class's text calls, each once."""
    called = [
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    module = sys.modules[config_class.__module__]
    names = [name for name in dict.fromkeys(called) if is_part(config_class, name)]
    return [getattr(module, name) for name in names]
