"""Blocks that are generated from a template instead of being translated: norms, rotary embeddings, experts."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate import chosen, compressed, experts
from onboard.codegen.translate.forms import COMPLEX
from onboard.codegen.translate.holes import Hole
from onboard.codegen.translate.values import Value
from onboard.render import render

if TYPE_CHECKING:
    from onboard.codegen.translate.state import Routine

NORMS = ("rmsnorm", "layernorm", "l2norm")


@dataclass(frozen=True)
class Recognised:
    """How a class is generated: the kind of its block and the parameters of the kind's template."""

    kind: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def own_init(self) -> bool:
        """Whether the template writes `__init__`, too."""
        return self.kind == "rotary"

    @property
    def last_dimension_only(self) -> bool:
        """Whether the block treats all dimensions but the last alike, so that swapping these does not matter."""
        return self.kind in NORMS and not self.parameters.get("per_head")


def forward(recognised: Recognised, node: ast.FunctionDef, source: ModuleSource) -> Routine:
    """Return the forward of a recognised block from its template; a rotary class is rendered later."""
    from onboard.codegen.translate.state import Routine

    inputs = [item.arg for item in node.args.args[1:]]
    if recognised.kind == "rotary":
        form = COMPLEX if recognised.parameters["style"] == COMPLEX else None
        return Routine(node, source, inputs, [], Hole(0, form), 1)
    shape, holes = _shape(recognised)
    if recognised.kind in compressed.KINDS:
        inputs = compressed.inputs(recognised.parameters, inputs)
    elif recognised.kind == chosen.KIND:
        inputs = [recognised.parameters["x"], recognised.parameters["tables"]]
    elif recognised.kind == experts.KIND:
        inputs = experts.inputs(recognised.parameters, inputs)
    else:
        inputs = inputs[:2] if recognised.kind == "gated_rmsnorm" else inputs[:1]
    fields = {"x": inputs[0], "gate": inputs[-1], **recognised.parameters}
    text = render(f"model/{recognised.kind}.py.j2", **fields)
    body = ast.parse(text).body
    for statement in body:
        statement.lineno = 0
    return Routine(node, source, inputs, body, shape, holes)


def _shape(recognised: Recognised) -> tuple[Value, int]:
    """Return what a template's forward gives, and of how many parts."""
    if recognised.kind == compressed.COMPRESSOR:
        return compressed.shape(recognised.parameters), 2
    return Hole(0, like=chosen.Chosen(ast.Constant(None)) if recognised.kind == chosen.KIND else None), 1
