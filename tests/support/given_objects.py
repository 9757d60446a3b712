"""Models whose modules give one another objects, in forms that people write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.odd_code import save_odd

Form = Mapping[str, str]
"""Code by its place: `head` before all classes; `made`, what the model gives as `given`; `turn`, what attention
does with it; the bodies `block` and `model`; `taken`, `block_taken` and `block_only`, the parameters of attention
and block.
"""

HEAD = """
from collections import namedtuple
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional


def rotate(y, cos, sin):
    first, second = y.chunk(2, -1)
    return (y * cos + torch.cat((-second, first), -1) * sin).to(y.dtype)


def angles_of(position_ids, config):
    size = config.hidden_size // config.num_attention_heads
    inv = 1.0 / config.rope_theta ** (torch.arange(0, size, 2, device=position_ids.device).float() / size)
    angles = position_ids[:, None, :, None].float() * inv
    return torch.cat((angles, angles), -1)


@dataclass
class Rotary:
    cos: torch.Tensor
    sin: torch.Tensor


"""
TURN = "q, k = rotate(q, given.cos, given.sin), rotate(k, given.cos, given.sin)"
ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size).transpose(1, 2)
k = k.view(b, t, self.heads, self.size).transpose(1, 2)
v = v.view(b, t, self.heads, self.size).transpose(1, 2)
{turn}
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
BLOCK = "x = x + self.attn(self.norm1(x), given)\nreturn x + self.mlp(self.norm2(x))"
MODEL = """
x, angles = self.embed(input_ids), angles_of(position_ids, self.config)
given = {made}
for layer in self.layers:
    x = layer(x, given)
return self.norm(x)
"""
MADE = "Rotary(angles.cos(), angles.sin())"
STREAM = "@dataclass\nclass Stream:\n    x: torch.Tensor\n    rotary: Rotary\n    depth: int = 0"
OF_STREAM = """
x, angles = self.embed(input_ids), angles_of(position_ids, self.config)
given = Stream(x, Rotary(angles.cos(), angles.sin()))
for layer in self.layers:
    given = layer(given)
return self.norm(given.x)
"""


def save_given(folder: Path, form: Form) -> Path:
    """Write code and config of a model of the folder's name, in some form."""
    attention = ATTENTION.format(turn=form.get("turn", TURN))
    if end := form.get("end"):
        start = attention.partition("return ")[0]
        attention = f"{start}y = y.transpose(1, 2).reshape(b, t, -1)\n{end}"
    model = form.get("model", MODEL).replace("{made}", form.get("made", MADE))
    bodies = {"attention": attention, "block": form.get("block", BLOCK), "model": model}
    file = save_odd(folder, head=HEAD + form.get("head", ""), **bodies) / "modeling_odd.py"
    text = file.read_text()
    before, attended, after = text.partition("class Attention(nn.Module):")
    attention, block, rest = after.partition("class Block(nn.Module):")
    attention = attention.replace("x, position_ids)", f"x, {form.get('taken', 'given')})", 1)
    taken = form.get("block_only") or f"x, {form.get('block_taken', 'given')}"
    rest = rest.replace("x, position_ids)", f"{taken})", 1)
    made = "        self.embed = nn.Embedding"
    kind = "        self.index = index\n"
    rest = rest.replace(kind, f"{kind}        self.kind = 'local' if index % 2 else 'full'\n", 1)
    rest = rest.replace(made, f"        {form.get('kept', 'pass')}\n{made}", 1)
    file.write_text(before + attended + attention + block + rest)
    return folder
