"""Checkpoints as other versions of the formats' libraries write them: other names of keys and
tensors, other places of the config. Each stands for the same weights as the fixture that it is made
of.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.errors import OnboardError
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.graph.weight_load.scales.cache_scales import scales_of
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from onboard.workflow.checkpoint.usable_weights import check_fit
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint
from tests.support.quantised_drawing import gptq

Said = dict[str, Any]


def copy_of(variant: str, folder: Path, change: Callable[[Said], object] = lambda _: None) -> Path:
    """A fixture whose quantization_config was changed."""
    shutil.copytree(quantised.FOLDER / variant, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    return folder


def edit(folder: Path, change: Callable[[Said], object]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


def rename(folder: Path, pattern: str, to: str) -> Path:
    """Change names of tensors; at least one has to match."""
    path = folder / "model.safetensors"
    tensors = {re.sub(pattern, to, name): each for name, each in load_file(path).items()}
    assert tensors.keys() != load_file(path).keys()
    save_file(tensors, path, {"format": "pt"})
    return folder


def require_same(folder: Path, variant: str, prefix: tuple[str, str] = ("", "")) -> None:
    """The same weights, to the bit; `prefix` is what names begin with in the fixture, and here."""
    expected, found = open_checkpoint(quantised.FOLDER / variant), open_checkpoint(folder)
    assert isinstance(expected, QuantisedCheckpoint)
    assert isinstance(found, QuantisedCheckpoint)
    assert len(found.weights) == len(expected.weights) > 0
    for name in expected.names():
        here = prefix[1] + name.removeprefix(prefix[0]) if name.startswith(prefix[0]) else name
        assert torch.equal(found.read(here), expected.read(name)), name


def rotating(*locations: str) -> Said:
    """What llm-compressor writes of a rotation, and the places that it is applied at."""
    apply = [{"location": at, "targets": ["re:.*o_proj$"], "inverse": False} for at in locations]
    return {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}}


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("ct_w4a16", rotating("weight_output", "weight_input")),
        ("hf_fp8_llama", {"fmt": "float8_e4m3fn"}),  # MiniMax
        ("hf_fp8_llama", {"fmt": None, "scale_fmt": None}),
        ("hf_fp8_static", {"kv_cache_scheme": "static", "ignore_patterns": ["re:.*lm_head"]}),
        ("hf_fp8_static", {"modules_to_not_convert": None, "ignored_layers": ["lm_head"]}),
        ("modelopt_fp8", {"quant_method": "modelopt_mixed"}),
        ("modelopt_nvfp4", {"quant_algo": "W4A8_NVFP4_FP8"}),
        ("ct_fp8_dynamic", {"quant_method": "compressed_tensors"}),
        ("ct_fp8_dynamic", {"provider": "auto-round"}),
        ("ct_fp8_dynamic", {"quant_method": None}),
        ("ct_fp8_dynamic", {"quantization_status": "frozen", "global_compression_ratio": 1.5}),
        ("gptq", {"v2": False, "offload_to_disk": True, "vram_strategy": "exclusive"}),
        ("gptq", {"meta": {"quantizer": ["gptqmodel:5.0"]}, "pack_dtype": "int32"}),
        ("gptq", {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}),
        ("gptq", {"method": "gptq", "format": "gptq", "dynamic": {r"-:.*\.gate$": {}}}),
        ("awq", {"version": "GEMM", "checkpoint_format": "gemm"}),
        ("awq", {"method": "awq", "format": "gemm", "dynamic": {r"-:.*\.gate$": {}}}),
        (
            "auto_round_gptq",
            {"extra_config": {r".*mlp\.up.*": {"bits": 8}, "k_proj$": {"bits": 16}}},
        ),
        ("auto_round_gptq", {"extra_config": {"up_pro[j]": {"bits": 8}, ".*up.*": {"bits": 2}}}),
        ("auto_round_all_bits", {"packing_format": "auto_round:gptqmodel"}),
        ("bnb_nf4", {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]}),
    ],
)
def test_keys_of_other_versions(variant: str, change: Said, tmp_path: Path) -> None:
    require_same(copy_of(variant, tmp_path, lambda said: said.update(change)), variant)


@pytest.mark.parametrize("algorithm", ["MXFP4", "W4A8_MXFP4_FP8"])
def test_mxfp4_by_modelopts_names(algorithm: str, tmp_path: Path) -> None:
    folder = rename(copy_of("ct_mxfp4", tmp_path), r"weight_packed$", "weight")
    said = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 32}
    edit(folder, lambda config: config.update(quantization_config=said))
    require_same(folder, "ct_mxfp4")


def test_autofp8_names_its_scales_otherwise(tmp_path: Path) -> None:
    folder = rename(copy_of("hf_fp8_static", tmp_path), r"weight_scale_inv$", "weight_scale")
    rename(folder, r"activation_scale$", "input_scale")
    require_same(folder, "hf_fp8_static")


def test_older_names_of_awqs_keys_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = copy_of("awq", tmp_path)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit(folder, lambda config: config.pop("quantization_config"))
    older = {"zero_point": True, "q_group_size": said["group_size"], "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(older))
    require_same(folder, "awq")


def test_older_gptq_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder = copy_of("gptq", tmp_path)
    edit(folder, lambda config: config.pop("quantization_config"))
    older = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True}
    (folder / "quantize_config.json").write_text(json.dumps(older))
    require_same(folder, "gptq")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_codes_in_elements_of_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    said = {"bnb_4bit_quant_storage": str(dtype).removeprefix("torch.")}
    folder = copy_of("bnb_nf4", tmp_path, lambda config: config.update(said))
    tensors = load_file(folder / "model.safetensors")
    for name in [name.removesuffix(".absmax") for name in tensors if name.endswith(".absmax")]:
        tensors[name] = tensors[name].flatten().view(dtype).unsqueeze(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    require_same(folder, "bnb_nf4")


def test_a_compression_config_is_the_older_name(tmp_path: Path) -> None:
    folder = copy_of("ct_w4a16", tmp_path)
    edit(folder, lambda c: c.update(compression_config=c.pop("quantization_config")))
    require_same(folder, "ct_w4a16")


def edit_tensors(
    folder: Path, ending: str, change: Callable[[torch.Tensor], torch.Tensor], to: str | None = None
) -> Path:
    """Change the tensors whose names have an ending, or put more beside them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    found = [name for name in tensors if name.endswith(ending)]
    assert found
    for name in found:
        place = name if to is None else name.removesuffix(ending) + to
        tensors[place] = change(tensors[name]).contiguous()
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("variant", "taken"), [("ct_fp8_dynamic", "float-quantized"), ("ct_w4a16", "pack-quantized")]
)
def test_a_format_that_is_not_named_is_the_usual_one(
    variant: str, taken: str, tmp_path: Path
) -> None:
    def change(said: Said) -> None:
        formats = [said.pop("format"), *(g.pop("format") for g in said["config_groups"].values())]
        assert set(formats) == {taken}

    require_same(copy_of(variant, tmp_path, change), variant)


def test_a_scheme_of_another_class_does_not_mean_linear_layers(tmp_path: Path) -> None:
    """Whatever comes first in the config."""

    def change(said: Said) -> None:
        weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
        other = {"targets": ["Embedding"], "weights": weights, "format": "int-quantized"}
        said["config_groups"] = {"group_of_another": other, **said["config_groups"]}

    require_same(copy_of("ct_w4a16", tmp_path, change), "ct_w4a16")


def test_codes_of_zero_that_are_not_packed(tmp_path: Path) -> None:
    folder = copy_of("ct_w4a16_asym", tmp_path)

    def apart(zeros: torch.Tensor) -> torch.Tensor:
        places = [(zeros >> 4 * place & 15) - 8 for place in range(8)]
        return torch.stack(places, 1).flatten(0, 1).to(torch.int8)

    require_same(edit_tensors(folder, ".weight_zero_point", apart), "ct_w4a16_asym")


def test_an_order_of_inputs_that_says_there_is_none(tmp_path: Path) -> None:
    """-1 is the same as the groups that inputs are in without an order."""
    variant = "ct_w4a16_g_idx"
    said = json.loads((quantised.FOLDER / variant / "config.json").read_text())
    group = said["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"]
    runs, none = (copy_of(variant, tmp_path / name) for name in ("runs", "none"))
    edit_tensors(runs, ".weight_g_idx", lambda order: torch.arange(len(order)).int() // group)
    edit_tensors(none, ".weight_g_idx", lambda order: -torch.ones_like(order))
    expected, found = open_checkpoint(runs), open_checkpoint(none)
    for name in expected.names():
        assert torch.equal(found.read(name), expected.read(name)), name


def test_the_scale_of_one_block_in_four_dimensions(tmp_path: Path) -> None:
    folder = copy_of("hf_fp8_llama", tmp_path)
    edit_tensors(folder, ".weight_scale_inv", lambda scale: scale[:, None, :, None])
    require_same(folder, "hf_fp8_llama")


def test_scales_of_a_cache_by_autofp8s_names(tmp_path: Path) -> None:
    folder = copy_of("ct_fp8_kv_cache", tmp_path)
    rename(folder, r"\.([kv])_scale$", r".\1_proj.output_scale")
    require_same(folder, "ct_fp8_kv_cache")
    found = open_checkpoint(folder)
    assert isinstance(found, QuantisedCheckpoint)
    path = "model.layers.1.self_attn"
    scales = scales_of(path, found, {name: name for name in found.names()})
    assert scales == (f"{path}.k_proj.output_scale", f"{path}.v_proj.output_scale")


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_the_model_does_not_have(value: float, tmp_path: Path) -> None:
    """AutoGPTQ's forerunners wrote zeros; one that is not zero is another model's."""
    folder = copy_of("gptq", tmp_path)
    edit_tensors(folder, ".scales", lambda s: torch.full((s.shape[1],), value).half(), ".bias")
    names = open_checkpoint(folder).names()
    if value:
        with pytest.raises(OnboardError, match="no use for"):
            check_fit(build_on_meta(folder), names)
        return
    facts = check_fit(build_on_meta(folder), names)
    assert facts == ["the model leaves out biases that are zero (7 tensors of the checkpoint)"]


def test_blocks_as_text(tmp_path: Path) -> None:
    def change(said: Said) -> None:
        for group in said["config_groups"].values():
            group["weights"]["block_structure"] = "128x128"

    require_same(copy_of("ct_fp8_block", tmp_path, change), "ct_fp8_block")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("variant", ["hf_fp8_llama", "ct_nvfp4", "modelopt_fp8", "gptq"])
def test_a_text_model_within_another(variant: str, depth: int, tmp_path: Path) -> None:
    """Under `model.language_model.`, with its config inside the whole's."""
    folder = rename(copy_of(variant, tmp_path), r"^model\.", "model.language_model.")

    def nest(config: Said) -> None:
        inner = dict(config)
        config.clear()
        config["text_config"] = inner
        for _ in range(depth - 1):
            whole = dict(config)
            config.clear()
            config["thinker_config"] = whole

    require_same(edit(folder, nest), variant, ("model.", "model.language_model."))


def test_files_in_parts(tmp_path: Path) -> None:
    folder = copy_of("ct_w4a16", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, mine in shards.items():
        save_file({name: tensors[name] for name in mine}, folder / file)
    places = {name: file for file, mine in shards.items() for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    require_same(folder, "ct_w4a16")


def test_a_head_that_is_quantised(tmp_path: Path) -> None:
    """As `lm_head: true` of GPTQ: the tensors show it."""
    folder = copy_of("gptq", tmp_path, lambda said: said.update(lm_head=True))
    path = folder / "model.safetensors"
    tensors, stem = load_file(path), "model.layers.0.mlp.gate_proj"
    parts = [name for name in tensors if name.startswith(f"{stem}.")]
    tensors |= {name.replace(stem, "lm_head"): tensors[name].clone() for name in parts}
    del tensors["lm_head.weight"]
    save_file(tensors, path, {"format": "pt"})
    found = open_checkpoint(folder)
    assert torch.equal(found.read("lm_head.weight"), found.read(f"{stem}.weight"))


def test_layers_of_gptq_with_bits_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: one layer of the eight-bit fixture among those of four bits."""
    rule = {r"+:.*\.down_proj$": {"bits": 8, "group_size": 64}, r"-:.*\.gate$": {}}
    folder = copy_of("gptq", tmp_path, lambda said: said.update(dynamic=rule))
    path, other = folder / "model.safetensors", quantised.FOLDER / "gptq_8bit"
    eight = {k: v for k, v in load_file(other / "model.safetensors").items() if ".down_proj." in k}
    kept = {k: v for k, v in load_file(path).items() if ".down_proj." not in k}
    save_file(kept | eight, path, {"format": "pt"})
    found = open_checkpoint(folder)
    for name in found.names():
        source = open_checkpoint(other if ".down_proj." in name else quantised.FOLDER / "gptq")
        assert torch.equal(found.read(name), source.read(name)), name


@pytest.mark.parametrize("algorithm", ["FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "W4A16_AWQ", "MXFP4"])
def test_modelopts_experts_in_one_tensor_are_refused_by_name(
    algorithm: str, tmp_path: Path
) -> None:
    """But for the two algorithms that its release of Llama 4 has."""
    folder = copy_of("modelopt_fp8_llama4", tmp_path)
    layers = {name: {"quant_algo": algorithm} for name in ("feed_forward.experts",)}
    said = {"quant_algo": "FP8", "quantized_layers": layers}
    edit(folder, lambda config: config["quantization_config"].update(said))
    (folder / "hf_quant_config.json").unlink()
    with pytest.raises(OnboardError, match=rf"experts in one tensor \(.*_proj\) with {algorithm}"):
        open_checkpoint(folder).names()


def test_experts_in_one_tensor_with_a_scale_for_each_output(tmp_path: Path) -> None:
    """As transformers' fbgemm_fp8 has Llama 4 (`integrations/fbgemm_fp8.py`): beside `gate_up_proj`
    scales are [experts, 1, outputs], beside `down_proj` [experts, outputs, 1].
    """
    folder = copy_of("modelopt_fp8_llama4", tmp_path)
    (folder / "hf_quant_config.json").unlink()
    said = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    edit(folder, lambda config: config.update(quantization_config=said))
    path, kept, expected = folder / "model.safetensors", {}, {}
    stored = open_checkpoint(quantised.FOLDER / "modelopt_fp8_llama4")
    for name in stored.names():
        kept[name] = values = stored.read(name).float()
        if values.dim() == 3:  # [experts, inputs, outputs]
            scale = values.abs().amax(1, keepdim=True) / 448
            kept[name] = (values / scale).to(torch.float8_e4m3fn)
            expected[name] = kept[name].float() * scale
            turns = name.endswith("down_proj")
            kept[f"{name}_scale"] = (scale.mT if turns else scale).contiguous()
    assert len(expected) == 2
    save_file(kept, path, {"format": "pt"})
    found = open_checkpoint(folder)
    check_fit(build_on_meta(folder), found.names())
    for name, values in expected.items():
        assert torch.equal(found.read(name), values), name
        assert torch.equal(found.read_entry(name, 1), values[1]), name
    wrong = f"{next(iter(expected))}_scale"
    save_file({**kept, wrong: kept[wrong][..., :-1].contiguous()}, path, {"format": "pt"})
    with pytest.raises(OnboardError, match=r"the scale of .* does not fit"):
        open_checkpoint(folder).names()


def test_experts_in_one_tensor_lack_no_scale_and_have_one(tmp_path: Path) -> None:
    folder = copy_of("modelopt_fp8_llama4", tmp_path)
    path = folder / "model.safetensors"
    tensors, scale = load_file(path), "model.layers.0.feed_forward.experts.down_proj_weight_scale"
    save_file({**tensors, scale: tensors[scale].expand(3).contiguous()}, path, {"format": "pt"})
    with pytest.raises(OnboardError, match=f"{scale} is|the scale of .*down_proj is"):
        open_checkpoint(folder).names()
    del tensors[scale]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(OnboardError, match=r"lacks a part of a weight .*down_proj|no .*down_proj_"):
        open_checkpoint(folder).names()


def test_modelopts_layers_by_a_shorter_name(tmp_path: Path) -> None:
    """Mixed algorithms, named without the text model's prefix, and by what layers lie in."""
    folder = rename(copy_of("modelopt_fp8", tmp_path), r"^model\.", "model.language_model.")
    lies_in = [f"layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn", "mlp")]
    own = {name: {"quant_algo": "FP8"} for name in lies_in}
    for path in (folder / "config.json", folder / "hf_quant_config.json"):
        text = json.loads(path.read_text())
        said = text.get("quantization_config") or text["quantization"]
        said |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": own}
        path.write_text(json.dumps(text))
    require_same(folder, "modelopt_fp8", ("model.", "model.language_model."))


@pytest.mark.parametrize(
    ("variant", "change", "said"),
    [
        ("gptq", {"rotation": "hadamard"}, "rotation"),
        ("gptq", {"adapter": {"lora": 1}}, "adapter"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 9}}}, "bits = 9"),
        ("gptq", {"dynamic": {"+:(a+)+": {"bits": 8}}}, "pattern"),
        ("gptq", {"dynamic": {".*": {"spin": 1}}}, "spin"),
        ("gptq", {"dynamic": 1.5}, "dynamic = 1.5"),
        ("auto_round", {"act_bits": "8"}, "act_bits = 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
        ("awq", {"version": "gemv"}, "gemv"),
        ("awq", {"format": "marlin"}, "marlin"),
        ("awq", {"dynamic": {".*": {"bits": 8}}}, "dynamic"),
        ("hf_fp8_llama", {"fmt": "e5m2"}, "e5m2"),
        ("ct_fp8_dynamic", {"quant_method": "compressed"}, "compressed"),
        ("ct_w4a16", rotating("weight_output", "input"), "activations that a run rotates"),
        ("ct_w4a16", rotating("weight_output", "q_attn"), "transform_config R4"),
        ("ct_w4a16", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config R1"),
        ("ct_w4a16", {"transform_config": [1]}, "transform_config = [1]"),
        ("ct_w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("modelopt_fp8", {"quant_algo": "INT4_SPINQUANT"}, "SPINQUANT"),
    ],
)
def test_what_is_unknown_stays_refused_by_name(
    variant: str, change: Said, said: str, tmp_path: Path
) -> None:
    folder = copy_of(variant, tmp_path, lambda values: values.update(change))
    with pytest.raises(OnboardError, match=re.escape(said)):
        open_checkpoint(folder)


def test_layers_that_have_their_inputs_first_are_refused(tmp_path: Path) -> None:
    """GPT-2's: a square weight would be turned, and nobody would see it."""
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_inner": 64, "n_positions": 64}
    folder = save_checkpoint(tmp_path, "gpt2", **sizes)
    name = "transformer.h.0.attn.c_proj"
    layer, path = gptq(random.Random(0), (64, 64)), folder / "model.safetensors"
    tensors = {key: each for key, each in load_file(path).items() if key != f"{name}.weight"}
    tensors |= {f"{name}.{ending}": each for ending, each in layer.tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    edit(folder, lambda config: config.update(quantization_config=layer.said))
    with pytest.raises(OnboardError, match=f"{name}.weight .* inputs first"):
        check_fit(build_on_meta(folder), open_checkpoint(folder).names())


def of_auto_round(bits: int, packing: str, **values: Any) -> Said:
    said = {"quant_method": "auto-round", "bits": bits, "data_type": "mx_fp", "group_size": 32}
    return said | {"act_bits": bits, "packing_format": f"auto_round:{packing}"} | values


@pytest.mark.parametrize(
    ("variant", "said", "renamed"),
    [
        ("ct_mxfp4", of_auto_round(4, "llm_compressor"), ()),
        (
            "ct_mxfp4",
            of_auto_round(8, "llm_compressor", extra_config={"self_attn|mlp": {"bits": 4}}),
            (),
        ),
        ("hf_mxfp8", of_auto_round(8, "llm_compressor"), ("weight_scale_inv", "weight_scale")),
        (
            "hf_fp8_llama",
            of_auto_round(
                8, "fp8", data_type="fp", group_size=[128, 128], weight_block_size=[128, 128]
            ),
            (),
        ),
    ],
)
def test_floats_of_auto_round(
    variant: str, said: Said, renamed: tuple[str, ...], tmp_path: Path
) -> None:
    folder = copy_of(variant, tmp_path, lambda values: (values.clear(), values.update(said)))
    if renamed:
        rename(folder, *renamed)
    require_same(folder, variant)


def test_floats_of_auto_round_that_are_not_known(tmp_path: Path) -> None:
    for change, told in (
        ({"bits": 6}, "bits = 6"),
        ({"data_type": "nv_fp"}, "data_type = nv_fp"),
        ({"extra_config": {"up_proj": {"data_type": "int"}}}, "data_type = int"),
        ({"extra_config": [4]}, "extra_config"),
    ):
        said = of_auto_round(4, "llm_compressor") | change
        folder = copy_of(
            "ct_mxfp4", tmp_path, lambda values, said=said: (values.clear(), values.update(said))
        )  # type: ignore[misc]
        with pytest.raises(OnboardError, match=told):
            open_checkpoint(folder)
