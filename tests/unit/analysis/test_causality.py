"""A token that changes the logits of those before it is found wherever it stands."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_attn_mask_utils import AttentionMaskConverter
from transformers.models.prophetnet.modeling_prophetnet import ProphetNetNgramSelfAttention

from onboard.analysis.analyze import analyze
from onboard.analysis.behaviour.apart import (
    NOT_CHANGED,
    change_by_later,
    check_attention,
    check_causality,
    check_mask,
    runs_fresh,
)
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.errors import NotCausalError, OnboardError
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.inputs.tiny_checkpoint import is_causal, make_checkpoint
from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

LENGTH = 9


class Peeking(nn.Module):
    """The logits of the token at `reader` take in a little of the token at `read`; others are of
    their own token.
    """

    def __init__(self, reader: int, read: int, share: float = 1e-3, seed: int = 0) -> None:
        super().__init__()
        self.reader, self.read, self.share = reader, read, share
        self.table = torch.randn(
            VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)
        )

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        logits = self.table[input_ids].clone()
        logits[:, self.reader] += self.share * self.table[input_ids[:, self.read]]
        return SimpleNamespace(logits=logits)


def test_any_token_that_reads_any_later_one_is_found() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    inputs = from_zero(prompt(0, length=LENGTH, seed=seed))
    for reader in range(LENGTH):
        for read in range(LENGTH):
            change = change_by_later(Peeking(reader, read, seed=seed), inputs)
            assert (change > NOT_CHANGED) is (read > reader), (reader, read, change)


class Masked(Peeking):
    """A mask that hides nothing takes the place of the causal one."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **_: Any) -> SimpleNamespace:
        if attention_mask is None:
            return SimpleNamespace(logits=self.table[input_ids])
        return super().forward(input_ids)


def test_a_mask_of_ones_is_as_good_as_none() -> None:
    check_mask(Peeking(3, 6))
    with pytest.raises(OnboardError, match="with an attention_mask of ones than with none"):
        check_mask(Masked(3, 6))


_SEEING = ATTENTION.replace('scores = scores.masked_fill(mask, float("-inf"))', "")
_NO_MASK = "return CausalLMOutputWithPast("
_PLAIN_MASK = f"assert attention_mask is None or attention_mask.dim() == 4\n        {_NO_MASK}"


@pytest.mark.parametrize(
    ("attention", "reason"),
    [(_SEEING, "NotCausalError"), (ATTENTION, "does not run: AssertionError")],
)
def test_of_code_that_takes_no_such_mask_and_looks_ahead_the_latter_is_said(
    tmp_path: Path, attention: str, reason: str
) -> None:
    folder = save_odd(tmp_path / "odd_masked", attention=attention)
    file = folder / "modeling_odd.py"
    file.write_text(file.read_text().replace(_NO_MASK, _PLAIN_MASK))
    assert reason in run_apart(GENERATE, [folder])["odd_masked"]["error"]


def test_code_that_leaves_out_what_eager_attention_has_is_refused() -> None:
    eager, usual = Peeking(30, 3), Peeking(30, 4)
    usual.config = SimpleNamespace(_attn_implementation="sdpa")  # type: ignore[assignment]

    def failing() -> nn.Module:
        raise ValueError("no sdpa")

    check_attention(eager, failing)
    check_attention(eager, lambda: eager)
    check_attention(eager, lambda: Peeking(3, 30))  # it sees later tokens
    with pytest.raises(OnboardError, match="other logits with sdpa attention, which users get"):
        check_attention(eager, lambda: usual)

    def capped() -> nn.Module:
        return nn.Linear(
            sdpa_attention_forward(eager, *torch.ones(3, 1, 2, 3, 4), None, softcap=3.0)
        )

    with pytest.raises(OnboardError, match="hands softcap to sdpa attention, which users get"):
        check_attention(eager, capped)


class Maskless(Peeking):
    """Looks ahead, as written-out attention does, where it is told that it needs no mask."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        asked = AttentionMaskConverter._ignore_causal_mask_sdpa
        assert asked(None, input_ids, past_key_values_length=0)
        return super().forward(input_ids, **kwargs)


def test_code_that_looks_ahead_without_the_mask_that_it_may_leave_out_is_refused() -> None:
    asked = AttentionMaskConverter._ignore_causal_mask_sdpa
    with pytest.raises(NotCausalError, match=r"not causal with .* users get: .*\"eager\""):
        check_attention(Peeking(30, 3), lambda: Maskless(3, 30))
    check_attention(Peeking(30, 3), lambda: Maskless(30, 3))
    with pytest.raises(NotCausalError, match="users get, nor with eager:") as of_neither:
        check_attention(Peeking(3, 30), lambda: Maskless(3, 30))  # in a text as long as this alone
    assert "attn_implementation" not in str(of_neither.value)
    assert AttentionMaskConverter._ignore_causal_mask_sdpa is asked


@pytest.mark.parametrize("share", [1e-3, 1e-5, float("nan")])
def test_who_looks_ahead_in_the_first_half_is_refused(share: float) -> None:
    check_causality(Peeking(6, 3))
    assert is_causal(Peeking(6, 3))
    with pytest.raises(
        NotCausalError,
        match="Peeking is not causal: a token changes the logits of tokens before it",
    ):
        check_causality(Peeking(3, 6, share))
    assert not is_causal(Peeking(3, 6, share))


def _bias_in_order(
    self: ProphetNetNgramSelfAttention, hidden: Tensor, scores: Tensor, _: Any, buckets: Tensor
) -> Tensor:
    """Return [batch, streams, heads, tokens, keys]: of each query's own numbers, those of its keys'
    buckets.
    """
    numbers = self.relative_pos_embeddings(hidden)  # hidden: [batch, tokens, streams, hidden]
    by_head = numbers.unflatten(-1, (self.num_buckets, self.num_attn_heads)).permute(0, 2, 4, 1, 3)
    return by_head.gather(-1, buckets.long()[:, None, None].expand_as(scores))


def test_prophetnet_as_transformers_reads_a_prompt_is_not_causal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers gathers the bias of the predicting streams from rows in the order of (token,
    stream, head) by buckets in the order of (stream, head, token): a query gets that of another
    token, head and stream. Which ones hangs on the length of the text; they lie in its first half.
    Gathered in order the same weights are causal.
    """
    made = make_checkpoint(Target(name="prophetnet", variant="varied"), tmp_path)
    assert made.is_causal is False
    assert made.why_not_causal.startswith("a token changes the logits of tokens before it")
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(
        NotCausalError, match="ProphetNetForCausalLM is not causal: a token changes the logits"
    ):
        analyze(config, model="x")
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not is_causal(model)
    monkeypatch.setattr(
        ProphetNetNgramSelfAttention, "get_predict_relative_pos_embeddings", _bias_in_order
    )
    assert is_causal(model)


class Keeping(nn.Module):
    """It keeps the first text's table of positions, and adds it to every text."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        if self.kept is None:
            self.kept = torch.arange(input_ids.shape[1])
        return SimpleNamespace(logits=input_ids + self.kept)


def test_a_model_that_fails_on_a_second_text_runs_made_anew() -> None:
    assert runs_fresh(Keeping, VOCABULARY)
    kept = Keeping()
    assert not runs_fresh(lambda: kept, VOCABULARY)


def test_a_model_that_fails_while_it_is_looked_at_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("of some\nsize")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(
        OnboardError, match=r"llama model does not run: RuntimeError: of some size$"
    ):
        analyze(config, model="toy")
