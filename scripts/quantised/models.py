"""Small random models, in the shapes of some families."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.checkpoints import save_tokenizer

SEED = 16
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 144,
    },
    "qwen3": {**_GROUPED, "intermediate_size": 256},
    "qwen3_moe": {
        **_GROUPED,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt_oss": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4_text": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 32,
        "no_rope_layers": [1],
    },
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "intermediate_size": 144,
        "moe_intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
"""A llama for what has no blocks."""


def save_model(
    folder: Path, shape: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """Save a random model of a shape, in `dtype`, with a tokenizer; return the folder."""
    config = AutoConfig.for_model(shape, **{**_COMMON, **SHAPES[shape], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            tensor.copy_(_values(name, tensor.shape, generator))
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _values(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return random values; rows and columns of a matrix differ in size, and so do blocks of 16 and
    of 128 of them, so that a scale of the wrong block or axis shows.
    """
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    if len(shape) < 2 or "embed" in name:
        return 0.2 * values
    rows, columns = (_sizes(length, generator) for length in shape[-2:])
    return values * rows.unsqueeze(-1) * columns / math.sqrt(shape[-1])


def _sizes(length: int, generator: torch.Generator) -> torch.Tensor:
    """Return positive numbers [length] around 1."""
    place = torch.arange(length)
    each = 0.3 * torch.randn(length, generator=generator)
    by_16 = 0.4 * torch.randn(length // 16 + 1, generator=generator)[place // 16]
    return torch.exp(each + by_16 + place // 128)
