"""Assignments to attributes of the config."""

from __future__ import annotations

import ast

from onboard.analysis.source import find_method, module_source, sources_of
from onboard.codegen.translate.language.expressions import objects
from onboard.codegen.translate.language.expressions.decisions import decided_by_part, decided_here
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import (
    Config,
    Instance,
    ModuleList,
)
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import NONE, Code, Known, Value

_FUNCTIONS = ("eager", "sdpa", "flash_attention_2")
"""Names of functions that compute the same attention."""
_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")
"""What says what forwards give beside what they compute, which constructors may turn on."""


def states_a_fact(owner: ast.expr, attr: str, value: Value, frame: Frame) -> bool:
    """Whether `config.attr = value` says what every generated model takes for granted, or, in a
    constructor, which function of transformers computes its attention.
    """
    fact = objects.CONFIG_FACTS.get(attr)
    usual: tuple[str, ...] = ()
    if attr == "_attn_implementation":
        fact = frame.translator.implementation
        usual = _FUNCTIONS if frame.kind == "init" and frame.translator.specialised else ()
    return (
        isinstance(frame.evaluate(owner), Config)
        and isinstance(value, Known)
        and (value.value is fact or isinstance(fact, str) and value.value in (fact, *usual))
    )


def is_copied_config(variable: str, frame: Frame) -> bool:
    """Whether a variable holds a copy of the config, which code may change."""
    known = frame.env.values.get(variable)
    return isinstance(known, Config) and known.copy is not None


def is_own_config(owner: ast.expr, frame: Frame) -> bool:
    """Whether a constructor assigns to an attribute of the config that the model is made with."""
    config = frame.evaluate(owner) if frame.kind == "init" else NONE
    return (
        isinstance(config, Config) and config.copy is None and config.obj is frame.translator.config
    )


def change_for_all(owner: ast.expr, attr: str, value: Value, frame: Frame) -> None:
    """Note what the model's constructor makes of the config before it makes anything of it, or what
    any constructor puts there that the config has not; the generated file's config stays as it is.
    """
    program = frame.translator
    value = _decided(attr, value, frame)
    if _is_what_code_takes(attr, value, frame):
        return
    own = frame.cls is not None and frame.cls.cls is type(program.model)
    made = any(
        isinstance(each, Instance | ModuleList) and key.startswith("self.")
        for key, each in frame.env.values.items()
    )
    changes = getattr(program.config, attr, value) != getattr(value, "value", value)
    if isinstance(value, Known) and not changes and (made or not own):
        test = ast.Compare(attribute(frame.code(owner), attr), [ast.Eq()], [value.code()])
        program.guard(test, frame)
        return
    if value.is_static and _is_read_here_alone(attr, frame):
        frame.env.values[f"{ast.unparse(frame.code(owner))}.{attr}"] = value
        return
    always = not frame.branches and not frame.loops and attr in _RECORDED
    for_all = own and not made or always or _is_new(attr, frame) or _is_of_one_class(attr, frame)
    if not isinstance(value, Known) or not for_all:
        raise Untranslatable(f"an assignment to config.{attr} once modules are made of the config")
    if (known := program.changed.setdefault(attr, value)) is not value and not known.equals(value):
        raise Untranslatable(f"config.{attr}, which is changed twice")
    frame.env.values[f"{ast.unparse(frame.code(owner))}.{attr}"] = value


def _decided(attr: str, value: Value, frame: Frame) -> Value:
    """Return a truth value that a constructor puts into the config for each layer, if this config
    has the same for all, guarded, and it is the field's.
    """
    program = frame.translator
    here = getattr(program.config, attr, False)
    if not program.specialised or type(here) is not bool or not isinstance(value, Code):
        return value
    found = decided_by_part(value, frame)
    found = decided_here(value, frame) if found is None else found
    return Known(here) if found is here else value


def _is_what_code_takes(attr: str, value: Value, frame: Frame) -> bool:
    """Whether code asks the config for a field that it has not by `getattr(config, attr, value)` alone."""
    config = frame.translator.config
    if not (isinstance(value, Known) and frame.translator.specialised) or hasattr(config, attr):
        return False
    nodes = [node for file in sources_of(frame.translator.model) for node in ast.walk(file.tree)]
    asked = [node for node in nodes if isinstance(node, ast.Constant) and node.value == attr]
    return 0 < len(asked) == sum(_takes(node, attr, value.value) for node in nodes)


def _takes(node: ast.AST, attr: str, value: object) -> bool:
    match node:
        case ast.Call(
            func=ast.Name(id="getattr"),
            args=[_, ast.Constant(value=found), ast.Constant(value=default)],
        ):
            return found == attr and default is value
    return False


def _is_new(attr: str, frame: Frame) -> bool:
    """Whether a constructor, whatever its config says, gives it a field that it has not and that no
    code asks for by a text: what is made before reads none of that name, for it would fail.
    """
    if frame.branches or frame.loops or not frame.translator.specialised:
        return False
    files = sources_of(frame.translator.model)
    nodes = (node for file in files for node in ast.walk(file.tree))
    asked = any(isinstance(node, ast.Constant) and node.value == attr for node in nodes)
    return not asked and not hasattr(frame.translator.config, attr)


def _is_read_here_alone(attr: str, frame: Frame) -> bool:
    """Whether nothing of the model's files reads a field of a config but the constructor that changes
    it: each of its modules then finds the same, whoever came first.
    """
    found = _constructor(frame)
    return found is not None and not _is_read_outside(found[1], attr, frame)


def _is_of_one_class(attr: str, frame: Frame) -> bool:
    """Whether nothing of the model's files reads a field of a config but the class whose constructor
    changes it, whatever is not of the config: its methods run when that is done.
    """
    found = None if frame.branches or frame.loops else _constructor(frame)
    node = (
        None
        if found is None
        else module_source(found[0].__module__).classes.get(found[0].__qualname__)
    )
    return node is not None and not _is_read_outside(node, attr, frame)


def _constructor(frame: Frame) -> tuple[type, ast.FunctionDef] | None:
    """Return the class and the definition of the constructor of a repository's code that a frame
    runs; None where it runs none.
    """
    if not frame.translator.specialised or frame.owner is None or frame.kind != "init":
        return None
    return find_method(frame.owner, "__init__")


def _is_read_outside(inside: ast.AST, attr: str, frame: Frame) -> bool:
    """Whether code of the model's files beyond a definition of these reads a field of a config."""
    nodes = set(ast.walk(inside))
    files = sources_of(frame.translator.model)
    return any(
        _reads(node, attr) for file in files for node in ast.walk(file.tree) if node not in nodes
    )


def _reads(node: ast.AST, attr: str) -> bool:
    """Whether a node is an attribute of that name, of anything but `self`, or the name as a text."""
    match node:
        case ast.Attribute(value=owner, attr=found):
            return found == attr and ast.unparse(owner) != "self"
        case ast.Constant(value=found):
            return isinstance(found, str) and found == attr
    return False


def change_config(variable: str, attr: str, value: Value, frame: Frame, origin: ast.AST) -> None:
    """Change a copy of the config; the first change is what it is copied for.

    How transformers is to run a part of the model generated code does not ask, where nothing of the
    model does.
    """
    config = frame.env.values[variable]
    assert isinstance(config, Config)
    assert config.copy is not None
    if attr in objects.CONFIG_FACTS and _is_read_here_alone(attr, frame):
        frame.env.values[f"{variable}.{attr}"] = value
        return
    if not (isinstance(config.expr, ast.Name) and config.expr.id == variable):
        frame.emit(ast.Assign([name(variable, store=True)], config.copy), origin)
        frame.env.values[variable] = Config(name(variable), config.obj, config.copy)
    frame.emit(ast.Assign([ast.Attribute(name(variable), attr, ast.Store())], value.code()), origin)
