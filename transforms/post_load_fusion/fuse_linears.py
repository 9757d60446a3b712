"""Linear layers with the norm before them, and the gate and residual addition after them, in one
op.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import NO_TRITON, Backend, choose_backend
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, attr_tensor, is_op, nodes_of, only_user
from onboard.graph.post_load_fusion.additions import are_alike, only_addition
from onboard.graph.post_load_fusion.dtype_casts import is_cast
from onboard.graph.post_load_fusion.fused_linears import fuse_linear, fused_linears, replace_fused
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.graph.weight_load.gemm_fusion import LINEARS, write_out
from onboard.ops import has_triton
from onboard.ops.library import declared
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS

_ops = torch.ops.onboard
_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)
_NORMS, _GATES, _BLOCKS = (
    tuple(getattr(_ops, f"{backend}_{name}") for backend in _BACKENDS)
    for name in ("rmsnorm", "silu_and_mul", "fused_swiglu_mlp")
)
_DTYPES = (torch.float16, torch.bfloat16)


class FuseLinearsConfig(TransformConfig):
    """Which back end to use."""

    backend: Backend = "auto"


@register_transform("fuse_linears")
class FuseLinears(GraphTransform[FuseLinearsConfig]):
    """Replace linear layers by `triton_fused_linear` and let it do what stands around them.

    Its kernels read weights at the memory's speed where tokens are few, that is in decode; for many
    it is the library's product. There are kernels for 16-bit types; other layers, and all on other
    back ends, stay as they are. A run with `batch_invariant` needs them for float32, too.
    """

    config_class = FuseLinearsConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each linear layer; a gated feed-forward block has two."""
        if choose_backend(self.config.backend, context, self.key) != "triton":
            return skipped(NO_TRITON)
        dtypes = (*_DTYPES, torch.float32) if context.runtime.batch_invariant else _DTYPES
        for block in nodes_of(gm, *_BLOCKS):
            _split_block(gm, block, dtypes)
        plain = [node for node in nodes_of(gm, *LINEARS) if _fits(gm, node, dtypes)]
        codes = [node for node in gm.graph.nodes if declared(node.target).takes_codes]
        for node in [*plain, *codes]:
            fuse_linear(gm, node, "triton")
        linears = fused_linears(gm, "triton")
        for node in linears:
            node = _take_in_gate(gm, node)
            node = _take_in_sum(gm, node)
            _take_in_norm(gm, node)
        return len(linears)


def _fits(gm: fx.GraphModule, linear: fx.Node, dtypes: Container[torch.dtype]) -> bool:
    """Whether a linear has a kernel: a weight that is at hand, of one of the dtypes, which its
    input has, too.
    """
    values = arguments(linear)
    weight, value = attr_tensor(gm, values["weight"]), values["input"].meta.get("val")
    if weight is None or value is None or not weight.is_contiguous():
        return False
    return weight.dtype == value.dtype and weight.dtype in dtypes


def _split_block(gm: fx.GraphModule, block: fx.Node, dtypes: Container[torch.dtype]) -> None:
    """Write a gated feed-forward block out as two linears and what is between them, if there are
    kernels for it.
    """
    values = arguments(block)
    weight = attr_tensor(gm, values["gate_up_weight"])
    if (
        weight is None
        or weight.dtype not in dtypes
        or values["activation"] not in KERNEL_ACTIVATIONS
    ):
        return
    write_out(gm, block, _ops.triton_silu_and_mul.default)


def _take_in_gate(gm: fx.GraphModule, linear: fx.Node) -> fx.Node:
    """Let a linear activate its first half and multiply it with the second, if all that reads it is
    that.
    """
    user = only_user(linear)
    if (
        user is None
        or not is_op(user, *_GATES)
        or arguments(user)["activation"] not in KERNEL_ACTIVATIONS
    ):
        return linear
    return replace_fused(
        gm, linear, user, arguments(linear) | {"activation": arguments(user)["activation"]}
    )


def _take_in_sum(gm: fx.GraphModule, linear: fx.Node) -> fx.Node:
    """Let a linear add what is added to it, if that has its shape and dtype and nothing else reads
    the linear.
    """
    found = only_addition(linear)
    if found is None:
        return linear
    return replace_fused(gm, linear, found.total, arguments(linear) | {"residual": found.other})


def _take_in_norm(gm: fx.GraphModule, linear: fx.Node) -> None:
    """Let a linear normalise its input, if nothing else reads the norm, whose weight has the dtype
    of its input.

    A norm of a wider sum, rounded, stays: it is fused with the sum, and that saves more.
    """
    norm = arguments(linear)["input"]
    if not is_op(norm, *_NORMS) or only_user(norm) is None:
        return
    values = arguments(norm)
    if is_cast(values["input"]):
        return
    weight = attr_tensor(gm, values["weight"])
    if (
        weight is None
        or not are_alike(norm, values["input"])
        or weight.dtype != values["input"].meta["val"].dtype
    ):
        return
    taken = {"input": values["input"], "norm_weight": values["weight"], "eps": values["eps"]}
    replace_fused(gm, linear, linear, arguments(linear) | taken)
