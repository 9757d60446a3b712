"""A canonical model written by hand as the generator would: llama, and what mistral (window) and
longrope add to it.
"""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import onboard.ops  # noqa: F401
from onboard.modeling import CausalLMOutput, register_causal_lm


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.ops.onboard.torch_rmsnorm(hidden_states, self.weight, self.eps)


class LlamaRotaryEmbedding(nn.Module):
    """Full tables in float32; longrope has two and picks one by the largest position of the row."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        rope = config.rope_parameters
        self.switch = (
            rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else None
        )
        self._add_tables(config, "cached", None)
        if self.switch is not None:
            self._add_tables(config, "long", self.switch + 1)

    def _add_tables(self, config: LlamaConfig, name: str, length: int | None) -> None:
        frequencies, scaling = self._frequencies(config, length)
        angles = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float32), frequencies
        )
        table = torch.cat((angles, angles), dim=-1)
        self.register_buffer(f"cos_{name}", table.cos() * scaling, persistent=False)
        self.register_buffer(f"sin_{name}", table.sin() * scaling, persistent=False)

    @staticmethod
    def _frequencies(config: LlamaConfig, length: int | None) -> tuple[torch.Tensor, float]:
        rope_type = config.rope_parameters["rope_type"]
        if rope_type != "default":
            return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** steps, 1.0

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.cos_cached, self.sin_cached
        if self.switch is not None:
            is_long = position_ids.max() >= self.switch
            cos, sin = (
                torch.where(is_long, self.cos_long, cos),
                torch.where(is_long, self.sin_long, sin),
            )
        return cos[position_ids], sin[position_ids]


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = getattr(config, "attention_bias", False)
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.window = getattr(config, "sliding_window", None)

    def forward(
        self, hidden_states: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        batch, sequence, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, sequence, -1, self.head_dim)
        key = self.k_proj(hidden_states).view(batch, sequence, -1, self.head_dim)
        value = self.v_proj(hidden_states).view(batch, sequence, -1, self.head_dim)
        query, key = torch.ops.onboard.torch_rope_with_explicit_cos_sin(query, key, *rope, 2)
        output = torch.ops.onboard.torch_attention(query, key, value, sliding_window=self.window)
        return self.o_proj(output.reshape(batch, sequence, -1))


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(
            nn.functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        )


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), rope)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LlamaModel(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        rope = self.rotary_emb(position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rope)
        return self.norm(hidden_states)


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput:
        return CausalLMOutput(self.lm_head(self.model(input_ids, position_ids)))


register_causal_lm("LlamaConfig", LlamaForCausalLM)
register_causal_lm("MistralConfig", LlamaForCausalLM)
