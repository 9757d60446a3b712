"""Texts on which rounding decides a router's choice are drawn again, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from onboard.testing.close_choices import DRAWS, CloseChoiceError, close_choices, on_clear_texts
from onboard.testing.compare import MEASUREMENTS, NOTES, assert_rmse_close
from onboard.testing.models import hf_causal_lm
from onboard.testing.prompts import fresh_seed
from onboard.testing.suite import EquivalenceSuite, Pair

CONFIG = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=6,
)


class _Chooser(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        if self.how == "topk":
            return scores.topk(2).indices
        if self.how == "smallest":
            return torch.topk(scores, 2, dim=-1, largest=False).indices
        return scores.argmax(dim=-1) if self.how == "argmax" else scores.max(dim=-1).indices


@pytest.mark.parametrize(
    ("how", "place"), [("topk", 1), ("smallest", 3), ("argmax", 0), ("max", 0)]
)
@pytest.mark.parametrize(("gap", "close"), [(1e-6, True), (0.0, True), (1e-3, False)])
def test_a_choice_is_close_where_its_last_and_the_next_score_are(
    how: str, place: int, gap: float, close: bool
) -> None:
    torch.manual_seed(seed := fresh_seed())
    order = torch.rand(8, 6).argsort(dim=1)
    scores = torch.tensor([2.0, 1.8, 1.6, 1.3, 1.1, 0.9]).repeat(8, 1)
    scores[3, place + 1] = scores[3, place] - gap
    mixed = torch.empty_like(scores).scatter_(1, order, scores)
    assert close_choices(_Chooser(how), mixed) == int(close), seed


def test_scores_that_are_masked_and_choices_of_all_are_not_close() -> None:
    scores = torch.tensor([[1.0, -torch.inf, -torch.inf, 0.5]])
    assert close_choices(_Chooser("topk"), scores) == 0
    assert close_choices(_Chooser("topk"), scores[:, 1:3]) == 0, "both are taken"
    assert close_choices(_Chooser("topk"), scores[:, :3]) == 0


def _pair(seed: int) -> Pair:
    class Suite(EquivalenceSuite):
        model_file, reference = Path("modeling_mixtral.py"), MixtralForCausalLM

    expected = hf_causal_lm(MixtralForCausalLM, CONFIG, seed)
    return Pair(expected, nn.Identity(), [], {}, "cpu", "float32", Suite)


def _tie(pair: Pair) -> None:
    """Have all experts of a layer have one score."""
    router = pair.expected.get_submodule("model.layers.1.mlp.gate")
    with torch.no_grad():
        router.weight.copy_(router.weight[:1].expand_as(router.weight))


def test_a_comparison_says_where_the_reference_itself_chose_by_rounding() -> None:
    torch.manual_seed(seed := fresh_seed())
    pair, text = _pair(seed), torch.randint(64, (1, 9))
    exact = pair.in_float64(input_ids=text, use_cache=False)
    wrong, right = exact().float() * 1.01, exact().float()
    _tie(pair)
    with pytest.raises(CloseChoiceError, match="rounding decides 9 of the reference's own choices"):
        pair.assert_close(wrong, right, "model", "x", exact)
    half = replace(pair, dtype="bfloat16", device="cuda")
    for other, known in ((pair, None), (half, exact)):
        with pytest.raises(AssertionError, match="x: rmse ratio") as caught:
            other.assert_close(2 * right, right, "model", "x", known)
        assert not isinstance(caught.value, CloseChoiceError)


def test_prompts_are_drawn_until_the_reference_has_no_close_choice() -> None:
    pair = _pair(seed := fresh_seed())

    class Suite(EquivalenceSuite):
        config = CONFIG

    NOTES.clear()
    assert Suite.clear_prompts(pair.expected, seed, "cpu")
    before = len(NOTES)
    _tie(pair)
    prompts = Suite.clear_prompts(pair.expected, seed, "cpu")
    assert len(NOTES) - before == DRAWS
    last = Suite.prompts(seed + DRAWS - 1, "cpu")
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(prompts, last, strict=True)
    )
    NOTES.clear()


def test_other_texts_are_drawn_where_rounding_decides_and_the_test_must_hold_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONBOARD_SEED", "17")
    seeds: list[int] = []

    @on_clear_texts
    def test(errors: dict[int, type[AssertionError]]) -> None:
        """What it says."""
        seeds.append(seed := fresh_seed())
        assert_rmse_close(torch.ones(2), torch.ones(2), 1e-5, f"of {seed}")
        if error := errors.get(seed):
            raise error("why")

    def run(errors: dict[int, type[AssertionError]]) -> list[int]:
        seeds.clear(), NOTES.clear(), MEASUREMENTS.clear()
        test(errors)
        return list(seeds)

    assert (test.__name__, test.__doc__) == ("test", "What it says.")
    assert run({}) == [17]
    assert not NOTES
    assert run({17: CloseChoiceError}) == [17, 18]
    assert NOTES == ["other texts were drawn: why"]
    assert [each.label for each in MEASUREMENTS] == ["of 18"], "the first draw's would be reported"
    for errors, tried in (
        ({17: AssertionError}, [17]),
        ({17: CloseChoiceError, 18: AssertionError}, [17, 18]),
        (dict.fromkeys((17, 18, 19), CloseChoiceError), [17, 18, 19]),
    ):
        with pytest.raises(AssertionError, match="why"):
            run(errors)
        assert seeds == tried
    assert fresh_seed() == 17
    NOTES.clear(), MEASUREMENTS.clear()
