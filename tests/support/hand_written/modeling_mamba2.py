"""Mamba 2 (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Mamba2Config

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


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm over groups of channels, with a SiLU gate."""

    def __init__(self, dim: int, group_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.group_size = group_size
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.ops.onboard.torch_rmsnorm_gated(
            x, self.weight, gate, self.eps, self.group_size
        )


class Mixer(nn.Module):
    """State-space mixer with one decay a head, [batch, seq, hidden] to the same."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.n_groups = config.n_groups
        self.chunk_size = config.chunk_size
        self.time_step_limit = config.time_step_limit
        self.activation = config.hidden_act
        self.inner_size = int(config.expand * config.hidden_size)
        self.state_size = config.n_groups * config.state_size
        self.conv_dim = self.inner_size + 2 * self.state_size

        projection_size = self.inner_size + self.conv_dim + self.num_heads
        self.in_proj = nn.Linear(config.hidden_size, projection_size, bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            self.conv_dim,
            self.conv_dim,
            config.conv_kernel,
            groups=self.conv_dim,
            bias=config.use_conv_bias,
        )
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        group_size = self.inner_size // self.n_groups
        self.norm = GatedRMSNorm(self.inner_size, group_size, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(self.inner_size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        sizes = (self.inner_size, self.conv_dim, self.num_heads)
        gate, mixed, dt = self.in_proj(x).split(sizes, dim=-1)
        mixed = torch.ops.onboard.torch_causal_conv1d(
            mixed, self.conv1d.weight, bias=self.conv1d.bias, activation=self.activation
        )
        x, B, C = mixed.split((self.inner_size, self.state_size, self.state_size), dim=-1)
        y = torch.ops.onboard.torch_ssm(
            x.unflatten(-1, (self.num_heads, -1)),
            -self.A_log.float().exp(),
            B.unflatten(-1, (self.n_groups, -1)),
            C.unflatten(-1, (self.n_groups, -1)),
            self.D,
            dt,
            self.dt_bias,
            self.time_step_limit,
            self.chunk_size,
        )
        return self.out_proj(self.norm(y.flatten(2), gate).to(dtype))


class Block(nn.Module):
    """One decoder layer, [batch, seq, hidden] to the same."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = Mixer(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x.float() if self.residual_in_fp32 else x
        return residual + self.mixer(self.norm(x.to(self.norm.weight.dtype)))


class Model(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [batch, seq, hidden]."""
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class Mamba2ForCausalLM(nn.Module):
    """The model with a language modeling head."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.backbone = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.backbone.embeddings.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput:
        """Return the logits [batch, seq, vocab] of `input_ids` [batch, seq], in float32."""
        x = self.backbone(input_ids)
        return CausalLMOutput(logits=self.lm_head(x.to(self.lm_head.weight.dtype)).float())


register_causal_lm("Mamba2Config", Mamba2ForCausalLM)
