"""What a layer does where it gets a mask: those with attention get one, others None."""

from __future__ import annotations

import ast

from onboard.analysis.behaviour.lines_run import lines_run
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import LayerMask


class LayerMasks(Mechanism):
    """`if mask is not None: ...` of a mask that some layers get: the small model of this config
    tells which layers do.
    """

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """Whether the small model, whose attention gets its masks, came to the body."""
        read = {item.id for item in ast.walk(node.test) if isinstance(item, ast.Name)}
        if not any(isinstance(frame.env.values.get(key), LayerMask) for key in read):
            return None
        asked = [item for item in ast.walk(node.test) if isinstance(item, ast.Is | ast.IsNot)]
        if not asked:
            return None
        program = frame.translator
        counts, path = lines_run(program.model, program.config), str(frame.source.path)
        body, *orelse = [counts[path, side[0].lineno] for side in (node.body, node.orelse) if side]
        if not counts[path, node.test.lineno] or (orelse and bool(body) == bool(orelse[0])):
            return None  # another class has the attention that it takes
        return bool(body)
