"""Changes of dtype."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import fx

from onboard.graph.fx import arguments, is_op, nodes_of, replace_with

_CASTS = (
    torch.ops.aten.to.dtype,
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)


def is_cast(node: Any) -> TypeGuard[fx.Node]:
    """Whether a node is a copy that changes nothing but the dtype."""
    if not is_op(node, torch.ops.aten.to.dtype, torch.ops.aten._to_copy) or len(node.args) > 2:
        return False
    return not {key for key, value in node.kwargs.items() if value is not None} - {"dtype"}


def remove_identity_casts(gm: fx.GraphModule) -> int:
    """Remove casts to the dtype that a tensor already has, as far as dtypes are known; return how
    many.
    """
    casts = [node for node in nodes_of(gm, *_CASTS) if _is_identity(node)]
    for node in casts:
        replace_with(node, node.all_input_nodes[0])
    return len(casts)


def _is_identity(node: fx.Node) -> bool:
    values = arguments(node)
    source = node.all_input_nodes[0].meta.get("val")
    return (
        isinstance(source, torch.Tensor)
        and values["dtype"] in (None, source.dtype)
        and values.get("layout") in (None, source.layout)
        and values.get("device") in (None, source.device)
        and values.get("memory_format") in (None, torch.preserve_format)
        and not values.get("copy")
        and not values.get("pin_memory")
    )
