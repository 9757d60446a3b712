"""A model's layers, those that are alike together: what the modeling code has, what the generated
file has, and how far they are apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onboard.analysis.spec import LayerKind, ModelSpec
from onboard.analysis.spec_blocks import Block
from onboard.explain.read_bytes import ReadWeights
from onboard.workflow.checkpoint.checkpoint_size import layer_kinds, native_values
from onboard.workflow.reporting.layer_picture import layer_parts
from onboard.workflow.reporting.report_view import ranges
from onboard.workflow.reporting.source_places import class_lines, source_place


def layers(
    spec: ModelSpec, model_text: str, tests: Mapping[str, Any], read: ReadWeights | None
) -> list[dict[str, Any]]:
    """Return the kinds of layers in the order of their first ones.

    Args:
        spec: the model's.
        model_text: the generated model file's.
        tests: the record of the test phase, for errors.
        read: what weights a token reads; None: not known.
    """
    parts = _Parts(spec, class_lines(model_text), _errors(tests), read)
    return [parts.layer(kind) for kind in layer_kinds(spec)]


def outside(spec: ModelSpec, model_text: str, tests: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the model has besides its layers: classes of the spec that no layer has a module
    of.
    """
    parts = _Parts(spec, class_lines(model_text), _errors(tests), None)
    inside = {name for kind in spec.layer_kinds for name in kind.modules.values()}
    return [
        parts.row(block.path or block.class_name, block.class_name, _tested_as(block))
        for block in spec.blocks
        if block.class_name not in inside and not _is_layer(spec, block)
    ]


def _errors(tests: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the tests on a CPU by the module path of what they compare; the whole model's by
    `_WHOLE`.
    """
    rows = [row for row in tests.get("tests", []) if row["device"] == "cpu"]
    named = {_WHOLE if row["level"] == "model" else row["block"]: row for row in rows}
    return {name: row for name, row in named.items() if name}


_WHOLE = "the whole model"


def _is_layer(spec: ModelSpec, block: Block) -> bool:
    paths = {kind.path for kind in spec.layer_kinds}
    return block.kind == "decoder_layer" or (block.path != "" and block.path in paths)


def _kind(block: Block) -> str:
    return "translated as it is written" if block.kind == "other" else block.kind.replace("_", " ")


def _tested_as(block: Block) -> str:
    return block.path or (_WHOLE if block.kind == "causal_lm" else "")


class _Parts:
    """Makes rows of what is known of a class."""

    def __init__(
        self,
        spec: ModelSpec,
        lines: Mapping[str, tuple[int, int]],
        errors: Mapping[str, Mapping[str, Any]],
        read: ReadWeights | None,
    ) -> None:
        self.spec, self.lines, self.errors, self.read = spec, lines, errors, read
        self.blocks = {block.class_name: block for block in spec.blocks}

    def layer(self, kind: LayerKind) -> dict[str, Any]:
        """Return a kind of layer with its parts."""
        words = {
            part.title: str(part)
            for part in layer_parts(self.spec, kind, native_values(self.spec.config))
        }
        first = kind.layers[0] if kind.layers else 0
        of_layer = next(
            (block.class_name for block in self.spec.blocks if _is_layer(self.spec, block)), ""
        )
        rows = [self.row("layer", of_layer, kind.path)] if of_layer else []
        for name, class_name in kind.modules.items():
            row = self.row(name, class_name, f"{kind.path}.{name}")
            row["title"] = words.get(name, row["title"])
            row["bytes"] = self._bytes(kind, first, name)
            rows.append(row)
        return {
            "name": kind.name,
            "layers": ranges(kind.layers),
            "count": len(kind.layers),
            "bytes": self._bytes(kind, first, ""),
            "parts": rows,
        }

    def row(self, name: str, class_name: str, path: str) -> dict[str, Any]:
        """Return what is known of a module."""
        block, test = self.blocks.get(class_name), self.errors.get(path, {})
        first, last = self.lines.get(class_name, (None, None))
        return {
            "name": name,
            "title": f"{name} ({_kind(block)})" if block else name,
            "class": class_name,
            "theirs": source_place(self.spec, block.source) if block else None,
            "ours": [first, last] if first else None,
            "error": test.get("error"),
            "limit": test.get("tolerance"),
            "bytes": None,
        }

    def _bytes(self, kind: LayerKind, layer: int, part: str) -> int | None:
        return round(self.read.of_layer(kind, layer, part)) if self.read is not None else None
