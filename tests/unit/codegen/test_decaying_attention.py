"""Linear attention with decays of heads, in the manners that repositories write it: blocks in a method
of their own that change an output in place, with slopes that the model hands in, and fla's function
with decays that are the same for all tokens.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tests.support.odd_code import GENERATE, run_apart, save_odd

_HEAD = """
import copy
from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal_2_10
if is_flash_attn_2_available():
    from flash_attn import flash_attn_func
    _windows = True
from fla.ops.simple_gla.chunk import chunk_simple_gla

BLOCK = 8


def slope_tensor(heads):
    def slopes(n):
        def of_power(n):
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        if math.log2(n).is_integer():
            return of_power(n)
        near = 2 ** math.floor(math.log2(n))
        return of_power(near) + slopes(2 * near)[0::2][: n - near]
    return torch.tensor(slopes(heads), dtype=torch.float32)
"""
_BLOCKS_CALLED = "return self.in_blocks(x, None, slope)"
_BLOCKS = """
def in_blocks(self, y, past=None, slope=None):
    b, n, _ = y.shape
    q, k, v = self.qkv(y).view(b, n, self.heads, -1).split([self.size] * 3, dim=3)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    ratio = torch.exp(-slope)
    if past is None:
        slope = slope.to(torch.float32)
        blocks = (n + BLOCK - 1) // BLOCK
        b, h, n, d = q.shape
        places = torch.arange(BLOCK).to(q) + 1
        of_q = torch.exp(-slope * places.reshape(-1, 1))
        of_k = torch.exp(-slope * (BLOCK - places.reshape(-1, 1)))
        apart = slope * (places[:, None] - places[None, :])[None, None]
        decay = torch.exp(torch.where(apart >= 0, -apart, float("-inf")))
        kv = torch.zeros(b, h, d, d).to(torch.float32).to(q.device)
        out = torch.empty((b, h, n, d), dtype=q.dtype, device=q.device)
        for i in range(blocks):
            first, last = i * BLOCK, min(i * BLOCK + BLOCK, n)
            m = last - first
            qi, ki, vi = q[:, :, first:last], k[:, :, first:last], v[:, :, first:last]
            before = torch.matmul(qi * of_q[:, :m], kv)
            here = torch.matmul(torch.matmul(qi, ki.transpose(-1, -2)) * decay[:, :, :m, :m], vi)
            out[:, :, first:last] = before + here
            kv = torch.exp(-slope * m) * kv + torch.matmul((ki * of_k[:, -m:]).transpose(-1, -2), vi)
    else:
        kv = ratio * past
    return self.out(out.transpose(1, 2).reshape(b, n, -1))
"""
_FLA = """
b, n, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q, k, v = (y.view(b, n, self.heads, self.size) for y in (q, k, v))
H = q.shape[2]
s = -slope_tensor(H) * (1 - self.index / 7 + 1e-5)
g = s[None, None, :].expand(q.shape[0], q.shape[1], q.shape[2]).contiguous()
g = g.to(x.device)
ops = {"chunk": chunk_simple_gla}
o, _ = ops["chunk"](q=q, k=k, v=v, g=g, scale=None, initial_state=None, output_final_state=False)
g = self.gate(x)
return self.out(o.reshape(b, n, -1) * F.sigmoid(g))
"""
_FLASH = """
b, n, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q, k, v = (y.view(b, n, self.heads, self.size) for y in (q, k, v))
length = k.shape[1]
windowed = _windows and getattr(self.config, "window", None) is not None and length > self.config.window
y = self._attend(q, k, v, n, windowed=windowed)
return self.out(y.reshape(b, n, -1))
"""
_FLASH_ATTEND = """
def _attend(self, q, k, v, query_length, windowed=False):
    causal = self.causal if not self.top_left else self.causal and query_length != 1
    if not windowed:
        return flash_attn_func(q, k, v, 0.0, softmax_scale=None, causal=causal)
    return flash_attn_func(q, k, v, 0.0, causal=causal, window_size=(self.config.window, self.config.window))
"""


def _made(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_apart(GENERATE, [folder])[folder.name]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
    return found


def _with_method(folder: Path, method: str) -> Path:
    behind = "\n\nclass Mlp("
    return _replaced(folder, (behind, textwrap.indent(method, " " * 4) + behind))


def _replaced(folder: Path, *changes: tuple[str, str]) -> Path:
    file = folder / "modeling_odd.py"
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return folder


def test_blocks_in_a_method_of_their_own_are_the_op(tmp_path: Path) -> None:
    block = "x = x + self.attn(self.norm1(x), slope)\nreturn x + self.mlp(self.norm2(x))"
    model = """
x = self.embed(input_ids)
slopes = [self.slopes.to(x.device) for _ in range(len(self.layers))]
for index, layer in enumerate(self.layers):
    x = layer(x, slopes[index] * (1 - index / (len(self.layers) - 1) + 1e-5))
return self.norm(x)
"""
    folder = save_odd(
        tmp_path / "odd_blocks", head=_HEAD, attention=_BLOCKS_CALLED, block=block, model=model
    )
    made = (
        "self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])"
    )
    copies = """self.layers = nn.ModuleList([])
        for i in range(config.num_hidden_layers):
            own = copy.deepcopy(config)
            own._attn_implementation = "linear_attention"
            self.layers.append(Block(own, i))
        self.slopes = slope_tensor(config.num_attention_heads).reshape(-1, 1, 1)"""
    _replaced(
        _with_method(folder, _BLOCKS),
        (made, copies),
        ("def forward(self, x, position_ids):", "def forward(self, x, slope):"),
    )
    found = _made(folder)
    assert found["text"].count("torch_lightning_attention") == 1
    assert "_attn_implementation" not in found["text"]


def test_decays_that_are_the_same_for_all_tokens_are_those_of_heads(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_fla", head=_HEAD, attention=_FLA)
    gate = "\n        self.gate = nn.Linear(config.hidden_size, config.hidden_size)"
    _replaced(
        folder,
        ("self.attn = Attention(config)", "self.attn = Attention(config, index)"),
        (
            "def __init__(self, config):\n        super().__init__()\n        self.heads",
            f"def __init__(self, config, index):\n        super().__init__(){gate}\n"
            "        self.index = index\n        self.heads",
        ),
    )
    found = _made(folder)
    assert found["text"].count("torch_lightning_attention") == 1


def test_flash_attention_of_a_window_that_the_config_has_not(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_flash", head=_HEAD, attention=_FLASH)
    own = """self.config = config
        self.causal = True
        self.top_left = not is_flash_attn_greater_or_equal_2_10()
        self.theta"""
    _replaced(_with_method(folder, _FLASH_ATTEND), ("self.theta", own))
    found = _made(folder)
    assert "torch_attention" in found["text"]
    assert "is_flash_attn" not in found["text"]
