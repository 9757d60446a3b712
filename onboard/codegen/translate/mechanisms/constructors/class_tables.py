"""Tables of classes or functions that code asks for a name: `CLASSES.get(name, Other)(config)`."""

from __future__ import annotations

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.items import got_of_mapping, got_of_table
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.values import Mapping, Value


class ClassTables(Mechanism):
    """What such a table has is the class itself, and so is what takes its place."""

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """`table.get(key, other)`."""
        match owner:
            case Global(obj=dict()) if attr == "get":
                return got_of_table(owner, args, frame)
            case Mapping() if attr == "get":
                return got_of_mapping(owner, args, frame)
        return None
