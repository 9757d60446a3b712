"""Hail: ALiBi in a mask that the first call makes, and a longer text anew; slopes by recursion."""

import math

import torch
import torch.utils.checkpoint
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from .configuration_hail import HailConfig

logger = logging.get_logger(__name__)


def slopes_of(heads):
    def of_power(count):
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    nearest = 2 ** math.floor(math.log2(heads))
    return of_power(nearest) + slopes_of(2 * nearest)[0::2][: heads - nearest]


def as_hidden(tensor):
    return tensor.float().fill_(float("-inf")).type_as(tensor)


def biased_mask(heads, length):
    slopes = torch.Tensor(slopes_of(heads))
    places = torch.arange(length) - length + 1
    places = places.unsqueeze(0).unsqueeze(0).expand(heads, -1, -1)
    bias = (slopes.unsqueeze(1).unsqueeze(1) * places).view(heads, 1, length)
    mask = torch.triu(as_hidden(torch.zeros([length, length])), 1)
    return mask.unsqueeze(0) + bias


class HailNorm(nn.Module):
    def __init__(self, size, epsilon=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class HailTurn(nn.Module):
    """What turns queries and keys where there is no bias."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("rates", 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size), persistent=False)

    def forward(self, query, key):
        return query, key


class HailAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_width
        self.turn = HailTurn(config.head_width) if config.rotary else lambda query, key: (query, key)
        self.pack = nn.Linear(self.hidden_size, 3 * self.hidden_size, bias=False)
        self.out = nn.Linear(self.hidden_size, self.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, past_key_value=None, use_cache=False):
        bsz, q_len, _ = hidden_states.size()
        packed = self.pack(hidden_states).unflatten(-1, (3, self.hidden_size)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        query = packed[0].view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key = packed[1].view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        value = packed[2].view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        query, key = self.turn(query, key)
        if past_key_value is not None:
            key = torch.cat([past_key_value[0], key], dim=2)
            value = torch.cat([past_key_value[1], value], dim=2)
        past_key_value = (key, value) if use_cache else None
        weights = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            if q_len == 1:
                if len(attention_mask.size()) == 4:
                    attention_mask = attention_mask[:, :, -1:, :]
                else:
                    attention_mask = attention_mask[:, -1:, :]
            weights = weights + attention_mask
            weights = torch.max(weights, torch.tensor(torch.finfo(weights.dtype).min))
        weights = nn.functional.softmax(weights, dim=-1)
        output = torch.matmul(weights, value).transpose(1, 2).reshape(bsz, q_len, self.hidden_size)
        return self.out(output), past_key_value


class HailLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = HailAttention(config)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]
        self.first_norm = HailNorm(config.hidden_size, config.rms_norm_eps)
        self.second_norm = HailNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, past_key_value=None, use_cache=False):
        attended, present = self.attention(
            self.first_norm(hidden_states), attention_mask=attention_mask, past_key_value=past_key_value, use_cache=use_cache
        )
        hidden_states = hidden_states + attended
        normed = self.second_norm(hidden_states)
        hidden_states = hidden_states + self.down(self.act(self.gate(normed)) * self.up(normed))
        return (hidden_states, present) if use_cache else (hidden_states,)


class HailPreTrainedModel(PreTrainedModel):
    config_class = HailConfig
    base_model_prefix = "model"

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)


class HailModel(HailPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.heads = config.num_attention_heads
        self.words = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([HailLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = HailNorm(config.hidden_size, epsilon=config.rms_norm_eps)
        self.post_init()
        self.longest = config.model_max_length
        self.first_run = True

    def get_input_embeddings(self):
        return self.words

    def mask_of(self, tensor, length):
        if self.first_run:
            self.first_run = False
            self.register_buffer("future", biased_mask(self.heads, self.longest).to(tensor), persistent=False)
        if length > self.longest:
            self.longest = length
            self.register_buffer("future", biased_mask(self.heads, self.longest).to(tensor), persistent=False)
        return self.future[: self.heads, :length, :length]

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=False, return_dict=True):
        batch_size, length = input_ids.shape
        if past_key_values is not None:
            length = length + past_key_values[0][0].shape[2]
        hidden_states = self.words(input_ids)
        mask = self.mask_of(hidden_states, length)
        if attention_mask is not None:
            seen = attention_mask[:, None, None, :].to(mask.dtype)
            hidden = 1.0 - seen
            mask = hidden.masked_fill(hidden.to(torch.bool), torch.finfo(mask.dtype).min) + mask.unsqueeze(0)
        presents = () if use_cache else None
        for index, layer in enumerate(self.layers):
            past = past_key_values[index] if past_key_values is not None else None
            outputs = layer(hidden_states, attention_mask=mask, past_key_value=past, use_cache=use_cache)
            hidden_states = outputs[0]
            if use_cache:
                presents += (outputs[1],)
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=presents)


class HailForCausalLM(HailPreTrainedModel):
    def __init__(self, config, *model_args, **model_kwargs):
        super().__init__(config, *model_args, **model_kwargs)
        self.model = HailModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.words

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=False, return_dict=True):
        outputs = self.model(input_ids, attention_mask, past_key_values, use_cache, return_dict)
        return CausalLMOutputWithPast(logits=self.lm_head(outputs[0]), past_key_values=outputs.past_key_values)
