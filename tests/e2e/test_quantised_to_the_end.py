"""Quantised checkpoints go through the whole command, and the model that comes out computes what
their writer says.

Two links: the run's logits are within 1e-5 of transformers' on the decoded weights, and those are
within 1e-5 of the logits that the writer's own dequantised weights gave (`expected.safetensors`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onboard.graph.weight_load.quantised_folder import decoded_state
from onboard.hf.hf_model import load_reference
from onboard.hub import open_source
from tests.support import quantised
from tests.support.checkpoints import save_tokenizer
from tests.support.warm import Warm

QUICK = ("hf_fp8_llama", "ct_nvfp4")
"""The others take as long: twenty seconds each."""
LIMIT = 1e-5
CASES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive)
    for name in quantised.variants()
]


def checkpoint(variant: str, folder: Path) -> Path:
    """A fixture without what is expected of it, and with a tokenizer where it has none itself."""
    if variant.startswith("gguf"):
        pytest.importorskip("gguf", reason='the extra "gguf" is not installed')
    shutil.copytree(quantised.FOLDER / variant, folder)
    (folder / "expected.safetensors").unlink()
    if not variant.startswith("gguf"):
        save_tokenizer(folder)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files come, and graphs are kept."""
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "root" / "cache"))
    return tmp_path / "root"


def onboard(warm: Warm, *words: str | Path, root: Path) -> str:
    done = warm("onboard", *words, "--root", root)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("variant", CASES)
def test_the_whole_command(variant: str, warm: Warm, root: Path, tmp_path: Path) -> None:
    folder = checkpoint(variant, tmp_path / "model")
    onboard(warm, folder, "--device", "cpu", "--dtype", "float32", root=root)
    run = json.loads((root / ".onboard" / "model" / "run.json").read_text())["runs"]["full"]
    assert run["comparison"]["agrees"]
    assert run["comparison"]["beside"] == "transformers"
    errors = {check["what"]: check["error"] for check in run["comparison"]["checks"]}
    assert errors
    assert max(errors.values()) < LIMIT
    assert any(" weights in " in fact for fact in run["facts"])
    assert error_of_decoded_weights(variant, folder) < LIMIT


def error_of_decoded_weights(variant: str, folder: Path) -> float:
    """How far the logits of transformers' model on the decoded weights are from the writer's."""
    from transformers import AutoConfig

    expected = load_file(quantised.FOLDER / variant / "expected.safetensors")
    files = open_source(str(folder)).weights()
    config = AutoConfig.from_pretrained(files)
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = load_reference(config, files, state=decoded_state(files), **how).eval()
    with torch.no_grad():
        logits = model(input_ids=expected["ids"].view(1, -1)).logits[0]
    return float((logits - expected["logits"]).norm() / expected["logits"].norm())


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["hf_fp8_qwen3_moe", "ct_w4a16", "mxfp4_gpt_oss", "gguf_q4_0"])
def test_verify_and_kld(variant: str, warm: Warm, root: Path, tmp_path: Path) -> None:
    folder = checkpoint(variant, tmp_path / "model")
    onboard(warm, folder, "--device", "cpu", "--dtype", "float32", root=root)
    onboard(warm, "verify", folder, root=root)
    said = onboard(warm, "kld", f"transformers:{folder}", folder, "--json", root=root)
    assert json.loads(said)["mean"] < 1e-9
