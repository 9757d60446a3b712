"""Windows that only the masks of a model have: its attention passes none on, though eager attention
keeps to them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from transformers import PretrainedConfig

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import decided_here
from onboard.codegen.translate.language.frame import Frame, Mechanism, Program, Sides
from onboard.codegen.translate.language.object_values import Config, MaskMaker
from onboard.codegen.translate.language.state import ClassState, Routine
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    constant,
    name,
)
from onboard.codegen.translate.language.values import NONE, Code, Mask, Value
from onboard.codegen.translate.mechanisms.attention.causal import (
    Hidden,
    Windowed,
    filled,
    owner_of,
)
from onboard.codegen.translate.mechanisms.attention.scores import Scores
from onboard.hf.architecture import text_config
from onboard.ops import attention_ops

_LENGTH = 4
_SLIDING = "sliding_attention"
_OPS = "torch.ops.onboard"


@dataclass(frozen=True, eq=False)
class Cut(Mask):
    """A causal mask by which a layer hides what lies before its window: its attention has to be told
    the window besides.
    """


@dataclass(frozen=True, eq=False)
class _Truths(Value):
    """Truth values in the shape of a mask: all true, or those of the keys before a window."""

    lie_before: bool


def note(obj: object, frame: Frame) -> None:
    """Note which class has code that makes masks with a window."""
    if _cuts(obj):
        frame.translator.windowed.add(owner_of(frame))


@cache
def _cuts(maker: object) -> bool:
    """Whether masks by a function of transformers hide what lies before the config's window, as a
    small one shows.
    """
    parameters = inspect.signature(maker).parameters if inspect.isfunction(maker) else {}
    if not (inspect.isfunction(maker) and "config" in parameters):
        return False
    config = PretrainedConfig(sliding_window=_LENGTH // 2, attention_chunk_size=_LENGTH)
    config._attn_implementation = "eager"
    needed = (
        key
        for key, item in parameters.items()
        if item.default is item.empty and item.kind != item.VAR_KEYWORD
    )
    known = {"config": config, "cache_position": torch.arange(_LENGTH)}
    known |= dict.fromkeys(("inputs_embeds", "input_embeds"), torch.zeros(1, _LENGTH, 1))
    mask = maker(**{key: known.get(key) for key in needed})
    return isinstance(mask, torch.Tensor) and bool(mask[..., -1, 0].lt(0).all())


def of_masks(frame: Frame) -> Value:
    """Return the window of attention that passes none: that of the masks.

    Where layers differ, it is that of the layers that are called sliding, which a class can tell
    that knows its index.
    """
    if not frame.translator.windowed or frame.cls is None:
        return NONE
    kinds, known = _kinds(frame.translator), frame.cls.attributes
    match known.get("config"):
        case Config(obj=config) if hasattr(config, "sliding_window"):
            window = attribute(name("self"), "config", "sliding_window")
            if kinds:
                if _SLIDING not in kinds or not isinstance(known.get("layer_idx"), Code):
                    return NONE
                window = ast.IfExp(_is_sliding(), window, constant(None))
            return Code(window, static=True, optional=True)
    return NONE


def with_window(args: Args, frame: Frame) -> Args:
    """Return the arguments of attention with the window of its mask, where it is given none
    itself.
    """
    given = [
        *args.positional[4:5],
        *(args.keywords[key] for key in ("attention_mask",) if key in args.keywords),
    ]
    own = frame.cls is not None and frame.cls.fills_window
    if not (own or any(isinstance(value, Mask) for value in given)):
        return args
    told = not args.keywords.get("sliding_window", NONE).equals(NONE)
    if any(isinstance(value, Cut) for value in given) and not told:
        raise Untranslatable("attention with a window that only its mask has")
    beyond = [mask.beyond for mask in given if isinstance(mask, Windowed)]
    window = of_mask(beyond[0], frame) if beyond else of_masks(frame)
    named = dict(args.keywords)
    if beyond and named.get("sliding_window", NONE).equals(NONE):
        named.pop("sliding_window", None)  # what attention is told hides no more than its mask
    return replace(args, keywords={"sliding_window": window, **named})


def of_mask(beyond: int, frame: Frame) -> Value:
    """Return the window of a mask that shows so many keys more than the config's window.

    Raises:
        Untranslatable: the class that attends does not know the config.
    """
    window = of_masks(frame)
    if not beyond:
        return window
    if window.equals(NONE) or not decided_here(window, frame):
        raise Untranslatable("attention with a window that only its mask has")
    return Code(ast.BinOp(window.code(), ast.Add(), constant(beyond)), static=True)


def of_filled(frame: Frame) -> ast.expr | None:
    """Return the window of a mask by which a tensor is filled, which the class's attention gets,
    too.

    With and without one are two models. Where layers differ there is none: then no attention has
        the mask's window.
    """
    if frame.cls is None or _kinds(frame.translator):
        return None
    window = of_masks(frame)
    if not getattr(
        text_config(frame.translator.config), "sliding_window", None
    ) or not decided_here(window, frame):
        return None
    frame.cls.fills_window = True
    return window.code()


def _is_sliding() -> ast.expr:
    """Return `self.config.layer_types[self.layer_idx] == "sliding_attention"`."""
    kinds, index = (
        attribute(name("self"), "config", "layer_types"),
        attribute(name("self"), "layer_idx"),
    )
    kind = ast.Subscript(kinds, index, ast.Load())
    return ast.Compare(kind, [ast.Eq()], [constant(_SLIDING)])


def guard(translator: Program) -> None:
    """Where masks may have a window that attention does not get, have classes that make them assert
    that none has one.

    Where one window holds for all layers, all attention has to get it; where layers differ, some
    may be without one.

    Raises:
        Untranslatable: this config has one that no attention gets; where some does, the proof tells
            if it should.
    """
    given = [_has_window(call) for call in _calls(translator) if _attends(call)]
    kinds = _kinds(translator)
    if not translator.windowed or (any(given) if kinds else given and all(given)):
        return
    if (
        _SLIDING in kinds
        if kinds
        else getattr(text_config(translator.config), "sliding_window", None)
    ):
        if any(given):
            return
        raise Untranslatable("attention with a window that only its mask has")
    for state in translator.windowed:
        state.guards.append(_without_window(state, "layer_types" if kinds else "sliding_window"))


def _without_window(state: ClassState, field: str) -> ast.expr:
    """Return what holds in a class's `__init__` when its masks have no window, by a field of its
    config.
    """
    match state.attributes.get("config"):
        case Config(expr=expr, obj=config) if hasattr(config, field):
            value = attribute(expr, field)
            no_window = ast.UnaryOp(ast.Not(), value)
            return (
                ast.Compare(constant(_SLIDING), [ast.NotIn()], [value])
                if field == "layer_types"
                else no_window
            )
    raise Untranslatable("masks with a window by a class that does not know the layers' config")


def _kinds(translator: Program) -> Sequence[str]:
    """Return the layers' kinds; none where all layers have the same masks."""
    return getattr(text_config(translator.config), "layer_types", None) or ()


def _calls(translator: Program) -> list[ast.Call]:
    methods: chain[Routine] = chain.from_iterable(
        state.methods.values() for state in translator.states.values()
    )
    routines = chain(methods, translator.functions.values())
    nodes = (
        node for routine in routines for statement in routine.body for node in ast.walk(statement)
    )
    return [node for node in nodes if isinstance(node, ast.Call)]


def _attends(call: ast.Call) -> bool:
    """Whether a canonical op is called that is attention."""
    func = call.func
    return (
        isinstance(func, ast.Attribute)
        and ast.unparse(func.value) == _OPS
        and func.attr in attention_ops()
    )


def _has_window(call: ast.Call) -> bool:
    """Whether a call of an attention op gives it a window."""
    arguments = getattr(
        torch.ops.onboard, ast.unparse(call.func).removeprefix(f"{_OPS}.")
    ).default._schema.arguments
    windows = [
        value
        for item, value in zip(arguments, call.args, strict=False)
        if item.name == "sliding_window"
    ]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in windows)


class CutMasks(Mechanism):
    """Windows by which a layer cuts its mask, and tells its attention."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """`torch.where(torch.tril(torch.ones_like(mask), -window), least, mask)`."""
        match args.positional:
            case [Mask(whole=True) as mask, *_] if function is torch.ones_like:
                return _Truths(lie_before=False) if type(mask) in (Mask, Cut) else None
            case [_Truths(lie_before=False), *given] if function is torch.tril:
                diagonal = [*given, *args.keywords.values()]
                return _Truths(lie_before=True) if len(diagonal) == 1 else None
            case [_Truths(lie_before=True), _, Mask(whole=True)] if function is torch.where:
                frame.translator.windowed.add(owner_of(frame))
                return Cut(whole=True)
        return None

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """The keys that a window leaves of such a mask: attention takes them by itself."""
        of_keys = isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 4
        return owner if isinstance(owner, Cut) and of_keys else None

    def joined(self, sides: Sides) -> Value | None:
        """A mask that some layers cut."""
        values = [value for value, _ in sides]
        cut = [value for value in values if isinstance(value, Cut)]
        return cut[0] if cut and all(type(value) in (Mask, Cut) for value in values) else None


class Windows(Mechanism):
    """Windows of masks."""

    def name(self, obj: object, frame: Frame) -> Value | None:
        """Functions of transformers that make masks, perhaps with a window."""
        if getattr(obj, "__module__", None) != "transformers.masking_utils":
            return None
        note(obj, frame)
        name_of = getattr(obj, "__name__", "")  # code of other years has them wrapped
        chunked = name_of == "create_chunked_causal_mask"
        padding = name_of == "create_recurrent_attention_mask"
        return MaskMaker(chunked=chunked, padding=padding)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """`x.masked_fill(mask, value)` of a mask that may have a window."""
        fills = attr == "masked_fill" and type(args.positional[0]) in (Mask, Hidden)
        if not (fills and isinstance(owner, Code)) or owner.static or isinstance(owner, Scores):
            return None
        return filled(owner, args.positional[1].code(), of_filled(frame))

    def finish(self, program: Program) -> None:
        """No window is lost."""
        guard(program)
