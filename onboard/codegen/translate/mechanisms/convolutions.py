"""Convolutions along the sequence that look at no later token: `conv(x)[..., :length]` of a padded
`nn.Conv1d`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import CHANNELS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.trees.syntax import attribute, constant, op
from onboard.codegen.translate.language.values import Code, Value
from onboard.codegen.translate.mechanisms.recurrent import argument


@dataclass(frozen=True, eq=False)
class Convolved(Code):
    """`module(source)`, [batch, channels, sequence and what padding added behind it]."""

    module: ast.expr = constant(None)
    source: Value | None = None


def convolved(module: Instance, called: Code, args: Args) -> Code:
    """Return the result of calling an `nn.Conv1d`."""
    source = args.positional[0] if len(args.positional) == 1 else None
    return Convolved(called.expr, form=CHANNELS, module=module.expr, source=source)


def padded(module: Instance, args: Args, frame: Frame) -> Code:
    """Return the result of calling an `nn.ZeroPad2d`: what shifts tokens by one is the canonical
    op.
    """
    made = _modules(module.expr, frame)
    if made and all(getattr(item, "padding", None) == (0, 0, 1, -1) for item in made):
        return Code(ast.Call(op("torch_token_shift"), [args.positional[0].code()], []))
    return plain_call(module.expr, args)


def cut(owner: Convolved, index: ast.expr, frame: Frame) -> Code | None:
    """Return the canonical form of a convolution that is cut to the length of the text; None for
    another index.
    """
    match index:
        case ast.Tuple(elts=[*_, ast.Slice(lower=None, upper=ast.expr(), step=None)]) if (
            owner.source is not None
        ):
            pass
        case _:
            return None
    modules = _modules(owner.module, frame)
    if not modules or not all(map(_is_causal, modules)):
        return None
    weights = [attribute(owner.module, key) for key in ("weight", "bias")]
    dilation = ast.Subscript(attribute(owner.module, "dilation"), constant(0), ast.Load())
    spread = ast.keyword("dilation", dilation)
    called = ast.Call(op("torch_causal_conv1d"), [argument(owner.source, True), *weights], [spread])
    return Code(called, transposed=True)


def _modules(path: ast.expr, frame: Frame) -> list[nn.Module]:
    """Return what `self.x` is in the small model."""
    match path:
        case ast.Attribute(value=ast.Name(id="self"), attr=attr) if frame.cls is not None:
            return [getattr(module, attr) for module in frame.translator.modules_of(frame.cls.cls)]
    return []


def _is_causal(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d) or module.padding_mode != "zeros":
        return False
    return module.stride == (1,) and module.padding == (
        module.dilation[0] * (module.kernel_size[0] - 1),
    )


class CausalConvolutions(Mechanism):
    """Convolutions that look at no later token."""

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Modules that convolve, or shift tokens."""
        if not isinstance(callee, Instance):
            return None
        if set(callee.classes) == {nn.ZeroPad2d}:
            return padded(callee, args, frame)
        return (
            convolved(callee, plain_call(callee.expr, args), args)
            if set(callee.classes) == {nn.Conv1d}
            else None
        )

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """What is left of the result for the text."""
        return cut(owner, node.slice, frame) if isinstance(owner, Convolved) else None
