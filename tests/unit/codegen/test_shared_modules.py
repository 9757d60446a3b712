"""Modules that several layers of a repository's model have as one stay one."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from onboard.analysis.repository_classes import bring_up_to_date
from onboard.errors import OnboardError
from onboard.verify.blocks import check_shared
from tests.support.odd_code import GENERATE, run_apart, save_odd
from tests.unit.codegen.test_own_code import _made, _written

SHARED = """
class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    def __init__(self, config, scale):
        super().__init__()
        self.own = Scale(config.size)
        self.scale = scale

    def forward(self, x):
        return self.own(self.scale(x))


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        MAKE

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
ONE_PART = """scale = Scale(config.size)
        self.layers = nn.ModuleList([Layer(config, scale) for _ in range(config.count)])"""
ONE_LAYER = """layer = Layer(config, Scale(config.size))
        self.layers = nn.ModuleList([layer for _ in range(config.count)])"""
EACH = """self.layers = nn.ModuleList()
        for _ in range(config.count):
            scale = Scale(config.size)
            self.layers.append(Layer(config, scale))"""
AFTERWARDS = """self.layers = nn.ModuleList([Layer(config, Scale(config.size)) for _ in range(config.count)])
        for layer in self.layers[1:]:
            layer.scale = self.layers[0].scale"""


@pytest.mark.parametrize(
    ("make", "count"), [(ONE_PART, 4), (ONE_LAYER, 2), (EACH, 6), (AFTERWARDS, 4)]
)
def test_what_layers_share_is_made_once(
    translate: Callable[..., Any], make: str, count: int
) -> None:
    config = {"size": 4, "count": 3}
    text = SHARED.replace("MAKE", make)
    state, *_ = translate(text, config, specialised=True)
    classes = [_written(each) for each in state.translator.states.values()]
    ours, theirs = _made("\n\n\n".join(classes), config), _made(text, config)
    assert len(list(theirs.parameters())) == len(list(ours.parameters())) == count
    for one in theirs.parameters():
        nn.init.normal_(one)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 4)
    assert torch.equal(ours(x), theirs(x))
    check_shared(ours, theirs, theirs.state_dict().keys())


def test_a_model_with_several_weights_for_one_is_refused() -> None:
    theirs: Any = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    ours = copy.deepcopy(theirs)
    check_shared(ours, theirs, theirs.state_dict().keys())
    theirs[1] = theirs[0]
    with pytest.raises(
        OnboardError, match=r"1\.weight is 0\.weight in ModuleList, and a weight of"
    ):
        check_shared(ours, theirs, theirs.state_dict().keys())
    check_shared(ours, theirs, {"0.weight", "0.bias"})  # where checkpoints have no others


CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OneConfig(PretrainedConfig):
    model_type = "one_for_all"
    tie_word_embeddings = False

class OneLM(PreTrainedModel):
    config_class = OneConfig
    _tied_weights_keys = KEYS
    _keys_to_ignore_on_save = ["head.weight", "blocks.mask"]
    def __init__(self, config):
        super().__init__(config)
        block = nn.Linear(4, 4)
        self.words = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([block, block])
        self.head = nn.Linear(4, 8, bias=False)
        self.post_init()
    def forward(self, input_ids, **kwargs):
        return self.head(self.blocks[1](self.blocks[0](self.words(input_ids))))
"""


@pytest.mark.parametrize("keys", ["None", "['head.weight']", "{'head.weight': 'words.weight'}"])
def test_a_shared_module_is_saved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    module = ModuleType("repository_code_with_one_block")
    exec(CODE.replace("KEYS", keys), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own: Any = module
    config = {"model_type": "one_for_all"}
    facts = bring_up_to_date(module.__name__, own.OneConfig, own.OneLM, config)
    assert any("saved once: blocks.1.bias" in fact for fact in facts)
    assert any("leaves head.weight out of checkpoints" in fact for fact in facts)
    own.OneLM(own.OneConfig()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == {"words.weight", "blocks.0.weight", "blocks.0.bias", "head.weight"}


def test_what_a_constructor_ties_is_tied_whatever_the_config_says(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_tied")
    code, config = folder / "modeling_odd.py", folder / "config.json"
    made = "        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)\n"
    tie = "        self.lm_head.weight = self.model.embed.weight\n"
    assert code.read_text().count(made) == 1
    code.write_text(code.read_text().replace(made, made + tie))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    found = run_apart(GENERATE, [folder])["odd_tied"]
    assert found.get("error") is None
    assert found["worst"] < 1e-5
    assert f"\n{tie}" in found["text"], "it is under no condition"
