"""Tensors that a `forward` computes from the config alone: `__init__` computes them, once."""

from __future__ import annotations

import ast
from copy import deepcopy

from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.state import ClassState, Routine
from onboard.codegen.translate.language.trees import cleanup
from onboard.codegen.translate.language.trees.syntax import attribute, call, name

_DEVICE = "device"


def hoist(translator: Translator) -> None:
    """Keep as a buffer of a class what its `forward` gets of a function of the file, if that is
    given nothing but what the config says, and the device.

    Buffers are made where modules are, and move with them: the function needs no device.
    """
    for state in translator.states.values():
        forward = state.methods.get("forward")
        for statement in list(forward.body) if forward is not None else []:
            match _made_where_modules_are(statement):
                case (
                    ast.Assign(
                        targets=[ast.Name(id=variable)],
                        value=ast.Call(
                            func=ast.Name(id=key), args=args, keywords=keywords
                        ) as value,
                    ) as made
                ) if key in translator.functions:
                    given = [*args, *(item.value for item in keywords)]
                    function = translator.functions[key]
                    new = variable not in state.attributes and _is_tensor(function)
                    once = _count(translator, key) == 1 and _assigned(forward, variable) == 1
                    if once and new and all(_is_known(x, state) for x in given):
                        _without_device(value, function)
                        _keep(state, variable, statement, made.value)


def _made_where_modules_are(statement: ast.stmt) -> ast.stmt:
    """Return a statement without the device that it moves a tensor to."""
    match statement:
        case ast.Assign(
            targets=targets,
            value=ast.Call(
                func=ast.Attribute(value=made, attr="to"),
                args=[ast.Attribute(value=ast.Name(), attr="device")],
                keywords=[],
            ),
        ):
            return ast.copy_location(ast.Assign(targets, made), statement)
    return statement


def _is_known(given: ast.expr, state: ClassState) -> bool:
    """Whether an argument is a constant, a setting of the class, or a tensor's device."""
    match given:
        case ast.Constant():
            return True
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            return attr in state.attributes and state.attributes[attr].is_static
        case ast.Attribute(value=ast.Name(), attr=attr):
            return attr == _DEVICE
    return False


def _is_tensor(function: Routine) -> bool:
    """Whether a function gives one tensor, and makes nothing of a device but tensors on it."""
    return function.holes == 1 and _DEVICE not in cleanup.free_names(_bare(function))


def routines_of(translator: Translator) -> list[Routine]:
    """Return constructors, methods and functions."""
    methods = [
        routine
        for state in translator.states.values()
        for routine in (state.init, *state.methods.values())
        if routine is not None
    ]
    return [*methods, *translator.functions.values()]


def _count(translator: Translator, key: str) -> int:
    """Return how often code mentions a function."""
    return sum(
        isinstance(node, ast.Name) and node.id == key
        for routine in routines_of(translator)
        for statement in routine.body
        for node in ast.walk(statement)
    )


def _assigned(routine: Routine | None, variable: str) -> int:
    body = routine.body if routine is not None else []
    return sum(
        isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Store)
        for statement in body
        for node in ast.walk(statement)
    )


def _without_device(value: ast.Call, function: Routine) -> None:
    """Leave the device out of a function and its call."""
    given = dict(zip(function.parameters, value.args, strict=False))
    given |= {str(item.arg): item.value for item in value.keywords}
    function.body = _bare(function)
    function.parameters = [key for key in function.parameters if key != _DEVICE]
    value.args = [given[key] for key in function.parameters if key in given]
    value.keywords = []


def _bare(function: Routine) -> list[ast.stmt]:
    return [_NoDevice().visit(deepcopy(statement)) for statement in function.body]


class _NoDevice(ast.NodeTransformer):
    """Leave out `device=device`."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        text = f"{_DEVICE}={_DEVICE}"
        node.keywords = [item for item in node.keywords if ast.unparse(item) != text]
        return node


def _keep(state: ClassState, variable: str, statement: ast.stmt, value: ast.expr) -> None:
    """Move what a statement of `forward` computes to a buffer."""
    forward, init = state.methods["forward"], state.init
    assert init is not None
    made = call(attribute(name("nn"), "Buffer"), value, persistent=ast.Constant(False))
    place = ast.Attribute(name("self"), variable, ast.Store())
    init.body = [*init.body, ast.Assign([place], made)]
    rest = [item for item in forward.body if item is not statement]
    forward.body = [_Kept(variable).visit(item) for item in rest]


class _Kept(ast.NodeTransformer):
    def __init__(self, variable: str) -> None:
        self.variable = variable

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return attribute(name("self"), self.variable) if node.id == self.variable else node
