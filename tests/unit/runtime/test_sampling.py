from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from onboard.cache.next_token import LatestTokens
from onboard.cache.step_buffer import CHOICE_NAMES, ROW_NAMES
from onboard.errors import UsageError
from onboard.ops.sampling.sampling import NOT_A_TOKEN, choose_tokens, uniforms
from onboard.runtime.logprobs import logprobs
from onboard.runtime.sampling_params import SamplingParams, stream_key

VOCABULARY = 11


def _rows(params: list[SamplingParams]) -> list[torch.Tensor]:
    return list(torch.tensor([each.row() for each in params], dtype=torch.float32).T)


def _choose(logits: torch.Tensor, params: list[SamplingParams], uniform: torch.Tensor) -> list[int]:
    return choose_tokens(logits, *_rows(params), uniform).tolist()


def _uniform(rows: int) -> torch.Tensor:
    return torch.rand(rows, dtype=torch.float64)


def _frequencies(logits: torch.Tensor, params: SamplingParams, draws: int = 20_000) -> np.ndarray:
    keys = np.full(draws, stream_key(params, 0), dtype=np.uint64)
    uniform = torch.from_numpy(uniforms(keys, np.arange(draws)))
    chosen = _choose(logits.expand(draws, -1), [params] * draws, uniform)
    return np.bincount(chosen, minlength=len(logits)) / draws


def _expected(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Return the distribution, token by token: min-p, then top-k, then top-p."""
    weights = np.exp(logits.double().numpy() / params.temperature)
    weights /= weights.sum()
    weights[weights < params.min_p * weights.max()] = 0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    total = 0.0
    for rank, token in enumerate(order):
        if rank and total >= params.top_p:
            weights[token] = 0
        total += weights[token]
    return weights / weights.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.4},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_tokens_are_drawn_from_the_documented_distribution(options: dict[str, float]) -> None:
    logits = torch.randn(VOCABULARY) * 1.5
    params = SamplingParams(**options)
    found, expected = _frequencies(logits, params), _expected(logits, params)
    assert not found[expected == 0].any()
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"top_p": 0.5}, 2), ({"top_p": 0.75}, 3), ({"top_k": 2}, 2), ({"min_p": 1.0}, 4)],
)
def test_of_equals_on_the_border_the_first_are_kept(options: dict[str, float], kept: int) -> None:
    """Each of four has a quarter: with two of them half is reached, and the third is one too
    many.
    """
    uniform = torch.arange(100, dtype=torch.float64) / 100
    chosen = _choose(torch.zeros(100, 4), [SamplingParams(**options)] * 100, uniform)
    assert sorted(set(chosen)) == list(range(kept))


def test_the_largest_uniform_number_takes_the_last_token_that_counts() -> None:
    """Whatever the sum of the weights is, to which the number times it must not be rounded."""
    logits = torch.randn(2000, VOCABULARY)
    logits[:, -1] = -torch.inf
    uniform = torch.full((2000,), 1 - 2.0**-53, dtype=torch.float64)
    assert set(_choose(logits, [SamplingParams()] * 2000, uniform)) == {VOCABULARY - 2}


def test_greedy_is_the_first_of_the_likeliest() -> None:
    logits = torch.randn(5, VOCABULARY)
    logits[2, 3] = logits[2, 7] = 9.0
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1)
    assert _choose(logits, [params] * 5, _uniform(5)) == logits.argmax(-1).tolist()
    assert _choose(logits, [params] * 5, _uniform(5))[2] == 3


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_row_is_chosen_alike_beside_any_others(options: dict[str, Any]) -> None:
    logits, uniform, params = torch.randn(20, VOCABULARY), _uniform(20), SamplingParams(**options)
    alone = [_choose(logits[i : i + 1], [params], uniform[i : i + 1])[0] for i in range(20)]
    others = [
        SamplingParams(top_k=2),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=3.0, min_p=0.1),
    ]
    mixed = []
    for i in range(20):
        batch = torch.cat(
            [torch.randn(2, VOCABULARY), logits[i : i + 1], torch.randn(1, VOCABULARY)]
        )
        numbers = torch.cat([_uniform(2), uniform[i : i + 1], _uniform(1)])
        mixed.append(_choose(batch, [*others[:2], params, others[2]], numbers)[2])
    assert alone == mixed
    assert len(set(alone)) > 1


def test_the_host_says_what_no_row_needs() -> None:
    logits, uniform = torch.randn(6, VOCABULARY), _uniform(6)
    plain = _rows([SamplingParams(temperature=0.7)] * 6)
    assert torch.equal(
        choose_tokens(logits, *plain, uniform),
        choose_tokens(logits, *plain, uniform, filtered=False),
    )
    greedy = _rows([SamplingParams(temperature=0.0)] * 6)
    assert torch.equal(
        choose_tokens(logits, *greedy, uniform),
        choose_tokens(logits, *greedy, uniform, drawn=False),
    )


def test_keys_follow_the_seed_and_the_output() -> None:
    params = SamplingParams(seed=3)
    keys = {stream_key(params, 0), stream_key(params, 1), stream_key(SamplingParams(seed=4), 0)}
    assert len(keys) == 3
    assert stream_key(params, 0) in keys
    assert stream_key(SamplingParams(), 0) != stream_key(SamplingParams(), 0)
    assert all(0 <= key < 2**64 for key in keys)


def test_numbers_are_those_that_others_compute() -> None:
    """The first outputs of SplitMix64 from the state 1234567, as published (rosettacode.org,
    "Splitmix64").
    """
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    numbers = uniforms(np.full(4, 1234567, dtype=np.uint64), np.arange(1, 5))
    assert numbers.tolist() == [(number >> 11) / 2**53 for number in published]


def test_uniform_numbers_depend_on_key_and_place_alone() -> None:
    keys = (
        np.random.default_rng(random.getrandbits(64)).integers(2**63, size=50_000).astype(np.uint64)
    )
    places = np.arange(50_000) % 97
    numbers = uniforms(keys, places)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    np.testing.assert_allclose([numbers.mean(), numbers.var()], [1 / 2, 1 / 12], atol=0.01)
    of_one_key = uniforms(np.full(50_000, keys[0]), np.arange(50_000))
    np.testing.assert_allclose(np.histogram(of_one_key, 10, (0, 1))[0] / 5000, 1, atol=0.1)
    assert abs(np.corrcoef(of_one_key[1:], of_one_key[:-1])[0, 1]) < 0.03
    assert uniforms(keys[7:8], places[7:8])[0] == numbers[7]


def test_a_temperature_too_low_to_divide_by_is_greedy() -> None:
    logits = torch.randn(6, VOCABULARY)
    for temperature in (1e-6, 1e-40, 5e-324):
        for options in ({}, {"top_k": 3}):
            params = SamplingParams(temperature=temperature, **options)
            assert _choose(logits, [params] * 6, _uniform(6)) == logits.argmax(-1).tolist()


def test_the_lowest_temperature_is_one() -> None:
    assert SamplingParams(temperature=1e-5).row()[0] == 1e-5
    assert SamplingParams(temperature=float(np.nextafter(1e-5, 0))).row()[0] == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}])
def test_logits_that_are_not_finite_choose_no_token(bad: float, options: dict[str, float]) -> None:
    logits = torch.randn(3, VOCABULARY)
    logits[1, 4] = bad
    chosen = _choose(logits, [SamplingParams(**options)] * 3, _uniform(3))
    assert [token == NOT_A_TOKEN for token in chosen] == [False, True, False]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((200, VOCABULARY), -torch.inf)
    logits[:, 2], logits[:, 7] = 0.0, 1.0
    for options in ({}, {"top_p": 0.99}):
        assert {*_choose(logits, [SamplingParams(**options)] * 200, _uniform(200))} == {2, 7}


def test_what_the_device_alone_knows_is_put_in_its_place() -> None:
    latest = LatestTokens(6, torch.device("cpu"))
    latest.by_slot[:] = torch.tensor([0, 11, 12, 13, 14, 15])
    assert latest.fill(torch.tensor([[7, -2, 0, -5]])).tolist() == [[7, 12, 0, 15]]


def test_what_is_no_token_is_not_looked_up_by_the_next_step() -> None:
    latest = LatestTokens(3, torch.device("cpu"))
    latest.by_slot[:] = 7
    args = dict(
        zip(CHOICE_NAMES, [*_rows([SamplingParams(temperature=0)]), _uniform(1)], strict=True)
    )
    args |= dict(zip(ROW_NAMES, (torch.tensor([2]), torch.tensor([5])), strict=True))
    chosen = latest.choose(
        torch.full((1, VOCABULARY), torch.nan), args, drawn=False, filtered=False
    )
    assert chosen.tolist() == [NOT_A_TOKEN]
    assert latest.fill(torch.tensor([[-2]])).tolist() == [[0]]


def test_logprobs_are_of_the_unscaled_logits() -> None:
    logits = torch.randn(1, VOCABULARY)
    expected = logits[0].double().log_softmax(-1)
    likely, rare = int(expected.argmax()), int(expected.argmin())
    found = logprobs(logits[:1], [likely], 2)[0]
    assert list(found) == expected.topk(2).indices.tolist()
    assert found[likely] == pytest.approx(float(expected.max()), abs=1e-5)
    assert list(logprobs(logits[:1], [rare], 1)[0]) == [rare, likely]


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean 'temperature'"):
        SamplingParams(temperatur=1)
    for bad in ({"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"stop": ""}, {"min_p": 2}):
        with pytest.raises(UsageError):
            SamplingParams(**bad)
    assert SamplingParams(stop="x").stop == ["x"]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.999}])
def test_tokens_that_float32_would_lose_beside_the_likeliest_count(
    options: dict[str, float],
) -> None:
    """Each of a million has a billionth of its weight, and together a thousandth."""
    logits = torch.full((1, 1_000_001), -20.723)
    logits[0, 0] = 0.0
    weights = np.exp(logits[0].double().numpy())
    kept = 1.0 if not options else float(np.float32(options["top_p"]))
    cumulated = weights.cumsum()
    last = np.searchsorted(cumulated, kept * cumulated[-1])
    [found] = _choose(
        logits, [SamplingParams(**options)], torch.full((1,), 1 - 2.0**-53, dtype=torch.float64)
    )
    assert abs(found - int(last)) <= 2
