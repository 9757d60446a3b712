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
from onboard.review.checklist import Subject
from onboard.review.python_source import Source
from onboard.review.reviewer import CHECKLIST, review

MODEL, TEST = "models/modeling_llama.py", "tests/equivalence/test_llama_modeling.py"
CLOSE = "            assert_rmse_close(actual, expected, pair.limit(BLOCKS[path]), path)\n"
MODEL_CLOSE = '        assert_rmse_close(actual, expected, pair.limit("model"), "logits")\n'
LIMIT = '        return CPU_FLOAT32 if self.device == "cpu" else GPU_BFLOAT16[kind]\n'
MLP = "        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
REGISTER = 'register_causal_lm("LlamaConfig", LlamaForCausalLM)\n'
CLASS = "class LlamaMLP(nn.Module):\n"
BLOCK_TEST = "def test_block(pair: Pair, path: str) -> None:\n"
DECORATOR = '@pytest.mark.parametrize("path", BLOCKS)\n'
LAST = """        assert_rmse_close(
            actual, expected, pair.limit("model"), f"decode after {len(prompt)} tokens"
        )
"""
SECOND = "\n\n@pytest.fixture\ndef pair() -> None:\n    return None\n"
PATCH = "import onboard.testing.compare\nonboard.testing.compare.rmse_ratio = lambda *_: 0.0\n"
DECODE = "expected = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)"
EINSUM = """def weigh(s):
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def mix(x, y):
    return torch.einsum('bqk,bkd->bqd', weigh(torch.einsum('bqd,bkd->bqk', x, y)), y)


"""
MORE = """

@pytest.mark.parametrize("path", LAYERS)
def test_more(pair: Pair, path: str) -> None:
    for call in pair.calls[path]:
        ((actual, expected),) = call.replay(pair.actual.get_submodule(path))
        assert_rmse_close(actual, expected, pair.limit("layer"), path)
"""
INIT = "        self.act_fn = ACT2FN[config.hidden_act]\n"


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
        TEST,
        {"assert_rmse_close(actual, expected, ": "assert_rmse_close(expected, expected, "},
        "E09",
        "assert_rmse_close(expected, expected, ",
    ),
    Mutation(
        "one model stands for both",
        TEST,
        {
            "copy_weights(expected, actual)": "copy_weights(expected, expected)",
            "actual = generated_causal_lm(MODEL_FILE, CONFIG, device, dtype)": "actual = expected",
        },
        "E06",
        "copy_weights(expected, expected)",
    ),
    Mutation("the limit is no limit", TEST, {LIMIT: "        return 1e9\n"}, "E11", "def limit"),
    Mutation(
        "cached decode is compared with itself",
        TEST,
        {DECODE: "expected = all_logprobs(output.logprobs)"},
        "E17",
        "no test_cached_decode",
    ),
    Mutation(
        "the whole model is compared with itself",
        TEST,
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
        TEST,
        {CLOSE: f"            same = expected\n{CLOSE.replace('actual', 'same')}"},
        "E18",
        "same",
    ),
    Mutation(
        "an alias of expected in cached decode",
        TEST,
        {"        actual = all_logprobs(output.logprobs)\n": "        actual = expected\n"},
        "E09",
        "assert_rmse_close(",
    ),
    Mutation(
        "the fixture gives one model twice",
        TEST,
        {"Pair(expected, actual,": "Pair(expected, expected,"},
        "E06",
        "Pair(",
    ),
    Mutation(
        "limits that are bound again",
        TEST,
        {DECORATOR: f"GPU_BFLOAT16 = CPU_FLOAT32 = 1e9\n\n\n{DECORATOR}"},
        "E11",
        "1e9",
    ),
    Mutation(
        "limits that are changed inside a test",
        TEST,
        {BLOCK_TEST: f"{BLOCK_TEST}    GPU_BFLOAT16['mlp'] = 1e9\n"},
        "E11",
        "1e9",
    ),
    Mutation(
        "the largest of limits",
        TEST,
        {LIMIT: LIMIT.replace("CPU_FLOAT32", "max(CPU_FLOAT32, 1e9)")},
        "E11",
        "def limit",
    ),
    Mutation(
        "a limit beside the pair's",
        TEST,
        {'pair.limit("model"), "logits"': '1e9, "logits"'},
        "E11",
        "1e9",
    ),
    Mutation(
        "a limit that another class has",
        TEST,
        {
            "needs_cuda = ": "class Loose:\n    limit = staticmethod(lambda kind: 1e9)\n\n\nneeds_cuda = "
        },
        "E11",
        "limit = ",
    ),
    Mutation(
        "a comparison that is never made",
        TEST,
        {MODEL_CLOSE: f"\n        def compare() -> None:\n    {MODEL_CLOSE}"},
        "E09",
        "def test_model",
    ),
    Mutation(
        "a comparison behind a return",
        TEST,
        {'    for call in pair.calls[""]:\n': '    return\n    for call in pair.calls[""]:\n'},
        "E09",
        "def test_model",
    ),
    Mutation(
        "a comparison behind a condition",
        TEST,
        {MODEL_CLOSE: f"        if False:\n    {MODEL_CLOSE}"},
        "E09",
        "def test_model",
    ),
    Mutation(
        "a comparison of one's own",
        TEST,
        {"needs_cuda = ": "def assert_rmse_close(*_):\n    pass\n\n\nneeds_cuda = "},
        "E09",
        "def assert_rmse_close",
    ),
    Mutation(
        "an import under the name of the comparison",
        TEST,
        {
            "ROOT = Path": "from onboard.testing import fresh_seed as assert_rmse_close\n\nROOT = Path"
        },
        "E09",
        "as assert_rmse_close",
    ),
    Mutation(
        "no paths to test",
        TEST,
        {'@pytest.mark.parametrize("path", BLOCKS)': '@pytest.mark.parametrize("path", [])'},
        "E12",
        "no test_block",
    ),
    Mutation(
        "paths that are taken away",
        TEST,
        {"# Largest rmse": "BLOCKS.clear()\n# Largest rmse"},
        "E18",
        "BLOCKS.clear()",
    ),
    Mutation(
        "blocks of the reference",
        TEST,
        {"block = pair.actual.get": "block = pair.expected.get"},
        "E12",
        "no test_block",
    ),
    Mutation(
        "calls that are dropped",
        TEST,
        {"    return Pair(": "    calls = dict.fromkeys(calls, [])\n    return Pair("},
        "E18",
        "calls = dict.fromkeys",
    ),
    Mutation(
        "the reference is set",
        TEST,
        {"    return Pair(": "    actual.forward = expected.forward\n    return Pair("},
        "E18",
        "actual.forward",
    ),
    Mutation(
        "a second fixture of that name",
        TEST,
        {LAST: LAST + SECOND},
        "E18",
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
    return {MODEL: generate_model_file(spec), TEST: generate_test_file(spec)}


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
    subject = Subject(
        Source.load(root / MODEL, root), Source.load(root / TEST, root), spec, root / MODEL
    )
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
    result = review(tmp_path / MODEL, tmp_path / TEST, spec, tmp_path)
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
    failed = failures(tmp_path, {**files, mutation.file: text}, spec, {mutation.item, "E18"}, made)
    assert mutation.shown in failed.get(mutation.item, [""])[0], failed
    assert failed[mutation.item][0].startswith(f"{mutation.file}:")
    assert mutation.file == MODEL or "E18" in failed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CPU_FLOAT32 = 1e-5", "CPU_FLOAT32 = 1e-6"),
        ('"layer": 0.05', '"layer": 0.01'),
        ("NEW_TOKENS = 32", "NEW_TOKENS = 33"),
        ("import pytest\n", "# A note.\nimport pytest\n"),
        ('"""The two models with', '"""Both models, with'),
        (MODEL_CLOSE, MODEL_CLOSE),
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
    assert (
        failures(
            tmp_path,
            changed,
            spec,
            {item.id for item in CHECKLIST if item.id.startswith("E")},
            made,
        )
        == {}
    )
