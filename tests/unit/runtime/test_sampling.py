import numpy as np
import pytest
import torch
from pydantic import ValidationError

from onboard.errors import NotFiniteError, UsageError
from onboard.runtime.sampling import SamplingParams, make_generator, sample

VOCABULARY = 11


def _frequencies(logits: torch.Tensor, params: SamplingParams, draws: int = 20_000) -> np.ndarray:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    choices = sample(logits.expand(draws, -1), [params] * draws, [generator] * draws)
    return np.bincount([choice.token for choice in choices], minlength=len(logits)) / draws


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


def test_greedy_is_argmax_and_draws_nothing() -> None:
    logits = torch.randn(5, VOCABULARY)
    generator = np.random.default_rng(0)
    choices = sample(logits, [SamplingParams(temperature=0.0, top_k=1, top_p=0.1)] * 5, [generator] * 5)
    assert [choice.token for choice in choices] == logits.argmax(-1).tolist()
    assert generator.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_seed_gives_the_same_tokens_beside_any_other_requests(options: dict[str, float]) -> None:
    logits = torch.randn(20, VOCABULARY)
    params = SamplingParams(seed=7, **options)
    alone_generator, mixed_generator = make_generator(params, 0), make_generator(params, 0)
    alone = [sample(row[None], [params], [alone_generator])[0].token for row in logits]
    others = [SamplingParams(top_k=2), SamplingParams(temperature=0.0), SamplingParams(temperature=3.0, min_p=0.1)]
    generators = [make_generator(each, 0) for each in others]
    mixed = []
    for row in logits:
        batch = torch.cat([torch.randn(2, VOCABULARY), row[None], torch.randn(1, VOCABULARY)])
        choices = sample(batch, [*others[:2], params, others[2]], [*generators[:2], mixed_generator, generators[2]])
        mixed.append(choices[2].token)
    assert alone == mixed
    assert len(set(alone)) > 1


def test_outputs_of_one_seeded_request_differ() -> None:
    params = SamplingParams(seed=3)
    first, second = (make_generator(params, index).random(8).tolist() for index in range(2))
    assert first != second


def test_a_temperature_too_low_to_divide_by_is_greedy() -> None:
    logits = torch.randn(6, VOCABULARY)
    for temperature in (1e-6, 1e-40, 5e-324):
        for options in ({}, {"top_k": 3}):
            params = SamplingParams(temperature=temperature, **options)
            choices = sample(logits, [params] * 6, [np.random.default_rng()] * 6)
            assert [choice.token for choice in choices] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}])
def test_logits_that_are_not_finite_choose_no_token(bad: float, options: dict[str, float]) -> None:
    logits = torch.randn(3, VOCABULARY)
    logits[1, 4] = bad
    with pytest.raises(NotFiniteError, match="logits are not finite"):
        sample(logits, [SamplingParams(**options)] * 3, [np.random.default_rng()] * 3)


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((200, VOCABULARY), -torch.inf)
    logits[:, 2], logits[:, 7] = 0.0, 1.0
    choices = sample(logits, [SamplingParams(top_p=0.99)] * 200, [np.random.default_rng()] * 200)
    assert {choice.token for choice in choices} <= {2, 7}


def test_logprobs_are_of_the_unscaled_logits() -> None:
    logits = torch.randn(1, VOCABULARY)
    [choice] = sample(logits, [SamplingParams(temperature=0.0, logprobs=2)], [np.random.default_rng()])
    expected = logits[0].double().log_softmax(-1)
    assert list(choice.logprobs) == expected.topk(2).indices.tolist()
    assert choice.logprobs[choice.token] == pytest.approx(float(expected.max()), abs=1e-5)


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean 'temperature'"):
        SamplingParams(temperatur=1)
    for bad in ({"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"stop": ""}, {"min_p": 2}):
        with pytest.raises(ValidationError):
            SamplingParams(**bad)
    assert SamplingParams(stop="x").stop == ["x"]
