"""Sums over the ranks inside a CUDA graph, of decode steps (up to 1 MiB) and of prompts: the library's,
torch's over symmetric memory, ours, and ours with the residual addition and the RMSNorm behind it.

    python benchmarks/all_reduce.py [WORLD_SIZE] [--kib 4 8 16 64 1024 65536] [--width 4096]

Every figure is the median over replays of microseconds a call, of graphs with a chain of calls; each
result is compared with the library's before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed, multiprocessing
from torch.distributed import _symmetric_memory as symmetric

from onboard.ops.collectives.collectives import dist_all_reduce
from onboard.ops.collectives.triton_fused_all_reduce import triton_fused_allreduce_residual_rmsnorm
from onboard.ops.collectives.triton_peer_sum import can_exchange, one_shot_sum, two_shot_sum
from onboard.ops.norm.triton_rmsnorm import triton_fused_add_rmsnorm
from onboard.parallel.ranks import Ranks, join_group, leave_group, peer_memory

CALLS, REPLAYS = 50, 20
KIB = [4, 8, 16, 64, 128, 256, 512, 1024, 4096, 16384, 65536]
COLUMNS = ("library", "torch", "one shot", "two shots", "ours", "ours + norm", "norm alone")


def microseconds(call: Callable[[], object]) -> float:
    """Time of a call inside a graph; all ranks call it alike."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        distributed.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # ranks meet in the first calls, and what is timed begins together
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def torch_sum(x: Tensor) -> Callable[[], object]:
    """The one-shot sum that torch has over symmetric memory."""
    group = distributed.group.WORLD
    assert group is not None
    shared = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
    symmetric.rendezvous(shared, group)
    return lambda: torch.ops.symm_mem.one_shot_all_reduce(shared.copy_(x), "sum", group.group_name)


def row(size: int, width: int) -> dict[str, float]:
    """Measure every way to sum `size` elements of bfloat16, in rows of `width`."""
    memory = peer_memory()
    assert memory is not None
    x = torch.randn(size, device="cuda").bfloat16()
    wanted = x.float()
    distributed.all_reduce(wanted)
    ours: dict[str, Callable[[], Tensor | None]] = {"ours": lambda: dist_all_reduce(x)}
    if can_exchange(x):
        ours |= {
            "one shot": lambda: one_shot_sum(x, memory),
            "two shots": lambda: two_shot_sum(x, memory),
        }
    for add in ours.values():
        for _ in range(5):
            total = add()
            assert (
                total is None or (total.float() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
            )

    def library() -> None:
        distributed.all_reduce(x.clone())

    ways: dict[str, Callable[[], object]] = {
        "library": library,
        "torch": torch_sum(x),
        **ours,
    }
    if size >= width:
        rows = x[: size // width * width].view(-1, width)
        weight = torch.randn(width, device="cuda").bfloat16()
        residual = torch.randn_like(rows)
        distributed.broadcast(residual, 0)
        distributed.broadcast(weight, 0)
        check_norm(rows, residual, weight)
        ways["ours + norm"] = lambda: triton_fused_allreduce_residual_rmsnorm(
            rows, residual, weight, 1e-5
        )
        ways["norm alone"] = lambda: triton_fused_add_rmsnorm(rows, residual, weight, 1e-5)
    return {name: microseconds(way) for name, way in ways.items()}


def check_norm(rows: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Hold the sum with the norm behind it against float64."""
    wanted = rows.double()
    distributed.all_reduce(wanted)
    wanted += residual
    normed = wanted * (wanted.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    for _ in range(5):
        out, total = triton_fused_allreduce_residual_rmsnorm(rows, residual, weight, 1e-5)
        for found, exact in ((total, wanted), (out, normed)):
            assert (found - exact).abs().max() <= 2**-6 * exact.abs().max()


def rank_main(rank: int, world: int, address: str, kib: Sequence[int], width: int) -> None:
    """Measure with the others; the first rank prints."""
    join_group(Ranks(rank, world), address, "cuda")
    if rank == 0:
        print(f"| KiB, {world} ranks | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    for each in kib:
        found = row(each * 512, width)
        if rank == 0:
            cells = (f"{found[name]:.1f}" if name in found else "-" for name in COLUMNS)
            print(f"| {each} | {' | '.join(cells)} |", flush=True)
    leave_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("world", type=int, nargs="?", default=2)
    parser.add_argument("--kib", type=int, nargs="+", default=KIB)
    parser.add_argument("--width", type=int, default=4096, help="elements of a row of the norm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/meet"
        multiprocessing.spawn(
            rank_main, (args.world, address, args.kib, args.width), nprocs=args.world
        )


if __name__ == "__main__":
    main()
