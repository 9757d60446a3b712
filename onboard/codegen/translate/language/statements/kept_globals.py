"""Names of a module that its functions assign: tables that one call leaves for the next."""

from __future__ import annotations

import ast

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name


def first_values(node: ast.Global, source: ModuleSource) -> list[ast.Assign]:
    """Return the assignments of what the names of `global a, b` hold before the first call, as
    generated code has it at each call: what one call leaves there, the next one would make again.

    Raises:
        Untranslatable: the module makes one of them with code, or leaves something there.
    """
    return [
        ast.copy_location(ast.Assign([name(key, store=True)], value), node)
        for key in node.names
        for value in [_nothing_yet(key, node, source)]
    ]


def _nothing_yet(key: str, node: ast.Global, source: ModuleSource) -> ast.expr:
    made = [
        item.value
        for item in source.tree.body
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
        if isinstance(target, ast.Name) and target.id == key
    ]
    match made:
        case [ast.Constant(value=None) as nothing]:
            return nothing
    raise Untranslatable(f"the global {key}, assigned at {source.location(node)}")
