"""Code that inherits from GPT-2 as it was in transformers 4, whose eager attention hid later tokens by
itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, run_apart

_CODE = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions


class HeirConfig(GPT2Config):
    model_type = "heir_gpt2"


class HeirModel(GPT2Model):
    def forward(self, input_ids=None, past_key_values=None, attention_mask=None, **kwargs):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.wte(input_ids) + self.wpe(places)
        $MASK
        for block in self.h:
            x = block(x, attention_mask=mask, head_mask=None, use_cache=False, output_attentions=False)[0]
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.ln_f(x))


class HeirForCausalLM(GPT2LMHeadModel):
    config_class = HeirConfig

    def __init__(self, config):
        super().__init__(config)
        self.transformer = HeirModel(config)
        self.post_init()
"""
_CONFIG = {
    "model_type": "heir_gpt2",
    "architectures": ["HeirForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_heir.HeirConfig",
        "AutoModelForCausalLM": "modeling_heir.HeirForCausalLM",
    },
    "transformers_version": "4.45.0",
    **{"n_embd": 48, "n_head": 3, "n_layer": 3, "vocab_size": 131, "n_positions": 256},
}
_ALONE = """
import json
import os
import torch
from transformers import GPT2Config
from onboard.hf.old.layers.own_triangles import hide_later_tokens, is_causal_alone
from types import ModuleType
code = ModuleType("code")
from transformers import GPT2Model
code.GPT2Model, code.number, code.tensor = GPT2Model, 3, torch.Tensor
print(hide_later_tokens([code]))
assert hide_later_tokens([code]) == []
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
seed = int.from_bytes(os.urandom(3), "big")
print("seed", seed)
torch.manual_seed(seed)
config = GPT2Config(n_embd=32, n_head=4, n_layer=1, attn_implementation="eager")
layer, x = GPT2Attention(config, layer_idx=0).double().eval(), torch.randn(2, 7, 32).double()
q, k, v = (y.view(2, 7, 4, 8).transpose(1, 2) for y in layer.c_attn(x).chunk(3, dim=-1))
y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
expected = layer.c_proj(y.transpose(1, 2).reshape(2, 7, 32))
found = {}
for name, mask in {"none": None, "padding": torch.zeros(2, 1, 1, 7).double()}.items():
    found[name] = (layer(x, attention_mask=mask)[0] - expected).abs().max().item()
layer.reorder_and_upcast_attn = True
found["in_float32"] = (layer(x, attention_mask=None)[0] - expected).abs().max().item()
layer.reorder_and_upcast_attn = False
whole = torch.zeros(1, 1, 7, 7).double()
y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
expected = layer.c_proj(y.transpose(1, 2).reshape(2, 7, 32))
found["own"] = (layer(x, attention_mask=whole)[0] - expected).abs().max().item()
found["alone"] = is_causal_alone(layer)
print("FOUND" + json.dumps(found))
"""


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        ("mask = None", {}),
        (
            "mask = None if attention_mask is None else (1.0 - attention_mask[:, None, None, :].to(x.dtype))"
            " * torch.finfo(x.dtype).min",
            {},
        ),
        ("mask = None", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    ],
)
def test_an_heir_of_gpt2_that_hands_no_causal_mask(
    mask: str, fields: dict[str, bool], tmp_path: Path
) -> None:
    folder = tmp_path / "heir_gpt2"
    folder.mkdir()
    (folder / "modeling_heir.py").write_text(_CODE.replace("$MASK", mask))
    (folder / "config.json").write_text(json.dumps(_CONFIG | fields))
    found = run_apart(GENERATE, [folder])["heir_gpt2"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert any("hides later tokens" in fact for fact in found["facts"])


def test_eager_attention_hides_later_tokens_where_its_mask_does_not() -> None:
    found = run_apart(_ALONE, [])
    assert found.pop("alone") is True
    assert found.pop("in_float32") < 1e-5
    assert all(error < 1e-12 for error in found.values()), found
