"""Translated classes before their constructors are pruned: what a careful person would not have
written goes.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from onboard.analysis.source import class_node
from onboard.codegen.tidy.conditions import with_chosen_ops
from onboard.codegen.tidy.initial_values import (
    without_gpus,
    without_half_dtypes,
    without_initial_values,
)
from onboard.codegen.tidy.inlined import inline_methods
from onboard.codegen.tidy.none_tests import is_never_none, values_for_none, without_none_tests
from onboard.codegen.tidy.rotations import with_paired_rotations, with_whole_heads
from onboard.codegen.tidy.rows_in_place import with_rows_looked_up
from onboard.codegen.tidy.unread_results import drop_unread_results
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees import cleanup
from onboard.codegen.translate.language.trees.enumerations import MembersAsValues
from onboard.codegen.translate.output.hoisted import hoist
from onboard.hf.half_parameters import takes_models_dtype


def tidy(translator: Translator) -> None:
    """Leave out of a model's classes what nothing reads, what never happens, and what only training
    needs.
    """
    states = list(translator.states.values())
    _use_values(states, translator)
    drop_unread_results(states, list(translator.functions.values()))
    inline_methods(states)
    for state in states:
        _use_ops(state, translator)
    _drop_uncalled(translator)
    hoist(translator)
    calls = _made(states)
    for state in states:
        assert state.init is not None
        _pass_values(values_for_none(state.init.body), calls[state.cls.__name__])
    for state in states:
        assert state.init is not None
        names = [
            item.arg for item in (*state.init.node.args.args, *state.init.node.args.kwonlyargs)
        ]
        given = {key for key in names if _is_given(key, calls[state.cls.__name__], translator)}
        state.init.body = without_initial_values(without_none_tests(state.init.body, given))
        if translator.specialised:
            state.init.body = _anywhere(state.init.body, state.cls)


def _use_values(states: Sequence[ClassState], translator: Translator) -> None:
    """Write the values of members of the repository's enumerations for these."""
    plain = MembersAsValues({key: obj for key, (obj, _) in translator.globals.items()})
    for state in states:
        assert state.init is not None
        state.guards = [plain.visit(item) for item in state.guards]
        for routine in (state.init, *state.methods.values()):
            routine.body = [plain.visit(item) for item in routine.body]


def _anywhere(init: Sequence[ast.stmt], cls: type) -> list[ast.stmt]:
    """Return the statements of a constructor of the repository's, which say neither a GPU nor a
    dtype that no code minds.
    """
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    minds_none = any(takes_models_dtype(class_node(each)) for each in own)
    body = without_gpus(init)
    return without_half_dtypes(body) if minds_none else body


def _use_ops(state: ClassState, translator: Translator) -> None:
    """Have a class's methods turn queries and keys by ops, where functions of the file did, and
    look rows up; leave out what was there for these.
    """
    singles = translator.findings.single_ropes
    tables = {attr for attr in state.attributes if _is_table(attr, state, translator)}
    for routine in state.methods.values():
        body = with_rows_looked_up(with_paired_rotations(routine.body, singles), tables)
        if list(map(ast.dump, body)) != list(map(ast.dump, routine.body)):
            routine.body = cleanup.clean(with_chosen_ops(with_whole_heads(body)))


def _is_table(attr: str, state: ClassState, translator: Translator) -> bool:
    """Whether an attribute is a tensor of two dimensions in each of the small model's modules."""
    found = [getattr(module, attr, None) for module in translator.modules_of(state.cls)]
    return bool(found) and all(isinstance(x, torch.Tensor) and x.dim() == 2 for x in found)


def _drop_uncalled(translator: Translator) -> None:
    """Leave out the functions that nothing calls any more, and methods of repositories' code."""
    while translator.specialised and _drop_methods(translator):
        continue
    functions = translator.functions
    bodies = [
        statement
        for state in translator.states.values()
        for routine in (state.init, *state.methods.values())
        if routine is not None
        for statement in routine.body
    ]
    called: set[str] = set()
    fresh = _names(bodies) & functions.keys()
    while fresh:
        called |= fresh
        fresh = _names([item for key in fresh for item in functions[key].body])
        fresh = (fresh & functions.keys()) - called
    for key in functions.keys() - called:
        del functions[key]


def _drop_methods(translator: Translator) -> bool:
    """Leave out the methods that no code names any more; whether there were any."""
    states = list(translator.states.values())
    routines = [r for state in states for r in (state.init, *state.methods.values()) if r]
    named = {
        node.attr
        for routine in (*routines, *translator.functions.values())
        for statement in routine.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
    }
    idle = [(each, key) for each in states for key in each.methods.keys() - named - {"forward"}]
    for state, key in idle:
        del state.methods[key]
    return bool(idle)


def _names(body: Sequence[ast.stmt]) -> set[str]:
    return {node.id for item in body for node in ast.walk(item) if isinstance(node, ast.Name)}


def _made(states: Sequence[ClassState]) -> dict[str, list[tuple[ClassState, ast.Call]]]:
    """Return the constructor calls of each class, with the classes that make them."""
    calls: dict[str, list[tuple[ClassState, ast.Call]]] = {
        state.cls.__name__: [] for state in states
    }
    for state in states:
        assert state.init is not None
        for node in (node for statement in state.init.body for node in ast.walk(statement)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in calls
            ):
                calls[node.func.id].append((state, node))
    return calls


def _pass_values(
    values: Mapping[str, ast.expr], calls: Sequence[tuple[ClassState, ast.Call]]
) -> None:
    """Pass to constructors what they would take for a missing argument, if the config is the same
    there.
    """
    for _, node in calls:
        given = {item.arg: item.value for item in node.keywords}
        if ast.unparse(given.get("config", ast.Constant(None))) != "config":
            continue
        for key, value in values.items():
            if ast.unparse(given.get(key, ast.Constant(None))) == "None":
                node.keywords = [item for item in node.keywords if item.arg != key]
                node.keywords.append(ast.keyword(key, deepcopy(value)))


def _is_given(
    parameter: str, calls: Sequence[tuple[ClassState, ast.Call]], translator: Translator
) -> bool:
    """Whether every call of a constructor passes an argument that is never None."""
    passed = [
        (state, item.value)
        for state, node in calls
        for item in node.keywords
        if item.arg == parameter
    ]
    known = [
        is_never_none(value, partial(_is_set, config_of(translator, state.cls)))
        for state, value in passed
    ]
    return bool(calls) and len(passed) == len(calls) and all(known)


def _is_set(config: Any, field: str) -> bool:
    """Whether a config's class refuses None for a field."""
    try:
        type(config)()
    except Exception:  # whatever it refuses, it may refuse for another reason
        return False
    try:
        type(config)(**{field: None})
    except Exception:
        return True
    return False


def config_of(translator: Translator, cls: type) -> Any:
    """Return the tiny config with which a class is made."""
    facts = translator.argument_facts["init", cls.__qualname__].values()
    return next((fact.obj for fact in facts if isinstance(fact, Config)), translator.config)
