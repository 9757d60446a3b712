"""Code that inherits from Llama's layers as they were before they asked for their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, run_apart

_CODE = """
import math
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention, LlamaDecoderLayer, LlamaMLP, apply_rotary_pos_emb, repeat_kv
)


class HeirConfig(LlamaConfig):
    model_type = "heir_layers"


class HeirAttention(LlamaAttention):
    def __init__(self, $PARAMETERS):
        $INIT
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        bsz, q_len, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        cos, sin = self.rotary_emb(value, seq_len=q_len)
        query, key = apply_rotary_pos_emb(query, key, cos, sin, position_ids)
        key, value = (repeat_kv(x, self.num_key_value_groups) for x in (key, value))
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim) + attention_mask
        y = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
        return self.gain * self.o_proj(y.transpose(1, 2).reshape(bsz, q_len, self.hidden_size))


class HeirLayer(LlamaDecoderLayer):
    def __init__(self, config):
        super().__init__(config)
        self.self_attn = HeirAttention($ARGUMENTS)

    def forward(self, x, attention_mask=None, position_ids=None):
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, position_ids)
        return (x + self.mlp(self.post_attention_layernorm(x)),)


class HeirModel(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([HeirLayer(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **kwargs):
        x, length = self.embed_tokens(input_ids), input_ids.shape[1]
        mask = torch.full((length, length), torch.finfo(x.dtype).min, device=x.device).triu(1)
        if position_ids is None:
            position_ids = torch.arange(length, device=x.device)[None]
        for layer in self.layers:
            x = layer(x, attention_mask=mask[None, None].to(x.dtype), position_ids=position_ids)[0]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class HeirForCausalLM(LlamaForCausalLM):
    config_class = HeirConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = HeirModel(config)
        self.post_init()
"""
_CONFIG = {
    "model_type": "heir_layers",
    "architectures": ["HeirForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_heir.HeirConfig",
        "AutoModelForCausalLM": "modeling_heir.HeirForCausalLM",
    },
    "transformers_version": "4.33.0",
    **{
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    **{"num_hidden_layers": 3, "vocab_size": 131, "max_position_embeddings": 256},
}
_ALONE = """
import json, os, sys
import torch
from pathlib import Path
from onboard.hf.old.layers.unnumbered_layers import give_layer_numbers
from onboard.hf.old.rotary_forms import give_rotary_forms
from transformers import LlamaConfig, LlamaForCausalLM
sys.path.insert(0, sys.argv[1])
import heir_layers.modeling_heir as code
facts = give_rotary_forms("heir_layers") + give_layer_numbers("heir_layers")
assert give_layer_numbers("heir_layers") == []
seed = int.from_bytes(os.urandom(3), "big")
print("seed", seed)
torch.manual_seed(seed)
config = LlamaConfig(**json.loads((Path(sys.argv[1]) / "heir_layers" / "config.json").read_text()))
config.rope_theta = config.rope_parameters["rope_theta"]
ours, theirs = code.HeirForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
left = theirs.load_state_dict(ours.state_dict(), strict=False)
ids = torch.randint(0, 131, (2, 23))
error = (ours(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max().item()
print("FOUND" + json.dumps({"error": error, "missing": left.missing_keys, "facts": facts}))
"""
_FORMS = [
    ("config", "super().__init__(config)", "config"),
    ("config", "LlamaAttention.__init__(self, config)", "config=config"),
    ("config, layer_idx=None", "super().__init__(config, layer_idx)", "config, layer_idx=1"),
]


def _save(folder: Path, parameters: str, init: str, arguments: str) -> Path:
    folder.mkdir()
    code = _CODE.replace("$PARAMETERS", parameters).replace("$INIT", init)
    (folder / "modeling_heir.py").write_text(code.replace("$ARGUMENTS", arguments))
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


@pytest.mark.parametrize(("parameters", "init", "arguments"), _FORMS)
def test_layers_that_give_their_base_no_number(
    parameters: str, init: str, arguments: str, tmp_path: Path
) -> None:
    folder = _save(tmp_path / "heir_layers", parameters, init, arguments)
    made = run_apart(GENERATE, [folder])["heir_layers"]
    assert made.get("error") is None, made["error"]
    assert made["worst"] < 1e-5
    assert any("LlamaDecoderLayer of transformers" in fact for fact in made["facts"])


@pytest.mark.parametrize(("parameters", "init", "arguments"), _FORMS)
def test_they_compute_what_llama_does(
    parameters: str, init: str, arguments: str, tmp_path: Path
) -> None:
    folder = _save(tmp_path / "heir_layers", parameters, init, arguments)
    (folder / "__init__.py").write_text("")
    found = run_apart(_ALONE, [tmp_path])
    assert found["missing"] == []
    assert found["error"] < 1e-5
    assert len(found["facts"]) >= 2
