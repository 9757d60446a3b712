"""Joined linear layers of which some weights are quantised otherwise than others: cut into layers that
each have one scheme, which can compute with their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn
from torch.fx import GraphModule, Node

from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.weight_load.gemm_fusion import LINEARS, private_parameters, write_out
from onboard.graph.weight_load.parameters import (
    ParameterNames,
    Part,
    delete_parameter,
    joined_name,
    set_parameter,
    weight_plan,
)
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.quantised.weight import QuantisedWeight

_ops, aten = torch.ops.onboard, torch.ops.aten
Scheme = Callable[[QuantisedWeight], object]
"""What is the same for weights that one op computes with; None: these are decoded."""


def split_linears(gm: GraphModule, weights: Mapping[str, QuantisedWeight], scheme: Scheme) -> int:
    """Cut the joined linears whose weights have several schemes, one of them not to be decoded; return
    how many were.
    """
    private, count = private_parameters(gm), 0
    for block in nodes_of(gm, _ops.torch_fused_swiglu_mlp):
        name = str(arguments(block)["gate_up_weight"].target)
        if name in private and len(_runs(gm, name, weights, scheme)) > 1:
            write_out(gm, block, _ops.torch_silu_and_mul.default)
    for linear in nodes_of(gm, *LINEARS):
        weight = arguments(linear)["weight"]
        name = str(weight.target)
        if weight.op == "get_attr" and name in private:
            runs = _runs(gm, name, weights, scheme)
            if len(runs) > 1:
                _split(gm, linear, runs)
                count += 1
    return count


def _runs(
    gm: GraphModule, name: str, weights: Mapping[str, QuantisedWeight], scheme: Scheme
) -> list[list[Part]]:
    """Return the parts of a parameter in runs of one scheme; a block of outputs does not go across
    two weights.
    """
    join = weight_plan(gm).joins.get(name)
    if join is None or join.stacked or join.dim != 0 or any(p.source is None for p in join.parts):
        return []
    found = [weights.get(str(part.source)) for part in join.parts]
    schemes = [None if weight is None else scheme(weight) for weight in found]
    if all(each is None for each in schemes):
        return []
    runs: list[list[Part]] = []
    for index, part in enumerate(join.parts):
        before = found[index - 1] if index else None
        cut = before is not None and before.block == (BLOCK, BLOCK) and before.shape[0] % BLOCK != 0
        if runs and schemes[index] == schemes[index - 1] and not cut:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _split(gm: GraphModule, linear: Node, runs: Sequence[Sequence[Part]]) -> None:
    """Put a linear for each run of weights, and what puts their outputs side by side, in the place of
    one.
    """
    values = arguments(linear)
    old, bias = values["weight"], values["bias"]
    whole = gm.get_parameter(str(old.target))
    del weight_plan(gm).joins[str(old.target)]
    delete_parameter(gm, str(old.target))
    sizes = [sum(part.size for part in run) for run in runs]
    pieces = []
    for run, start, size in zip(runs, accumulate(sizes, initial=0), sizes, strict=False):
        weight = read_parameter(gm, linear, _parameter(gm, run, whole, size))
        rows = bias and insert_call(
            gm, linear, aten.narrow.default, bias, 0, start, size, like=bias
        )
        tensors = (values["input"], weight, rows)
        pieces.append(insert_call(gm, linear, aten.linear.default, *tensors, like=linear))
    replace_with(linear, insert_call(gm, linear, aten.cat.default, pieces, -1, like=linear))
    gm.graph.erase_node(old)


def _parameter(gm: GraphModule, run: Sequence[Part], whole: nn.Parameter, size: int) -> str:
    """Plan a parameter for some of a joined one's weights; return its name."""
    sources = [str(part.source) for part in run]
    name = sources[0] if len(run) == 1 else joined_name(sources, ParameterNames(gm))
    tensor = torch.empty(size, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
    set_parameter(gm, name, nn.Parameter(tensor, requires_grad=False))
    if len(run) > 1:
        weight_plan(gm).joined(name, list(run))
    return name
