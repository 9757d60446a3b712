"""Quantised checkpoints that lack a tensor, or have one of another size, are refused in one
line.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from onboard.errors import OnboardError
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.quantised.read_method import read_method
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from onboard.workflow.checkpoint.usable_weights import check_fit, check_weights
from tests.support import quantised

VARIANTS = [name for name in quantised.variants() if not name.startswith("gguf")]
FEW = 16
"""Of so many formats a run looks at each damage."""


def copy_of(variant: str, folder: Path) -> Path:
    shutil.copytree(quantised.FOLDER / variant, folder, dirs_exist_ok=True)
    return folder


def one_weight(folder: Path) -> Any:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    return next(iter(checkpoint.weights.values()))


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        notes = file.metadata()
    tensors = load_file(path)
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path, notes)


def gathered(folder: Path) -> None:
    """What gather looks at."""
    check_fit(build_on_meta(folder), open_checkpoint(folder).names())
    check_weights(folder)


def refused(folder: Path) -> str:
    with pytest.raises(OnboardError) as caught:
        gathered(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_undamaged_one_is_taken(variant: str) -> None:
    gathered(quantised.FOLDER / variant)


@pytest.mark.drawn(few=FEW)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_missing_part(variant: str, tmp_path: Path) -> None:
    parts = one_weight(quantised.FOLDER / variant).parts
    folder = copy_of(variant, tmp_path)
    change(folder, parts["scale"], None)
    refused(folder)


@pytest.mark.drawn(few=FEW)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_part_that_is_too_short(variant: str, tmp_path: Path) -> None:
    parts = one_weight(quantised.FOLDER / variant).parts
    for role in ("codes", "scale"):
        folder = copy_of(variant, tmp_path / role)
        tensor = load_file(folder / "model.safetensors")[parts[role]]
        if tensor.numel() < 2:
            continue
        dim = max(range(tensor.dim()), key=lambda each: tensor.shape[each])
        change(folder, parts[role], tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous())
        refused(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_key_that_nobody_knows(variant: str) -> None:
    config = json.loads((quantised.FOLDER / variant / "config.json").read_text())
    path = quantised.FOLDER / variant / "hf_quant_config.json"
    said = config.get("quantization_config") or json.loads(path.read_text())["quantization"]
    changed = {**said, "quant_method": said.get("quant_method", "modelopt"), "spin": {"angle": 3}}
    with pytest.raises(OnboardError, match="spin"):
        read_method({"quantization_config": changed}, quantised.FOLDER / variant)
    quiet = {**changed, "spin": None}
    assert read_method({"quantization_config": quiet}, quantised.FOLDER / variant) is not None


def test_a_scheme_that_is_not_symmetric_needs_its_zeros(tmp_path: Path) -> None:
    folder = copy_of("ct_w4a16_asym", tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight_zero_point"
    change(folder, name, None)
    assert name in refused(folder)


@pytest.mark.drawn(few=FEW)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_dtype_that_the_format_does_not_have(variant: str, tmp_path: Path) -> None:
    """The numbers may be the same: what wrote them is not known."""
    weight = one_weight(quantised.FOLDER / variant)
    tensors = load_file(quantised.FOLDER / variant / "model.safetensors")
    checked = [role for role in ("scale", "zero", "groups", "whole") if role in weight.parts]
    for role in checked:
        tensor = tensors[weight.parts[role]]
        for dtype in (torch.int16, torch.bool, torch.complex64):
            folder = copy_of(variant, tmp_path / f"{role}-{dtype}")
            change(folder, weight.parts[role], tensor.to(dtype))
            refused(folder)


@pytest.mark.drawn(few=FEW)
@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_of_zero(variant: str, tmp_path: Path) -> None:
    """Nothing would be left of a weight that has codes."""
    weight = one_weight(quantised.FOLDER / variant)
    scale = load_file(quantised.FOLDER / variant / "model.safetensors")[weight.parts["scale"]]
    if "bnb" in variant and scale.dtype == torch.uint8:
        return  # codes of scales
    folder = copy_of(variant, tmp_path)
    bits = torch.zeros(scale.shape, dtype=torch.int64)  # of an exponent 2^-127
    change(
        folder,
        weight.parts["scale"],
        bits.to(torch.uint8).view(scale.dtype) if scale.itemsize == 1 else bits.to(scale.dtype),
    )
    assert weight.parts["scale"] in refused(folder)


def test_a_weight_of_zeros_is_one(tmp_path: Path) -> None:
    """Expanded models have layers of zeros, whose scales may be 0, too."""
    folder = copy_of("ct_w8a8", tmp_path)
    weight = one_weight(folder)
    for part in weight.parts.values():
        tensor = load_file(folder / "model.safetensors")[part]
        change(folder, part, torch.zeros_like(tensor))
    gathered(folder)


@pytest.mark.drawn(few=FEW)
@pytest.mark.parametrize("variant", VARIANTS)
def test_codes_of_other_dimensions(variant: str, tmp_path: Path) -> None:
    name = one_weight(quantised.FOLDER / variant).parts["codes"]
    tensor = load_file(quantised.FOLDER / variant / "model.safetensors")[name]
    for place, other in enumerate((tensor.flatten(), tensor.unsqueeze(0))):
        folder = copy_of(variant, tmp_path / str(place))
        change(folder, name, other.contiguous())
        if "bnb" in variant and "int8" not in variant:
            gathered(folder)  # its bytes are a list, whatever their shape
        else:
            refused(folder)


@pytest.mark.parametrize(
    "variant", ["ct_fp8_dynamic", "hf_fp8_llama", "modelopt_fp8", "torchao_fp8"]
)
def test_integers_where_floats_are_said(variant: str, tmp_path: Path) -> None:
    name = one_weight(quantised.FOLDER / variant).parts["codes"]
    folder = copy_of(variant, tmp_path)
    tensor = load_file(folder / "model.safetensors")[name]
    change(folder, name, tensor.float().to(torch.int8))
    assert name in refused(folder)


@pytest.mark.parametrize("variant", ["ct_fp8_dynamic", "ct_w8a8", "bnb_int8", "modelopt_fp8"])
def test_exponents_where_numbers_are_said(variant: str, tmp_path: Path) -> None:
    name = one_weight(quantised.FOLDER / variant).parts["scale"]
    folder = copy_of(variant, tmp_path)
    tensor = load_file(folder / "model.safetensors")[name]
    change(folder, name, torch.full_like(tensor, 120, dtype=torch.uint8))
    assert name in refused(folder)


@pytest.mark.parametrize("variant", ["bnb_nf4", "bnb_fp4"])
def test_tables_and_scales_of_other_sizes(variant: str, tmp_path: Path) -> None:
    parts = one_weight(quantised.FOLDER / variant).parts
    for role, name in parts.items():
        if role == "codes":
            continue
        folder = copy_of(variant, tmp_path / role)
        tensor = load_file(folder / "model.safetensors")[name]
        change(folder, name, tensor.flatten()[: tensor.numel() // 2].clone())
        assert name in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
def test_scales_of_inputs_and_caches_that_are_none(value: float, tmp_path: Path) -> None:
    """Known in gather, not when a model runs."""
    for variant, ending in (("ct_fp8_static", ".input_scale"), ("ct_fp8_kv_cache", ".v_scale")):
        folder = copy_of(variant, tmp_path / variant)
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if name.endswith(ending))
        change(folder, name, torch.full_like(tensors[name], value))
        assert name in refused(folder)


def test_parts_that_belong_to_one_layer_have_its_sizes(tmp_path: Path) -> None:
    for variant, ending in (
        ("modelopt_int4_awq", ".pre_quant_scale"),
        ("ct_nvfp4", ".input_global_scale"),
    ):
        folder = copy_of(variant, tmp_path / variant)
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if name.endswith(ending))
        change(folder, name, torch.cat([tensors[name].reshape(-1)] * 2))
        assert name in refused(folder)


def test_blocks_of_experts_that_are_not_cut(tmp_path: Path) -> None:
    folder = copy_of("mxfp4_gpt_oss", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_blocks"))
    change(folder, name, tensors[name].flatten(-2))
    assert name in refused(folder)


def test_a_scale_by_which_weights_are_divided_is_finite(tmp_path: Path) -> None:
    folder = copy_of("ct_nvfp4", tmp_path)
    weight = one_weight(folder)
    change(folder, weight.parts["whole"], torch.tensor([float("inf")]))
    with pytest.raises(OnboardError, match=rf"{weight.name} .*weight_global_scale is inf"):
        open_checkpoint(folder).read(weight.name)


@pytest.mark.parametrize("group", [-1, 400])
def test_a_group_of_inputs_that_has_no_scale(group: int, tmp_path: Path) -> None:
    folder = copy_of("gptq_desc_act", tmp_path)
    weight = one_weight(folder)
    groups = load_file(folder / "model.safetensors")[weight.parts["groups"]]
    groups[5] = group
    change(folder, weight.parts["groups"], groups)
    assert f"{weight.name} cannot be decoded: g_idx" in refused(folder)


@pytest.mark.parametrize("variant", ["gptq", "awq", "ct_w4a16", "ct_nvfp4", "mxfp4_gpt_oss"])
def test_a_weight_that_is_there_unquantised_too(variant: str, tmp_path: Path) -> None:
    folder = copy_of(variant, tmp_path)
    weight, path = one_weight(folder), folder / "model.safetensors"
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    save_file({**load_file(path), weight.name: values}, path, {"format": "pt"})
    assert f"{weight.name} twice" in refused(folder)


def test_quantised_scales_without_the_scales_of_these(tmp_path: Path) -> None:
    name = one_weight(quantised.FOLDER / "bnb_nf4").name
    nested = f"{name}.nested_absmax" in load_file(
        quantised.FOLDER / "bnb_nf4" / "model.safetensors"
    )
    assert nested
    for ending in (".nested_absmax", ".nested_quant_map"):
        folder = copy_of("bnb_nf4", tmp_path / ending)
        change(folder, name + ending, None)
        assert name + ending in refused(folder)
