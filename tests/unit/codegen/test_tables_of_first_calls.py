"""Rotary tables that the first call of a forward makes, as long as its text, and those that a text
beyond all positions makes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary
from tests.unit.codegen import test_named_helpers as helpers
from tests.unit.codegen.test_wrapped_models import ATTENTION

_TABLES = """
class Tables(nn.Module):
    def __init__(self, size, theta):
        super().__init__()
        self.size, self.theta = size, theta
        self.longest = -1

    def _make(self, length, device, dtype):
        self.longest = length
        rates = 1.0 / (self.theta ** (torch.arange(0, self.size, 2).float().to(device) / self.size))
        angles = torch.einsum("i,j->ij", torch.arange(length, device=device, dtype=rates.dtype), rates)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos()[None, None, :, :].to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin()[None, None, :, :].to(dtype), persistent=False)

    def forward(self, x, length=None):
        if length > self.longest:
            self._make(length, x.device, x.dtype)
        return self.cos[:, :, :length, ...].to(x.dtype), self.sin[:, :, :length, ...].to(x.dtype)


def half_turned(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def turned(q, k, cos, sin, position_ids):
    cos, sin = cos.squeeze(1).squeeze(0), sin.squeeze(1).squeeze(0)
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
"""


def _save(folder: Path, head: str) -> Path:
    """Write a model of the folder's name whose attention has tables of its own."""
    save_odd(folder, head=head, attention=ATTENTION)
    file, made = folder / "modeling_odd.py", "self.theta = config.rope_theta"
    tables = "self.tables = Tables(self.size, config.rope_theta)"
    file.write_text(file.read_text().replace(made, tables))
    return folder


def test_a_table_of_the_text_is_that_of_the_positions_which_look_it_up(tmp_path: Path) -> None:
    folder = _save(tmp_path / "odd_lazy", _TABLES)
    found = run_apart(GENERATE, [folder])["odd_lazy"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "torch.arange(length" not in found["text"]  # a step has tokens of several texts
    assert not found["recorded"]


def test_a_table_that_loses_the_dimension_of_a_single_token_is_that_of_longer_texts(
    tmp_path: Path,
) -> None:
    """`squeeze(0)` of [1, size]: the code does not run for texts of one token, two in a batch."""
    plain = _TABLES.replace("[None, None, :, :]", "").replace("[:, :, :length, ...]", "[:length]")
    folder = _save(tmp_path / "odd_squeezed", plain)
    found = run_apart(GENERATE, [folder])["odd_squeezed"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]


_DYNAMIC = """
    def _grow(self, position_ids, device):
        seq_len = torch.max(position_ids) + 1
        if seq_len > self.max_seq_len_cached:
            inv_freq, self.attention_scaling = self.rope_init_fn(self.config, device, seq_len=seq_len)
            self.register_buffer("inv_freq", inv_freq, persistent=False)
            self.max_seq_len_cached = seq_len
        if seq_len < self.original_max_seq_len and self.max_seq_len_cached > self.original_max_seq_len:
            self.register_buffer("inv_freq", self.original_inv_freq, persistent=False)
            self.max_seq_len_cached = self.original_max_seq_len

    @torch.no_grad()
    def forward(self, x, position_ids):
        if "dynamic" in self.rope_type:
            self._grow(position_ids, device=x.device)
"""


def _save_dynamic(folder: Path, limit: str) -> Path:
    begun = "\n    @torch.no_grad()\n    def forward(self, x, position_ids):\n"
    before, _, behind = helpers.ROTARY.partition("    def compute_default_rope_parameters")
    rotary = before + behind[behind.index(begun) :].replace(begun, _DYNAMIC)
    rotary = rotary.replace('"default"', '"dynamic"')
    rotary = rotary.replace("cached = config.max_position_embeddings", f"cached = {limit}")
    head = "from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS\n" + rotary
    with_rotary(save_odd(folder, head=head, attention=helpers.ATTENTION))
    config = folder / "config.json"
    values = json.loads(config.read_text())
    config.write_text(
        json.dumps(values | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    )
    return folder


def test_frequencies_that_a_text_beyond_all_positions_makes_anew_are_those_of_the_first(
    tmp_path: Path,
) -> None:
    covered = _save_dynamic(tmp_path / "odd_dynamic", "config.max_position_embeddings")
    earlier = _save_dynamic(tmp_path / "odd_earlier", "config.max_position_embeddings // 2")
    found = run_apart(GENERATE, [covered, earlier])
    assert found["odd_dynamic"].get("error") is None, found["odd_dynamic"]["error"]
    assert found["odd_dynamic"]["worst"] < 1e-5
    assert "changes under a condition" in found["odd_earlier"]["error"]  # texts get there


def test_positions_of_such_a_table_may_be_divided_in_place(tmp_path: Path) -> None:
    angles = 'angles = torch.einsum("i,j->ij", torch.arange(length, device=device, dtype=rates.dtype), rates)'
    assert angles in _TABLES
    in_place = """where = torch.arange(length, device=device, dtype=torch.float32)
        where /= 4.0
        angles = torch.outer(where, rates)"""
    head = _TABLES.replace(angles, in_place)
    folder = _save(tmp_path / "odd_scaled", head)
    found = run_apart(GENERATE, [folder])["odd_scaled"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "where / 4.0" in found["text"]
    assert not found["recorded"]


_TURNED = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size) for y in self.qkv(x).chunk(3, dim=-1))
cos, sin = self.tables(x, t, position_ids.min())
q, k = apply_rotary_emb_func(q, cos, sin), apply_rotary_emb_func(k, cos, sin)
return self.out(flash_attn_func(q, k, v, causal=True).reshape(b, t, -1))
"""


def test_a_function_of_flash_attn_turns_by_such_a_table(tmp_path: Path) -> None:
    imports = "from flash_attn import flash_attn_func\n"
    imports += "from flash_attn.layers.rotary import apply_rotary_emb_func\n"
    tables = _TABLES.replace("        angles = torch.cat((angles, angles), dim=-1)\n", "")
    tables = tables.replace("[None, None, :, :]", "").replace("[:, :, :length, ...]", "[first:]")
    tables = tables.replace("x, length=None", "x, length=None, first=0")
    tables = tables.replace("if length > self", "length = length + first\n        if length > self")
    folder = save_odd(tmp_path / "odd_turned", head=imports + tables, attention=_TURNED)
    file, made = folder / "modeling_odd.py", "self.theta = config.rope_theta"
    file.write_text(
        file.read_text().replace(made, "self.tables = Tables(self.size, config.rope_theta)")
    )
    found = run_apart(GENERATE, [folder])["odd_turned"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "torch.arange(length" not in found["text"]
