"""Functions of the file that a caller hides: it has a value of the same name, as where the repository
imports the function under another name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.state import Routine
from onboard.codegen.translate.language.trees.syntax import stored_names


def rename_hidden(translator: Translator, routines: list[Routine]) -> None:
    """Give functions that a caller hides another name, in all that calls them."""
    functions = translator.functions
    bound = [_bound(routine) for routine in routines]
    hidden = {
        call.func.id
        for routine, names in zip(routines, bound, strict=True)
        for call in _calls(routine)
        if isinstance(call.func, ast.Name) and call.func.id in names & functions.keys()
    }
    taken = set().union(functions, *bound)
    new = {key: _free(key, taken) for key in hidden}
    for call in (call for routine in routines for call in _calls(routine)):
        if isinstance(call.func, ast.Name):
            call.func.id = new.get(call.func.id, call.func.id)
    translator.functions = {new.get(key, key): routine for key, routine in functions.items()}


def _bound(routine: Routine) -> set[str]:
    """Return the names that a routine gives to values: its arguments and what it assigns to."""
    arguments = (node.arg for node in ast.walk(routine.node.args) if isinstance(node, ast.arg))
    return {*arguments, *stored_names(routine.body)}


def _calls(routine: Routine) -> Iterator[ast.Call]:
    for statement in routine.body:
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Call))


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_of"
    taken.add(name)
    return name
