"""What is left of `__init__` once it is known what `forward` reads.

Attributes that nothing reads go; those that only `__init__` itself reads become expressions or
locals; constructor arguments that a class no longer needs go at every call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from copy import deepcopy

from torch import nn

from onboard.codegen.translate.language.args import spread
from onboard.codegen.translate.language.object_values import ways_of
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.program.unused_modules import (
    attributes_read,
    has_parameters,
    is_eager,
)
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees import cleanup
from onboard.codegen.translate.language.trees.skips import returns
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE


def prune(translator: Translator) -> None:
    """Prune the `__init__` of every translated class, callees first."""
    done: set[str] = set()
    for state in translator.states.values():
        _prune_class(state, translator, done)


def _prune_class(state: ClassState, translator: Translator, done: set[str]) -> None:
    if state.cls.__name__ in done:
        return
    done.add(state.cls.__name__)
    assert state.init is not None
    read = attributes_read(state)
    state.weights_only = [
        attr
        for attr in state.attributes
        if attr not in read and _has_weights(state, attr, translator)
    ]
    live = frozenset(f"self.{attr}" for attr in (*read, *state.weights_only))
    if any(map(returns, state.init.body)):
        raise Untranslatable(f"the constructor of {state.cls.__name__}, a loop of which returns")
    body = cleanup.clean(_guarded(deepcopy(state.init.body), state.guards), live)
    by_name = {other.cls.__name__: other for other in translator.states.values()}
    for called in _constructions(body, by_name):
        assert isinstance(called.func, ast.Name)
        child = by_name[called.func.id]
        _prune_class(child, translator, done)
        assert child.init is not None
        called.keywords = [item for item in called.keywords if item.arg in child.init.parameters]
    body = cleanup.clean(body, live)
    body = _inline_attributes(body, live)
    body = [_tidy_comprehensions(statement) for statement in cleanup.clean(body, live)]
    state.init.body = body
    arguments = state.init.node.args
    named = [item.arg for item in (*arguments.args, *arguments.kwonlyargs)][1:]
    facts = translator.argument_facts.get(("init", state.cls.__qualname__), {})
    taken = (*named, *(facts if arguments.kwarg is not None else ()))
    names = [*spread({key: facts.get(key, NONE) for key in taken})]
    free = cleanup.free_names([*body, *_tests(state.guards)], live)
    own = translator.findings.recognised.get(state.cls.__name__)
    if state.inherits_init:
        state.init.parameters = [key for key in names if key not in ("device", "dtype")]
        return
    state.init.parameters = (
        ["config"] if own is not None and own.own_init else [key for key in names if key in free]
    )


def _guarded(body: list[ast.stmt], guards: Iterable[ast.expr]) -> list[ast.stmt]:
    """Return statements with the side alone that guards leave of a condition."""
    held = {_plain_test(guard) for guard in guards}
    out: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.If(test=test, body=side) if _plain_test(test) in held:
                out += _guarded(side, guards)
            case ast.If(test=test, orelse=side) if _plain_test(cleanup.negated(test)) in held:
                out += _guarded(side, guards)
            case _:
                out.append(statement)
    return out


def _plain_test(test: ast.expr) -> str:
    """Return a condition's text, the same for the config and for an attribute that holds it."""
    return ast.unparse(
        ReplaceAttribute("config", ast.Name("config", ast.Load())).visit(deepcopy(test))
    )


def _has_weights(state: ClassState, attr: str, translator: Translator) -> bool:
    """Whether an attribute is a weight of checkpoints, or a module with parameters that the
    generated file can make.
    """
    if is_eager(state, attr, translator):
        return False
    value = state.attributes[attr]
    made = {way.cls for way in ways_of(value)}
    known = bool(made) and all(
        cls in translator.states or cls.__module__.startswith("torch.") for cls in made
    )
    if any(_in_checkpoints(module, attr) for module in translator.modules_of(state.cls)):
        return True
    return known and has_parameters(state, attr, translator)


def _in_checkpoints(module: nn.Module, attr: str) -> bool:
    """Whether an attribute is a parameter, or a buffer that checkpoints have."""
    kept = attr in module._buffers and attr not in module._non_persistent_buffers_set
    return kept or isinstance(getattr(module, attr, None), nn.Parameter)


def _tests(guards: Iterable[ast.expr]) -> list[ast.stmt]:
    return [ast.Expr(guard) for guard in guards]


def _constructions(body: list[ast.stmt], classes: dict[str, ClassState]) -> list[ast.Call]:
    calls = [
        node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)
    ]
    return [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in classes]


def _inline_attributes(body: list[ast.stmt], live: frozenset[str]) -> list[ast.stmt]:
    """Replace attributes that only `__init__` reads: simple ones by their value, others by a local
    variable.
    """
    writes: dict[str, list[ast.Assign]] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                for place in cleanup.places_written(node.targets[0]):
                    writes.setdefault(place, []).append(node)
    for place, nodes in writes.items():
        if not place.startswith("self.") or place in live:
            continue
        single = len(nodes) == 1 and nodes[0] in body
        if single and _is_simple(nodes[0].value):
            body = _replaced(body, place, nodes[0].value)
        else:
            body = _replaced(body, place, ast.Name(place.removeprefix("self."), ast.Load()))
    return body


def _is_simple(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return _is_simple(node.value) and not (
            isinstance(node.value, ast.Name) and node.value.id == "self"
        )
    return isinstance(node, ast.Name | ast.Constant)


def _replaced(body: list[ast.stmt], place: str, value: ast.expr) -> list[ast.stmt]:
    attr = place.removeprefix("self.")
    return [ReplaceAttribute(attr, value).visit(statement) for statement in body]


class ReplaceAttribute(ast.NodeTransformer):
    """Replace `self.<attr>` by an expression; assignments to it become assignments to that name."""

    def __init__(self, attr: str, value: ast.expr) -> None:
        self.attr, self.value = attr, value

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace the attribute."""
        self.generic_visit(node)
        if not (
            isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr == self.attr
        ):
            return node
        if isinstance(node.ctx, ast.Store):
            return ast.Name(self.attr, ast.Store())
        return deepcopy(self.value)


def _tidy_comprehensions(statement: ast.stmt) -> ast.stmt:
    """Call a comprehension's variable `_` when its element does not read it."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.ListComp | ast.GeneratorExp):
            continue
        target = node.generators[0].target
        if isinstance(target, ast.Name) and target.id not in set(cleanup.places_read(node.elt)):
            node.generators[0].target = ast.Name("_", ast.Store())
    return statement
