"""What a generated model file says of how ranks divide its layers: hints of its ops, taken off the
graph as soon as it is exported, and kept by the weight that they speak of.

So all that follows sees the graph that a file without hints has, and a pattern that puts an op in
the place of several loses none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.errors import UsageError
from onboard.graph.fx import arguments, call, hints, is_op, replace_with
from onboard.graph.sharding.cuts import Cut, Entries, everything, joined, nearly_evenly
from onboard.graph.sharding.reshaped_cuts import sizes_of
from onboard.ops.library import declared

KEY = "sharding_hints"
"""Under which a graph's `meta` has `FileHint`s by the name of the weight."""
aten, ops = torch.ops.aten, torch.ops.onboard


@dataclass(frozen=True)
class FileHint:
    """What is said of a linear layer, as `torch_linear_simple` takes it."""

    tp_mode: str
    layer_type: str
    output_sizes: tuple[int, ...] = ()
    tp_min_local_shape: tuple[int, ...] = ()

    def cut(self, size: int, world_size: int) -> Cut | None:
        """Return the cut of a column-wise layer's outputs, block by block; None where they do not
        divide.

        Raises:
            UsageError: the file names other sizes than the layer has.
        """
        sizes = self.output_sizes or (size,)
        least = self.tp_min_local_shape or (1,)
        least = least * len(sizes) if len(least) == 1 else least
        if sum(sizes) != size or len(least) != len(sizes):
            raise UsageError(
                f"a layer ({self.layer_type}) with {size} outputs has output_sizes {list(sizes)} and"
                f" tp_min_local_shape {list(least)} in the model file",
                hint="Mend the file, or set use_hints of detect_sharding to false",
            )
        blocks = [_block(*each, world_size) for each in zip(sizes, least, strict=True)]
        return None if None in blocks else joined([each for each in blocks if each is not None])


def _block(size: int, least: int, world_size: int) -> Cut | None:
    """Return equal runs of at least `least`; where there are more ranks than such runs, several
    have the same.
    """
    if size % world_size == 0 and size // world_size % least == 0:
        return nearly_evenly(size, world_size)
    count = size // least
    if size % least or world_size % count:
        return None
    runs: list[Entries] = [each.copy() for each in nearly_evenly(size, count).entries]
    if count == 1:
        return everything(size, world_size)
    return Cut(size, tuple(runs[rank * count // world_size] for rank in range(world_size)))


def hints_of_file(gm: GraphModule) -> Mapping[str, FileHint]:
    """Return the hints of a graph's weights."""
    found: Mapping[str, FileHint] = gm.meta.get(KEY, {})
    return found


def take_hints(gm: GraphModule) -> None:
    """Replace the ops that say how ranks divide a layer by those that compute the same and say
    nothing; keep what they said of weights.
    """
    said: dict[str, FileHint] = {}
    for node in list(gm.graph.nodes):
        if is_op(node, ops.torch_linear_simple) and hints(node)["tp_mode"] != "unknown":
            if (weight := weight_of(arguments(node)["weight"])) is not None:
                said[weight] = _hint(hints(node))
            _replace_linear(gm, node)
        elif is_op(node, ops.view):
            _replace_view(gm, node)
        elif is_op(node, ops.split_with_sizes):
            values = arguments(node)
            args = (values["x"], values["split_sizes"], values["dim"])
            replace_with(node, call(gm, node, aten.split_with_sizes.default, *args, like=node))
        elif is_op(node, ops.all_reduce):
            replace_with(node, node.args[0])
        elif node.op == "call_function" and declared(node.target).hinted:
            kept = node.kwargs.keys() - {"layer_type", "enable_sharding"}
            node.kwargs = {name: node.kwargs[name] for name in node.kwargs if name in kept}
    if said:
        gm.meta[KEY] = said


def weight_of(node: Node) -> str | None:
    """Return the parameter that a node reads, or reads in another dtype or order; None for what is
    computed of several things.
    """
    while node.op != "get_attr":
        if len(node.all_input_nodes) != 1:
            return None
        [node] = node.all_input_nodes
    return str(node.target)


def _hint(values: Mapping[str, Any]) -> FileHint:
    sizes, least = values["output_sizes"], values["tp_min_local_shape"]
    return FileHint(values["tp_mode"], values["layer_type"], tuple(sizes or ()), tuple(least or ()))


def _replace_linear(gm: GraphModule, node: Node) -> None:
    values = arguments(node)
    args = [values["input"], values["weight"], values["bias"]]
    given = args if values["bias"] is not None else args[:2]
    replace_with(node, call(gm, node, aten.linear.default, *given, like=node))


def _replace_view(gm: GraphModule, node: Node) -> None:
    """Put a view where every tensor of that shape has one: the last dimension is taken apart."""
    source, shape = node.args[:2]
    assert isinstance(source, Node)
    before, behind = sizes_of(source.meta["val"]), sizes_of(node.meta["val"])
    same = before[:-1] == behind[: len(before) - 1]
    is_view = same or source.meta["val"].is_contiguous()
    target = aten.view.default if is_view else aten.reshape.default
    replace_with(node, call(gm, node, target, source, shape, like=node))
