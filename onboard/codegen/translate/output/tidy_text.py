"""Statements of translated code as text, by the passes over how code reads."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence

from onboard.analysis.source import ModuleSource
from onboard.codegen.tidy.conditions import flat, with_chosen_ops, with_known_ranks
from onboard.codegen.tidy.inlined_reshapes import folded, with_methods, with_short_arguments
from onboard.codegen.tidy.named_sizes import with_named_arguments, with_names
from onboard.codegen.tidy.op_calls import by_keyword
from onboard.codegen.tidy.reshapes import with_short_shapes
from onboard.codegen.tidy.rotations import with_whole_heads
from onboard.codegen.tidy.rows_in_place import with_rows_in_place
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.output.printer import print_block


def tidy_text(
    body: Sequence[ast.stmt],
    source: ModuleSource,
    constructors: Mapping[str, Sequence[str]] | None = None,
    norms: Collection[str] = (),
) -> str:
    """Return statements as text.

    `constructors`: the parameters of those that they may call; `norms`: attributes that hold norms.
    """
    whole = with_chosen_ops(with_whole_heads(with_known_ranks(flat(by_keyword(body)))))
    short = with_rows_in_place(folded(with_methods(with_short_shapes(whole))), norms)
    named = with_short_arguments(with_names(short))
    return print_block(
        named if constructors is None else with_named_arguments(named, constructors), source
    )


def norms_of(state: ClassState, translator: Translator) -> set[str]:
    """Return the attributes of a class that hold norms of the last dimension."""
    norms = {
        key
        for key, found in translator.findings.recognised.items()
        if found.last_dimension_only or found.kind == "gated_rmsnorm"
    }
    return {
        attr
        for attr, value in state.attributes.items()
        if isinstance(value, Instance) and {cls.__name__ for cls in value.classes} <= norms
    }
