"""What lies between attention's operands and its result, as a function of the operands alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from onboard.codegen.cores.candidates import is_move
from onboard.codegen.cores.double_runs import DoubleRuns, inputs_of
from onboard.codegen.cores.head_axes import Axes, canonical_form, kinds_of, placed
from onboard.codegen.cores.reach import Outcomes
from onboard.codegen.cores.value_paths import is_in_place, name_of, reached, value_inputs
from onboard.graph.fx import ancestors

Dims = tuple[int, int]
"""Batch and length."""
Samples = Callable[[int, int], Sequence[Any] | None]
"""Inputs of a forward for a batch and a length; None where there are none so long."""
SHORT: tuple[Dims, Dims] = ((2, 11), (3, 7))
"""Sizes of the first samples."""


class NotAttentionError(Exception):
    """A part of a forward is no attention that the canonical op computes; the message says why."""


@dataclass(frozen=True)
class Cut:
    """The nodes that a core begins and ends with."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    result: fx.Node

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The nodes that it begins with."""
        return self.query, self.key, self.value


@dataclass(frozen=True)
class CutAxes:
    """How the tensors at a cut lie; their heads as K and G."""

    query: Axes
    key: Axes
    value: Axes
    result: Axes


@dataclass
class Core:
    """The nodes of a cut, and what enters there besides the operands, for each size of samples."""

    gm: fx.GraphModule
    cut: Cut
    content: set[fx.Node]
    runs: DoubleRuns
    samples: Samples
    outcomes: Outcomes = field(default_factory=Outcomes)

    def __post_init__(self) -> None:
        inside = reached(self.gm, self.cut.operands) - set(self.cut.operands)
        inside &= ancestors([self.cut.result], self.cut.operands)
        self.inside = [node for node in self.gm.graph.nodes if node in inside]
        entering = {each for node in self.inside for each in node.all_input_nodes}
        self.entering = entering - inside - set(self.cut.operands)
        around = ancestors(self.entering)
        self.around = [node for node in self.gm.graph.nodes if node in around]
        self._entered: dict[Dims, dict[fx.Node, Any]] = {}
        self._short: dict[Dims, dict[fx.Node, Any]] = {}

    def check_dependence(self) -> None:
        """Raise where something that enters depends on the tokens, or is written in place."""
        for node in self.inside:
            for each in value_inputs(node):
                if each in self.entering and each in self.content:
                    raise NotAttentionError(f"{each.name} depends on the tokens")
        for node in [*self.inside, *self.around]:
            if node.op == "call_method" and is_in_place(str(node.target)):
                self._check_in_place(node)
            if name_of(node) == "setitem":
                raise NotAttentionError(f"{node.name} writes into a tensor")

    def _check_in_place(self, node: fx.Node) -> None:
        written = node.args[0]
        if isinstance(written, fx.Node) and set(written.users) != {node}:
            raise NotAttentionError(f"{node.name} writes into a tensor that is read elsewhere")

    def entered(self, dims: Dims) -> dict[fx.Node, Any]:
        """Return what enters for a batch and a length."""
        if dims not in self._entered:
            values = self._run(self.around, self._inputs(dims), None)
            self._entered[dims] = {node: values[node] for node in self.entering}
            if dims in SHORT:
                self._short[dims] = values
        return dict(self._entered[dims])

    def _inputs(self, dims: Dims) -> dict[fx.Node, Any]:
        inputs = self.samples(*dims)
        if inputs is None:
            raise NotAttentionError(f"there are no texts of {dims[1]} tokens")
        return inputs_of(self.gm, inputs)

    def value_of(self, node: fx.Node) -> Any:
        """Return what a node around the core has in the first sample."""
        return self._values(SHORT[0]).get(node)

    def _values(self, dims: Dims) -> dict[fx.Node, Any]:
        self.entered(dims)
        return self._short[dims]

    def scalars(self, node: fx.Node) -> list[tuple[fx.Node, int | float]]:
        """Return the nodes that give a number to `node`, the same for all texts, and the numbers;
        tensors of one entry give a float.
        """
        first, second = (self._values(dims) for dims in SHORT)
        values = [
            (each, _number(first.get(each)), _number(second.get(each)))
            for each in node.all_input_nodes
            if each not in self.content
        ]
        return [(each, one) for each, one, other in values if one is not None and one == other]

    def __call__(
        self, dims: Dims, axes: CutAxes, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return the result [batch, heads, positions, channels] of operands that lie so, float64."""
        operands = zip((query, key, value), (axes.query, axes.key, axes.value), strict=True)
        result = self.result(dims, [placed(tensor, each) for tensor, each in operands])
        return canonical_form(result, axes.result, *dims)

    def result(self, dims: Dims, operands: Sequence[Tensor]) -> Tensor:
        """Return the result as the graph has it, of operands as the graph has them, in float64."""
        given = self.entered(dims) | dict(zip(self.cut.operands, operands, strict=True))
        values = self._run(self.inside, given, {self.cut.result})
        result: Tensor = values[self.cut.result]
        return result

    def _run(
        self, nodes: list[fx.Node], given: dict[fx.Node, Any], kept: set[fx.Node] | None
    ) -> dict[fx.Node, Any]:
        try:
            return self.runs.run(nodes, given, kept, self.outcomes.note)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise NotAttentionError(f"it does not run on other operands ({first})") from error

    def plain_axes(self, node: fx.Node) -> dict[str, int]:
        """Return which axes of an input are the batch, B, and positions, T, if any."""
        values = [self._inputs(dims).get(node) for dims in SHORT]
        shapes = [each.shape for each in values if isinstance(each, Tensor)]
        kinds = kinds_of(shapes, SHORT[: len(shapes)]) or ()
        return {letter: index for index, (letter, times) in enumerate(kinds) if times == 1}

    def is_given(self, node: fx.Node) -> bool:
        """Whether a node around the core compares inputs that hold one number each, as a mask of ones
        does, and nothing that is counted.
        """
        return all(
            each is node or is_move(each) or (each.op == "placeholder" and self._is_one(each))
            for each in ancestors([node])
        )

    def _is_one(self, node: fx.Node) -> bool:
        value = self.value_of(node)
        return isinstance(value, Tensor) and bool((value == value.reshape(-1)[0]).all())


def _number(value: Any) -> int | float | None:
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        return float(value.detach())
    return value if type(value) in (int, float) else None
