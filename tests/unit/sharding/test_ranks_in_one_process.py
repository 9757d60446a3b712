"""Ranks in the threads of one process, and models that they divide for the generated tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onboard.parallel.in_one_process import on_all_ranks
from onboard.parallel.ranks import ALONE, Ranks, current_ranks
from onboard.testing.divided import continued, divide
from onboard.verify.error import rmse_ratio
from tests.support.sharding.zoo import ROOT, save_family

PROMPT = {
    "input_ids": torch.arange(2 * 9).view(2, 9),
    "position_ids": torch.arange(9).expand(2, 9),
}


def _exchanged(ranks: Ranks) -> tuple[Ranks, torch.Tensor, torch.Tensor]:
    x = torch.full((2,), float(ranks.rank + 1))
    ops = torch.ops.onboard
    return current_ranks(), ops.dist_all_reduce(x), ops.all_gather(x, 0, [2, 2, 2])


def test_threads_exchange_what_processes_do() -> None:
    for rank, (seen, total, whole) in enumerate(on_all_ranks(3, _exchanged)):
        assert seen == Ranks(rank, 3)
        assert total.tolist() == [6.0, 6.0]
        assert whole.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert current_ranks() == ALONE


def _failing(ranks: Ranks) -> None:
    assert not ranks.rank, f"rank {ranks.rank} fails"
    torch.ops.onboard.dist_all_reduce(torch.zeros(1))  # which would wait for the other


def test_threads_need_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("there are no sockets here")

    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "create_device", refused)
    assert len(on_all_ranks(3, _exchanged)) == 3


def test_the_error_of_a_rank_is_raised() -> None:
    with pytest.raises(AssertionError, match="rank 1 fails"):
        on_all_ranks(2, _failing)


@pytest.mark.parametrize(
    ("heads", "key_heads", "world_size", "note"),
    [
        (4, 2, 2, ""),
        (3, 3, 3, "3 heads (mha) cannot be divided among 2 ranks"),
        (1, 1, 2, "1 heads (mha) cannot be divided among 2 ranks"),
    ],
)
def test_a_model_is_divided_as_its_heads_allow(
    tmp_path: Path, heads: int, key_heads: int, world_size: int, note: str
) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    folder = save_family(tmp_path, "llama", 3, **sizes)
    ranks = divide(folder, ROOT)
    assert (ranks.world_size, ranks.note) == (world_size, note)
    assert all(count > 0 for count in ranks.matches("apply_sharding_hints"))
    whole = _alone(folder, PROMPT)
    for logits in ranks.logits(PROMPT):
        assert rmse_ratio(logits, whole) < 1e-5


@pytest.mark.parametrize(
    ("family", "heads", "key_heads", "world_size"),
    [
        ("llama", 6, 2, 3),  # the second rank's query heads read both
        ("phi3", 6, 3, 2),  # queries, keys and values are one layer
        ("llama", 4, 1, 4),
    ],
)
def test_key_heads_that_ranks_do_not_divide_are_had_by_several(
    tmp_path: Path, family: str, heads: int, key_heads: int, world_size: int
) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    folder = save_family(tmp_path, family, 3, **sizes)
    ranks = divide(folder, ROOT, world_size)
    assert (ranks.world_size, ranks.note) == (world_size, "")
    whole = _alone(folder, PROMPT)
    for logits in ranks.logits(PROMPT):
        assert rmse_ratio(logits, whole) < 1e-5


def _alone(folder: Path, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(**prompt).logits
    return logits


def test_a_text_goes_on_at_the_next_positions() -> None:
    text = continued(PROMPT, torch.tensor([7, 8]))
    assert text["input_ids"][:, -1].tolist() == [7, 8]
    assert text["position_ids"][:, -2:].tolist() == [[8, 9], [8, 9]]
