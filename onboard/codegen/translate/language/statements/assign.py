"""Assign values to targets: names, tuples, attributes of `self`, items."""

from __future__ import annotations

import ast
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from onboard.analysis.source import class_node
from onboard.codegen.translate.language.config_values import Setting
from onboard.codegen.translate.language.expressions.items import index_code
from onboard.codegen.translate.language.expressions.module_lists import modules_of_row
from onboard.codegen.translate.language.forms import COMPLEX, MAYBE, ROWS, SEVERAL_ROWS, TUPLE
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.object_values import (
    Closure,
    Instance,
    ModuleList,
    ModuleRows,
    ModuleTable,
    PlainObject,
    Self,
    joined_ways,
)
from onboard.codegen.translate.language.statements import config_changes
from onboard.codegen.translate.language.statements.bindings import of_itself
from onboard.codegen.translate.language.statements.kept import (
    is_cast,
    is_made_again,
    is_replaced,
    is_set_apart,
    is_so_already,
    is_table,
    is_weight,
    keep_table,
    replaces_part,
    sets_field,
)
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Half,
    Items,
    Known,
    Mapping,
    Mask,
    Output,
    Unread,
    Value,
)


def store(target: ast.expr, value: Value, frame: Frame, origin: ast.AST) -> None:
    """Assign a value to a target."""
    match target:
        case ast.Name(id=variable):
            _store_name(variable, value, frame, origin)
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            _unpack(targets, value, frame, origin)
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            store_attribute(attr, frame.settle(value), frame, origin)
        case ast.Attribute(
            value=ast.Attribute(value=ast.Name(id="self"), attr=attr), attr="data"
        ) if frame.kind == "forward" and frame.translator.specialised:
            _remember(attr, frame.settle(value), frame)
        case ast.Attribute(
            value=ast.Attribute(
                value=ast.Attribute(value=ast.Name(id="self"), attr=part), attr=attr
            ),
            attr="data",
        ) if frame.kind == "forward" and frame.translator.specialised:
            _remember(f"{part}.{attr}", frame.settle(value), frame)
        case ast.Attribute(
            value=ast.Attribute(value=ast.Name(id="self"), attr=part), attr=attr
        ) if _is_noted_for_later(part, attr, frame):
            _remember(f"{part}.{attr}", frame.settle(value), frame)
        case ast.Attribute(value=owner, attr=attr) if is_so_already(owner, attr, value, frame):
            return
        case ast.Attribute(attr="generation_config"):
            return  # how transformers samples
        case ast.Attribute(attr="requires_grad") if frame.translator.specialised:
            return  # how it is trained
        case ast.Attribute() if ast.unparse(target).startswith("torch.backends."):
            return  # how kernels are chosen
        case ast.Attribute(value=owner, attr=attr) if config_changes.states_a_fact(
            owner, attr, value, frame
        ):
            return
        case ast.Attribute(value=ast.Attribute(), attr=attr) if _ties(target, value, frame):
            return  # written for all ties at once
        case ast.Attribute(value=owner, attr=attr) if _is_note(owner, attr, frame):
            return
        case ast.Attribute(value=owner, attr="data") if is_weight(owner, frame):
            return  # it is read from the checkpoint
        case ast.Attribute(value=owner, attr=attr) if _takes_away(owner, value, frame):
            _emit(frame.code(owner), attr, ast.Constant(None), frame, origin)
        case ast.Attribute(value=owner, attr=attr) if replaces_part(owner, attr, value, frame):
            _emit(frame.code(owner), attr, value.code(), frame, origin)
        case ast.Attribute(value=owner, attr=attr) if config_changes.is_own_config(owner, frame):
            config_changes.change_for_all(owner, attr, frame.settle(value), frame)
        case ast.Attribute(value=ast.Name(id=variable), attr=attr) if (
            config_changes.is_copied_config(variable, frame)
        ):
            config_changes.change_config(variable, attr, frame.settle(value), frame, origin)
        case ast.Attribute(value=owner, attr=attr) if sets_field(owner, attr, value, frame):
            return
        case ast.Subscript():
            _store_item(target, frame.settle(value), frame, origin)
        case ast.Attribute(value=owner, attr=attr) if is_set_apart(owner, attr, frame):
            return
        case _:
            raise Untranslatable(f"an assignment to {ast.unparse(target)}")


def _emit(owner: ast.expr, attr: str, value: ast.expr, frame: Frame, origin: ast.AST) -> None:
    frame.emit(ast.Assign([ast.Attribute(owner, attr, ast.Store())], value), origin)


def _ties(target: ast.Attribute, value: Value, frame: Frame) -> bool:
    """Whether a constructor ties two weights that transformers' model says are tied."""
    if frame.kind != "init" or frame.cls is None or not isinstance(value, Code):
        return False
    model = frame.translator.model
    tied = getattr(type(model), "_tied_weights_keys", None)
    pair = [ast.unparse(node).removeprefix("self.") for node in (target, value.expr)]
    places = [path for path, module in model.named_modules() if type(module) is frame.cls.cls]
    names = [{f"{path}.{end}".removeprefix(".") for end in pair} for path in places]
    return isinstance(tied, dict) and any({*item} in names for item in tied.items())


def _is_note(owner: ast.expr, attr: str, frame: Frame) -> bool:
    """Whether a constructor notes something at a module for who makes its weights, or at a
    parameter for who trains it: code that reads it finds nothing here.
    """
    if not (attr.startswith("_") and frame.kind == "init" and frame.translator.specialised):
        return False
    made = frame.evaluate(owner)
    if type(made) is Code and not made.static:
        return not hasattr(nn.Parameter, attr)
    return isinstance(made, Instance) and not any(hasattr(cls, attr) for cls in made.classes)


def _is_noted_for_later(part: str, attr: str, frame: Frame) -> bool:
    """Whether a forward of repositories' code notes something at a part that does not read it."""
    if frame.kind != "forward" or not frame.translator.specialised:
        return False
    made = frame.evaluate(attribute(name("self"), part))
    return isinstance(made, Instance) and not any(_reads(cls, attr) for cls in made.classes)


def _reads(cls: type, attr: str) -> bool:
    """Whether a method of a class, but its constructor, reads `self.attr`."""
    methods = [item for item in class_node(cls).body if isinstance(item, ast.FunctionDef)]
    read = [
        node
        for method in methods
        if method.name != "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]
    return any(ast.unparse(node) == f"self.{attr}" for node in read)


def _takes_away(owner: ast.expr, value: Value, frame: Frame) -> bool:
    """Whether `__init__` takes a part (a norm's bias) away from a module that it made."""
    nothing = isinstance(value, Known) and value.value is None
    return nothing and frame.kind == "init" and isinstance(frame.evaluate(owner), Instance)


def _store_name(variable: str, value: Value, frame: Frame, origin: ast.AST) -> None:
    if not isinstance(value, Result):
        frame.bind(variable, frame.mechanisms.stored(value) or value, origin)
        return
    if value.is_plain_tuple:
        frame.bind(variable, Code(value.expr, form=_form_of_all(value.shape)), origin)
        return
    names = [f"{variable}_{index}" for index in range(value.holes)]
    frame.env.values[variable] = frame.bind_result(value, names, origin)


def _form_of_all(shape: Value) -> str:
    """Return the form of a tuple, whose parts may all be rows of tables."""
    parts = shape.parts()
    rows = [isinstance(part, Hole) and part.form == ROWS for part in parts]
    return SEVERAL_ROWS if rows and all(rows) else TUPLE


def _unpack(targets: list[ast.expr], value: Value, frame: Frame, origin: ast.AST) -> None:
    if isinstance(value, Result) and (names := _hole_names(targets, value)) is not None:
        bound = frame.bind_result(value, names, origin)
        assert isinstance(bound, Items)
        for target, item in zip(targets, bound.items, strict=True):
            assert isinstance(target, ast.Name)
            frame.env.values[target.id] = item
        return
    value = frame.settle(value)
    value = modules_of_row(value) or value
    match value:
        case Items(items=items) if len(items) == len(targets):
            _unpack_items(targets, items, frame, origin)
        case Known(value=tuple() | list() as known) if len(known) == len(targets):
            _unpack_items(targets, tuple(map(Known, known)), frame, origin)
        case Code(form=form) if form == COMPLEX and len(targets) == 2:
            _unpack_items(targets, (Half(value, 0), Half(value, 1)), frame, origin)
        case Code():
            _unpack_code(targets, value, frame, origin)
        case _:
            raise Untranslatable(f"unpacking at {frame.source.location(origin)}")


def _hole_names(targets: list[ast.expr], result: Result) -> list[str] | None:
    """Return the target names of the result's parts when each part has one."""
    if not (isinstance(result.shape, Items) and len(result.shape.items) == len(targets)):
        return None
    names = {}
    for target, item in zip(targets, result.shape.items, strict=True):
        if not isinstance(target, ast.Name) or not isinstance(item, Hole | Known):
            return None
        if isinstance(item, Hole):
            names[item.index] = target.id
    return [names[index] for index in range(result.holes)] if len(names) == result.holes else None


def _unpack_items(
    targets: list[ast.expr], items: tuple[Value, ...], frame: Frame, origin: ast.AST
) -> None:
    """Assign one by one, or in one statement when a later item reads an earlier target."""
    stores = {target.id for target in targets if isinstance(target, ast.Name)}
    reads = {
        node.id
        for item in items[1:]
        if isinstance(item, Code)
        for node in ast.walk(item.expr)
        if isinstance(node, ast.Name)
    }
    if stores & reads and all(isinstance(item, Code) for item in items):
        elements = [item.expr for item in items if isinstance(item, Code)]
        if any(
            ast.unparse(target) != ast.unparse(item)
            for target, item in zip(targets, elements, strict=True)
        ):
            frame.emit(ast.Assign([_store_tuple(targets)], ast.Tuple(elements, ast.Load())), origin)
        for target, item in zip(targets, items, strict=True):
            assert isinstance(target, ast.Name)
            assert isinstance(item, Code)
            frame.env.values[target.id] = replace(item, expr=name(target.id))
        return
    for target, item in zip(targets, items, strict=True):
        store(target, item, frame, origin)


def _store_tuple(targets: list[ast.expr]) -> ast.Tuple:
    return ast.Tuple([_stored(target) for target in targets], ast.Store())


def _stored(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Tuple):
        return _store_tuple(target.elts)
    if not isinstance(target, ast.Name):
        raise Untranslatable(f"unpacking into {ast.unparse(target)}")
    return name(target.id, store=True)


def _unpack_code(targets: list[ast.expr], value: Code, frame: Frame, origin: ast.AST) -> None:
    """Unpack a run-time tuple; parts of a transposed whole (chunks of the last dimension) are
    transposed too.
    """
    attributes = [target for target in targets if isinstance(target, ast.Attribute)]
    form = ROWS if value.form == SEVERAL_ROWS else None
    names = [
        name(f"{item.attr}_value", True) if item in attributes else _stored(item)
        for item in targets
    ]
    frame.emit(ast.Assign([ast.Tuple(list(names), ast.Store())], value.expr), origin)
    for target, part in zip(targets, names, strict=True):
        inner = [item.id for item in ast.walk(part) if isinstance(item, ast.Name)]
        frame.env.values.update(
            {item: Code(name(item), value.static, value.transposed, form=form) for item in inner}
        )
        if not isinstance(part, ast.Name):
            continue
        if target in attributes:
            store(target, frame.env.values[part.id], frame, origin)


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
        if _may_remember(attr, frame):
            _remember(attr, value, frame)
            return
        if is_made_again(attr, frame):
            return
        raise Grows(f"forward assigns self.{attr}")
    value = frame.mechanisms.set_attribute(attr, value, frame) or value
    if isinstance(value, PlainObject):
        frame.translator.make_object(value, attr, frame)
        return
    if isinstance(value, Closure | Unread | Output):
        own = of_itself(value, attr, frame) if isinstance(value, Closure) else value
        frame.env.values[f"self.{attr}"] = own
        return
    path = attribute(name("self"), attr)
    assert isinstance(path, ast.Attribute)
    target = ast.Attribute(path.value, attr, ast.Store())
    if is_table(attr, value, frame):
        keep_table(attr, value.code(), frame, origin)
    elif not is_replaced(attr, value, frame):
        frame.emit(ast.Assign([target], value.code()), origin)
    frame.env.values[f"self.{attr}"] = _at(value, path)


def _may_remember(attr: str, frame: Frame) -> bool:
    """Whether a forward of repositories' code may assign an attribute: its constructor leaves no
    tensor there, or what it does is done once for a new model.
    """
    if not frame.translator.specialised or frame.cls is None or frame.kind != "forward":
        return False
    made = frame.cls.attributes.get(attr, NONE)
    return frame.remembers or isinstance(made, Known) or (isinstance(made, Code) and made.static)


def _remember(attr: str, value: Value, frame: Frame) -> None:
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
        case Setting():
            return replace(value, expr=path)
        case Code(static=static, optional=optional):
            return Code(path, static, optional=optional)
        case Instance() | ModuleList() | ModuleRows() | ModuleTable():
            return replace(value, expr=path)
        case Items() | Mapping():
            return Code(path, value.is_static)
    return value


def _store_item(target: ast.Subscript, value: Value, frame: Frame, origin: ast.AST) -> None:
    owner, key = frame.evaluate(target.value), frame.evaluate(target.slice)
    computed = isinstance(owner, Mapping) and not owner.items and not isinstance(key, Known)
    if (
        isinstance(value, Mask)
        and isinstance(target.value, ast.Name)
        and (isinstance(owner, Mask) or computed)
    ):
        frame.env.values[target.value.id] = value  # a dict of masks is as good as a mask
        return
    if isinstance(owner, Mapping) and isinstance(key, Known):
        owner.items[key.value] = value
        return
    if isinstance(owner, Output) and isinstance(key, Known):
        place = ast.unparse(target.value)
        frame.env.values[place] = replace(owner, fields={**owner.fields, key.value: value})
        return
    if isinstance(owner, Mapping):
        if not isinstance(target.value, ast.Name):
            raise Untranslatable(f"a computed key at {frame.source.location(origin)}")
        if frame.loops:
            raise Widened(target.value.id)
        frame.bind(target.value.id, Code(owner.code()), origin)
        owner = frame.env.values[target.value.id]
    index = index_code(target.slice, frame)
    frame.emit(ast.Assign([ast.Subscript(owner.code(), index, ast.Store())], value.code()), origin)
    if isinstance(owner, ModuleList) and isinstance(value, Instance):
        whole = ModuleList(joined_ways(owner.made, value.made), owner.expr)
        frame.env.values[ast.unparse(target.value)] = whole
        match target.value:
            case ast.Attribute(value=ast.Attribute() as part, attr=attr):
                replaces_part(part, attr, whole, frame)
    if (
        isinstance(owner, Code)
        and isinstance(target.value, ast.Name)
        and (form := _form(value)) is not None
    ):
        frame.env.values[target.value.id] = Code(owner.expr, owner.static, form=f"dict of {form}")


def _form(value: Value) -> str | None:
    """Return what is known of an item that a dict gets at run time; items without one tell nothing
    of the others.
    """
    if value.equals(NONE):
        return MAYBE
    return value.form if isinstance(value, Code) else None


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


class Widened(Exception):
    """A dict with known keys got a computed key: it has to exist at run time."""

    def __init__(self, variable: str) -> None:
        super().__init__(variable)
        self.variable = variable
