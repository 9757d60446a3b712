"""A region's kernel in the region's place."""

from __future__ import annotations

import operator

import torch
from torch import fx
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument

import onboard.experiments.elementwise.triton_pointwise  # noqa: F401  (registers)
from onboard.experiments.elementwise.canonicalize import canonicalize, widen
from onboard.experiments.elementwise.pointwise_programs import region_program
from onboard.experiments.elementwise.program import results_of, return_only
from onboard.experiments.elementwise.regions import Region
from onboard.graph.new_nodes import insert_call
from onboard.graph.pattern_matcher.patterns import same_shape


def fuse_region(gm: fx.GraphModule, region: Region, *, exact: bool) -> bool:
    """Put a call of the region's kernel in its place, anywhere before what reads it: the graph must
    be sorted then.

    `exact` keeps the rounding of every operator to its dtype. Returns whether there is anything
    left to compute.
    """
    outputs = region.outputs
    program, inputs = region_program(region)
    canonicalize(program)
    if not exact:
        widen(program)
    computed = [
        index
        for index, output in enumerate(outputs)
        if not _pass_through(program, index, inputs, output)
    ]
    if computed:
        return_only(program, computed)
        _call(gm, program, inputs, [outputs[index] for index in computed])
    for node in reversed(region.nodes):
        gm.graph.erase_node(node)
    return bool(computed)


def _pass_through(program: FuncOp, index: int, inputs: list[fx.Node], output: fx.Node) -> bool:
    """Let users of an output that is an input, once simplified, read the input; return whether it
    is one.
    """
    result = results_of(program)[index]
    if not isinstance(result, BlockArgument) or not same_shape(inputs[result.index], output):
        return False
    output.replace_all_uses_with(inputs[result.index])
    return True


def _call(
    gm: fx.GraphModule, program: FuncOp, inputs: list[fx.Node], outputs: list[fx.Node]
) -> None:
    op = torch.ops.onboard.triton_pointwise.default
    results = insert_call(gm, outputs[0], op, inputs, str(program), like=outputs[-1])
    for position, output in enumerate(outputs):
        output.replace_all_uses_with(
            insert_call(gm, output, operator.getitem, results, position, like=output)
        )
