"""What is exported computes what transformers does, in a process that has no onboard."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard import registry
from onboard.cli import main
from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError, UsageError
from onboard.registry import RegistryEntry
from onboard.standalone.attention_calls import refuse_other_attention
from onboard.standalone.export import export_model
from onboard.standalone.proven_model import open_subject
from onboard.testing import rmse_ratio
from tests.support.checkpoints import edit_config
from tests.support.runtime.tiny import Tiny, make_tiny
from tests.support.standalone.cases import MODELS, MORE, Case, make_cases

Cases = dict[tuple[str, str], Case]


@pytest.mark.parametrize("key", MODELS, ids="-".join)
def test_the_logits_are_those_of_transformers(key: tuple[str, str], cases: Cases) -> None:
    _check(cases[key])


@pytest.mark.exhaustive
def test_the_logits_of_more_models_are_too(tmp_path: Path) -> None:
    for case in make_cases(tmp_path, MORE).values():
        _check(case)


def _check(case: Case) -> None:
    for text, logits in zip(case.texts, case.logits, strict=True):
        assert rmse_ratio(logits, case.tiny.logits(text)) < 1e-5, (case.exported.package, text)


def test_an_export_names_no_place_and_says_what_was_proven(cases: Cases) -> None:
    for case in cases.values():
        texts = {
            path: case.exported.folder.joinpath(path).read_text() for path in case.exported.files
        }
        assert not [path for path, text in texts.items() if str(case.tiny.root.parent) in text]
        assert not [
            path
            for path, text in texts.items()
            if re.search(r"^\s*(import|from) onboard\b", text, re.MULTILINE)
        ]
        assert "passed before onboard" in texts["README.md"]


@pytest.fixture
def proven(tmp_path: Path) -> Tiny:
    """A model whose file lies in the root and has passed tests there."""
    tiny = make_tiny(tmp_path, own_file=False)
    shutil.copy(CONTENT_ROOT / "models" / "modeling_llama.py", tiny.root / "models")
    return tiny


def _pass(root: Path, error: float) -> None:
    path = root / "models" / "modeling_llama.py"
    rows = [
        {
            "name": "test_block[cpu-model.norm]",
            "status": "passed",
            "error": 1e-9,
            "tolerance": 1e-5,
        },
        {"name": "test_model[cpu]", "status": "passed", "error": error, "tolerance": 1e-5},
        {"name": "test_model[cuda]", "status": "skipped", "error": None, "tolerance": None},
    ]
    folder = root / ".onboard" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record = {"tests": rows, "model_file": {"path": "models/modeling_llama.py", "sha256": digest}}
    (folder / "tests.json").write_text(json.dumps(record))


def test_only_a_file_whose_tests_passed_is_exported(proven: Tiny, tmp_path: Path) -> None:
    model, out = str(proven.checkpoint), tmp_path / "out"
    with pytest.raises(
        OnboardError, match="has passed no tests here: only a proven file"
    ) as refused:
        export_model(model, "plain", root=proven.root, out=out)
    assert refused.value.hint == f"Run: onboard {model} --root {proven.root}"
    _pass(proven.root, 3.2e-7)
    path = proven.root / "models" / "modeling_llama.py"
    done = export_model(model, "plain", root=proven.root, out=out)
    assert "2 passed; the largest error, rmse / rmse, is 3.2e-07 in test_model[cpu]" in str(
        done.provenance
    )
    path.write_text(path.read_text() + "# edited\n")
    with pytest.raises(OnboardError, match="is not the file whose tests passed"):
        export_model(model, "plain", root=proven.root, out=out)


def test_another_head_than_the_embedding_that_it_is_tied_to_is_refused(
    proven: Tiny, tmp_path: Path
) -> None:
    _pass(proven.root, 0.0)
    edit_config(proven.checkpoint, tie_word_embeddings=True)
    with pytest.raises(OnboardError, match=r"lm_head.weight differs from .*embed_tokens.weight"):
        export_model(str(proven.checkpoint), "plain", root=proven.root, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_failed_is_refused(proven: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    _pass(proven.root, 0.0)
    entry = RegistryEntry(name="a", config_id="a", yaml_extra=[], status="failed")
    monkeypatch.setattr("onboard.standalone.proven_model.find_entry", lambda *_: entry)
    with pytest.raises(OnboardError, match="the run of a failed on"):
        open_subject(str(proven.checkpoint), proven.root)
    passed = entry.model_copy(
        update={"status": "passed", "model_file": registry.digest(Path("none"))}
    )
    monkeypatch.setattr("onboard.standalone.proven_model.find_entry", lambda *_: passed)
    assert (
        open_subject(str(proven.checkpoint), proven.root).provenance()[
            "whole run beside transformers"
        ]
        == "passed"
    )


def test_a_folder_that_is_there_is_kept(
    proven: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _pass(proven.root, 0.0)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    words = [
        "export",
        str(proven.checkpoint),
        "--to",
        "plain",
        "--root",
        str(proven.root),
        "--out",
        str(out),
    ]
    assert main.run([*words, "--json"]) == UsageError.exit_code
    assert json.loads(capsys.readouterr().out)["error"]["hint"].startswith("Choose another --out")
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert main.run([*words, "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["package"] == "onboarded_llama"
    assert {"mine", *found["files"]} == {
        path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()
    }


def test_what_has_no_counterpart_in_vllm_is_named(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, "mamba", own_file=False, state_size=4)
    with pytest.raises(
        OnboardError, match="torch_causal_conv1d has no counterpart in vLLM's attention layer"
    ):
        export_model(str(tiny.checkpoint), "vllm-plugin", root=tiny.root)


def _node(*shape: int, op: str = "get_attr") -> Any:
    return SimpleNamespace(op=op, meta={"val": torch.empty(shape)})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"attn_mask": _node(1, 1, 3, 3)}, "attn_mask"),
        ({"chunk_size": 8}, "chunk_size"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"is_causal": False}, "is_causal=False"),
        ({"scale": _node()}, "scale"),
        ({"sinks": _node(4, op="call_function")}, "sinks that are computed"),
        ({"sinks": _node(1, 3, 4)}, "sinks that are computed"),
        ({"value": _node(1, 3, 2, 8)}, "values of 8 numbers a head and keys of 16"),
    ],
)
def test_attention_of_another_kind_is_refused(changes: dict[str, Any], what: str) -> None:
    names = [
        argument.name for argument in torch.ops.onboard.torch_attention.default._schema.arguments
    ]
    usual = {
        "is_causal": True,
        "dropout_p": 0.0,
        "scale": 0.5,
        "sliding_window": 4,
        "logit_cap": 2.0,
        "sinks": _node(4),
    }
    given = {
        **dict.fromkeys(names),
        **{name: _node(1, 3, 2, 16) for name in ("query", "key", "value")},
        **usual,
    }
    refuse_other_attention(given)
    with pytest.raises(OnboardError, match=f"torch_attention with {what} has no counterpart"):
        refuse_other_attention({**given, **changes})
