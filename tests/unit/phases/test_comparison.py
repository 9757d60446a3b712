"""The rules by which a run is compared with transformers, on logits made for the purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from onboard.errors import OnboardError
from onboard.modeling import ONE_CODEBOOK
from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.verify import comparison
from onboard.verify.comparison import (
    Comparison,
    Observed,
    Passage,
    compare,
    compare_with_itself,
    passages,
)
from onboard.verify.hf_logits import Reference
from onboard.verify.ways import DECODE, plans
from onboard.workflow import registry_results
from onboard.workflow.run_model.session import Session, _same_text

VOCABULARY = 50


@pytest.fixture
def generator() -> torch.Generator:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def _exact(generator: torch.Generator) -> torch.Tensor:
    """Logits [12, vocabulary], the best of each row by far."""
    logits = torch.randn(12, VOCABULARY, generator=generator)
    best = torch.randint(VOCABULARY, (12,), generator=generator)
    return logits.scatter(1, best[:, None], 8.0)


def _off(exact: torch.Tensor, error: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(exact.shape, generator=generator)
    return exact + noise * (error * exact.square().mean().sqrt() / noise.square().mean().sqrt())


def _compared(
    exact: torch.Tensor,
    ours: torch.Tensor,
    *,
    decoded: torch.Tensor | None = None,
    own: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    tokens = (exact[-5:].argmax(-1) if chosen is None else chosen).tolist()
    passage = Passage("prompt", list(range(len(exact))), tuple(tokens))
    observed = Observed([passage], [ours], [ours if decoded is None else decoded])
    return compare(observed, Reference([exact], None if own is None else [own], "whole"), dtype, [])


def test_float32_has_one_limit(generator: torch.Generator) -> None:
    exact = _exact(generator)
    assert _compared(exact, _off(exact, 0.9e-5, generator)).problem is None
    assert "prefill: the logits" in (_compared(exact, _off(exact, 1.1e-5, generator)).problem or "")
    decoded = _off(exact, 1.1e-5, generator)
    assert "cached decode: the logits" in (_compared(exact, exact, decoded=decoded).problem or "")


@pytest.mark.parametrize(
    ("ours", "theirs", "agrees"),
    [(2.3e-5, 2e-5, True), (2.5e-5, 2e-5, False), (1.5e-4, 2e-4, False), (3e-5, 1e-8, False)],
)
def test_beyond_the_limit_in_float32_the_reference_in_float64_decides(
    ours: float, theirs: float, agrees: bool, generator: torch.Generator
) -> None:
    true = _exact(generator).double()
    exact, mine = (_off(true, error, generator).float() for error in (theirs, ours))
    passage = Passage("prompt", list(range(len(true))), tuple(true[-5:].argmax(-1).tolist()))
    reference = Reference([exact], None, "whole", in_float64=lambda: [true])
    found = compare(Observed([passage], [mine], [exact]), reference, torch.float32, [])
    prefill, decoded = found.checks
    assert (found.problem is None) is agrees, found.problem
    assert prefill.rounding is not None
    assert prefill.rounding.ours == pytest.approx(ours, rel=1e-2)
    assert prefill.rounding.theirs == pytest.approx(theirs, rel=1e-2, abs=1e-7)
    assert decoded.rounding is None
    assert f"{prefill.rounding.ours:.2e}" in (found.problem or found.facts[0])
    assert len(found.facts) == agrees


@pytest.mark.parametrize("whose", ["float64's", "their float32's"])
def test_where_the_reference_rounds_more_the_tokens_are_those_of_its_float64(
    whose: str, generator: torch.Generator
) -> None:
    true = _exact(generator).double()
    exact = true.float()
    exact[-1] = exact[-1].roll(1)  # code that takes other experts where it rounds
    chosen = (true if whose == "float64's" else exact)[-5:].argmax(-1).tolist()
    passage = Passage("prompt", list(range(len(true))), tuple(chosen))
    ours = _off(true, 1e-6, generator).float()
    reference = Reference([exact], None, "whole", in_float64=lambda: [true])
    found = compare(Observed([passage], [ours], [ours]), reference, torch.float32, [])
    assert all(check.passes and not check.is_within for check in found.checks)
    assert (found.tokens.differing, found.problem is None) == (
        (0, True) if whose == "float64's" else (1, False)
    )


def test_float64_is_asked_where_it_decides_and_said_where_it_cannot_be_had(
    generator: torch.Generator,
) -> None:
    def refuse() -> list[torch.Tensor]:
        raise OnboardError("no memory")

    exact = _exact(generator)
    passage = Passage("prompt", list(range(len(exact))), tuple(exact[-5:].argmax(-1).tolist()))
    reference = Reference([exact], None, "whole", in_float64=refuse)
    found = [
        compare(Observed([passage], [ours], [ours]), reference, torch.float32, ["known"])
        for ours in (exact, _off(exact, 2e-5, generator))
    ]
    assert (found[0].problem, found[0].notes) == (None, ["known"])
    assert "error 2.00e-05, at most 1.00e-05)" in (found[1].problem or "")
    assert found[1].notes[1:] == ["it is not known whose rounding an error is: no memory"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_may_err_a_fifth_more_than_transformers(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    exact, theirs = _exact(generator), 2 * torch.finfo(dtype).eps
    own = _off(exact, theirs, generator)
    assert (
        _compared(exact, _off(exact, 1.19 * theirs, generator), own=own, dtype=dtype).problem
        is None
    )
    problem = _compared(exact, _off(exact, 1.23 * theirs, generator), own=own, dtype=dtype).problem
    assert f"transformers itself errs by {theirs:.2e}" in (problem or "")


def _torn(
    exact: torch.Tensor, usual: float, rows: list[int], generator: torch.Generator
) -> torch.Tensor:
    """Return logits that err as usual, but for some rows, which are about those of other tokens."""
    found = torch.stack([_off(row, usual, generator) for row in exact])
    for row in rows:
        found[row] = _off(exact[row], 0.8, generator)
    return found


def test_rows_that_rounding_tears_may_be_others_than_the_reference_has(
    generator: torch.Generator,
) -> None:
    exact = torch.cat([_exact(generator) for _ in range(4)])
    own, half = _torn(exact, 0.02, [3, 20], generator), {"dtype": torch.bfloat16}
    ours = _torn(exact, 0.02, [7, 31, 40, 44], generator)
    found = _compared(exact, ours, own=own, **half)
    assert found.problem is None
    assert [check.torn for check in found.checks] == [2, 2]
    assert "in 2 rows of transformers's own logits" in found.facts[0]

    for wrong in (
        _torn(exact, 0.03, [7, 31, 40, 44], generator),  # all its other rows err half as much again
        _torn(exact, 0.02, list(range(0, 48, 4)), generator),  # six times as many are torn
    ):
        problem = _compared(exact, wrong, own=own, **half).problem
        assert problem is not None
        assert "prefill: the logits are not those of transformers" in problem
    evenly = _off(exact, 0.1, generator)  # nothing of the reference's is torn
    assert _compared(exact, _torn(exact, 0.1, [3, 20], generator), own=evenly, **half).problem


def test_a_token_of_a_torn_row_counts_where_the_reference_has_none(
    generator: torch.Generator,
) -> None:
    exact = torch.cat([_exact(generator) for _ in range(4)])
    chosen = exact[-5:].argmax(-1)
    chosen[2] = exact[-3].argmin()
    last = len(exact) - 3
    own, ours = (_torn(exact, 0.02, rows, generator) for rows in ([3, last + 1], [7, last]))
    half = {"dtype": torch.bfloat16, "chosen": chosen}
    assert _compared(exact, ours, own=own, **half).tokens.differing == 0
    plain = _torn(exact, 0.02, [3, 5], generator)  # not in the rows that choose tokens
    assert _compared(exact, ours, own=plain, **half).tokens.differing == 1
    assert (
        _compared(exact, _torn(exact, 0.02, [7, 9], generator), own=own, **half).tokens.differing
        == 1
    )


@pytest.mark.parametrize("broken", ["ours", "decoded", "exact", "own"])
def test_what_is_no_number_is_within_no_limit(broken: str, generator: torch.Generator) -> None:
    exact = _exact(generator)
    logits = {name: exact.clone() for name in ("ours", "decoded", "exact", "own")}
    logits[broken][3, 7] = torch.nan
    assert (
        _compared(**logits, dtype=torch.bfloat16, chosen=exact[-5:].argmax(-1)).problem is not None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_zeros_are_said_to_prove_nothing(dtype: torch.dtype) -> None:
    zeros = torch.zeros(12, VOCABULARY)
    own = zeros if dtype == torch.bfloat16 else None
    problem = _compared(zeros, zeros, own=own, dtype=dtype).problem or ""
    assert "prefill: the logits of transformers are all zero" in problem
    assert "not a number" not in problem


def test_a_token_that_is_not_the_best_is_told_from_a_tie(generator: torch.Generator) -> None:
    exact = _exact(generator)
    chosen = exact[-5:].argmax(-1)
    other = chosen.clone()
    other[2] = (other[2] + 1) % VOCABULARY
    assert "1 of 5 tokens" in (_compared(exact, exact, chosen=other).problem or "")
    tied = exact.clone()
    tied[-3, other[2]] = tied[-3, chosen[2]] - 5e-5 * tied[-3].std()
    found = _compared(tied, tied, chosen=other)
    assert (found.problem, found.tokens.ties, found.tokens.differing) == (None, 1, 0)


def test_tokens_on_both_sides_of_a_table_are_given_what_chose_them() -> None:
    prompt, output, rope = list(range(5)), list(range(5, 20)), LengthDependentRope(8)
    [whole] = passages("prompt", prompt, output, None)
    assert (whole.ids, whole.chosen) == (list(range(19)), tuple(range(5, 20)))
    before, after = passages("prompt", prompt, output, rope)
    # 8 follows 8 tokens, by the short table
    assert (before.ids, before.chosen) == (
        list(range(8)),
        (5, 6, 7, 8),
    )
    assert (after.ids, after.chosen) == (list(range(19)), tuple(range(9, 20)))
    assert len(passages("prompt", prompt, output[:4], rope)) == 1
    assert len(passages("prompt", list(range(9)), output[4:], rope)) == 1


def test_of_a_long_passage_the_last_rows_and_some_before_are_compared() -> None:
    rows = Passage("long prompt", list(range(4000)), tuple(range(8))).asked.rows
    assert rows[-256:] == list(range(4000 - 256, 4000))
    assert len(rows) < 600
    assert max(b - a for a, b in zip(rows, rows[1:], strict=False)) == 15


def test_without_transformers_cached_decode_is_compared_with_our_own_prefill(
    generator: torch.Generator,
) -> None:
    ours = _exact(generator)
    passage = Passage("prompt", list(range(len(ours))), tuple(ours[-5:].argmax(-1).tolist()))
    found = compare_with_itself(Observed([passage], [ours], [ours]), torch.float32, "why")
    assert (found.problem, found.text.verdict, found.reference[:4]) == (None, "not judged", "none")
    assert found.notes == ["not compared with another implementation: why"]
    observed = Observed([passage], [ours], [_off(ours, 1e-4, generator)])
    assert "cached decode" in (compare_with_itself(observed, torch.float32, "why").problem or "")


@pytest.mark.parametrize(
    ("error", "says"), [(0.9e-5, None), (1.1e-5, "known prefix: the logits"), (torch.nan, "known")]
)
def test_a_prompt_that_is_asked_again_has_the_same_answer(
    error: float, says: str | None, generator: torch.Generator
) -> None:
    assert registry_results.KNOWN_PREFIX == comparison.KNOWN_PREFIX
    exact = _exact(generator)
    tokens = tuple(exact[-5:].argmax(-1).tolist())
    passages = [
        Passage(kind, list(range(len(exact))), tokens) for kind in ("prompt", "long prompt")
    ]  # type: ignore[arg-type]
    first = exact[-5:].log_softmax(-1)
    again = _off(first, error, generator)
    observed = Observed(passages, [exact, exact], [exact], again=(first, again))
    found = compare(observed, Reference([exact, exact], None, "whole"), torch.float32, [])
    assert (found.problem or "").startswith(says or "") is True
    assert (found.problem is None) is (says is None)
    assert (compare_with_itself(observed, torch.float32, "why").problem is None) is (says is None)
    assert observed.finite is (error == error)


def test_answers_are_compared_while_their_texts_are_one() -> None:
    def answer(*tokens: int) -> Any:
        steps = [{1: -0.2 - at, 0: -0.1 - at} for at in range(len(tokens))]
        return SimpleNamespace(token_ids=list(tokens), logprobs=steps)

    first, second = _same_text(answer(0, 1, 0, 0), answer(0, 0, 1, 0))
    assert first.tolist() == second.tolist() == torch.tensor([[-0.1, -0.2], [-1.1, -1.2]]).tolist()
    assert len(_same_text(answer(0, 1), answer(0, 1))[0]) == 2


@pytest.mark.parametrize("way", ["decode", "batched decode"])
@pytest.mark.parametrize("lengths", [(30, 5, 1), (30, 40, 50, 2), (9, 9, 1, 9)])
@pytest.mark.parametrize("most", [1, 2, 10, 1000, None])
def test_decode_reads_every_token_once_in_steps_that_hold_it(
    way: str, lengths: tuple[int, ...], most: int | None
) -> None:
    prompts = [[0] * length for length in lengths]
    steps = plans(prompts, most=most)[way]
    assert all(sum(part.end - part.start for part in step) > 0 for step in steps)
    if most is not None:
        assert max(sum(part.end - part.start for part in step) for step in steps) <= most
    if most is None and way == "batched decode":
        assert [len(step) for step in steps[:3]] == [1, 2, 3]
    for number, prompt in enumerate(prompts):
        parts = [part for step in steps for part in step if part.prompt == number]
        assert [at for part in parts for at in range(part.start, part.end)] == list(
            range(len(prompt))
        )
        assert all(part.end - part.start == 1 for part in parts[-min(DECODE, len(prompt) - 1) :])


def test_an_output_is_compared_up_to_a_token_that_is_no_text() -> None:
    factory = SimpleNamespace(config=PretrainedConfig(vocab_size=9, pad_token_id=0))
    context: Any = SimpleNamespace(factory=factory, codebooks=ONE_CODEBOOK)
    llm: Any = SimpleNamespace(engine=SimpleNamespace(rope=None))
    session = Session(llm, context, 0.0, [], [])
    [passage] = session._read("prompt", [1, 2], [3, 0, 5, 6])
    assert (passage.ids, passage.chosen) == ([1, 2, 3], (3, 0))
    assert session.notes == ["2 of 4 tokens after a prompt come behind one that is no text"]
    [passage] = session._read("prompt", [1, 2], [3, 5])
    assert (passage.ids, passage.chosen, len(session.notes)) == ([1, 2, 3], (3, 5), 1)
