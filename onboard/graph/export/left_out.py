"""What a whole model takes whose graph has only a few layers of each kind and a few experts of each
mixture.

A layer that was left out takes what the last one of its kind in the graph does, since the export
found it to be a copy of that. The activations of a step are the graph's own: each layer hands one
value on, to the next layer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.graph.export.layer_kinds import PATTERNS, ExpertStack, Repeated, Stack, UnlikeError
from onboard.graph.export.stamp import layer_of, stamp_experts
from onboard.graph.weight_load.parameters import set_parameter


@dataclass(frozen=True)
class Occurrences:
    """How often what is in a graph once is in the whole model."""

    stack: Stack | None
    stacks: tuple[ExpertStack, ...] = ()

    @classmethod
    def beside(cls, left_out: Repeated | None) -> Occurrences:
        """Return what stands for what was left out."""
        return cls(left_out.stack, left_out.stacks) if left_out else cls(None)

    def of_layer(self, index: int | None) -> int:
        """Return how many layers an exported one stands for; None is what is outside of all
        layers.
        """
        if self.stack is None or index is None:
            return 1
        assert index in self.stack.exported, f"layer {index} was not exported"
        same = [i for i in self.stack.exported if self.stack.kinds[i] == self.stack.kinds[index]]
        left_out = self.stack.kinds.count(self.stack.kinds[index]) - len(same)
        return 1 + (left_out if index == same[-1] else 0)

    def of_tensor(self, name: str) -> int:
        """Return how many tensors of the whole model one of the graph, by its name, stands for."""
        return self.of_layer(self.stack.index(name) if self.stack else None)

    def of_rows(self, name: str) -> int:
        """Return how many entries of such tensors one entry of the graph's tensor stands for."""
        owner = name.rpartition(".")[0]
        times = (each.experts // each.kept for each in self.stacks if each.name == owner)
        return self.of_tensor(name) * next(times, 1)

    def of_caches(self, gm: fx.GraphModule, cache: CachedSequenceInterface) -> dict[str, int]:
        """Return how many caches of the whole model each cache of the graph stands for."""
        layers: dict[str, set[int | None]] = {name: set() for name in cache.resources}
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.target in layers:
                layers[node.target] = {
                    layer_of(user, self.stack) if self.stack else None for user in node.users
                }
        if shared := [name for name, users in layers.items() if len(users) != 1]:
            raise UnlikeError(f"{shared[0]} is not the cache of one layer")
        return {name: self.of_layer(*users) for name, users in layers.items()}

    def check(self, gm: fx.GraphModule) -> None:
        """Raise `UnlikeError` unless transforms left layers of a kind alike."""
        for indices in self._copied():
            *_, one, other = (_tensors(gm, self.stack.layer(index)) for index in indices)  # type: ignore[union-attr]
            if one != other:
                raise UnlikeError(
                    f"layers {indices[-2]} and {indices[-1]} are of one kind and keep different tensors"
                )

    def _copied(self) -> Iterator[list[int]]:
        """Yield the exported layers of each kind of which others are left out."""
        for kind in dict.fromkeys(self.stack.kinds if self.stack else ()):
            assert self.stack is not None
            same = [index for index in self.stack.exported if self.stack.kinds[index] == kind]
            if self.stack.kinds.count(kind) > PATTERNS:
                yield same


def _tensors(gm: fx.GraphModule, layer: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of a layer's tensors by their names in it."""
    module = gm.get_submodule(layer)
    return {
        name: (each.shape, each.dtype)
        for name, each in [*module.named_parameters(), *module.named_buffers()]
    }


def add_experts(gm: fx.GraphModule, left_out: Repeated) -> None:
    """Put all experts of the mixtures in a graph into it, where ranks divide their number: weights
    on the meta device, like those of the last expert there.
    """
    exported, present = left_out.exported_experts, {name for name, _ in gm.named_modules()}
    lists = [item for item in left_out.experts if item.name in present]
    for item in lists:
        last = gm.get_submodule(f"{item.name}.{exported - 1}")
        for index in range(exported, item.experts):
            for name, each in last.named_parameters():
                own = nn.Parameter(torch.empty_like(each), requires_grad=False)
                set_parameter(gm, f"{item.name}.{index}.{name}", own)
    stamp_experts(gm, lists, exported)
    gm.recompile()


def restore_experts(gm: fx.GraphModule, left_out: Repeated) -> None:
    """Give the stacked weights of experts, which are on the meta device, the size that those of all
    of them have.

    Raises `UnlikeError` for experts of a list whose weights are not stacked.
    """
    lists = {item.name: item.experts for item in left_out.experts}
    stacks = {item.name: item.experts // item.kept for item in left_out.stacks}
    for name, parameter in list(gm.named_parameters()):
        owner = name.rpartition(".")[0]
        experts = lists.get(owner)
        if owner in stacks:
            _set_rows(gm, name, parameter, parameter.shape[0] * stacks[owner])
        elif experts is not None and parameter.shape[0] == left_out.exported_experts:
            _set_rows(gm, name, parameter, experts)
        elif experts is not None or any(name.startswith(f"{item}.") for item in lists):
            raise UnlikeError(f"{name} is the weight of one expert")


def _set_rows(gm: fx.GraphModule, name: str, parameter: nn.Parameter, rows: int) -> None:
    whole = parameter.new_empty((rows, *parameter.shape[1:]))
    set_parameter(gm, name, nn.Parameter(whole, requires_grad=False))
