"""Assign attributes of `self`."""

from __future__ import annotations

import ast
from dataclasses import replace

from transformers import PreTrainedModel

from onboard.codegen.translate.language.config_values import Setting
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.handed.listed import Objects
from onboard.codegen.translate.language.object_values import (
    Closure,
    Instance,
    ModuleList,
    ModuleRows,
    ModuleTable,
    PlainObject,
    Self,
)
from onboard.codegen.translate.language.partial_classes import Partial
from onboard.codegen.translate.language.statements.assignments import between_methods
from onboard.codegen.translate.language.statements.assignments.kept import (
    is_cast,
    is_made_again,
    is_replaced,
    is_table,
    keep_table,
)
from onboard.codegen.translate.language.statements.assignments.own_objects import holds_objects
from onboard.codegen.translate.language.statements.bindings import of_itself
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Items,
    Known,
    Mapping,
    Unread,
    Value,
)


def store_attribute(attr: str, value: Value, frame: Frame, origin: ast.AST | None) -> None:
    """Assign `self.attr`; only `__init__` may. What transformers notes of its own models is
    dropped.
    """
    if attr.startswith("_") and hasattr(PreTrainedModel, attr):
        return
    if frame.kind != "init":
        if isinstance(value, Code) and ast.unparse(value.expr).split(".to(")[0] == f"self.{attr}":
            _move(attr, value.expr, frame)
            return
        if frame.translator.specialised and isinstance(value, Code) and is_cast(value.expr, attr):
            frame.env.values[f"self.{attr}"] = value
            return
        if (
            value.equals(NONE)
            and frame.cls is not None
            and frame.cls.attributes.get(attr, Self()).equals(NONE)
        ):
            return  # what one call would keep for the next
        if _mayremember(attr, frame):
            remember(attr, value, frame)
            between_methods.leave(attr, frame.env.values[f"self.{attr}"], frame)
            return
        if is_made_again(attr, frame):
            return
        if (weight := _new_weight(value, frame)) is not None:
            remember(attr, weight, frame)
            return
        raise Grows(f"forward assigns self.{attr}")
    value = frame.mechanisms.set_attribute(attr, value, frame) or value
    if isinstance(value, PlainObject):
        frame.translator.make_object(value, attr, frame)
        return
    if isinstance(value, Items | Mapping | Output) and holds_objects(value):
        frame.env.values[f"self.{attr}"] = _apart(attr, value, frame, origin)
        return
    if isinstance(value, Closure | Partial | Unread):
        own = of_itself(value, attr, frame) if isinstance(value, Closure) else value
        frame.env.values[f"self.{attr}"] = own
        return
    path = attribute(name("self"), attr)
    assert isinstance(path, ast.Attribute)
    target = ast.Attribute(path.value, attr, ast.Store())
    if is_table(attr, value, frame):
        keep_table(attr, value.code(), frame, origin)
    elif is_replaced(attr, value, frame):
        frame.env.values[f"self.{attr}"] = value  # what replaces it may ask how it was made
        return
    else:
        frame.emit(ast.Assign([target], value.code()), origin)
    frame.env.values[f"self.{attr}"] = _at(value, path)


def _apart(
    attr: str, value: Items | Mapping | Output, frame: Frame, origin: ast.AST | None
) -> Items | Mapping | Output:
    """Keep each item of a list, a dict or an object as an attribute of its own; return where they
    lie.
    """
    pairs = enumerate(value.items) if isinstance(value, Items) else value.entries.items()
    kept: dict[str, Value] = {}
    for key, item in pairs:
        own = f"{attr}_{key}"
        if not own.isidentifier() or f"self.{own}" in frame.env.values:
            raise Untranslatable(f"an object under {key!r} in self.{attr}")
        store_attribute(own, item, frame, origin)
        kept[str(key)] = frame.env.values[f"self.{own}"]
    match value:
        case Items():
            return replace(value, items=(*kept.values(),))
        case Output():
            return replace(value, fields=kept)
    return Mapping(kept)


def _mayremember(attr: str, frame: Frame) -> bool:
    """Whether a forward of repositories' code may assign an attribute: its constructor leaves no
    tensor there, or what it does is done once for a new model.
    """
    if not frame.translator.specialised or frame.cls is None or frame.kind != "forward":
        return False
    made = frame.cls.attributes.get(attr, NONE)
    return frame.remembers or isinstance(made, Known) or (isinstance(made, Code) and made.static)


def _new_weight(value: Value, frame: Frame) -> Code | None:
    """Return what a forward of repositories' code makes the new parameter of, for good: later calls
    find it as the first one has made it, which generated code does each time.
    """
    match value:
        case Code(expr=ast.Call(func=function, args=[weight, *_])) if (
            frame.translator.specialised
            and frame.kind == "forward"
            and ast.unparse(function) in ("nn.Parameter", "torch.nn.Parameter")
        ):
            return Code(weight)
    return None


def remember(attr: str, value: Value, frame: Frame) -> None:
    """Hold what a forward assigns to an attribute in a local variable."""
    if isinstance(value, Code) and not value.lazy:
        variable = frame.fresh(attr.strip("_").replace(".", "_"))
        frame.bind(variable, value)
        value = frame.env.values[variable]
    frame.env.values[f"self.{attr}"] = value


def _move(attr: str, expr: ast.expr, frame: Frame) -> None:
    """Have what reads `self.attr` from here on read it in another dtype; it lies where the other
    tensors are.
    """
    match expr:
        case ast.Call(func=function, keywords=keywords) if dtype := [
            item for item in keywords if item.arg == "dtype"
        ]:
            frame.env.values[f"self.{attr}"] = Code(ast.Call(function, [], dtype))


def _at(value: Value, path: ast.expr) -> Value:
    """Return a value as it is read back from the attribute `path`."""
    match value:
        case Setting() | Objects():
            return replace(value, expr=path)
        case Code(static=static, optional=optional):
            return Code(path, static, optional=optional)
        case Instance() | ModuleList() | ModuleRows() | ModuleTable():
            return replace(value, expr=path)
        case Items() | Mapping():
            return Code(path, value.is_static)
    return value


def refuse_growth(method: ast.FunctionDef, frame: Frame) -> None:
    """Raise `Grows` where a forward calls a method that gives `self` a new buffer: what that calls
    need not know.
    """
    made = [
        item.value
        for item in method.body
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)
    ]
    if frame.kind == "forward" and any(
        ast.unparse(item.func) in ("nn.Buffer", "nn.Parameter") for item in made
    ):
        raise Grows(f"forward calls {method.name}")


class Grows(Untranslatable):
    """A forward that replaces a buffer: generated tables have all positions from the start."""
