"""All variants by name, each with what writes it into a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from scripts.quantised import compressed, fp8_blocks, mxfp4_experts, rounding
from scripts.quantised.fp8_blocks import Fp8

Writer = Callable[[Path], None]

_FP8: dict[str, Writer] = {
    "hf_fp8_llama": partial(fp8_blocks.write, shape="llama", fp8=Fp8(), num_hidden_layers=2),
    "hf_fp8_qwen3_moe": partial(
        fp8_blocks.write,
        shape="qwen3_moe",
        fp8=Fp8(),
        ignored=("lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj"),
        moe_intermediate_size=48,
    ),
    "hf_fp8_deepseek_v3": partial(fp8_blocks.write, shape="deepseek_v3", fp8=Fp8()),
    "hf_fp8_ue8m0": partial(
        fp8_blocks.write,
        shape="llama",
        fp8=Fp8(scale_fmt="ue8m0", scale_dtype=torch.float8_e8m0fnu),
    ),
    "hf_fp8_ue8m0_float": partial(
        fp8_blocks.write, shape="llama", fp8=Fp8(scale_fmt="ue8m0"), tie_word_embeddings=True
    ),
    "hf_fp8_static": partial(fp8_blocks.write, shape="llama", fp8=Fp8(block=None, static=True)),
}
_COMPRESSED: dict[str, Writer] = {
    "ct_fp8_dynamic": partial(
        compressed.write, schemes=("FP8_DYNAMIC",), num_hidden_layers=2, shape="llama"
    ),
    "ct_w4a16": partial(compressed.write, schemes=("W4A16",), num_hidden_layers=2),
    "ct_fp8_static": partial(compressed.write, schemes=("FP8",), shape="llama"),
    "ct_fp8_block": partial(compressed.write, schemes=("FP8_BLOCK",)),
    "ct_w8a8": partial(compressed.write, schemes=("W8A8",), shape="llama"),
    "ct_w4a16_asym": partial(compressed.write, schemes=("W4A16_ASYM",)),
    "ct_nvfp4": partial(compressed.write, schemes=("NVFP4",)),
    "ct_nvfp4a16": partial(compressed.write, schemes=("NVFP4A16",), tie_word_embeddings=True),
    "ct_mxfp4": partial(compressed.write, schemes=("MXFP4",)),
}
_ROUNDING: dict[str, Writer] = {
    "gptq": partial(rounding.write, form="auto_gptq"),
    "gptq_asym": partial(rounding.write, form="auto_gptq", symmetric=False),
    "gptq_8bit": partial(rounding.write, form="auto_gptq", bits=8, intermediate_size=128),
    "gptq_v2": partial(
        rounding.write, form="auto_gptq", symmetric=False, after=rounding.second_version
    ),
    "gptq_desc_act": partial(
        rounding.write,
        form="auto_gptq",
        group=32,
        symmetric=False,
        after=rounding.groups_out_of_order,
    ),
    "awq": partial(rounding.write, form="auto_awq", symmetric=False, num_hidden_layers=2),
    "auto_round": partial(rounding.write, form="auto_round", symmetric=False),
    "auto_round_gptq": partial(rounding.write, form="auto_round:auto_gptq", symmetric=False),
}
_BY_HAND: dict[str, Writer] = {"mxfp4_gpt_oss": mxfp4_experts.write}
VARIANTS: dict[str, Writer] = {**_FP8, **_COMPRESSED, **_ROUNDING, **_BY_HAND}
