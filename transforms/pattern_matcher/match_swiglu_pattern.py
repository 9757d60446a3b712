"""Recognise gated feed-forward blocks."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import call, nodes_of, only_user, replace_with
from onboard.graph.pattern_matcher.patterns import Bound, Either, Op, Var, aten, find, is_node
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_LINEAR = (aten.linear, torch.ops.onboard.torch_linear_simple)


def _linear(name: str, x: object) -> Op:
    weight = Var(f"{name}_weight", where=lambda value: is_node(value) and value.op == "get_attr")
    return Op(_LINEAR, x, weight, Var(f"{name}_bias"), bind=name)


_GATE = _linear("gate", Var("x", where=is_node))
_ACTIVATED = Either(
    Op(aten.silu, _GATE, bind="silu"),
    Op(aten.gelu, _GATE, approximate="tanh", bind="gelu_pytorch_tanh"),
    Op(aten.gelu, _GATE, approximate="none", bind="gelu"),
)
_PRODUCT = Op(
    aten.mul, _ACTIVATED, _linear("up", Var("x", where=is_node)), commutes=True, bind="product"
)
_PATTERN = _linear("down", _PRODUCT)
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")


@register_transform("match_swiglu_pattern")
class MatchSwiGLUPattern(GraphTransform[TransformConfig]):
    """Replace down(act(gate(x)) * up(x)) by `torch_swiglu_mlp`, for SiLU and both forms of GELU."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each block whose inner results nothing else reads."""
        matches = 0
        for node in nodes_of(gm, *_LINEAR):
            found = find(_PATTERN, node)
            if found is None or not _is_closed(found):
                continue
            tensors = [found["x"], *_each(found, "weight"), *_each(found, "bias")]
            op = torch.ops.onboard.torch_swiglu_mlp.default
            replace_with(node, call(gm, node, op, *tensors, _activation(found), like=node))
            matches += 1
        return matches


def _each(found: Bound, kind: str) -> list[fx.Node | None]:
    return [found[f"{name}_{kind}"] for name in ("gate", "up", "down")]


def _activation(found: Bound) -> str:
    return next(name for name in _ACTIVATIONS if name in found)


def _is_closed(found: Bound) -> bool:
    return all(
        only_user(found[name]) is not None for name in ("gate", "up", "product", _activation(found))
    )
