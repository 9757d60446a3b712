"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): grouped-query attention with norms of queries and
keys.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.modeling import CausalLMOutput, register_causal_lm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.onboard.torch_rmsnorm(x, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin of all positions, in float32."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        rope_type = config.rope_parameters["rope_type"]
        assert rope_type != "longrope", "not covered: longrope"
        if rope_type == "default":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            inv_freq = 1.0 / config.rope_parameters["rope_theta"] ** exponents
            scaling = 1.0
        else:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        freqs = torch.outer(positions, inv_freq)
        angles = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos", angles.cos() * scaling, persistent=False)
        self.register_buffer("sin", angles.sin() * scaling, persistent=False)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [batch, seq, head_dim] in the dtype of `x`."""
        return self.cos[position_ids].to(x.dtype), self.sin[position_ids].to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, [batch, seq, hidden] to the same."""

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__()
        hidden_size, bias = config.hidden_size, config.attention_bias
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, key_value_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, key_value_size, bias=bias)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None

    def forward(
        self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads = (-1, self.head_dim)
        query = self.q_norm(self.q_proj(x).unflatten(-1, heads))
        key = self.k_norm(self.k_proj(x).unflatten(-1, heads))
        value = self.v_proj(x).unflatten(-1, heads)
        cos, sin = position_embeddings
        query, key = torch.ops.onboard.torch_rope_with_explicit_cos_sin(
            query, key, cos, sin, unsqueeze_dim=2
        )
        out = torch.ops.onboard.torch_attention(
            query,
            key,
            value,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(out.flatten(2))


class MLP(nn.Module):
    """Gated feed-forward network, [batch, seq, hidden] to the same."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One decoder layer, [batch, seq, hidden] to the same."""

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [batch, seq, hidden]."""
        x = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, position_embeddings)
        return self.norm(x)


class Qwen3ForCausalLM(nn.Module):
    """The model with a language modeling head."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput:
        """Return the logits [batch, seq, vocab] of `input_ids` at `position_ids` [batch, seq]."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, position_ids)))


register_causal_lm("Qwen3Config", Qwen3ForCausalLM)
