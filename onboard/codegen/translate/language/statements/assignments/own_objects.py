"""Lists and dicts in attributes of a module that hold objects."""

from __future__ import annotations

from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.object_values import PlainObject
from onboard.codegen.translate.language.values import Items, Mapping, Value


def holds_objects(value: Value) -> bool:
    """Whether a value is an object, or a list or dict with one, however deep."""
    match value:
        case Items(items=items):
            return any(map(holds_objects, items))
        case Mapping(items=entries):
            return any(map(holds_objects, entries.values()))
    return isinstance(value, PlainObject | Output)
