"""Reading an attribute of a module of which no class is known."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any, cast

from onboard.codegen.translate.language.expressions.objects import get_attribute
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.trees.syntax import attribute, name


def test_it_is_read_where_it_is_and_no_property_is_called() -> None:
    part = Instance((), attribute(name("self"), "part"))
    mechanisms = SimpleNamespace(attribute=lambda *_: None)
    frame = SimpleNamespace(mechanisms=mechanisms, env=SimpleNamespace(values={}))
    read = get_attribute(part, "scale", cast(Any, frame))
    assert ast.unparse(read.code()) == "self.part.scale"
