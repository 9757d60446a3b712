"""A hand-written canonical model: llama, and what mistral (window) and phi3-like longrope add to it."""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import onboard.ops  # noqa: F401
from onboard.modeling import CausalLMOutput, register_causal_lm

ops = torch.ops.onboard


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return ops.torch_rmsnorm(x, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Full tables in float32; longrope has two and picks one by the largest position of the row."""

    def __init__(self, config):
        super().__init__()
        rope = config.rope_parameters
        self.switch = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else None
        lengths = [None] if self.switch is None else [None, self.switch + 1]
        for i, length in enumerate(lengths):
            frequencies, scaling = self._frequencies(config, length)
            angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
            table = torch.cat((angles, angles), dim=-1)
            self.register_buffer(f"cos_{i}", table.cos() * scaling, persistent=False)
            self.register_buffer(f"sin_{i}", table.sin() * scaling, persistent=False)

    @staticmethod
    def _frequencies(config, length):
        rope_type = config.rope_parameters["rope_type"]
        if rope_type == "default":
            size = config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, size, 2).float() / size
            return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
        return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)

    def forward(self, position_ids):
        cos, sin = self.cos_0, self.sin_0
        if self.switch is not None:
            is_long = position_ids.max() >= self.switch
            cos, sin = torch.where(is_long, self.cos_1, cos), torch.where(is_long, self.sin_1, sin)
        return cos[position_ids], sin[position_ids]


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        size, kv_size = config.hidden_size, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, kv_size, bias=False)
        self.v_proj = nn.Linear(size, kv_size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.window = getattr(config, "sliding_window", None)

    def forward(self, x, cos, sin):
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = ops.torch_rope_with_explicit_cos_sin(q, k, cos, sin, 2)
        mixed = ops.torch_attention(q, k, v, sliding_window=self.window)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids, position_ids):
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(position_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, position_ids):
        return CausalLMOutput(self.lm_head(self.model(input_ids, position_ids)))


register_causal_lm("LlamaConfig", LlamaForCausalLM)
register_causal_lm("MistralConfig", LlamaForCausalLM)
