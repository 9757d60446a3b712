"""Tables of a constructor that code cuts to its text, makes wider, and looks positions up in only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary

_HEAD = """
import einops

class Tables(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, length = config.hidden_size // config.num_attention_heads, config.max_position_embeddings
        inverse = 1.0 / config.rope_theta ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), inverse)
        scale = (torch.arange(length).float() / length + 1.0).unsqueeze(-1)
        self.register_buffer("cos", angles.cos() * scale, persistent=False)
        self.register_buffer("sin", angles.sin() * scale, persistent=False)

    def forward(self, length):
        return self.cos[:length, ...], self.sin[:length, ...]


def half_turned(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def turned(q, k, cos, sin, position_ids):
    cos, sin = WIDE
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
"""
_ATTENTION = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
cos, sin = self.rotary(t)
q, k = turned(q, k, cos, sin, POSITIONS)
q, k = (y.reshape(b * self.heads, t, self.size) for y in (q, k))
scores = torch.zeros(b * self.heads, t, t, dtype=q.dtype, device=q.device)
k = k.transpose(1, 2)
scores = torch.baddbmm(scores, q, k, alpha=torch.tensor(1.0, dtype=self.norm.dtype) / self.norm)
mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
scores = scores.view(b, self.heads, t, t).masked_fill(~mask, float("-inf"))
y = F.softmax(scores, dim=-1) @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_MADE = """Tables(config)
        norm = torch.sqrt(torch.tensor(self.size, dtype=torch.float32))
        self.register_buffer("norm", norm, persistent=False)"""
_REPEATED = "(einops.repeat(table, 's r -> s (2 r)') for table in (cos, sin))"
_JOINED = "(torch.cat((table, table), dim=-1) for table in (cos, sin))"
_COUNTED = "torch.arange(t, device=x.device).unsqueeze(0)"


@pytest.mark.parametrize("wide", [_REPEATED, _JOINED])
@pytest.mark.parametrize("positions", [_COUNTED, "position_ids"])
def test_tables_made_wider_are_looked_up(tmp_path: Path, wide: str, positions: str) -> None:
    name = f"odd_{'repeated' if wide == _REPEATED else 'joined'}_{positions[:5]}".replace(".", "_")
    head, attention = _HEAD.replace("WIDE", wide), _ATTENTION.replace("POSITIONS", positions)
    folder = save_odd(tmp_path / name, head=head, attention=attention)
    found = run_apart(GENERATE, [with_rotary(folder, _MADE)])[name]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]
