"""Linear layers that a forward moves to another dtype for good (`self.gate = self.gate.float()`):
written as what they compute, with weights that are cast where they are read.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torch import nn

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name
from onboard.codegen.translate.language.values import Code, Value


@dataclass(frozen=True, eq=False)
class CastLinear(Code):
    """`self.layer.float()` of a linear layer, which has these parameters."""

    held: tuple[str, ...] = ()


class CastLayers(Mechanism):
    """`self.layer.float()` in a forward, and calls of it."""

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """The layer, cast."""
        if attr != "float" or frame.kind == "init" or args.positional or args.keywords:
            return None
        if type(owner) is not Code and not isinstance(owner, Instance):
            return None
        held = _held(owner.expr, frame)
        return CastLinear(call(attribute(owner.expr, attr)), held=held) if held else None

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """What it computes."""
        if not isinstance(callee, CastLinear):
            return None
        if len(args.positional) != 1 or args.keywords or args.stars:
            raise Untranslatable("a linear layer in float32 that is given more than one tensor")
        assert isinstance(callee.expr, ast.Call)
        assert isinstance(callee.expr.func, ast.Attribute)
        layer = callee.expr.func.value
        cast = [call(attribute(attribute(layer, part), "float")) for part in callee.held]
        function = attribute(name("torch"), "nn", "functional", "linear")
        return Code(call(function, args.positional[0].code(), *cast))


def _held(path: ast.expr, frame: Frame) -> tuple[str, ...]:
    """Return the parameters of what lies at `self.path`, where that is a linear layer in all modules
    of the class; none where it is anything else.
    """
    owner, _, rest = ast.unparse(path).partition(".")
    if owner != "self" or not rest.isidentifier() or frame.cls is None:
        return ()
    layers = [getattr(each, rest, None) for each in frame.translator.modules_of(frame.cls.cls)]
    found = {tuple(key for key, _ in x.named_parameters()) for x in layers if type(x) is nn.Linear}
    return found.pop() if len(found) == 1 and all(type(x) is nn.Linear for x in layers) else ()
