"""Recognises the router of a mixture of experts by what it does.

What lies between the router's logits and the mixture is run on random logits, with several random
biases, and compared with `torch_moe_router` under every setting that the nodes in between allow.
Only an equal one takes their place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import ancestors, arguments, attr_tensor, is_op, nodes_of
from onboard.graph.new_nodes import insert_call
from onboard.graph.weight_load.gemm_fusion import LINEARS
from onboard.graph.weight_load.parameters import leave_unread
from onboard.ops.library import declared
from onboard.verify.tolerances import ROUTER

aten = torch.ops.aten
_TOKENS = 301
_BIAS_SCALES = (0.05, 0.05, 0.05, 0.2, 0.2, 0.2)
"""Of random biases: some tokens' choices then depend on it, and some on the scores. One of few
experts may be nearly the same for all, and then changes no choice: several are not.
"""

Options = dict[str, Any]
"""Arguments of `torch_moe_router` behind `bias`, which is a node."""


@dataclass(frozen=True)
class Routing:
    """What lies between the logits and a mixture."""

    logits: Node
    experts: Node
    weights: Node
    nodes: list[Node]
    """All in between, in graph order, with the constants that they read and the sizes."""
    dtypes: set[Node]
    """Those of which only the dtype counts."""

    @property
    def constants(self) -> list[Node]:
        """What is read from the model."""
        return [node for node in self.nodes if node.op == "get_attr"]


@dataclass(frozen=True)
class _Trial:
    """Random inputs of a router, and the weight of every expert [tokens, experts] that comes of
    them.
    """

    logits: Tensor
    bias: Tensor | None
    expected: Tensor
    tolerance: float

    def fits(self, has_bias: bool, options: Options) -> bool:
        """Whether `torch_moe_router` gives the same."""
        bias = self.bias if has_bias else None
        weights, experts = torch.ops.onboard.torch_moe_router(self.logits, **options, bias=bias)
        actual = _dense(self.logits, experts, weights)
        return torch.allclose(actual, self.expected, rtol=self.tolerance, atol=self.tolerance)


def match_routings(gm: GraphModule) -> tuple[int, list[Node]]:
    """Put `torch_moe_router` in front of every mixture whose router it equals; return how many, and
    the others.
    """
    known: list[tuple[bool, Options]] = []
    others = []
    mixtures = [node for node in gm.graph.nodes if declared(node.target).experts]
    for mixture in mixtures:
        routing = _routing(gm, mixture)
        with _one_thread():
            found = None if routing is None else _settings(gm, routing, known)
        if routing is None or found is None:
            others.append(mixture)
        else:
            known = [found]
            _replace(gm, mixture, routing, *found)
    return len(mixtures) - len(others), others


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: tensors are so small that several mostly wait for one another, which
    took a second and a half for each layer on a machine of 32 cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _routing(gm: GraphModule, mixture: Node) -> Routing | None:
    """Return what is between one linear layer and a mixture, None when the router has another
    form.
    """
    values = arguments(mixture)
    ends: tuple[Node, Node] = values["selected_experts"], values["routing_weights"]
    linears = set(nodes_of(gm, *LINEARS))
    # Of the tensor whose dtype another takes, nothing else counts.
    dtypes = {arguments(node)["other"] for node in nodes_of(gm, aten.type_as)} - linears
    nodes = ancestors(ends, linears | dtypes)
    logits = [node for node in nodes if node in linears]
    if len(logits) != 1 or any(
        node.op == "placeholder" and not _gives_sizes(node, nodes) for node in nodes
    ):
        return None
    return Routing(logits[0], *ends, sorted(nodes - {logits[0]}), dtypes & nodes)


def _gives_sizes(placeholder: Node, nodes: set[Node]) -> bool:
    return all(is_op(user, aten.sym_size) for user in placeholder.users if user in nodes)


def _settings(
    gm: GraphModule, routing: Routing, known: list[tuple[bool, Options]]
) -> tuple[bool, Options] | None:
    """Return (whether a constant is the bias, options) under which `torch_moe_router` does what the
    nodes do.
    """
    generator = torch.Generator().manual_seed(29)
    try:
        trials = [_trial(gm, routing, scale, generator) for scale in _BIAS_SCALES]
    except (RuntimeError, TypeError, ValueError, IndexError):  # not a router of this form
        return None
    candidates = [*known, *_candidates(routing, trials[0].bias is not None)]
    return next((each for each in candidates if all(trial.fits(*each) for trial in trials)), None)


def _trial(gm: GraphModule, routing: Routing, scale: float, generator: torch.Generator) -> _Trial:
    """Run the nodes on random logits [..., tokens, experts], with random constants."""
    shape = routing.logits.meta["val"].shape
    size = (*[1] * (len(shape) - 2), _TOKENS, int(shape[-1]))
    logits = torch.randn(size, generator=generator) * torch.linspace(0.3, 6, _TOKENS)[:, None]
    constants = {node: _random_like(gm, node, scale, generator) for node in routing.constants}
    experts, weights = _run(routing, logits, constants)
    bias = next((value for value in constants.values() if value.shape == shape[-1:]), None)
    return _Trial(logits, bias, _dense(logits, experts, weights), ROUTER.get(weights.dtype, 0.0))


def _random_like(gm: GraphModule, node: Node, scale: float, generator: torch.Generator) -> Tensor:
    tensor = attr_tensor(gm, node)
    assert tensor is not None
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)


def _run(routing: Routing, logits: Tensor, constants: dict[Node, Tensor]) -> tuple[Tensor, Tensor]:
    """Run the nodes on the CPU and return the chosen experts and their weights."""
    values: dict[Node, Any] = {routing.logits: logits, **constants}
    for node in routing.nodes:
        if node.op == "placeholder":
            values[node] = torch.empty(1, logits.shape[-2], device="meta")
        elif node in routing.dtypes:
            values[node] = torch.empty((), dtype=node.meta["val"].dtype)
        elif node not in values:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            kwargs = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[routing.experts], values[routing.weights]


def _dense(logits: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the weight of every expert [tokens, experts], whatever the order in which they were
    chosen.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    experts, weights = (each.reshape(len(rows), -1) for each in (experts, weights))
    return torch.zeros_like(rows).scatter_add(-1, experts, weights.to(rows.dtype))


def _candidates(routing: Routing, has_bias: bool) -> Iterator[tuple[bool, Options]]:
    """Yield all settings that the nodes' shapes and numbers allow, the simplest first."""
    top_k = int(routing.experts.meta["val"].shape[-1])
    scales = sorted({1.0, *_numbers(routing, aten.mul, aten.div)}, key=lambda scale: scale != 1.0)
    epsilons = sorted({0.0, *_numbers(routing, aten.add)})
    settings = product(
        (True, False), ("softmax", "sigmoid"), scales, epsilons[-1:], _groupings(routing)
    )
    for normalize, scoring, scale, epsilon, grouping in settings:
        options: Options = {
            "top_k": top_k,
            "normalize": normalize,
            "scoring": scoring,
            "scale": scale,
        }
        options |= {"epsilon": epsilon, **grouping}
        yield from ((bias, options) for bias in ((False, True) if has_bias else (False,)))


def _numbers(routing: Routing, *targets: Any) -> set[float]:
    """Return the numbers that tensors are combined with."""
    calls = [node for node in routing.nodes if is_op(node, *targets)]
    return {
        float(value)
        for node in calls
        for value in node.args
        if isinstance(value, int | float) and value
    }


def _groupings(routing: Routing) -> list[Options]:
    """Return the options of groups: none, and those that a view in groups and the choices among
    these tell.
    """
    found: list[Options] = [{}]
    experts = int(routing.logits.meta["val"].shape[-1])
    views = {
        _width(node, -2): None
        for node in routing.nodes
        if is_op(node, aten.view, aten.reshape, aten.unflatten)
    }
    choices = [
        (_width(node.args[0], -1), node.args[1]) for node in routing.nodes if is_op(node, aten.topk)
    ]
    for groups in views:
        if groups is None or groups < 2 or experts % groups:
            continue
        kept = [k for width, k in choices if width == groups]
        within = [k for width, k in choices if width == experts // groups]
        found += [
            {"groups": groups, "top_groups": top, "group_top": best}
            for top in kept
            for best in {1, *within}
            if best
        ]
    return found


def _width(node: Any, dim: int) -> int | None:
    """Return the size of a node's dimension when it is a fixed number."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim < -dim or not isinstance(value.shape[dim], int):
        return None
    return int(value.shape[dim])


def _replace(
    gm: GraphModule, mixture: Node, routing: Routing, has_bias: bool, options: Options
) -> None:
    """Let a mixture read a router op; what it read before is dead when nothing else does."""
    width = routing.logits.meta["val"].shape[-1:]
    biases = (
        [node for node in routing.constants if node.meta["val"].shape == width]
        if has_bias
        else [None]
    )
    names = ("scale", "epsilon", "groups", "top_groups", "group_top")
    defaults = {"groups": 1, "top_groups": 1, "group_top": 1}
    rest = [(defaults | options)[name] for name in names]
    args = (
        routing.logits,
        options["top_k"],
        options["normalize"],
        options["scoring"],
        biases[0],
        *rest,
    )
    router = insert_call(
        gm, mixture, torch.ops.onboard.torch_moe_router.default, *args, like=routing.experts
    )
    weights, experts = (
        insert_call(gm, mixture, operator.getitem, router, index, like=routing.experts)
        for index in (0, 1)
    )
    mixture.update_arg(1, experts)
    mixture.update_arg(2, weights)
    if not has_bias:  # one that decides nothing, as all experts are chosen: checkpoints have it
        leave_unread(gm, [str(node.target) for node in routing.constants])
