"""Linear attention with correction and without a gate (DeltaNet), from modeling code to the op that
has a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.analysis.recognise.mixers import probe_scan
from onboard.analysis.recognise.recorder import HelperCall
from tests.unit.codegen.conftest import Translate

HELPER = """
def delta_rule(
    query, key, value, beta, chunk_size=64, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
):
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = query.new_zeros(*query.shape[:1], *query.shape[2:], value.shape[-1])
    out = []
    for t in range(query.shape[1]):
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        correction = (value[:, t] - known) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], correction)
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(out, 1), state if output_final_state else None
"""
TOY = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.size, 3 * config.size, bias=False)
        self.rate = nn.Linear(config.size, config.heads)
        self.out = nn.Linear(config.size, config.size, bias=False)

    def forward(self, x, cache=None):
        query, key, value = self.qkv(x).view(*x.shape[:2], 3 * self.heads, -1).chunk(3, dim=2)
        beta = self.rate(x).sigmoid()
        mixed, state = delta_rule(query, key, value, beta, use_qk_l2norm_in_kernel=True)
        return self.out(mixed.reshape(x.shape))
"""


def _function(text: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    return names["delta_rule"]  # type: ignore[no-any-return]


def _call(text: str, **others: Any) -> HelperCall:
    print("seed", seed := random.getrandbits(20))
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 2, 11, 3, 5, generator=generator)
    given = {
        "query": query,
        "key": 0.4 * key,
        "value": value,
        "beta": torch.rand(2, 11, 3, generator=generator),
    }
    defaults = {
        "chunk_size": 64,
        "initial_state": None,
        "output_final_state": False,
        "use_qk_l2norm_in_kernel": False,
    }
    return HelperCall("delta_rule", _function(text), {**given, **defaults, **others})


def test_the_delta_rule_without_a_gate_is_the_op() -> None:
    found = probe_scan(_call(HELPER))
    assert found is not None
    assert (found.kind, found.parameters) == ("scan", {"op": "torch_delta_rule"})


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(value[:, t] - known)", "value[:, t]"),  # linear attention
        ("state = state +", "state = 0.9 * state +"),  # it forgets
        ("(x * x).sum(-1", "(x * x).mean(-1"),
    ],
)
def test_another_rule_is_not(right: str, wrong: str) -> None:
    assert right in HELPER
    assert probe_scan(_call(HELPER.replace(right, wrong))) is None


def test_a_call_with_a_state_is_not() -> None:
    assert probe_scan(_call(HELPER, initial_state=torch.zeros(2, 3, 5, 5))) is None


def test_a_layer_of_it_is_translated_to_the_op_and_computes_the_same(translate: Translate) -> None:
    state, init, forward = translate(
        HELPER + TOY, {"heads": 3, "size": 12}, scans={"delta_rule": "torch_delta_rule"}
    )
    assert "torch.ops.onboard.torch_delta_rule(" in forward
    assert "delta_rule(query" not in forward.replace("torch_delta_rule(query", "")
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec("from torch import nn\n" + HELPER + TOY, names)
    config = type("Config", (), {"heads": 3, "size": 12})
    toy, x = names["Toy"](config), torch.randn(2, 7, 12)
    body = "\n".join(f"    {line}" for line in forward.splitlines())
    exec(f"def forward(self, {', '.join(state.methods['forward'].parameters)}):\n{body}", names)
    for name in ("heads", "config"):
        setattr(toy, name, getattr(toy, name, config))
    with torch.no_grad():
        torch.testing.assert_close(names["forward"](toy, x), toy(x), rtol=1e-5, atol=1e-5)
