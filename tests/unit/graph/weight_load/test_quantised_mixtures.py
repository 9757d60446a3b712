"""Experts compute with a checkpoint's codes, inputs quantised as its scheme says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from onboard import LLM, SamplingParams
from onboard.bench.work import weights_of
from onboard.errors import OnboardError
from onboard.graph.context import TransformContext
from onboard.graph.weight_load.experts import quantised_mixtures
from onboard.graph.weight_load.experts.quantised_mixtures import EXPERT_KEYS
from onboard.graph.weight_load.quantised_folder import decoded_state
from onboard.graph.weight_load.quantised_linears import EIGHT_BIT_KEYS
from onboard.hf.hf_model import load_reference
from onboard.quantised.encode_four_bits import encode_int4, encode_mxfp4
from onboard.quantised.encoded import Encoded, encode_fp8
from onboard.verify.quantised_inputs import quantise_inputs
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint, save_tokenizer

SAME = 1e-5
Tensors = dict[str, torch.Tensor]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def model(folder: Path, keys: tuple[str, ...], backend: str = "torch", **settings: Any) -> LLM:
    transforms = {key: {"backend": backend} for key in keys}
    config = {"max_seq_len": 64, **settings}
    config["transforms"] = transforms | settings.get("transforms", {})
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


def matches(llm: LLM) -> dict[str, int]:
    return {
        entry.key: entry.num_matches for entry in llm.engine.history if entry.key in EXPERT_KEYS
    }


def transformers_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """The logits of transformers' model whose experts, and nothing else, quantise their inputs."""
    config: Any = AutoConfig.from_pretrained(folder)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = load_reference(config, folder, state=decoded_state(folder), **options)
    history = [SimpleNamespace(key=key, num_matches=1) for key in EXPERT_KEYS]
    run = SimpleNamespace(factory=SimpleNamespace(checkpoint=folder), history=history)
    assert quantise_inputs(reference, cast(TransformContext, run))
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0]


WRITERS = [("ct_fp8_qwen3_moe", 0), ("hf_fp8_qwen3_moe", 1), ("ct_w8a8_qwen3_moe", 2)]


@pytest.mark.parametrize(("variant", "key"), WRITERS)
def test_inputs_are_quantised_as_their_writer_does(variant: str, key: int) -> None:
    folder = quantised.FOLDER / variant
    expected = load_file(folder / "expected.safetensors")
    ids = expected["ids"].tolist()
    llm = model(folder, (*EIGHT_BIT_KEYS, *EXPERT_KEYS))
    assert error(llm.logits(ids), expected["activation_logits"]) < SAME
    assert matches(llm) == {each: int(each == EXPERT_KEYS[key]) for each in EXPERT_KEYS}
    assert not any("decoded" in fact for fact in llm.engine.facts)
    decoded = model(folder, EXPERT_KEYS, "auto")
    assert error(decoded.logits(ids), expected["logits"]) < SAME


def test_a_shared_expert_and_dense_layers_beside_the_mixture() -> None:
    folder = quantised.FOLDER / "hf_fp8_deepseek_v3"
    ids = load_file(folder / "expected.safetensors")["ids"].tolist()
    llm = model(folder, EXPERT_KEYS)
    assert error(llm.logits(ids), transformers_logits(folder, ids)) < SAME
    assert matches(llm)[EXPERT_KEYS[1]] == 1


FOUR_BITS = {
    "mxfp4_gpt_oss": ("mxfp4_moe", 2),
    "modelopt_nvfp4_qwen3_moe": ("nvfp4_moe", 1),
    "ct_w4a16_qwen3_moe": ("int4_moe", 1),
}
"""Their op and number of mixtures."""


@pytest.mark.parametrize("variant", FOUR_BITS)
def test_four_bit_weights_give_the_decoded_models_tokens(variant: str, tmp_path: Path) -> None:
    op, count = FOUR_BITS[variant]
    folder = edited(variant, tmp_path / "model", lambda *_: None)
    save_tokenizer(folder)
    expected = load_file(folder / "expected.safetensors")
    ids = expected["ids"].tolist()
    llm = model(folder, (f"quantize_{op}_from_config",))
    keys = [entry.key for entry in llm.engine.history if entry.num_matches]
    assert {f"quantize_{op}_from_config", f"fuse_{op}"} <= set(keys)
    found = [entry.num_matches for entry in llm.engine.history if entry.key == f"fuse_{op}"]
    assert found == [count]
    assert error(llm.logits(ids), expected["logits"]) < SAME
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    decoded = model(folder, ())
    texts = [each.generate([ids], greedy)[0].token_ids for each in (llm, decoded)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12


def test_a_back_end_of_the_text_that_is_not_here_is_a_fact() -> None:
    fields = {"reverse_interleaved_input_scales": False, "allow_different_input_scales": True}
    key = "quantize_nvfp4_moe_from_config"
    transforms = {"fuse_nvfp4_moe": {"backend": "trtllm_gen", **fields}}
    llm = model(quantised.FOLDER / "modelopt_nvfp4_qwen3_moe", (key,), transforms=transforms)
    said = "fuse_nvfp4_moe: back end trtllm_gen is not available here, torch is used"
    assert said in llm.engine.facts


def edited(variant: str, folder: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    """Return a copy of a checkpoint whose tensors and quantization_config were changed."""
    shutil.copytree(quantised.FOLDER / variant, folder)
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_that_are_not_alike_are_decoded_and_that_is_said(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.1.down_proj"

    def leave_one(tensors: Tensors, config: dict[str, Any]) -> None:
        whole = tensors[f"{name}.weight"].float() * tensors.pop(f"{name}.weight_scale").float()
        tensors[f"{name}.weight"] = whole
        config["ignore"].append(name)

    folder = edited("ct_fp8_qwen3_moe", tmp_path / "mixed", leave_one)
    expected = load_file(folder / "expected.safetensors")
    llm = model(folder, EXPERT_KEYS)
    assert error(llm.logits(expected["ids"].tolist()), expected["logits"]) < SAME
    assert not any(matches(llm).values())
    said = [fact for fact in llm.engine.facts if "1 mixtures are decoded" in fact]
    assert said == [f"{EXPERT_KEYS[0]}: 1 mixtures are decoded: their weights are not alike"]


def static(tensors: Tensors, config: dict[str, Any]) -> None:
    """Give each expert's layers a scale of their inputs, up and gate one each."""
    config["config_groups"]["group_0"]["input_activations"] |= {
        "dynamic": False,
        "strategy": "tensor",
    }
    names = [name.removesuffix(".weight") for name in tensors if name.endswith("proj.weight")]
    for number, name in enumerate(sorted(names)):
        tensors[f"{name}.input_scale"] = torch.tensor(
            [0.004 + 0.0007 * number], dtype=torch.bfloat16
        )


def test_an_experts_inputs_have_the_scale_of_the_checkpoint(tmp_path: Path) -> None:
    folder = edited("ct_fp8_qwen3_moe", tmp_path / "static", static)
    ids = load_file(folder / "expected.safetensors")["ids"].tolist()
    llm = model(folder, EXPERT_KEYS)
    expected = transformers_logits(folder, ids)
    assert error(llm.logits(ids), expected) < SAME
    said = "experts of 1 mixtures have input scales that differ"
    assert f"{EXPERT_KEYS[0]}: {said}" in llm.engine.facts
    transforms = {"fuse_fp8_moe": {"allow_different_input_scales": True}}
    shared = model(folder, EXPERT_KEYS, transforms=transforms)
    assert error(shared.logits(ids), expected) > SAME
    said = "fuse_fp8_moe: experts of 1 mixtures share the largest of their input scales"
    assert said in shared.engine.facts
    largest = {"up": 0.0, "down": 0.0}

    def share(tensors: Tensors, config: dict[str, Any]) -> None:
        scales = {
            name: each
            for name, each in tensors.items()
            if "experts" in name and name.endswith("input_scale")
        }
        for name, scale in scales.items():
            kind = "down" if "down_proj" in name else "up"
            largest[kind] = max(largest[kind], float(scale))
        for name in scales:
            tensors[name] = torch.tensor([largest["down" if "down_proj" in name else "up"]])

    def both(tensors: Tensors, config: dict[str, Any]) -> None:
        static(tensors, config)
        share(tensors, config)

    same = edited("ct_fp8_qwen3_moe", tmp_path / "same", both)
    assert error(shared.logits(ids), transformers_logits(same, ids)) < SAME


def test_integers_with_scales_of_inputs(tmp_path: Path) -> None:
    folder = edited("ct_w8a8_qwen3_moe", tmp_path / "static", static)
    ids = load_file(folder / "expected.safetensors")["ids"].tolist()
    llm = model(folder, EXPERT_KEYS)
    assert error(llm.logits(ids), transformers_logits(folder, ids)) < SAME
    assert matches(llm)["quantize_int8_moe_from_config"] == 1
    said = "quantize_int8_moe_from_config: experts of 1 mixtures have input scales that differ"
    assert said in llm.engine.facts


def test_integers_with_zeros(tmp_path: Path) -> None:
    """Inputs stay as they are: the model of the decoded weights."""

    def shift(tensors: Tensors, config: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(3)
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            rows = (len(tensors[name]), 1)
            zero = torch.randint(-20, 20, rows, dtype=torch.int8, generator=generator)
            tensors[f"{name}_zero_point"] = zero
        group = config["config_groups"]["group_0"]
        group["weights"]["symmetric"] = False
        group["input_activations"] = None

    folder = edited("ct_w8a8_qwen3_moe", tmp_path / "zeros", shift)
    ids = load_file(folder / "expected.safetensors")["ids"].tolist()
    llm, decoded = model(folder, EXPERT_KEYS), model(folder, ())
    assert matches(llm)["quantize_int8_moe_from_config"] == 1
    assert error(llm.logits(ids), decoded.logits(ids)) < SAME
    without = quantised.FOLDER / "ct_w8a8_qwen3_moe"
    assert error(llm.logits(ids), model(without, ()).logits(ids)) > 0.01


SMALL = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
STACKS = {
    "input_linear.weight": False,
    "output_linear.weight": False,
    "gate_up_proj": True,
    "down_proj": True,
}
"""Endings of stacks of experts, and whether these are [experts, inputs, outputs]."""


ENCODERS: dict[str, Callable[[torch.Tensor], Encoded]] = {
    "fp8": encode_fp8,
    "fp8-block": partial(encode_fp8, block=(128, 128)),
    "int4": encode_int4,
    "mxfp4": encode_mxfp4,
}


def encoded(
    name: str, weight: torch.Tensor, encode: Callable[[torch.Tensor], Encoded]
) -> torch.Tensor:
    """Return what codes leave of a weight, experts one by one."""
    if weight.dim() == 2:
        return encode(weight).values()
    transposed = next(is_so for end, is_so in STACKS.items() if name.endswith(end))
    experts = [encode(each.T if transposed else each).values() for each in weight]
    return torch.stack([each.T if transposed else each for each in experts]).contiguous()


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("kind", ["fp8", "fp8-block", "int4", "mxfp4"])
def test_experts_are_quantised_as_they_are_loaded(
    model_type: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exact inputs it is the model of the quantised weights; routers stay as they are."""
    monkeypatch.setattr(quantised_mixtures, "how_inputs_are_quantised", lambda _: "")
    save_checkpoint(tmp_path, model_type, **SMALL, **TYPES[model_type])
    ids = [3, 1, 4, 1, 5, 9]
    encode = ENCODERS[kind]
    names = ("fp8", "finegrained_fp8", "int4", "mxfp4", "nvfp4")
    transforms = {f"quantize_{name}_linear_from_config": {"enabled": False} for name in names}
    llm = model(tmp_path, (), quantize=kind, transforms=transforms)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    key = {"fp8-block": "finegrained_fp8"}.get(kind, kind)
    found = {entry.key: entry.num_matches for entry in llm.engine.history}
    assert found[f"quantize_{key}_moe_from_config"] == layers
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(tuple(STACKS)) or ("experts" in name and tensor.dim() == 2):
            tensors[name] = tensor if "bias" in name else encoded(name, tensor, encode)
    save_file(tensors, path, {"format": "pt"})
    assert error(llm.logits(ids), model(tmp_path, ()).logits(ids)) < SAME


def test_routers_are_not_quantised(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3_moe", **SMALL, **TYPES["qwen3_moe"])
    llm = model(tmp_path, (), quantize="fp8")
    dtypes = {name: parameter.dtype for name, parameter in llm.engine.gm.named_parameters()}
    routers = {name: dtype for name, dtype in dtypes.items() if name.endswith(".gate.weight")}
    assert set(routers.values()) == {torch.float32}
    others = {dtype for name, dtype in dtypes.items() if name.endswith("o_proj.weight")}
    assert others == {torch.float8_e4m3fn}


def test_an_exponent_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def damage(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 7, 1] = 255

    folder = edited("mxfp4_gpt_oss", tmp_path / "damaged", damage)
    with pytest.raises(OnboardError, match="layers.1.mlp.experts.down_proj holds NaN"):
        model(folder, ("quantize_mxfp4_moe_from_config",))


def test_a_mixtures_work_is_that_of_its_codes() -> None:
    """Words end at a multiple of 128 inputs; those of the second product have room for 64 more."""
    folder = quantised.FOLDER / "mxfp4_gpt_oss"
    plain, codes = (
        weights_of(model(folder, keys).engine.gm).experts[0]
        for keys in ((), ("quantize_mxfp4_moe_from_config",))
    )
    assert plain.elements_each == 128 * 128 + 128 * 64
    assert codes.elements_each == 128 * 128 + 128 * 128
    assert codes.bytes_each == codes.elements_each / 2 + plain.elements_each / 32
