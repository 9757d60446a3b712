"""The judge agrees with a right root, and with no wrong one, whatever the tool said of it."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from onboard.analysis.tiny.tiny_model import build_small
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.content import CONTENT_ROOT
from onboard.verify.rounding.in_float64 import InFloat64
from onboard.verify.tolerances import SAME
from onboard.workflow.sweep.inputs.judge_prompts import draw_prompts, is_arbitrary, longest_read
from onboard.workflow.sweep.judge import judge, next_logits, relative_error
from onboard.workflow.sweep.verdict import NEW_TOKENS, Verdict
from tests.support.checkpoints import TINY

MODEL = Path("models", "modeling_llama.py")
Edit = Callable[[str, str], Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = AutoConfig.for_model(
        "llama", **{**TINY, "max_position_embeddings": 180, "pad_token_id": 0}
    )
    folder = tmp_path / "checkpoint"
    build_small(config, random.randrange(2**31)).save_pretrained(folder)  # type: ignore[operator]
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
    assert verdict.enough
    assert 0 < (verdict.prefill_error or 0) <= SAME
    assert 0 < (verdict.decode_error or 0) <= SAME


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        pytest.param(
            "self.head_dim**-0.5",
            "1.5 * self.head_dim**-0.5",
            "logits of prompts differ",
            id="scale",
        ),
        pytest.param(
            "return self.norm(hidden_states)",
            "return 1.01 * self.norm(hidden_states)",
            "logits of",
            id="norm",
        ),
        pytest.param(
            "return self.norm(hidden_states)",
            "return self.norm(hidden_states) / 0",
            "not finite",
            id="NaN",
        ),
    ],
)
def test_a_wrong_model_file_gets_no_agreement(
    old: str, new: str, reason: str, checkpoint: Path, edited: Edit
) -> None:
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
    assert verdict.prefill_error <= SAME
    assert not verdict.agrees
    assert not verdict.error
    assert verdict.decode_error is not None
    assert verdict.decode_error > SAME


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
    assert relative_error(off, theirs) == pytest.approx(
        (2 * 0.05**2 / 4 / (50 / 4)) ** 0.5, rel=1e-5
    )
    for wrong in (theirs[:1], theirs.clamp_min(-9), torch.full_like(theirs, math.nan)):
        assert not relative_error(wrong, theirs) <= SAME


class Reader(torch.nn.Module):
    """A model whose logits of every token are of the text's length, in part."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = (
            torch.nn.functional.one_hot(input_ids, 8).float().cumsum(1)
            + self.share * input_ids.shape[1]
        )
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_where_the_length_matters_each_prefix_is_read_by_itself(share: float) -> None:
    model, prompt, tokens = Reader(share), [1, 2, 3], [4, 5]
    own = model(torch.tensor([prompt]), False).logits[0]
    rows = next_logits(model, prompt, tokens, own)
    alone = [
        model(torch.tensor([[*prompt, *tokens[:count]]]), False).logits[0, -1] for count in range(2)
    ]
    assert torch.equal(rows, torch.stack(alone))


def test_no_root_is_no_agreement(checkpoint: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkpoint)
    verdict = judge(checkpoint, tmp_path)
    assert not verdict.agrees
    assert verdict.error


class Ranked(torch.nn.Module):
    """The positions of the four tokens of the best scores so far, of equals in an order that the
    length decides or not.

    Its table of positions has `most` rows.
    """

    def __init__(self, arbitrary: bool, most: int = 1000) -> None:
        super().__init__()
        self.arbitrary = arbitrary
        self.register_buffer("scores", torch.randperm(100).double())
        self.register_buffer("table", torch.arange(most).float())

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        length = input_ids.shape[1]
        places = torch.arange(length)
        order = (7 * places) % length if self.arbitrary else places
        scores = self.get_buffer("scores")[input_ids[0]] + 1e-3 * order / length
        scores = scores.expand(length, -1).masked_fill(
            torch.ones(length, length).triu(1).bool(), -1.0
        )
        best = scores.topk(min(4, length), dim=-1).indices
        seen = self.get_buffer("table")[torch.arange(length)][best] * scores.gather(-1, best).ge(0)
        return type("Output", (), {"logits": seen.sum(-1)[None, :, None] + 1.0})


@pytest.mark.parametrize("arbitrary", [True, False])
def test_what_a_model_does_with_equal_keys_is_asked_of_the_model(arbitrary: bool) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    assert is_arbitrary(Ranked(arbitrary), range(100), 60, seed) == arbitrary
    # The length counts, whatever the tokens
    assert not is_arbitrary(Reader(0.5), range(8), 60, seed)


class RankedAmongMany(Ranked):
    """Of few words the four best are all the same one, and then their order shows nowhere."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.arbitrary = len(set(input_ids[0].tolist())) > 10
        return super().forward(input_ids, use_cache)


def test_equal_keys_are_looked_for_among_many_words_and_few() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model = RankedAmongMany(True)
    # Of one text the four best may end between two words as well, in one of six or so
    assert any(is_arbitrary(model, range(100), 60, seed + more) for more in range(20))


def test_prompts_of_distinct_tokens_leave_others_to_choose_from() -> None:
    words = range(3 * NEW_TOKENS)
    drawn = [draw_prompts(400, words, seed, distinct=True) for seed in range(500)]
    assert all(len(set(prompt)) == len(prompt) for prompts in drawn for prompt in prompts)
    # Of a single one left the best and the least are the same: nothing is compared
    assert max(len(prompts[-1]) for prompts in drawn) + NEW_TOKENS - 1 == len(words) - 2
    assert min(len(prompts[-1]) for prompts in drawn) > 48


@pytest.mark.parametrize("most", [1, 77, 203])
def test_texts_are_as_long_as_transformers_can_read(most: int) -> None:
    model = Ranked(arbitrary=False, most=most)
    assert longest_read(model, 4000, token=3) == most
    assert longest_read(model, most - 1, token=3) == most - 1 or most == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "agrees"),
    [(2e-5, 2e-5, True), (2e-5, 1.5e-5, False), (2e-4, 3e-4, False), (math.nan, 2e-5, False)],
)
def test_beyond_the_limit_ours_may_round_as_transformers_does(
    ours: float, theirs: float, agrees: bool
) -> None:
    said = {
        "lengths": [3],
        "tokens": NEW_TOKENS,
        "largest_gap": 0.0,
        "decode_error": 1e-6,
        "prefill_error": 2e-5,
    }
    assert not Verdict.model_validate(said).agrees
    assert (
        Verdict.model_validate(
            {**said, "prefill_rounding": {"ours": ours, "theirs": theirs}}
        ).agrees
        == agrees
    )


class Rounded(torch.nn.Module):
    """Sums in float32, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(300, 5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.float() @ self.weight.to(torch.float32)) * torch.ones(5, dtype=torch.float32)


@torch.no_grad()
def test_in_float64_nothing_goes_back_to_float32() -> None:
    model = Rounded()
    rows, weight = torch.randn(7, 300, dtype=torch.float64), model.weight.double()
    exact = InFloat64(model)(rows)
    assert exact.dtype == torch.float64
    assert relative_error(exact, rows @ weight) < 1e-14
    assert torch.get_default_dtype() == torch.float32
