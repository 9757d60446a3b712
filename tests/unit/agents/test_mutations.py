"""Edits of a generated model file and its tests that would let a wrong model pass fail the
contract, at their line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.equivalence_test import generate_test_file
from onboard.codegen.model_file import generate_model_file
from onboard.render import TEST_SUITE
from onboard.review.checklist import Subject
from onboard.review.python_source import Source
from onboard.review.reviewer import CHECKLIST, review
from onboard.testing.suite import EquivalenceSuite

MODEL, TEST = "models/modeling_llama.py", "tests/equivalence/test_llama_modeling.py"
SUITE = "onboard/testing/suite.py"
LAYERS = """    layers = {
        "model.layers.0": "full_attention",
    }
"""
STRICTER = {kind: limit / 2 for kind, limit in EquivalenceSuite.gpu_bfloat16.items()}
BEGIN = "class TestLlamaForCausalLM("
BLOCK_CLOSE = "                pair.assert_close(actual, expected, self.blocks[path], path)\n"
MODEL_CLOSE = '            pair.assert_close(actual, expected, "model", "logits", exact)\n'
LIMIT = "        return self.suite.cpu_float32 if"
MLP = "        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
REGISTER = 'register_causal_lm("LlamaConfig", LlamaForCausalLM)\n'
CLASS = "class LlamaMLP(nn.Module):\n"
SECOND = "\n    @staticmethod\n    def pair():\n        return None\n"
DECODE = "            expected = read(logits.float())\n"
PATCH = "import onboard.testing.compare\nonboard.testing.compare.rmse_ratio = lambda *_: 0.0\n"
EINSUM = """def weigh(s):
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def mix(x, y):
    return torch.einsum('bqk,bkd->bqd', weigh(torch.einsum('bqd,bkd->bqk', x, y)), y)


"""
MORE = """
    def test_more(self, pair):
        for path in self.layers:
            for call in pair.calls[path]:
                ((actual, expected),) = call.replay(pair.actual.get_submodule(path))
                pair.assert_close(actual, expected, "layer", path)
"""
INIT = "        self.act_fn = ACT2FN[config.hidden_act]\n"


WHOLE = {"E18", "E19"}
"""What holds the test file against the generated one, and the suite against the known one."""


@dataclass(frozen=True)
class Mutation:
    """Replacements in one file; what they are for."""

    name: str
    file: str
    changes: dict[str, str]
    item: str
    """An item that fails."""
    shown: str
    """Part of the first line that it points at."""


def helper(body: str) -> dict[str, str]:
    """A function of the module that the MLP calls."""
    return {
        CLASS: f"def mix(x, y):\n{body}\n\n\n{CLASS}",
        MLP: MLP.replace("up_proj(x)", "up_proj(mix(x, x))"),
    }


def inline(code: str) -> dict[str, str]:
    return {MLP: f"        {code}\n{MLP}"}


SOFTMAX = "    return (x @ y.transpose(-1, -2)).softmax(-1) @ y"
EIGHT = [
    Mutation(
        "every comparison is of a thing with itself",
        SUITE,
        {"pair.assert_close(actual, expected, ": "pair.assert_close(expected, expected, "},
        "E09",
        "pair.assert_close(expected, expected, ",
    ),
    Mutation(
        "one model stands for both",
        SUITE,
        {
            "copy_weights(expected, actual, ": "copy_weights(expected, expected, ",
            "actual = generated_causal_lm(cls.model_file, cls.config, device, dtype)": "actual = expected",
        },
        "E06",
        "copy_weights(expected, expected, ",
    ),
    Mutation("the limit is no limit", SUITE, {LIMIT: "        return 1e9 if"}, "E11", "def limit"),
    Mutation(
        "cached decode is compared with itself",
        SUITE,
        {DECODE: "            expected = all_logprobs(logprobs)\n"},
        "E17",
        "no test_cached_decode",
    ),
    Mutation(
        "the whole model is compared with itself",
        SUITE,
        {"call.replay(pair.actual)": "call.replay(pair.expected)"},
        "E14",
        "no test_model",
    ),
    Mutation("attention behind a helper", MODEL, helper(SOFTMAX), "P09", ".softmax(-1) @ y"),
    Mutation(
        "a norm as a power",
        MODEL,
        inline("x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5"),
        "P09",
        "** -0.5",
    ),
    Mutation("a file is loaded", MODEL, inline('x = x + torch.load("x.pt")'), "T09", "torch.load"),
]
CUNNING = [
    Mutation(
        "an alias of expected",
        SUITE,
        {BLOCK_CLOSE: f"                same = expected\n{BLOCK_CLOSE.replace('actual', 'same')}"},
        "E19",
        "another suite",
    ),
    Mutation(
        "an alias of expected in cached decode",
        SUITE,
        {"            actual = all_logprobs(logprobs)\n": "            actual = expected\n"},
        "E09",
        "pair.assert_close(",
    ),
    Mutation(
        "the fixture gives one model twice",
        SUITE,
        {"Pair(expected, actual,": "Pair(expected, expected,"},
        "E06",
        "Pair(",
    ),
    Mutation(
        "limits that are bound again",
        TEST,
        {LAYERS: f"{LAYERS}    cpu_float32 = 1e-6\n    cpu_float32 = 1e9\n"},
        "E11",
        "cpu_float32 = 1e-6",
    ),
    Mutation(
        "limits that are changed from outside",
        TEST,
        {LAYERS: f"{LAYERS}\n\nTestLlamaForCausalLM.cpu_float32 = 1e9\n"},
        "E11",
        "1e9",
    ),
    Mutation(
        "limits that are changed inside a test",
        TEST,
        {LAYERS: LAYERS + MORE + "        self.gpu_bfloat16['mlp'] = 1e9\n"},
        "E11",
        "1e9",
    ),
    Mutation(
        "limits that are changed in place",
        TEST,
        {LAYERS: f"{LAYERS}\n\nEquivalenceSuite.gpu_bfloat16.update(mlp=1e9)\n"},
        "E11",
        "1e9",
    ),
    Mutation(
        "a limit that is worked out",
        TEST,
        {LAYERS: f"{LAYERS}    cpu_float32 = 1e-5 * 1e9\n"},
        "E11",
        "1e9",
    ),
    Mutation(
        "limits that a call makes",
        TEST,
        {LAYERS: f"{LAYERS}    gpu_bfloat16 = Loose(**{STRICTER})\n"},
        "E11",
        "Loose",
    ),
    Mutation(
        "limits that a call makes of right ones",
        TEST,
        {
            LAYERS: f"{LAYERS}    gpu_bfloat16 = Loose({', '.join(f'{k}={v}' for k, v in STRICTER.items())})\n"
        },
        "E11",
        "Loose",
    ),
    Mutation(
        "the largest of limits",
        SUITE,
        {LIMIT: LIMIT.replace("self.suite.cpu_float32", "max(self.suite.cpu_float32, 1e9)")},
        "E11",
        "def limit",
    ),
    Mutation(
        "a limit beside the pair's",
        SUITE,
        {"expected, self.limit(kind), ": "expected, 1e9, "},
        "E11",
        "1e9",
    ),
    Mutation(
        "a limit that another class has",
        TEST,
        {
            BEGIN: f"class Loose:\n    limit = staticmethod(lambda kind: 1e9)\n\n\n{BEGIN}",
        },
        "E11",
        "limit = ",
    ),
    Mutation(
        "a comparison that is never made",
        SUITE,
        {MODEL_CLOSE: f"\n            def compare() -> None:\n    {MODEL_CLOSE}"},
        "E09",
        "def test_model",
    ),
    Mutation(
        "a comparison behind a return",
        SUITE,
        {
            '        for call in pair.calls[""]:\n': '        return\n        for call in pair.calls[""]:\n'
        },
        "E09",
        "def test_model",
    ),
    Mutation(
        "a comparison behind a condition",
        SUITE,
        {MODEL_CLOSE: f"            if False:\n    {MODEL_CLOSE}"},
        "E09",
        "def test_model",
    ),
    Mutation(
        "a comparison of one's own",
        TEST,
        {BEGIN: f"def assert_rmse_close(*_):\n    pass\n\n\n{BEGIN}"},
        "E09",
        "def assert_rmse_close",
    ),
    Mutation(
        "an import under the name of the suite",
        TEST,
        {"import EquivalenceSuite": "import Pair as EquivalenceSuite"},
        "E09",
        "no class that inherits",
    ),
    Mutation(
        "a suite from elsewhere",
        TEST,
        {"onboard.testing.suite import": "copies import"},
        "E09",
        "no class that inherits",
    ),
    Mutation(
        "a suite of one's own",
        TEST,
        {BEGIN: f"class EquivalenceSuite:\n    pass\n\n\n{BEGIN}"},
        "E09",
        "no class that inherits",
    ),
    Mutation(
        "tests that come before the suite's",
        TEST,
        {f"{BEGIN}EquivalenceSuite)": f"{BEGIN}Loose, EquivalenceSuite)"},
        "E09",
        "no class that inherits",
    ),
    Mutation(
        "a class that pytest does not collect",
        TEST,
        {BEGIN: "class LlamaForCausalLM2("},
        "E09",
        "no class that inherits",
    ),
    Mutation(
        "a class that is deleted",
        TEST,
        {LAYERS: f"{LAYERS}\n\ndel TestLlamaForCausalLM\n"},
        "E18",
        "del TestLlama",
    ),
    Mutation(
        "a class that is skipped",
        TEST,
        {BEGIN: f"@pytest.mark.skip\n{BEGIN}"},
        "E10",
        "skip",
    ),
    Mutation(
        "a file that is skipped",
        TEST,
        {LAYERS: f"{LAYERS}\n\npytestmark = []\n"},
        "E10",
        "pytestmark",
    ),
    Mutation(
        "no paths to test",
        TEST,
        {LAYERS: f"{LAYERS}\n    def pytest_generate_tests(self, metafunc):\n        pass\n"},
        "E10",
        "def pytest_generate_tests",
    ),
    Mutation(
        "a test that is replaced",
        TEST,
        {LAYERS: LAYERS + MORE.replace("test_more", "test_block")},
        "E12",
        "def test_block",
    ),
    Mutation(
        "a test that is replaced from outside",
        TEST,
        {LAYERS: f"{LAYERS}\n\nEquivalenceSuite.test_model = None\n"},
        "E14",
        "test_model = None",
    ),
    Mutation(
        "other texts",
        TEST,
        {LAYERS: f"{LAYERS}\n    def continued(self, llm):\n        return []\n"},
        "E17",
        "def continued",
    ),
    Mutation(
        "another fact of the family",
        TEST,
        {LAYERS: f"{LAYERS}    counts_positions = True\n"},
        "E18",
        "counts_positions",
    ),
    Mutation(
        "paths that are taken away",
        TEST,
        {LAYERS: f"{LAYERS}    blocks.clear()\n"},
        "E18",
        "blocks.clear()",
    ),
    Mutation(
        "another kind of block",
        TEST,
        {'"model.norm": "norm"': '"model.norm": "attention"'},
        "E18",
        "blocks = {",
    ),
    Mutation(
        "another config",
        TEST,
        {"num_attention_heads=4": "num_attention_heads=2"},
        "E18",
        "config = LlamaConfig(",
    ),
    Mutation(
        "blocks of the reference",
        SUITE,
        {"block = pair.actual.get": "block = pair.expected.get"},
        "E12",
        "no test_block",
    ),
    Mutation(
        "calls that are dropped",
        SUITE,
        {"        return Pair(": "        calls = dict.fromkeys(calls, [])\n        return Pair("},
        "E19",
        "another suite",
    ),
    Mutation(
        "the reference is set",
        SUITE,
        {"        return Pair(": "        actual.forward = expected.forward\n        return Pair("},
        "E19",
        "another suite",
    ),
    Mutation(
        "a second fixture of that name",
        TEST,
        {LAYERS: LAYERS + SECOND},
        "E06",
        "def pair",
    ),
    Mutation(
        "a helper that is patched",
        TEST,
        {"ROOT = Path": PATCH + "ROOT = Path"},
        "E18",
        "import onboard.testing.compare",
    ),
    Mutation(
        "attention as einsum behind two helpers",
        MODEL,
        {CLASS: EINSUM + CLASS, MLP: MLP.replace("up_proj(x)", "up_proj(mix(x, x))")},
        "P09",
        ".exp()",
    ),
    Mutation(
        "attention in a method",
        MODEL,
        {
            MLP: MLP.replace("up_proj(x)", "up_proj(self.mix(x))")
            + "\n    def mix(self, x):\n        return torch.bmm(torch.softmax(torch.bmm(x, x.mT), -1), x)\n"
        },
        "P09",
        "torch.softmax",
    ),
    Mutation(
        "torch's own attention",
        MODEL,
        inline("x = nn.functional.scaled_dot_product_attention(x, x, x)"),
        "P09",
        "scaled_dot",
    ),
    Mutation(
        "a norm by rsqrt behind a helper",
        MODEL,
        helper("    return x * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)"),
        "P09",
        "rsqrt",
    ),
    Mutation(
        "a norm whose root a helper takes",
        MODEL,
        {
            CLASS: "def root(v):\n    return v ** (-1 / 2)\n\n\n" + CLASS,
            **inline("x = x * root(x.square().mean(-1, keepdim=True) + 1e-6)"),
        },
        "P09",
        "(-1 / 2)",
    ),
    Mutation(
        "a norm by a division",
        MODEL,
        inline("x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()"),
        "P09",
        ".sqrt()",
    ),
    Mutation(
        "a norm by logarithms",
        MODEL,
        inline("x = x * torch.exp(-0.5 * torch.log((x * x).mean(-1, keepdim=True)))"),
        "P09",
        "torch.exp",
    ),
    Mutation(
        "a norm as a module",
        MODEL,
        {
            INIT: INIT + "        self.norm = nn.RMSNorm(config.hidden_size)\n",
            MLP: MLP.replace("up_proj(x)", "up_proj(self.norm(x))"),
        },
        "P09",
        "nn.RMSNorm",
    ),
    Mutation(
        "a load under another name",
        MODEL,
        {
            "import torch\n": "import torch\nfrom torch import load as stack\n",
            **inline('x = x + stack("x.pt")'),
        },
        "T09",
        "load as stack",
    ),
    Mutation(
        "a load by a text",
        MODEL,
        inline('x = x + getattr(torch, "lo" + "ad")("x.pt")'),
        "T09",
        "getattr",
    ),
    Mutation(
        "a load behind a name",
        MODEL,
        inline("t = torch; x = x + t.serialization.load(str(x))"),
        "T09",
        "serialization",
    ),
    Mutation(
        "a module behind torch",
        MODEL,
        inline('torch.utils.os.system("true")'),
        "T09",
        "torch.utils",
    ),
    Mutation(
        "a builtin behind a special name",
        MODEL,
        inline('x.__class__.__base__("x")'),
        "T09",
        "__class__",
    ),
    Mutation(
        "a module by its name",
        MODEL,
        {"import torch\n": "import subprocess\nimport torch\n"},
        "T03",
        "import subprocess",
    ),
    Mutation(
        "the reference itself",
        MODEL,
        {"import LlamaConfig": "import LlamaConfig, LlamaForCausalLM as Reference"},
        "T02",
        "LlamaForCausalLM as Reference",
    ),
]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return analyze({"model_type": "llama"}, model="acme/llama")


@pytest.fixture(scope="module")
def files(spec: ModelSpec) -> dict[str, str]:
    suite = TEST_SUITE.read_text(encoding="utf-8")
    return {MODEL: generate_model_file(spec), TEST: generate_test_file(spec), SUITE: suite}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        root.joinpath(name).parent.mkdir(parents=True)
        root.joinpath(name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def made(files: dict[str, str]) -> dict[str, Source]:
    """What the generator makes of the spec, once for all mutations."""
    return {
        "generated_model": Source.parse("model", files[MODEL]),
        "generated_tests": Source.parse("tests", files[TEST]),
    }


def failures(
    root: Path, files: dict[str, str], spec: ModelSpec, ids: set[str], made: dict[str, Source]
) -> dict[str, list[str]]:
    """Judge some items of the contract; return the evidence for those that fail."""
    write(root, files)
    sources = [Source.load(root / name, root) for name in (MODEL, TEST, SUITE)]
    subject = Subject(*sources, spec, root / MODEL)
    vars(subject).update(made)
    outcomes = {
        item.id: item.check(subject)
        for item in CHECKLIST
        if item.id in ids and item.kind == "contract"
    }
    return {name: outcome.evidence for name, outcome in outcomes.items() if not outcome.passed}


def test_what_is_generated_passes_without_a_note(
    tmp_path: Path, files: dict[str, str], spec: ModelSpec
) -> None:
    write(tmp_path, files)
    result = review(tmp_path / MODEL, tmp_path / TEST, spec, tmp_path, tmp_path / SUITE)
    assert [(item.id, item.evidence) for item in [*result.failed, *result.noted]] == []


@pytest.mark.parametrize("mutation", [*EIGHT, *CUNNING], ids=lambda mutation: mutation.name)
def test_a_mutation_fails_at_its_line(
    tmp_path: Path,
    files: dict[str, str],
    spec: ModelSpec,
    made: dict[str, Source],
    mutation: Mutation,
) -> None:
    text = files[mutation.file]
    for old, new in mutation.changes.items():
        assert old in text
        text = text.replace(old, new)
    compile(text, mutation.file, "exec")
    failed = failures(tmp_path, {**files, mutation.file: text}, spec, {mutation.item, *WHOLE}, made)
    assert mutation.shown in failed.get(mutation.item, [""])[0], failed
    assert failed[mutation.item][0].startswith(f"{mutation.file}:")
    whole = {MODEL: mutation.item, TEST: "E18", SUITE: "E19"}[mutation.file]
    assert whole in failed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LAYERS, f"{LAYERS}    cpu_float32 = 1e-6\n"),
        (LAYERS, f"{LAYERS}    new_tokens = 33\n"),
        (LAYERS, f"{LAYERS}    gpu_bfloat16 = {STRICTER}\n"),
        ("ROOT = Path", "import pytest\nimport torch\n\n# A note.\nROOT = Path"),
        ('"""What is this', '"""That is this'),
        (LAYERS, LAYERS),
    ],
)
def test_tests_that_ask_for_more_pass(
    tmp_path: Path,
    files: dict[str, str],
    spec: ModelSpec,
    made: dict[str, Source],
    old: str,
    new: str,
) -> None:
    assert old in files[TEST]
    changed = {**files, TEST: files[TEST].replace(old, new) + MORE}
    items = {item.id for item in CHECKLIST if item.id.startswith("E")}
    assert failures(tmp_path, changed, spec, items, made) == {}


def test_a_test_of_its_own_has_no_rule_of_rounding(
    tmp_path: Path, files: dict[str, str], spec: ModelSpec, made: dict[str, Source]
) -> None:
    own = MORE.replace('"layer", path)', '"layer", path, pair.in_float64())')
    changed = {**files, TEST: files[TEST] + own}
    (evidence,) = failures(tmp_path, changed, spec, {"E11"}, made)["E11"]
    assert 'pair.assert_close(actual, expected, "layer", path, pair.in_float64())' in evidence
