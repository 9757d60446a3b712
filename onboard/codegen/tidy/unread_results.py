"""Results of a `forward` that no caller reads, a router's logits above all: they are not returned.

That is done where every instance of the class is kept as `self.x` of another class and called there
alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onboard.codegen.translate.language.trees import cleanup

if TYPE_CHECKING:
    from onboard.codegen.translate.language.state import ClassState, Routine

_UNREAD = "_"


def drop_unread_results(states: Sequence[ClassState], functions: Sequence[Routine]) -> None:
    """Have each class's `forward` return what its callers read; callers unpack that."""
    while any([_drop(state, states, functions) for state in states]):
        pass


def _drop(state: ClassState, states: Sequence[ClassState], functions: Sequence[Routine]) -> bool:
    routine = state.methods.get("forward")
    if routine is None or routine.holes < 2 or not (returns := _returns(routine)):
        return False
    calls = _calls(state.cls.__name__, states, functions)
    targets = [_targets(call) for _, call in calls or []]
    if not targets or any(len(each) != routine.holes for each in targets):
        return False
    read = [
        index
        for index in range(routine.holes)
        if any(not _is_unread(each[index]) for each in targets)
    ]
    if not read or len(read) == routine.holes:
        return False
    before = _unused(routine, routine.body)
    kept = [node.value.elts for node in returns if isinstance(node.value, ast.Tuple)]
    for node, items in zip(returns, kept, strict=True):
        node.value = _joined([items[index] for index in read])
    body = cleanup.clean(routine.body)
    if _unused(routine, body) != before:  # a parameter would be left that nothing reads
        for node, items in zip(returns, kept, strict=True):
            node.value = ast.Tuple(items, ast.Load())
        return False
    routine.body, routine.holes = body, len(read)
    for (_, call), items in zip(calls or [], targets, strict=True):
        call.targets = [_joined([items[index] for index in read], ast.Store())]
    for caller in {id(caller): caller for caller, _ in calls or []}.values():
        caller.body = cleanup.clean(caller.body)
    return True


def _joined(items: list[ast.expr], context: ast.expr_context | None = None) -> ast.expr:
    return items[0] if len(items) == 1 else ast.Tuple(items, context or ast.Load())


def _returns(routine: Routine) -> list[ast.Return]:
    """Return the return statements; none where one gives something else than a tuple of the
    results.
    """
    found = [node for node in _walk(routine.body) if isinstance(node, ast.Return)]
    whole = all(
        isinstance(node.value, ast.Tuple) and len(node.value.elts) == routine.holes
        for node in found
    )
    return found if whole else []


def _unused(routine: Routine, body: Sequence[ast.stmt]) -> set[str]:
    return set(routine.parameters) - cleanup.free_names(body)


def _is_unread(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == _UNREAD


def _targets(call: ast.Assign) -> list[ast.expr]:
    """Return what a call's results are assigned to."""
    (target,) = call.targets
    assert isinstance(target, ast.Tuple)
    return target.elts


def _calls(
    name: str, states: Sequence[ClassState], functions: Sequence[Routine]
) -> list[tuple[Routine, ast.Assign]] | None:
    """Return the assignments `a, b = self.x(...)` of all calls of a class's instances; None where
    others may be.
    """
    routines = [*functions, *(routine for state in states for routine in state.methods.values())]
    if any(
        isinstance(node, ast.Name) and node.id == name
        for routine in routines
        for node in _walk(routine.body)
    ):
        return None
    places = _places(name, states)
    found: list[tuple[Routine, ast.Assign]] = []
    for state, attr in places or []:
        for routine in routines:
            own = routine in state.methods.values()
            calls = _unpacked(routine, attr, own)
            if calls is None:
                return None
            found += calls
    return found if places else None


def _places(name: str, states: Sequence[ClassState]) -> list[tuple[ClassState, str]] | None:
    """Return the classes and attributes that hold instances of a class and nothing else; None where
    others may.
    """
    found = []
    for state in states:
        assert state.init is not None
        nodes = list(_walk(state.init.body))
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        made = {
            attr
            for node in assigned
            if _makes(node.value, name) and (attr := _own_attribute(node.targets[0]))
        }
        whole = [node for node in assigned if _own_attribute(node.targets[0]) in made]
        mentions = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
        if len(mentions) != len(whole) or not all(_makes(node.value, name) for node in whole):
            return None
        found += [(state, attr) for attr in sorted(made)]
    return found


def _makes(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _own_attribute(node: ast.expr) -> str:
    """Return x of `self.x`, "" for anything else."""
    own = (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
    return node.attr if own and isinstance(node, ast.Attribute) else ""


def _unpacked(routine: Routine, attr: str, own: bool) -> list[tuple[Routine, ast.Assign]] | None:
    """Return the assignments `a, b = self.<attr>(...)` of a routine; None where it uses the
    attribute in another way.

    `own`: it is a method of the class that has the attribute; another class's `self.<attr>` is
        another one.
    """
    found = []
    for node, call, above in (item for statement in routine.body for item in _inside(statement)):
        if not (isinstance(node, ast.Attribute) and node.attr == attr):
            continue
        if _own_attribute(node) and not own:
            continue
        match above:
            case ast.Assign(targets=[ast.Tuple()]) if _own_attribute(node) and _is_call_of(
                call, node
            ):
                found.append((routine, above))
            case _ if not (isinstance(call, ast.Attribute) and call.attr == "weight"):
                return None
    return found


def _inside(
    node: ast.AST, parent: ast.AST | None = None, above: ast.AST | None = None
) -> Iterator[tuple[ast.AST, ast.AST | None, ast.AST | None]]:
    """Yield each node with its parent and that one's; a node may stand in several places."""
    yield node, parent, above
    for child in ast.iter_child_nodes(node):
        yield from _inside(child, node, parent)


def _is_call_of(call: ast.AST | None, function: ast.expr) -> bool:
    return isinstance(call, ast.Call) and call.func is function


def _walk(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)
