"""Linear layers with quantised inputs, and how what is before them quantises these instead."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import Target, arguments, attr_tensor, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.ops.library import declared

_ops = torch.ops.onboard
_EIGHT_BITS = "fused_fp8_linear"


def is_eight_bit_linear(node: Any) -> bool:
    """Tell whether a node is a linear layer that quantises its input, if at all, in eight-bit
    floats.
    """
    return isinstance(node, fx.Node) and declared(node.target).takes_codes == _EIGHT_BITS


def quantising_readers(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return what reads a node, if all of that are linear layers that quantise it alike; else
    nothing.
    """
    readers = list(node.users)
    if not all(map(is_eight_bit_linear, readers)):
        return []
    found = [arguments(reader) for reader in readers]
    if not all(each["quantize"] and each["input"] is node for each in found):
        return []
    same = len({each["quantize"] for each in found}) == 1
    return readers if same and _same_scale(gm, [each["input_scale"] for each in found]) else []


def _same_scale(gm: fx.GraphModule, nodes: Sequence[fx.Node | None]) -> bool:
    first = nodes[0]
    if first is None or all(node is first for node in nodes):
        return all(node is first for node in nodes)
    scales = [attr_tensor(gm, node) for node in nodes]
    known = [scale for scale in scales if scale is not None and not scale.is_meta]
    return len(known) == len(nodes) and all(torch.equal(known[0], each) for each in known)


def quantise_in(
    gm: fx.GraphModule, producer: fx.Node, op: Target, values: Sequence[Any], readers: list[fx.Node]
) -> None:
    """Let `op`, of some values and of how its readers quantise, take the place of a producer; they
    then read its codes. The producer, which nothing reads any more, is erased.
    """
    first, dtype = arguments(readers[0]), producer.meta["val"].dtype
    how = first["quantize"], earlier(producer, first["input_scale"])
    both = insert_call(gm, producer, op, *values, *how, like=producer)
    codes, scales = (
        insert_call(gm, producer, operator.getitem, both, index, like=producer) for index in (0, 1)
    )
    for reader in readers:
        read_codes(gm, reader, codes, scales, dtype)
    gm.graph.erase_node(producer)


def read_codes(
    gm: fx.GraphModule, linear: fx.Node, codes: fx.Node, scales: fx.Node, dtype: torch.dtype
) -> None:
    """Let a linear layer read codes and their scales."""
    values = arguments(linear)
    rest = values["weight"], values["bias"], values["weight_scale"], dtype
    op = _ops.torch_fp8_codes_linear.default
    replace_with(linear, insert_call(gm, linear, op, codes, scales, *rest, like=linear))


def earlier(place: fx.Node, parameter: fx.Node | None) -> fx.Node | None:
    """Move the read of a parameter before `place`; return it."""
    if parameter is not None and place < parameter:
        place.prepend(parameter)
    return parameter
