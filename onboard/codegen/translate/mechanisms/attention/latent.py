"""Multi-head latent attention, kept whole: the op gets the latents and the weight that would expand
them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from onboard.analysis.spec_blocks import AttentionParameters
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import AttentionInterface
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    constant,
    name,
    op,
)
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Value, untransposed


@dataclass(frozen=True, eq=False)
class Joined(Value):
    """`torch.cat([a, b], dim=-1)` that may be taken apart again."""

    first: Value
    second: Value
    lazy = True

    def code(self) -> ast.expr:
        """Return the concatenation."""
        return call(
            attribute(name("torch"), "cat"),
            Items((self.first, self.second)).code(),
            dim=constant(-1),
        )

    def parts(self) -> list[Value]:
        """Return both parts."""
        return [self.first, self.second]

    def mapped(self, change: Callable[[Value], Value]) -> Joined:
        """Return changed parts, joined."""
        return Joined(change(self.first), change(self.second))


@dataclass(frozen=True, eq=False)
class Expanded(Value):
    """The keys (part 0) or values (part 1) that latent attention expands from one vector a
    token.
    """

    latent: Value
    kpe: Value
    weight: ast.expr
    part: int
    lazy = True

    def parts(self) -> list[Value]:
        """Return the latent and the keys that all heads share."""
        return [self.latent, self.kpe]

    def mapped(self, change: Callable[[Value], Value]) -> Expanded:
        """Return those of a changed latent and changed keys."""
        return replace(self, latent=change(self.latent), kpe=change(self.kpe))


def names_of(frame: Frame) -> AttentionParameters | None:
    """Return the names of the parts of latent attention when it is its code that is evaluated."""
    return (
        frame.translator.findings.latents.get(frame.cls.cls.__name__)
        if frame.cls is not None
        else None
    )


def expand(names: AttentionParameters, args: Args) -> Items:
    """Return the keys and values of `self.expand(latent, kpe)`, not expanded yet."""
    latent, kpe = args.positional
    weight = attribute(name("self"), str(names.kv_b_proj), "weight")
    return Items((Expanded(latent, kpe, weight, 0), Expanded(latent, kpe, weight, 1)))


def rearranged(function: Any, expr: ast.expr, args: Args) -> Value | None:
    """Return `torch.cat((a, b), dim=-1)` as its parts, and those of a transposed `torch.split(x,
    sizes, dim=-1)`.
    """
    if not args.keywords.get("dim", NONE).equals(Known(-1)):
        return None
    match args.positional:
        case [Items(items=(first, second))] if function is torch.cat:
            return Joined(first, second)
        # [batch, heads, sequence, size]
        case [Code(transposed=True) as whole, sizes] if function is torch.split:
            called = ast.Call(expr, [whole.expr, sizes.code()], [ast.keyword("dim", constant(-1))])
            return Code(called, transposed=True)
    return None


def attention(args: Args) -> Value | None:
    """Return the canonical form of attention to expanded latents; None when keys and values are
    something else.
    """
    match args.positional[1:4]:
        case [Joined(first=q_nope, second=q_pe), Expanded(part=0) as key, Expanded(part=1)]:
            pass
        case [Code() as query, Expanded(part=0) as key, Expanded(part=1)]:
            q_nope, q_pe = _split(query, key.kpe)
        case _:
            return None
    given = {
        **dict(zip(("attention_mask", "scaling"), args.positional[4:], strict=False)),
        **args.keywords,
    }
    indices, sinks, window = (
        given.get(key, NONE) for key in ("indices", "s_aux", "sliding_window")
    )
    sparse = not (indices.equals(NONE) and window.equals(NONE))
    not_there = ("softcap",) if sparse else ("softcap", "s_aux")
    if odd := [item for item in not_there if not given.get(item, NONE).equals(NONE)]:
        raise Untranslatable(f"latent attention with {odd[0]}")
    latent = call(attribute(_by_sequence(key.latent), "squeeze"), ast.Constant(2))
    tensors = [*map(_by_sequence, (q_nope, q_pe)), latent, _by_sequence(key.kpe), key.weight]
    scale = given.get("scaling", NONE).code()
    if sparse:
        rest = [item.code() for item in ((sinks, window) if not window.equals(NONE) else (sinks,))]
        called = ast.Call(op("torch_sparse_mla"), [*tensors, indices.code(), scale, *rest], [])
    else:
        called = ast.Call(op("torch_mla"), [*tensors, constant(True), scale], [])
    return Items((Code(called), NONE))


def _split(query: Code, kpe: Value) -> tuple[Code, Code]:
    """Return the channels of a query for the latent's keys and those for the keys that are the same
    for all heads.
    """
    size = ast.UnaryOp(
        ast.USub(), ast.Subscript(attribute(_by_sequence(kpe), "shape"), constant(-1), ast.Load())
    )
    tensor = _by_sequence(query)
    parts = [ast.Slice(None, size, None), ast.Slice(size, None, None)]
    codes = [
        ast.Subscript(tensor, ast.Tuple([constant(...), part], ast.Load()), ast.Load())
        for part in parts
    ]
    first, second = (Code(code, transposed=True) for code in codes)
    return first, second


def _by_sequence(value: Value) -> ast.expr:
    """Return a value [batch, heads, sequence, size] in the order bsnd."""
    if isinstance(value, Code) and value.transposed:
        return untransposed(value).expr
    return Code(value.code(), transposed=True).code()


class LatentAttention(Mechanism):
    """Attention to latents."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Parts of queries and keys put together, and taken apart."""
        return rearranged(function, expr, args) if names_of(frame) else None

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """The expansion of latents."""
        names = names_of(frame)
        return expand(names, args) if names is not None and names.expand == attr else None

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Attention to what is expanded."""
        return attention(args) if isinstance(callee, AttentionInterface) else None
