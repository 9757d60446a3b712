"""The op's settings as the graph has them: numbers of the code, and tensors of slopes and sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from onboard.codegen.cores.core_runs import Core, NotAttentionError
from onboard.codegen.cores.meaning import Meaning
from onboard.codegen.cores.reach import numbers_of
from onboard.codegen.cores.value_paths import name_of

_CALCULATING = frozenset(
    ("mul", "multiply", "div", "truediv", "divide", "true_divide", "pow", "baddbmm", "rsqrt")
    + ("scaled_dot_product_attention", "sqrt")
)
_NEAR = 1e-6


@dataclass(frozen=True)
class Number:
    """A number, and how it is written: as a node, a number, or None for the op's default."""

    value: float
    written: fx.Node | float | None


def numbers(core: Core) -> list[Number]:
    """Return the numbers that a core calculates with, nodes first."""
    entered = [core.entered(dims) for dims in ((2, 11), (3, 7))]
    found = []
    literals = []
    for node in core.inside:
        if name_of(node) not in _CALCULATING:
            continue
        for each in node.all_input_nodes:
            values = [values.get(each) for values in entered]
            if isinstance(values[0], int | float) and values[0] == values[1]:
                found.append(Number(float(values[0]), each))
        literals += [Number(float(each), float(each)) for each in numbers_of(node)]
    return [each for each in (*found, *literals) if each.value]


def scale_of(core: Core, measured: float, head_dim: int) -> Number:
    """Return the number of the code that a measured scale is.

    Raises `NotAttentionError` where none is.
    """
    for each in _scales(numbers(core), head_dim):
        if math.isclose(each.value, measured, rel_tol=_NEAR):
            return each
    raise NotAttentionError(f"its scale, {measured:.9g}, comes of no numbers of the code")


def _scales(known: list[Number], head_dim: int) -> Iterator[Number]:
    yield Number(1.0, 1.0)
    yield from known
    yield Number(head_dim**-0.5, None)
    yield Number(1 / head_dim, 1 / head_dim)
    factors = [value for each in known for value in (each.value, 1 / each.value)]
    factors += [math.sqrt(value) for value in factors if value > 0] + [head_dim**-0.5]
    products = [one * other for one in factors for other in factors]
    for value in (*factors, *products):
        yield Number(value, value)


def with_caps(core: Core, meaning: Meaning) -> Iterator[Meaning]:
    """Yield a meaning with each soft cap that the code may have, none first."""
    yield meaning
    if any(name_of(node) == "tanh" for node in core.inside):
        caps = {each.value for each in numbers(core) if each.value > 0}
        yield from (replace(meaning, cap=cap) for cap in sorted(caps))


def settings_of(core: Core, meaning: Meaning, scale: Number) -> dict[str, Any]:
    """Return keywords of the op: numbers, nodes of tensors; those with their defaults left out.

    Raises `NotAttentionError` where the graph has no tensor of the slopes or sinks.
    """
    given = {
        "scale": scale.written,
        "sinks": _tensor(core, meaning.sinks, [1.0], "sinks"),
        "sliding_window": meaning.window,
        "logit_cap": meaning.cap,
        "chunk_size": meaning.chunk,
        "alibi_slopes": _tensor(core, meaning.slopes, [1.0, -1.0, meaning.scale], "slopes"),
    }
    return {name: value for name, value in given.items() if value is not None}


def _tensor(core: Core, wanted: Tensor | None, factors: list[float], name: str) -> fx.Node | None:
    """Return a node [heads] of the numbers `wanted`, written behind what has them times a factor."""
    if wanted is None:
        return None
    for factor in factors:
        for node in core.around:
            if node not in core.content and _has(core, node, wanted / factor):
                return _as_row(core.gm.graph, node, core.value_of(node), factor)
    raise NotAttentionError(f"no tensor of the forward has its {name}")


def _has(core: Core, node: fx.Node, wanted: Tensor) -> bool:
    value = core.value_of(node)
    if not isinstance(value, torch.Tensor) or value.numel() != wanted.numel():
        return False
    return value.is_floating_point() and torch.allclose(
        value.reshape(-1), wanted, rtol=_NEAR, atol=0.0
    )


def _as_row(graph: fx.Graph, node: fx.Node, value: Tensor, factor: float) -> fx.Node:
    with graph.inserting_after(node):
        if value.dim() != 1:
            node = graph.call_method("flatten", (node,))
    with graph.inserting_after(node):
        if factor == -1.0:
            return graph.call_method("neg", (node,))
        return node if factor == 1.0 else graph.call_method("mul", (node, factor))
