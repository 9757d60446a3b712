"""The size of a quantised checkpoint: on disk, decoded, and as a GPU keeps it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from safetensors import safe_open

from onboard.graph.weight_load.quantised_folder import quantised_checkpoint
from onboard.hub import LocalSource
from onboard.workflow.checkpoint.kept_codes import BY_CONFIG, spared_bytes
from onboard.workflow.checkpoint.parameter_count import build_on_meta, estimate_size
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint

ZOO = Path(__file__).resolve().parents[3] / "registry" / "zoo.yaml"
VARIANTS = ("hf_fp8_llama", "ct_w4a16", "gptq", "mxfp4_gpt_oss", "bnb_nf4", "ct_fp8_qwen3_moe")


def in_files(folder: Path) -> int:
    """Bytes of all tensors, by the library that wrote them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("variant", VARIANTS)
def test_elements_are_those_of_the_model(variant: str) -> None:
    folder = quantised.FOLDER / variant
    size = estimate_size(LocalSource(str(folder)), "bfloat16")
    model = build_on_meta(folder)
    assert size.parameters == sum(math.prod(each.shape) for each in model.parameters())
    assert size.stored == in_files(folder)
    assert size.bytes == 2 * size.parameters  # decoded, as a CPU does
    assert estimate_size(LocalSource(str(folder)), "float32").bytes == 4 * size.parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpu_keeps_codes_that_it_has_kernels_for(variant: str) -> None:
    folder = quantised.FOLDER / variant
    decoded, kept, exact = (
        estimate_size(LocalSource(str(folder)), dtype, gpu=gpu).bytes
        for dtype, gpu in (("bfloat16", False), ("bfloat16", True), ("float32", True))
    )
    assert exact == 2 * decoded
    assert (kept < decoded) == (variant != "bnb_nf4")
    # But for what is stored in another dtype, and parts that stand for nothing, the files' bytes
    assert variant == "bnb_nf4" or abs(kept - in_files(folder)) < 0.1 * decoded


UNSAID = {
    "hf_fp8_ue8m0": "in which dtype scales are stored",
    "modelopt_int4_awq": "two layers have factors of inputs",
    "modelopt_w4a8_awq": "two layers have factors of inputs",
    "torchao_fp8": "what its writer made of the config",
    "ct_embeddings": "embeddings and the head are quantised, too",
    "torchao_int8": "what its writer made of the config",
}
"""What a config does not say of a checkpoint, and its files do."""
DECODED = (
    "bnb_fp4",
    "bnb_nf4",
    "ct_odd_bits",
    "ct_odd_bits_by_word",
    "hf_mxfp8",
    "modelopt_mxfp8",
)


def without_files(variant: str, folder: Path) -> Path:
    """A checkpoint of which only what its config says is here."""
    for path in (quantised.FOLDER / variant).glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    return folder


@pytest.mark.parametrize(
    "variant", [name for name in quantised.variants() if not name.startswith("gguf")]
)
def test_a_config_tells_what_the_headers_do(variant: str, tmp_path: Path) -> None:
    """To the byte, the files being what the formats' libraries wrote."""
    by_headers, said = spared_bytes(quantised.FOLDER / variant)
    assert (by_headers > 0) == (variant not in DECODED)
    assert said == []
    by_config, said = spared_bytes(without_files(variant, tmp_path))
    assert said == ([BY_CONFIG] if by_config else [])
    assert (by_config == by_headers) == (variant not in UNSAID)


@pytest.mark.parametrize("variant", ["modelopt_fp8_llama4", "modelopt_nvfp4_llama4"])
def test_experts_that_all_compute_are_counted_decoded(variant: str, tmp_path: Path) -> None:
    """No op has a batched product with codes: a run decodes them."""
    checkpoint = quantised_checkpoint(quantised.FOLDER / variant)
    assert checkpoint is not None
    assert not any("experts" in name for name in checkpoint.kept_bytes())
    assert spared_bytes(without_files(variant, tmp_path)) == (
        checkpoint.spared_bytes(),
        [BY_CONFIG],
    )


def test_a_file_beside_the_config_counts_as_well(tmp_path: Path) -> None:
    folder = without_files("modelopt_fp8", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (folder / "hf_quant_config.json").is_file()
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert spared_bytes(folder)[0] == spared_bytes(quantised.FOLDER / "modelopt_fp8")[0]


HYBRID = {
    "model_type": "nemotron_h",
    "layers_block_type": ["moe", "full_attention", "mlp"],
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "n_routed_experts": 4},
    "moe_shared_expert_intermediate_size": 32,
}
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}


def spared_of_hybrid(folder: Path, said: dict[str, Any]) -> int:
    config = {**HYBRID, "quantization_config": {"quant_method": "modelopt", **said}}
    (folder / "config.json").write_text(json.dumps(config))
    return spared_bytes(folder)[0]


def test_layers_by_the_names_that_the_checkpoint_has(tmp_path: Path) -> None:
    """Transformers' model calls the trunk otherwise."""
    whole = spared_of_hybrid(tmp_path, NVFP4)
    mixer = "backbone.layers.2.mixer"
    ignored = spared_of_hybrid(tmp_path, {**NVFP4, "ignore": ["lm_head", mixer]})
    dense = 2 * 64 * 64  # weights of the last layer
    assert whole - ignored == 2 * dense - (dense // 2 + dense // 16 + 2 * 4)
    layers = {f"{mixer}.{name}_proj": NVFP4 for name in ("up", "down")}
    experts = {
        f"backbone.layers.0.mixer.experts.{expert}.{name}_proj": NVFP4
        for expert in range(4)
        for name in ("up", "down")
    }
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert spared_of_hybrid(tmp_path, mixed) == whole - ignored
    stacks = 4 * 2 * 32 * 64
    both = spared_of_hybrid(tmp_path, {**mixed, "quantized_layers": layers | experts})
    assert both - (whole - ignored) == 2 * stacks - (stacks // 2 + stacks // 16 + 8 * 4)


@pytest.mark.parametrize(
    ("model", "released"),
    [("openai/gpt-oss-20b", 13_761_264_768), ("openai/gpt-oss-120b", 65_248_815_744)],
)
def test_released_models_have_the_size_of_their_files(
    model: str, released: int, tmp_path: Path
) -> None:
    """By config alone: what their repositories' indices say all tensors take."""
    zoo = YAML(typ="safe").load(ZOO.read_text("utf-8"))
    configs = [models[model] for models in zoo["families"].values() if model in models]
    config = {**configs[0], "model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    elements = sum(each.numel() for each in build_on_meta(tmp_path).parameters())
    assert 2 * elements - spared_bytes(tmp_path)[0] == pytest.approx(released, rel=1e-6)


def test_nothing_is_spared_where_there_are_no_kernels(tmp_path: Path) -> None:
    assert spared_bytes(quantised.FOLDER / "bnb_nf4") == (0, [])
    assert spared_bytes(save_checkpoint(tmp_path)) == (0, [])


def test_it_is_said() -> None:
    size = estimate_size(LocalSource(str(quantised.FOLDER / "hf_fp8_llama")), "bfloat16")
    assert "GB in quantised files" in str(size)
