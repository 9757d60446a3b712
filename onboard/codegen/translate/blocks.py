"""Blocks that are generated from a template instead of being translated: norms and rotary embeddings."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onboard.codegen.render import render
from onboard.codegen.translate.values import COMPLEX, Hole

if TYPE_CHECKING:
    from onboard.codegen.translate.classes import Routine

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


def forward(recognised: Recognised, node: ast.FunctionDef) -> Routine:
    """Return the forward of a recognised block; a norm's comes from its template, a rotary class's is rendered later."""
    from onboard.codegen.translate.classes import Routine

    inputs = [item.arg for item in node.args.args[1:]]
    if recognised.kind == "rotary":
        form = COMPLEX if recognised.parameters["style"] == COMPLEX else None
        return Routine(node, inputs, [], Hole(0, form), 1)
    text = render(f"model/{recognised.kind}.py.j2", x=inputs[0], **recognised.parameters)
    return Routine(node, inputs[:1], ast.parse(f"def forward():\n{_indented(text)}").body[0].body, Hole(0), 1)  # type: ignore[attr-defined]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() if line.strip())
