"""A cached graph cut into segments that a CUDA graph can hold and segments that cannot be in one.

What depends on a step's tokens alone, row by row, can be captured for a number of tokens and
replayed for fewer. What reads more of the step (attention and recurrences over caches, the choice
of the rows whose logits are wanted) cannot, and neither can what follows from it, until there is a
row for each token again. Which values have such rows is
measured: two runs with different numbers of tokens show how the shapes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from onboard.cache.step_buffer import ADAPTER_IDS
from onboard.graph.fx import placeholders, writes
from onboard.ops.library import declared, plain_function

TOKEN_INPUTS = ("input_ids", "position_ids", ADAPTER_IDS)
"""Inputs [1, tokens] of which each row concerns one token; zeros are valid."""


class CannotSplitError(Exception):
    """The graph cannot be run in pieces; the message says why."""


@dataclass(frozen=True)
class Rows:
    """How a tensor's shape follows the number of tokens: `factor` entries a token along `dim`."""

    dim: int
    factor: int

    def cut(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the rows of the first `tokens` tokens."""
        size = tokens * self.factor
        return tensor if tensor.shape[self.dim] == size else tensor.narrow(self.dim, 0, size)

    def rest(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the rows behind those of the first `tokens` tokens, maybe none."""
        size = tokens * self.factor
        return tensor.narrow(self.dim, size, tensor.shape[self.dim] - size)

    def shape(self, example: Tensor, tokens: int) -> list[int]:
        """Return the shape for `tokens` tokens of what is like `example` otherwise."""
        shape = list(example.shape)
        shape[self.dim] = tokens * self.factor
        return shape


@dataclass(frozen=True)
class Segment:
    """Consecutive calls of the graph: a function of the values `inputs`, by name, that returns
    those in `outputs`.
    """

    captured: bool
    run: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Pieces:
    """A graph as segments; `rows` says of which values each row concerns a token, `result` names
    what is returned.
    """

    segments: tuple[Segment, ...]
    rows: Mapping[str, Rows]
    examples: Mapping[str, Tensor]
    """Tensors on the meta device, of the shapes and dtypes that each value had in a run."""
    result: str


def split(
    gm: fx.GraphModule,
    call: Callable[[Callable[..., Any], int], Any],
    tokens: tuple[int, int],
    *,
    compiled: bool = False,
) -> Pieces:
    """Cut a cached graph.

    Args:
        gm: the graph, which is left as it is.
        call: calls a function with the graph's inputs, by name, for a step of that many tokens.
        tokens: two numbers of tokens to try.
        compiled: captured segments are to be compiled, and so call operators, not the functions
            behind them.

    Raises:
        CannotSplitError: a size that depends on the tokens would be needed outside a captured
            segment, or nothing is left to capture.
    """
    if obstacle := next(
        (text for node in gm.graph.nodes if (text := declared(node.target).no_pieces)), ""
    ):
        raise CannotSplitError(obstacle)
    seen = [_values(gm, call, count) for count in tokens]
    rows = {
        name: found for name in seen[0] if (found := _rows(seen[0][name], seen[1][name], tokens))
    }
    eager = _eager(gm, rows)
    segments = _segments(gm, eager, compiled)
    result = gm.graph.output_node().args[0]
    if not any(segment.captured for segment in segments) or not isinstance(result, fx.Node):
        raise CannotSplitError("nothing of the graph can be captured")
    for segment in segments:
        for name in segment.outputs if segment.captured else ():
            if not isinstance(seen[0][name], Tensor) and seen[0][name] != seen[1][name]:
                _refuse_outside(segments, name)
    examples = {name: value for name, value in seen[0].items() if isinstance(value, Tensor)}
    return Pieces(tuple(segments), rows, examples, result.name)


def _refuse_outside(segments: Sequence[Segment], name: str) -> None:
    if any(name in segment.inputs and not segment.captured for segment in segments):
        raise CannotSplitError(
            f"{name}, which depends on the number of tokens, is needed outside the captured parts"
        )


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps what every node's value was: a tensor's shape and dtype, anything else
    as it is.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[str(n.target) if n.op == "placeholder" else n.name] = _described(value)
        return value


def _values(
    gm: fx.GraphModule, call: Callable[[Callable[..., Any], int], Any], tokens: int
) -> dict[str, Any]:
    recorder = _Recorder(gm)
    names = [str(node.target) for node in placeholders(gm)]
    call(lambda **inputs: recorder.run(*(inputs[name] for name in names)), tokens)
    return recorder.values


def _described(value: Any) -> Any:
    """Return a tensor without its data, a number as it is, and None for anything else."""
    if isinstance(value, Tensor):
        return torch.empty(value.size(), dtype=value.dtype, device="meta")
    return value if isinstance(value, int | float) else None


def _rows(first: Any, second: Any, tokens: tuple[int, int]) -> Rows | None:
    """Return how a shape follows the number of tokens, None when it does not, or in another way."""
    if not isinstance(first, Tensor) or first.ndim != second.ndim:
        return None
    moved = [dim for dim in range(first.ndim) if first.shape[dim] != second.shape[dim]]
    if len(moved) != 1:
        return None
    factor, rest = divmod(first.shape[moved[0]], tokens[0])
    return (
        Rows(moved[0], factor)
        if rest == 0 and second.shape[moved[0]] == factor * tokens[1]
        else None
    )


def _eager(gm: fx.GraphModule, rows: Mapping[str, Rows]) -> set[fx.Node]:
    """Return the calls that read more of a step than its tokens, or follow from such without a row
    for each token.
    """
    eager: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        for source in node.all_input_nodes:
            beyond = source.op == "placeholder" and source.target not in TOKEN_INPUTS
            if beyond or (source in eager and source.name not in rows) or writes(node):
                eager.add(node)
    return eager


def _segments(gm: fx.GraphModule, eager: set[fx.Node], compiled: bool) -> list[Segment]:
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    groups = [
        (not is_eager, list(nodes))
        for is_eager, nodes in groupby(calls, lambda node: node in eager)
    ]
    return [_segment(gm, captured, compiled, nodes) for captured, nodes in groups]


def _segment(gm: fx.GraphModule, captured: bool, compiled: bool, nodes: list[fx.Node]) -> Segment:
    members, graph = set(nodes), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = list(
        dict.fromkeys(
            source for node in nodes for source in node.all_input_nodes if source not in members
        )
    )
    given = [node for node in inputs if node.op != "get_attr"]
    for node in given:
        copies[node] = graph.placeholder(node.name)
    for node in [*(node for node in inputs if node.op == "get_attr"), *nodes]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if not (captured and compiled) and node.op == "call_function":
            copies[node].target = plain_function(node.target)
    outputs = [node for node in nodes if set(node.users) - members]
    graph.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(gm, graph)
    names = [str(node.target) if node.op == "placeholder" else node.name for node in given]
    return Segment(captured, module.forward, tuple(names), tuple(node.name for node in outputs))
