"""Weights of several attentions that are combined before they meet the values are attentions that are
combined; a combination that is not linear in the values stays.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import fx

from onboard.codegen.cores.replace import replace_attention
from tests.unit.codegen.test_cores import (
    DIM,
    HEADS,
    NoInput,
    Way,
    joined,
    masked,
    samples,
    traced,
)


def _twice(way: Way) -> tuple[fx.GraphModule, fx.GraphModule]:
    block = NoInput(way)
    return traced(block), traced(block)


def _weights(q: Any, k: Any) -> Any:
    return masked(q @ k.transpose(2, 3) * DIM**-0.5).softmax(-1)


def difference(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined((_weights(q, k) - m.one.exp() * _weights(k, q)) @ v)


def share_of_heads(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    share = m.slopes.view(1, HEADS, 1, 1)
    return joined(torch.matmul(_weights(q, k) * (1 - share) + share * _weights(k, q), v))


def cast_of_three(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    three = 0.5 * _weights(q, k) - _weights(k, q) + _weights(q.flip(-1), k).float()
    return joined(three.to(v.dtype) @ v)


def by_axes(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    w = torch.sub(_weights(q, k), _weights(k, q)) * 0.7
    return joined(torch.einsum("bhqk,bhkd->bhqd", w, v))


@pytest.mark.parametrize(
    ("way", "ops"), [(difference, 2), (share_of_heads, 2), (cast_of_three, 3), (by_axes, 2)]
)
def test_values_meet_each_of_the_weights(way: Way, ops: int) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    gm, before = _twice(way)
    found = replace_attention(gm, samples(None))
    assert [each.reason for each in found] == [""] * ops
    made = [node for node in gm.graph.nodes if "torch_attention" in str(node.target)]
    assert len(made) == ops
    assert "softmax" not in gm.code
    x = torch.randn(2, 19, 24)
    torch.testing.assert_close(gm(x), before(x), rtol=1e-4, atol=1e-5)


def weights_of_keys(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    share = v[..., :1].transpose(2, 3).sigmoid()
    return joined((_weights(q, k) - share * _weights(k, q)) @ v)


def product_of_weights(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined((_weights(q, k) * _weights(k, q)) @ v)


def mixed_heads(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined((_weights(q, k) - _weights(k, q).roll(1, 1)) @ v)


@pytest.mark.parametrize("way", [weights_of_keys, product_of_weights, mixed_heads])
def test_another_combination_stays(way: Way) -> None:
    torch.manual_seed(random.randrange(2**31))
    gm, before = _twice(way)
    replace_attention(gm, samples(None))
    x = torch.randn(2, 19, 24)
    torch.testing.assert_close(gm(x), before(x), rtol=1e-4, atol=1e-5)
    assert gm.code.count("softmax") >= 1
