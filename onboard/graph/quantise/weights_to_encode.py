"""Which weights a run has in codes that no checkpoint gives it: it encodes them as it loads them, or
they are random, and a config says how its checkpoint is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

import torch
from torch.fx import GraphModule, Node

from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.quantise.kernel_forms import has_kernels
from onboard.graph.weight_load.experts.mixture_stacks import mixtures, router_linears
from onboard.graph.weight_load.gemm_fusion import LINEARS
from onboard.graph.weight_load.parameters import weight_plan
from onboard.graph.weight_load.quantised_folder import config_of, quantised_checkpoint
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.quantised.config_layouts import ConfigLayouts
from onboard.quantised.encode_four_bits import INT4_GROUP, MXFP4_GROUP
from onboard.quantised.weight import NOT_QUANTISED, Activations, Layout, QuantisedWeight

_ops = torch.ops.onboard
_FormOf = Callable[[str, bool, int, int], QuantisedWeight | None]
"""What a weight, a stack of experts or not, with a number of rows and of inputs, is to be."""


def not_read(_: object) -> NoReturn:
    """Fail: what is encoded while it is loaded has no tensors before."""
    raise AssertionError("it is encoded while it is loaded")


def _form(
    kind: str,
    inputs: Activations = NOT_QUANTISED,
    block: tuple[int, int] | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantisedWeight:
    return QuantisedWeight("", (), kind, {}, not_read, inputs, block, scale_dtype=scale_dtype)


_FORMS = {
    "fp8": _form("fp8", Activations("token")),
    "fp8-block": _form("fp8", Activations("group", group=BLOCK), (BLOCK, BLOCK)),
    "int4": _form("int4", block=(1, INT4_GROUP), scale_dtype=torch.bfloat16),
    "mxfp4": _form("mxfp4", block=(1, MXFP4_GROUP), scale_dtype=torch.uint8),
}
"""By a run's `quantize`: what weights are to be."""


def weights_to_encode(gm: GraphModule, context: TransformContext) -> dict[str, QuantisedWeight]:
    """Return what a run's `quantize` makes of the weights of experts, and of all linears but the
    head's and routers'.

    Raises `UsageError` for a checkpoint that is quantised.
    """
    if not context.runtime.skip_loading_weights and quantised_checkpoint(
        context.factory.checkpoint
    ):
        raise UsageError("the checkpoint is quantised already", hint="Leave out quantize")
    form, words = _FORMS[context.runtime.quantize], context.factory.text_config.vocab_size
    return _encoded(gm, lambda part, is_stack, rows, _: None if rows == words else form)


def weights_of_config(gm: GraphModule, context: TransformContext) -> dict[str, QuantisedWeight]:
    """Return the same where weights are random, of those in layers that the config says are
    quantised: with scales of inputs as they come. Those in codes that no run encodes are a fact.
    """
    folder = context.factory.checkpoint
    if (layouts := ConfigLayouts.of(config_of(folder), folder)) is None:
        return {}
    others: set[str] = set()

    def form_of(part: str, is_stack: bool, _: int, inputs: int) -> QuantisedWeight | None:
        layout = layouts.layout_of(part.removesuffix(".weight"), is_stack=is_stack)
        form = None if layout is None else _form_of_layout(layout, inputs)
        if layout is not None and form is None:
            others.add(layout.kind)
        return form

    found = _encoded(gm, form_of)
    if others:
        context.facts.append(
            f"random weights: those in {', '.join(sorted(others))} are whole numbers of {context.dtype} here"
        )
    return found


def _form_of_layout(layout: Layout, inputs: int) -> QuantisedWeight | None:
    """Return what a run encodes of a layout; None where it has no encoder or no kernel for it."""
    if not has_kernels(layout.kind, layout.block, inputs):
        return None
    if layout.kind == "int4" and layout.block is not None and layout.block[0] == 1:
        return replace(_FORMS["int4"], block=layout.block)
    forms = {(each.kind, each.block): each for each in _FORMS.values()}
    return forms.get((layout.kind, layout.block))


def _encoded(gm: GraphModule, form_of: _FormOf) -> dict[str, QuantisedWeight]:
    stacks = [stack for each in mixtures(gm) for stack in (each.up, each.down)]
    transposed = {stack.name: stack.transposed for stack in stacks}
    plan, found = weight_plan(gm), {}
    for name in [*_linear_weights(gm), *transposed]:
        for part, view in plan.slices(name, gm.get_parameter(name)):
            if part is None:
                continue
            turned, whole = transposed.get(part, False), plan.shares.get(part, view).shape
            inputs = whole[-2] if turned else whole[-1]
            if (form := form_of(part, name in transposed, whole[0], inputs)) is not None:
                found[part] = replace(form, name=part, shape=tuple(view.shape), transposed=turned)
    return found


def _linear_weights(gm: GraphModule) -> list[str]:
    routers = router_linears(gm)
    linears = [arguments(node)["weight"] for node in nodes_of(gm, *LINEARS) if node not in routers]
    blocks = [
        name
        for node in nodes_of(gm, _ops.torch_fused_swiglu_mlp)
        for name in weights_of_block(node)
    ]
    return [*(str(weight.target) for weight in linears if weight.op == "get_attr"), *blocks]


def weights_of_block(block: Node) -> Iterator[str]:
    """Yield the weights of a feed-forward block that is one op."""
    yield from (
        str(node.target)
        for name, node in arguments(block).items()
        if name.endswith("weight") and isinstance(node, Node)
    )
