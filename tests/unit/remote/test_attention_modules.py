"""Attention modules of transformers as they were called before 4.48."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, OPTConfig, Qwen3Config
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from onboard.analysis.source import find_method, location
from onboard.errors import OnboardError
from onboard.hf.old.layers.attention_modules import HeadForms, give_attention_modules, turning

TURNING = turning(LlamaAttention)

_CALLING = """
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama.modeling_llama import LlamaAttention

KINDS = {{"eager": LlamaAttention, "pairs": GlmAttention, "other": int}}


def call(attention, x, mask, positions, tables):
    return attention(x, attention_mask=mask, {arguments})
"""


def _config(**more: Any) -> Any:
    values = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = LlamaConfig(**values, max_position_embeddings=64, **more)
    config._attn_implementation = "eager"
    config.rope_theta = config.rope_parameters["rope_theta"]
    return config


def test_it_turns_by_positions_as_transformers_does_with_tables() -> None:
    config, length = _config(attention_bias=True), 9
    ours, theirs = TURNING(config, 1).eval(), LlamaAttention(config, 1).eval()
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(2, length, 32), torch.randint(0, 64, (2, length))
    mask = torch.full((length, length), -1e9).triu(1)[None, None]
    tables = LlamaRotaryEmbedding(config)(x, positions)
    out, weights, cache = ours(x, mask, positions, use_cache=True, output_attentions=True)
    expected, _ = theirs(x, position_embeddings=tables, attention_mask=mask)
    torch.testing.assert_close(out, expected)
    assert weights.shape == (2, 4, length, length)
    assert cache is None
    assert ours(x, mask, positions)[1] is None


def test_without_a_mask_it_is_causal_as_the_attention_of_torch_was() -> None:
    config, length = _config(), 9
    ours = TURNING(config, 1).eval()
    x, positions = torch.randn(2, length, 32), torch.arange(length).expand(2, -1)
    mask = torch.full((length, length), -1e9).triu(1)[None, None]
    causal, seeing_all = ours(x, mask, positions)[0], ours(x, None, positions)[0]
    config._attn_implementation = "sdpa"
    torch.testing.assert_close(ours(x, None, positions)[0], causal)
    assert not torch.allclose(causal, seeing_all)
    tokens = [ours(x[:, i : i + 1], None, positions[:, i : i + 1])[0] for i in range(2)]
    assert all(item.isfinite().all() for item in tokens)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("position_ids=positions, past_key_value=None", True),
        ("past_key_value=None, position_embeddings=tables", False),
        ("past_key_values=None", False),
    ],
)
def test_a_file_that_calls_it_so_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, given: bool
) -> None:
    folder = tmp_path / "calling_code"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "modeling.py").write_text(_CALLING.format(arguments=arguments))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = importlib.import_module("calling_code.modeling")
        facts = give_attention_modules("calling_code")
        wanted = TURNING if given else LlamaAttention
        assert {"eager": wanted, "pairs": GlmAttention, "other": int} == module.KINDS
        assert module.LlamaAttention is wanted
        assert bool(facts) is given
    finally:
        for name in [name for name in sys.modules if name.startswith("calling_code")]:
            del sys.modules[name]


_OF_A_TABLE = """
from transformers.models.llama import modeling_llama as llama

KINDS = {"eager": llama.LlamaAttention}


def call(x, positions):
    return KINDS["eager"](x, position_ids=positions, past_key_value=None)
"""


def test_a_file_that_has_it_in_a_table_alone_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table_code").mkdir()
    (tmp_path / "table_code" / "__init__.py").write_text("")
    (tmp_path / "table_code" / "modeling.py").write_text(_OF_A_TABLE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = importlib.import_module("table_code.modeling")
        [fact] = give_attention_modules("table_code")
        assert fact.startswith("LlamaAttention of transformers")
        assert {"eager": TURNING} == module.KINDS
    finally:
        for name in [name for name in sys.modules if name.startswith("table_code")]:
            del sys.modules[name]


_INHERITING = """
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.opt.modeling_opt import OPTAttention


class Base(GPT2Attention):
    pass


class Own(Base):
    def forward(self, x):
        heads = self._split_heads(x, self.num_heads, self.head_dim)
        return self._merge_heads(heads, self.num_heads, attn_head_size=self.head_dim)


class Other(GPT2Attention):
    def forward(self, x):
        return self._split_heads(x)


class Keeping(GPTNeoSelfAttention):
    def forward(self, x):
        return self._split_heads(x, 4, 8)


class Shaping(OPTAttention):
    def forward(self, x):
        return self._shape(x, 3, 2)


class Alone:
    def forward(self, x):
        return self._shape(x, 3, 2)
"""


def test_methods_for_heads_that_a_base_has_lost_are_given_to_its_heirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heirs_code").mkdir()
    (tmp_path / "heirs_code" / "__init__.py").write_text("")
    (tmp_path / "heirs_code" / "modeling.py").write_text(_INHERITING)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = importlib.import_module("heirs_code.modeling")
        facts = give_attention_modules("heirs_code")
        assert [fact.split(" ")[0] for fact in facts] == [
            "GPT2Attention._merge_heads",
            "GPT2Attention._split_heads",
            "OPTAttention._shape",
        ]
        x = torch.randn(2, 3, 32)
        model = module.Own(GPT2Config(n_embd=32, n_head=4), layer_idx=0)
        assert torch.equal(model.forward(x), x)
        heads = x.view(2, 3, 4, 8).transpose(1, 2)
        assert torch.equal(model._split_heads(x, 4, 8), heads)
        shaping = module.Shaping(OPTConfig(hidden_size=32, num_attention_heads=4), 0)
        assert torch.equal(shaping(x), heads)
        found = find_method(module.Own, "_split_heads")
        assert found is not None
        assert found[0] is HeadForms
        assert not issubclass(module.Keeping, HeadForms)
        assert not issubclass(module.Alone, HeadForms)
    finally:
        for name in [name for name in sys.modules if name.startswith("heirs_code")]:
            del sys.modules[name]


def test_its_place_is_that_of_what_it_computes() -> None:
    assert location(TURNING).startswith("attention_modules.py:")
    assert location(LlamaAttention).startswith("modeling_llama.py:")


def test_attention_with_more_than_four_projections_is_refused() -> None:
    with pytest.raises(OnboardError, match="with norms of its own"):
        turning(Qwen3Attention)(Qwen3Config(), 0)


def test_rope_that_is_scaled_is_refused() -> None:
    config = _config()
    config.rope_scaling = {"type": "linear", "factor": 2.0}
    with pytest.raises(OnboardError, match="RoPE that is scaled"):
        TURNING(config)
