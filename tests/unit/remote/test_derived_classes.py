"""Code that derives its classes from transformers' own, and tells its layers apart by their number."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral

from onboard.analysis.source import find_method
from onboard.hf.old import flash_by_name, names
from onboard.hf.old.gone import Gone
from onboard.hf.old.rotary_forms import take_device
from tests.support.warm import run_program


class _Derived(llama.LlamaDecoderLayer):
    """Has a forward around the one that it inherits, from transformers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)


class _Own(llama.LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        return hidden_states


def test_a_method_is_found_where_it_is_written() -> None:
    for cls, owner in ((_Derived, llama.LlamaDecoderLayer), (_Own, _Own)):
        found = find_method(cls, "forward")
        assert found is not None
        assert found[0] is owner
    assert find_method(_Derived, "nothing") is None


def test_tables_of_attention_classes_have_the_one_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LLAMA_ATTENTION_CLASSES", "LlamaSdpaAttention", "LlamaFlashAttention2", "Llama2"):
        monkeypatch.delattr(llama, name, raising=False)
    asked = ["LLAMA_ATTENTION_CLASSES", "LlamaSdpaAttention", "LlamaFlashAttention2", "Llama2"]
    found: Any = llama
    try:
        names.provide("transformers.models.llama.modeling_llama", asked)
        assert set(found.LLAMA_ATTENTION_CLASSES) == {"eager", "sdpa", "flash_attention_2"}
        assert set(found.LLAMA_ATTENTION_CLASSES.values()) == {llama.LlamaAttention}
        assert found.LlamaSdpaAttention is found.LlamaFlashAttention2 is llama.LlamaAttention
        assert isinstance(found.Llama2, Gone)
    finally:
        for name in asked:
            delattr(llama, name)


def test_rotary_classes_take_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "compute_default_rope_parameters"
    cls: Any = mistral.MistralRotaryEmbedding
    monkeypatch.setattr(cls, key, staticmethod(getattr(cls, key)))
    config = LlamaConfig(hidden_size=32, num_attention_heads=2)
    expected = getattr(cls, key)(config)
    facts = take_device(cls)
    for arguments in ((config,), (config, None), (config, "cpu", 9)):
        table, factor = getattr(cls, key)(*arguments)
        assert torch.equal(table, expected[0])
        assert factor == expected[1]
    assert len(facts) == 1
    assert not take_device(cls)
    assert not take_device(llama.LlamaMLP)


def test_flash_attention_by_name_is_allowed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ValueError("X does not support Flash Attention 2 yet. Please request")
    assert flash_by_name.is_refused(asked)
    assert not flash_by_name.is_refused(ValueError("X does not support SDPA"))
    name = "_check_and_adjust_attn_implementation"
    check = getattr(PreTrainedModel, name)

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return check(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, name, checked)
    assert not flash_by_name.is_refused(asked)


NUMBERED = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class C(PretrainedConfig):
    model_type = "numbered"

    def __init__(self, hidden_size=32, num_hidden_layers=9, group_size=4, vocab_size=64, **kwargs):
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.group_size, self.vocab_size = group_size, vocab_size
        super().__init__(**kwargs)


class Wide(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, x):
        return x + self.proj(x).relu()


class Narrow(Wide):
    def forward(self, x):
        return x + self.proj(x).tanh()


class M(PreTrainedModel):
    config_class = C

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        whole = config.num_hidden_layers // config.group_size * config.group_size
        self.layers = nn.ModuleList(
            (Wide if (i + 1) % config.group_size == 0 or i >= whole else Narrow)(config.hidden_size)
            for i in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.head(x))
"""
BUILT = """
import json, sys
from pathlib import Path
from onboard.analysis.repository import install
from onboard.analysis.tiny.loaded_config import (load_config)
from onboard.analysis.tiny.tiny_model import (build_tiny)
for folder in map(Path, sys.argv[1:]):
    config = json.loads((folder / "config.json").read_text())
    facts = install(folder, config)
    model = build_tiny(load_config(config))
    print(*(type(layer).__name__ for layer in model.layers))
    print(*(type(layer).__name__ for layer in build_tiny(load_config(config)).layers))
    print(*facts)
"""


def test_a_small_model_has_every_class_of_layers_and_as_many_as_its_code_needs(
    tmp_path: Path,
) -> None:
    """The second also needs positions, and gets them."""
    needing = NUMBERED.replace('"numbered"', '"needing"').replace(
        "x = self.words(input_ids)",
        "x = self.layers[5](self.words(input_ids) + position_ids[..., None])",
    )
    folders = [_saved(tmp_path, "numbered", NUMBERED), _saved(tmp_path, "needing", needing)]
    printed = run_program(BUILT, *folders)
    first, again, said, longer, longer_again, said_of_it = printed.splitlines()
    assert set(first.split()) == {"Narrow", "Wide"}
    assert first == again
    assert "position_ids" not in said
    assert len(longer.split()) == 6
    assert longer == longer_again
    assert "fails without position_ids" in said_of_it


def _saved(root: Path, model_type: str, code: str) -> Path:
    folder = root / model_type
    folder.mkdir()
    (folder / "modeling_n.py").write_text(code)
    said = {
        "model_type": model_type,
        "architectures": ["M"],
        "auto_map": {"AutoConfig": "modeling_n.C", "AutoModelForCausalLM": "modeling_n.M"},
        "group_size": 4,
        "num_hidden_layers": 9,
        "hidden_size": 32,
        "vocab_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(said))
    return folder
