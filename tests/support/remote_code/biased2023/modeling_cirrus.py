"""Cirrus: fused Conv1D projections, scores by baddbmm, tied embeddings and tuples as caches; a config
that the model's constructor changes.
"""

import math
from typing import Optional, Tuple

import torch
from torch import nn
from transformers import GenerationConfig, StoppingCriteriaList, top_k_top_p_filtering
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D, find_pruneable_heads_and_indices, prune_conv1d_layer
from transformers.utils import logging
from transformers.utils.model_parallel_utils import assert_device_map, get_device_map

from .configuration_cirrus import CirrusConfig

logger = logging.get_logger(__name__)


def make_causal_mask(length, past_length, dtype, device):
    mask = torch.full((length, past_length + length), torch.finfo(dtype).min, dtype=dtype, device=device)
    return torch.triu(mask, diagonal=past_length + 1)[None, None]


class CirrusAttention(nn.Module):
    def __init__(self, config, layer_idx=None):
        super().__init__()
        self.embed_dim = config.n_embd
        self.num_heads = config.n_head
        self.head_dim = self.embed_dim // self.num_heads
        self.split_size = self.embed_dim
        self.inv_norm_factor = 1.0 / (self.head_dim**0.5)
        self.beta = 1.0
        self.c_attn = Conv1D(3 * self.embed_dim, self.embed_dim)
        self.c_proj = Conv1D(self.embed_dim, self.embed_dim)
        self.pruned_heads = set()

    def prune_heads(self, heads):
        heads, index = find_pruneable_heads_and_indices(heads, self.num_heads, self.head_dim, self.pruned_heads)
        self.c_attn = prune_conv1d_layer(self.c_attn, index, dim=1)

    def _split_heads(self, tensor):
        new_shape = tensor.size()[:-1] + (self.num_heads, self.head_dim)
        return tensor.view(new_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, layer_past=None, attention_mask=None, head_mask=None, use_cache=False):
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query, key, value = self._split_heads(query), self._split_heads(key), self._split_heads(value)
        if layer_past is not None:
            past_key, past_value = layer_past
            key = torch.cat((past_key, key), dim=-2)
            value = torch.cat((past_value, value), dim=-2)
        present = (key, value) if use_cache is True else None

        batch, heads, q_length, _ = query.shape
        kv_length = key.shape[-2]
        scores = torch.baddbmm(
            torch.zeros(batch * heads, q_length, kv_length, dtype=query.dtype, device=query.device),
            query.reshape(batch * heads, q_length, self.head_dim),
            key.reshape(batch * heads, kv_length, self.head_dim).transpose(1, 2),
            beta=self.beta,
            alpha=self.inv_norm_factor,
        )
        scores = scores.view(batch, heads, q_length, kv_length)
        scores = scores + attention_mask
        probs = nn.functional.softmax(scores, dim=-1)
        if head_mask is not None:
            probs = probs * head_mask
        output = torch.matmul(probs, value)
        output = output.permute(0, 2, 1, 3).contiguous()
        output = output.view(output.size()[:-2] + (self.embed_dim,))
        return self.c_proj(output), present


class CirrusMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Conv1D(config.n_inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_inner)
        self.act = ACT2FN[config.activation_function]

    def forward(self, hidden_states):
        return self.c_proj(self.act(self.c_fc(hidden_states)))


class CirrusBlock(nn.Module):
    def __init__(self, config, layer_idx=None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CirrusAttention(config, layer_idx=layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = CirrusMLP(config)

    def forward(self, hidden_states, layer_past=None, attention_mask=None, head_mask=None, use_cache=False):
        residual = hidden_states
        attended, present = self.attn(
            self.ln_1(hidden_states),
            layer_past=layer_past,
            attention_mask=attention_mask,
            head_mask=head_mask,
            use_cache=use_cache,
        )
        hidden_states = attended + residual
        residual = hidden_states
        hidden_states = residual + self.mlp(self.ln_2(hidden_states))
        return (hidden_states, present) if use_cache else (hidden_states,)


class CirrusPreTrainedModel(PreTrainedModel):
    config_class = CirrusConfig
    base_model_prefix = "transformer"
    is_parallelizable = True

    def __init__(self, *inputs, **kwargs):
        super().__init__(*inputs, **kwargs)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)


class CirrusModel(CirrusPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_dim = config.n_embd
        self.wte = nn.Embedding(config.vocab_size, self.embed_dim)
        self.wpe = nn.Embedding(config.n_positions, self.embed_dim)
        self.h = nn.ModuleList([CirrusBlock(config, layer_idx=i) for i in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(self.embed_dim, eps=config.layer_norm_epsilon)
        self.device_map = None

    def parallelize(self, device_map=None):
        self.device_map = get_device_map(len(self.h), range(torch.cuda.device_count()))
        assert_device_map(self.device_map, len(self.h))

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, new_embeddings):
        self.wte = new_embeddings

    def forward(
        self,
        input_ids=None,
        past_key_values=None,
        position_ids=None,
        head_mask=None,
        use_cache=None,
        return_dict=None,
        **kwargs,
    ):
        use_cache = use_cache if use_cache is not None else self.config.use_cache
        return_dict = return_dict if return_dict is not None else self.config.use_return_dict
        input_shape = input_ids.size()
        input_ids = input_ids.view(-1, input_shape[-1])
        if past_key_values is None:
            past_length = 0
            past_key_values = tuple([None] * len(self.h))
        else:
            past_length = past_key_values[0][0].size(-2)
        if position_ids is None:
            position_ids = torch.arange(past_length, input_shape[-1] + past_length, device=input_ids.device)
            position_ids = position_ids.unsqueeze(0)
        head_mask = self.get_head_mask(head_mask, self.config.n_layer)
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        mask = make_causal_mask(input_shape[-1], past_length, hidden_states.dtype, hidden_states.device)
        presents = () if use_cache else None
        for i, (block, layer_past) in enumerate(zip(self.h, past_key_values)):
            outputs = block(
                hidden_states, layer_past=layer_past, attention_mask=mask, head_mask=head_mask[i], use_cache=use_cache
            )
            hidden_states = outputs[0]
            if use_cache is True:
                presents = presents + (outputs[1],)
        hidden_states = self.ln_f(hidden_states)
        if not return_dict:
            return tuple(v for v in [hidden_states, presents] if v is not None)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=presents)


class CirrusLMHeadModel(CirrusPreTrainedModel):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        assert config.bf16 + config.fp16 + config.fp32 <= 1, "only one precision can be chosen"
        chooses = config.bf16 + config.fp16 + config.fp32 == 0
        if chooses:
            logger.warning("no precision is chosen: it is fp32")
            config.fp32 = True
        if config.use_logn:
            self.logn = list(map(lambda i: math.log(i, config.n_positions), range(1, 2 * config.n_positions)))
        self.transformer = CirrusModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.bf16:
            self.transformer.bfloat16()
            self.lm_head.bfloat16()
        if config.fp16:
            self.transformer.half()
            self.lm_head.half()

    def get_input_embeddings(self):
        return self.transformer.wte

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, new_embeddings):
        self.lm_head = new_embeddings

    @torch.no_grad()
    def chat(self, input_ids, settings: Optional[GenerationConfig] = None, stops: Optional[StoppingCriteriaList] = None):
        from transformers_stream_generator import init_stream_support

        init_stream_support()
        logits = top_k_top_p_filtering(self(input_ids).logits[:, -1], top_p=0.9)
        return torch.multinomial(logits.softmax(-1), 1)

    def forward(
        self,
        input_ids: Optional[torch.LongTensor] = None,
        past_key_values: Optional[Tuple[Tuple[torch.Tensor]]] = None,
        position_ids: Optional[torch.LongTensor] = None,
        labels: Optional[torch.LongTensor] = None,
        use_cache: Optional[bool] = None,
        return_dict: Optional[bool] = None,
        **kwargs,
    ):
        return_dict = return_dict if return_dict is not None else self.config.use_return_dict
        outputs = self.transformer(
            input_ids,
            past_key_values=past_key_values,
            position_ids=position_ids,
            use_cache=use_cache,
            return_dict=return_dict,
        )
        hidden_states = outputs[0]
        lm_logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(lm_logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten())
        if not return_dict:
            output = (lm_logits,) + outputs[1:]
            return ((loss,) + output) if loss is not None else output
        return CausalLMOutputWithPast(loss=loss, logits=lm_logits, past_key_values=outputs.past_key_values)
