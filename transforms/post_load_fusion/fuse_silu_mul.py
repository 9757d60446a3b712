"""silu(gate) * up as one op, where gate and up are the halves of one tensor."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import Backend, choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.codes import quantise_in, quantising_readers
from onboard.graph.post_load_fusion.slices import Slice, slice_of, width
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.ops import has_triton
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS

aten = torch.ops.aten
_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)
_PRODUCTS = tuple(getattr(torch.ops.onboard, f"{backend}_silu_and_mul") for backend in _BACKENDS)


class FuseSiluMulConfig(TransformConfig):
    """Which back end to use."""

    backend: Backend = "flashinfer"
    """trtllm: the product is also quantised, where all that reads it are linear layers that quantise
    it alike, in eight-bit floats; one token's, too.
    """


@register_transform("fuse_silu_mul")
class FuseSiluMul(GraphTransform[FuseSiluMulConfig]):
    """Replace `silu(first half of x) * second half of x` by `silu_and_mul(x)`, however the halves
    are taken.
    """

    config_class = FuseSiluMulConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each product, and one for each that is quantised."""
        found = [
            (node, whole)
            for node in nodes_of(gm, aten.mul.Tensor)
            if (whole := _gated(node)) is not None
        ]
        if found:
            op = fused_op(choose_backend(self.config.backend, context, self.key), "silu_and_mul")
            for node, whole in found:
                replace_with(node, insert_call(gm, node, op, whole, like=node))
        return len(found) + self._quantise(gm, context)

    def _quantise(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Let products write codes and scales, if that was asked for; return how many do."""
        if self.config.backend != "trtllm":
            return 0
        matches = 0
        for node in nodes_of(gm, *_PRODUCTS):
            readers, values = quantising_readers(gm, node), arguments(node)
            if readers and values["activation"] in KERNEL_ACTIVATIONS:
                best = choose_backend("auto", context, self.key)
                op = fused_op(best, "silu_and_mul_quant_fp8")
                quantise_in(gm, node, op, (values["x"], values["activation"]), readers)
                matches += 1
        return matches


def _gated(product: fx.Node) -> fx.Node | None:
    """Return the tensor whose halves are multiplied, the first one through silu."""
    for activated, up in (product.args[:2], product.args[1::-1]):
        if (
            isinstance(activated, fx.Node)
            and is_op(activated, aten.silu)
            and only_user(activated) is product
        ):
            first, second = slice_of(activated.args[0]), slice_of(up)
            if first and second and first.whole is second.whole and _are_halves(first, second):
                return first.whole
    return None


def _are_halves(first: Slice, second: Slice) -> bool:
    return (
        first.start == 0
        and first.stop == second.start
        and 2 * first.stop == second.stop == width(first.whole)
    )
