"""Parts of a repository's model that its logits do not read, and constructors that copy weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _with_parts

Translate = Callable[..., tuple[Any, str, str]]

HEADS = """
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class Config(PretrainedConfig):
    def __init__(self, size=8, words=512, heads=2, **kwargs):
        self.size, self.words, self.heads = size, words, heads
        super().__init__(**kwargs)


class Heads(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(config.heads)])

    def forward(self, hidden, lm_head):
        found = []
        for index, head in enumerate(self.heads):
            match index:
                case 9:
                    index = 0
            hidden = head(hidden)
            found.append(lm_head(hidden))
        return hidden, found


class Toy(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.words, config.size)
        self.first = nn.Linear(config.size, config.size)
        self.lm_head = nn.Linear(config.size, config.words)
        self.heads = Heads(config)
        self._copy_weights()

    def _copy_weights(self):
        for head in self.heads.heads:
            with torch.no_grad():
                for name, weight in head.named_parameters():
                    for other, given in self.first.named_parameters():
                        if name == other:
                            weight.data.copy_(given.data)
                            break

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        hidden = self.first(self.embed(input_ids))
        logits = self.lm_head(hidden)
        hidden, more = self.heads(hidden, self.lm_head)
        return CausalLMOutput(logits=logits)
"""


def test_parts_that_logits_do_not_depend_on_are_not_translated(translate: Translate) -> None:
    state, init, forward = translate(HEADS, {"vocab_size": 512}, specialised=True)
    assert "self.heads" not in forward
    assert "self.heads = Heads(" in init
    assert "copy_" not in _with_parts(state)


def test_parts_that_logits_depend_on_have_to_be_translated(translate: Translate) -> None:
    text = HEADS.replace("logits=logits", "logits=logits + more[1] * 1e-6")
    with pytest.raises(Untranslatable, match="Match at"):
        translate(text, {"vocab_size": 512}, specialised=True)


def test_what_changes_weights_and_more_is_not_taken_for_first_values(translate: Translate) -> None:
    """It is written as it is."""
    text = HEADS.replace("            with torch.no_grad():", "            self.found = head")
    text = text.replace("                for name, weight", "            for name, weight")
    text = text.replace("                    for other", "                for other")
    text = text.replace("                        if name", "                    if name")
    text = text.replace("                            weight", "                        weight")
    text = text.replace("                            break", "                        break")
    _, init, _ = translate(text, {"vocab_size": 512}, specialised=True)
    assert "weight.copy_(given)" in init
