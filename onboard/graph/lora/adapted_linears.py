"""The places of low-rank adapters in a graph: behind the linear layers that they are for.

Layers that were joined have one call behind them all. It has the matrices of all adapters; which
one a token has, the step says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.config import suggest
from onboard.errors import OnboardError
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.lora.adapter_files import Adapter
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.weight_load.gemm_fusion import LINEARS, write_out
from onboard.graph.weight_load.parameters import Share, of_runs, weight_plan

_ops = torch.ops.onboard
_RANKS = 16
"""Ranks are filled up to a multiple of it, which matrix products of the hardware want."""
Layer = tuple[str, int]
"""The path of a linear layer in the model, and its number of outputs."""


def adapt_linears(gm: GraphModule, adapters: Sequence[Adapter], dtype: torch.dtype) -> int:
    """Let linear layers have what adapters add to them; return behind how many calls.

    Raises:
        OnboardError: an adapter is for what is no linear layer of the graph, or does not fit it.
    """
    wanted = {layer for adapter in adapters for layer in adapter.layers}
    for block in nodes_of(gm, _ops.torch_fused_swiglu_mlp):
        weights = (arguments(block)[f"{name}_weight"] for name in ("gate_up", "down"))
        if any(path in wanted for weight in weights for path, _ in _layers(gm, weight)):
            write_out(gm, block, _ops.torch_silu_and_mul.default)
    known: set[str] = set()
    calls = 0
    for linear in nodes_of(gm, *LINEARS):
        layers = _layers(gm, arguments(linear)["weight"])
        known |= {path for path, _ in layers}
        if any(path in wanted for path, _ in layers):
            _adapt(gm, linear, layers, adapters, dtype, f"lora_{calls}")
            calls += 1
    for adapter in adapters:
        _check_known(adapter, known)
    return calls


def _layers(gm: GraphModule, weight: Node) -> list[Layer]:
    """Return the layers whose weights a parameter joins, in order; none for a computed one."""
    if weight.op != "get_attr":
        return []
    name, plan = str(weight.target), weight_plan(gm)
    if name not in plan.joins:
        return [(name.removesuffix(".weight"), len(gm.get_parameter(name)))]
    join = plan.joins[name]
    if join.dim != 0 or join.stacked:
        return []
    return [(str(part.source).removesuffix(".weight"), part.size) for part in join.parts]


def _check_known(adapter: Adapter, known: Iterable[str]) -> None:
    for layer in adapter.layers:
        if layer not in known:
            raise OnboardError(
                f"the adapter {adapter.name} is for {layer!r:.200}, which is no linear layer of"
                " this model's graph",
                hint=suggest(layer[:200], sorted(known)[:1000]),
            )


def _adapt(
    gm: GraphModule,
    linear: Node,
    layers: Sequence[Layer],
    adapters: Sequence[Adapter],
    dtype: torch.dtype,
    name: str,
) -> None:
    """Put a call behind a linear, with the matrices of all adapters."""
    x = arguments(linear)["input"]
    weight = gm.get_parameter(str(arguments(linear)["weight"].target))
    down, up = _stacks(layers, adapters, int(weight.shape[1]), weight_plan(gm).shares)
    after = linear.next
    stacks = []
    for side, stack in (("down", down), ("up", up)):
        gm.register_buffer(f"{name}_{side}", stack.to(dtype), persistent=False)
        stacks.append(read_parameter(gm, after, f"{name}_{side}"))
    sizes = [size for _, size in layers]
    call = insert_call(gm, after, _ops.torch_lora.default, linear, x, *stacks, sizes, like=linear)
    linear.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)


def _stacks(
    layers: Sequence[Layer], adapters: Sequence[Adapter], inputs: int, shares: Mapping[str, Share]
) -> tuple[Tensor, Tensor]:
    """Return the matrices as `torch_lora` has them, float32: of the `inputs` and outputs that this
    rank has of the layers, as `shares` say.
    """
    placed = list(_placed(layers, adapters))
    ranks = [adapter.config.rank_of(layers[place][0]) for _, place, adapter in placed]
    rank = -(-max(ranks) // _RANKS) * _RANKS
    sizes = [size for _, size in layers]
    down = torch.zeros(len(adapters), len(layers), rank, inputs)
    up = torch.zeros(len(adapters), rank, sum(sizes))
    for (number, place, adapter), own in zip(placed, ranks, strict=True):
        path, size = layers[place]
        share = shares.get(f"{path}.weight", Share((size, inputs), {}))
        outputs, columns = share.shape
        own_down, own_up = adapter.down(path, columns), adapter.up(path, outputs)
        if 1 in share.kept:
            own_down = of_runs(own_down, 1, share.kept[1])
        if 0 in share.kept:
            own_up = of_runs(own_up, 0, share.kept[0])
        down[number, place, :own] = own_down
        torch.split(up[number, :own], sizes, dim=1)[place].copy_(own_up.T)
    return down.flatten(1, 2), up


def _placed(
    layers: Sequence[Layer], adapters: Sequence[Adapter]
) -> Iterator[tuple[int, int, Adapter]]:
    """Yield the adapters that have one of the layers: number, the layer's place, and itself."""
    for number, adapter in enumerate(adapters):
        for place, (path, _) in enumerate(layers):
            if path in adapter.layers:
                yield number, place, adapter
