"""Multimodal models to the end of all phases: `run` reads an image or a sound and follows
transformers there, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.inputs.tiny_checkpoint import make_checkpoint
from tests.support.drawing import some_of
from tests.support.warm import Warm

MULTIMODAL = ("gemma3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "voxtral")


@pytest.mark.parametrize("model_type", some_of(MULTIMODAL, always=(), by_chance=1))
def test_a_tiny_composite_is_onboarded_and_reads_an_image_or_a_sound(
    model_type: str, warm: Warm, tmp_path: Path
) -> None:
    make_checkpoint(Target(name=model_type), tmp_path / model_type)
    done = warm(
        "onboard", tmp_path / model_type, "--root", tmp_path / "root", "--device", "cpu", "--json"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert document["status"] == "done"
    runs = json.loads(Path(document["artifacts"]["run"]).read_text())["runs"]
    assert runs
    for comparison in (run["comparison"] for run in runs.values()):
        found = [
            check for check in comparison["checks"] if check["what"] == "with an image or a sound"
        ]
        assert len(found) == 1, comparison["notes"]
        assert 0 < found[0]["error"] <= found[0]["limit"] == 1e-5
        assert not [note for note in comparison["notes"] if "image or a sound" in note]
