"""The whole road on a GPU: the demo checkpoint and a random model of a released shape, with CUDA
graphs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.cli.commands.demo import CHECKPOINT
from tests.support.checkpoints import save_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QWEN3_0_6B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
# A choice that bfloat16 cannot tell from the best: within a few units in the last place of the best
# logit.
TIE = 4 * 2.0**-8


def _onboard(checkpoint: Path, root: Path) -> dict[str, str]:
    command = [
        sys.executable,
        "-m",
        "onboard",
        str(checkpoint),
        "--root",
        str(root),
        "--device",
        "cuda",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--dtype", "bfloat16"], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-3000:]
    artifacts: dict[str, str] = json.loads(done.stdout)["artifacts"]
    return artifacts


def _assert_graphs_used(artifacts: dict[str, str]) -> None:
    full = json.loads(Path(artifacts["run"]).read_text())["runs"]["full"]
    assert full["settings"]["compile_backend"] == "torch-cudagraph"
    assert full["cuda_graphs"]["used"], full["facts"]


def _verify(checkpoint: Path, root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "onboard",
        "verify",
        str(checkpoint),
        "--root",
        str(root),
        "--device",
        "cuda",
    ]
    done = subprocess.run(
        [*command, "--dtype", "bfloat16"], capture_output=True, text=True, timeout=540
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def _assert_own_choice(checkpoint: Path, artifacts: dict[str, str]) -> None:
    """Each generated token is transformers' greedy choice after the same tokens, or ties with
    it.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).cuda().eval()
    for record in json.loads(Path(artifacts["run"]).read_text())["runs"]["full"]["prompts"]:
        ids = torch.tensor([record["token_ids"] + record["output_ids"]], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(record["token_ids"]) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(record["output_ids"], device="cuda")[:, None])[:, 0]
        best = logits.max(dim=1).values
        apart = (best - chosen) > TIE * best.abs()
        assert not apart.any(), (
            f"{record['prompt']!r}: {int(apart.sum())} of {len(apart)} tokens are not HF's choice"
        )


def test_the_demo_checkpoint(tmp_path: Path) -> None:
    artifacts = _onboard(CHECKPOINT, tmp_path)
    _assert_graphs_used(artifacts)
    _assert_own_choice(CHECKPOINT, artifacts)
    _verify(CHECKPOINT, tmp_path)


def test_a_random_model_of_a_released_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoint = tmp_path / "qwen3-0.6b-random"
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3", **QWEN3_0_6B), dtype=torch.bfloat16
        )
    model.save_pretrained(checkpoint)
    save_tokenizer(checkpoint)
    del model
    artifacts = _onboard(checkpoint, tmp_path / "root")
    _assert_graphs_used(artifacts)
    _verify(checkpoint, tmp_path / "root")
