"""Tiny checkpoints of the models that static caches are for, and of what is harder."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_WINDOW_AND_FULL = {
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", {"n_positions": 128}),
    "Llama 2": ("llama", {"num_key_value_heads": 4}),
    "Llama 3.1": ("llama", {"rope_parameters": _LLAMA3}),
    "Llama 3.2": ("llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "Qwen 2.5": ("qwen2", {}),
    "Gemma 3": ("gemma3_text", _WINDOW_AND_FULL),
}
"""Model type and options of the config."""
HARDER: dict[str, tuple[str, dict[str, Any]]] = {
    "caps": ("gemma2", {**_WINDOW_AND_FULL, "attn_logit_softcapping": 5.0}),
    "ALiBi": ("bloom", {}),
    "sinks": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "experts": ("mixtral", {"num_local_experts": 4, "head_dim": 8}),
}
"""The same, of models with more than keys, values and windows."""
