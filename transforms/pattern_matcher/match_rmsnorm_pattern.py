"""Recognise root-mean-square normalisation that is written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, replace_with
from onboard.graph.pattern_matcher.patterns import (
    CASTS,
    Bound,
    Either,
    Op,
    Var,
    aten,
    cast,
    dtype,
    find,
    is_node,
    is_number,
    rank,
)
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_X = Var("x", where=is_node)
_SQUARE = Either(Op(aten.pow, _X, 2), Op(aten.mul, _X, _X), Op(aten.square, _X))
_VARIANCE = Op(
    aten.add, Op(aten.mean, _SQUARE, [-1], True), Var("eps", where=is_number), commutes=True
)
_INVERSE = Either(Op(aten.rsqrt, _VARIANCE), Op(aten.pow, _VARIANCE, -0.5))
_NORMED = cast(Op(aten.mul, _X, _INVERSE, commutes=True))
_PATTERN = Op(
    aten.mul,
    Var("weight", where=lambda value: is_node(value) and rank(value) == 1),
    _NORMED,
    commutes=True,
)


@register_transform("match_rmsnorm_pattern")
class MatchRMSNormPattern(GraphTransform[TransformConfig]):
    """Replace x * rsqrt(mean(x^2) + eps) * weight, and PyTorch's own rms_norm, by
    `torch_rmsnorm`.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such expression."""
        matches = 0
        for node in nodes_of(gm, aten.mul, aten.rms_norm):
            inputs = _inputs(node)
            if inputs is not None:
                replace_with(
                    node,
                    call(gm, node, torch.ops.onboard.torch_rmsnorm.default, *inputs, like=node),
                )
                matches += 1
        return matches


def _inputs(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Return input, weight and eps of the norm whose last operation is `node`, None when it is
    none.
    """
    if is_op(node, aten.rms_norm):
        named = arguments(node)
        complete = (
            len(named["normalized_shape"]) == 1
            and named["weight"] is not None
            and named["eps"] is not None
        )
        return (named["input"], named["weight"], float(named["eps"])) if complete else None
    found = find(_PATTERN, node)
    x = _unrounded_input(node, found) if found else None
    return (x, found["weight"], float(found["eps"])) if found and x is not None else None


def _unrounded_input(node: fx.Node, found: Bound) -> fx.Node | None:
    """Return the tensor to normalise such that the op rounds where the expression rounds.

    `torch_rmsnorm` rounds to its input's dtype before the weight. So that input is the tensor from
    before the cast to float32 if the expression casts back before the weight, and the float32 one
    if it casts after it.
    """
    x: fx.Node = found["x"]
    source: Any = x
    while is_op(source, *CASTS):
        source = source.args[0]
    left, right = node.args[:2]
    normed = right if left is found["weight"] else left
    assert isinstance(normed, fx.Node)
    candidates: list[fx.Node] = [source, x]
    return next((candidate for candidate in candidates if dtype(candidate) == dtype(normed)), None)
