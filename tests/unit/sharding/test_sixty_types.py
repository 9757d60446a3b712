"""Sixty model types on two ranks: logits and greedy tokens of transformers' own model.

The ranks are threads of this process, and each type is exported once. A run takes some of them, one of
all tests every one. The shipped families have
their model files, the others transformers' modules (mode hf).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from onboard.config import Mode
from onboard.graph.sharding.exchange import Exchange
from onboard.testing.divided import divide
from onboard.testing.prompts import fresh_seed, random_prompt
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME, TIE
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.inputs.tiny_checkpoint import make_checkpoint
from tests.support.drawing import some_of
from tests.support.sharding.zoo import FAMILIES, ROOT, save_family, suite_of

# Types whose own code can be exported at a text of any length
OWN_CODE = (
    *("aria_text", "bart", "blenderbot", "ctrl", "dots1", "helium", "hunyuan_v1_dense"),
    *("jais2", "ministral", "olmo3", "pegasus", "persimmon", "phimoe", "vaultgemma"),
)
ALWAYS = ("gpt_oss", "llama", "mixtral", "qwen3_next")
Prompt = Mapping[str, torch.Tensor]


def _assert_same(
    folder: Path, model: nn.Module, prompts: list[Prompt], mode: Mode = "graph"
) -> None:
    """Two ranks have divided weights and sums, and the logits and greedy tokens of `model`."""
    ranks = divide(folder, ROOT, mode=mode)
    assert (ranks.world_size, ranks.note) == (2, "")
    assert all(count > 0 for count in ranks.matches("apply_sharding_hints"))
    for prompt in prompts:
        mask = torch.ones_like(prompt["input_ids"])
        with torch.no_grad():
            expected = model(**prompt, attention_mask=mask, use_cache=False).logits
        for logits in ranks.logits(prompt):
            assert rmse_ratio(logits, expected) < SAME
            chosen = expected.gather(-1, logits.argmax(dim=-1, keepdim=True))
            gap = expected.amax(dim=-1, keepdim=True) - chosen
            assert bool((gap <= TIE * SAME * expected.std(dim=-1, keepdim=True)).all())


@pytest.mark.parametrize("family", some_of(FAMILIES, ALWAYS, by_chance=10))
def test_two_ranks_have_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    suite, seed = suite_of(family), fresh_seed()
    folder = save_family(tmp_path, family, seed)
    model = suite.reference.from_pretrained(folder, attn_implementation="eager")
    prompts: Any = [suite.prompt(2, 24, seed, "cpu", start) for start in suite.starts]
    _assert_same(folder, model, prompts)


@pytest.mark.parametrize("kind", some_of(OWN_CODE, always=(), by_chance=4))
def test_two_ranks_divide_transformers_own_code(tmp_path: Path, kind: str) -> None:
    seed = fresh_seed()
    make_checkpoint(Target(name=kind), tmp_path, seed)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    words = model.config.get_text_config(decoder=True).vocab_size
    prompt = random_prompt(words, 2, 24, seed, 0, "cpu", counted=True)
    _assert_same(tmp_path, model, [prompt], "hf")


def test_they_are_sixty() -> None:
    assert len({*FAMILIES, *OWN_CODE}) >= 60


def test_a_sum_that_is_left_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "reduce", lambda self, node, *_: node)
    with pytest.raises(AssertionError, match=r"rmse_ratio"):
        test_two_ranks_have_the_logits_of_transformers(tmp_path, "mixtral")
