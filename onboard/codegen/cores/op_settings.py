"""The op's settings as the graph has them: numbers of the code, and tensors of slopes and sinks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from onboard.codegen.cores.core_runs import Core, NotAttentionError
from onboard.codegen.cores.head_axes import Axes
from onboard.codegen.cores.meaning import Meaning
from onboard.codegen.cores.reach import OF_POSITIONS, numbers_of
from onboard.codegen.cores.value_paths import name_of

_CALCULATING = frozenset(
    (
        "mul",
        "rmul",
        "multiply",
        "div",
        "truediv",
        "divide",
        "true_divide",
        "pow",
        "baddbmm",
        "rsqrt",
    )
    + ("scaled_dot_product_attention", "sqrt")
)
_NEAR = 1e-6


Written = fx.Node | float | int | None | tuple[Callable[[Any, Any], Any], Any, Any]
"""How a number is written: as a node, as it is, as None for the op's default, or as a function of two
of these.
"""


@dataclass(frozen=True)
class Number:
    """A number of a graph."""

    value: float
    written: Written


def numbers(core: Core, nodes: Iterable[fx.Node], names: Container[str]) -> list[Number]:
    """Return the numbers that `nodes`, as far as they call `names`, get, those of other nodes first."""
    found, literals = [], []
    for node in nodes:
        if name_of(node) in names:
            found += [Number(value, each) for each, value in core.scalars(node)]
            literals += [Number(each, each) for each in numbers_of(node)]
    return [each for each in (*found, *literals) if each.value]


def scale_of(core: Core, measured: float, head_dim: int) -> Number:
    """Return the number of the code that a measured scale is.

    Raises `NotAttentionError` where none is.
    """
    known = numbers(core, core.inside, _CALCULATING)
    tensors = [each for each in known if is_tensor(core, each.written)]
    plain = [replace(each, value=float(each.value)) for each in known if each not in tensors]
    for each in _scales(plain, tensors, head_dim):
        if math.isclose(each.value, measured, rel_tol=_NEAR):
            return each
    raise NotAttentionError(f"its scale, {measured:.9g}, comes of no numbers of the code")


def _scales(plain: list[Number], tensors: list[Number], head_dim: int) -> Iterator[Number]:
    """Yield what a scale may be. What the code has goes before the usual number, which a number of
    the code may be by chance for one size of heads.
    """
    yield Number(1.0, 1.0)
    factors = list(_powers(plain))
    yield from factors
    yield Number(head_dim**-0.5, None)
    more = list(_powers(tensors))
    yield from more
    for one in (*factors, *more):
        for other in (*factors, *more):
            yield _product(one, other)


def _powers(known: list[Number]) -> Iterator[Number]:
    yield from known
    for power in (-1.0, 0.5, -0.5):
        yield from (_power(each, power) for each in known)


def _power(number: Number, power: float) -> Number:
    if number.value < 0 and power % 1:
        return number
    value = float(number.value**power)
    return Number(value, _computed(operator.pow, number.written, power))


def _product(one: Number, other: Number) -> Number:
    return Number(one.value * other.value, _computed(operator.mul, one.written, other.written))


def _computed(function: Callable[[Any, Any], Any], one: Written, other: Written) -> Written:
    """Return a number where both operands are."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return float(function(one, other))
    return function, one, other


def length_of(core: Core, wanted: int | None, beyond: Container[int], name: str) -> Written:
    """Return the number of the code that a window or a chunk has, one more or one less.

    Raises `NotAttentionError` where none is.
    """
    if wanted is None:
        return None
    known = numbers(core, [*core.inside, *core.around], OF_POSITIONS)
    for more in (0, 1, -1):
        for each in known:
            if abs(each.value) + more == wanted:
                return _moved(each, more)
        if wanted - more in beyond:
            return wanted
    raise NotAttentionError(f"its {name}, {wanted}, is no number of the code")


def _moved(number: Number, more: int) -> Written:
    written = number.written
    if isinstance(written, int | float):
        return int(abs(written)) + more
    if number.value < 0:
        written = (operator.mul, written, -1)
    return (operator.add, written, more) if more else written


def is_tensor(core: Core, written: Written) -> bool:
    """Whether a number is that of a tensor."""
    if isinstance(written, tuple):
        return any(is_tensor(core, each) for each in written[1:])
    return isinstance(written, fx.Node) and isinstance(core.value_of(written), torch.Tensor)


def put(graph: fx.Graph, written: Written) -> Any:
    """Write a number's functions into a graph."""
    if not isinstance(written, tuple):
        return written
    function, *operands = written
    given = tuple(put(graph, each) for each in operands)
    if function is torch.Tensor.size:
        return graph.call_method("size", given)
    return graph.call_function(function, given)


def with_caps(core: Core, meaning: Meaning) -> Iterator[Meaning]:
    """Yield a meaning with each soft cap that the code may have, none first."""
    yield meaning
    if any(name_of(node) == "tanh" for node in core.inside):
        caps = {
            float(each.value) for each in numbers(core, core.inside, _CALCULATING) if each.value > 0
        }
        yield from (replace(meaning, cap=cap) for cap in sorted(caps))


def settings_of(
    core: Core, axes: Axes, meaning: Meaning, scale: Number, beyond: Container[int]
) -> dict[str, Any]:
    """Return keywords of the op, for queries that lie as `axes` say: numbers as they are to be
    written, nodes of tensors; those with
    their defaults left out.

    Raises `NotAttentionError` where the graph has no tensor of the slopes or sinks, or no number of
    the window.
    """
    caps = (each for each in numbers(core, core.inside, _CALCULATING) if each.value == meaning.cap)
    channels = (torch.Tensor.size, core.cut.query, axes.roles.index(("D",)))
    factor = (operator.pow, channels, -0.5) if scale.written is None else scale.written
    factors = [Number(1.0, 1.0), Number(-1.0, -1.0), Number(scale.value, factor)]
    given = {
        # The op takes no tensor: queries are multiplied by it.
        "scale": 1.0 if is_tensor(core, scale.written) else scale.written,
        "sinks": _zeros(core, meaning.sinks, axes)
        or _tensor(core, meaning.sinks, factors[:1], "sinks"),
        "sliding_window": length_of(core, meaning.window, beyond, "window"),
        "logit_cap": None if meaning.cap is None else next(caps).written,
        "chunk_size": length_of(core, meaning.chunk, beyond, "chunk"),
        "alibi_slopes": _tensor(core, meaning.slopes, factors, "slopes"),
    }
    return {name: value for name, value in given.items() if value is not None}


def _zeros(core: Core, wanted: Tensor | None, axes: Axes) -> fx.Node | None:
    """Return a node of as many zeros as there are heads, where that is what is `wanted`: weights that
    add up to less than one, by one in their denominator.
    """
    others = (("B",), ("T",), ("D",), ("1",))
    heads = [index for index, role in enumerate(axes.roles) if role not in others]
    if wanted is None or len(heads) != 1 or float(wanted.abs().max()) > _NEAR:
        return None
    graph, query = core.gm.graph, core.cut.query
    with graph.inserting_before(core.cut.result):
        return graph.call_method("new_zeros", (query, graph.call_method("size", (query, heads[0]))))


def _tensor(core: Core, wanted: Tensor | None, factors: list[Number], name: str) -> fx.Node | None:
    """Return a node [heads] of the numbers `wanted`, written behind what has them times a factor."""
    if wanted is None:
        return None
    for factor in factors:
        for node in core.around:
            if node not in core.content and _has(core, node, wanted / factor.value):
                return _as_row(core, node, factor)
    raise NotAttentionError(f"no tensor of the forward has its {name}")


def _has(core: Core, node: fx.Node, wanted: Tensor) -> bool:
    value = core.value_of(node)
    if not isinstance(value, torch.Tensor) or value.numel() != wanted.numel():
        return False
    return value.is_floating_point() and torch.allclose(
        value.reshape(-1), wanted, rtol=_NEAR, atol=0.0
    )


def _as_row(core: Core, node: fx.Node, factor: Number) -> fx.Node:
    graph = core.gm.graph
    with graph.inserting_before(core.cut.result):
        if core.value_of(node).dim() != 1:
            node = graph.call_method("flatten", (node,))
        if factor.value == 1.0:
            return node
        if factor.value == -1.0:
            return graph.call_method("neg", (node,))
        return graph.call_method("mul", (node, put(graph, factor.written)))
