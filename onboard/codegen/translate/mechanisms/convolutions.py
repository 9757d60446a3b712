"""Convolutions along the sequence that look at no later token: `conv(x)[..., :length]` of a padded
`nn.Conv1d`, and `conv(x)[:, :, :length, :]` of an `nn.Conv2d` whose second dimension has size one.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import CHANNELS, SHIFTED
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant, name, op
from onboard.codegen.translate.language.values import Code, Items, Known, Value
from onboard.codegen.translate.mechanisms.layouts.laid import Laid, permuted
from onboard.codegen.translate.mechanisms.recurrent import argument

_SHIFT = (0, 0, 1, -1)
"""What padding puts in front of the sequence and takes away at its end, so that tokens move by one."""
_FLAT = ((0,), (2,), (1,), ())
"""How [batch, sequence, channels] is seen as [batch, channels, sequence, 1]."""


@dataclass(frozen=True, eq=False)
class Convolved(Code):
    """`module(source)`, [batch, channels, sequence and what padding added behind it]."""

    module: ast.expr = constant(None)
    source: Value | None = None


def convolved(module: Instance, called: Code, args: Args) -> Code:
    """Return the result of calling an `nn.Conv1d`, or an `nn.Conv2d`."""
    source = args.positional[0] if len(args.positional) == 1 else None
    return Convolved(called.expr, form=CHANNELS, module=module.expr, source=source)


def _kept(args: Args, frame: Frame) -> Args:
    """Return arguments of which the only one stays what it is where its variable gets the result."""
    if not frame.translator.specialised or len(args.positional) != 1:
        return args
    variable = frame.fresh("convolved")
    frame.bind(variable, args.positional[0])
    return Args([frame.env.values[variable]], {}, [])


def padded(module: Instance, args: Args, frame: Frame) -> Code:
    """Return the result of calling an `nn.ZeroPad2d`: what shifts tokens by one is the canonical
    op.
    """
    made = _modules(module.expr, frame)
    if made and all(getattr(item, "padding", None) == _SHIFT for item in made):
        return _shifted(args.positional[0])
    return plain_call(module.expr, args)


def _shifted(x: Value) -> Code:
    return Code(ast.Call(op("torch_token_shift"), [x.code()], []), form=SHIFTED)


def _sizes(x: Code) -> Items:
    """Return the sizes of [batch, sequence, channels]: code asks how many there are, where steps of
    one token have two.
    """
    shape = attribute(x.code(), "shape")
    places = [ast.Subscript(shape, constant(index), ast.Load()) for index in range(3)]
    return Items(tuple(map(Code, places)))


def cut(owner: Convolved, index: ast.expr, frame: Frame) -> Code | None:
    """Return the canonical form of a convolution that is cut to the length of the text; None for
    another index.
    """
    modules = _modules(owner.module, frame)
    if owner.source is None or not modules or not all(map(_is_causal, modules)):
        return None
    flat = isinstance(modules[0], nn.Conv2d)
    match index, owner.source:
        case ast.Tuple(elts=[_, _, kept]), Laid(dims=((texts, heads), (dim,), (tokens,))) if (
            _is_upper(kept) and all(map(_is_of_each_channel, modules))
        ):
            return _of_all_heads(owner, [texts, tokens, heads, dim], modules[0])
    match index:
        case ast.Tuple(elts=[ast.Slice(), ast.Slice(), kept, ast.Slice(upper=None)]) if flat:
            source, weight = _without_last(owner.source), attribute(owner.module, "weight")
            weight = call(attribute(weight, "squeeze"), constant(-1))
        case ast.Tuple(elts=[*_, kept]) if not flat:
            source, weight = argument(owner.source, True), attribute(owner.module, "weight")
        case _:
            return None
    if not _is_upper(kept):
        return None
    called = _called(owner, source, weight, attribute(owner.module, "bias"))
    if flat:
        return Laid(called, dims=_FLAT, axes=3)
    return Code(called, transposed=True)


def _called(owner: Convolved, source: ast.expr, weight: ast.expr, bias: ast.expr) -> ast.Call:
    dilation = ast.Subscript(attribute(owner.module, "dilation"), constant(0), ast.Load())
    given = [source, weight, bias]
    return ast.Call(op("torch_causal_conv1d"), given, [ast.keyword("dilation", dilation)])


def _is_upper(kept: ast.expr) -> bool:
    """Whether an index is `:length`."""
    return isinstance(kept, ast.Slice) and bool(kept.upper) and not (kept.lower or kept.step)


def _of_all_heads(owner: Convolved, order: list[int], module: nn.Module) -> Code:
    """Return the canonical form of a convolution of each head alone, [texts * heads, size, tokens]: the
    heads of a text are beside one another, and have the weights of one each.
    """
    assert isinstance(owner.source, Laid)
    heads, size = (
        ast.Subscript(attribute(owner.source.expr, "shape"), constant(axis), ast.Load())
        for axis in order[2:]
    )
    beside = call(attribute(permuted(owner.source.expr, order), "flatten"), constant(2))
    weight = call(attribute(attribute(owner.module, "weight"), "repeat"), heads, *[constant(1)] * 2)
    bias: ast.expr = constant(None)
    if module.bias is not None:
        bias = call(attribute(attribute(owner.module, "bias"), "repeat"), heads)
    called = _called(owner, beside, weight, bias)
    apart = call(attribute(called, "unflatten"), constant(2), ast.Tuple([heads, size], ast.Load()))
    return Laid(apart, dims=((0, 2), (3,), (1,)), axes=4)


def _is_of_each_channel(module: nn.Module) -> bool:
    """Whether a convolution makes each channel of itself alone."""
    return isinstance(module, nn.Conv1d) and (
        module.groups == module.in_channels == module.out_channels
    )


def _without_last(source: Value) -> ast.expr:
    """Return [batch, sequence, channels] of what code sees as [batch, channels, sequence, 1]."""
    flat = call(attribute(source.code(), "squeeze"), constant(-1))
    return call(attribute(flat, "transpose"), constant(1), constant(2))


def _modules(path: ast.expr, frame: Frame) -> list[nn.Module]:
    """Return what `self.x` is in the small model, or what `self` is."""
    match path:
        case ast.Attribute(value=ast.Name(id="self"), attr=attr) if frame.cls is not None:
            return [getattr(module, attr) for module in frame.translator.modules_of(frame.cls.cls)]
        case ast.Name(id="self") if frame.cls is not None:
            return list(frame.translator.modules_of(frame.cls.cls))
    return []


def _is_causal(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or module.padding_mode != "zeros":
        return False
    alone = module.kernel_size[1:] in ((), (1,)) and set(module.stride) == {1}
    reach = module.dilation[0] * (module.kernel_size[0] - 1)
    return alone and module.padding in ((reach,), (reach, 0))


class CausalConvolutions(Mechanism):
    """Convolutions that look at no later token."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """`F.pad(x, (0, 0, 1, -1))`, which shifts tokens."""
        match args:
            case Args(positional=[Code(static=False) as x, sizes], keywords={}, stars=[]) if (
                function is nn.functional.pad and frame.translator.specialised
            ):
                items = sizes.items if isinstance(sizes, Items) else ()
                moved = [item.value for item in items if isinstance(item, Known)]
                return _shifted(x) if len(items) == len(moved) and (*moved,) == _SHIFT else None
        return None

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Modules that convolve, or shift tokens."""
        if not isinstance(callee, Instance):
            return None
        if set(callee.classes) == {nn.ZeroPad2d}:
            return padded(callee, args, frame)
        if set(callee.classes) not in ({nn.Conv1d}, {nn.Conv2d}):
            return None
        return convolved(callee, plain_call(callee.expr, args), _kept(args, frame))

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """`self._conv_forward(x, self.weight, self.bias)` of a class that is an `nn.Conv1d` itself."""
        if attr != "_conv_forward" or frame.cls is None or args.keywords or args.stars:
            return None
        given, me = [value.code() for value in args.positional], name("self")
        weights = [ast.unparse(each) for each in given[1:]]
        if not issubclass(frame.cls.cls, nn.Conv1d) or weights != ["self.weight", "self.bias"]:
            return None
        called = ast.Call(attribute(me, attr), given, [])
        source = _kept(Args(args.positional[:1], {}, []), frame).positional[0]
        return Convolved(called, form=CHANNELS, module=me, source=source)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """The sizes of what is shifted."""
        if not isinstance(owner, Code) or owner.form != SHIFTED or attr != "size":
            return None
        return None if args.positional or args.keywords else _sizes(owner)

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """What is left of the result for the text."""
        return cut(owner, node.slice, frame) if isinstance(owner, Convolved) else None


class HeadConvolutions(Mechanism):
    """Convolutions of each head alone, of which code makes texts: they stay seen as heads."""

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """That of batch and heads in one."""
        if not isinstance(callee, Instance) or set(callee.classes) != {nn.Conv1d}:
            return None
        match args.positional:
            case [Laid(dims=((_, _), (_,), (_,)))] if not args.keywords:
                return convolved(callee, plain_call(callee.expr, args), _kept(args, frame))
        return None
