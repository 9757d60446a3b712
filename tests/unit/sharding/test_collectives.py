"""Sums and concatenations over the ranks, beside the whole computed in one place."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import distributed

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.config import RuntimeConfig
from onboard.errors import UsageError
from onboard.ops.collectives.collectives import tell
from onboard.parallel.ranks import (
    ALONE,
    Ranks,
    captured_in_group,
    current_ranks,
    join_group,
    leave_group,
    local_device,
)
from tests.support.ranks import Group

SIZES = [3, 2]


def _part(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def _reduced() -> tuple[torch.Tensor, torch.Tensor]:
    x = _part(current_ranks().rank, 4, 5).t()  # strided
    return torch.ops.onboard.dist_all_reduce(x, layer_type="mlp"), x


def _gathered(dim: int, sizes: list[int]) -> torch.Tensor:
    shape = [4, 6]
    shape[dim] = sizes[current_ranks().rank]
    part = _part(current_ranks().rank, *shape)
    return torch.ops.onboard.all_gather(part, dim, sizes)  # type: ignore[no-any-return]


def test_a_sum_over_the_ranks_leaves_the_summands_alone(two_ranks: Group) -> None:
    expected = (_part(0, 4, 5) + _part(1, 4, 5)).t()
    for rank, (total, summand) in enumerate(two_ranks.run(_reduced)):
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(summand, _part(rank, 4, 5).t())


def _reduced_with_a_residual() -> torch.Tensor:
    residual = _part(9, 4, 5)
    return torch.ops.onboard.dist_all_reduce(  # type: ignore[no-any-return]
        _part(current_ranks().rank, 4, 5), residual=residual
    )


def test_a_sum_takes_in_a_residual_once(two_ranks: Group) -> None:
    expected = _part(0, 4, 5) + _part(1, 4, 5) + _part(9, 4, 5)
    for total in two_ranks.run(_reduced_with_a_residual):
        torch.testing.assert_close(total, expected)
    alone = torch.ops.onboard.dist_all_reduce(_part(0, 4, 5), residual=_part(9, 4, 5))
    torch.testing.assert_close(alone, _part(0, 4, 5) + _part(9, 4, 5))


class _Graph:
    """Stands for a CUDA graph."""

    was_reset = False

    def reset(self) -> None:
        self.was_reset = True


def test_graphs_end_before_the_group(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_joined_and_left, (str(tmp_path / "meet"),))


def _joined_and_left(address: str) -> bool:
    join_group(Ranks(0, 1), f"file://{address}")
    graph = captured_in_group(_Graph())
    leave_group()
    return graph.was_reset and current_ranks() == ALONE and not distributed.is_initialized()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_of_unequal_sizes_are_joined(two_ranks: Group, dim: int) -> None:
    shapes = [[4, 6], [4, 6]]
    for shape, size in zip(shapes, SIZES, strict=True):
        shape[dim] = size
    expected = torch.cat([_part(rank, *shape) for rank, shape in enumerate(shapes)], dim=dim)
    for whole in two_ranks.run(_gathered, dim, SIZES):
        torch.testing.assert_close(whole, expected)


def _told(tokens: list[int]) -> torch.Tensor:
    own = torch.tensor(tokens) if current_ranks().rank == 0 else torch.zeros(len(tokens)).long()
    tell(own)
    return own


def test_the_first_rank_tells_its_tokens(two_ranks: Group) -> None:
    tokens = [5, -1, 2**20]
    assert [told.tolist() for told in two_ranks.run(_told, tokens)] == [tokens, tokens]


def test_parts_of_an_embedding_add_up_to_it() -> None:
    table, ids = torch.randn(11, 6), torch.tensor([[0, 3, 4], [10, 4, 7]])
    parts = [
        torch.ops.onboard.embedding_of_rank(ids, table[first:last], first)
        for first, last in ((0, 4), (4, 10), (10, 11))
    ]
    assert torch.equal(sum(parts), table[ids])  # type: ignore[arg-type]
    assert torch.equal(parts[0][0, 2], torch.zeros(6))


def test_one_rank_has_it_all() -> None:
    x = torch.randn(3, 4)
    assert current_ranks() == ALONE
    for result in (torch.ops.onboard.dist_all_reduce(x), torch.ops.onboard.all_gather(x, 1, [4])):
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()


def test_shapes_are_known_without_a_group() -> None:
    x = torch.empty(3, 2, device="meta")
    assert torch.ops.onboard.all_gather(x, -1, SIZES).shape == (3, 5)
    assert torch.ops.onboard.dist_all_reduce(x).shape == (3, 2)


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert local_device("cuda", 0) == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="rank 1 has no GPU: this host has 1"):
        local_device("cuda", 1)


def _world(world_size: int) -> object:
    from onboard.runtime.build import _ranks

    return _ranks(RuntimeConfig(world_size=world_size))


def test_a_run_has_the_size_of_its_group(two_ranks: Group) -> None:
    assert [ranks.rank for ranks, _ in two_ranks.run(_world, 2)] == [0, 1]
    assert [ranks for ranks, _ in two_ranks.run(_world, 1)] == [ALONE, ALONE]
    with pytest.raises(AssertionError, match="world_size is 4 in a group of 2 processes"):
        two_ranks.run(_world, 4)
    assert _world(2) == (ALONE, ["runs on one device; the config's world_size is 2"])
