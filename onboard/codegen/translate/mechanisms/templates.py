"""Blocks that are generated from a template instead of being translated: norms, rotary embeddings,
experts.
"""

from __future__ import annotations

import ast

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.language.findings import Recognised
from onboard.codegen.translate.language.forms import COMPLEX
from onboard.codegen.translate.language.frame import Frame, Mechanism, Program
from onboard.codegen.translate.language.holes import Hole
from onboard.codegen.translate.language.state import ClassState, Routine
from onboard.codegen.translate.language.values import Value
from onboard.codegen.translate.mechanisms import experts
from onboard.codegen.translate.mechanisms.attention import chosen, compressed
from onboard.render import render


def forward(recognised: Recognised, node: ast.FunctionDef, source: ModuleSource) -> Routine:
    """Return the forward of a recognised block from its template; a rotary class is rendered
    later.
    """
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
    return Hole(
        0, like=chosen.Chosen(ast.Constant(None)) if recognised.kind == chosen.KIND else None
    ), 1


class Templates(Mechanism):
    """Blocks that are generated from templates."""

    def forward(self, cls: ClassState, node: ast.FunctionDef, frame: Frame) -> Routine | None:
        """The forward of such a block."""
        found = frame.translator.findings.recognised.get(cls.cls.__name__)
        return None if found is None else forward(found, node, frame.source)

    def init_body(
        self, cls: ClassState, body: list[ast.stmt], program: Program
    ) -> list[ast.stmt] | None:
        """The constructor of experts."""
        return experts.init_body(body, cls.cls.__name__, program.findings.recognised)
