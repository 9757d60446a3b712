"""Model files without an op by which tokens reach one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.codegen.without_cache import check_mixing, mixing_module, unknown_mixing
from onboard.errors import UntranslatableError


class _Summing(nn.Module):
    """What came before is added up, each token weighed by how far back it is."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        length = hidden_states.shape[1]
        places = torch.arange(length)
        decay = (0.9 ** (places[:, None] - places[None, :])).tril()
        return decay @ hidden_states, None


class _Alone(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states * 2, None


def _model(mixer: type[nn.Module] | None) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers if mixer else []:
        layer.self_attn = mixer()
    return model


def test_tokens_that_reach_one_another_by_no_op_are_refused_by_their_module() -> None:
    model = _model(_Summing)
    assert mixing_module(model) == ("model.layers.0.self_attn", "_Summing")
    with pytest.raises(
        UntranslatableError,
        match=r"in model\.layers\.0\.self_attn \(_Summing at test_without_cache.py:",
    ):
        check_mixing("x = torch.ops.onboard.torch_rmsnorm(x)", model)


@pytest.mark.parametrize(
    "op", ["torch_attention", "torch_lightning_attention", "torch_causal_conv1d"]
)
def test_ops_with_a_cache_are_enough(op: str) -> None:
    check_mixing(f"x = torch.ops.onboard.{op}(x)", _model(_Summing))


@pytest.mark.parametrize(
    "code",
    [
        *("nn.functional.softmax(scores, dim=-1) @ v", "F.scaled_dot_product_attention(q, k, v)"),
        "F.pad(x, (3, 0)).unfold(-1, 4, 1)",
    ],
)
def test_what_is_written_out_is_matched_later(code: str) -> None:
    check_mixing(f"x = {code}", _model(_Summing))


_IN_A_FILE = """
def weighed(x):
    return torch.softmax(x @ x.mT, dim=-1) @ x

class Core(nn.Module):
    def forward(self, x):
        return weighed(x)

class Router(nn.Module):
    def forward(self, x):
        return torch.softmax(self.gate(x), dim=-1)

class _Summing(nn.Module):
    def forward(self, hidden_states):
        return {mixed}

class Layer(nn.Module):
    def __init__(self):
        self.mixer, self.router = _Summing(), Router()
"""


@pytest.mark.parametrize("mixed", ["weighed(hidden_states)", "Core()(hidden_states)"])
def test_attention_is_found_behind_functions_and_classes(mixed: str) -> None:
    check_mixing(_IN_A_FILE.replace("{mixed}", mixed), _model(_Summing))


@pytest.mark.parametrize("elsewhere", ["", "\nx = torch.ops.onboard.torch_attention(q, k, v)"])
def test_a_softmax_of_another_module_is_no_attention(elsewhere: str) -> None:
    text = _IN_A_FILE.replace("{mixed}", "self.decay @ hidden_states") + elsewhere
    with pytest.raises(UntranslatableError, match=r"in model\.layers\.0\.self_attn \(_Summing at"):
        check_mixing(text, _model(_Summing))


class _Shifted(nn.Module):
    """What torch's own module does is the mixer's doing."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states + self.shift(hidden_states), None


class _Attending(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return _weighed(hidden_states), None


class _Attends(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.mixed(hidden_states), None

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class _InheritsAttention(_Attends):
    """Attention that its base has."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.mixed(hidden_states * 2), None


def _weighed(x: torch.Tensor) -> torch.Tensor:
    scores = (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9)
    return torch.softmax(scores, dim=-1) @ x


def test_why_a_model_that_stops_elsewhere_would_have_no_cache() -> None:
    found = unknown_mixing(_model(_Shifted), {"LlamaMLP"})
    assert found is not None
    assert found.startswith("in model.layers.0.self_attn (_Shifted at test_without_cache.py:")
    assert unknown_mixing(_model(_Shifted), {"_Shifted"}) is None
    assert unknown_mixing(_model(_Attending), set()) is None  # its function has softmax
    assert unknown_mixing(_model(_InheritsAttention), set()) is None  # its base has attention
    assert unknown_mixing(_model(_Alone), set()) is None


def test_tokens_that_stay_alone_need_no_op() -> None:
    model = _model(_Alone)
    assert mixing_module(model) is None
    check_mixing("", model)


def test_attention_is_the_module_in_which_tokens_meet() -> None:
    assert mixing_module(_model(None)) == ("model.layers.0.self_attn", "LlamaAttention")
