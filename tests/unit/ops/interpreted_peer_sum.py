"""Sums over ranks by kernels that write to each other's memory, a process a rank;
`test_triton_kernels.py` starts this in Triton's interpreter.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.ops.collectives import triton_peer_sum
from onboard.ops.collectives.triton_peer_sum import (
    one_shot_sum,
    peer_gather,
    peer_sum,
    peer_sum_and_norm,
    two_shot_sum,
)
from onboard.ops.collectives.triton_rank_embedding import lookup
from onboard.parallel.peer_memory import ABSENT, PeerMemory, shared_bytes

ROUNDS = 3
"""Exchanges of each size one after the other: halves of a region are used again from the third on."""
SIZES = (7, 1030, 2500)
PATIENCE = 120


@pytest.fixture(autouse=True)
def seed() -> int:
    found = random.randrange(2**31)
    print(f"seed {found}")
    return found


def on_ranks(world: int, job: Callable[..., None], *args: Any) -> list[int]:
    """Run a job in a process for each rank, with memory that all of them see; return exit codes."""
    # Of a fork, memory that is shared lies at one address in all processes
    memories = [
        torch.full((shared_bytes(world) // 2,), ABSENT, dtype=torch.int16).share_memory_()
        for _ in range(world)
    ]
    addresses = [each.data_ptr() for each in memories]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=job, args=(rank, addresses, *args), daemon=True)
        for rank in range(world)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(PATIENCE)
    return [each.exitcode if each.exitcode is not None else -1 for each in ranks]


def memory_of(rank: int, addresses: Sequence[int]) -> PeerMemory:
    torch.set_num_threads(1)
    return PeerMemory(rank, addresses, torch.device("cpu"))


def summands(world: int, seed: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank has: all ranks can make all of it."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum in float32 in the order of ranks."""
    total = torch.zeros(parts[0].shape)
    for each in parts:
        total = total + each.float()
    return total


def with_what_memory_waits_with(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Let the first elements be the patterns that nothing is sent as."""
    for each in parts:
        pattern = torch.full((2,), ABSENT, dtype=torch.int16)
        each[:2] = pattern.view(each.dtype) if each.itemsize == 2 else pattern.view(each.dtype)[0]
        each[2] = -0.0
    return parts


def sums(rank: int, addresses: Sequence[int], how: str, dtype: torch.dtype, seed: int) -> None:
    memory, world = memory_of(rank, addresses), len(addresses)
    add = {"one": one_shot_sum, "two": two_shot_sum, "chosen": peer_sum}[how]
    for count in range(ROUNDS):
        for size in SIZES:
            parts = with_what_memory_waits_with(summands(world, seed + count, size, dtype=dtype))
            total = add(parts[rank], memory)
            assert total is not None
            # The interpreter truncates where hardware rounds
            limit = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
            wanted = in_order(parts)
            assert (total.float() - wanted).abs().max() <= limit * wanted.abs().max()


@pytest.mark.parametrize(
    ("world", "how", "dtype"),
    [
        (2, "one", torch.bfloat16),
        (2, "two", torch.float16),
        (3, "one", torch.float32),
        (4, "two", torch.bfloat16),
        (2, "chosen", torch.float32),
    ],
)
def test_sums_are_right_on_every_rank(world: int, how: str, dtype: torch.dtype, seed: int) -> None:
    assert on_ranks(world, sums, how, dtype, seed) == [0] * world


def gathers(
    rank: int, addresses: Sequence[int], programs: int, dtype: torch.dtype, seed: int
) -> None:
    triton_peer_sum._GATHERING = programs
    memory, world = memory_of(rank, addresses), len(addresses)
    for count in range(ROUNDS):
        for shape, dim in (((1, 3, 2700), -1), ((2, 5), 0), ((3, 2, 9), 1)):
            parts = summands(world, seed + count, *shape, dtype=dtype)
            whole = peer_gather(parts[rank], dim, memory)
            assert whole is not None
            assert torch.equal(whole, torch.cat(parts, dim))


@pytest.mark.parametrize(
    ("world", "programs", "dtype"),
    [(2, 512, torch.bfloat16), (3, 512, torch.float32), (2, 3, torch.bfloat16)],
)
def test_parts_are_concatenated_on_every_rank(
    world: int, programs: int, dtype: torch.dtype, seed: int
) -> None:
    assert on_ranks(world, gathers, programs, dtype, seed) == [0] * world


def tells(rank: int, addresses: Sequence[int], seed: int) -> None:
    memory = memory_of(rank, addresses)
    for count in range(ROUNDS):
        generator = torch.Generator().manual_seed(seed + count)
        tokens = torch.randint(-1, 2**31, (2, 5), generator=generator)
        told = peer_gather(tokens[rank].view(torch.float32), 0, memory)
        assert told is not None
        assert torch.equal(told.view(torch.int64), tokens.flatten())


def test_token_ids_arrive_bit_by_bit(seed: int) -> None:
    assert on_ranks(2, tells, seed) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_of_a_rank_are_looked_up(dtype: torch.dtype, seed: int) -> None:
    table = summands(1, seed, 40, 1030, dtype=dtype)[0]
    own, ids = table[10:25], torch.randint(0, 40, (2, 30))
    wanted = torch.ops.onboard.embedding_of_rank(ids, own, 10)
    assert torch.equal(wanted[(ids >= 10) & (ids < 25)], table[ids[(ids >= 10) & (ids < 25)]])
    assert torch.equal(lookup(ids, own, 10), wanted)


def check_norm(out: Tensor, total: Tensor, wanted: Tensor, weight: Tensor) -> None:
    """Hold a sum against the wanted one, and its RMSNorm against float64 of that sum."""
    limit = 1e-6 if out.dtype == torch.float32 else 4 * torch.finfo(out.dtype).eps
    assert (total.float() - wanted).abs().max() <= limit * wanted.abs().max()
    exact = total.double()
    scale = (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed = exact * scale * weight.double()
    assert (out.double() - normed).abs().max() <= 2 * limit * normed.abs().max()


def norms(rank: int, addresses: Sequence[int], wide: bool, dtype: torch.dtype, seed: int) -> None:
    memory, world = memory_of(rank, addresses), len(addresses)
    for count in range(ROUNDS):
        rows = 1 + count % 3
        *parts, residual = summands(world + 1, seed + count, rows, 24, dtype=dtype)
        weight = summands(1, seed - 1, 24, dtype=dtype)[0]
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        done = peer_sum_and_norm(
            out, total, parts[rank], residual, weight, 1e-5, memory, dtype=dtype, wide=wide
        )
        assert done
        check_norm(out, total, in_order(parts) + residual.float(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_sums_with_the_norm_behind_them(wide: bool, dtype: torch.dtype, seed: int) -> None:
    assert on_ranks(2, norms, wide, dtype, seed) == [0, 0]


def waits(rank: int, addresses: Sequence[int]) -> None:
    memory = memory_of(rank, addresses)
    if rank == 0:
        memory.gone.fill_(1)
        assert one_shot_sum(torch.ones(8), memory) is not None


def test_a_rank_whose_others_have_ended_waits_for_nobody() -> None:
    assert on_ranks(2, waits) == [0, 0]


def test_memory_that_is_full_gives_no_region() -> None:
    memory = PeerMemory(0, [0, 0], torch.device("cpu"))
    assert memory.region(2**13, 2**9) is not None
    assert memory.region(2**17, 2**9) is None
    assert memory.region(2**13, 2**9) is memory.region(2**13, 2**9)
