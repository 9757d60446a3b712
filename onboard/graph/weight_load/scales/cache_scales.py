"""Which of a checkpoint's scales belong to the keys and values of which attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule, Node

from onboard.errors import OnboardError
from onboard.graph.cache_init.descriptor import module_path
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.new_nodes import read_parameter
from onboard.graph.weight_load.parameters import CACHE_SCALE, Form, set_parameter, weight_plan
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint
from onboard.quantised.weight import DAMAGED

_ops = torch.ops.onboard
_ENDINGS = {
    "k_scale": (".k_scale", ".kv_scale", ".k_proj.output_scale"),
    "v_scale": (".v_scale", ".kv_scale", ".v_proj.output_scale"),
}


class Scales(NamedTuple):
    """The names of one attention's scales in the checkpoint."""

    k_scale: str
    v_scale: str


def scale_caches(
    gm: GraphModule, checkpoint: QuantisedCheckpoint, sources: Mapping[str, str]
) -> int:
    """Let attention round keys and values with the checkpoint's scales, as its cache will; return
    how many do. `sources` are the checkpoint's names of the graph's weights.
    """
    count = 0
    for node in nodes_of(gm, _ops.torch_attention, _ops.torch_mla):
        if (found := scales_of(module_path(node), checkpoint, sources)) is not None:
            _scale(gm, node, found, checkpoint.cache_scale_sizes())
            count += 1
    return count


def scales_of(
    path: str, checkpoint: QuantisedCheckpoint, sources: Mapping[str, str]
) -> Scales | None:
    """Return the scales below a module, or the one around it; one of a kind serves both kinds."""
    for module in (path, path.rpartition(".")[0]):
        names = [
            name
            for prefix in set(_prefixes(module, sources))
            for name in checkpoint.cache_scales
            if name.startswith(f"{prefix}.")
        ]
        keys, values = (
            [name for name in names if name.endswith(_ENDINGS[kind])] for kind in _ENDINGS
        )
        if len(keys) <= 1 and len(values) <= 1 and (keys or values):
            return Scales((keys or values)[0], (values or keys)[0])
    return None


def _prefixes(module: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield what the checkpoint calls a module of the graph, by the names of its weights."""
    for part, source in sources.items():
        tail = part.removeprefix(module)
        if module and part.startswith(f"{module}.") and source.endswith(tail):
            yield source.removesuffix(tail)


def _scale(gm: GraphModule, node: Node, found: Scales, sizes: Mapping[str, int]) -> None:
    """Give an attention its scales as parameters, as many numbers for keys as for values."""
    latent = node.target is _ops.torch_mla.default
    kinds = ("k_scale",) if latent else Scales._fields
    heads = 1 if latent else _kv_heads(node)
    size = max(sizes[getattr(found, kind)] for kind in kinds)
    for kind in kinds:
        source = getattr(found, kind)
        if sizes[source] not in (1, heads):
            raise OnboardError(
                f"{source} has {sizes[source]} numbers, not 1 or {heads}", hint=DAMAGED
            )
        name = f"{module_path(node)}.{kind}"
        empty = torch.empty(size, dtype=torch.float32, device=next(gm.parameters()).device)
        set_parameter(gm, name, nn.Parameter(empty, requires_grad=False))
        weight_plan(gm).forms[name] = Form(source, CACHE_SCALE)
        node.update_kwarg(kind, read_parameter(gm, node, name))


def _kv_heads(node: Node) -> int:
    values = arguments(node)
    return int(values["key"].meta["val"].shape[1 if values["layout"] == "bnsd" else 2])
