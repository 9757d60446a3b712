"""Calling operators' functions directly changes no number, and nothing that others read off the
graph.
"""

from __future__ import annotations

import pytest
import torch

from onboard.cache.cached_sequence import input_names
from onboard.graph.fx import graph_modules, nodes_of
from tests.support.graph.decoder import copied_inputs, decoder, make_cache, set_decode_batch
from tests.support.graph.fusion import apply


@pytest.mark.parametrize("size", [1, 3])
def test_results_and_caches_are_those_of_the_dispatcher(size):
    gm, cache = decoder(), make_cache()
    set_decode_batch(cache, size)
    through, directly = copied_inputs(cache), copied_inputs(cache)
    direct, info, _ = apply("call_ops_directly", gm, shapes=False)
    expected = gm(**through)
    assert torch.equal(direct(**directly), expected)
    assert all(torch.equal(directly[name], through[name]) for name in through)
    assert info.num_matches >= 1


def test_the_graph_stays_visible_with_its_operators():
    gm = decoder()
    before = [str(node.target) for node in gm.graph.nodes]
    direct, _, _ = apply("call_ops_directly", gm, shapes=False)
    ((path, inner),) = graph_modules(direct)
    assert (path, inner) == ("gm", gm)
    assert [str(node.target) for node in gm.graph.nodes] == before
    assert nodes_of(inner, torch.ops.onboard.torch_cached_attention)
    assert input_names(direct) == input_names(gm)
    assert sum(p.numel() for p in direct.parameters()) == sum(p.numel() for p in gm.parameters())


def test_what_something_else_compiled_is_left_alone():
    compiled = torch.nn.Sequential(decoder())
    module, info, _ = apply("call_ops_directly", compiled)
    assert module is compiled
    assert info.skipped
