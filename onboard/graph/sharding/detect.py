"""Hints for a graph of canonical ops that has none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.fx import GraphModule, Node

from onboard.graph.fx import ancestors, arguments, is_op
from onboard.graph.sharding.cuts import Cut, Layout, evenly, layout_of, nearly_evenly
from onboard.graph.sharding.demands import (
    Demand,
    Demands,
    agreed,
    is_linear,
    is_possible,
    is_weight,
    letters_of,
    operand_layout,
)
from onboard.graph.sharding.distribution import Distribution
from onboard.graph.sharding.file_hints import FileHint, weight_of
from onboard.graph.sharding.hints import Hint
from onboard.graph.sharding.layer_work import Mixer, mixer
from onboard.graph.sharding.local_calls import EXPERTS
from onboard.graph.sharding.signatures import Signature, ops, shape, signature

aten = torch.ops.aten
VOCABULARY = "vocabulary"
"""The layer type of the embedding and the head."""


def detect(
    gm: GraphModule, groups: Distribution, said: Mapping[str, FileHint] = MappingProxyType({})
) -> dict[Node, Hint]:
    """Return the hints of a graph whose shapes are known; linear layers are cut as is `said` of
    their weights, and what nothing is said of is found out.
    """
    demands = Demands(gm.graph, groups.world_size)
    _ask_head(demands, gm.graph.output_node())
    for node in reversed(gm.graph.nodes):
        if node.op != "call_function":
            demands.settle(node)
        elif (found := mixer(node)) is not None:
            _cut_mixer(demands, node, found, groups)
        elif (own := _said_of(node, said)) is not None:
            _cut_as_said(demands, node, own)
        elif demands.settle(node) is None:
            if is_linear(node):
                _try_closing(demands, node)
            elif is_op(node, aten.embedding):
                _cut_vocabulary(demands, node)
    return demands.hints


def _said_of(node: Node, said: Mapping[str, FileHint]) -> FileHint | None:
    found = signature(node) if said else None
    weights = [each.node for each in found.operands if each.letters == "NK"] if found else []
    return said.get(weight_of(weights[0]) or "") if weights else None


def _cut_as_said(demands: Demands, node: Node, said: FileHint) -> None:
    """Cut a linear layer as its file says, unless what follows needs more on some rank, or all of
    it; one that is to be whole is so whoever asks.
    """
    size, ranks = shape(node)[-1], demands.world_size
    asked, last = demands.asked.pop(node, None), len(shape(node)) - 1
    if said.tp_mode == "rowwise":
        _close(demands, node, said.layer_type)
    elif said.tp_mode == "colwise" and asked is not None and isinstance(size, int):
        cut, needed = said.cut(size, ranks), agreed(asked.parts[0]).cuts.get(last)
        fits = cut is not None and (needed is None or needed.positions_in(cut) is not None)
        demands.ask(node, layout_of([(last, cut if fits else needed)]), said.layer_type)
        demands.settle(node)


def _close(demands: Demands, node: Node, layer_type: str) -> None:
    """Let a linear layer add up what ranks have."""
    found = signature(node)
    assert found is not None
    for operand, dim, size in found.operands_with("K"):
        cut = evenly(size, demands.world_size) if isinstance(size, int) else None
        if cut is not None and not is_weight(operand.node):
            demands.ask(operand.node, Layout({dim: cut}), layer_type)
            demands.hints[node] = Hint(layer_type, letters={"K": cut})


def detect_simple(gm: GraphModule, groups: Distribution) -> dict[Node, Hint]:
    """Return hints with which each linear layer computes its rank's outputs, which are gathered."""
    hints = {}
    for node in gm.graph.nodes:
        if is_linear(node) and (cut := _of_last(node, groups.world_size)) is not None:
            hints[node] = Hint("unknown", {0: Layout({len(shape(node)) - 1: cut})}, gathered=True)
    return hints


def _of_last(node: Node, world_size: int) -> Cut | None:
    size = shape(node)[-1]
    return evenly(size, world_size) if isinstance(size, int) else None


def _ask_head(demands: Demands, output: Node) -> None:
    """Cut the vocabulary of the logits, if they come from a linear layer alone."""
    logits = output.args[0]
    assert isinstance(logits, Node)
    size = shape(logits)[-1]
    if not isinstance(size, int) or size < demands.world_size:
        return
    layout = Layout({len(shape(logits)) - 1: nearly_evenly(size, demands.world_size)})
    if demands.trial(logits, layout, allowed=[output]) is not None:
        demands.ask(logits, layout, VOCABULARY)


def _cut_vocabulary(demands: Demands, node: Node) -> None:
    """Cut the rows of a table that tokens are looked up in."""
    values = arguments(node)
    table, ids = values["weight"], values["indices"]
    inputs = {str(each.target) for each in ancestors([ids]) if each.op == "placeholder"}
    size = shape(table)[0]
    is_table = table.op == "get_attr" and inputs == {"input_ids"}
    if is_table and isinstance(size, int) and size >= demands.world_size:
        _settle(demands, node, VOCABULARY, {"v": nearly_evenly(size, demands.world_size)})


def _try_closing(demands: Demands, node: Node) -> None:
    """Let a linear layer add up what ranks have, if what it reads can be cut so."""
    found = signature(node)
    assert found is not None
    for operand, dim, size in found.operands_with("K"):
        cut = evenly(size, demands.world_size) if isinstance(size, int) else None
        if is_weight(operand.node) or cut is None:
            continue
        layout = Layout({dim: cut})
        layer_type = demands.trial(operand.node, layout, allowed=[node])
        if layer_type is not None:
            demands.ask(operand.node, layout, layer_type)
            demands.hints[node] = Hint(layer_type, letters={"K": cut})
            _ask_made_weights(demands, found, cut, layer_type)


def _ask_made_weights(demands: Demands, found: Signature, cut: Cut, layer_type: str) -> None:
    """Cut the parameter that a weight is made of, as by `.T`: a rank reads its share alone."""
    for operand, dim, _ in found.operands_with("K"):
        made = is_weight(operand.node) and operand.node.op != "get_attr"
        if made and len(operand.node.users) == 1:
            demands.ask(operand.node, Layout({dim: cut}), layer_type)


def _cut_mixer(demands: Demands, node: Node, found: Mixer, groups: Distribution) -> None:
    """Cut an op that does a layer's work as those behind it ask, else by its own heads."""
    own, asked = signature(node), demands.settle(node)
    if own is None:  # with tensors of other dimensions than usual: all of it is everybody's
        return
    if asked is not None and found.seed in letters_of(own, asked):
        return
    if is_op(node, ops.torch_moe):
        letters = _of_mixture(node, own, groups)
    else:
        cut = evenly(_size(node, own, found.seed), demands.world_size)
        possible = cut is not None and is_possible(own, found.seed, cut)
        letters = {found.seed: cut} if cut is not None and possible else {}
    if letters:
        _settle(demands, node, found.layer_type, letters)
    else:
        demands.hints[node] = _refused(node, own, found)


def _settle(demands: Demands, node: Node, layer_type: str, letters: dict[str, Cut]) -> None:
    """Ask a node itself for cuts of its letters."""
    own = signature(node)
    assert own is not None
    demand = demands.asked[node] = Demand(layer_type, letters=letters)
    demand.parts[0].append(operand_layout(own.outputs[0], shape(node), letters))
    demands.settle(node)


def _refused(node: Node, own: Signature, found: Mixer) -> Hint:
    size = _size(node, own, found.seed)
    counts = {each for _, _, each in own.operands_with(found.seed) if isinstance(each, int)}
    fewer = sorted({each for each in counts if each and size % each == 0} | {size}, reverse=True)
    sizes = [
        each
        for each in range(2, size + 1)
        if (cut := evenly(size, each)) is not None and is_possible(own, found.seed, cut)
    ]
    shown = " and ".join(map(str, fewer))
    return Hint(found.layer_type, refused=f"{shown} {found.called}", sizes=tuple(sizes))


def _size(node: Node, own: Signature, letter: str) -> int:
    """Return the number of a letter's entries: the result's, else the first operand's."""
    if own.is_summed(letter):
        size = next(own.operands_with(letter))[2]
    else:
        size = shape(node)[own.outputs[0].index(letter)]
    assert isinstance(size, int)
    return size


def _of_mixture(node: Node, own: Signature, groups: Distribution) -> dict[str, Cut]:
    """Return the cuts of a mixture: of its list of experts, of their channels, or both."""
    weights = arguments(node)["w1_weight"]
    apart = all(operand.node.op == "get_attr" for operand in own.operands)
    ways = groups.experts(len(weights)) if apart else 1
    channels = groups.of_channels(_size(node, own, "c"), ways)
    if channels is None or len(weights) % ways:
        return {}
    cuts = {EXPERTS: groups.of_experts(len(weights), ways), "c": channels}
    return {letter: cut for letter, cut in cuts.items() if not cut.is_whole}
