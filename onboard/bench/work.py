"""The fewest bytes and operations with which a model's step can be done, read off its graph and its
caches.

Weights are counted once a step, an embedding by the rows that are looked up, of a mixture's experts
those that tokens went to; caches by the keys that queries see, states once. Operations are those of
weights and of attention. What is left out (activations, written results, norms) only makes the
floor lower than it could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from onboard.bench.shape import Shape
from onboard.cache.budget import tensor_bytes
from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.fx import arguments, attr_tensor, graph_modules
from onboard.graph.shapes import known_sizes

_GATHER = "gather_logits_before_lm_head"


@dataclass(frozen=True)
class Work:
    """What a step has to do at least."""

    num_bytes: float
    operations: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.num_bytes


@dataclass(frozen=True)
class Experts:
    """A layer's experts."""

    node: str
    count: int
    bytes_each: float
    elements_each: float
    chosen: int
    """Experts of a token."""


@dataclass
class Weights:
    """A model's weights by how often they are read: sizes in bytes and in elements of matrices."""

    dense_bytes: int = 0
    dense_elements: int = 0
    head_bytes: int = 0
    """Read once, applied only to the rows whose logits are wanted."""
    head_elements: int = 0
    row_bytes: int = 0
    """Of embeddings, for each token."""
    experts: list[Experts] = field(default_factory=list)


@dataclass(frozen=True)
class ModelWork:
    """All that the work of a model's steps follows from."""

    weights: Weights
    resources: tuple[CacheResource, ...]
    heads: int
    """Query heads of an attention layer."""

    def decode(self, shape: Shape, hits: Sequence[float]) -> Work:
        """Return a decode step's work at the mean length; `hits`: experts of each layer that tokens
        went to.
        """
        tokens, own = shape.batch, self.weights
        operations = 2 * tokens * (own.dense_elements + own.head_elements + self._expert_elements())
        keys = [self._visible(each, shape.mean_length) for each in self._paged()]
        operations += tokens * sum(
            self._attention(each, n) for each, n in zip(self._paged(), keys, strict=True)
        )
        return Work(
            self._weight_bytes(tokens, hits) + tokens * self.cache_bytes(shape.mean_length),
            operations,
        )

    def prefill(self, shape: Shape, hits: Sequence[float]) -> Work:
        """Return the work of all prompts together, as if their weights were read once."""
        tokens, own = shape.batch * shape.context, self.weights
        operations = 2 * tokens * (own.dense_elements + self._expert_elements())
        operations += 2 * shape.batch * own.head_elements
        for each in self._paged():
            pairs = _pairs(shape.context, each.sliding_window)
            operations += shape.batch * self._attention(each, pairs)
        return Work(
            self._weight_bytes(tokens, hits) + shape.batch * self.cache_bytes(shape.context),
            operations,
        )

    def cache_bytes(self, length: int) -> float:
        """Return what a query reads of a sequence of `length` tokens: the keys that it sees, and
        every state.
        """
        paged = sum(
            self._visible(each, length) * each.bytes_per_page / each.page_size
            for each in self._paged()
        )
        return paged + sum(each.num_bytes(1) for each in self.resources if each.by_sequence)

    def _weight_bytes(self, tokens: int, hits: Sequence[float]) -> float:
        own = self.weights
        experts = sum(each.bytes_each * hit for each, hit in zip(own.experts, hits, strict=True))
        return own.dense_bytes + own.head_bytes + tokens * own.row_bytes + experts

    def _expert_elements(self) -> float:
        return sum(each.elements_each * each.chosen for each in self.weights.experts)

    def _paged(self) -> list[KVPagedResource]:
        return [each for each in self.resources if isinstance(each, KVPagedResource)]

    def _attention(self, cache: KVPagedResource, pairs: float) -> float:
        """Return the operations on one cache: every query head multiplies every key (or value) that
        it sees.
        """
        return 2.0 * max(self.heads, cache.num_kv_heads) * cache.head_dim * pairs

    @staticmethod
    def _visible(cache: KVPagedResource, length: int) -> int:
        return length if cache.sliding_window is None else min(length, cache.sliding_window)


def _pairs(length: int, window: int | None) -> int:
    """Return how many pairs of a query and a key it sees a causal prompt has."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def weights_of(module: nn.Module) -> Weights:
    """Read off a model's graph how often each of its weights is used; a model without a graph: all
    are dense.
    """
    graphs = [gm for _, gm in graph_modules(module)]
    if not graphs:
        parameters = list({id(each): each for each in module.parameters()}.values())
        elements = sum(each.numel() for each in parameters if each.ndim > 1)
        return Weights(dense_bytes=tensor_bytes(parameters), dense_elements=elements)
    weights = Weights()
    for gm in graphs:
        _count(gm, weights)
    return weights


def _count(gm: fx.GraphModule, weights: Weights) -> None:
    mixtures = [node for node in gm.graph.nodes if is_mixture(node)]
    weights.experts.extend(experts_of(gm, node) for node in mixtures)
    of_experts = {id(tensor) for node in mixtures for tensor in _expert_tensors(gm, node)}
    behind_gather = _descendants(node for node in gm.graph.nodes if _name(node).startswith(_GATHER))
    for tensor, nodes in _uses(gm).values():
        if id(tensor) not in of_experts:
            _add(weights, tensor, nodes, behind_gather)


def _add(
    weights: Weights, tensor: torch.Tensor, nodes: list[fx.Node], behind_gather: set[fx.Node]
) -> None:
    """Count a tensor by its uses: a table that rows are looked up in, the head, or a weight of
    every token.
    """
    looked_up = [node for node in nodes if "embedding" in _name(node)]
    applied = [node for node in nodes if node not in looked_up]
    elements = tensor.numel() if tensor.ndim > 1 else 0
    if looked_up:
        weights.row_bytes += tensor.nbytes // max(tensor.shape[0], 1)
    if applied and all(node in behind_gather for node in applied):
        weights.head_bytes += tensor.nbytes
        weights.head_elements += elements
    elif applied:
        weights.dense_bytes += tensor.nbytes
        weights.dense_elements += elements


def _uses(gm: fx.GraphModule) -> dict[int, tuple[torch.Tensor, list[fx.Node]]]:
    """Return every parameter with the nodes that it is an argument of, by the tensor's identity."""
    uses: dict[int, tuple[torch.Tensor, list[fx.Node]]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        tensor = attr_tensor(gm, node)
        if isinstance(tensor, nn.Parameter):
            uses.setdefault(id(tensor), (tensor, []))[1].extend(node.users)
    return uses


def _descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""


def is_mixture(node: fx.Node) -> bool:
    """Whether a node applies chosen experts: an operator with an argument `selected_experts`."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return any(argument.name == "selected_experts" for argument in node.target._schema.arguments)


def _expert_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments that hold the experts' weights: lists of one tensor each, or tensors
    stacked.
    """
    values = [
        value
        for name, value in arguments(node).items()
        if "weight" in name and name != "routing_weights"
    ]
    return [value for value in values if value is not None and value != []]


def _expert_tensors(gm: fx.GraphModule, node: fx.Node) -> list[torch.Tensor]:
    flat = [
        each
        for value in _expert_arguments(node)
        for each in (value if isinstance(value, list | tuple) else [value])
    ]
    return [tensor for each in flat if (tensor := attr_tensor(gm, each)) is not None]


def _elements(gm: fx.GraphModule, node: fx.Node) -> int:
    """Return how many numbers the experts' weights have; of codes, without their scales."""
    values = [value for name, value in arguments(node).items() if name.endswith("_weight")]
    flat = [
        each for value in values for each in (value if isinstance(value, list | tuple) else [value])
    ]
    tensors = [tensor for each in flat if (tensor := attr_tensor(gm, each)) is not None]
    return sum(tensor.numel() * (8 if tensor.dtype == torch.int32 else 1) for tensor in tensors)


def experts_of(gm: Any, node: fx.Node) -> Experts:
    """Return the experts of a graph module's mixture."""
    first = _expert_arguments(node)[0]
    tensors = _expert_tensors(gm, node)
    count = len(first) if isinstance(first, list | tuple) else tensors[0].shape[0]
    sizes = known_sizes(arguments(node)["selected_experts"])
    assert sizes is not None, f"the shapes of {node.name}'s arguments are not known"
    chosen = sizes[-1]
    assert chosen is not None, f"{node.name} chooses more experts in some steps than in others"
    return Experts(
        node=node.name,
        count=count,
        bytes_each=tensor_bytes(tensors) / count,
        elements_each=_elements(gm, node) / count,
        chosen=chosen,
    )
