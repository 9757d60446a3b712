"""The gated feed-forward block with eight-bit weights as one op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.post_load_fusion.codes import is_eight_bit_linear
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.graph.weight_load.gemm_fusion import private_parameters
from onboard.graph.weight_load.parameters import ParameterNames, join_parameters, joined_name
from onboard.ops import has_triton
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.fp8_linear import BLOCK

_ops, aten = torch.ops.onboard, torch.ops.aten
_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)
_GATES = tuple(getattr(_ops, f"{backend}_silu_and_mul") for backend in _BACKENDS)
_LINEAR = _ops.torch_finegrained_fp8_linear


class _Block(NamedTuple):
    """The linear layers of a block: one for gate and up, or one each, and the last one."""

    first: list[fx.Node]
    gate: fx.Node
    down: fx.Node
    activation: str


@register_transform("fuse_finegrained_fp8_swiglu")
class FuseFinegrainedFP8SwiGLU(GraphTransform[TransformConfig]):
    """Replace a gated feed-forward block whose weights are eight-bit floats with scales of blocks by
    one op; the weights of gate and up are joined where they are not yet. These may have scales of
    rows, as blocks are that are as wide as the weight.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each block."""
        blocks = [
            block
            for down in nodes_of(gm, _LINEAR)
            if (block := _block_before(gm, down)) is not None
        ]
        for block in blocks:
            best = choose_backend("auto", context, self.key)
            known = block.activation in KERNEL_ACTIVATIONS
            op = fused_op(best if known else "torch", "fused_finegrained_fp8_swiglu_mlp")
            _fuse(gm, block, op)
        return len(blocks)


def _block_before(gm: fx.GraphModule, down: fx.Node) -> _Block | None:
    """Return the block that ends with a linear layer."""
    gate = arguments(down)["input"]
    if only_user(gate) is None:
        return None
    block = _joined(gate, down) or _apart(gm, gate, down)
    if block is None:
        return None
    hows = {arguments(linear)["quantize"] for linear in (*block.first, down)}
    return block if len(hows) == 1 and "tensor" not in hows else None


def _joined(gate: fx.Node, down: fx.Node) -> _Block | None:
    if not is_op(gate, *_GATES):
        return None
    values = arguments(gate)
    first = values["x"]
    is_one = is_eight_bit_linear(first) and only_user(first) is gate
    return _Block([first], gate, down, values["activation"]) if is_one else None


def _apart(gm: fx.GraphModule, gate: fx.Node, down: fx.Node) -> _Block | None:
    """Return a block with silu(gate(x)) * up(x), whose weights can be joined."""
    if not is_op(gate, aten.mul.Tensor):
        return None
    for activated, up in (gate.args[:2], gate.args[1::-1]):
        if is_op(activated, aten.silu) and is_eight_bit_linear(up):
            first = [activated.args[0], up]  # type: ignore[union-attr]
            if is_eight_bit_linear(first[0]) and _can_be_joined(gm, first):  # type: ignore[arg-type]
                return _Block(first, gate, down, "silu")  # type: ignore[arg-type]
    return None


def _can_be_joined(gm: fx.GraphModule, linears: list[fx.Node]) -> bool:
    found, private = [arguments(linear) for linear in linears], private_parameters(gm)
    names = {str(each[kind].target) for each in found for kind in ("weight", "weight_scale")}
    rows = [each["weight"].meta["val"].shape[0] for each in found]
    return (
        names <= private
        and all(only_user(linear) is not None for linear in linears)
        and found[0]["input"] is found[1]["input"]
        and not any(each["bias"] for each in found)
        and rows[0] == rows[1]
        and len({linear.target for linear in linears}) == 1
        and (rows[0] % BLOCK == 0 or not is_op(linears[0], _LINEAR))
    )


def _fuse(gm: fx.GraphModule, block: _Block, op: Any) -> None:
    first, down = [arguments(linear) for linear in block.first], arguments(block.down)
    weight, scale = (_one(gm, block, first, kind) for kind in ("weight", "weight_scale"))
    new = insert_call(
        gm, block.down, op, first[0]["input"], weight, down["weight"], scale, down["weight_scale"],
        first[0]["bias"], down["bias"], block.activation, down["quantize"], like=block.down,
    )  # fmt: skip
    replace_with(block.down, new)


def _one(
    gm: fx.GraphModule, block: _Block, linears: Sequence[Mapping[str, Any]], kind: str
) -> fx.Node:
    """Return what reads the parameters of a kind as one, joined if there are two."""
    nodes: list[fx.Node] = [each[kind] for each in linears]
    if len(nodes) == 1:
        return nodes[0]
    names = [str(node.target) for node in nodes]
    name = join_parameters(gm, joined_name(names, ParameterNames(gm)), names)
    for node, linear in zip(nodes, block.first, strict=True):
        node.target = name  # of linear layers that nothing reads any more
        linear.meta.pop("val", None)
    return read_parameter(gm, block.down, name)
