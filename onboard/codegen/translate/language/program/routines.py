"""Translate a function: evaluate its body with what is known of its arguments."""

from __future__ import annotations

import ast

from onboard.codegen.translate.language.frame import Frame, Program
from onboard.codegen.translate.language.handed import changes
from onboard.codegen.translate.language.program.argument_facts import (
    as_parameters,
    rest_parameters,
)
from onboard.codegen.translate.language.program.inline import defaults
from onboard.codegen.translate.language.program.results import (
    finish_routine,
    given_back,
    with_logits_alone,
)
from onboard.codegen.translate.language.state import Routine
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.statements.loops.turns import GOES_ON, RAISES
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Value


def routine_of(
    program: Program, node: ast.FunctionDef, frame: Frame, facts: dict[str, Value]
) -> Routine:
    """Return the translation of a function whose variables before it begins are the frame's."""
    given = as_parameters(facts)
    frame.env.values.update(defaults(node, frame) | given | rest_parameters(node, given))
    changes.hold(given, frame)
    if (ending := execute(node.body, frame)) == RAISES:
        raise Untranslatable(f"{node.name}, which raises")
    if ending == GOES_ON and frame.changed:
        changes.give(NONE, frame, node.body[-1])
    cls = None if frame.cls is None else frame.cls.cls
    if cls is type(program.model) and node.name == "forward":
        frame.returns = [(at, with_logits_alone(value, frame)) for at, value in frame.returns]
    routine = Routine(node, frame.source, argument_facts=facts)
    routine.changes = changes.returned((cls, node.name, node.lineno), given, frame)
    asked = frame.kind == "forward" and node.name != "forward" and not routine.changes
    if asked and (back := given_back(frame)) is not None:
        routine.given = back
        return routine
    finish_routine(routine, frame)
    return routine
