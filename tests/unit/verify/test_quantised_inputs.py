"""Transformers' model with inputs quantised as the run's are: what the writer's own model gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from onboard.config import RuntimeConfig
from onboard.graph.context import TransformContext
from onboard.graph.weight_load.experts.quantised_mixtures import EXPERT_KEYS
from onboard.graph.weight_load.quantised_folder import decoded_state
from onboard.graph.weight_load.quantised_linears import EIGHT_BIT_KEYS
from onboard.hf.hf_model import load_reference
from onboard.verify.quantised_inputs import quantise_inputs, round_caches
from onboard.workflow.run_model.run_model import run
from tests.support import quantised
from tests.support.checkpoints import save_tokenizer


def of_run(variant: str, matches: int) -> TransformContext:
    """As much of a run as is asked for: its checkpoint, and whether it computes with codes."""
    history = [
        SimpleNamespace(key=key, num_matches=matches) for key in (*EIGHT_BIT_KEYS, *EXPERT_KEYS)
    ]
    factory = SimpleNamespace(checkpoint=quantised.FOLDER / variant)
    return cast(TransformContext, SimpleNamespace(factory=factory, history=history))


VARIANTS = [
    "ct_fp8_dynamic",
    "ct_fp8_block",
    "hf_fp8_llama",
    "ct_fp8_static",
    "hf_fp8_static",
    "ct_fp8_qwen3_moe",
    "hf_fp8_qwen3_moe",
    "hf_fp8_deepseek_v3",
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("matches", [0, 14])
def test_logits_are_the_writers(variant: str, matches: int) -> None:
    folder = quantised.FOLDER / variant
    expected = load_file(folder / "expected.safetensors")
    config: Any = AutoConfig.from_pretrained(folder)
    model = load_reference(
        config,
        folder,
        state=decoded_state(folder),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert bool(quantise_inputs(model, of_run(variant, matches))) == bool(matches)
    with torch.no_grad():
        logits = model(expected["ids"][None]).logits[0]
    wanted = expected["activation_logits" if matches else "logits"]
    assert (logits - wanted).norm() / wanted.norm() < 1e-5


@pytest.mark.parametrize("variant", ["ct_fp8_kv_cache", "modelopt_fp8"])
def test_keys_and_values_are_the_writers(variant: str) -> None:
    folder = quantised.FOLDER / variant
    expected = load_file(folder / "expected.safetensors")
    config: Any = AutoConfig.from_pretrained(folder)
    state = decoded_state(folder)
    kind = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = load_reference(config, folder, state=state, **kind)
    runtime = RuntimeConfig(kv_cache_config={"dtype": "float8_e4m3fn"})
    context = of_run(variant, 1)
    context.runtime, context.device = runtime, torch.device("cpu")  # type: ignore[assignment]
    quantise_inputs(model, context)
    assert round_caches(model, context)
    with torch.no_grad():
        logits = model(expected["ids"][None]).logits[0]
    wanted = expected["cache_logits"]
    assert (logits - wanted).norm() / wanted.norm() < 1e-5
    context.runtime = RuntimeConfig()  # type: ignore[assignment]
    assert not round_caches(model, context)


def test_a_run_is_measured_by_a_model_with_inputs_quantised_alike(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(quantised.FOLDER / "ct_fp8_dynamic", folder)
    save_tokenizer(folder)
    transforms = {key: {"backend": "torch"} for key in EIGHT_BIT_KEYS}
    settings = {"model": str(folder), "max_seq_len": 64, "transforms": transforms}
    found = run(RuntimeConfig(**settings), tmp_path, device="cpu", dtype="bfloat16")
    assert found["status"] == "success", found["error"]
    prefill = found["comparison"]["checks"][0]
    assert prefill["transformers"] > 0.03, "rounding to bfloat16 alone does less"
