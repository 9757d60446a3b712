"""A small model with code of its own, into whose forwards tests put what they like."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.warm import run_program

_CONFIG = """
from transformers import PretrainedConfig


class OddConfig(PretrainedConfig):
    model_type = "{name}"

    def __init__(
        self, vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        max_position_embeddings=512, rope_theta=10000.0, norm_eps=1e-5, **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.norm_eps = norm_eps
        super().__init__(**kwargs)
"""
_MODEL = """
import math
import torch
from torch import nn
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from .configuration_odd import OddConfig
$HEAD

class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.size = config.hidden_size // self.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.theta = config.rope_theta

    def forward(self, x, position_ids):
$ATTENTION


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
$MLP


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.attn = Attention(config)
        self.mlp = Mlp(config)
        self.norm1 = Norm(config.hidden_size, config.norm_eps)
        self.norm2 = Norm(config.hidden_size, config.norm_eps)

    def forward(self, x, position_ids):
$BLOCK


class OddModel(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.post_init()

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
$MODEL


class OddForCausalLM(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = OddModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, position_ids)))
"""
ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size).transpose(1, 2)
k = k.view(b, t, self.heads, self.size).transpose(1, 2)
v = v.view(b, t, self.heads, self.size).transpose(1, 2)
inv = 1.0 / self.theta ** (torch.arange(0, self.size, 2, device=x.device).float() / self.size)
angles = position_ids[:, None, :, None].float() * inv
cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
def turn(y):
    first, second = y.chunk(2, -1)
    return (y * cos + torch.cat((-second, first), -1) * sin).to(y.dtype)
q, k = turn(q), turn(k)
scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
scores = scores.masked_fill(mask, float("-inf"))
y = F.softmax(scores, dim=-1) @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_USUAL = {
    "head": "",
    "attention": ATTENTION,
    "mlp": "return self.down(F.silu(self.gate(x)) * self.up(x))",
    "block": """
x = x + self.attn(self.norm1(x), position_ids)
return x + self.mlp(self.norm2(x))
""",
    "model": """
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids)
return self.norm(x)
""",
}
_SIZES = {
    "hidden_size": 96,
    "num_attention_heads": 8,
    "intermediate_size": 144,
    "num_hidden_layers": 5,
    "vocab_size": 211,
}


def save_odd(folder: Path, **bodies: str) -> Path:
    """Write code and config of a model of the folder's name.

    Args:
        folder: made; the name is the model type.
        bodies: of the forwards `attention`, `mlp`, `block`, `model`; `head` stands before all classes.
    """
    folder.mkdir(parents=True)
    text = _MODEL
    for key, body in (_USUAL | bodies).items():
        inside = body if key == "head" else textwrap.indent(body.strip("\n"), " " * 8)
        text = text.replace(f"${key.upper()}", inside)
    (folder / "modeling_odd.py").write_text(text)
    (folder / "configuration_odd.py").write_text(_CONFIG.replace("{name}", folder.name))
    classes = {"AutoConfig": "configuration_odd.OddConfig"}
    classes["AutoModelForCausalLM"] = "modeling_odd.OddForCausalLM"
    config = {"architectures": ["OddForCausalLM"], "auto_map": classes, "model_type": folder.name}
    (folder / "config.json").write_text(json.dumps(config | _SIZES))
    return folder


def with_rotary(folder: Path, made: str = "Rotary(config)") -> Path:
    """Let attention make a rotary embedding of its own, `made`; return the folder."""
    file, behind = folder / "modeling_odd.py", "        self.theta = config.rope_theta"
    text = file.read_text()
    file.write_text(text.replace(behind, f"{behind}\n        self.rotary = {made}"))
    return folder


GENERATE = """
import json, sys
from pathlib import Path
from onboard.analysis.analyze import analyze
from onboard.analysis.repository import install
from onboard.codegen.model_file import generate_model_file
from onboard.codegen.straight.recorded_classes import recorded_classes
from onboard.verify.blocks import prove
from onboard.vetting.model_text import vet_model_text
found = {}
for folder in map(Path, sys.argv[1:]):
    config = json.loads((folder / "config.json").read_text())
    try:
        install(folder, config)
        spec = analyze(config, folder, model=folder.name, trust_remote_code=True)
        text = generate_model_file(spec)
        vet_model_text(text)
        worst = max(proof.error for proof in prove(text, spec))
        made = {"text": text, "recorded": recorded_classes(text), "worst": worst}
        found[folder.name] = made | {"facts": spec.repository.facts}
    except Exception as error:
        found[folder.name] = {"error": f"{type(error).__name__}: {error}"}
print("FOUND" + json.dumps(found))
"""
"""What comes of models' code, generated and proven: `text`, `worst`, ..., or an `error`."""


def run_apart(program: str, folders: list[Path]) -> dict[str, Any]:
    """Run a program in a process of its own; return what it prints as JSON behind `FOUND`."""
    printed = run_program(program, *folders)
    assert "FOUND" in printed, printed[-3000:]
    found: dict[str, Any] = json.loads(printed.rpartition("FOUND")[2])
    return found


def assert_translated(made: Mapping[str, object]) -> None:
    """What `GENERATE` made is proven, and no class was recorded instead of being read."""
    assert "error" not in made, made
    assert made["recorded"] == []
    assert isinstance(made["worst"], float)
    assert made["worst"] < 1e-5
