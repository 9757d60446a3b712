"""Squared ReLUs that write four-bit floats for the linear layer behind them."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import is_op, nodes_of, only_user
from onboard.graph.post_load_fusion.nvfp4_readers import NVFP4Readers
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_ops, aten = torch.ops.onboard, torch.ops.aten
_SQUARES = (aten.square, aten.pow.Tensor_Scalar, aten.mul.Tensor)


@register_transform("fuse_relu2_quant_nvfp4")
class FuseReLU2QuantNVFP4(GraphTransform[TransformConfig]):
    """Let relu(x) ** 2 write NVFP4 where all that reads it is linear layers whose checkpoint has one
    scale for their inputs. There are references alone, for the numbers of GPUs that multiply NVFP4.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each square."""
        readers, matches = NVFP4Readers(gm, context), 0
        for square in nodes_of(gm, *_SQUARES):
            if (source := _squared_relu(square)) is not None:
                op = _ops.torch_relu2_quant_nvfp4.default
                matches += readers.quantise(square, op, (source,))
        return matches


def _squared_relu(square: fx.Node) -> fx.Node | None:
    """Return x of relu(x) ** 2, however it is squared."""
    relu = square.args[0]
    if not is_op(relu, aten.relu) or only_user(relu) is not square:  # type: ignore[arg-type]
        return None
    squared = is_op(square, aten.square) or square.args[1] in (relu, 2, 2.0)
    source = relu.args[0]  # type: ignore[union-attr]
    return source if squared and isinstance(source, fx.Node) else None
