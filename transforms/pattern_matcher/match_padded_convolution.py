"""Recognise causal convolutions along the sequence that are written as padding and plain
convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, only_user, replace_with
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_CONV = torch.ops.onboard.torch_causal_conv1d.default


@register_transform("match_padded_convolution")
class MatchPaddedConvolution(GraphTransform[TransformConfig]):
    """Replace zeros before the text, and the convolutions that use them up, by a
    `torch_causal_conv1d` each.

    Of several in a row only the first sees zeros before the text; a later one sees what biases make
    of them, which is the same at each place. So all but the last go without bias, and the last
    one's has what theirs come to.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Rewrite each such row of convolutions."""
        matches = 0
        for pad in nodes_of(gm, aten.pad, aten.constant_pad_nd):
            if convolutions := _uses_up(pad):
                _rewrite(gm, pad.args[0], convolutions)
                matches += len(convolutions)
        return matches


def _uses_up(pad: fx.Node) -> list[fx.Node]:
    """Return the convolutions in a row after zeros before the text that together look back as far;
    [] if others do.
    """
    found = arguments(pad)
    if (
        len(found["pad"]) != 2
        or found["pad"][1] != 0
        or found["value"]
        or found.get("mode", "constant") != "constant"
    ):
        return []
    left, row = found["pad"][0], []
    for node, reach in _row(pad):
        left -= reach
        row.append(node)
    return row if left == 0 else []


def _row(pad: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield the plain convolutions that each take the one before alone, and how many earlier tokens
    each sees.
    """
    node: fx.Node | None = only_user(pad)
    while node is not None and is_op(node, aten.conv1d):
        found = arguments(node)
        if list(found["stride"]) != [1] or list(found["padding"]) != [0]:
            return
        yield node, found["dilation"][0] * (int(found["weight"].meta["val"].shape[-1]) - 1)
        node = only_user(node)


def _rewrite(gm: fx.GraphModule, source: Any, row: list[fx.Node]) -> None:
    last, constant = row[-1], None
    tokens = call(gm, last, aten.transpose.int, source, 1, 2, like=last)
    for node in row:
        found = arguments(node)
        constant = _carried(gm, last, constant, found)
        (dilation,) = found["dilation"]
        padding = dilation * (int(found["weight"].meta["val"].shape[-1]) - 1)
        bias = constant if node is last else None
        tokens = call(
            gm,
            last,
            _CONV,
            tokens,
            found["weight"],
            bias,
            1,
            padding,
            dilation,
            found["groups"],
            like=node,
        )
    replace_with(last, call(gm, last, aten.transpose.int, tokens, 1, 2, like=last))


def _carried(
    gm: fx.GraphModule, before: fx.Node, constant: fx.Node | None, found: dict[str, Any]
) -> fx.Node | None:
    """Return what a convolution makes of `constant` [channels] at every place, and its own bias;
    None: nothing.
    """
    weight, bias = found["weight"], found["bias"]
    if constant is None:
        return bias  # type: ignore[no-any-return]
    column = call(gm, before, aten.unsqueeze.default, constant, 1, like=weight)
    taps = call(gm, before, aten.sum.dim_IntList, weight, [-1], True, like=weight)
    arguments = (column, taps, bias, [1], [0], [1], found["groups"])
    made = call(gm, before, aten.conv1d.default, *arguments, like=weight)
    return call(gm, before, aten.squeeze.dim, made, 1, like=weight)
