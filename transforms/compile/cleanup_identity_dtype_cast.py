"""Remove casts to the dtype that a tensor already has."""

from __future__ import annotations

import torch
from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform

_CASTS = (
    torch.ops.aten.to.dtype,
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)
_PRESERVING = (None, torch.preserve_format)


@register_transform("cleanup_identity_dtype_cast")
class CleanupIdentityDtypeCast(BaseTransform[TransformConfig]):
    """Remove `aten.to.dtype`, `aten._to_copy` and `prims.convert_element_type` that change nothing observable."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each cast removed; the shapes tell the dtypes."""
        assert isinstance(gm, fx.GraphModule)
        casts = [node for node in nodes_of(gm, *_CASTS) if _is_identity(node)]
        for node in casts:
            replace_with(node, node.all_input_nodes[0])
        return gm, TransformInfo(num_matches=len(casts), is_clean=not casts, has_valid_shapes=True)


def _is_identity(node: fx.Node) -> bool:
    values = arguments(node)
    source = node.all_input_nodes[0].meta.get("val")
    return (
        isinstance(source, torch.Tensor)
        and values["dtype"] in (None, source.dtype)
        and values.get("layout") in (None, source.layout)
        and values.get("device") in (None, source.device)
        and values.get("memory_format") in _PRESERVING
        and not values.get("copy")
        and not values.get("pin_memory")
    )
