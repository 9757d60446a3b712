"""Switches of the config that modules and functions are handed: constants to these, where the code
leads nowhere for both sides.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

_HEAD = """
def biases(kind, bias, heads, length, causal=False, alibi=False):
    if kind == "fast":
        return None
    elif kind in ["plain", "slow"]:
        if alibi:
            away = torch.arange(1 - length, 1, dtype=bias.dtype, device=bias.device).view(1, 1, 1, length)
            if not causal:
                away = away - away.view(1, 1, length, 1)
            bias = bias.add(away * (1.0 / (2 ** (torch.arange(1, heads + 1) * 8 / heads)).view(1, heads, 1, 1)))
        return bias
    else:
        raise ValueError(kind)


def attended(q, k, v, size, bias=None, causal=False):
    scores = q @ k.transpose(2, 3) / math.sqrt(size)
    if bias is not None:
        scores = scores + bias
    if causal:
        s = max(q.shape[2], k.shape[2])
        hidden = ~scores.new_ones(s, s, dtype=torch.float16).tril().to(torch.bool)
        hidden = hidden[-q.shape[2] :, -k.shape[2] :]
        scores = scores.masked_fill(hidden.view(1, 1, q.shape[2], k.shape[2]), torch.finfo(q.dtype).min)
    return F.softmax(scores, dim=-1) @ v

"""
_ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size).transpose(1, 2)
k = k.view(b, t, self.heads, self.size).transpose(1, 2)
v = v.view(b, t, self.heads, self.size).transpose(1, 2)
if bias is not None:
    bias = bias[:, :, -q.size(2) :, -k.size(2) :]
y = attended(q, k, v, self.size, bias, causal)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_BLOCK = """
x = x + self.attn(self.norm1(x), bias, causal)
return x + self.mlp(self.norm2(x), self.kind)
"""
_MLP = """
y = self.gate(x)
if kind == "smooth":
    y = F.gelu(y)
else:
    y = F.silu(y)
return self.down(y * self.up(x))
"""
_MODEL = """
x = self.embed(input_ids)
length, heads = self.config.max_position_embeddings, self.config.num_attention_heads
bias = torch.zeros((1, heads, 1, length), device=x.device, dtype=x.dtype)
bias = biases(self.config.kind, bias, heads, length, causal=self.is_causal, alibi=self.config.alibi)
for layer in self.layers:
    x = layer(x, bias, causal=self.is_causal)
return self.norm(x)
"""
_FIELDS = {"sees_all": False, "kind": "plain", "alibi": True}


def _saved(folder: Path) -> Path:
    """Return a model whose switches are fields of its config, one of a block its number's."""
    save_odd(folder, head=_HEAD, attention=_ATTENTION, block=_BLOCK, mlp=_MLP, model=_MODEL)
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    text = code.read_text().replace(
        "def forward(self, x, position_ids)", "def forward(self, x, bias, causal)"
    )
    text = text.replace(
        "def forward(self, x):\n        y = self", "def forward(self, x, kind):\n        y = self"
    )
    text = text.replace("self.index = index", 'self.kind = "smooth" if index % 2 else "plain"')
    made = "        self.post_init()\n\n    def forward(self, input_ids, position_ids=None):"
    code.write_text(text.replace(made, f"        self.is_causal = not config.sees_all\n{made}"))
    taken = "".join(f", {key}={value!r}" for key, value in _FIELDS.items())
    kept = "".join(f"self.{key} = {key}\n" for key in _FIELDS)
    text = config.read_text().replace("norm_eps=1e-5,", f"norm_eps=1e-5{taken},")
    begin = "        self.vocab_size"
    config.write_text(text.replace(begin, f"{textwrap.indent(kept, ' ' * 8)}{begin}"))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of the model."""
    folder = _saved(tmp_path_factory.mktemp("switches") / "odd_switches")
    found: dict[str, Any] = run_apart(GENERATE, [folder])["odd_switches"]
    assert found.get("error") is None, found["error"]
    return found


def test_switches_that_are_handed_on_are_this_config_s(made: dict[str, Any]) -> None:
    assert made["worst"] < 1e-5
    assert not made["recorded"]
    assert "alibi_slopes=bias" in made["text"]
    assert "masked_fill" not in made["text"]


def test_what_is_taken_for_granted_is_asserted(made: dict[str, Any]) -> None:
    for said in ("is_causal is True", "alibi is True", "kind == 'plain'"):
        assert f"covered only with {said}" in made["text"], said


def test_a_switch_that_differs_between_layers_stays_one(made: dict[str, Any]) -> None:
    assert "gelu" in made["text"]
    assert "silu" in made["text"]
