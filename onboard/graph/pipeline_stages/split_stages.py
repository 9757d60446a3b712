"""A graph cut down to one pipeline stage: what comes from the stage before is received, what those
behind it read is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.errors import UsageError
from onboard.graph.fx import ancestors, call, nodes_of, placeholders
from onboard.graph.pipeline_stages.stage_of_nodes import staged
from onboard.graph.weight_load.parameters import leave_unread

aten, ops = torch.ops.aten, torch.ops.onboard


@dataclass(frozen=True)
class Split:
    """What has become of a graph."""

    layers: tuple[range, ...]
    """Of each stage."""
    stage: int
    received: int
    sent: int

    @property
    def summary(self) -> str:
        """A line for the log."""
        own = self.layers[self.stage]
        return (
            f"stage {self.stage + 1} of {len(self.layers)} has layers {own.start} to {own.stop - 1},"
            f" receives {self.received} tensors and sends {self.sent}"
        )


def rank_of_stage(stage: int, count: int) -> int:
    """Return the rank that has a stage: the last one is the first rank's, which chooses tokens."""
    return (stage + 1) % count


def stage_of_rank(rank: int, count: int) -> int:
    """Return the stage that a rank has."""
    return (rank - 1) % count


def split(gm: fx.GraphModule, rank: int, count: int) -> Split:
    """Make a graph that of one of `count` stages; parameters that it does not read are not loaded.

    Raises `UsageError` for a model that cannot be cut between its layers.
    """
    _read_sizes_of_inputs(gm)
    graph, stage = staged(gm, count), stage_of_rank(rank, count)
    coming, going = graph.crossing(stage), graph.crossing(stage + 1)
    received = _received(gm, coming, rank_of_stage(stage - 1, count)) if stage else {}
    if stage < count - 1:
        values = [received.get(node, node) for node in going]
        _end_with(gm, values, rank_of_stage(stage + 1, count))
    for node, new in received.items():
        node.replace_all_uses_with(new)
    _leave_unread(gm)
    return Split(graph.layers, stage, len(received), len(going) if stage < count - 1 else 0)


def _read_sizes_of_inputs(gm: fx.GraphModule) -> None:
    """Let sizes be those of the inputs wherever these have them, not of what a stage computes."""
    ids, known = _input_ids(gm), _Sizes(gm)
    for node in nodes_of(gm, aten.sym_size.int):
        if node.args[0] is not ids and (size := known.node(node.meta["val"])) is not None:
            node.replace_all_uses_with(size)


def _received(gm: fx.GraphModule, coming: Sequence[fx.Node], rank: int) -> dict[fx.Node, fx.Node]:
    ids, sizes, found = _input_ids(gm), _Sizes(gm), {}
    for number, node in enumerate(coming):
        value = node.meta["val"]
        shape = list(map(sizes.of, _tensor(node).shape))
        target = ops.receive_from_stage.default
        new = call(gm, node, target, ids, shape, value.dtype, rank, number, like=node)
        new.meta["val"] = value
        found[node] = new
    return found


def _end_with(gm: fx.GraphModule, values: Sequence[fx.Node], rank: int) -> None:
    ids, output = _input_ids(gm), gm.graph.output_node()
    for value in values:
        _tensor(value)
    sent = call(gm, output, ops.send_to_stage.default, ids, list(values), rank, like=output)
    shape = (*ids.meta["val"].shape, 1)
    sent.meta["val"] = values[0].meta["val"].new_empty(shape, dtype=torch.float32)
    output.args = (sent,)


def _input_ids(gm: fx.GraphModule) -> fx.Node:
    return next(node for node in placeholders(gm) if node.target == "input_ids")


def _tensor(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"layers hand on {node.name}, which is no tensor, so they are in one stage",
            hint="Set pp of dist_mapping to 1",
        )
    return value


class _Sizes:
    """Sizes as a step's inputs have them."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._ids = gm, _input_ids(gm)
        self._known: dict[int, fx.Node] = {}

    def node(self, size: int | torch.SymInt) -> fx.Node | None:
        """Return a node that reads a size off the inputs, None where they do not have it."""
        sizes = self._ids.meta["val"].shape
        dim = next((dim for dim, own in enumerate(sizes) if str(own) == str(size)), None)
        if isinstance(size, int) or dim is None:
            return None
        if dim not in self._known:
            new = call(self._gm, self._ids.next, aten.sym_size.int, self._ids, dim, like=self._ids)
            new.meta["val"] = sizes[dim]
            self._known[dim] = new
        return self._known[dim]

    def of(self, size: int | torch.SymInt) -> int | fx.Node:
        """Return what stands for a size in a call."""
        if isinstance(size, int):
            return size
        if (node := self.node(size)) is None:
            raise UsageError(
                f"layers hand on a tensor with a size {size}, which the tokens do not have",
                hint="Set pp of dist_mapping to 1",
            )
        return node


def _leave_unread(gm: fx.GraphModule) -> None:
    """Note what the stage does not read of the model's tensors."""
    live = ancestors([gm.graph.output_node()])
    read = {str(node.target) for node in live if node.op == "get_attr"}
    tensors = gm.state_dict(keep_vars=True)
    kept = {id(tensors[name]) for name in read & tensors.keys()}
    leave_unread(gm, [name for name, tensor in tensors.items() if id(tensor) not in kept])
