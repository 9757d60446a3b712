"""How several ranks divide a model, from its config alone: by the pipeline's own transforms, on a
few layers of each kind, which stand for the others.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.config import RuntimeConfig
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.context import TransformContext
from onboard.graph.export.counted_experts import few_experts
from onboard.graph.export.layer_kinds import UnlikeError
from onboard.graph.export.left_out import Occurrences, add_experts
from onboard.graph.export.stamp import layer_of
from onboard.graph.fx import ancestors, copy_graphs, graph_modules, nodes_of, op_name
from onboard.graph.pipeline import Pipeline
from onboard.graph.pipeline_stages.split_stages import rank_of_stage, split
from onboard.graph.sharding.hints import hint_of
from onboard.graph.sharding.shares import bytes_read_by
from onboard.graph.transform import Stages
from onboard.graph.weight_load.parameters import tied_names, weight_plan
from onboard.runtime.plan import FEW_EXPERTS, planned_context
from onboard.runtime.ranks.division import Division

ops = torch.ops.onboard
_ALL = 1 << 30
"""More experts than any mixture has."""
_UP_TO = list(Stages)[: list(Stages).index(Stages.SHARDING) + 1]


def rehearsed(
    checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path, model: str = ""
) -> Division:
    """Return how `runtime.world_size` ranks divide a checkpoint; raise what `find_division` does."""
    new_context = partial(planned_context, checkpoint, runtime, gpu=gpu, root=root, model=model)
    if runtime.dist_mapping.pp > 1:
        return _in_stages(new_context(), runtime.dist_mapping.pp)
    try:
        with few_experts(FEW_EXPERTS):
            return _divided_by(new_context(), FEW_EXPERTS)
    except UnlikeError:
        return _divided_by(new_context(), _ALL)


def _divided_by(context: TransformContext, experts: int) -> Division:
    """Return how the ranks divide a model of which a few layers of each kind are exported, with so
    many experts of each mixture. The others are added: ranks divide their number.
    """
    known = len(context.facts)
    changes = {"export_to_gm": {"complete": False, "num_moe_experts_for_export": experts}}
    transforms = [each for each in pipeline_for(context, changes) if each.config.stage in _UP_TO]
    exported, at = (
        [each.key for each in transforms].index(key)
        for key in ("export_to_gm", "apply_sharding_hints")
    )
    module = Pipeline(transforms[: exported + 1]).run(context)
    if context.left_out:
        add_experts(_graph(module), context.left_out)
    module = Pipeline(transforms[exported + 1 : at]).run(context, start=module)
    times = Occurrences.beside(context.left_out)
    (count, whole), readers = _count(_graph(module), times), _readers(_graph(module))
    graph = _graph(Pipeline(transforms[at : at + 1]).run(context, start=module))
    return Division(
        world_size=context.ranks.world_size,
        weights=_divided(graph, readers, times),
        all_weights=count,
        collectives=_collectives(graph, times),
        rank_bytes=_count(graph, times)[1],
        whole_bytes=whole,
        facts=tuple(context.facts[known:]),
    )


def _in_stages(context: TransformContext, count: int) -> Division:
    """Return what each of the pipeline stages has; all layers are looked at."""
    transforms = [each for each in pipeline_for(context) if each.config.stage in _UP_TO]
    at = [each.key for each in transforms].index("split_pipeline_stages")
    known = len(context.facts)
    graph = _graph(Pipeline(transforms[:at]).run(context))
    stages, sent = [], 0
    for stage in range(count):
        own = copy_graphs(graph)
        assert isinstance(own, fx.GraphModule)
        done = split(own, rank_of_stage(stage, count), count)
        stages.append((len(done.layers[stage]), bytes_read_by(own)))
        sent += done.sent
    return Division(
        world_size=count,
        collectives={"send_to_stage": sent},
        rank_bytes=stages[-1][1],
        whole_bytes=bytes_read_by(graph),
        stages=tuple(stages),
        facts=tuple(context.facts[known:]),
    )


def _graph(module: nn.Module) -> fx.GraphModule:
    ((_, graph),) = graph_modules(module)
    return graph


def _readers(graph: fx.GraphModule) -> list[tuple[str, set[str]]]:
    """Return the layer type of each call that has a hint, with the weights that it reads."""
    return [
        (hint.layer_type, {str(each.target) for each in node.all_input_nodes if _is_read(each)})
        for node in graph.graph.nodes
        if node.op == "call_function" and (hint := hint_of(node)) is not None
    ]


def _is_read(node: fx.Node) -> bool:
    return node.op == "get_attr"


def _divided(
    graph: fx.GraphModule, readers: list[tuple[str, set[str]]], times: Occurrences
) -> dict[str, int]:
    """Return how many weights are divided, by layer type: cut, or of a mixture whose experts the
    ranks divide by their numbers.
    """
    cut, left = set(weight_plan(graph).shares), _read(graph)
    types: dict[str, str] = {}
    for layer_type, names in readers:
        types |= dict.fromkeys(names & cut if names <= left else names, layer_type)
    found: Counter[str] = Counter()
    for name, layer_type in types.items():
        found[layer_type] += times.of_tensor(name)
    return dict(found)


def _collectives(graph: fx.GraphModule, times: Occurrences) -> dict[str, int]:
    found: Counter[str] = Counter()
    for node in nodes_of(graph, ops.dist_all_reduce, ops.all_gather):
        layer = layer_of(node, times.stack) if times.stack else None
        found[op_name(node)] += times.of_layer(layer)
    return dict(found)


def _read(graph: fx.GraphModule) -> set[str]:
    """Return the weights that the result is computed from, one name of those that are tied."""
    live = ancestors([graph.graph.output_node()])
    read = {str(node.target) for node in live if _is_read(node)}
    return {names[0] for names in tied_names(graph) if read & set(names)}


def _count(graph: fx.GraphModule, times: Occurrences) -> tuple[int, int]:
    """Return how many weights the whole model reads, and their bytes."""
    names = _read(graph)
    sizes = (times.of_rows(name) * graph.get_parameter(name).nbytes for name in names)
    return sum(map(times.of_tensor, names)), sum(sizes)
