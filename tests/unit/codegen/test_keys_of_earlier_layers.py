"""Layers without keys and values of their own, which take those that an earlier layer has handed on."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary

_HEAD = """
class Tables(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, length = config.hidden_size // config.num_attention_heads, config.max_position_embeddings
        rates = 1.0 / config.rope_theta ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), rates)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos()[None, None, :, :], persistent=False)
        self.register_buffer("sin", angles.sin()[None, None, :, :], persistent=False)

    def forward(self, x, length):
        return self.cos[:length, ...].to(x.device), self.sin[:length, ...].to(x.device)


def half_turned(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def turned(x, cos, sin, first=0):
    cos, sin = (table[..., first : x.shape[-2] + first, :] for table in (cos, sin))
    return x * cos + half_turned(x) * sin
"""
_ATTENTION = """
b, t, _ = x.shape
q = self.query(x).view(b, t, self.heads, self.size).transpose(1, 2)
if self.owns:
    k, v = (y.view(b, t, self.heads, self.size).transpose(1, 2) for y in self.kv(x).chunk(2, dim=-1))
    passed = (k, v)
else:
    k = passed[0]
    v = passed[1]
cos, sin = self.rotary(x, t)
if self.owns:
    k = turned(k, cos, sin)
y = F.scaled_dot_product_attention(turned(q, cos, sin), k, v, is_causal=True)
return self.out(y.transpose(1, 2).reshape(b, t, -1)), passed
"""
_BLOCK = """
y, passed = self.attn(self.norm1(x), passed)
x = x + y
return (x + self.mlp(self.norm2(x)), passed)
"""
_MODEL = """
x = self.embed(input_ids)
past, passed = tuple([None] * 3), None
for i, layer in enumerate(self.layers):
    if i in self.owners:
        before = past[self.owners.index(i)]
    outputs = layer(x, before, passed)
    passed = outputs[-1]
    x = outputs[0]
return self.norm(x)
"""
_MADE = """Tables(config)
        self.owns = owns
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        if owns:
            self.kv = nn.Linear(config.hidden_size, 2 * config.hidden_size)"""


def _saved(folder: Path, owners: str) -> Path:
    save_odd(folder, head=_HEAD, attention=_ATTENTION, block=_BLOCK, model=_MODEL)
    with_rotary(folder, _MADE)
    file = folder / "modeling_odd.py"
    text = file.read_text()
    for old, new in (
        (
            "        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)\n",
            "",
        ),
        (
            "class Attention(nn.Module):\n    def __init__(self, config)",
            "class Attention(nn.Module):\n    def __init__(self, config, owns)",
        ),
        (
            "def forward(self, x, position_ids):\n        b, t",
            "def forward(self, x, passed):\n        b, t",
        ),
        ("def __init__(self, config, index):", "def __init__(self, config, index, owns):"),
        ("Attention(config)", "Attention(config, owns)"),
        (
            "def forward(self, x, position_ids):\n        y,",
            "def forward(self, x, before, passed):\n        y,",
        ),
        ("        self.layers =", f"        self.owners = {owners}\n        self.layers ="),
        ("Block(config, i)", "Block(config, i, i in self.owners)"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    return folder


def test_layers_take_what_an_earlier_layer_handed_on(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "odd_handed", "[0] + [int(2 * (n + 1)) for n in range(1)]")
    found = run_apart(GENERATE, [folder])["odd_handed"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "passed[0]" in found["text"]
    assert "if self.owns" in found["text"]
    assert not found["recorded"]
