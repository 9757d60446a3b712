"""Experts whose weights lie flat in another module, and experts that return their input."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from onboard.analysis.recognise.experts import probe_experts
from onboard.analysis.recognise.recorder import ModuleCall

HIDDEN, WIDTH, EXPERTS, TOP = 12, 10, 4, 2


def _flat() -> nn.Module:
    return DbrxExperts(
        DbrxFFNConfig(hidden_size=HIDDEN, ffn_hidden_size=WIDTH, moe_num_experts=EXPERTS)
    )


def _with_identities(**changes: Any) -> nn.Module:
    sizes = {
        "expert_ffn_hidden_size": WIDTH,
        "hidden_size": HIDDEN,
        "n_routed_experts": EXPERTS,
        "zero_expert_num": 3,
    }
    return LongcatFlashExperts(SimpleNamespace(**{**sizes, "hidden_act": "silu", **changes}))


def _separate(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of experts with stacks as checkpoints have them."""
    pairs = [
        (*module.gate_up_proj[index].chunk(2), module.down_proj[index]) for index in range(EXPERTS)
    ]
    names = ("gate_proj", "up_proj", "down_proj")
    return {
        f"{index}.{name}.weight": weight
        for index, weights in enumerate(pairs)
        for name, weight in zip(names, weights, strict=True)
    }


def _call(module: nn.Module, lead: tuple[int, ...], beyond: int = 0) -> ModuleCall:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = int(torch.tensor(lead).prod())
    x = torch.randn(*lead, HIDDEN)
    chosen = torch.rand(tokens, EXPERTS + beyond).argsort(dim=-1)[:, :TOP]
    args = (x, chosen, torch.rand(tokens, TOP))
    with torch.no_grad():
        return ModuleCall(args=args, kwargs={}, output=module(*args))


def test_flat_matrices_are_found_out() -> None:
    module = _flat()
    found = probe_experts(module, _call(module, (1, 7)), {})
    assert found is not None
    expected = {
        "layout": "flat",
        "gate": "mlp.w1",
        "down": "mlp.w2",
        "up": "mlp.v1",
        "experts": "num_experts",
    }
    assert expected.items() <= found.parameters.items()
    assert (found.parameters["act"], found.parameters["act_class"]) == (
        "mlp.activation_fn",
        "DbrxExpertGLU",
    )
    assert not found.parameters["identity"]


def test_experts_that_return_their_input_are_found_out() -> None:
    module = _with_identities()
    found = probe_experts(module, _call(module, (50,), beyond=3), _separate(module))
    assert found is not None
    assert (found.parameters["layout"], found.parameters["experts"]) == (
        "modules",
        "num_routed_experts",
    )
    assert found.parameters["identity"]


def test_experts_beyond_the_last_that_do_something_else_are_no_experts() -> None:
    module = _with_identities()
    call = _call(module, (50,), beyond=3)
    assert probe_experts(module, call, _separate(module)) is not None
    module.identity_expert = nn.Tanh()
    assert probe_experts(module, call, _separate(module)) is None


def test_the_number_of_experts_must_have_one_name() -> None:
    module = _flat()
    call = _call(module, (1, 7))
    assert probe_experts(module, call, {}) is not None
    module.other = EXPERTS
    assert probe_experts(module, call, {}) is None
