"""Where the weights of a mixture's experts lie: in stacks that a transform made, or the model has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import ancestors, arguments, is_op, nodes_of
from onboard.graph.post_load_fusion.constants import evaluate
from onboard.graph.weight_load.gemm_fusion import LINEARS, private_parameters
from onboard.graph.weight_load.parameters import ParameterNames, further_names

_ops = torch.ops.onboard
_STACKS = ("w3_w1_stacked_weight", "w2_stacked_weight", "w3_w1_stacked_bias", "w2_stacked_bias")
_VIEWS = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True)
class Stack:
    """A parameter that has one weight of all experts, [experts, rows, inputs]."""

    name: str
    experts: int
    rows: int
    inputs: int
    transposed: bool = False
    """The parameter is [experts, inputs, rows]."""


@dataclass(frozen=True)
class Mixture:
    """A call of `torch_moe_fused`, or of `torch_moe` whose lists are views of stacks."""

    node: Node
    up: Stack
    """Of the up projection and, where it is gated, of the gate."""
    down: Stack
    order: str
    """Where the rows of up and gate are: see `quantised_moe.ROW_ORDERS`."""
    biases: tuple[str | None, str | None]
    """Parameters of the first and the second product."""
    sources: frozenset[Node]
    """What only the mixture reads, and reads its weights from."""

    @property
    def parts(self) -> int:
        """How many weights a stack of first products has one behind the other."""
        gated = bool(arguments(self.node)["is_gated_mlp"])
        return 2 if gated and self.order != "interleaved" else 1


def mixtures(gm: GraphModule) -> Iterator[Mixture]:
    """Yield the mixtures whose weights nothing else reads, and lie in stacks."""
    private = private_parameters(gm)
    for node in nodes_of(gm, _ops.torch_moe_fused):
        if found := _stacked(gm, node, private):
            yield found
    for node in nodes_of(gm, _ops.torch_moe):
        if found := _viewed(gm, node):
            yield found


def _stacked(gm: GraphModule, node: Node, private: set[str]) -> Mixture | None:
    values = arguments(node)
    read = [values[name] for name in _STACKS]
    given = [each for each in read if each is not None]
    if any(each.op != "get_attr" or str(each.target) not in private for each in given):
        return None
    names = [None if each is None else str(each.target) for each in read]
    if not all(gm.get_parameter(name).is_meta for name in names if name):
        return None
    up, down = (Stack(name, *gm.get_parameter(name).shape) for name in names[:2] if name)
    return Mixture(node, up, down, "up_gate", (names[2], names[3]), frozenset(given))


def router_linears(gm: GraphModule) -> set[Node]:
    """Return the linear layers by which experts are chosen."""
    found: set[Node] = set()
    for node in nodes_of(gm, _ops.torch_moe, _ops.torch_moe_fused):
        values = arguments(node)
        between = ancestors([values["selected_experts"]]) - ancestors([values["x"]])
        found.update(each for each in between if is_op(each, *LINEARS))
    return found


@dataclass(frozen=True)
class _Rows:
    """The rows of a stack, from `first` on and each `step`, that are one weight of all experts."""

    name: str
    transposed: bool
    first: int
    step: int
    count: int
    inputs: int


def _viewed(gm: GraphModule, node: Node) -> Mixture | None:
    """Return a mixture of lists, where these are views of stacks as `ROW_ORDERS` has them."""
    values = arguments(node)
    lists = {
        part: list(values[f"{short}_{kind}"] or [])
        for kind in ("weight", "bias")
        for part, short in ((f"{name}_{kind}", short) for name, short in _VIEWS.items())
    }
    nodes = [each for items in lists.values() for each in items]
    sources = ancestors(nodes)
    if not nodes or not _is_private(gm, sources, node):
        return None
    tensors = evaluate(gm, sorted(sources))
    rows = {name: _rows(gm, sources, [tensors[n] for n in items]) for name, items in lists.items()}
    experts, down = len(lists["down_weight"]), rows["down_weight"]
    first = _join(rows["gate_weight"], rows["up_weight"], bool(values["is_gated_mlp"]))
    if first is None or down is None or (down.first, down.step) != (0, 1):
        return None
    up, order = first
    biases = _biases(rows, lists, order, bool(values["is_gated_mlp"]))
    if biases is None:
        return None
    return Mixture(
        node, _stack(up, experts), _stack(down, experts), order, biases, frozenset(sources)
    )


def _stack(rows: _Rows, experts: int) -> Stack:
    return Stack(rows.name, experts, rows.count, rows.inputs, rows.transposed)


def _is_private(gm: GraphModule, sources: set[Node], node: Node) -> bool:
    """Whether all that a mixture's weights are made from is parameters on the meta device, which
    nothing else reads.
    """
    names = {str(each.target) for each in sources if each.op == "get_attr"}
    readers = [each for each in gm.graph.find_nodes(op="get_attr") if str(each.target) in names]
    return (
        all(each.op in ("get_attr", "call_function") for each in sources)
        and all(name in ParameterNames(gm) and not further_names(gm, name) for name in names)
        and all(gm.get_parameter(name).is_meta for name in names)
        and all(user in sources or user is node for each in sources for user in each.users)
        and sources.issuperset(readers)
    )


def _rows(gm: GraphModule, sources: set[Node], views: Sequence[Any]) -> _Rows | None:
    """Return the rows of which a stack's experts have one view each; None where they have not."""
    if not views:
        return None
    names = {str(each.target) for each in sources if each.op == "get_attr"}
    for name in names:
        stack = gm.get_parameter(name)
        if all(_shares(view, stack) for view in views):
            return _rows_of(name, stack, views)
    return None


def _shares(view: torch.Tensor, stack: torch.Tensor) -> bool:
    return bool(view.untyped_storage()._cdata == stack.untyped_storage()._cdata)


def _rows_of(name: str, stack: torch.Tensor, views: Sequence[torch.Tensor]) -> _Rows | None:
    """Compare the places of views [rows, inputs], or [rows], with those of a stack's rows."""
    each = stack[0].numel()
    firsts = {int(view.storage_offset()) - index * each for index, view in enumerate(views)}
    layouts = {(tuple(view.shape), view.stride()) for view in views}
    if len(firsts) != 1 or len(layouts) != 1 or len(views) != len(stack):
        return None
    (first,), ((shape, strides),) = firsts, layouts
    if stack.dim() == 2 and len(shape) == 1:
        return _Rows(name, False, first, strides[0], shape[0], 0)
    if stack.dim() != 3 or len(shape) != 2:
        return None
    *_, outer, inner = stack.shape
    if strides[1] == 1 and shape[1] == inner and first % inner == strides[0] % inner == 0:
        return _Rows(name, False, first // inner, strides[0] // inner, *shape)
    if strides[1] == inner and shape[1] == outer and first < inner:
        return _Rows(name, True, first, strides[0], *shape)
    return None


def _join(gate: _Rows | None, up: _Rows | None, gated: bool) -> tuple[_Rows, str] | None:
    """Return all rows of a stack that has gate and up, and their order."""
    if gate is None or not gated:
        return (gate, "up_gate") if gate and (gate.first, gate.step) == (0, 1) else None
    if up is None or (up.name, up.transposed, up.count) != (gate.name, gate.transposed, gate.count):
        return None
    both = _Rows(gate.name, gate.transposed, 0, 1, 2 * gate.count, gate.inputs)
    orders = {
        (0, 1, 2): "interleaved",
        (0, gate.count, 1): "gate_up",
        (gate.count, 0, 1): "up_gate",
    }
    order = orders.get((gate.first, up.first, gate.step)) if gate.step == up.step else None
    return (both, order) if order else None


def _biases(
    rows: dict[str, _Rows | None], lists: dict[str, list[Node]], order: str, gated: bool
) -> tuple[str | None, str | None] | None:
    """Return the biases' parameters, () where they are not laid out as the weights are."""
    first: str | None = None
    second: str | None = None
    if lists["gate_bias"] or lists["up_bias"]:
        found = _join(rows["gate_bias"], rows["up_bias"], gated)
        if found is None or found[1] != order:
            return None
        first = found[0].name
    if lists["down_bias"]:
        down = rows["down_bias"]
        if down is None or (down.first, down.step) != (0, 1):
            return None
        second = down.name
    return first, second
