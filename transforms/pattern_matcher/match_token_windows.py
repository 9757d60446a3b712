"""Recognise each token's window of the last tokens, written as zeros before the text and an
unfolding of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, replace_with
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_SHIFT = torch.ops.onboard.torch_token_shift.default
_LARGEST = 16


@register_transform("match_token_windows")
class MatchTokenWindows(GraphTransform[TransformConfig]):
    """Replace pad(x [batch, channels, sequence], (size - 1, 0)).unfold(-1, size, 1) by tokens
    shifted again and again.

    A convolution whose weights hang on the token is made of such windows.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such expression."""
        matches = 0
        for node in nodes_of(gm, aten.unfold):
            if (source := _source(node)) is not None:
                _rewrite(gm, node, source)
                matches += 1
        return matches


def _source(unfold: fx.Node) -> fx.Node | None:
    """Return x where `unfold` is its windows, None where it is something else."""
    padded: Any
    padded, dim, size, step = unfold.args
    if (
        dim not in (-1, 2)
        or step != 1
        or not isinstance(size, int)
        or size not in range(2, _LARGEST + 1)
    ):
        return None
    if is_op(padded, aten.slice) and _same_sizes(padded, padded.args[0]):
        padded = padded.args[0]
    if not is_op(padded, aten.pad, aten.constant_pad_nd):
        return None
    found = arguments(padded)
    zeros = found.get("mode", "constant") == "constant" and not found["value"]
    source: fx.Node = padded.args[0]
    fits = zeros and list(found["pad"]) == [size - 1, 0] and source.meta["val"].dim() == 3
    return source if fits else None


def _same_sizes(one: Any, other: Any) -> bool:
    """Whether two nodes have the same shape, so that a slice between them with a step of 1 keeps
    everything.
    """
    shapes = [[str(size) for size in node.meta["val"].shape] for node in (one, other)]
    return shapes[0] == shapes[1]


def _rewrite(gm: fx.GraphModule, unfold: fx.Node, source: fx.Node) -> None:
    size: Any = unfold.args[2]
    tokens = [call(gm, unfold, aten.transpose.int, source, 1, 2, like=unfold)]
    for _ in range(size - 1):
        tokens.append(call(gm, unfold, _SHIFT, tokens[-1], like=unfold))
    windows = call(gm, unfold, aten.stack.default, tokens[::-1], -1, like=unfold)
    replace_with(unfold, call(gm, unfold, aten.transpose.int, windows, 1, 2, like=unfold))
