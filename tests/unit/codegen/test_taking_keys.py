"""Layers whose state takes away by keys of its own (RWKV-7), from modeling code to the op that has a
cache: by functions of `fla`, and in plain torch. The first layer's values go to all others.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.analysis.recognise.mixers import call_forms, probe_scan
from onboard.analysis.recognise.recorder import HelperCall
from tests.support.odd_code import GENERATE, run_apart, save_odd

HELPER = """
def turned(r, w, k, v, a, b, state):
    w = torch.exp(-torch.exp(w.float()))
    out = []
    for t in range(r.shape[1]):
        ab = a[:, t].unsqueeze(-1) @ b[:, t].unsqueeze(-2)
        vk = v[:, t].unsqueeze(-1) @ k[:, t].unsqueeze(-2)
        state = state * w[:, t].unsqueeze(-2) + state @ ab + vk
        out.append((state @ r[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, 1), state
"""
FLAT = """
def turned(q, w, k, v, a, b):
    B, T, C = q.shape
    q, w, k, v, a, b = [x.view(B, T, C // 64, 64) for x in (q, w, k, v, a, b)]
    return plain(q, w, k, v, a, b, torch.zeros(B, C // 64, 64, 64))[0].view(B, T, C)
"""
BLOCKED = """
def turned(r, w, k, v, kk, iclr, N_HEAD, HEAD_SIZE, xx, wkv_state_in):
    r, w, k, v, kk, iclr = [x.view(*x.shape[:2], N_HEAD, HEAD_SIZE) for x in (r, w, k, v, kk, iclr)]
    w, state = (-w.exp()).exp(), wkv_state_in.float()
    for t in range(r.shape[1]):
        ab = (-kk[:, t]).unsqueeze(-1) @ (kk * iclr)[:, t].unsqueeze(-2)
        vk = v[:, t].unsqueeze(-1) @ k[:, t].unsqueeze(-2)
        state = state * w[:, t].unsqueeze(-2) + state @ ab + vk
        xx[:, t] = (state @ r[:, t].unsqueeze(-1)).flatten(1)
    return xx, state
"""
DECAYED = HELPER.replace("torch.exp(-torch.exp(w.float()))", "w.exp()")


def _call(text: str, names: str, heads: tuple[int, ...] = (2, 4)) -> HelperCall:
    print("seed", seed := random.getrandbits(20))
    torch.manual_seed(seed)
    found: dict[str, Any] = {"torch": torch}
    exec(text, found)
    tensors = dict(zip(names.split(), torch.randn(6, 2, 7, *heads) / 2, strict=True))
    tensors["w"] = -tensors["w"].abs()
    return HelperCall("turned", found["turned"], tensors)


def _expression(call: HelperCall) -> str | None:
    found = probe_scan(call)
    if found is None:
        return None
    assert found.parameters["op"] == "torch_dplr_delta_rule"
    return call_forms()["torch_dplr_delta_rule"][found.parameters.get("way", 0)].expression


def _with_state(text: str) -> HelperCall:
    call = _call(text, "r w k v a b")
    call.arguments["state"] = torch.randn(2, 2, 4, 4)  # what the model has left there since
    return call


def test_ways_of_calling_it_are_the_op() -> None:
    assert "-w.float().exp()" in (_expression(_with_state(HELPER)) or "")
    assert "(w.float())" in (_expression(_with_state(DECAYED)) or "")
    inner = HELPER.replace("def turned", "def plain")
    assert ", 64)" in (_expression(_call(inner + FLAT, "q w k v a b", (128,))) or "")
    call = _call(BLOCKED, "r w k v kk iclr", (12,))
    call.arguments |= {"N_HEAD": 3, "HEAD_SIZE": 4, "xx": torch.zeros(2, 7, 12)}
    call.arguments |= {"wkv_state_in": torch.randn(2, 3, 4, 4)}
    assert "HEAD_SIZE" in (_expression(call) or "")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("state @ ab", "state @ ab.transpose(-1, -2)"),
        ("state @ ab", "0.9 * state @ ab"),
        ("w[:, t].unsqueeze(-2)", "w[:, t].unsqueeze(-1)"),
        ("vk = v[:, t].unsqueeze(-1) @ k", "vk = k[:, t].unsqueeze(-1) @ v"),
    ],
)
def test_another_recurrence_is_not(right: str, wrong: str) -> None:
    assert right in HELPER
    assert _expression(_with_state(HELPER.replace(right, wrong))) is None


ATTENTION = """
b, t, c = x.shape
xx = F.pad(x, (0, 0, 1, -1)) - x
r, k, v = self.qkv(x + xx * self.shares[0]).chunk(3, dim=-1)
low = self.decay(x + xx * self.shares[1])
a = torch.sigmoid(self.rate(x + xx * self.shares[2]))
kk = F.normalize((k * self.taken).view(b, t, self.heads, -1), dim=-1, p=2.0).view(b, t, c)
k = k * (1 + (a - 1) * self.scaled)
if self.index == 0:
    v_first = v
else:
    v = v + (v_first - v) * torch.sigmoid(self.mixed(x))
r, k, v, kk, a, low = (y.view(b, t, self.heads, -1) for y in (r, k, v, kk, a, low))
CALL
y = y + (r * k * self.own).sum(-1, keepdim=True) * v
return self.out(y.reshape(b, t, c)), v_first
"""
PLAIN = """
state = torch.zeros(b, self.heads, self.size, self.size, device=x.device)
y, state = turned(r, -F.softplus(-low) - 0.5, k, v, -kk, kk * a, state)
"""
FLA = """
w = -0.6065306597126334 * low.sigmoid()
if t >= 64:
    y, _ = chunk_rwkv7(r=r, w=w, k=k, v=v, a=-kk, b=kk * a, scale=1., initial_state=None, safe_gate=True)
else:
    y, _ = fused_mul_recurrent_rwkv7(r=r, w=w, k=k, v=v, kk=kk, a=a, scale=1., initial_state=None)
"""
IMPORT = "from fla.ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7"
BLOCK = """
y, v_first = self.attn(self.norm1(x), v_first)
x = x + y
return x + self.mlp(self.norm2(x)), v_first
"""
MODEL = """
x = self.embed(input_ids)
v_first = torch.zeros_like(x)
for layer in self.layers:
    x, v_first = layer(x, v_first)
return self.norm(x)
"""
PARTS = """self.index = index
        self.decay = nn.Linear(config.hidden_size, config.hidden_size)
        self.rate = nn.Linear(config.hidden_size, config.hidden_size)
        self.mixed = nn.Linear(config.hidden_size, config.hidden_size)
        self.shares = nn.Parameter(torch.rand(3, config.hidden_size))
        self.taken = nn.Parameter(torch.rand(config.hidden_size))
        self.scaled = nn.Parameter(torch.rand(config.hidden_size))
        self.own = nn.Parameter(torch.rand(self.heads, self.size))
        self.theta ="""
INDEXED = "self, config, index):\n        super().__init__()\n        self.heads"


def _saved(folder: Path, head: str, called: str) -> Path:
    """Write code and config of a model of such layers."""
    attention = ATTENTION.replace("CALL\n", called.lstrip())
    file = save_odd(folder, head=head, attention=attention, block=BLOCK, model=MODEL)
    code = file / "modeling_odd.py"
    text = code.read_text()
    for old, new in (
        ("def forward(self, x, position_ids):", "def forward(self, x, v_first):"),
        ("Attention(config)", "Attention(config, index)"),
        ("self.theta =", PARTS),
        ("self, config):\n        super().__init__()\n        self.heads", INDEXED),
    ):
        assert old in text, old
        text = text.replace(old, new)
    code.write_text(text)
    return folder


@pytest.mark.slow
def test_both_are_the_op_and_hand_on_the_first_values(tmp_path: Path) -> None:
    """Where the state begins as something else than zeros, there is no op for it."""
    folders = [
        _saved(tmp_path / "odd_turned", HELPER, PLAIN),
        _saved(tmp_path / "odd_fla", IMPORT, FLA),
        _saved(tmp_path / "odd_ones", HELPER, PLAIN.replace("torch.zeros", "torch.ones")),
    ]
    found = run_apart(GENERATE, folders)
    assert "turned with its argument state" in found.pop("odd_ones")["error"]
    for name, made in found.items():
        assert made.get("worst", 1.0) < 1e-5, (name, made)
        assert made["text"].count("torch_dplr_delta_rule(") == 1
        assert "torch_token_shift(" in made["text"]
        assert made["recorded"] == []
        assert "x, v_first = layer(x, v_first)" in made["text"]
