"""Modeling code that casts queries and keys to float32 for its scores: the canonical op gets
tensors of one dtype.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    GPTJConfig,
    GPTNeoConfig,
    PretrainedConfig,
)

from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.cleanup import clean
from onboard.testing import (
    assert_rmse_close,
    copy_weights,
    fresh_seed,
    generated_causal_lm,
    hf_causal_lm,
)
from tests.support.odd_code import GENERATE, run_apart, save_odd
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[ClassState, str, str]]
MODELS = Path(__file__).resolve().parents[3] / "models"
CONFIGS: dict[str, PretrainedConfig] = {
    "codegen": CodeGenConfig(
        vocab_size=99, n_positions=32, n_embd=64, n_layer=2, n_head=4, rotary_dim=8
    ),
    "gptj": GPTJConfig(vocab_size=99, n_positions=32, n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    "gpt_neo": GPTNeoConfig(
        vocab_size=99,
        max_position_embeddings=32,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_scores_in_float32_are_the_same_in_bfloat16(family: str) -> None:
    config = CONFIGS[family]
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    expected = hf_causal_lm(model_class, config, fresh_seed(), dtype="bfloat16")
    actual = generated_causal_lm(MODELS / f"modeling_{family}.py", config, dtype="bfloat16")
    copy_weights(expected, actual)
    ids, positions = torch.randint(99, (2, 24)), torch.arange(24).expand(2, -1)
    assert_rmse_close(actual(ids, positions).logits, expected(ids).logits, 3e-2, family)


def test_a_table_that_a_forward_casts_is_read_in_that_dtype(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Buffer(torch.ones(4), persistent=False)

    def forward(self, x):
        self.table = self.table.to(device=x.device, dtype=x.dtype)
        return x + self.table
"""
    assert translate(text)[2] == "return x + self.table.to(dtype=x.dtype)"


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_layer_that_a_forward_moves_to_float32_has_its_weights_cast(
    bias: bool, translate: Translate
) -> None:
    text = f"""
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.deep:
            self.gate = nn.Sequential(nn.Linear(4, 4).float(), nn.Linear(4, 3).float()).float()
        else:
            self.gate = nn.Linear(4, 3, bias={bias}).float()

    def forward(self, x):
        if isinstance(self.gate, nn.Linear):
            if self.gate.weight.dtype != torch.float32:
                self.gate = self.gate.float()
                setattr(self.gate.weight, "router", True)
        else:
            self.gate = self.gate.float()
        return self.gate(x.float()).to(x.dtype)
"""
    state, _, forward = translate(text, {"deep": False}, specialised=True)
    assert forward.count(".float()") == 2 + bias
    ours, theirs = (_made(each, {"deep": False}).bfloat16() for each in (_written(state), text))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4).bfloat16()
    assert torch.equal(ours(x), theirs(x))
    assert ours.gate.weight.dtype == torch.bfloat16


def cleaned(text: str) -> str:
    return "\n".join(map(ast.unparse, clean(ast.parse(text).body)))


def test_casts_that_every_reader_undoes_go() -> None:
    text = "q = q.to(torch.float32)\nn = q.size(-2)\nreturn f(q.type_as(v), n)"
    assert cleaned(text) == "n = q.size(-2)\nreturn f(q.type_as(v), n)"


@pytest.mark.parametrize("reader", ["f(q)", "q * 2", "q.type(v)", "q.dtype"])
def test_casts_that_something_sees_stay(reader: str) -> None:
    text = f"q = q.float()\nn = {reader}\nreturn f(q.type_as(v), n)"
    assert cleaned(text) == text


def test_code_that_rounds_by_itself_is_told_so(tmp_path: Path) -> None:
    rounded = "return self.down(F.silu(self.gate(x).bfloat16()) * self.up(x).bfloat16())"
    error = run_apart(GENERATE, [save_odd(tmp_path / "rounding", mlp=rounded)])["rounding"]["error"]
    assert "modeling_odd.py:" in error
    assert "It computes in half precision by itself: have a copy of the code keep" in error
