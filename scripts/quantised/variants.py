"""All variants by name, each with what writes it into a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.quantised import (
    compressed,
    fp8_blocks,
    gguf_file,
    modelopt_export,
    mxfp4_experts,
    on_load,
    rounding,
)
from scripts.quantised.fp8_blocks import Fp8
from scripts.quantised.models import SMALL

Writer = Callable[[Path], None]
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_NARROW: dict[str, Any] = {"intermediate_size": 128}
_SMALL_BY_32: dict[str, Any] = {**SMALL, "intermediate_size": 96}


def _blocks(fp8: Fp8, shape: str = "llama", **changes: Any) -> Writer:
    return partial(fp8_blocks.write, shape=shape, fp8=fp8, **changes)


def _compressed(*schemes: str, **changes: Any) -> Writer:
    return partial(compressed.write, schemes=schemes, **changes)


def _rounded(form: str, **changes: Any) -> Writer:
    return partial(rounding.write, form=form, **changes)


def _modelopt(scheme: str, **changes: Any) -> Writer:
    return partial(modelopt_export.write, scheme=scheme, **changes)


_FP8: dict[str, Writer] = {
    "hf_fp8_llama": _blocks(Fp8(), num_hidden_layers=2),
    "hf_fp8_qwen3_moe": _blocks(
        Fp8(),
        "qwen3_moe",
        ignored=("lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj"),
        moe_intermediate_size=32,
    ),
    "hf_fp8_deepseek_v3": _blocks(Fp8(), "deepseek_v3"),
    "hf_fp8_ue8m0": _blocks(Fp8(scale_fmt="ue8m0", scale_dtype=torch.float8_e8m0fnu)),
    "hf_fp8_ue8m0_float": _blocks(Fp8(scale_fmt="ue8m0"), **_TIED),
    "hf_fp8_static": _blocks(Fp8(block=None, static=True), **SMALL),
    "hf_mxfp8": _blocks(
        Fp8((1, 32), scale_fmt="ue8m0", scale_dtype=torch.uint8, method="mxfp8"), **_SMALL_BY_32
    ),
}
_OF_OUTPUTS = {"strategy": "channel", "group_size": None}
_ODD_BITS = (
    ("W4A16", ("re:.*q_proj$",), {"num_bits": 3, "group_size": 32}),
    ("W4A16_ASYM", ("re:.*k_proj$", "re:.*down_proj$"), {"num_bits": 3, "group_size": 64}),
    ("W4A16_ASYM", ("re:.*v_proj$", "re:.*up_proj$"), {"num_bits": 5, "group_size": 32}),
    ("W8A16", ("re:.*o_proj$",), {"num_bits": 6, **_OF_OUTPUTS}),
    ("W8A16", ("re:.*gate_proj$",), {"num_bits": 7, **_OF_OUTPUTS}),
)
_COMPRESSED: dict[str, Writer] = {
    "ct_fp8_dynamic": _compressed("FP8_DYNAMIC", shape="llama", **SMALL),
    "ct_fp8_static": _compressed("FP8", shape="llama", **SMALL),
    "ct_fp8_block": _compressed("FP8_BLOCK", **_TIED),
    "ct_w8a8": _compressed("W8A8", shape="llama", **SMALL),
    "ct_w4a16": _compressed("W4A16"),
    "ct_w4a16_asym": _compressed("W4A16_ASYM", arguments={"group_size": 64}, **_NARROW),
    "ct_w4a16_actorder": _compressed(
        "W4A16", arguments={"actorder": "static", "group_size": 64}, gptq=True, **_NARROW
    ),
    "ct_w4a16_g_idx": _compressed(
        "W4A16", arguments={"group_size": 32}, after=compressed.shuffled, **_NARROW
    ),
    "ct_odd_bits": _compressed(groups=_ODD_BITS, **_NARROW),
    "ct_odd_bits_by_word": partial(compressed.write_by_word, groups=_ODD_BITS, **_NARROW),
    "ct_w4a16_odd_width": _compressed("W4A16", arguments=_OF_OUTPUTS, intermediate_size=84),
    "ct_w4a8": _compressed("W4A8", arguments={"group_size": 64}, **_NARROW),
    "ct_w4afp8": _compressed("W4AFP8", arguments=_OF_OUTPUTS, **_NARROW),
    "ct_embeddings": _compressed(
        groups=(("W8A16", ("Embedding", "lm_head"), _OF_OUTPUTS), ("W4A16", ("Linear",), {})),
        ignore=(),
        **_NARROW,
    ),
    "ct_nvfp4": _compressed("NVFP4", **_NARROW),
    "ct_nvfp4a16": _compressed("NVFP4A16", **_NARROW, **_TIED),
    "ct_mxfp4": _compressed("MXFP4", **_NARROW),
    "ct_fp8_qwen3_moe": _compressed(
        "FP8_DYNAMIC",
        shape="qwen3_moe",
        ignore=("lm_head", "re:.*mlp.gate$"),
        moe_intermediate_size=32,
    ),
    "ct_w8a8_qwen3_moe": _compressed(
        "W8A8",
        shape="qwen3_moe",
        ignore=("lm_head", "re:.*mlp.gate$"),
        moe_intermediate_size=32,
    ),
    "ct_w4a16_qwen3_moe": _compressed(
        "W4A16",
        shape="qwen3_moe",
        ignore=("lm_head", "re:.*mlp.gate$", "re:.*self_attn.k_proj$"),
        arguments={"group_size": 64},
        moe_intermediate_size=64,
    ),
    "ct_mixed": _compressed(
        groups=(("FP8_DYNAMIC", ("re:.*self_attn.*",), {}), ("W4A16", ("re:.*mlp.*",), {})),
        ignore=("lm_head", "re:.*layers.1.mlp.down_proj", "re:.*layers.0.self_attn.[kv]_proj$"),
        num_hidden_layers=2,
        **_NARROW,
    ),
    "ct_fp8_kv_cache": _compressed("FP8_DYNAMIC", kv_cache=True, shape="llama", **SMALL),
}
_ROUNDING: dict[str, Writer] = {
    "gptq": _rounded("auto_gptq"),
    "gptq_asym": _rounded("auto_gptq", symmetric=False, group=64, **_NARROW),
    "gptq_8bit": _rounded("auto_gptq", bits=8, group=64, intermediate_size=64),
    "gptq_v2": _rounded(
        "auto_gptq", symmetric=False, group=64, after=rounding.second_version, **_NARROW
    ),
    "gptq_desc_act": _rounded(
        "auto_gptq", symmetric=False, group=32, after=rounding.groups_out_of_order, **_NARROW
    ),
    "gptq_qwen3_moe": _rounded("auto_gptq", shape="qwen3_moe", group=64, moe_intermediate_size=64),
    "awq": _rounded("auto_awq", symmetric=False),
    "auto_round": _rounded("auto_round", symmetric=False, group=64, **_NARROW),
    "auto_round_all_bits": _rounded(
        "auto_round",
        symmetric=False,
        group=64,
        layers={
            f"model.layers.0.{module}": {"bits": bits}
            for module, bits in {
                "self_attn.q_proj": 2,
                "self_attn.k_proj": 3,
                "self_attn.o_proj": 5,
                "mlp.gate_proj": 6,
                "mlp.up_proj": 7,
            }.items()
        },
        **_NARROW,
    ),
    "auto_round_gptq": _rounded(
        "auto_round:auto_gptq",
        symmetric=False,
        group=64,
        layers={
            "model.layers.0.mlp.up_proj": {"bits": 8},
            "model.layers.0.self_attn.k_proj": {"bits": 16},
        },
        **_NARROW,
    ),
}
_MODELOPT: dict[str, Writer] = {
    "modelopt_fp8": _modelopt("FP8_DEFAULT_CFG", shape="llama", kv_cache=True, **SMALL),
    "modelopt_fp8_channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG", shape="llama", **SMALL),
    "modelopt_fp8_block": _modelopt(
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", shape="llama", intermediate_size=256, **_TIED
    ),
    "modelopt_mxfp8": _modelopt("MXFP8_DEFAULT_CFG", shape="llama", **_SMALL_BY_32),
    "modelopt_nvfp4": _modelopt("NVFP4_DEFAULT_CFG", kv_cache=True, **_NARROW),
    "modelopt_nvfp4_qwen3_moe": _modelopt(
        "NVFP4_DEFAULT_CFG", shape="qwen3_moe", moe_intermediate_size=32
    ),
    "modelopt_fp8_llama4": _modelopt("FP8_DEFAULT_CFG", shape="llama4_text"),
    "modelopt_nvfp4_llama4": _modelopt("NVFP4_DEFAULT_CFG", shape="llama4_text"),
    "modelopt_int4_awq": _modelopt("INT4_AWQ_CFG"),
    "modelopt_w4a8_awq": _modelopt("W4A8_AWQ_BETA_CFG", **_NARROW),
}
_ON_LOAD: dict[str, Writer] = {
    "bnb_nf4": partial(
        on_load.write_bitsandbytes,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    ),
    "bnb_fp4": partial(on_load.write_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb_int8": partial(on_load.write_bitsandbytes, load_in_8bit=True),
    "torchao_int8": partial(on_load.write_torchao, scheme="Int8WeightOnlyConfig"),
    "torchao_fp8": partial(on_load.write_torchao, scheme="Float8WeightOnlyConfig"),
}
_GGUF: dict[str, Writer] = {
    "gguf_q8_0": partial(gguf_file.write, types={"": "Q8_0"}, hidden_size=64, **_NARROW),
    "gguf_q4_0": partial(gguf_file.write, types={"lm_head": "Q8_0", "": "Q4_0"}, **_NARROW),
    "gguf_k_mixed": partial(
        gguf_file.write,
        types={
            "q_proj": "Q5_K",
            "o_proj": "Q5_K",
            "v_proj": "Q6_K",
            "down_proj": "Q6_K",
            "lm_head": "Q6_K",
            "": "Q4_K",
        },
        shape="llama",
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        intermediate_size=256,
    ),
}
_BY_HAND: dict[str, Writer] = {"mxfp4_gpt_oss": mxfp4_experts.write}
VARIANTS: dict[str, Writer] = {
    **_FP8,
    **_COMPRESSED,
    **_ROUNDING,
    **_MODELOPT,
    **_ON_LOAD,
    **_GGUF,
    **_BY_HAND,
}
