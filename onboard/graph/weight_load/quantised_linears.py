"""Linear layers that compute with a checkpoint's codes, in the place of those that would decode
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule, Node

from onboard.errors import UsageError
from onboard.graph.backends import Backend, choose_backend
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.quantise.coded_shares import weight_of_share
from onboard.graph.quantise.weights_to_encode import (
    not_read,
    weights_of_block,
    weights_of_config,
    weights_to_encode,
)
from onboard.graph.weight_load.gemm_fusion import LINEARS, private_parameters, write_out
from onboard.graph.weight_load.parameters import (
    CACHE_SCALE,
    Form,
    Joined,
    Part,
    further_names,
    set_parameter,
    unread_names,
    weight_plan,
)
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, quantised_checkpoint
from onboard.graph.weight_load.scales.input_scales import (
    InputScales,
    how_inputs_are_quantised,
    plan_input_scale,
)
from onboard.graph.weight_load.weight_sources import find_sources
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.quantised.weight import QuantisedWeight

EIGHT_BIT_KEYS = (
    "quantize_fp8_linear_from_config",
    "quantize_finegrained_fp8_linear_from_config",
    "quantize_int8_linear_from_config",
)
"""The transforms that let linears compute with codes, and inputs in eight bits."""
_ops, aten = torch.ops.onboard, torch.ops.aten
_LOOKED_UP: WeakKeyDictionary[nn.Module, Mapping[str, QuantisedWeight]] = WeakKeyDictionary()


def keeps_codes(backend: Backend, context: TransformContext, asked_by: str) -> bool:
    """Tell whether a run computes with codes: where it is to quantise, by kernels for 16-bit inputs,
    or where "torch" asks for the reference.

    Raises `UsageError` for a run that is to quantise and may not depend on the batch.
    """
    if context.runtime.quantize != "none" and context.runtime.batch_invariant:
        raise UsageError("quantize has no batch_invariant form", hint="Leave out one of them")
    if backend == "torch" or context.runtime.quantize != "none":
        return True
    is_fast = choose_backend(backend, context, asked_by) == "triton"
    return is_fast and context.dtype.itemsize == 2 and not context.runtime.batch_invariant


def quantised_weights(gm: GraphModule, context: TransformContext) -> Mapping[str, QuantisedWeight]:
    """Return the graph's weights that the checkpoint has quantised, or that the run is to quantise,
    by the names of their parts; they are looked up once.
    """
    if gm not in _LOOKED_UP:
        _LOOKED_UP[gm] = _look_up(gm, context)
    return _LOOKED_UP[gm]


def _look_up(gm: GraphModule, context: TransformContext) -> Mapping[str, QuantisedWeight]:
    if context.runtime.quantize != "none":
        return weights_to_encode(gm, context)
    if context.factory.mode != "graph":
        return {}
    if context.runtime.skip_loading_weights:
        return weights_of_config(gm, context)
    if (checkpoint := quantised_checkpoint(context.factory.checkpoint)) is None:
        return {}
    names, shares = names_in_checkpoint(gm, context, checkpoint), weight_plan(gm).shares
    found = {
        part: checkpoint.weights[name] for part, name in names.items() if name in checkpoint.weights
    }
    own = {
        part: weight_of_share(weight, shares[part]) if part in shares else weight
        for part, weight in found.items()
    }
    if decoded := sum(weight is None for weight in own.values()):
        context.facts.append(
            f"several ranks: {decoded} quantised weights are decoded, shares take their blocks apart"
        )
    return {part: weight for part, weight in own.items() if weight is not None}


def names_in_checkpoint(
    gm: GraphModule, context: TransformContext, checkpoint: QuantisedCheckpoint
) -> dict[str, str]:
    """Return what the checkpoint calls the graph's weights, those that it has as the graph does."""
    plan = weight_plan(gm)
    names = {name for name, _ in gm.named_parameters()} - plan.folds.keys()
    names |= {source for fold in plan.folds.values() for source in fold.sources}
    parts = {plan.weight_of(part) for name in names for part in plan.parts(name)}
    parts -= {form.weight for form in plan.forms.values() if form.kind == CACHE_SCALE}
    wanted = {part: [part, *further_names(gm, part)] for part in sorted(parts)}
    buffers = [name for name, _ in gm.named_buffers() if name in gm.state_dict()]
    found, _ = find_sources(
        wanted,
        buffers,
        unread_names(gm),
        checkpoint,
        context.factory,
        is_part=bool(context.shared),
    )
    return {part: source.names[0] for part, source in found.items() if source.is_plain}


def quantise_linears(
    gm: GraphModule,
    weights: Mapping[str, QuantisedWeight],
    scales: InputScales,
    *,
    in_blocks: bool,
) -> int:
    """Let linears with eight-bit weights, with scales of blocks or else of rows, compute with
    them; return how many do.
    """

    def quantise(linear: Node, found: list[QuantisedWeight]) -> None:
        _quantise(gm, linear, found, scales.groups(found), in_blocks=in_blocks)

    return replace_linears(gm, lambda name: _alike(gm, name, weights, in_blocks), quantise)


def replace_linears(
    gm: GraphModule,
    alike: Callable[[str], list[QuantisedWeight]],
    quantise: Callable[[Node, list[QuantisedWeight]], None],
) -> int:
    """Call `quantise` for every linear whose weight's parts are `alike`, given the parameter's name,
    with these; return how many there are.
    """
    for block in nodes_of(gm, _ops.torch_fused_swiglu_mlp):
        if any(map(alike, weights_of_block(block))):
            write_out(gm, block, _ops.torch_silu_and_mul.default)
    private, count = private_parameters(gm), 0
    for linear in nodes_of(gm, *LINEARS):
        weight = arguments(linear)["weight"]
        name = str(weight.target)
        if weight.op == "get_attr" and name in private and (found := alike(name)):
            quantise(linear, found)
            count += 1
    return count


def input_scales(context: TransformContext, *, allow_different: bool) -> InputScales:
    """Return the scales of the run's checkpoint."""
    checkpoint = (
        quantised_checkpoint(context.factory.checkpoint)
        if context.runtime.quantize == "none"
        else None
    )
    return InputScales(checkpoint.input_scale if checkpoint else not_read, allow_different)


def _alike(
    gm: GraphModule, name: str, weights: Mapping[str, QuantisedWeight], in_blocks: bool
) -> list[QuantisedWeight]:
    """Return the weights that a parameter joins, if all are eight-bit floats of one scheme; else
    nothing.
    """
    known = joined_weights(gm, name, weights)
    if not known or not all(_fits(weight, in_blocks) for weight in known):
        return []
    even = not in_blocks or all(weight.shape[0] % BLOCK == 0 for weight in known[:-1])
    alike = len({(weight.activations, how_inputs_are_quantised(weight)) for weight in known}) == 1
    return known if even and alike else []


def joined_weights(
    gm: GraphModule, name: str, weights: Mapping[str, QuantisedWeight]
) -> list[QuantisedWeight]:
    """Return the weights that a parameter joins along its outputs, nothing where one is not
    quantised.
    """
    plan = weight_plan(gm)
    if name in plan.joins and (plan.joins[name].stacked or plan.joins[name].dim != 0):
        return []
    found = [weights.get(part) for part in plan.parts(name)]
    return [] if None in found else [weight for weight in found if weight is not None]


def _fits(weight: QuantisedWeight, in_blocks: bool) -> bool:
    if weight.kind != "fp8" or len(weight.shape) != 2:
        return False
    return weight.block == (BLOCK, BLOCK) if in_blocks else weight.block is None


def _quantise(
    gm: GraphModule,
    linear: Node,
    weights: list[QuantisedWeight],
    groups: list[int],
    *,
    in_blocks: bool,
) -> None:
    """Give a linear the codes of its weight, and their scales as one more parameter; of its joined
    weights, those that are in a group have one scale of their inputs.
    """
    old = arguments(linear)["weight"]
    name = str(old.target)
    plan, device = weight_plan(gm), gm.get_parameter(name).device
    block = weights[0].block
    plan.forms.update({part: Form(part, "codes", block) for part in plan.parts(name)})
    codes = torch.empty(gm.get_parameter(name).shape, dtype=torch.float8_e4m3fn, device=device)
    set_parameter(gm, name, nn.Parameter(codes, requires_grad=False))
    scale = read_parameter(gm, linear, _plan_scale(gm, name, weights, in_blocks=in_blocks))
    tensors = (read_parameter(gm, linear, name), arguments(linear)["bias"], scale)
    if len(groups) == 1:
        new = _call(gm, linear, weights, tensors, plan.parts(name), name)
    else:
        new = _call_one_by_one(gm, linear, weights, tensors, groups)
    replace_with(linear, new)
    if not old.users:
        gm.graph.erase_node(old)


def _call(
    gm: GraphModule,
    linear: Node,
    weights: Sequence[QuantisedWeight],
    tensors: tuple[Node, Node | None, Node],
    parts: Sequence[str],
    name: str,
) -> Node:
    """Insert the call of a linear with the codes of some weights, which have one scale of their
    inputs: the parameter is named for `name`.
    """
    how = how_inputs_are_quantised(weights[0])
    given = None
    if how == "tensor":
        given = read_parameter(gm, linear, plan_input_scale(gm, name, parts))
    in_blocks = weights[0].block is not None
    target = _ops.torch_finegrained_fp8_linear if in_blocks else _ops.torch_fp8_linear
    values = (arguments(linear)["input"], *tensors, given, how)
    return insert_call(gm, linear, target.default, *values, like=linear)


def _call_one_by_one(
    gm: GraphModule,
    linear: Node,
    weights: Sequence[QuantisedWeight],
    tensors: tuple[Node, Node | None, Node],
    groups: Sequence[int],
) -> Node:
    """Insert a call for each group of a joined layer's weights, and what puts their outputs side by
    side.
    """
    parts = weight_plan(gm).parts(str(tensors[0].target))
    shared = BLOCK if weights[0].block else 1
    pieces, first, start = [], 0, 0
    for count in groups:
        mine = slice(first, first + count)
        size = sum(weight.shape[0] for weight in weights[mine])

        def rows(tensor: Node, per: int, start: int = start, size: int = size) -> Node:
            where = (0, start // per, -(-size // per))
            return insert_call(gm, linear, aten.narrow.default, tensor, *where, like=linear)

        weight, bias, scale = tensors
        views = rows(weight, 1), bias and rows(bias, 1), rows(scale, shared)
        pieces.append(_call(gm, linear, weights[mine], views, parts[mine], parts[first]))
        first, start = first + count, start + size
    return insert_call(gm, linear, aten.cat.default, pieces, -1, like=linear)


def _plan_scale(
    gm: GraphModule, name: str, weights: list[QuantisedWeight], *, in_blocks: bool
) -> str:
    """Plan where the scales of a weight come from; return their parameter's name."""
    plan, device = weight_plan(gm), gm.get_parameter(name).device
    parts = plan.parts(name)
    sizes = [-(-w.shape[0] // BLOCK) if in_blocks else w.shape[0] for w in weights]
    columns = [-(-weights[0].shape[1] // BLOCK)] if in_blocks else []
    scale = f"{name}_scale"
    tensor = torch.empty(sum(sizes), *columns, dtype=torch.float32, device=device)
    set_parameter(gm, scale, nn.Parameter(tensor, requires_grad=False))
    names = [f"{part}_scale" for part in parts]
    block = weights[0].block
    pairs = zip(names, parts, strict=True)
    plan.forms.update({each: Form(part, "scale", block) for each, part in pairs})
    if names != [scale]:
        plan.joins[scale] = Joined(tuple(map(Part, names, sizes)), 0)
    return scale
