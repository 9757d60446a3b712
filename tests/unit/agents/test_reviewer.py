"""Each item of the checklist notices its violation, and no item notices another's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onboard.analysis.spec import ModelSpec
from onboard.analysis.spec_blocks import make_block
from onboard.codegen.format import run_ruff
from onboard.codegen.tidy.lines import LINE_LENGTH
from onboard.render import TEST_SUITE
from onboard.review.equivalence_checks import OWNED
from onboard.review.limit_checks import LIMITS
from onboard.review.python_source import Source
from onboard.review.reviewer import CHECKLIST, Review, review
from onboard.testing.suite import EquivalenceSuite, FirstPositionSuite

MODEL, TEST = "models/modeling_llama.py", "tests/equivalence/test_llama_modeling.py"
SUITE = "onboard/testing/suite.py"
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
REFERENCE = "class Reference(nn.Module):\n    pass\n\n\n"
LAYERS = """    layers = {
        "model.layers.0": "full_attention",
    }
"""
BATCH = "[(self.batch, self.length), (self.batch + 1, self.length - 7)]"
CLOSE = '        pair.assert_close(pair.prompts, pair.calls, "mlp", path)\n'
REFERENCE_FACT = "    reference = LlamaForCausalLM\n"
MIXTURE = {
    **{"experts": "experts", "gate": "gate", "down": "down", "up": "up", "activation": "silu"},
    **{"method": "forward", "begin": 0, "count": 1, "result": "y", "x": "x"},
    **{"indices": "indices", "weights": "weights", "in_rows": True},
}
PAIR_RETURN = "        return Pair(expected, "


def behind(code: str) -> str:
    """The end of the class, and more code behind it."""
    return LAYERS + "\n" + code


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
    Violation("E02", TEST, LAYERS, behind('    model_file = ROOT / "other.py"\n')),
    Violation(
        "E03", TEST, "from transformers.models.llama.modeling_llama import", "from copies import"
    ),
    Violation("E03", TEST, "reference = LlamaForCausalLM", "reference = LlamaConfig"),
    Violation("E04", TEST, "class TestLlama", REFERENCE + "class TestLlama"),
    Violation("E04", SUITE, "@dataclass(frozen=True)\nclass Pair", REFERENCE + "class Pair"),
    Violation("E05", SUITE, "hf_causal_lm(cls.reference, ", "make(cls.reference, "),
    Violation("E05", SUITE, "hf_causal_lm(cls.reference, ", "hf_causal_lm(cls.other, "),
    Violation("E06", SUITE, "        copy_weights(expected, actual, cls.eager)\n", ""),
    Violation("E06", TEST, LAYERS, behind("    def pair(self):\n        return None\n")),
    Violation("E07", SUITE, "request.param, fresh_seed()", "request.param, torch.manual_seed(0)"),
    Violation("E07", SUITE, "request.param, fresh_seed()", "request.param, 7"),
    Violation("E08", SUITE, "batch: ClassVar[int] = 2", "batch: ClassVar[int] = 1"),
    Violation("E08", SUITE, PAIR_RETURN, "        torch.arange(cls.length)\n" + PAIR_RETURN),
    Violation("E08", TEST, LAYERS, LAYERS + "    batch = 1\n"),
    Violation("E08", TEST, LAYERS, LAYERS + "    starts = ()\n"),
    Violation("E08", TEST, LAYERS, behind("    def vocabulary(self):\n        return 1\n")),
    Violation("E09", TEST, "(EquivalenceSuite)", "(Loose, EquivalenceSuite)"),
    Violation("E09", TEST, "import EquivalenceSuite", "import FirstPositionSuite"),
    Violation(
        "E09",
        TEST,
        REFERENCE_FACT,
        "    def test_loads(self, pair):\n        pass\n\n" + REFERENCE_FACT,
    ),
    Violation(
        "E09",
        SUITE,
        "    def test_model(",
        "    def test_made(self, pair):\n        pass\n\n    def test_model(",
    ),
    Violation("E10", TEST, LAYERS, LAYERS + "    pytestmark = []\n"),
    Violation("E10", TEST, LAYERS, LAYERS + "    __test__ = False\n"),
    Violation("E10", TEST, LAYERS, behind("    def __init__(self):\n        pass\n")),
    Violation("E10", SUITE, "    def test_model(", "    @pytest.mark.xfail\n    def test_model("),
    Violation("E10", SUITE, "not torch.cuda.is_available()", "True"),
    Violation(
        "E11", SUITE, "cpu_float32: ClassVar[float] = 1e-5", "cpu_float32: ClassVar[float] = 1e-3"
    ),
    Violation("E11", SUITE, '"layer": 0.05', '"layer": 0.5'),
    Violation("E11", SUITE, "expected, self.limit(kind), ", "expected, 1e9, "),
    Violation("E11", SUITE, "if self.limit(kind) == SAME else None", "if True else None"),
    Violation("E11", SUITE, "exact = pair.in_float64(**call.arguments)", "exact = call.replay"),
    Violation("E11", TEST, LAYERS, LAYERS + "    cpu_float32 = 1e-3\n"),
    Violation("E11", TEST, LAYERS, LAYERS + '    gpu_bfloat16 = {"mlp": 0.5}\n'),
    Violation("E11", TEST, LAYERS, LAYERS + '    gpu_bfloat16 = "any"\n'),
    Violation("E12", TEST, '        "model.layers.0.mlp": "mlp",\n', ""),
    Violation("E12", TEST, LAYERS, behind(f"    def test_block(self, pair, path):\n{CLOSE}")),
    Violation(
        "E12",
        SUITE,
        'metafunc.parametrize("path", self.blocks)',
        'metafunc.parametrize("path", [])',
    ),
    Violation(
        "E13", TEST, '"model.layers.0": "full_attention"', '"model.layers.0": "sliding_attention"'
    ),
    Violation("E13", TEST, LAYERS, LAYERS + "    layers = {}\n"),
    Violation(
        "E13",
        SUITE,
        'metafunc.parametrize("path", self.layers)',
        'metafunc.parametrize("path", [])',
    ),
    Violation("E14", SUITE, 'pair.calls[""]', 'pair.calls["model"]'),
    Violation("E14", SUITE, "call.replay(pair.actual)", "call.replay(pair.expected)"),
    Violation("E14", TEST, LAYERS, LAYERS + "    test_model = None\n"),
    Violation(
        "E15", SUITE, "dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}", "dynamic = {0: Dim.DYNAMIC}"
    ),
    Violation("E15", TEST, LAYERS, LAYERS + "    test_export = None\n"),
    Violation("E16", SUITE, BATCH, "[(self.batch, self.length)]"),
    Violation(
        "E17", SUITE, "= pair.expected(input_ids=text, **t", "= pair.actual(input_ids=text, **t"
    ),
    Violation("E17", SUITE, "test_cached_decode", "test_decode"),
    Violation("E17", SUITE, "llm.generate(texts, params)", "made(texts, params)"),
    Violation("E17", TEST, LAYERS, LAYERS + "    prompt_lengths = (1,)\n"),
    Violation("E20", SUITE, "divided.logits(text)", "[expected]"),
    Violation("E20", SUITE, "assert torch.equal(found, tokens)", "assert True"),
    Violation("E20", SUITE, "test_several_ranks", "test_ranks"),
    Violation("E20", TEST, LAYERS, LAYERS + "    divided_tokens = 0\n"),
    Violation("E18", TEST, LAYERS, LAYERS + "    new_tokens = 1\n"),
    Violation("E19", SUITE, "steps are of one token", "steps are of some tokens"),
]


def reviewed(root: Path, files: dict[str, str], spec: ModelSpec) -> Review:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    return review(root / MODEL, root / TEST, spec, root, root / SUITE)


def formatted(text: str) -> str:
    """A violation is about content: it must not show as bad form as well."""
    return run_ruff("format", "--isolated", "--line-length", str(LINE_LENGTH), "-", text=text)


@pytest.fixture
def files(llama_files: dict[str, str]) -> dict[str, str]:
    """The generated files and the suite."""
    return {**llama_files, SUITE: TEST_SUITE.read_text(encoding="utf-8")}


def test_no_name_of_the_suite_can_be_replaced() -> None:
    facts = {"reference", "model_file", "config", "blocks", "layers", "eager", "codebooks"}
    facts |= {"counts_positions", "hides_padding", "distinct_tokens", "first_position"}
    names = {name for suite in (EquivalenceSuite, FirstPositionSuite) for name in vars(suite)}
    own = {name for name in names if not name.startswith("__")} - {"new_tokens", *LIMITS}
    owned = {name for owned in OWNED.values() for name in owned}
    assert own - owned - facts == set()


def test_what_is_not_called_as_a_module_is_tested_with_the_block_that_runs_it(
    tmp_path: Path, files: dict[str, str], llama_spec: ModelSpec
) -> None:
    experts = {"kind": "mlp", "path": "model.layers.0.mixture.experts.0", "class_name": "Expert"}
    experts["parameters"] = {"mlp": "gated", "activation": "silu"}
    mixture = {
        **{"kind": "mixture", "path": "model.layers.2.mixture", "class_name": "Routed"},
        **{"source": "modeling_x.py:1", "parameters": MIXTURE},
    }
    cases = ([experts], []), ([experts, mixture], []), ([experts], [experts["path"]])
    for number, (blocks, never_called) in enumerate(cases):
        spec = llama_spec.model_copy(deep=True, update={"never_called": never_called})
        spec.blocks += [make_block(**{"source": "modeling_x.py:1", **block}) for block in blocks]
        found = reviewed(tmp_path / str(number), files, spec)
        assert ("E12" in {item.id for item in found.failed}) == (number == 0)


@pytest.mark.parametrize(
    ("parameter", "asked", "passes"),
    [
        ("params: LlamaConfig", "params", True),
        ("params: LlamaConfig", "torch", False),
        ("params: nn.Module", "params", False),
        ("params: LlamaConfig", "(params := torch)", False),
    ],
)
def test_a_config_is_asked_under_any_name(
    parameter: str, asked: str, passes: bool, llama_spec: ModelSpec
) -> None:
    text = f'def f({parameter}):\n    return getattr({asked}, "x", 1)'
    (item,) = (each for each in CHECKLIST if each.id == "T09")
    subject: Any = SimpleNamespace(model=Source.parse("m.py", text), spec=llama_spec)
    assert item.check(subject).passed is passes


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("def f(x):\n    load = x.sum()\n    return load", True),
        ("def f(x):\n    load = torch.load\n    return load(x)", False),
        ("def f(x):\n    return load(x)", False),
        ("def f(x):\n    exec = x\n    return exec(x)", False),
    ],
)
def test_a_variable_of_its_own_may_have_any_name_but_a_builtin_s(
    text: str, passes: bool, llama_spec: ModelSpec
) -> None:
    (item,) = (each for each in CHECKLIST if each.id == "T09")
    subject: Any = SimpleNamespace(model=Source.parse("m.py", text), spec=llama_spec)
    assert item.check(subject).passed is passes


def test_every_item_has_a_violation() -> None:
    assert {violation.item for violation in VIOLATIONS} == {item.id for item in CHECKLIST}


def test_good_files_pass_with_evidence(
    tmp_path: Path, files: dict[str, str], llama_spec: ModelSpec
) -> None:
    verdict = reviewed(tmp_path, files, llama_spec)
    assert [(item.id, item.evidence) for item in [*verdict.failed, *verdict.noted]] == []
    assert verdict.notes == 0
    assert all(
        line.startswith((f"{MODEL}:", f"{TEST}:", f"{SUITE}:"))
        for item in verdict.items
        for line in item.evidence
    )
    assert all(item.evidence for item in verdict.items)


@pytest.mark.parametrize(
    "violation", VIOLATIONS, ids=[f"{v.item}-{n}" for n, v in enumerate(VIOLATIONS)]
)
def test_an_item_notices_its_violation_alone(
    tmp_path: Path, files: dict[str, str], llama_spec: ModelSpec, violation: Violation
) -> None:
    text = files[violation.file]
    assert violation.old in text
    text = text.replace(violation.old, violation.new)
    broken = {**files, violation.file: text if violation.item == "T11" else formatted(text)}
    result = reviewed(tmp_path, broken, llama_spec)
    found = [*result.failed, *result.noted]
    also = {TEST: {"E18"}, SUITE: {"E19"}, MODEL: set()}  # what is not as generated, or known
    broken_items = {item.id: item.evidence for item in found}
    assert broken_items.keys() == {violation.item} | also[violation.file]
    assert found[0].evidence[0].startswith(f"{violation.file}:")
    kind = next(item.kind for item in CHECKLIST if item.id == violation.item)
    assert [found[0].verdict, result.as_json()["verdict"]] == {
        "contract": ["FAIL", "FAIL"],
        "style": ["NOTE", "PASS"],
    }[kind]
    assert result.notes == (len(found[0].evidence) if kind == "style" else 0)
