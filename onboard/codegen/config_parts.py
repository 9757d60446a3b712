"""Parts of the config classes of a repository's own: other classes that one makes, and private fields."""

from __future__ import annotations

import ast
import sys

from transformers import PretrainedConfig

from onboard.analysis.source import class_node
from onboard.hf.old.own_configs import is_of_transformers

OF_ATTENTION = "_attn_implementation"
"""The field, and how private ones beside it begin, that says which attention transformers takes."""


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


def unread_fields(config_class: type) -> set[str]:
    """Return the private fields, as `self._field`, that a class sets and does not read, or that say
    which attention transformers takes: they tell transformers something, as the model type does,
    and its version. Tables of names are for the model, as are arguments under their own names.
    """
    fields = [
        node
        for node in ast.walk(class_node(config_class))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and ast.unparse(node.value) == "self"
    ]
    read = {node.attr for node in fields if isinstance(node.ctx, ast.Load)}
    read |= {
        target.attr
        for node in ast.walk(class_node(config_class))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and _is_for_the_model(target.attr, node.value)
    }
    told = {node.attr for node in fields if f"{node.attr}_".startswith(f"{OF_ATTENTION}_")}
    unread = {ast.unparse(node) for node in fields if node.attr not in read or node.attr in told}
    return unread | {"self.model_type", "self.transformers_version"}


def _is_for_the_model(field: str, value: ast.expr) -> bool:
    """Whether it is a table of constants, or the argument of the field's name."""
    parts = ast.iter_child_nodes(value)
    table = isinstance(value, ast.Dict) and all(isinstance(each, ast.Constant) for each in parts)
    return table or (isinstance(value, ast.Name) and value.id == field)
