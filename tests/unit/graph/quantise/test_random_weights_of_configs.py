"""Random weights are in the codes that a config says its checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onboard import LLM
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint

KINDS = ("fp8", "finegrained_fp8", "int4", "mxfp4", "nvfp4", "int8")
KEYS = tuple(f"quantize_{kind}_linear_from_config" for kind in KINDS)
MIXTURES = tuple(f"quantize_{kind}_moe_from_config" for kind in KINDS)


def run(folder: Path, **settings: object) -> LLM:
    transforms = {key: {"backend": "torch"} for key in (*KEYS, *MIXTURES)}
    config = {"max_seq_len": 64, "transforms": transforms, **settings}
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


def matches(llm: LLM) -> dict[str, int]:
    """How many layers compute with codes, by the transform that lets them."""
    history = [entry for entry in llm.engine.history if entry.key in (*KEYS, *MIXTURES)]
    return {entry.key: entry.num_matches for entry in history if entry.num_matches}


@pytest.mark.parametrize(
    "variant", ["ct_fp8_dynamic", "ct_w4a16", "mxfp4_gpt_oss", "ct_fp8_qwen3_moe"]
)
def test_they_have_the_codes_of_the_checkpoint(variant: str) -> None:
    folder = quantised.FOLDER / variant
    random, loaded = run(folder, skip_loading_weights=True), run(folder)
    assert matches(random) == matches(loaded) != {}
    assert random.logits([1, 2, 3]).isfinite().all()
    assert not any(fact.startswith("random weights") for fact in random.engine.facts)


def test_they_have_blocks(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=384, head_dim=64)
    asked = run(tmp_path, skip_loading_weights=True, quantize="fp8-block")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    assert matches(run(tmp_path, skip_loading_weights=True)) == matches(asked) != {}


def test_other_codes_are_said() -> None:
    llm = run(quantised.FOLDER / "modelopt_nvfp4", skip_loading_weights=True)
    assert matches(llm) == {}
    assert [fact for fact in llm.engine.facts if fact.startswith("random weights")] == [
        "random weights: those in nvfp4 are whole numbers of torch.float32 here"
    ]


def test_groups_without_kernels_are_said(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", hidden_size=240, intermediate_size=480, head_dim=60)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 48, "desc_act": False, "sym": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    llm = run(tmp_path, skip_loading_weights=True)
    assert matches(llm) == {}
    assert [fact for fact in llm.engine.facts if fact.startswith("random weights")] == [
        "random weights: those in int4 are whole numbers of torch.float32 here"
    ]
