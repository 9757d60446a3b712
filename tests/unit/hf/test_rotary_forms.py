"""Rotary embeddings that older code makes of sizes, beside those of transformers."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

from onboard.hf.old import rotary_forms
from onboard.hf.old.rotary_forms import (
    SizedRotaryEmbedding,
    give_rotary_forms,
    keep_tables,
)

OLD = """
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


class Attention:
    def __init__(self, config):
        self.rotary_emb = LlamaRotaryEmbedding(
            config.head_dim, max_position_embeddings=64, base=config.base
        )

    def rotated(self, q, k, position_ids):
        cos, sin = self.rotary_emb(q, {given})
        return apply_rotary_pos_emb(q, k, cos, sin, position_ids)
"""
NEW = """
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


class Attention:
    def __init__(self, config):
        self.rotary_emb = LlamaRotaryEmbedding(config=config)

    def rotated(self, q, k, position_ids):
        return apply_rotary_pos_emb(q, k, *self.rotary_emb(q, position_ids))
"""
Imported = Callable[[str], ModuleType]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imported]:
    """Return a function that imports a text as a module of a package of its own."""
    folder = tmp_path / "rotary_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def run(text: str) -> ModuleType:
        (folder / "modeling_this.py").write_text(text)
        return importlib.import_module("rotary_package.modeling_this")

    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "rotary_package"]:
        del sys.modules[name]


@pytest.mark.parametrize("given", ["position_ids", "position_ids=position_ids", "seq_len=40"])
def test_what_is_made_of_sizes_rotates_as_what_is_made_of_a_config(
    given: str, imported: Imported
) -> None:
    seed, base = random.randrange(2**31), float(random.randint(100, 10**6))
    print(seed, base)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        rope_theta=base,
        max_position_embeddings=64,
    )
    config.base = base
    q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16)
    positions = torch.stack([torch.arange(7), torch.arange(30, 37)])
    tables = modeling_llama.LlamaRotaryEmbedding(config=config)(q, positions)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, *tables)
    module = imported(OLD.format(given=given))
    assert len(give_rotary_forms("rotary_package")) == 2
    found = module.Attention(config).rotated(q, k, positions)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert modeling_llama.LlamaRotaryEmbedding is not SizedRotaryEmbedding  # of this file alone


def test_code_that_makes_them_of_a_config_keeps_them(imported: Imported) -> None:
    module = imported(NEW)
    assert give_rotary_forms("rotary_package") == []
    assert module.LlamaRotaryEmbedding is modeling_llama.LlamaRotaryEmbedding
    assert module.apply_rotary_pos_emb is modeling_llama.apply_rotary_pos_emb


class OwnRotaryEmbedding(nn.Module):
    """Made while the config says what this layer's base is."""

    def __init__(self, config: LlamaConfig, base: float) -> None:
        super().__init__()
        self.config, self.rope_type = config, "linear"
        frequencies = base ** -(torch.arange(0, 16, 2).float() / 16)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.original_inv_freq = self.inv_freq


class _Model(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.tables = nn.ModuleList(OwnRotaryEmbedding(config, base) for base in (50.0, 700.0))
        self.post_init()


def test_tables_of_a_repositorys_own_rotary_embeddings_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PreTrainedModel, "_init_weights", PreTrainedModel._init_weights)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 90.0}
    config = LlamaConfig(head_dim=16, hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    made = [OwnRotaryEmbedding(config, base).inv_freq for base in (50.0, 700.0)]
    keep_tables()
    assert keep_tables() == []
    model: Any = _Model(config)
    for table, expected in zip(model.tables, made, strict=True):
        assert torch.equal(table.inv_freq, expected)


def test_a_scale_is_refused() -> None:
    with pytest.raises(Exception, match="scaling_factor"):
        rotary_forms.SizedRotaryEmbedding(16, scaling_factor=2.0)
