"""Attention whose queries and keys are convolved head by head, with ALiBi in a table of the
constructor's, and activations in a table of another file.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd

_TABLE = """
import torch
import torch.nn.functional as F


def squared(x):
    x = F.relu(x)
    return x * x


ACTIVATIONS = {"tanh": torch.tanh, "gelu": F.gelu, "relu": F.relu, "squared": squared}
"""
_HEAD = """
from .activations_odd import ACTIVATIONS


class HeadConv(nn.Module):
    def __init__(self, size, reach=3):
        super().__init__()
        self.reach = reach
        self.conv = nn.Conv1d(size, size, (reach,), padding=(reach - 1,), groups=size)

    def forward(self, x):
        b, heads, t, size = x.shape
        x = x.permute(0, 1, 3, 2).contiguous().view(b * heads, size, t)
        x = self.conv(x)[:, :, : -(self.reach - 1)]
        return x.view(b, heads, size, t).permute(0, 1, 3, 2)

"""
_ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size).transpose(1, 2)
k = k.view(b, t, self.heads, self.size).transpose(1, 2)
v = v.view(b, t, self.heads, self.size).transpose(1, 2)
half = self.heads // 2
k = torch.cat([k[:, :half, :, :], self.conv(k[:, half:, :, :])], dim=1)
scores = torch.matmul(q, k.transpose(-1, -2)) / (float(v.size(-1)) ** 0.5)
mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
scores = scores.masked_fill(mask, float("-inf")) + bias[:, :, : scores.size(-1)]
y = F.softmax(scores, dim=-1) @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_CHANGES = {
    "self.theta = config.rope_theta": "self.conv = HeadConv(self.size)",
    "def forward(self, x, position_ids):\n        b, t": "def forward(self, x, bias=None):\n        b, t",
    "def forward(self, x, position_ids):\n        x = x + self.attn": (
        "def forward(self, x, bias=None):\n        x = x + self.attn"
    ),
    "self.attn(self.norm1(x), position_ids)": "self.attn(self.norm1(x), bias=bias)",
    "x = layer(x, position_ids)": "x = layer(x, bias=self.alibi)",
    "self.norm = Norm(config.hidden_size, config.norm_eps)\n        self.post_init()": (
        "self.norm = Norm(config.hidden_size, config.norm_eps)\n"
        "        slopes = torch.Tensor([0.25] * config.num_attention_heads)\n"
        "        places = torch.arange(config.max_position_embeddings)\n"
        "        self.register_buffer('alibi', slopes[:, None, None] * places[None, None, :])\n"
        "        self.post_init()"
    ),
    "self.gate = nn.Linear(config.hidden_size": (
        "self.act = ACTIVATIONS[config.activation]\n        self.gate = nn.Linear(config.hidden_size"
    ),
    "F.silu(self.gate(x))": "self.act(self.gate(x))",
}


def test_heads_are_convolved_beside_one_another(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_heads", head=_HEAD, attention=_ATTENTION)
    (folder / "activations_odd.py").write_text(_TABLE)
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    text = code.read_text()
    for old, new in _CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    code.write_text(text)
    text = config.read_text().replace("norm_eps=1e-5,", 'norm_eps=1e-5, activation="squared",')
    kept = "self.norm_eps = norm_eps\n"
    config.write_text(text.replace(kept, f"{kept}        self.activation = activation\n"))
    found = run_apart(GENERATE, [folder])["odd_heads"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]
    assert "alibi_slopes=" in found["text"]
    convolution = found["text"].partition("torch_causal_conv1d(")[2].partition("self.conv")[0]
    assert "flatten(2" in convolution  # a text's heads are beside one another
