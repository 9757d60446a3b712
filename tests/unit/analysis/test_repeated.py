"""A choice among equal keys is found out, and what merely depends on positions or experts is not
taken for one.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onboard.analysis.behaviour.repeated import repeated_tokens
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.testing import distinct_prompts, fresh_seed


class _Output:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class _Chosen(nn.Module):
    """The positions of the four tokens of the largest score among those so far; `ordered`: of equal
    ones the last.
    """

    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.ordered = ordered
        self.register_buffer("scores", torch.randperm(VOCABULARY).float())

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: object) -> _Output:
        length = input_ids.shape[1]
        scores = self.get_buffer("scores")[input_ids].unsqueeze(1).expand(-1, length, -1)
        places = torch.arange(length)
        scores = scores + 1e-3 * (places if self.ordered else (7 * places) % length)
        later = torch.ones(length, length).triu(1).bool()
        best = scores.masked_fill(later, -1.0).topk(4, dim=-1).indices
        seen = position_ids.float().unsqueeze(1).expand_as(scores).masked_fill(later, 0.0)
        return _Output(seen.gather(-1, best).sum(-1, keepdim=True))


@pytest.mark.parametrize("ordered", [False, True])
def test_an_arbitrary_choice_among_equal_keys_is_found_out(ordered: bool) -> None:
    found = repeated_tokens(_Chosen(ordered))
    assert (found.value if found else None) == (None if ordered else "arbitrary")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_other_models_treat_repeated_tokens_as_any(family: str) -> None:
    assert repeated_tokens(build_tiny(load_config({"model_type": family}))) is None


def test_distinct_prompts_have_each_token_once() -> None:
    prompts = distinct_prompts(20, [20, 1, 7], fresh_seed())
    assert [len(set(prompt)) for prompt in prompts] == [20, 1, 7]
