"""Layers of transformers that give tuples, for code that takes them apart."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

from onboard.analysis.source import find_method
from onboard.errors import OnboardError
from onboard.hf.old import interfaces
from onboard.hf.old.layers.layer_outputs import give_tuples

_HEIR = """
import torch
from transformers.models.llama.modeling_llama import LlamaModel


class Heir(LlamaModel):
    def forward(self, input_ids, attention_mask=None):
        x = self.embed_tokens(input_ids)
        places = torch.arange(x.shape[1])
        mask = self._update_causal_mask(attention_mask, x, places, None, False)
        tables = self.rotary_emb(x, places[None])
        for layer in self.layers:
            TAKE
        return self.norm(x)
"""
_APART = """given = layer(x, attention_mask=mask, position_ids=places[None], past_key_value=None,
                output_attentions=False, use_cache=False, position_embeddings=tables)
            x = given[0]"""
_AT_ONCE = "x = layer(x, attention_mask=mask, position_embeddings=tables)[0]"
_INSIDE = """def run(block, x, **how):
                outputs = block(x, **how)
                x = outputs[0]
                return x
            x = run(layer, x, attention_mask=mask, position_embeddings=tables)"""
_PICKED = """pass
        for i in range(len(self.layers)):
            block, _ = self.layers[i], None
            x = block(x, attention_mask=mask, position_embeddings=tables)[0]"""
_INSIDE_WHOLE = _INSIDE.replace("x = outputs[0]", "x = outputs")
_WHOLE = "x = layer(x, attention_mask=mask, position_embeddings=tables)"


@pytest.fixture
def heirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a package with an heir's code, as often as it is called."""
    monkeypatch.syspath_prepend(tmp_path)
    kept = dict(vars(modeling_llama))
    monkeypatch.setattr(
        PreTrainedModel, "_update_causal_mask", interfaces._causal_mask, raising=False
    )

    def imported(take: str) -> ModuleType:
        (tmp_path / "heirs_of_layers").mkdir()
        (tmp_path / "heirs_of_layers" / "__init__.py").write_text("")
        (tmp_path / "heirs_of_layers" / "modeling.py").write_text(_HEIR.replace("TAKE", take))
        return importlib.import_module("heirs_of_layers.modeling")

    yield imported
    vars(modeling_llama).update(kept)
    for name in [name for name in sys.modules if name.startswith("heirs_of_layers")]:
        del sys.modules[name]


def _config(cls: Any = LlamaConfig, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return cls(**sizes, num_key_value_heads=2, num_hidden_layers=2, vocab_size=61, **more)


@pytest.mark.parametrize(
    ("take", "given"),
    [
        *((_APART, True), (_AT_ONCE, True), (_INSIDE, True), (_PICKED, True)),
        *((_WHOLE, False), (_INSIDE_WHOLE, False)),
    ],
)
def test_an_heir_that_takes_layers_apart_computes_what_it_did(
    take: str, given: bool, heirs: Any
) -> None:
    config, ids = _config(), torch.randint(0, 61, (2, 9))
    theirs = modeling_llama.LlamaModel(config).eval()
    expected = theirs(ids).last_hidden_state
    module = heirs(take)
    facts = give_tuples("heirs_of_layers")
    assert [fact.split(" ")[0] for fact in facts] == ["LlamaDecoderLayer"] * given
    assert give_tuples("heirs_of_layers") == []
    ours = module.Heir(config).eval()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(ids), expected)


_MADE = """
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = LlamaDecoderLayer(config, 0)

    def forward(self, x, tables):
        TAKE
"""


@pytest.mark.parametrize(
    ("take", "given"),
    [
        ("made = self.layer(x, position_embeddings=tables)\n        return made[0]", True),
        ("return self.layer(x, position_embeddings=tables)[0]", True),
        ("return self.layer(x, position_embeddings=tables)", False),
        ("return self.layer(x[None][0], position_embeddings=tables)", False),
    ],
)
def test_a_layer_that_a_constructor_makes_may_be_taken_apart(
    take: str, given: bool, heirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_HEIR", _MADE)
    module = heirs(take)
    facts = give_tuples("heirs_of_layers")
    assert [fact.split(" ")[0] for fact in facts] == ["LlamaDecoderLayer"] * given
    part, x = module.Part(_config()).eval(), torch.randn(2, 5, 32)
    tables = modeling_llama.LlamaRotaryEmbedding(_config())(x, torch.arange(5)[None])
    layer = modeling_llama.LlamaDecoderLayer(_config(), 0).eval()
    layer.load_state_dict(part.layer.state_dict())
    torch.testing.assert_close(part(x, tables), layer(x, position_embeddings=tables))


def test_such_a_layer_is_read_as_the_one_that_it_is(heirs: Any) -> None:
    heirs(_APART)
    give_tuples("heirs_of_layers")
    cls = modeling_llama.LlamaDecoderLayer
    found = find_method(cls, "forward")
    assert found is not None
    assert "super().forward" in ast.unparse(found[1])
    assert "position_embeddings" in inspect.signature(cls.forward).parameters


@pytest.mark.parametrize("window", [None, 4])
def test_the_mask_of_all_layers_has_the_windows_that_the_config_has(
    window: int | None, heirs: Any
) -> None:
    heirs(_APART)
    config = _config(MistralConfig, sliding_window=window)
    config._attn_implementation = "eager"
    model = modeling_llama.LlamaModel(_config())
    model.config = config
    x = torch.randn(1, 7, 32)
    mask = model._update_causal_mask(None, x, torch.arange(7), None, False)
    place = torch.arange(7)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or 7))
    assert torch.equal(mask[0, 0] == 0, seen)


def test_layers_of_several_kinds_are_not_given_one_mask(heirs: Any) -> None:
    heirs(_APART)
    model = modeling_llama.LlamaModel(_config())
    model.config = _config(Gemma2Config, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(OnboardError, match="_update_causal_mask, which is not here"):
        model._update_causal_mask(None, torch.randn(1, 7, 32), torch.arange(7), None, False)
