"""Each item of the checklist notices its violation, and no item notices another's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from onboard.analysis.spec import ModelSpec
from onboard.codegen.format import LINE_LENGTH
from onboard.review.reviewer import CHECKLIST, Review, review

MODEL, TEST = "models/modeling_llama.py", "tests/equivalence/test_llama_modeling.py"
SIN = "sin: torch.Tensor\n    ) -> torch.Tensor:"
TOP_FORWARD = (
    "def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput:"
)
ASSERT = '        assert position_ids is not None, "position_ids are always given"\n'
RETURN = "return CausalLMOutput(logits=self.lm_head(self.model(input_ids, position_ids)))"
REGISTER = 'register_causal_lm("LlamaConfig", LlamaForCausalLM)\n'
QUERY = "        query = self.q_proj(hidden_states)"
LAYER_RETURN = (
    "        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))\n"
)
NORM = "torch.ops.onboard.torch_rmsnorm(hidden_states, self.weight, self.variance_epsilon)"
LIFTED = """
def test_loads(pair: Pair) -> None:
    assert pair.actual is not None
"""
COPY = """
class Reference(nn.Module):
    pass


@dataclass
"""


@dataclass(frozen=True)
class Violation:
    """A change of one file that breaks one rule."""

    item: str
    file: str
    old: str
    new: str


VIOLATIONS = [
    Violation(
        "M01", MODEL, "class LlamaForCausalLM(nn.Module)", "class LlamaForCausalLM(nn.Sequential)"
    ),
    Violation(
        "M02",
        MODEL,
        TOP_FORWARD,
        TOP_FORWARD.replace("position_ids: torch.Tensor", "position_ids=None"),
    ),
    Violation("M03", MODEL, ASSERT, ""),
    Violation(
        "M04", MODEL, ASSERT, ASSERT + "        position_ids = torch.arange(input_ids.shape[1])\n"
    ),
    Violation(
        "M04",
        MODEL,
        ASSERT,
        ASSERT + "        if (position_ids := input_ids.cumsum(-1)) is None:\n            pass\n",
    ),
    Violation("M05", MODEL, RETURN, "return self.lm_head(self.model(input_ids, position_ids))"),
    Violation("M06", MODEL, REGISTER, REGISTER + "VERSION = 1\n"),
    Violation("M06", MODEL, REGISTER, REGISTER.replace(")", ", first_position=lambda config: 2)")),
    Violation(
        "M07",
        MODEL,
        TOP_FORWARD,
        TOP_FORWARD.replace("position_ids: torch.Tensor", "position_ids, labels"),
    ),
    Violation(
        "M07",
        MODEL,
        TOP_FORWARD,
        TOP_FORWARD.replace("position_ids: torch.Tensor", "position_ids, **kwargs"),
    ),
    Violation(
        "M11",
        MODEL,
        SIN,
        "sin, attention_mask=None) -> torch.Tensor:",
    ),
    Violation(
        "M11",
        MODEL,
        SIN,
        "sin, inputs_embeds=None) -> torch.Tensor:",
    ),
    Violation("M11", MODEL, SIN, "sin, **kwargs) -> torch.Tensor:"),
    Violation(
        "M08",
        MODEL,
        '"cos", angles.cos() * scaling, persistent=False',
        '"cos", angles.cos() * scaling',
    ),
    Violation(
        "M09",
        MODEL,
        f"{SIN}\n        batch",
        "sin, position_ids) -> torch.Tensor:\n        cos, sin = cos[position_ids], sin[position_ids]\n        batch",
    ),
    Violation("M10", MODEL, "self.q_proj", "self.query_proj"),
    Violation("M10", MODEL, "bias=config.mlp_bias", "bias=True"),
    Violation("P01", MODEL, NORM, "hidden_states * self.weight * self.variance_epsilon"),
    Violation("P01", MODEL, "torch_rope_with_explicit_cos_sin", "torch_rope_with_qk_interleaving"),
    Violation(
        "P02",
        MODEL,
        QUERY,
        "        hidden_states = nn.functional.rotate_half(hidden_states)\n" + QUERY,
    ),
    Violation(
        "P09",
        MODEL,
        QUERY,
        "        hidden_states = nn.functional.rms_norm(hidden_states, [8])\n" + QUERY,
    ),
    Violation("P09", MODEL, QUERY, "        hidden_states = hidden_states.softmax(-1)\n" + QUERY),
    Violation(
        "P03", MODEL, QUERY, "        torch.ops.onboard.torch_anything(hidden_states)\n" + QUERY
    ),
    Violation(
        "P03", MODEL, QUERY, "        torch.ops.onboard.torch_silu_and_mul(hidden_states)\n" + QUERY
    ),
    Violation(
        "P04", MODEL, QUERY, "        torch.ops.onboard.triton_rmsnorm(hidden_states)\n" + QUERY
    ),
    Violation("P04", MODEL, QUERY, "        torch.ops.flashinfer.norm(hidden_states)\n" + QUERY),
    Violation(
        "P05",
        MODEL,
        QUERY,
        "        hidden_states = self.k_proj.kv_cache.update(hidden_states)\n" + QUERY,
    ),
    Violation(
        "P06",
        MODEL,
        QUERY,
        "        hidden_states = nn.functional.dropout(hidden_states)\n" + QUERY,
    ),
    Violation(
        "P06", MODEL, QUERY, "        hidden_states = hidden_states + int(self.training)\n" + QUERY
    ),
    Violation(
        "P07", MODEL, QUERY, "        hidden_states = hidden_states.flash_attn_func()\n" + QUERY
    ),
    Violation(
        "P08", MODEL, QUERY, "        hidden_states = hidden_states.repeat_interleave(1)\n" + QUERY
    ),
    Violation("T01", MODEL, "sha256 ", "sha256 0"),
    Violation("T01", MODEL, "Generated by onboard 0.1.0", "Written"),
    Violation("T01", MODEL, "(template 1)", ""),
    Violation("T01", MODEL, "transformers 5", "transformers 4"),
    Violation(
        "T02",
        MODEL,
        "import onboard.ops",
        "from transformers.models.mistral.modeling_mistral import MistralMLP  # noqa: F401\nimport onboard.ops",
    ),
    Violation("T03", MODEL, "import onboard.ops", "import numpy  # noqa: F401\nimport onboard.ops"),
    Violation(
        "T04",
        MODEL,
        "class LlamaRMSNorm",
        "class RopeConfig(dict):\n    pass\n\n\nRopeConfig()\n\n\nclass LlamaRMSNorm",
    ),
    Violation(
        "T05", MODEL, "class LlamaRMSNorm", "def unused():\n    pass\n\n\nclass LlamaRMSNorm"
    ),
    Violation(
        "T06",
        MODEL,
        "self.head_dim = config.head_dim\n",
        "self.head_dim = config.head_dim\n        self.idle = 1\n",
    ),
    Violation(
        "T07",
        MODEL,
        LAYER_RETURN,
        "        if cos is None:\n            return hidden_states\n" + LAYER_RETURN,
    ),
    Violation(
        "T08",
        MODEL,
        "        self.mlp = LlamaMLP(config)\n",
        "        self.mlp = LlamaMLP(config)\n        torch.nn.Parameter(torch.empty(2, 3, 4))\n",
    ),
    Violation("T09", MODEL, QUERY, '        eval("1")\n' + QUERY),
    Violation("T10", MODEL, REGISTER, "# A comment.\n" * 200 + REGISTER),
    Violation("T11", MODEL, "import torch\n", "import torch\nimport math\n"),
    Violation("T11", MODEL, "head_dim = config.head_dim", "head_dim  =  config.head_dim"),
    Violation("E01", TEST, "hidden_size=64", "hidden_size=4096"),
    Violation("E02", TEST, '"modeling_llama.py"', '"modeling_mistral.py"'),
    Violation("E02", TEST, "Path(__file__).resolve().parents[2]", 'Path("/elsewhere")'),
    Violation(
        "E03", TEST, "from transformers.models.llama.modeling_llama import", "from copies import"
    ),
    Violation("E04", TEST, "\n@dataclass\n", COPY),
    Violation(
        "E05",
        TEST,
        "expected = hf_causal_lm(LlamaForCausalLM, CONFIG, ",
        "expected = make(LlamaForCausalLM, CONFIG, ",
    ),
    Violation("E06", TEST, "    copy_weights(expected, actual)\n", ""),
    Violation(
        "E07",
        TEST,
        "    device, seed = request.param, fresh_seed()\n",
        "    device, seed = request.param, torch.manual_seed(0)\n",
    ),
    Violation("E08", TEST, "BATCH, LENGTH = 2, ", "BATCH, LENGTH = 1, "),
    Violation(
        "E08",
        TEST,
        "    calls = record_calls(",
        "    torch.arange(LENGTH)\n    calls = record_calls(",
    ),
    Violation("E09", TEST, "\n\ndef test_model", "\n" + LIFTED + "\n\ndef test_model"),
    Violation("E10", TEST, "def test_model", "@pytest.mark.xfail\ndef test_model"),
    Violation("E10", TEST, "not torch.cuda.is_available()", "True"),
    Violation("E11", TEST, "CPU_FLOAT32 = 1e-5", "CPU_FLOAT32 = 1e-3"),
    Violation("E11", TEST, '"layer": 0.05', '"layer": 0.5'),
    Violation("E12", TEST, '    "model.layers.0.mlp": "mlp",\n', ""),
    Violation(
        "E12",
        TEST,
        '@pytest.mark.parametrize("path", BLOCKS)',
        '@pytest.mark.parametrize("path", [])',
    ),
    Violation(
        "E13", TEST, '"model.layers.0": "full_attention"', '"model.layers.0": "sliding_attention"'
    ),
    Violation(
        "E13",
        TEST,
        '@pytest.mark.parametrize("path", LAYERS)',
        '@pytest.mark.parametrize("path", [])',
    ),
    Violation("E14", TEST, 'pair.calls[""]', 'pair.calls["model"]'),
    Violation("E14", TEST, "call.replay(pair.actual)", "call.replay(pair.expected)"),
    Violation(
        "E15", TEST, "dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}", "dynamic = {0: Dim.DYNAMIC}"
    ),
    Violation(
        "E17", TEST, "pair.expected(text, use_cache=False).logits", "pair.actual(text).logits"
    ),
    Violation("E17", TEST, "test_cached_decode", "test_decode"),
    Violation("E16", TEST, "[(BATCH, LENGTH), (BATCH + 1, LENGTH - 7)]", "[(BATCH, LENGTH)]"),
    Violation("E18", TEST, "NEW_TOKENS = 32", "NEW_TOKENS = 1"),
]


def reviewed(root: Path, files: dict[str, str], spec: ModelSpec) -> Review:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    return review(root / MODEL, root / TEST, spec, root)


def formatted(text: str) -> str:
    """A violation is about content: it must not show as bad form as well."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--isolated",
        "--line-length",
        str(LINE_LENGTH),
        "-",
    ]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def test_every_item_has_a_violation() -> None:
    assert {violation.item for violation in VIOLATIONS} == {item.id for item in CHECKLIST}


def test_good_files_pass_with_evidence(
    tmp_path: Path, llama_files: dict[str, str], llama_spec: ModelSpec
) -> None:
    verdict = reviewed(tmp_path, llama_files, llama_spec)
    assert [(item.id, item.evidence) for item in [*verdict.failed, *verdict.noted]] == []
    assert verdict.notes == 0
    assert all(
        line.startswith((f"{MODEL}:", f"{TEST}:"))
        for item in verdict.items
        for line in item.evidence
    )
    assert all(item.evidence for item in verdict.items)


@pytest.mark.parametrize(
    "violation", VIOLATIONS, ids=[f"{v.item}-{n}" for n, v in enumerate(VIOLATIONS)]
)
def test_an_item_notices_its_violation_alone(
    tmp_path: Path, llama_files: dict[str, str], llama_spec: ModelSpec, violation: Violation
) -> None:
    text = llama_files[violation.file]
    assert violation.old in text
    text = text.replace(violation.old, violation.new)
    broken = {**llama_files, violation.file: text if violation.item == "T11" else formatted(text)}
    result = reviewed(tmp_path, broken, llama_spec)
    found = [*result.failed, *result.noted]
    also = {"E18"} if violation.file == TEST else set()  # what is not as it is generated
    assert {item.id: item.evidence for item in found}.keys() == {violation.item} | also
    assert found[0].evidence[0].startswith(f"{violation.file}:")
    kind = next(item.kind for item in CHECKLIST if item.id == violation.item)
    assert [found[0].verdict, result.as_json()["verdict"]] == {
        "contract": ["FAIL", "FAIL"],
        "style": ["NOTE", "PASS"],
    }[kind]
    assert result.notes == (len(found[0].evidence) if kind == "style" else 0)
