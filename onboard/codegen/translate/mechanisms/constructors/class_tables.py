"""Tables of classes or functions that code asks for a name, `CLASSES.get(name, Other)(config)`, and
modules that it asks for the name of their class.
"""

from __future__ import annotations

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.items import got_of_mapping, got_of_table
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global, Instance, Self
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Known, Mapping, Value


class ClassTables(Mechanism):
    """What such a table has is the class itself, and so is what takes its place."""

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """`module.__class__`, and `__name__` of that."""
        match owner:
            case Instance(classes=(cls,)) if attr == "__class__":
                return Global(cls, name(cls.__name__))
            case Self() if attr == "__class__" and (state := frame.cls or frame.caller):
                return Global(state.cls, name(state.cls.__name__))
            case Global(obj=type() as cls) if attr == "__name__":
                return Known(cls.__name__)
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """`table.get(key, other)`."""
        match owner:
            case Global(obj=dict()) if attr == "get":
                return got_of_table(owner, args, frame)
            case Mapping() if attr == "get":
                return got_of_mapping(owner, args, frame)
        return None
