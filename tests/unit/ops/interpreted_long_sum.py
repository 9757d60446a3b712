"""Sums of long tensors over ranks by one kernel, a process a rank; `test_triton_kernels.py` starts
this in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.collectives import triton_long_sum
from onboard.ops.collectives.triton_long_sum import Norm, long_sum, long_sum_and_norm
from onboard.parallel.peer_memory import PeerMemory
from tests.unit.ops.interpreted_peer_sum import (
    check_norm,
    in_order,
    memory_of,
    on_ranks,
    seed,
    summands,
)

__all__ = ["seed"]

ROUNDS = 2
"""Exchanges one after the other: what the ranks send lies where it lay the time before."""


def _short(programs: int, row_bytes: int, most: int) -> None:
    """Let few programs exchange short rows, several times for a tensor."""
    triton_long_sum.PROGRAMS, triton_long_sum.ROW_BYTES = programs, row_bytes
    triton_long_sum.MOST_BYTES = most


def sums(
    rank: int, addresses: Sequence[int], dtype: torch.dtype, with_residual: bool, seed: int
) -> None:
    memory, world = memory_of(rank, addresses), len(addresses)
    _short(3, 64, 3 * world * 512)
    for count in range(ROUNDS):
        for size in (5, 530, 2501):
            *parts, residual = summands(world + 1, seed + count, size, dtype=dtype)
            added = residual if with_residual else None
            total = long_sum(parts[rank].contiguous(), memory, added)
            assert total is not None
            wanted = in_order(parts) + (residual.float() if with_residual else 0)
            # The interpreter truncates where hardware rounds, once for the sum and once behind it
            limit = 1e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
            assert (total.float() - wanted).abs().max() <= limit * wanted.abs().max()


@pytest.mark.parametrize(
    ("world", "dtype", "with_residual"),
    [
        (2, torch.float32, False),
        (2, torch.bfloat16, True),
        (3, torch.float16, False),
        (4, torch.float32, True),
    ],
)
def test_sums_are_right_on_every_rank(
    world: int, dtype: torch.dtype, with_residual: bool, seed: int
) -> None:
    assert on_ranks(world, sums, dtype, with_residual, seed) == [0] * world


def norms(rank: int, addresses: Sequence[int], wide: bool, dtype: torch.dtype, seed: int) -> None:
    memory, world = memory_of(rank, addresses), len(addresses)
    _short(2, 64, world * 2048)
    for count, rows in enumerate((1, 5, 33)):
        *parts, residual = summands(world + 1, seed + count, rows, 24, dtype=dtype)
        weight = summands(1, seed - 1, 24, dtype=dtype)[0]
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        norm = Norm(total, weight, 1e-5, dtype, wide)
        assert long_sum_and_norm(out, parts[rank], residual, memory, norm)
        check_norm(out, total, in_order(parts) + residual.float(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_sums_with_the_norm_behind_them(wide: bool, dtype: torch.dtype, seed: int) -> None:
    assert on_ranks(2, norms, wide, dtype, seed) == [0, 0]


def waits(rank: int, addresses: Sequence[int]) -> None:
    memory = memory_of(rank, addresses)
    _short(2, 64, 2**12)
    if rank == 0:
        memory.gone.fill_(1)
        assert long_sum(torch.ones(600), memory) is not None


def test_a_rank_whose_others_have_ended_waits_for_nobody() -> None:
    assert on_ranks(2, waits) == [0, 0]


def test_rows_that_do_not_fit_are_left_to_others() -> None:
    memory = PeerMemory(0, [0, 0], torch.device("cpu"))
    rows = torch.ones(2, triton_long_sum.MOST_BYTES // 4)
    norm = Norm(torch.empty_like(rows), rows[0], 1e-5, torch.float32, wide=False)
    assert not long_sum_and_norm(torch.empty_like(rows), rows, rows, memory, norm)
