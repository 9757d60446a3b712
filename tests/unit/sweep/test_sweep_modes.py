"""A sweep over transformers' own models: what a pass takes, and that a wrong model gets none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.graph.cache_init.cached_hf import CachedTransformersModel
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.modes import run_mode
from onboard.workflow.sweep.store import job_key
from onboard.workflow.sweep.target_record import PhaseRecord, TargetRecord, conclude


def _record(**changes: Any) -> TargetRecord:
    row = {"block": "", "status": "passed", "error": 3e-7, "tolerance": 1e-5, "device": "cpu"}
    good: dict[str, Any] = {
        "target": Target(name="llama"),
        "mode": "hf",
        "architecture": "LlamaForCausalLM",
        "is_causal": True,
        "missing": [],
        "flow": 0.1,
        "phases": [PhaseRecord(name="build", status="done", seconds=1.0)],
        "tests": [{"level": level, **row} for level in ("logits", "tokens")],
    }
    return TargetRecord(**{**good, **changes})


def test_logits_and_tokens_make_a_pass() -> None:
    entry = conclude(_record(), "test")
    assert (entry.status, entry.level, entry.reason) == ("pass", "tokens", "")
    assert entry.errors == {"logits": 3e-7, "tokens": 3e-7}


@pytest.mark.parametrize("level", ["logits", "tokens"])
@pytest.mark.parametrize(
    "change", [{"error": 2e-5}, {"error": float("nan")}, {"status": "failed"}, None]
)
def test_a_level_that_is_missing_or_off_is_a_failure(
    level: str, change: dict[str, Any] | None
) -> None:
    rows = [
        row if row["level"] != level else change and {**row, **change} for row in _record().tests
    ]
    assert conclude(_record(tests=[row for row in rows if row]), "test").status == "fail"


def test_a_model_that_is_not_built_is_refused_with_its_reason() -> None:
    phase = PhaseRecord(
        name="build", status="failed", seconds=1.0, error="its mask depends on more than positions"
    )
    entry = conclude(_record(phases=[phase], tests=[]), "test")
    assert (entry.status, entry.reason) == (
        "refused",
        "build: its mask depends on more than positions",
    )
    assert conclude(_record(phases=[], tests=[]), "test").status == "fail"


def test_results_of_one_mode_are_none_of_another() -> None:
    job = Job(target=Target(name="llama"), folder=Path("x"))
    assert (
        len(
            {
                job_key(job.model_copy(update={"mode": mode}), "")
                for mode in ("graph", "hf", "transformers")
            }
        )
        == 3
    )


def _emitted(checkpoint: Path) -> dict[str, Any]:
    events: dict[str, Any] = {}
    run_mode(checkpoint, "transformers", "cpu", lambda **event: events.update(event))
    return events


def test_a_wrong_model_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny(AutoConfig.for_model("gpt_neox")).save_pretrained(tmp_path / "tiny")
    events = _emitted(tmp_path / "tiny")
    assert events["phase"]["status"] == "done"
    assert [(row["level"], row["status"]) for row in events["tests"]] == [
        ("logits", "passed"),
        ("tokens", "passed"),
    ]
    own = CachedTransformersModel._attend

    def off(self: Any, *args: Any) -> torch.Tensor:
        return own(self, *args) * 1.01

    monkeypatch.setattr(CachedTransformersModel, "_attend", off)
    events = _emitted(tmp_path / "tiny")
    assert "with caches the logits are others" in events["phase"]["error"]
    assert "tests" not in events
    monkeypatch.setattr("onboard.verify.self_check.SelfCheck.run", lambda self, gm: 0.0)
    assert "failed" in [row["status"] for row in _emitted(tmp_path / "tiny")["tests"]]
