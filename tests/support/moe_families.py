"""Configs of mixture-of-experts families, with the variants that one generated file has to
serve.
"""

from __future__ import annotations

from typing import Any

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "8x7b": {},
        "window": {
            "sliding_window": 4096,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "hidden_act": "gelu",
        },
    },
    "qwen3_moe": {
        "30b": {"norm_topk_prob": True, "head_dim": 128, "num_key_value_heads": 4},
        "dense-layers": {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True},
    },
    "qwen2_moe": {"a14b": {}, "sparse-step": {"decoder_sparse_step": 2, "norm_topk_prob": True}},
    "olmoe": {"7b": {}, "clipped": {"clip_qkv": 0.3, "norm_topk_prob": True}},
    "flex_olmo": {"7x7b": {}},
    "glm4_moe": {
        "air": {"n_group": 1, "topk_group": 1},
        "groups": {
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    },
    "solar_open": {"100b": {}},
    "exaone_moe": {"236b": {}},
    "ernie4_5_moe": {"21b": {}, "unshared": {"moe_num_shared_experts": 0, "use_bias": True}},
    "minimax_m2": {"230b": {}},
    "granitemoe": {
        "3b": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}
    },
    "granitemoeshared": {"unshared": {}, "shared": {"shared_intermediate_size": 1024}},
    "phimoe": {"3.5": {}},
    "cohere2_moe": {"c": {}},
    "mellum": {"m": {}},
    "afmoe": {"a": {}},
    "hy_v3": {"h": {}},
    "aria_text": {"25b": {}},
    "kolibri1": {"k": {}},
    "gpt_oss": {
        "20b": {"num_local_experts": 32},
        "bounded": {"swiglu_limit": 0.5, "swiglu_alpha": 1.2},
    },
    "dots1": {
        "142b": {
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        }
    },
    "dbrx": {
        "instruct": {
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        }
    },
    "longcat_flash": {
        "560b": {"n_routed_experts": 512, "zero_expert_num": 256},
        "all-routed": {"zero_expert_num": 0},
    },
    "hunyuan_v1_moe": {"a13b": {"head_dim": 128, "num_experts": 64, "moe_topk": 8}},
}
"""Family -> variant -> fields that differ from the class's defaults; the first's file serves
all.
"""


def config_dict(family: str, variant: str) -> dict[str, Any]:
    """Return a config.json of a family's variant."""
    return {"model_type": family, **VARIANTS[family][variant]}
