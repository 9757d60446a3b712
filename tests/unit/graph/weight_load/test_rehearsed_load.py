"""What is found wrong with a checkpoint from its headers, against what transformers says when it
loads the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from onboard.graph.weight_load.rehearsed_load import rehearse_load
from onboard.graph.weight_load.safetensors_folder import Checkpoint, TensorMeta
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.inputs.tiny_checkpoint import make_checkpoint

Tensors = dict[str, TensorMeta]
DIVERSE = (
    *("llama", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "gemma3n_text"),
    *("bamba", "bloom", "lfm2_moe", "qwen2_5_vl"),
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, dtype, torch.Size(shape).numel() * dtype.itemsize)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type)
            make_checkpoint(Target(name=model_type), made[model_type])
        return made[model_type]

    return of


Folder = Callable[[str], Path]


def misfits(folder: Path, tensors: Tensors) -> list[str]:
    return rehearse_load(build_on_meta(folder), tensors).misfits


@pytest.mark.parametrize("model_type", DIVERSE)
def test_what_transformers_wrote_fits(model_type: str, folder: Folder) -> None:
    path = folder(model_type)
    rehearsal = rehearse_load(build_on_meta(path), Checkpoint(path).names())
    assert (rehearsal.misfits, rehearsal.facts) == ([], [])


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_each_missing_tensor_is_one_that_transformers_misses(
    model_type: str, folder: Folder, tmp_path: Path
) -> None:
    """transformers itself loads the same file: it either reports the tensor or cannot stack what is
    left.
    """
    path = folder(model_type)
    tensors = load_file(path / "model.safetensors")
    name = sorted(tensors)[len(tensors) // 3]
    del tensors[name]
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = misfits(tmp_path, Checkpoint(tmp_path).names())
    try:
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    except RuntimeError:  # a stack that lacks one of its tensors
        assert len(found) == 1
        assert "experts" in found[0]
    else:
        assert found == [f"it has no {missing}" for missing in sorted(info["missing_keys"])]
        assert info["missing_keys"]


def test_tied_weights_may_be_absent_and_both_may_not(folder: Folder) -> None:
    path = folder("gpt2")
    tensors = Checkpoint(path).names()
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    assert misfits(path, tensors) == []
    del tensors["lm_head.weight"], tensors["transformer.wte.weight"]
    assert any("wte" in found or "lm_head" in found for found in misfits(path, tensors))


@pytest.mark.parametrize("prefix", ["language_model.", None])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_prefix_more_or_less_is_no_misfit(
    model_type: str, prefix: str | None, folder: Folder
) -> None:
    path = folder(model_type)
    tensors = Checkpoint(path).names()
    if prefix:
        renamed = {prefix + name: found for name, found in tensors.items()}
    else:
        renamed = {
            name.removeprefix("model.").removeprefix("transformer."): found
            for name, found in tensors.items()
        }
    assert misfits(path, renamed) == []


NORM = "model.layers.0.input_layernorm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
CASES: dict[str, tuple[Tensors, str]] = {
    "shape": ({NORM: meta(3, 5)}, f"{NORM} is [3, 5], not ["),
    "integers": ({NORM: meta(64, dtype=torch.int32)}, f"{NORM} is int32"),
    "extra": (
        {"model.layers.0.self_attn.q_norm.weight": meta(8)},
        "the model has no use for model.layers.0.self_attn",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_misfit_is_named(case: str, folder: Folder) -> None:
    change, message = CASES[case]
    path = folder("llama")
    found = misfits(path, Checkpoint(path).names() | change)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_integers_in_the_place_of_one_expert_are_found(folder: Folder) -> None:
    path = folder("mixtral")
    tensors = Checkpoint(path).names()
    name = next(name for name in tensors if ".experts.1." in name)
    tensors[name] = meta(*tensors[name].shape, dtype=torch.int8)
    assert misfits(path, tensors) == [f"{name} is int8, not floating-point numbers"]


def test_what_is_left_out_for_a_reason_is_said(folder: Folder) -> None:
    path = folder("llama")
    more = {
        "model.layers.99.mlp.up_proj.weight": meta(3),
        "mtp.fc.weight": meta(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": meta(3),
    }
    rehearsal = rehearse_load(build_on_meta(path), Checkpoint(path).names() | more)
    assert rehearsal.misfits == []
    for word in ("model.layers.99", "mtp", "legacy buffers"):
        assert any(word in fact for fact in rehearsal.facts), word


def test_a_layer_of_experts_beyond_the_models_is_left_out(folder: Folder) -> None:
    """A head for multi-token prediction, where transformers' class does not know its number."""
    path = folder("deepseek_v3")
    tensors = Checkpoint(path).names()
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    layer = {name: each for name, each in tensors.items() if f".layers.{last}." in name}
    assert any(".experts.0." in name for name in layer)
    more = {name.replace(f".{last}.", f".{last + 1}.", 1): each for name, each in layer.items()}
    more[f"model.layers.{last + 1}.eh_proj.weight"] = meta(8, 16)
    rehearsal = rehearse_load(build_on_meta(path), tensors | more)
    assert rehearsal.misfits == []
    assert any(f"model.layers.{last + 1}" in fact for fact in rehearsal.facts)


def test_many_tensors_take_seconds(folder: Folder, tmp_path: Path) -> None:
    """23,000 tensors of a mixture whose experts are stored one by one."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=30, num_attention_heads=1, num_key_value_heads=1,
        num_local_experts=256, vocab_size=16,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = build_on_meta(tmp_path)
    tensors = {
        name: meta(*tensor.shape)
        for name, tensor in model.state_dict().items()
        if ".experts." not in name
    }
    for layer in range(30):
        path = f"model.layers.{layer}.block_sparse_moe.experts"
        tensors |= {
            f"{path}.{expert}.{name}.weight": meta(8, 8)
            for expert in range(256)
            for name in ("w1", "w2", "w3")
        }
    started = time.process_time()
    assert rehearse_load(model, tensors).misfits == []
    assert time.process_time() - started < 20
    assert len(tensors) > 23_000
