"""Recognise the token before each, written as a zero in front of the text without its last token."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, replace_with
from onboard.graph.patterns import aten
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform

_ZEROS = (aten.new_zeros, aten.zeros, aten.zeros_like)
_OF_ZERO = (aten.to, aten._to_copy, aten.view, aten.reshape, aten.expand, aten.unsqueeze, aten.mul, aten.linear)
"""What makes zeros of zeros, whatever the other arguments are, except a linear's bias."""


@register_transform("match_token_shift")
class MatchTokenShift(BaseTransform[TransformConfig]):
    """Replace cat([zeros [batch, 1, channels], x[:, :-1]], dim=1) by `torch_token_shift`."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Replace each such expression."""
        assert isinstance(gm, fx.GraphModule)
        matches = 0
        for node in nodes_of(gm, aten.cat):
            if (source := _shifted(node)) is not None:
                replace_with(node, call(gm, node, torch.ops.onboard.torch_token_shift.default, source, like=node))
                matches += 1
        if matches:
            gm.graph.eliminate_dead_code()
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=not matches)


def _shifted(cat: fx.Node) -> fx.Node | None:
    """Return x [batch, sequence, channels] where `cat` is x one token later, and None where it is something else."""
    found = arguments(cat)
    tensors = found["tensors"]
    if found["dim"] not in (1, -2) or len(tensors) != 2 or cat.meta["val"].dim() != 3:
        return None
    first, rest = tensors
    if first.meta["val"].shape[1] != 1 or not _is_zero(first) or not _lacks_last(rest):
        return None
    return rest.args[0]  # type: ignore[no-any-return]


def _lacks_last(node: Any) -> bool:
    if not is_op(node, aten.slice):
        return False
    found = arguments(node)
    return (found["dim"], found["start"] or 0, found["end"], found["step"]) == (1, 0, -1, 1)


def _is_zero(node: Any) -> bool:
    if is_op(node, *_ZEROS):
        return True
    if is_op(node, aten.linear) and arguments(node)["bias"] is not None:
        return False
    return is_op(node, *_OF_ZERO) and _is_zero(node.args[0])
