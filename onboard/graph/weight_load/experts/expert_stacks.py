"""The weights of a mixture's experts in one tensor a projection: `torch_moe` becomes
`torch_moe_fused`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from os.path import commonprefix
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import ancestors, arguments, attr_tensor, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.post_load_fusion.constants import evaluate
from onboard.graph.weight_load.gemm_fusion import private_parameters
from onboard.graph.weight_load.parameters import (
    ParameterNames,
    delete_parameter,
    set_parameter,
    stack_parameters,
)

_LISTS = ("w3_weight", "w1_weight", "w2_weight", "w3_bias", "w1_bias", "w2_bias")
_STACKS = {"w3_w1_stacked_weight": ("w3_weight", "w1_weight"), "w2_stacked_weight": ("w2_weight",)}
_BIASES = {"w3_w1_stacked_bias": ("w3_bias", "w1_bias"), "w2_stacked_bias": ("w2_bias",)}


@dataclass(frozen=True)
class _Stack:
    """One stacked tensor in the making: which list elements each expert's entry is made of."""

    name: str
    groups: list[list[Node]]

    def nodes(self) -> list[Node]:
        return [node for group in self.groups for node in group]


def stack_experts(gm: GraphModule) -> int:
    """Stack the experts whose weights are parameters of their own; return how many mixtures have
    theirs stacked now.

    Before `load_weights` only the plan changes: each weight is then read straight into its place.
    """
    private = private_parameters(gm)
    mixtures = [
        (node, stacks)
        for node in nodes_of(gm, torch.ops.onboard.torch_moe)
        if (stacks := _stacks(node))
    ]
    mixtures = [
        (node, stacks)
        for node, stacks in mixtures
        if all(_are_parameters(gm, s, private) for s in stacks)
    ]
    for node, stacks in mixtures:
        _fuse(gm, node, {stack.name: _stack(gm, stack) for stack in stacks})
        free(gm, {each for stack in stacks for each in stack.nodes()})
    return len(mixtures)


def fold_experts(gm: GraphModule) -> int:
    """Stack the experts whose weights are computed from loaded parameters (slices of a stack);
    return how many.

    The parameters that nothing reads any more are freed, so that the peak is one mixture's weights
    above the total.
    """
    folded = 0
    for node in nodes_of(gm, torch.ops.onboard.torch_moe):
        stacks = _stacks(node)
        sources = ancestors([each for stack in stacks for each in stack.nodes()])
        if not stacks or any(_is_unknown(gm, source) for source in sources):
            continue
        _fuse(gm, node, {stack.name: _computed(gm, stack) for stack in stacks})
        free(gm, sources)
        folded += 1
    return folded


def _stacks(node: Node) -> list[_Stack]:
    """Return the stacks that a `torch_moe` needs; none when its lists are not what all of them want
    to be.
    """
    values = arguments(node)
    lists = {name: list(values[name] or []) for name in _LISTS}
    experts = len(lists["w1_weight"])
    wanted = {
        name: [part for part in parts if lists[part]] for name, parts in (_STACKS | _BIASES).items()
    }
    both = len(lists["w3_bias"]) == len(lists["w1_bias"]) or not values["is_gated_mlp"]
    if (
        not experts
        or not both
        or any(len(lists[part]) != experts for parts in wanted.values() for part in parts)
    ):
        return []
    return [
        _Stack(name, [list(group) for group in zip(*(lists[part] for part in parts), strict=True)])
        for name, parts in wanted.items()
        if parts
    ]


def _are_parameters(gm: GraphModule, stack: _Stack, private: set[str]) -> bool:
    """Whether a stack's parts are private parameters, alike from expert to expert."""
    if any(node.op != "get_attr" or str(node.target) not in private for node in stack.nodes()):
        return False
    forms = {
        tuple(_form(gm.get_parameter(str(node.target))) for node in group) for group in stack.groups
    }
    return len(forms) == 1


def _form(parameter: nn.Parameter) -> tuple[Any, ...]:
    return tuple(parameter.shape), parameter.dtype


def _stack(gm: GraphModule, stack: _Stack) -> str:
    names = [[str(node.target) for node in group] for group in stack.groups]
    return stack_parameters(
        gm, _stacked_name(gm, stack.name, [name for group in names for name in group]), names
    )


def _stacked_name(gm: GraphModule, name: str, parts: Sequence[str]) -> str:
    """Return a free name under the path that all parts share."""
    path = commonprefix([part.split(".")[:-1] for part in parts])
    names = (".".join([*path, name + "_joined" * times]) for times in count())
    return next(each for each in names if each not in ParameterNames(gm))


def _is_unknown(gm: GraphModule, node: Node) -> bool:
    """Whether a node is neither a loaded tensor nor computed."""
    if node.op == "get_attr":
        tensor = attr_tensor(gm, node)
        return tensor is None or tensor.is_meta
    return node.op != "call_function"


@torch.no_grad()
def _computed(gm: GraphModule, stack: _Stack) -> str:
    nodes = stack.nodes()
    values = evaluate(gm, sorted(ancestors(nodes)))
    first = [values[node] for node in stack.groups[0]]
    rows = sum(len(value) for value in first)
    whole = first[0].new_empty((len(stack.groups), rows, *first[0].shape[1:]))
    for entry, group in zip(whole, stack.groups, strict=True):
        torch.cat([values[node] for node in group], out=entry)
    sources = [str(node.target) for node in ancestors(nodes) if node.op == "get_attr"]
    name = _stacked_name(gm, stack.name, sources)
    set_parameter(gm, name, nn.Parameter(whole, requires_grad=False))
    return name


def _fuse(gm: GraphModule, node: Node, stacks: dict[str, str]) -> None:
    """Put `torch_moe_fused` in a mixture's place, which reads the parameters `stacks`, by argument
    name.
    """
    values = arguments(node)
    read = {
        name: read_parameter(gm, node, stacks[name]) if name in stacks else None
        for name in (*_STACKS, *_BIASES)
    }
    tensors = [values[name] for name in ("x", "selected_experts", "routing_weights")]
    weights = [read[name] for name in _STACKS]
    caps = [values[name] for name in ("gate_cap", "up_cap")]
    rest = [values[name] for name in ("limit", "alpha", "up_offset")] + (caps if any(caps) else [])
    op = torch.ops.onboard.torch_moe_fused.default
    args = (
        *tensors,
        *weights,
        values["is_gated_mlp"],
        values["act_fn"],
        *(read[name] for name in _BIASES),
        *rest,
    )
    replace_with(node, insert_call(gm, node, op, *args, like=node))


def free(gm: GraphModule, sources: Iterable[Node]) -> None:
    """Erase computations that nothing uses any more, and delete the parameters that only these
    read.
    """
    dead = []
    for source in sorted(sources, reverse=True):
        if not source.users:
            gm.graph.erase_node(source)
            dead.append(source)
    read = {str(node.target) for node in gm.graph.find_nodes(op="get_attr", sort=False)}
    for name in {str(node.target) for node in dead if node.op == "get_attr"} - read:
        if name in ParameterNames(gm):
            delete_parameter(gm, name)
