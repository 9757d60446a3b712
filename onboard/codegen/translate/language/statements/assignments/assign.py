"""Assign values to targets: names, tuples, attributes of `self`, items."""

from __future__ import annotations

import ast
from copy import deepcopy
from functools import cache

from torch import nn

from onboard.analysis.source import ModuleSource, class_node, find_method
from onboard.codegen.translate.language.expressions.decisions import statements_of
from onboard.codegen.translate.language.expressions.items import index_code
from onboard.codegen.translate.language.forms import MAYBE, ROWS, SEVERAL_ROWS
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import containers, variables
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.handed.listed import listed
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.object_values import (
    Instance,
    ModuleList,
    joined_ways,
)
from onboard.codegen.translate.language.sequences import sequence_of_all
from onboard.codegen.translate.language.statements import config_changes
from onboard.codegen.translate.language.statements.assignments.between_layers import is_left_behind
from onboard.codegen.translate.language.statements.assignments.kept import (
    is_set_apart,
    is_so_already,
    is_weight,
    replaces_part,
    sets_field,
)
from onboard.codegen.translate.language.statements.assignments.own_attributes import (
    remember,
    store_attribute,
)
from onboard.codegen.translate.language.statements.assignments.own_entries import (
    OwnEntries,
    holds_own_entries,
    is_own_key,
)
from onboard.codegen.translate.language.statements.assignments.unpacked import unpacked
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import NONE, Code, Known, Mapping, Mask, Value

_OF_WEIGHTS = ("_init_weights", "init_weights", "reset_parameters")
"""Functions that make first values, which come from a checkpoint here."""


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
            remember(attr, frame.settle(value), frame)
        case ast.Attribute(
            value=ast.Attribute(
                value=ast.Attribute(value=ast.Name(id="self"), attr=part), attr=attr
            ),
            attr="data",
        ) if frame.kind == "forward" and frame.translator.specialised:
            remember(f"{part}.{attr}", frame.settle(value), frame)
        case ast.Attribute(
            value=ast.Attribute(value=ast.Name(id="self"), attr=part), attr=attr
        ) if _is_noted_for_later(part, attr, frame):
            remember(f"{part}.{attr}", frame.settle(value), frame)
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
        case ast.Attribute(value=owner, attr=attr) if _is_setting(owner, attr, value, frame):
            _emit(frame.code(owner), attr, value.code(), frame, origin)
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
        case ast.Subscript():
            _store_item(target, frame.settle(value), frame, origin)
        case ast.Attribute() if _is_kept_elsewhere(target, value, frame, origin):
            return
        case _:
            raise Untranslatable(f"an assignment to {ast.unparse(target)}")


def sets_by_name(node: ast.expr, frame: Frame) -> bool:
    """Execute `setattr(owner, "attr", value)` of an object; return whether it was that."""
    match node:
        case ast.Call(
            func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str() as attr), value]
        ) if isinstance(frame.evaluate(owner), Output):
            store(ast.Attribute(owner, attr, ast.Store()), frame.evaluate(value), frame, node)
            return True
    return False


def _is_kept_elsewhere(target: ast.Attribute, value: Value, frame: Frame, origin: ast.AST) -> bool:
    """Whether an attribute is a field of an object, or set apart, or left at a class."""
    owner, attr = target.value, target.attr
    return (
        sets_field(owner, attr, value, frame, origin)
        or is_set_apart(owner, attr, value, frame)
        or is_left_behind(owner, attr, frame.settle(value), frame, origin)
    )


def _unpack(targets: list[ast.expr], value: Value, frame: Frame, origin: ast.AST) -> None:
    for target, item in unpacked(targets, value, frame, origin):
        store(target, item, frame, origin)


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
    names = [tuple(f"{path}.{end}".removeprefix(".") for end in pair) for path in places]
    if not isinstance(tied, dict):
        return False
    return any({*item} == {*both} for item in tied.items() for both in names) or any(
        one in tied and _are_one(model, one, other, tied[one]) for one, other in names
    )


def _are_one(model: nn.Module, *names: str) -> bool:
    """Whether a small model has one parameter under all names: a module may have several."""
    found = dict(model.named_parameters(remove_duplicate=False))
    return names[0] in found and all(found.get(name) is found[names[0]] for name in names)


def _is_setting(owner: ast.expr, attr: str, value: Value, frame: Frame) -> bool:
    """Whether a constructor gives a module that it made a number or a switch that the module's own
    does not set, and which a function of its file reads that makes no weights.

    What its own constructor sets as well is known where its forward is written.
    """
    if frame.kind != "init" or not frame.translator.specialised:
        return False
    module = frame.evaluate(owner) if value.is_static else None
    if not isinstance(module, Instance) or any(_sets(cls, attr) for cls in module.classes):
        return False
    return attr in _attributes_read(frame.source)


@cache
def _attributes_read(source: ModuleSource) -> frozenset[str]:
    """Return the attributes that functions of a file read but those that make weights."""
    functions = (
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef) and node.name not in _OF_WEIGHTS
    )
    return frozenset(
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


def _sets(cls: type, attr: str) -> bool:
    """Whether a constructor of a class, or of its bases, sets an attribute."""
    found = (find_method(base, "__init__") for base in cls.__mro__ if "__init__" in vars(base))
    return any(
        isinstance(item, ast.Attribute) and item.attr == attr and isinstance(item.ctx, ast.Store)
        for _, node in filter(None, found)
        for item in ast.walk(node)
    )


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
    value = listed(value) if frame.translator.specialised else value
    if frame.translator.specialised and isinstance(value, ByName):
        variables.bind(variable, value, frame, origin)
        return
    if not isinstance(value, Result):
        frame.bind(variable, frame.mechanisms.stored(value) or value, origin)
        return
    if value.is_plain_tuple:
        frame.bind(variable, Code(value.expr, form=_form_of_all(value.shape)), origin)
        return
    if frame.translator.specialised and isinstance(value.shape, ByName):
        variables.bind_result(variable, value, frame, origin)
        return
    names = [f"{variable}_{index}" for index in range(value.holes)]
    frame.env.values[variable] = frame.bind_result(value, names, origin)


def _form_of_all(shape: Value) -> str | None:
    """Return the form of a tuple, whose parts may all be rows of tables."""
    parts = shape.parts()
    rows = [isinstance(part, Hole) and part.form == ROWS for part in parts]
    return SEVERAL_ROWS if rows and all(rows) else sequence_of_all([shape])


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
    if _is_own_entry(target, owner, key, frame):
        frame.env.values[ast.unparse(target.value)] = OwnEntries(filled=True)
        return
    if containers.stores_item(target, value, frame, origin):
        return
    if isinstance(owner, Mapping) and isinstance(key, Known):
        stem = containers.entry_name(target.value, key.value)
        owner.items[key.value] = containers.named(stem, value, frame, origin)
        return
    if isinstance(owner, Output) and isinstance(key, Known):
        variables.put(owner, key.value, value, frame)
        return
    if isinstance(owner, Mapping):
        if not isinstance(target.value, ast.Name):
            raise Untranslatable(f"a computed key at {frame.source.location(origin)}")
        if frame.loops:
            raise Widened(target.value.id)
        frame.bind(target.value.id, Code(owner.code()), origin)
        owner = frame.env.values[target.value.id]
    if (changed := _with_item(target, key, value, frame)) is not None:
        frame.emit(ast.Assign([_as_target(target.value)], changed), origin)
        return
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


def _is_own_entry(target: ast.Subscript, owner: Value, key: Value, frame: Frame) -> bool:
    """Whether a layer of repositories' code leaves something in a dict under its own number."""
    if frame.kind != "forward" or frame.cls is None or not frame.translator.specialised:
        return False
    if not isinstance(target.value, ast.Name) or not holds_own_entries(owner):
        return False
    return is_own_key(key, [*frame.translator.modules_of(frame.cls.cls)])


def _with_item(target: ast.Subscript, key: Value, value: Value, frame: Frame) -> ast.expr | None:
    """Return the tuple that a constructor's list is, with another item; None for what is no such
    list, all of which generated code has as tuples.
    """
    path = ast.unparse(target.value)
    made = [
        item.value
        for item in statements_of(frame)
        if isinstance(item, ast.Assign) and path in map(ast.unparse, item.targets)
    ]
    match made, key:
        case [*_, ast.Tuple()], Known(value=int() as place) if frame.kind == "init" and place >= 0:
            text = f"(*{path}[:{place}], item, *{path}[{place + 1}:])"
            whole = ast.parse(text, mode="eval").body
            assert isinstance(whole, ast.Tuple)
            whole.elts[1] = value.code()
            return whole
    return None


def _as_target(place: ast.expr) -> ast.expr:
    target = deepcopy(place)
    assert isinstance(target, ast.Name | ast.Attribute)
    target.ctx = ast.Store()
    return target


def _form(value: Value) -> str | None:
    """Return what is known of an item that a dict gets at run time; items without one tell nothing
    of the others.
    """
    if value.equals(NONE):
        return MAYBE
    return value.form if isinstance(value, Code) else None


class Widened(Exception):
    """A dict with known keys got a computed key: it has to exist at run time."""

    def __init__(self, variable: str) -> None:
        super().__init__(variable)
        self.variable = variable
