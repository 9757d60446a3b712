"""A proof has to fail when the file is wrong, and to name the block that is."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from onboard import modeling
from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.verify.block_outputs import compare_outputs
from onboard.verify.blocks import prove
from tests.support.families import config_dict


@cache
def _generated(family: str) -> tuple[ModelSpec, str]:
    spec = analyze(config_dict(family), model=family)
    return spec, generate_model_file(spec)


@pytest.mark.parametrize(
    ("family", "right", "wrong", "block"),
    [
        (
            "llama",
            "self.scaling = self.head_dim**-0.5",
            "self.scaling = self.head_dim**-0.45",
            "layers.0.self_attn",
        ),
        (
            "llama",
            "return residual + hidden_states",
            "return hidden_states",
            "layers.0 .*DecoderLayer",
        ),
        (
            "llama",
            "key_states, cos, sin, ",
            "key_states, sin, cos, ",
            "layers.0.self_attn",
        ),
        ("llama", "angles.cos() * scaling", "angles.cos() * 1.01", "rotary_emb"),
        (
            "llama",
            "self.variance_epsilon = eps",
            "self.variance_epsilon = 0.1",
            "layers.0.input_layernorm",
        ),
        (
            "llama",
            "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
            "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
            "mlp",
        ),
        ("mistral", "self.config.sliding_window", "None", "layers.0.self_attn"),
        ("gemma", "1.0 + self.weight", "self.weight", "layers.0.input_layernorm"),
        ("gemma2", "=self.attn_logit_softcapping", "=None", "layers.0.self_attn"),
        ("gemma2", "logits = torch.tanh(logits)", "pass", "logits"),
        ("granite", "/ self.config.logits_scaling", "", "logits"),
        ("smollm3", "if self.use_rope", "if True", "layers.1.self_attn"),
    ],
)
def test_a_wrong_file_fails_at_the_wrong_block(
    family: str, right: str, wrong: str, block: str
) -> None:
    spec, text = _generated(family)
    assert right in text
    with pytest.raises(
        OnboardError, match=rf"{block}.* differs from transformers: rmse ratio .* has "
    ):
        prove(text.replace(right, wrong), spec, export=False)


def test_a_missing_weight_is_named() -> None:
    spec, text = _generated("llama")
    wrong = text.replace(
        "self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)",
        "self.norm = nn.Identity()",
    )
    with pytest.raises(OnboardError, match="lacks the weight model.norm.weight"):
        prove(wrong, spec)


def test_data_dependent_code_does_not_export() -> None:
    spec, text = _generated("llama")
    wrong = text.replace(
        "        hidden_states = self.embed_tokens(input_ids)\n",
        "        hidden_states = self.embed_tokens(input_ids)[: int(input_ids.max()) + 99]\n",
    )
    assert wrong != text
    with pytest.raises(OnboardError, match=r"holds for a size, or .* \(in LlamaModel\)"):
        prove(wrong, spec)


def test_code_that_branches_by_what_a_tensor_holds_is_said_so() -> None:
    spec, text = _generated("llama")
    line = "        hidden_states = self.embed_tokens(input_ids)\n"
    branch = "        if hidden_states.abs().max() > 1e9:\n            hidden_states = 2 * hidden_states\n"
    assert line in text
    with pytest.raises(OnboardError, match=r"the way that it takes \(in LlamaModel\)"):
        prove(text.replace(line, line + branch), spec)


def test_proving_leaves_the_table_of_models_alone() -> None:
    spec, text = _generated("llama")
    before = dict(modeling._MODELS)
    prove(text, spec, export=False)
    assert before == modeling._MODELS


def test_what_a_file_was_not_made_for_it_refuses() -> None:
    _, text = _generated("gemma3_text")
    spec = analyze(config_dict("gemma3_text"), model="x")
    spec.config["use_bidirectional_attention"] = True
    with pytest.raises(OnboardError, match="does not cover .*: use_bidirectional_attention"):
        prove(text, spec, export=False)


def test_a_file_that_cannot_be_built_says_why() -> None:
    spec, text = _generated("llama")
    with pytest.raises(OnboardError, match="cannot be made for its own config: .*no_such_size"):
        prove(text.replace("config.hidden_size", "config.no_such_size"), spec, export=False)


def test_sizes_that_a_block_reads_off_its_data_must_be_the_same() -> None:
    assert compare_outputs("gate", "Gate", [3, 0, 2], [3, 0, 2]) == ([3, 0, 2], 0.0)
    with pytest.raises(OnboardError, match=r"gate \(Gate\) gives \[3, 0, 2\], not \[3, 1, 1\]"):
        compare_outputs("gate", "Gate", [3, 0, 2], [3, 1, 1])


def test_what_an_expert_makes_of_no_tokens_has_no_error() -> None:
    nothing = torch.zeros(0, 4)
    assert compare_outputs("expert", "Expert", nothing, nothing.clone())[1] == 0.0
    with pytest.raises(OnboardError, match="shape"):
        compare_outputs("expert", "Expert", nothing, torch.zeros(0, 5))


def test_a_loss_of_zero_beside_a_result_is_no_difference() -> None:
    x, zero = torch.randn(2, 3, 4), torch.tensor(0.0)
    parts, error = compare_outputs("layer", "Layer", (x, zero), (x, zero.clone()))
    assert error == 0.0
    assert torch.equal(parts[0], x)
    with pytest.raises(OnboardError, match="differs from transformers"):
        compare_outputs("layer", "Layer", (x, zero), (x, torch.tensor(0.1)))


def test_lists_of_tensors_are_compared_one_by_one() -> None:
    steps = [torch.randn(2, 3) for _ in range(3)]
    forced, error = compare_outputs("model", "Model", steps, [item.clone() for item in steps])
    assert error == 0.0
    assert all(torch.equal(one, other) for one, other in zip(forced, steps, strict=True))
    with pytest.raises(OnboardError, match="differs from transformers"):
        compare_outputs("model", "Model", steps, [*steps[:2], steps[2] + 0.1])
    with pytest.raises(ValueError, match="shorter"):
        compare_outputs("model", "Model", steps, steps[:2])
