"""Generated equivalence tests: what they cover, and that each level finds the fault that is its own
to find.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import LlamaConfig, PretrainedConfig

from onboard.analysis.spec import LayerKind, ModelSpec, Trait
from onboard.codegen.equivalence_test import (
    _NOT_ARCHITECTURE,
    _arguments,
    _class_names,
    _meta_model,
    generate_test_file,
)
from onboard.codegen.measured import Measured
from onboard.errors import OnboardError
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing import fresh_seed
from onboard.testing.suite import EquivalenceSuite, FirstPositionSuite
from tests.unit.spec_samples import sample_block

VOCABULARY = 131
MODEL, TEST = Path("models/modeling_llama.py"), Path("tests/equivalence/test_llama_modeling.py")


def first_failure(root: Path, files: dict[str, str], selection: str = "") -> dict[str, Any] | None:
    """Run the generated tests that `selection` names in this process; return the first that
    failed.
    """
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    results = root / "results.json"
    plugin = ["-p", "onboard.testing.plugin", "-p", "no:cacheprovider", "-p", "no:terminalreporter"]
    # What shows both models' tensors takes seconds
    plugin += [
        "--tb",
        "short",
        "-p",
        "no:unraisableexception",
    ]
    options = ["--import-mode=importlib", "--rootdir", str(root), "-m", "not gpu", "-k", selection]
    sys.modules.pop("tests.equivalence.test_llama_modeling", None)  # of another root
    pytest.main([*plugin, *options, "--onboard-results", str(results), str(root / TEST)])
    rows = json.loads(results.read_text())
    assert rows, "no test ran"
    return next((row for row in rows if row["status"] != "passed"), None)


@pytest.mark.parametrize(
    ("change", "level", "block"),
    [
        (("self.variance_epsilon)", "0.1)"), "block", "model.layers.0.input_layernorm"),
        (('["rope_theta"] **', '["rope_theta"] * 2 **'), "block", "model.rotary_emb"),
        (("self.head_dim**-0.5", "0.2"), "block", "model.layers.0.self_attn"),
        (("self.gate_proj.weight,", "self.up_proj.weight,"), "block", "model.layers.0.mlp"),
        (("return hidden_states + self.mlp", "return self.mlp"), "layer", "model.layers.0"),
        (("in self.layers:", "in self.layers[1:]:"), "model", ""),
        (
            ("(hidden_states, position_ids)\n        for", "(hidden_states, COUNTED)\n        for"),
            "model",
            "",
        ),
        (("batch, sequence, _ = hidden_states.shape", "batch, sequence = 2, 24"), "export", ""),
    ],
    ids=["norm", "rotary", "attention", "mlp", "layer", "model", "positions", "export"],
)
def test_the_first_failure_is_where_the_fault_is(
    tmp_path: Path, llama_files: dict[str, str], change: tuple[str, str], level: str, block: str
) -> None:
    text = llama_files[str(MODEL)]
    assert change[0] in text
    change = (
        change[0],
        change[1].replace("COUNTED", "torch.arange(position_ids.shape[1]).expand_as(position_ids)"),
    )
    selection = "not decode" if level == "export" else "not decode and not export"
    row = first_failure(tmp_path, {**llama_files, str(MODEL): text.replace(*change)}, selection)
    assert row is not None
    assert (row["status"], row["level"], row["block"]) == ("failed", level, block)
    if level != "export":
        assert row["error"] > 1e-5
        assert " it gives " in row["message"]
        assert ", expected " in row["message"]
        files = "models/modeling_llama.py beside transformers/models/llama/modeling_llama.py"
        assert row["message"].splitlines()[0].endswith(f"({files})")


def test_a_fault_that_only_a_cache_shows(tmp_path: Path, llama_files: dict[str, str]) -> None:
    """A window that is longer than what the other levels look at, and shorter than the longest
    decoded text.
    """
    text = llama_files[str(MODEL)]
    broken = text.replace("is_causal=True,", "is_causal=True, sliding_window=40,")
    assert broken != text
    row = first_failure(tmp_path, {**llama_files, str(MODEL): broken}, "not export")
    assert row is not None
    assert (row["level"], row["message"].startswith("AssertionError: decode after ")) == (
        "cached_decode",
        True,
    )


def test_a_missing_parameter_fails(tmp_path: Path, llama_files: dict[str, str]) -> None:
    broken = llama_files[str(MODEL)].replace("self.up_proj", "self.upward_proj")
    row = first_failure(tmp_path, {**llama_files, str(MODEL): broken}, "test_model")
    assert row is not None
    assert "parameter names differ: missing ['model.layers.0.mlp.up_proj.weight'" in row["message"]


def facts(text: str) -> dict[str, Any]:
    """What the class of a test file says in literals; of a call, its keyword arguments."""
    found: dict[str, Any] = {}
    (owner,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    for node in owner.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if isinstance(value, ast.Call):
                found[name] = {key.arg: ast.literal_eval(key.value) for key in value.keywords}
            elif isinstance(value, ast.Dict | ast.Constant):
                found[name] = ast.literal_eval(value)
    return found


def test_blocks_come_from_what_others_are_made_of_to_what_is_made_of_others(
    llama_files: dict[str, str],
) -> None:
    found = facts(llama_files[str(TEST)])
    assert list(found["blocks"].items()) == [
        ("model.rotary_emb", "rotary"),
        ("model.layers.0.input_layernorm", "norm"),
        ("model.layers.0.post_attention_layernorm", "norm"),
        ("model.norm", "norm"),
        ("model.layers.0.mlp", "mlp"),
        ("model.layers.0.self_attn", "attention"),
    ]
    assert found["layers"] == {"model.layers.0": "full_attention"}
    assert {"layer", "model", *found["blocks"].values()} <= EquivalenceSuite.gpu_bfloat16.keys()


def test_the_config_is_the_checkpoint_s_in_small(llama_spec: ModelSpec) -> None:
    values = {
        "attention_bias": True,
        "rms_norm_eps": 0.003,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    }
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0}
    spec = llama_spec.model_copy(
        update={"config": {**llama_spec.config, **values, "rope_parameters": scaled}}
    )
    config = facts(generate_test_file(spec))["config"]
    assert {key: config[key] for key in values} == values
    assert config["rope_parameters"] == scaled
    assert config["hidden_size"] == 64


def test_each_kind_of_layer_is_tested(llama_spec: ModelSpec) -> None:
    kinds = [
        LayerKind(name=name, layers=[i], path=f"model.layers.{i}")
        for i, name in enumerate(("first", "second"))
    ]
    found = facts(generate_test_file(llama_spec.model_copy(update={"layer_kinds": kinds})))
    assert found["layers"] == {"model.layers.0": "first", "model.layers.1": "second"}
    assert {"model.layers.0.mlp", "model.layers.1.mlp"} <= found["blocks"].keys()


def test_that_repeated_tokens_are_arbitrary_is_said(
    llama_spec: ModelSpec,
) -> None:
    trait = Trait(value="arbitrary", evidence="said here")
    changed = {"traits": {**llama_spec.traits, "repeated_tokens": trait}}
    changed_spec = llama_spec.model_copy(update=changed)
    texts = [generate_test_file(spec) for spec in (llama_spec, changed_spec)]
    assert [facts(text).get("distinct_tokens") for text in texts] == [None, True]


def suite(**said: Any) -> Any:
    """A family's class, instantiated, which says some things besides its config."""
    config = LlamaConfig(vocab_size=VOCABULARY)
    return type("TestLlama", (EquivalenceSuite,), {"config": config, **said})()


class Greedy:
    """Stands in for `LLM`: goes on with the tokens that follow the last one, and counts requests."""

    def __init__(self) -> None:
        self.requests = 0

    def generate(self, texts: list[list[int]], params: SamplingParams) -> list[SimpleNamespace]:
        self.requests += len(texts)
        logprobs = [{token: -abs(token - 3.0) for token in range(VOCABULARY)}] * params.max_tokens
        return [
            SimpleNamespace(token_ids=[3] * params.max_tokens, logprobs=logprobs) for _ in texts
        ]


def test_decoded_texts_have_no_token_twice_where_equal_ones_are_arbitrary() -> None:
    for said, repeats in (({}, True), ({"distinct_tokens": True}, False)):
        llm = Greedy()
        for prompt, tokens, logprobs in suite(**said).continued(llm):
            text = prompt + tokens
            assert len(tokens) == len(logprobs) == EquivalenceSuite.new_tokens
            assert (len(set(text)) < len(text)) == repeats
        rounds = 1 if repeats else EquivalenceSuite.new_tokens
        assert llm.requests == rounds * len(EquivalenceSuite.prompt_lengths)


def test_texts_on_several_ranks_have_no_token_twice_where_equal_ones_are_arbitrary() -> None:
    seed = fresh_seed()
    for said, repeats in (({}, True), ({"distinct_tokens": True}, False)):
        own = suite(**said)
        text = own.prompt(2, 24, seed, "cpu", 40)["input_ids"]
        again = torch.zeros(2, 24, VOCABULARY).scatter(2, text[..., None], 1.0)
        texts = torch.cat([text, own.greedy(again, text)[:, None]], dim=1).tolist()
        assert any(len(set(each)) < len(each) for each in texts) == repeats


def test_one_text_fits_into_the_small_cache_and_all_into_the_large() -> None:
    longest = max(EquivalenceSuite.prompt_lengths) + EquivalenceSuite.new_tokens
    small, large = (suite().cache_config(name)["kv_cache_config"] for name in ("small", "large"))
    assert longest == small["max_tokens"]
    assert large["max_tokens"] >= longest * len(EquivalenceSuite.prompt_lengths)
    assert large["tokens_per_block"] == 1


def test_a_model_that_hides_padding_by_itself_is_told_that_there_is_none(
    llama_spec: ModelSpec,
) -> None:
    mask = sample_block("masks", "mask", returns=["ones", "seen"])
    hiding = llama_spec.model_copy(update={"blocks": [*llama_spec.blocks, mask]})
    said = [facts(generate_test_file(spec)).get("hides_padding") for spec in (llama_spec, hiding)]
    assert said == [None, True]
    text = torch.tensor([[5, 6, 7]])
    assert suite().told(text) == {}
    assert suite(hides_padding=True).told(text)["attention_mask"].tolist() == [[1, 1, 1]]


def test_positions_that_begin_later_are_said_and_tested(llama_spec: ModelSpec) -> None:
    trait = Trait(value="pad_token_id + 1", evidence="said here")
    changed = {"traits": {**llama_spec.traits, "first_position": trait}}
    config = {**llama_spec.config, "pad_token_id": 4}
    text = generate_test_file(llama_spec.model_copy(update={**changed, "config": config}))
    assert "class TestLlamaForCausalLM(FirstPositionSuite):" in text
    assert text.endswith("    first_position = config.pad_token_id + 1\n")
    late = type("TestLate", (FirstPositionSuite,), {"first_position": 5})()
    told = late.told(torch.zeros(2, 3))["position_ids"]
    assert told.tolist() == [[5, 6, 7], [5, 6, 7]]


def test_a_block_that_transformers_never_calls_is_left_out(llama_spec: ModelSpec) -> None:
    spec = llama_spec.model_copy(update={"never_called": ["model.layers.0.mlp"]})
    assert "model.layers.0.mlp" not in facts(generate_test_file(spec))["blocks"]


@pytest.mark.parametrize("field", ["family", "architecture", "config_class", "hf_module"])
@pytest.mark.parametrize("text", ["x'; import os", "class", "a.class", ""])
def test_names_that_are_no_names_are_refused(llama_spec: ModelSpec, field: str, text: str) -> None:
    with pytest.raises(ValidationError, match="stands where an identifier belongs"):
        ModelSpec.model_validate(llama_spec.model_dump() | {field: text})


def test_strings_of_a_config_stay_strings(llama_spec: ModelSpec) -> None:
    hostile = '"""\n__import__("os").abort()\n"""'
    config = {**llama_spec.config, "note": hostile}
    text = generate_test_file(llama_spec.model_copy(update={"model": hostile, "config": config}))
    assert facts(text)["config"]["note"] == hostile
    called = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "__import__" not in called


def test_a_layer_that_the_small_model_lacks_is_an_error(llama_spec: ModelSpec) -> None:
    kinds = [LayerKind(name="full_attention", layers=[7], path="model.layers.7")]
    with pytest.raises(OnboardError, match=r"no layer model.layers.7 \(full_attention\)"):
        generate_test_file(llama_spec.model_copy(update={"layer_kinds": kinds}))


class Growing(PretrainedConfig):  # type: ignore[misc]
    """A config whose constructor packs a field once more each time, as a comma too many does."""

    model_type = "growing"

    def __init__(self, size: int = 4, packed: Any = False, **kwargs: Any) -> None:
        self.size = size
        self.packed = (packed,)
        super().__init__(**kwargs)


def test_a_field_that_no_argument_makes_is_as_it_is_written() -> None:
    config = Growing.from_dict(Growing(size=8, _name_or_path="a/b").to_dict())
    assert _arguments(config, {}) == {"size": 8, **_rest(config)}
    written = {"packed": True, "size": 512}
    assert _arguments(config, written) == {"size": 8, "packed": True, **_rest(config)}


def _rest(config: Any) -> dict[str, Any]:
    return {
        key: value
        for key, value in config.to_dict().items()
        if key not in {"size", "packed", *_NOT_ARCHITECTURE}
    }


def test_arguments_keep_their_types_on_the_way_from_the_child() -> None:
    config = {"sizes": (1, 2), "labels": {0: "a", 1: None}, "factor": 0.1, "name": "x'y"}
    config |= {"limits": (0.0, float("inf")), "least": -float("inf")}
    measured = Measured(config=config, config_module="a.b", layers={}, blocks={})
    read = Measured.model_validate_json(measured.model_dump_json())
    assert read == measured
    assert repr(read.config) == repr(config)
    for text in ("__import__('os')", "[" * 5000, "{'a': object}", "{1: 2}", "3"):
        sent = json.dumps({**json.loads(measured.model_dump_json()), "config": text})
        with pytest.raises(ValidationError):
            Measured.model_validate_json(sent)


class _Watch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.watch = _Watch()
        self.proj = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.watch(self.proj(x))


def test_places_to_watch_are_no_blocks() -> None:
    model = nn.ModuleDict({"layer": _Layer()})
    assert list(_class_names(model, {}, [])) == [("layer", "_Layer")]


def test_the_small_model_of_own_code_has_eager_attention(llama_spec: ModelSpec) -> None:
    """As the tests' has: code may have a table of attention classes without the usual one."""
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=8
    )
    own = llama_spec.model_copy(update={"repository": SimpleNamespace()})
    made: Any = _meta_model(own, config)
    assert made.config._attn_implementation == "eager"
