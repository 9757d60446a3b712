"""What repositories' modules keep in attributes besides modules and buffers."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import nn

from onboard.analysis.behaviour.kept_tables import keeps_table
from onboard.analysis.source import plain_class
from onboard.codegen.translate.language.expressions.decisions import decided_here
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.handed.variables import put
from onboard.codegen.translate.language.object_values import (
    Instance,
    ModuleList,
    SetApart,
    joined_ways,
)
from onboard.codegen.translate.language.trees.casts import without_casts
from onboard.codegen.translate.language.trees.syntax import attribute, call, name
from onboard.codegen.translate.language.values import NONE, Known, Value

_PLAIN = (bool, int, float, str)
_PUT_BY_PATH: WeakKeyDictionary[nn.Module, set[tuple[type, str]]] = WeakKeyDictionary()


def put_by_path(model: nn.Module) -> set[tuple[type, str]]:
    """Return the attributes of a model's classes in whose place a constructor puts another module by
    its path: that finds them there as their class has made them. Who learns of one adds it.
    """
    return _PUT_BY_PATH.setdefault(model, set())


def is_table(attr: str, value: Value, frame: Frame) -> bool:
    """Whether a constructor of repositories' code keeps a tensor as a plain attribute, which would
    stay where it was made.
    """
    if not frame.translator.specialised or frame.cls is None or value.is_static:
        return False
    kept = [vars(module).get(attr) for module in frame.translator.modules_of(frame.cls.cls)]
    return bool(kept) and all(isinstance(item, torch.Tensor) for item in kept)


def is_cast(expr: ast.expr, attr: str) -> bool:
    """Whether an attribute of `self` is cast, and nothing else."""
    inner = without_casts(expr)
    return inner is not expr and ast.unparse(inner) == f"self.{attr}"


def is_made_again(attr: str, frame: Frame) -> bool:
    """Whether a forward of repositories' code makes the table anew that the constructor left."""
    program = frame.translator
    if not program.specialised or frame.cls is None or frame.kind != "forward":
        return False
    return keeps_table(program.model, frame.cls.cls, attr)


def is_so_already(owner: ast.expr, attr: str, value: Value, frame: Frame) -> bool:
    """Whether a forward forgets what it would have kept for the next call: nothing, where there is
    no cache.
    """
    module = frame.evaluate(owner) if frame.kind != "init" and value.equals(NONE) else NONE
    if not isinstance(module, Instance) or not all(
        map(frame.translator.translates, module.classes)
    ):
        return False
    return all(
        state.attributes.get(attr, module).equals(NONE)
        for state in frame.translator.reached(module)
    )


def is_weight(owner: ast.expr, frame: Frame) -> bool:
    """Whether a constructor of repositories' code gives a parameter its first values."""
    if frame.kind != "init" or frame.cls is None or not frame.translator.specialised:
        return False
    path = ast.unparse(owner).removeprefix("self.")
    modules = frame.translator.modules_of(frame.cls.cls)
    return bool(modules) and all(path in dict(each.named_parameters()) for each in modules)


def is_set_apart(owner: ast.expr, attr: str, value: Value, frame: Frame) -> bool:
    """Whether a constructor of repositories' code sets a number, a text or None of another module;
    from here on that has what this config says where all of its modules have it, and no value that
    anything may read where it is set for some layers, say.
    """
    if frame.kind != "init" or not frame.translator.specialised:
        return False
    made = frame.evaluate(owner)
    if not isinstance(made, Instance) or not all(map(frame.translator.translates, made.classes)):
        return False
    modules = [item for cls in made.classes for item in frame.translator.modules_of(cls)]
    values = [vars(item).get(attr, item) for item in modules]
    if not values or not all(value is None or isinstance(value, _PLAIN) for value in values):
        return False
    reason = f"{made.classes[0].__name__}.{attr}, which {ast.unparse(owner)}.{attr} = ... changes"
    is_one = len({(type(item), item) for item in values}) == 1 and _says(value, values[0], frame)
    known = Known(values[0]) if is_one else SetApart(reason)
    for state in frame.translator.reached(made):
        state.attributes[attr] = known
    return True


def _says(value: Value, found: object, frame: Frame) -> bool:
    """Whether a switch is what this config says of it, which is guarded."""
    if not isinstance(found, bool) or not value.is_static:
        return False
    truth = value.truth()
    return (decided_here(value, frame) if truth is None else truth) is found


def _is_local(owner: ast.expr) -> bool:
    """Whether a place is a variable, or one in it: `states[0].inner`."""
    match owner:
        case ast.Name(id=variable):
            return variable != "self"
        case ast.Attribute(value=inner) | ast.Subscript(value=inner, slice=ast.Constant()):
            return _is_local(inner)
    return False


def sets_field(owner: ast.expr, attr: str, value: Value, frame: Frame, origin: ast.AST) -> bool:
    """Whether code puts another value into a field of an output, which has it from here on."""
    output = frame.evaluate(owner) if _is_local(owner) else NONE
    if not isinstance(output, Output):
        return False
    named = owner.id if isinstance(owner, ast.Name) else ""
    put(output, attr, frame.settle(value), frame, named, origin)
    return True


def replaces_part(owner: ast.expr, attr: str, value: Value, frame: Frame) -> bool:
    """Whether a constructor of repositories' code puts another module in the place of one that a
    module of its has made; whose class then has one or the other, as its modules in the small model
    do.
    """
    if frame.kind != "init" or not frame.translator.specialised:
        return False
    if not isinstance(value, Instance | ModuleList):
        return False
    made = frame.evaluate(owner)
    if not isinstance(made, Instance) or not all(map(frame.translator.translates, made.classes)):
        return False
    for state in frame.translator.reached(made):
        kept = _classes_kept(state.cls, attr, frame)
        before = state.attributes.get(attr)
        ways = before.made if isinstance(before, Instance | ModuleList) else ()
        ways = tuple(way for way in joined_ways(ways, value.made) if way.cls in kept)
        state.attributes[attr] = replace(value, made=ways, expr=attribute(name("self"), attr))
    return True


def is_replaced(attr: str, value: Value, frame: Frame) -> bool:
    """Whether what a constructor of repositories' code makes is another module in each module of the
    small model: who made it has put that in its place.
    """
    if frame.cls is None or not frame.translator.specialised:
        return False
    if not isinstance(value, Instance | ModuleList) or not value.made:
        return False
    if (frame.cls.cls, attr) in put_by_path(frame.translator.model):
        return False
    kept = _classes_kept(frame.cls.cls, attr, frame)
    modules = bool(kept) and all(issubclass(cls, nn.Module) for cls in kept)
    return modules and not kept & {way.cls for way in value.made}


def _classes_kept(cls: type, attr: str, frame: Frame) -> set[type]:
    """Return the classes of what the modules of a class have as an attribute, and of the items of
    lists and dicts.
    """
    found = [getattr(module, attr, None) for module in frame.translator.modules_of(cls)]
    items = [[*each] for each in found if isinstance(each, nn.ModuleList | nn.Sequential)]
    items += [[*each.values()] for each in found if isinstance(each, nn.ModuleDict)]
    alone = [each for each in found if not isinstance(each, nn.ModuleList | nn.ModuleDict)]
    return {plain_class(type(each)) for each in (*alone, *chain.from_iterable(items))}


def keep_table(attr: str, value: ast.expr, frame: Frame, origin: ast.AST | None) -> None:
    """Keep a tensor in a buffer apart from the checkpoint; what a constructor has left empty before
    is one from the beginning, for torch makes none of an attribute that is there.
    """
    for body in (*frame.outer, frame.out):
        for place, statement in enumerate(body):
            match statement:
                case ast.Assign(targets=[target], value=ast.Constant(value=None)) if (
                    ast.unparse(target) == f"self.{attr}"
                ):
                    body[place] = ast.copy_location(_buffer(attr, ast.Constant(None)), statement)
    frame.emit(_buffer(attr, value), origin)


def _buffer(attr: str, value: ast.expr) -> ast.Expr:
    make = attribute(name("self"), "register_buffer")
    return ast.Expr(call(make, ast.Constant(attr), value, persistent=ast.Constant(False)))
