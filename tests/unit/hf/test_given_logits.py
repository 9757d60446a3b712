"""What forwards of repositories' own models give, as outputs of transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from onboard.errors import OnboardError
from onboard.hf.old.given_logits import given_by, giving_logits, last_logits

WORDS, WIDTH = 11, 6


def _model(give: Callable[[Any, torch.Tensor], Any]) -> nn.Module:
    """Return a causal model, a mean of all tokens up to each, that gives `give(head, hidden)`."""

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(vocab_size=WORDS)
            self.words = nn.Embedding(WORDS, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, input_ids: torch.Tensor) -> Any:
            return give(self.head, _hidden(self.words(input_ids)))

    Toy.forward = giving_logits(Toy.forward)  # type: ignore[method-assign]
    return Toy()


def _hidden(words: torch.Tensor) -> torch.Tensor:
    count = torch.arange(1, words.shape[1] + 1).view(1, -1, 1)
    return words.cumsum(1) / count


FORMS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], object]] = {
    "a tensor": (lambda head, x: head(x), ""),
    "a tuple": (lambda head, x: (head(x), None), 0),
    "a loss first": (lambda head, x: (x.sum(), head(x)), 1),
    "hidden states first": (lambda head, x: (x, head(x)), 1),
    "a dict": (lambda head, x: {"loss": None, "logits": head(x), "hidden": x}, "logits"),
    "an output first": (lambda head, x: (CausalLMOutput(logits=head(x)), {"hidden": x}), 0),
    "an output": (lambda head, x: CausalLMOutput(logits=head(x)), None),
}
LAST: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "[-1]": lambda head, x: (head(x[:, [-1], :]), None),
    "-1:": lambda head, x: CausalLMOutput(logits=head(x[:, -1:])),
    "-1": lambda head, x: head(x[:, -1, :]),
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_logits_are_found_in_whatever_is_given(form: str) -> None:
    give, place = FORMS[form]
    model, ids = _model(give), torch.randint(WORDS, (2, 5))
    expected = model.head(_hidden(model.words(ids)))
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert given_by(type(model)).place == place
    assert not given_by(type(model)).of_last
    assert bool([*given_by(type(model)).said("Toy")]) is (place is not None)


@pytest.mark.parametrize("form", LAST)
@torch.no_grad()
def test_logits_of_the_last_token_become_those_of_every_token(form: str) -> None:
    model, ids = _model(LAST[form]), torch.randint(WORDS, (2, 5))
    ends = [last_logits(model, ids[:, :end]) for end in range(1, 6)]
    assert torch.allclose(model(input_ids=ids).logits, torch.stack(ends, dim=1), atol=1e-6)
    assert given_by(type(model)).of_last
    assert torch.allclose(model(input_ids=ids[:, :1]).logits.view(2, -1), ends[0], atol=1e-6)


def test_several_tensors_that_may_be_logits_are_refused() -> None:
    model = _model(lambda head, x: (head(x), head(2 * x)))
    with pytest.raises(OnboardError, match="gives 2 tensors that may be logits"):
        model(input_ids=torch.randint(WORDS, (2, 5)))


def test_the_last_token_taken_in_another_way_is_refused() -> None:
    model = _model(lambda head, x: head(x.narrow(1, x.shape[1] - 1, 1)))
    with pytest.raises(OnboardError, match="of the last token alone, in a way that is not known"):
        model(input_ids=torch.randint(WORDS, (2, 5)))
