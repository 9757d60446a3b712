"""The judge agrees with a right root, and with no wrong one, whatever the tool said of it."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY
from transformers import AutoConfig

from onboard.analysis.tiny import build_small
from onboard.content import CONTENT_ROOT
from onboard.graph.cached_sequence import CachedSequenceInterface
from onboard.workflow.sweep.judge import draw_prompts, judge, next_logits, relative_error
from onboard.workflow.sweep.verdict import LIMIT, NEW_TOKENS

MODEL = Path("models", "modeling_llama.py")
Edit = Callable[[str, str], Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = AutoConfig.for_model("llama", **{**TINY, "max_position_embeddings": 180, "pad_token_id": 0})
    folder = tmp_path / "checkpoint"
    build_small(config, secrets.randbelow(2**31)).save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """Return a root whose model file is the committed one, with an edit."""

    def edit(old: str, new: str) -> Path:
        text = (CONTENT_ROOT / MODEL).read_text(encoding="utf-8")
        assert old in text
        path = tmp_path / "root" / MODEL
        path.parent.mkdir(parents=True)
        path.write_text(text.replace(old, new), encoding="utf-8")
        return tmp_path / "root"

    return edit


def test_the_judge_agrees_with_what_is_right(checkpoint: Path, edited: Edit) -> None:
    verdict = judge(checkpoint, edited("", ""))
    print(f"seed {verdict.seed}")
    assert verdict.agrees, verdict.reason
    assert verdict.lengths == sorted(set(verdict.lengths))
    assert 100 < verdict.lengths[-1] <= 180 - NEW_TOKENS
    assert verdict.tokens > len(verdict.lengths) * NEW_TOKENS
    assert 0 < (verdict.prefill_error or 0) <= LIMIT
    assert 0 < (verdict.decode_error or 0) <= LIMIT


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        pytest.param("self.head_dim**-0.5", "1.5 * self.head_dim**-0.5", "logits of prompts differ", id="scale"),
        pytest.param(
            "return self.norm(hidden_states)", "return 1.01 * self.norm(hidden_states)", "logits of", id="norm"
        ),
        pytest.param("return self.norm(hidden_states)", "return self.norm(hidden_states) / 0", "not finite", id="NaN"),
    ],
)
def test_a_wrong_model_file_gets_no_agreement(old: str, new: str, reason: str, checkpoint: Path, edited: Edit) -> None:
    verdict = judge(checkpoint, edited(old, new))
    assert not verdict.agrees
    assert reason in verdict.reason


def test_a_fault_in_decode_alone_gets_no_agreement(
    checkpoint: Path, edited: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = CachedSequenceInterface.next_tokens

    def off(self: CachedSequenceInterface, gm: Any) -> Any:
        """Make what was kept of the first page wrong before each step that only decodes."""
        if int(self.info.inputs["batch_info_host"][2]) == 1:
            for cache in self.caches.values():
                cache[1] *= 1.001
        return own(self, gm)

    monkeypatch.setattr(CachedSequenceInterface, "next_tokens", off)
    verdict = judge(checkpoint, edited("", ""))
    assert verdict.prefill_error is not None
    assert verdict.prefill_error <= LIMIT
    assert not verdict.agrees
    assert not verdict.error
    assert verdict.decode_error is not None
    assert verdict.decode_error > LIMIT


def test_prompts_are_other_ones_each_time_and_fit() -> None:
    vocabulary = [5, 6, 9]
    drawn = [draw_prompts(400, vocabulary, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {token for prompt in drawn[0] for token in prompt} == set(vocabulary)
    assert all(1 <= len(prompt) <= 300 for prompt in drawn[0])
    assert [len(prompt) for prompt in draw_prompts(NEW_TOKENS + 3, vocabulary, 3)][0] == 1
    assert max(len(prompt) for prompt in draw_prompts(NEW_TOKENS + 3, vocabulary, 3)) <= 3


def test_an_error_is_relative_and_never_lost() -> None:
    theirs = torch.tensor([[3.0, 4.0, -math.inf], [0.0, 5.0, -3e38]])
    assert relative_error(theirs.clone(), theirs) == 0
    off = theirs + torch.tensor([[0.0, 0.05, 0.0]])
    assert relative_error(off, theirs) == pytest.approx((2 * 0.05**2 / 4 / (50 / 4)) ** 0.5, rel=1e-5)
    for wrong in (theirs[:1], theirs.clamp_min(-9), torch.full_like(theirs, math.nan)):
        assert not relative_error(wrong, theirs) <= LIMIT


class Reader(torch.nn.Module):
    """A model whose logits of every token are of the text's length, in part."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = torch.nn.functional.one_hot(input_ids, 8).float().cumsum(1) + self.share * input_ids.shape[1]
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_where_the_length_matters_each_prefix_is_read_by_itself(share: float) -> None:
    model, prompt, tokens = Reader(share), [1, 2, 3], [4, 5]
    own = model(torch.tensor([prompt]), False).logits[0]
    rows = next_logits(model, prompt, tokens, own)
    alone = [model(torch.tensor([[*prompt, *tokens[:count]]]), False).logits[0, -1] for count in range(2)]
    assert torch.equal(rows, torch.stack(alone))


def test_no_root_is_no_agreement(checkpoint: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkpoint)
    verdict = judge(checkpoint, tmp_path)
    assert not verdict.agrees
    assert verdict.error
