"""Tables that a checkpoint has rounded are taken as the model computes them, of all its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MiniMaxConfig

from onboard.analysis.analyze import analyze
from onboard.codegen.model_file import generate_model_file
from onboard.config import RuntimeConfig
from onboard.graph.weight_load.computed_tables import is_rounding
from onboard.verify import hf_logits
from onboard.workflow.run_model.run_model import run
from tests.support.runtime.tiny import TINY

LIGHTNING, WHOLE = "linear_attention", "full_attention"
SIZES = {
    "num_hidden_layers": 4,
    "layer_types": [LIGHTNING, WHOLE, LIGHTNING, WHOLE],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "block_size": 16,
    "eos_token_id": None,
}
TABLE = "model.layers.0.self_attn.diagonal_decay"


@pytest.fixture(scope="module")
def minimax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers saves it in bfloat16, and the model file beside it."""
    folder, seed = tmp_path_factory.mktemp("minimax"), int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    torch.manual_seed(seed)
    config = MiniMaxConfig(**{**TINY, **SIZES})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)
    spec = analyze(model.config.to_dict(), model="x")
    (folder / "models").mkdir()
    file = folder / "models" / f"modeling_{spec.family}.py"
    file.write_text(generate_model_file(spec), encoding="utf-8")
    return folder


def result_of(folder: Path, layers: int | None) -> dict[str, Any]:
    config = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "max_seq_len": 64,
        "max_num_tokens": 64,
    }
    return run(RuntimeConfig.model_validate(config), folder, num_hidden_layers=layers)


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "layer by layer"])
def test_rounded_tables_are_taken_as_computed(
    minimax: Path, layers: int | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_logits, "fits", lambda *_: whole)
    result = result_of(minimax, layers)
    assert result["status"] == "success", result["error"]
    assert any("rounded: taken as the model computes it" in fact for fact in result["facts"])


def test_a_table_that_is_no_rounding_is_the_checkpoints(minimax: Path) -> None:
    """transformers' model takes it, ours computes with the one slope: they differ, and it is said."""
    file = minimax / "model.safetensors"
    before = file.read_bytes()
    tensors = load_file(file)
    tensors[TABLE] = tensors[TABLE] * 0.5
    save_file(tensors, file, {"format": "pt"})
    try:
        assert result_of(minimax, 2)["status"] == "bad_generation"
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_what_is_a_rounding(half: torch.dtype) -> None:
    table = torch.rand(5, 7)
    assert is_rounding(table.to(half), table)
    assert is_rounding(table.to(half).double(), table)
    assert not is_rounding(table, table)
    assert not is_rounding(table.to(half)[:, :1], table)
    assert not is_rounding(torch.zeros(5, 7), table)
    whole = torch.arange(4.0)
    assert not is_rounding(whole.to(half), whole)
