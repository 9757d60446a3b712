"""A model file that is not the one whose tests passed is said, and refused when asked."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest

from onboard import registry
from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError
from onboard.registry import RegistryEntry
from onboard.runtime.llm import LLM
from onboard.runtime.tested_file import passed_tests, why_not_run, why_untested
from tests.support.runtime.tiny import Tiny

NAME = "models/modeling_llama.py"


def _tested(root: Path, model: str = "a", *, status: str = "passed") -> None:
    """Leave what the test phase leaves when the tests of the file as it is ended so."""
    folder = root / ".onboard" / model
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256((root / NAME).read_bytes()).hexdigest()
    record = {
        "tests": [{"name": "test_cached_decode[cpu]", "status": status}],
        "model_file": {"path": NAME, "sha256": digest},
    }
    (folder / "tests.json").write_text(json.dumps(record))


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    path.parent.mkdir()
    path.write_text("a = 1\n")
    return path


def test_a_file_counts_as_tested_while_it_is_the_one_that_any_model_passed_with(
    model_file: Path, tmp_path: Path
) -> None:
    assert "has passed no tests here" in (why_untested(model_file, tmp_path) or "")
    _tested(tmp_path, status="failed")
    assert "has passed no tests here" in (why_untested(model_file, tmp_path) or "")
    _tested(tmp_path)
    assert why_untested(model_file, tmp_path) is None
    model_file.write_text("a = 1.5\n")
    assert f"{NAME} is not the file whose tests passed" in (
        why_untested(model_file, tmp_path) or ""
    )
    _tested(tmp_path, "another")
    assert why_untested(model_file, tmp_path) is None


def test_an_entry_vouches_only_for_the_file_that_passed(tmp_path: Path) -> None:
    path = tmp_path / "modeling_x.py"
    path.write_text("X = 1\n")
    entry = RegistryEntry(name="org/New-7B", config_id="new-7b", yaml_extra=[])
    assert "untested" in str(why_not_run(entry, path))
    passed = entry.model_copy(update={"status": "passed", "model_file": registry.digest(path)})
    assert why_not_run(passed, path) is None
    path.write_text("X = 2\n")
    assert "is not the file that the run of org/New-7B passed with" in str(
        why_not_run(passed, path)
    )
    assert "failed" in str(why_not_run(entry.model_copy(update={"status": "failed"}), path))


def test_tests_count_for_the_file_that_they_passed_with(model_file: Path, tmp_path: Path) -> None:
    _tested(tmp_path)
    assert passed_tests(model_file, tmp_path) == {"test_cached_decode"}
    model_file.write_text("a = 2\n")
    assert passed_tests(model_file, tmp_path) == set()
    _tested(tmp_path, status="failed")
    assert passed_tests(model_file, tmp_path) == set()


def test_a_shipped_file_was_tested_before(tmp_path: Path) -> None:
    shipped = CONTENT_ROOT / "models" / "modeling_llama.py"
    assert why_untested(shipped, tmp_path) is None
    assert why_untested(shipped, CONTENT_ROOT) is None


def test_llm_says_so_and_refuses_with_strict(llama: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    _tested(llama.root)
    assert not [
        fact
        for fact in LLM(llama.checkpoint, root=llama.root, device="cpu").engine.facts
        if "tests" in fact
    ]
    path = llama.root / NAME
    text = path.read_text()
    path.write_text(text + "\n# edited\n")
    try:
        with caplog.at_level(logging.WARNING):
            facts = LLM(llama.checkpoint, root=llama.root, device="cpu").engine.facts
        assert f"{NAME} is not the file whose tests passed: it was edited since" in facts
        assert "is not the file whose tests passed" in caplog.text
        with pytest.raises(OnboardError, match="strict: .* is not the file whose tests passed"):
            LLM(llama.checkpoint, root=llama.root, device="cpu", strict=True)
    finally:
        path.write_text(text)
        (llama.root / ".onboard" / "a" / "tests.json").unlink()
