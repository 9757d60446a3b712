"""Several ranks compute what one does: prefill, cached decode in ragged batches, and the tokens that
come of it.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onboard.verify.error import rmse_ratio
from tests.support.drawing import some_of
from tests.support.ranks import Group
from tests.support.sharding.sharded_runs import Ran, run
from tests.support.sharding.zoo import FAMILIES, save_family

LIMIT = 1e-5
"""Of the root mean square error, relative to the expected values."""
EXCHANGES = 2
"""Sums a layer, at most: what mixes tokens, and what does not."""


@pytest.fixture(scope="session")
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Any:
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: save_family(folder, family, seed))


@pytest.fixture(scope="session")
def alone(saved: Any, seed: int) -> Any:
    """A family's run on one rank, in this process."""
    return cache(lambda family: run(saved(family), 1, seed))


def assert_same(ran: list[Ran], expected: Ran) -> None:
    """Every rank has the logits, the log-probabilities and the tokens of one rank alone."""
    for own in ran:
        assert rmse_ratio(own.logits, expected.logits) < LIMIT
        for mine, whole in zip(own.logprobs, expected.logprobs, strict=True):
            assert rmse_ratio(mine, whole) < LIMIT
        assert own.tokens == expected.tokens


def assert_divided(ran: list[Ran], expected: Ran) -> None:
    """The graph that ran has sums, and its weights were read by the share, each once."""
    for own in ran:
        assert own.matches["apply_sharding_hints"] > 0
        assert own.calls["dist_all_reduce"] > 0
        assert own.calls["all_gather"] == 1
        assert own.weight_bytes < 0.75 * expected.weight_bytes
        read = int(own.summaries["load_weights"].removesuffix(" bytes read"))
        assert read <= own.weight_bytes


ALWAYS = ("deepseek_v3", "gpt2", "llama")


@pytest.mark.parametrize("family", some_of(FAMILIES, ALWAYS, by_chance=1))
def test_two_ranks_compute_what_one_does(
    two_ranks: Group, saved: Any, alone: Any, seed: int, family: str
) -> None:
    ran = two_ranks.run(run, saved(family), 2, seed)
    assert_same(ran, alone(family))
    assert_divided(ran, alone(family))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3_text", "deepseek_v3", "mamba", "mamba2", "qwen3_next", "gpt_oss", "phi"],
)
def test_four_ranks_compute_what_one_does(
    four_ranks: Group, saved: Any, alone: Any, seed: int, family: str
) -> None:
    """Two key heads, groups and latents are then had by several ranks."""
    assert_same(four_ranks.run(run, saved(family), 4, seed), alone(family))


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "channels of experts": ("mixtral", {"detect_sharding": {"dist_mapping": {"moe_tp": 2}}}),
    "some layers": ("gpt2", {"apply_sharding_hints": {"shard_layers": ["mlp", "vocabulary"]}}),
    "outputs alone": ("phi3", {"detect_sharding": {"simple_shard_only": True}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_layers_divided_otherwise_compute_the_same(
    two_ranks: Group, saved: Any, alone: Any, seed: int, name: str
) -> None:
    family, settings = SETTINGS[name]
    ran = two_ranks.run(run, saved(family), 2, seed, settings)
    assert_same(ran, alone(family))
    assert all(own.matches["apply_sharding_hints"] > 0 for own in ran)


def test_a_checkpoint_in_transformers_own_code_is_divided(
    two_ranks: Group, saved: Any, seed: int
) -> None:
    """Mode hf: the graph is that of transformers' module, whose attention was matched."""
    expected = run(saved("llama"), 1, seed, None, "hf")
    ran = two_ranks.run(run, saved("llama"), 2, seed, None, "hf")
    assert_same(ran, expected)
    assert all(own.calls["dist_all_reduce"] == 2 * EXCHANGES + 1 for own in ran)


def _remove(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def test_a_rank_that_fails_says_why(two_ranks: Group, tmp_path: Path, seed: int) -> None:
    folder = save_family(tmp_path, "llama", seed)
    _remove(folder)
    with pytest.raises(AssertionError, match=r"rank 0: .*(?s:.*)has no model.safetensors"):
        two_ranks.run(run, folder, 2, seed)
