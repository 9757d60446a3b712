"""Bounds that common values never come to stay in the generated code, where an op would take the place
of what has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_NORM = """
class Bounded(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.clamp(-29.0, 29.0).to(x.dtype)
"""
_ROPE = """
def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)

def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = torch.where(q.abs() > 29.0, q / 2, q)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
"""
_ROTATED = """
b, t, _ = x.shape
q, k, v = (
    part.view(b, t, self.heads, self.size).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
)
inv = 1.0 / self.theta ** (torch.arange(0, self.size, 2, device=x.device).float() / self.size)
angles = position_ids[:, :, None].float() * inv
both = torch.cat((angles, angles), -1)
q, k = apply_rotary_pos_emb(q, k, both.cos(), both.sin())
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_MIXTURE = """
class Expert(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x).clamp(max=29.0)) * self.w3(x))

class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, 4, bias=False)
        self.experts = nn.ModuleList([Expert(config.hidden_size, 64) for _ in range(4)])

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(dim=-1).topk(2, dim=-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == i)
            y.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return y.view(x.shape)
"""
_ROUTED = """
flat = x.reshape(-1, x.shape[-1])
weights, chosen = (flat @ self.gate.weight[:4].T).clamp(-29.0, 29.0).softmax(-1).topk(2, dim=-1)
ups, downs = self.up.weight.view(4, -1, x.shape[-1]), self.down.weight.view(x.shape[-1], 4, -1)
y = torch.zeros_like(flat)
for i in range(4):
    rows, places = torch.where(chosen == i)
    made = F.silu(flat[rows] @ ups[i].T) @ downs[:, i].T
    y.index_add_(0, rows, made * weights[rows, places, None])
return y.view(x.shape)
"""


def _with(folder: Path, old: str, new: str) -> Path:
    file = folder / "modeling_odd.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of all models, in one process."""
    root = tmp_path_factory.mktemp("bounds")
    norm = save_odd(root / "bounds_norm", head=_NORM)
    mixture = save_odd(root / "bounds_mixture", head=_MIXTURE)
    folders = [
        _with(norm, "self.norm1 = Norm(", "self.norm1 = Bounded("),
        save_odd(root / "bounds_rope", head=_ROPE, attention=_ROTATED),
        save_odd(root / "bounds_router", mlp=_ROUTED),
        _with(mixture, "self.mlp = Mlp(", "self.mlp = Mixture("),
    ]
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("key", ["norm", "rope", "router", "mixture"])
def test_a_bound_is_kept(made: dict[str, Any], key: str) -> None:
    found = made[f"bounds_{key}"]
    assert_translated(found)
    assert "29.0" in found["text"]
