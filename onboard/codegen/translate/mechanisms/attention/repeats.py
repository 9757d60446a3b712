"""Heads of keys and values that are repeated for grouped queries: attention ops do that by
themselves.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.tensor_methods import tensor_method
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call, same_code
from onboard.codegen.translate.language.values import Code, Known, Value


@dataclass(frozen=True, eq=False)
class Repeated(Code):
    """`expr` [batch, heads, sequence, dim] with each head `times` times, as grouped queries need
    it.
    """

    times: ast.expr = field(default_factory=lambda: ast.Constant(1))
    swapped: bool = False
    """`expr` is [batch, sequence, heads, dim]: `transposed` it is not, for whoever reads it has to
    repeat it.
    """

    @property
    def single(self) -> Code:
        """The tensor before it is repeated."""
        return Code(self.expr, transposed=self.swapped, form=self.form)

    def code(self) -> ast.expr:
        """Return the repetition."""
        return call(
            attribute(self.single.code(), "repeat_interleave"), self.times, dim=ast.Constant(1)
        )

    def same_as(self, other: Repeated) -> bool:
        """Whether both are repeated alike."""
        return (
            super().same_as(other)
            and self.swapped == other.swapped
            and same_code(self.times, other.times)
        )


_KEEPS = {"to", "float", "type", "type_as", "contiguous"}


def call_of(obj: Any, args: Args) -> Repeated | None:
    """Return what a function gives that repeats each head of [batch, heads, sequence, dim]; None
    for others.
    """
    given = {
        **dict(zip(("input", "repeats", "dim"), args.positional, strict=False)),
        **args.keywords,
    }
    if obj is torch.repeat_interleave:
        return _repeated(given.get("input"), given.get("repeats"), given.get("dim"))
    if (
        inspect.isfunction(obj)
        and len(args.positional) == 2
        and not args.keywords
        and not args.stars
    ):
        tensor, times = args.positional
        if (
            isinstance(tensor, Code)
            and not tensor.static
            and times.is_static
            and _repeats_heads(obj)
        ):
            return _repeated(tensor, times, Known(1))
    return None


def method(owner: Code, attr: str, args: Args) -> Value | None:
    """Return `owner.repeat_interleave(times, dim=1)`, or a method's result where the owner is that;
    None for others.
    """
    if attr == "repeat_interleave":
        given = {**dict(zip(("repeats", "dim"), args.positional, strict=False)), **args.keywords}
        return _repeated(owner, given.get("repeats"), given.get("dim"))
    if not isinstance(owner, Repeated):
        return None
    if attr in _KEEPS:
        changed = tensor_method(owner.single, attr, args)
        return _repeated(changed, Code(owner.times, static=True), Known(1))
    return tensor_method(Code(owner.code()), attr, args)


def written(expr: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return tensor and number of `tensor.repeat_interleave(number, dim=1)`."""
    match expr:
        case ast.Call(
            func=ast.Attribute(value=inner, attr="repeat_interleave"),
            args=[times],
            keywords=[ast.keyword(arg="dim", value=ast.Constant(value=1))],
        ):
            return inner, times
    return None


def _repeated(tensor: Value | None, times: Value | None, dim: Value | None) -> Repeated | None:
    if type(tensor) is not Code or tensor.static or times is None or not times.is_static:
        return None
    if not (isinstance(dim, Known) and dim.value == 1):
        return None
    return Repeated(tensor.expr, times=times.code(), swapped=tensor.transposed)


@lru_cache(maxsize=512)
def _repeats_heads(function: Any) -> bool:
    """Whether a helper repeats heads, by what it does to numbers."""
    x = torch.arange(2 * 3 * 5 * 4).view(2, 3, 5, 4).float()
    try:
        return all(
            torch.equal(function(x, times), x.repeat_interleave(times, dim=1))
            for times in (1, 2, 3)
        )
    except Exception:  # whatever a helper of another kind raises says that it is of another kind
        return False


class RepeatedHeads(Mechanism):
    """Heads of keys and values that are repeated."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Functions that repeat heads."""
        return call_of(function, args)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Methods that do, and methods of what is repeated."""
        return method(owner, attr, args) if isinstance(owner, Code) else None
