"""Stretches of statements that the analysis found to be a canonical op: a scan, written out chunk by
chunk.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from onboard.analysis.recognise.scans.chunked_scans import bounds_of, stretch_forms
from onboard.analysis.recognise.scans.watch import stretches_of
from onboard.analysis.spec_blocks import LoopParameters
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import Untranslatable, stored_names
from onboard.codegen.translate.language.values import NONE, Code
from onboard.codegen.translate.mechanisms.recurrent import substituted

_CHUNK = 256
"""Tokens of a chunk where the code has none in an attribute: they change rounding, nothing else."""


class WrittenScans(Mechanism):
    """Scans that methods write out."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """The op in a stretch's place; what else the stretch leaves is for caches."""
        found = _found(statements, frame)
        if found is None:
            return None
        stretch, parameters = found
        code = {
            key: frame.code(frame.reading(ast.unparse(node)))
            for key, node in _read(stretch, parameters).items()
        }
        made = Code(substituted(stretch_forms()[parameters.op], code))
        frame.env.values.update(dict.fromkeys(map(frame.name_of, stored_names(stretch)), NONE))
        frame.bind(frame.name_of(parameters.result), made, stretch[-1])
        return statements[len(stretch) :]


def _found(
    statements: Sequence[ast.stmt], frame: Frame
) -> tuple[Sequence[ast.stmt], LoopParameters] | None:
    """Return the stretch with which statements begin, and what the analysis found of it."""
    if frame.cls is None or not statements:
        return None
    for found in frame.translator.findings.loops.get(frame.cls.cls.__name__, []):
        places = stretches_of(frame.cls.cls, found.method)
        if found.op in stretch_forms() and found.index < len(places):
            stretch = places[found.index]
            if stretch[0].lineno == statements[0].lineno:
                return stretch, found
    return None


def _read(stretch: Sequence[ast.stmt], found: LoopParameters) -> dict[str, ast.expr]:
    """Return what the op takes, by name, as expressions of the method."""
    bounds = bounds_of(stretch)
    if bounds is None:
        raise Untranslatable("a scan whose steps are bounded several times")
    names = ("x", "A", "B", "C", "D", "dt", "dt_bias", "groups")
    texts = dict(zip(names, found.arguments, strict=False))
    nodes = {key: ast.parse(text, mode="eval").body for key, text in texts.items()}
    return {
        "groups": ast.Constant(1),
        **nodes,
        "least": bounds[0],
        "most": bounds[1],
        "chunk_size": _chunk_size(stretch),
    }


def _chunk_size(stretch: Sequence[ast.stmt]) -> ast.expr:
    read = (node for statement in stretch for node in ast.walk(statement))
    sizes = (node for node in read if isinstance(node, ast.Attribute) and "chunk" in node.attr)
    return next(sizes, ast.Constant(_CHUNK))
