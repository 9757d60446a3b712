"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, experts chosen by groups."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.modeling import CausalLMOutput, register_causal_lm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.onboard.torch_rmsnorm(x, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin of all positions, in float32."""

    def __init__(self, config: DeepseekV3Config) -> None:
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
        """Return cos and sin [batch, seq, rotary_dim] in the dtype of `x`."""
        return self.cos[position_ids].to(x.dtype), self.sin[position_ids].to(x.dtype)


def attention_scale(config: DeepseekV3Config) -> float:
    """Return the factor of the scores: YaRN's temperature counts twice, for queries and keys."""
    scale = config.qk_head_dim**-0.5
    rope = config.rope_parameters
    weight = rope.get("mscale_all_dim", 0) if rope["rope_type"] != "default" else 0
    if weight and rope["factor"] > 1:
        scale *= (0.1 * weight * math.log(rope["factor"]) + 1.0) ** 2
    return scale


class Attention(nn.Module):
    """Multi-head latent attention, [batch, seq, hidden] to the same."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        hidden_size, bias = config.hidden_size, config.attention_bias
        num_heads = config.num_attention_heads
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.rank = config.kv_lora_rank
        self.q_lora_rank = config.q_lora_rank
        self.rope_interleave = config.rope_interleave
        self.scale = attention_scale(config)

        query_size = num_heads * config.qk_head_dim
        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, self.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank)
            self.q_b_proj = nn.Linear(self.q_lora_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, self.rank + self.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.rank)
        expanded_size = num_heads * (self.nope_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(self.rank, expanded_size, bias=False)
        self.o_proj = nn.Linear(num_heads * config.v_head_dim, hidden_size, bias=bias)

    def forward(
        self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        if self.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q_nope, q_rope = query.split((self.nope_dim, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope_dim), dim=-1)
        k_rope = k_rope.unsqueeze(2)

        cos, sin = position_embeddings
        if self.rope_interleave:
            q_rope, k_rope = torch.ops.onboard.torch_rope_with_qk_interleaving(
                q_rope, k_rope, cos, sin, unsqueeze_dim=2
            )
        else:
            q_rope, k_rope = torch.ops.onboard.torch_rope_with_explicit_cos_sin(
                q_rope, k_rope, cos, sin, unsqueeze_dim=2
            )
        latent = self.kv_a_layernorm(latent)
        out = torch.ops.onboard.torch_mla(
            q_nope, q_rope, latent, k_rope, self.kv_b_proj.weight, scale=self.scale
        )
        return self.o_proj(out.flatten(2))


class MLP(nn.Module):
    """Gated feed-forward network, [batch, seq, hidden] to the same."""

    def __init__(self, config: DeepseekV3Config, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """The experts of each token among the best groups, and their weights."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_groups = config.n_group
        self.top_groups = config.topk_group
        self.normalised = config.norm_topk_prob
        self.scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(config.num_local_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(config.num_local_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts [tokens, top_k] of x [tokens, hidden]."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = (scores + self.e_score_correction_bias).unflatten(-1, (self.num_groups, -1))
        group_scores = choice.topk(2, dim=-1).values.sum(dim=-1)
        groups = group_scores.topk(self.top_groups, dim=-1, sorted=False).indices
        out = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, groups, False)
        choice = choice.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)
        experts = choice.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scaling_factor, experts


class Experts(nn.ModuleList):
    """The experts of a mixture; all run together, in one op."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(
            MLP(config, config.moe_intermediate_size) for _ in range(config.num_local_experts)
        )
        self.activation = config.hidden_act

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return torch.ops.onboard.torch_moe(
            x,
            experts,
            weights,
            [expert.gate_proj.weight for expert in self],
            [expert.down_proj.weight for expert in self],
            [expert.up_proj.weight for expert in self],
            act_fn=self.activation,
        )


class MoE(nn.Module):
    """Mixture of experts and one that all tokens share, [batch, seq, hidden] to the same."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared_size = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = MLP(config, shared_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.gate(tokens)
        return self.experts(tokens, experts, weights).view_as(x) + self.shared_experts(x)


class DecoderLayer(nn.Module):
    """One decoder layer, [batch, seq, hidden] to the same."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        is_dense = layer_idx < config.first_k_dense_replace
        self.mlp = MLP(config, config.intermediate_size) if is_dense else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: DeepseekV3Config) -> None:
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


class DeepseekV3ForCausalLM(nn.Module):
    """The model with a language modeling head."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput:
        """Return the logits [batch, seq, vocab] of `input_ids` at `position_ids` [batch, seq]."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, position_ids)))


register_causal_lm("DeepseekV3Config", DeepseekV3ForCausalLM)
