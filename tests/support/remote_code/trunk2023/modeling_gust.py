"""Gust: one list of modules from the embedding to the head, which run one after the other; parallel
blocks, named axes, and tables that grow with the texts and are cut where they are used.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Dict, Optional

import torch
from einops import rearrange
from torch import nn
from transformers import PreTrainedModel, top_k_top_p_filtering
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_gust import GustConfig

try:
    from flash_attn.ops.fused_dense import FusedDense
except ImportError:
    FusedDense = None


@dataclass
class Progress:
    """What generation keeps."""

    longest: int
    offset: int = 0
    kept: Dict[int, Any] = field(default_factory=dict)


def turned(packed, cos, sin):
    """Turn the first channels of queries and keys, [batch, sequence, three, heads, size]."""
    _, length, _, _, _ = packed.shape
    _, half = cos.shape
    size = half * 2
    c, s = rearrange(cos[:length], "s d -> s 1 d"), rearrange(sin[:length], "s d -> s 1 d")
    parts = []
    for place in range(2):
        first, second = packed[:, :, place, :, :size].chunk(2, dim=-1)
        first, second = [item.to(dtype=torch.float32) for item in (first, second)]
        both = torch.cat([first * c - second * s, first * s + second * c], dim=-1).to(packed.dtype)
        parts.append(torch.cat([both, packed[:, :, place, :, size:]], dim=-1).unsqueeze(2))
    return torch.cat([*parts, packed[:, :, 2:3]], dim=2)


class GustRotary(nn.Module):
    """Tables of as many positions as the longest text so far had."""

    def __init__(self, size, base=10000, start=16, device=None, **kwargs):
        super().__init__()
        self.size = size
        rates = 1.0 / (base ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size))
        self.register_buffer("rates", rates, persistent=False)
        self._grow(start, device=device, dtype=torch.float32)

    def _grow(self, length, device=None, dtype=None):
        self._length = length
        places = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(places, self.rates.to(device=places.device))
        self._cos = torch.cos(angles).to(dtype)
        self._sin = torch.sin(angles).to(dtype)

    def forward(self, packed, offset=0):
        length = packed.shape[1] + offset
        if self._length < length or self._cos.device != packed.device or self._cos.dtype != packed.dtype:
            self._grow(length, device=packed.device, dtype=packed.dtype)
        return turned(packed, self._cos[offset:], self._sin[offset:])


class GustEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, input_ids):
        input_ids = input_ids.view(-1, input_ids.size()[-1])
        return self.drop(self.wte(input_ids))


class GustMixer(nn.Module):
    def __init__(self, config, layer_idx=None):
        super().__init__()
        linear = FusedDense if config.fused_mlp else nn.Linear
        if linear is None:
            raise ImportError("fused_mlp needs flash-attn")
        self.layer_idx = layer_idx
        self.head_dim = config.width // config.n_head
        self.rotary = GustRotary(config.rotary_dim)
        self.Wqkv = linear(config.width, 3 * config.width)
        self.out_proj = linear(config.width, config.width)
        self.drop = nn.Dropout(config.resid_pdrop)

    def forward(self, x, progress: Optional[Progress] = None, **kwargs):
        packed = rearrange(self.Wqkv(x), "... (three h d) -> ... three h d", three=3, d=self.head_dim)
        packed = self.rotary(packed, 0 if progress is None else progress.offset)
        q, k, v = packed.unbind(dim=2)
        if progress is not None:
            k, v = self._kept(k, v, progress)
        scores = torch.einsum("bthd,bshd->bhts", q, k * (1.0 / math.sqrt(q.shape[-1])))
        hidden = torch.full((q.shape[1], k.shape[1]), -10000.0, device=scores.device)
        scores = scores + torch.triu(hidden, k.shape[1] - q.shape[1] + 1).to(dtype=scores.dtype)
        weights = torch.softmax(scores, dim=-1, dtype=v.dtype)
        found = torch.einsum("bhts,bshd->bthd", weights, v)
        return self.drop(self.out_proj(rearrange(found, "... h d -> ... (h d)")))

    def _kept(self, k, v, progress):
        if self.layer_idx in progress.kept:
            before = progress.kept[self.layer_idx]
            k, v = torch.cat([before[0], k], dim=1), torch.cat([before[1], v], dim=1)
        progress.kept[self.layer_idx] = (k, v)
        return k, v


class GustMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config.n_inner if config.n_inner is not None else 4 * config.width
        self.fc1 = nn.Linear(config.width, inner)
        self.fc2 = nn.Linear(inner, config.width)
        self.act = ACT2FN[config.activation_function]

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class GustBlock(nn.Module):
    """Attention and the feed-forward network side by side."""

    def __init__(self, config, block_idx=None):
        super().__init__()
        self.ln = nn.LayerNorm(config.width, eps=config.layer_norm_epsilon)
        self.block_idx = block_idx
        self.mixer = GustMixer(config, layer_idx=block_idx)
        self.mlp = GustMLP(config)

    def forward(self, x, progress=None, **kwargs):
        normed = self.ln(x)
        mixed = self.mixer(normed, progress=progress)
        if isinstance(mixed, tuple):
            mixed = mixed[0]
        return mixed + self.mlp(normed) + x


class GustHead(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln = nn.LayerNorm(config.width, eps=config.layer_norm_epsilon)
        self.linear = nn.Linear(config.width, config.vocab_size)

    def forward(self, x):
        return self.linear(self.ln(x)).to(torch.float32)


class GustLoss(nn.Module):
    def __init__(self, shifted=True):
        super().__init__()
        self.shifted = shifted
        self.loss = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        if self.shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return self.loss(logits.flatten(0, 1), labels.flatten())


class GustPreTrainedModel(PreTrainedModel):
    config_class = GustConfig
    base_model_prefix = "transformer"

    def __init__(self, *inputs, **kwargs):
        super().__init__(*inputs, **kwargs)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        if past_key_values is None or not isinstance(past_key_values, Progress):
            past_key_values = Progress(longest=self.config.n_positions)
        else:
            past_key_values.offset = input_ids.shape[1] - 1
            input_ids = input_ids[:, -1:]
        return {"input_ids": input_ids, "past_key_values": past_key_values}


class GustForCausalLM(GustPreTrainedModel):
    _keys_to_ignore_on_load_missing = [""]

    def __init__(self, config):
        super().__init__(config)
        modules = [GustEmbedding(config)]
        modules += [GustBlock(config, block_idx=i) for i in range(config.num_layers)]
        modules.append(GustHead(config))
        self.layers = nn.Sequential(*modules)
        self.loss = GustLoss()
        self.post_init()

    def get_input_embeddings(self):
        return self.layers[0].wte

    def set_input_embeddings(self, new_embeddings):
        self.layers[0].wte = new_embeddings

    def get_output_embeddings(self):
        return self.layers[-1].linear

    def set_output_embeddings(self, new_embeddings):
        self.layers[-1].linear = new_embeddings

    @torch.no_grad()
    def sample(self, input_ids, top_p=0.9):
        logits = top_k_top_p_filtering(self(input_ids).logits[:, -1], top_p=top_p)
        return torch.multinomial(logits.softmax(-1), 1)

    def forward(self, input_ids, past_key_values=None, labels=None, **kwargs):
        if not past_key_values:
            logits = self.layers(input_ids)
        else:
            hidden = self.layers[0](input_ids)
            for block in self.layers[1:-1]:
                hidden = block(hidden, progress=past_key_values)
            logits = self.layers[-1](hidden)
        loss = None
        if labels is not None:
            loss = self.loss(logits, labels)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
