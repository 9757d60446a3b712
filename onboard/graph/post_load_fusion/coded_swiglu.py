"""Gated feed-forward blocks whose linear layers have codes, found and replaced by one op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.transform import GraphTransform, TransformConfig
from onboard.graph.weight_load.gemm_fusion import private_parameters
from onboard.graph.weight_load.parameters import ParameterNames, join_parameters, joined_name
from onboard.ops import has_triton
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS

_ops, aten = torch.ops.onboard, torch.ops.aten
_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)
_GATES = tuple(getattr(_ops, f"{backend}_silu_and_mul") for backend in _BACKENDS)


class Block(NamedTuple):
    """The linear layers of a block: one for gate and up, or one each, and the last one."""

    first: list[fx.Node]
    gate: fx.Node
    down: fx.Node
    activation: str


class FuseCodedSwiGLU(GraphTransform[TransformConfig]):
    """Replace gated feed-forward blocks by one op; the weights of gate and up are joined where they
    are not yet.
    """

    linear: ClassVar[Any]
    """The op that ends a block."""
    fused: ClassVar[str]
    """The name of the block's op, without its back end."""
    tensors: ClassVar[tuple[str, ...]]
    """Arguments of its linear layers that have their outputs first."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each block."""
        found = [self._block_before(gm, down) for down in nodes_of(gm, self.linear)]
        blocks = [block for block in found if block is not None]
        for block in blocks:
            best = choose_backend("auto", context, self.key)
            known = block.activation in KERNEL_ACTIVATIONS
            self._fuse(gm, block, fused_op(best if known else "torch", self.fused))
        return len(blocks)

    def is_linear(self, node: Any) -> bool:
        """Tell whether a node may be a block's first linear layer, or one of two."""
        return is_op(node, self.linear)

    def are_alike(self, linears: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether one op can have all linear layers of a block, by their arguments."""
        return True

    def can_be_joined(self, linears: Sequence[fx.Node], rows: int) -> bool:
        """Tell whether two layers with `rows` outputs each can be one, by their codes."""
        return True

    def _block_before(self, gm: fx.GraphModule, down: fx.Node) -> Block | None:
        """Return the block that ends with a linear layer."""
        gate = arguments(down)["input"]
        if only_user(gate) is None:
            return None
        block = self._joined(gate, down) or self._apart(gm, gate, down)
        if block is None:
            return None
        return block if self.are_alike([*map(arguments, (*block.first, down))]) else None

    def _joined(self, gate: fx.Node, down: fx.Node) -> Block | None:
        if not is_op(gate, *_GATES):
            return None
        values = arguments(gate)
        first = values["x"]
        is_one = self.is_linear(first) and only_user(first) is gate
        return Block([first], gate, down, values["activation"]) if is_one else None

    def _apart(self, gm: fx.GraphModule, gate: fx.Node, down: fx.Node) -> Block | None:
        """Return a block with silu(gate(x)) * up(x), whose weights can be joined."""
        if not is_op(gate, aten.mul.Tensor):
            return None
        for activated, up in (gate.args[:2], gate.args[1::-1]):
            if is_op(activated, aten.silu) and self.is_linear(up):
                first = [activated.args[0], up]  # type: ignore[union-attr]
                if self.is_linear(first[0]) and self._may_join(gm, first):  # type: ignore[arg-type]
                    return Block(first, gate, down, "silu")  # type: ignore[arg-type]
        return None

    def _may_join(self, gm: fx.GraphModule, linears: list[fx.Node]) -> bool:
        found, private = [arguments(linear) for linear in linears], private_parameters(gm)
        kinds = [[kind for kind in self.tensors if each[kind] is not None] for each in found]
        names = {str(each[kind].target) for each in found for kind in kinds[0] if each[kind]}
        rows = [each["weight"].meta["val"].shape[0] for each in found]
        return (
            names <= private
            and kinds[0] == kinds[1]
            and all(only_user(linear) is not None for linear in linears)
            and found[0]["input"] is found[1]["input"]
            and not any(each["bias"] for each in found)
            and rows[0] == rows[1]
            and len({linear.target for linear in linears}) == 1
            and self.can_be_joined(linears, rows[0])
        )

    def _fuse(self, gm: fx.GraphModule, block: Block, op: Any) -> None:
        first, down = [arguments(linear) for linear in block.first], arguments(block.down)
        values = {**first[0], "activation": block.activation}
        values |= {f"down_{name}": value for name, value in down.items()}
        values |= {f"gate_up_{name}": _one(gm, block, first, name) for name in self.tensors}
        values["gate_up_bias"] = first[0]["bias"]
        args = [values[each.name] for each in op._schema.arguments]
        replace_with(block.down, insert_call(gm, block.down, op, *args, like=block.down))


def _one(
    gm: fx.GraphModule, block: Block, linears: Sequence[Mapping[str, Any]], kind: str
) -> fx.Node | None:
    """Return what reads the parameters of a kind as one, joined if there are two."""
    nodes: list[fx.Node] = [each[kind] for each in linears]
    if len(nodes) == 1 or nodes[0] is None:
        return nodes[0]
    names = [str(node.target) for node in nodes]
    name = join_parameters(gm, joined_name(names, ParameterNames(gm)), names)
    for node, linear in zip(nodes, block.first, strict=True):
        node.target = name  # of linear layers that nothing reads any more
        linear.meta.pop("val", None)
    return read_parameter(gm, block.down, name)
