"""Code whose rotary embeddings inherit from Llama's as it was made before: of sizes, or on a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import (
    ATTENTION,
    GENERATE,
    assert_translated,
    run_apart,
    save_odd,
    with_rotary,
)

_IMPORT = "from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb\n"
_TABLES = """
class Scaled(LlamaRotaryEmbedding):
    def __init__(self, dim, max_position_embeddings=2048, base=10000, device=None, scaling_factor=1.0):
        self.scaling_factor = scaling_factor
        super().__init__(dim, max_position_embeddings, base, device)

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        self.max_seq_len_cached = seq_len
        t = torch.arange(self.max_seq_len_cached, device=device, dtype=self.inv_freq.dtype)
        t = t / self.scaling_factor
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos()[None, None, :, :].to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, None, :, :].to(dtype), persistent=False)
"""
_POSITIONS = """
class Scaled(LlamaRotaryEmbedding):
    def __init__(self, dim, max_position_embeddings=2048, base=10000, scaling_factor=1.0):
        super().__init__(dim, max_position_embeddings=max_position_embeddings, base=base)
        self.scaling_factor = scaling_factor

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids.float() / self.scaling_factor)
        return cos, sin
"""
_DEVICE = """
class Scaled(LlamaRotaryEmbedding):
    def __init__(self, config, device=None):
        super().__init__(config, device=device)

    def forward(self, x, position_ids):
        return super().forward(x, position_ids / 2.0)
"""
_SIZES = "Scaled(self.size, config.max_position_embeddings, config.rope_theta, scaling_factor=2.0)"
_CUT = """
cos, sin = self.rotary(v, seq_len=t)
cos, sin = cos.squeeze(1).squeeze(0), sin.squeeze(1).squeeze(0)
"""
_ROWS = "cos, sin = self.rotary(v, position_ids)\n"
_FLOAT64 = """
import json, os, sys, torch
sys.path.insert(0, sys.argv[1])
from importlib import import_module
from onboard.hf.old.layers.rotary_heirs import give_rotary_bases
code = import_module("heirs_of_rotary.modeling")
facts = give_rotary_bases("heirs_of_rotary")
assert len(facts) == 1 and give_rotary_bases("heirs_of_rotary") == []
seed = int.from_bytes(os.urandom(3), "big")
print("seed", seed)
torch.manual_seed(seed)
table, x = code.Scaled(16, 64, base=1000.0, scaling_factor=2.0), torch.randn(2, 3, 9, 16)
places = torch.arange(9)[None].expand(2, -1)
angles = places[0, :, None].double() / 2 / 1000.0 ** (torch.arange(0, 16, 2).double() / 16)
given = table(x, seq_len=9) if code.BY_LENGTH else table(x, places)
errors = [(ours.reshape(-1, 9, 16)[-1] - theirs.repeat(1, 2)).abs().max().item()
          for ours, theirs in zip(given, (angles.cos(), angles.sin()))]
print("FOUND" + json.dumps({"worst": max(errors)}))
"""
_OF_TODAY = """
class Scaled(LlamaRotaryEmbedding):
    def __init__(self, cfg, **kwargs):
        super().__init__({given})
"""
_FACTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from importlib import import_module
from onboard.hf.old.layers.rotary_heirs import give_rotary_bases
import_module("heirs_of_rotary.modeling")
print("FOUND" + json.dumps(give_rotary_bases("heirs_of_rotary")))
"""


@pytest.mark.parametrize(
    ("heir", "made", "called"),
    [
        (_TABLES, _SIZES, _CUT),
        (_POSITIONS, _SIZES, _ROWS),
        (_DEVICE, "Scaled(config, None)", _ROWS),
    ],
)
def test_a_base_that_is_made_otherwise_today(
    heir: str, made: str, called: str, tmp_path: Path
) -> None:
    before, behind = ATTENTION.split("inv = 1.0")[0], ATTENTION.index("scores =")
    given = "cos, sin, position_ids" if called == _CUT else "cos, sin"
    turned = f"{called}q, k = apply_rotary_pos_emb(q, k, {given})\n"
    attention = f"{before}{turned}{ATTENTION[behind:]}"
    folder = save_odd(tmp_path / "heir_rotary", head=_IMPORT + heir, attention=attention)
    assert_translated(run_apart(GENERATE, [with_rotary(folder, made)])["heir_rotary"])


@pytest.mark.parametrize(("heir", "by_length"), [(_TABLES, True), (_POSITIONS, False)])
def test_it_gives_what_it_gave(heir: str, by_length: bool, tmp_path: Path) -> None:
    folder = tmp_path / "heirs_of_rotary"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    text = f"import torch\n{_IMPORT}BY_LENGTH = {by_length}\n{heir}"
    (folder / "modeling.py").write_text(text)
    assert run_apart(_FLOAT64, [tmp_path])["worst"] < 1e-5


@pytest.mark.parametrize("given", ["cfg", "self.model_config", "*(cfg,)", "cfg, **kwargs"])
def test_one_that_is_made_as_today_keeps_its_base(given: str, tmp_path: Path) -> None:
    folder = tmp_path / "heirs_of_rotary"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "modeling.py").write_text(_IMPORT + _OF_TODAY.format(given=given))
    assert run_apart(_FACTS, [tmp_path]) == []
