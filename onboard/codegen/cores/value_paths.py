"""Through which nodes of a recorded forward the values of tokens go: sizes and dtypes of a tensor are
none of its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

_SIZES = frozenset(
    ("size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point", "get_device")
    + ("zeros_like", "ones_like", "empty_like", "finfo", "iinfo", "len")
    + ("new_zeros", "new_ones", "new_empty")
)
_ATTRIBUTES = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda"))
_LIKE = frozenset(("full_like", "new_full", "new_tensor"))
_SHAPED_LIKE = frozenset(("type_as", "to", "type", "expand_as", "view_as", "reshape_as"))


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls, "" for other nodes."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).strip("_")
    return ""


def is_in_place(method: str) -> bool:
    """Whether a method of tensors, by its name, writes into the tensor."""
    usual = method.endswith("_") and not method.endswith("__")
    return usual or (method.startswith("__i") and method not in ("__invert__", "__index__"))


def value_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values go into those of `node`."""
    name = name_of(node)
    if name in _SIZES or (name == "getattr" and node.args[1] in _ATTRIBUTES):
        return []
    if name in _LIKE:
        return [each for each in node.all_input_nodes if each is not node.args[0]]
    if name in _SHAPED_LIKE:
        return [each for each in node.all_input_nodes if each is node.args[0]]
    return node.all_input_nodes


def reached(gm: fx.GraphModule, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose values depend on those of `sources`, and these."""
    found = set(sources)
    for node in gm.graph.nodes:
        if node.op != "output" and any(each in found for each in value_inputs(node)):
            found.add(node)
    return found


def content(gm: fx.GraphModule, runs: Sequence[tuple[int, dict[fx.Node, Any]]]) -> set[fx.Node]:
    """Return the nodes that depend on the tokens: on inputs that differ between a batch's texts.

    `runs` are batch sizes, no two of them equal, and the values of all nodes.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return reached(gm, [node for node in inputs if _differs(node, runs)])


def _differs(node: fx.Node, runs: Sequence[tuple[int, dict[fx.Node, Any]]]) -> bool:
    leaves = [tree_leaves(values[node]) for _, values in runs]
    batches = [batch for batch, _ in runs]
    return any(
        _rows_differ(tensors, batches)
        for tensors in zip(*leaves, strict=True)
        if all(isinstance(each, torch.Tensor) for each in tensors)
    )


def _rows_differ(tensors: Sequence[torch.Tensor], batches: Sequence[int]) -> bool:
    for axis, sizes in enumerate(zip(*(each.shape for each in tensors), strict=False)):
        divided = all(size % batch == 0 for size, batch in zip(sizes, batches, strict=True))
        if divided and len(set(sizes)) > 1:
            moved = tensors[-1].movedim(axis, 0)
            rows = moved.reshape(batches[-1], -1, *moved.shape[1:])
            if not all(torch.equal(rows[0], row) for row in rows):
                return True
    return False
