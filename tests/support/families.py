"""Configs of model families as they were released, with the variants that one generated file has to
serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PretrainedConfig

_PLAIN = {"rope_type": "default", "rope_theta": 1e6}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(48)],
    "long_factor": [1.0 + 1.3 * index for index in range(48)],
    "original_max_position_embeddings": 4096,
}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "llama3": {
            "num_key_value_heads": 8,
            "rope_parameters": _LLAMA3,
            "max_position_embeddings": 131072,
        },
        "plain": {"num_key_value_heads": 32},
        "tied": {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3,
        },
        "biased": {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "hidden_act": "gelu",
        },
        "yarn": {"rope_parameters": _YARN, "max_position_embeddings": 131072},
    },
    "mistral": {
        "window": {"sliding_window": 4096},
        "full": {
            "sliding_window": None,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "qwen2": {
        "full": {
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
        },
        "window": {"use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 28},
        "yarn": {"rope_parameters": _YARN, "max_position_embeddings": 131072},
    },
    "qwen3": {
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 8},
        "biased": {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8},
        "window": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 18},
    },
    "gemma": {
        "2b": {
            "num_key_value_heads": 1,
            "num_attention_heads": 8,
            "head_dim": 256,
            "hidden_size": 2048,
        },
        "7b": {"tie_word_embeddings": False, "attention_bias": True},
    },
    "gemma2": {
        "2b": {},
        "uncapped": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 144,
        },
    },
    "gemma3_text": {
        "4b": {"rope_parameters": _GEMMA3_ROPE, "sliding_window": 1024},
        "1b": {"sliding_window": 512, "num_key_value_heads": 1, "final_logit_softcapping": 30.0},
    },
    "phi3": {
        "4k": {"sliding_window": 2047},
        "128k": {
            "rope_parameters": _LONGROPE,
            "max_position_embeddings": 131072,
            "sliding_window": 262144,
        },
        "4-mini": {
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75},
            "num_key_value_heads": 8,
            "num_attention_heads": 24,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
    },
    "olmo2": {
        "7b": {},
        "gqa": {"num_key_value_heads": 8, "attention_bias": True, "tie_word_embeddings": True},
    },
    "gpt2": {
        "small": {},
        "scaled": {
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 1024,
            "activation_function": "relu",
        },
        "unscaled": {
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
            "reorder_and_upcast_attn": True,
        },
    },
    "gpt_neox": {
        "pythia": {},
        "sequential": {
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
            "tie_word_embeddings": True,
        },
    },
    "starcoder2": {
        "3b": {"sliding_window": 4096, "num_key_value_heads": 2},
        "plain": {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False},
    },
    "cohere": {
        "command-r": {"logit_scale": 0.0625},
        "command-r-plus": {"use_qk_norm": True, "num_key_value_heads": 8, "logit_scale": 0.8333},
    },
    "granite": {
        "3b": {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        "plain": {"attention_bias": True, "mlp_bias": True},
    },
    "smollm3": {
        "3b": {},
        "window": {
            "use_sliding_window": True,
            "sliding_window": 1024,
            "tie_word_embeddings": False,
        },
        "all-rope": {"no_rope_layers": [1] * 36, "attention_bias": True},
    },
}
"""Family (`model_type`) -> variant -> fields that differ from the class's defaults; the first is
the usual one.
"""


def config_dict(family: str, variant: str | None = None) -> dict[str, Any]:
    """Return a config.json of a family: the named variant, or the usual one."""
    variants = VARIANTS[family]
    return {"model_type": family, **variants[variant or next(iter(variants))]}


def _builder(family: str) -> Callable[[], PretrainedConfig]:
    def build() -> PretrainedConfig:
        fields = config_dict(family)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)

    return build


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    family: _builder(family) for family in VARIANTS
}
