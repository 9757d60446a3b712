"""Modules that no translated code runs: those that templates name, and those that checkpoints have
weights of.

The classes of the latter are translated for `__init__` alone.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from torch import nn

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Program
from onboard.codegen.translate.language.object_values import (
    Instance,
    ModuleList,
    ModuleRows,
    ModuleTable,
)
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees import cleanup
from onboard.codegen.translate.language.values import Code, Known


def reach(translator: Program) -> None:
    """Translate the constructors of the modules with weights that nothing runs, and of what these
    are made of.
    """
    done: list[ClassState] = []
    while new := [state for state in translator.states.values() if state not in done]:
        for state in new:
            read = attributes_read(state)
            for attr, value in state.attributes.items():
                if (
                    attr not in read
                    and isinstance(value, Instance)
                    and _is_to_reach(state, attr, value, translator)
                ):
                    own = tuple(made for made in value.made if translator.translates(made.cls))
                    translator.reached(Instance(own, value.expr))
                elif isinstance(value, ModuleList | ModuleRows):
                    _reach_items(state, attr, value, translator)
                elif isinstance(value, ModuleTable):
                    _reach_entries(state, attr, value, translator)
        done += new


def _reach_items(
    state: ClassState, attr: str, value: ModuleList | ModuleRows, translator: Program
) -> None:
    """Translate the constructors of a list's modules with weights: the model may run some of them
    only.
    """
    left = tuple(made for made in value.made if made.cls not in translator.states)
    own = tuple(made for made in left if translator.translates(made.cls))
    if own and has_parameters(state, attr, translator):
        translator.reached(Instance(own, value.expr))


def _reach_entries(state: ClassState, attr: str, table: ModuleTable, translator: Program) -> None:
    """Translate the constructors of a table's modules with weights: its keys are what is read."""
    for entry in table.entries.values():
        if isinstance(entry, ModuleTable):
            _reach_entries(state, attr, entry, translator)
        elif isinstance(entry, Instance | ModuleList):
            _reach_items(state, attr, ModuleList(entry.made, entry.expr), translator)


def reach_parts(state: ClassState, frame: Frame) -> None:
    """Translate what the template of a class's forward uses of the class's modules: constructors,
    forwards.
    """
    translator = frame.translator
    nodes = [
        node
        for routine in state.methods.values()
        for item in routine.body
        for node in ast.walk(item)
    ]
    for node in nodes:
        match node:
            case ast.Attribute(
                value=ast.Attribute(value=ast.Name(id="self"), attr=part), attr=attr
            ):
                value = state.attributes.get(part)
                if isinstance(value, Instance) and all(map(translator.translates, value.classes)):
                    for reached in translator.reached(value):
                        reached.read_outside.add(attr)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=part)):
                value = state.attributes.get(part)
                if isinstance(value, Instance) and all(map(translator.translates, value.classes)):
                    translator.call_module(replace(value, expr=node.func), _arguments(node), frame)


def _arguments(node: ast.Call) -> Args:
    given = [
        Known(item.value) if isinstance(item, ast.Constant) else Code(item) for item in node.args
    ]
    return Args(list(given), {str(item.arg): Code(item.value) for item in node.keywords}, [])


def _is_to_reach(state: ClassState, attr: str, value: Instance, translator: Program) -> bool:
    if is_eager(state, attr, translator):
        return False
    own = [cls for cls in value.classes if translator.translates(cls)]
    others = [cls for cls in value.classes if cls not in own]
    made = bool(own) and all(cls.__module__.startswith("torch.") for cls in others)
    return made and has_parameters(state, attr, translator)


def is_eager(state: ClassState, attr: str, translator: Program) -> bool:
    """Whether an attribute is one of a multimodal model's towers, which the generated model leaves
    out.
    """
    paths = [path for path, module in translator.model.named_modules() if type(module) is state.cls]
    return bool(paths) and all(
        f"{path}.{attr}".lstrip(".") in translator.findings.eager for path in paths
    )


def has_parameters(state: ClassState, attr: str, translator: Program) -> bool:
    """Whether an attribute is a module with parameters, in some instance of the class."""
    inside = [getattr(module, attr, None) for module in translator.modules_of(state.cls)]
    return any(
        isinstance(item, nn.Module) and any(True for _ in item.parameters()) for item in inside
    )


def attributes_read(state: ClassState) -> set[str]:
    """Return the attributes of a class that its methods, its guards or other classes read."""
    trees = [statement for routine in state.methods.values() for statement in routine.body]
    places = {place for tree in (*trees, *state.guards) for place in cleanup.places_read(tree)}
    own = {place.removeprefix("self.") for place in places if place.startswith("self.")}
    return (own | state.read_outside) - state.methods.keys()
