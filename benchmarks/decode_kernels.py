"""Achieved bandwidth of the decode kernels, as a share of what a device-to-device copy reaches on
this GPU.

    python benchmarks/decode_kernels.py [--batch 1 8 64] [--context 1024 8192 65536] [--kernel
    attention mla ssm delta]

Each row is one step of one layer in bfloat16 at the sizes of a known model: the bytes that have to
move (cache or states, inputs, outputs, each once; states are read and written) over the time of one
call inside a CUDA graph. Calls rotate over layers until these no longer fit in the L2 cache. Each
kernel has a process of its own: one that fails, or whose caches do not fit in memory, is a row with
its reason, and the others go on. Before it is timed, each is compared with the torch op on a few
sequences. States do not depend on the context, so their rows stand for every context.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onboard.ops  # noqa: F401  (registers)

PAGE = 32
LAYER_BYTES = 256 * 2**20
"""What the layers of a rotation have to exceed together: several times the L2 cache."""
MOST_LAYERS = 16
SECONDS_EACH = 0.3
COMPARED = 2
"""Sequences of the comparison with the torch op, which is slow."""
ROW, TITLE = "row: ", "title: "
"""What begins the lines of a process that belong to the report."""


@dataclass
class Case:
    """One kernel at one batch and context: what a layer is called with, and what it must move."""

    name: str
    layer: Callable[[], list[Any]]
    """Makes the arguments of a layer."""
    cache: tuple[int, ...]
    """Positions of the caches among them."""
    cache_bytes: int
    """Bytes of a layer's caches."""
    moved_bytes: int


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers: zeros would flatter the hardware."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def step_metadata(batch: int, context: int, paged: bool) -> list[Tensor]:
    """Return the metadata of a decode step; the pages of each sequence are dealt out at random."""
    columns = -(-context // PAGE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    info = torch.tensor([batch, batch, 1, context], dtype=torch.int32)
    if not paged:
        return [starts, lengths, torch.arange(1, batch + 1, device="cuda"), info]
    table = torch.randperm(batch * columns, device="cuda").view(batch, columns) + 1
    slots = table[:, (context - 1) // PAGE] * PAGE + (context - 1) % PAGE
    return [starts, lengths, table.int(), slots, info]


def attention(batch: int, context: int) -> Case:
    """32 query heads on 8 key heads of 128 channels."""
    heads, kv_heads, dim = 32, 8, 128
    pages = batch * -(-context // PAGE) + 1

    def layer() -> list[Any]:
        tokens = [randn(1, batch, count, dim) for count in (heads, kv_heads, kv_heads)]
        return [
            *tokens,
            *step_metadata(batch, context, True),
            *(randn(pages, kv_heads, PAGE, dim) for _ in range(2)),
        ]

    keys = 2 * batch * context * kv_heads * dim * 2
    return Case(
        "cached_attention",
        layer,
        (8, 9),
        4 * pages * kv_heads * PAGE * dim,
        keys + 4 * batch * heads * dim,
    )


def mla(batch: int, context: int) -> Case:
    """128 heads on latents of 512 channels and 64 rotated ones; with the weight that is absorbed,
    read once.
    """
    heads, nope, value, rank, rope = 128, 128, 128, 512, 64
    pages = batch * -(-context // PAGE) + 1

    def layer() -> list[Any]:
        tokens = [
            randn(1, batch, *shape) for shape in ((heads, nope), (heads, rope), (rank,), (1, rope))
        ]
        weight = randn(heads * (nope + value), rank) * rank**-0.5
        return [
            *tokens,
            weight,
            *step_metadata(batch, context, True),
            randn(pages, 1, PAGE, rank + rope),
        ]

    latents = 2 * batch * context * (rank + rope)
    moved = latents + 2 * heads * (nope + value) * rank + 2 * batch * heads * (nope + rope + value)
    return Case("cached_mla", layer, (10,), 2 * pages * PAGE * (rank + rope), moved)


def ssm(batch: int, context: int) -> Case:
    """Mamba 2 with 80 heads of 64 channels and 128 states."""
    heads, size, state = 80, 64, 128

    def layer() -> list[Any]:
        x, B, C, dt = (
            randn(1, batch, *shape) for shape in ((heads, size), (1, state), (1, state), (heads,))
        )
        constants = -randn(heads, dtype=torch.float32).abs(), randn(heads), randn(heads)
        cache = randn(batch + 1, heads, size, state, dtype=torch.float32)
        rest = [*step_metadata(batch, context, False), cache, [0.0, float("inf")], 256]
        return [x, constants[0], B, C, constants[1], dt, constants[2], *rest]

    states = 4 * batch * heads * size * state
    return Case("cached_ssm", layer, (11,), states, 2 * states + batch * heads * size * 6)


def delta(batch: int, context: int) -> Case:
    """The gated delta rule with 16 key heads and 32 value heads of 128 channels."""
    key_heads, heads, dim = 16, 32, 128

    def layer() -> list[Any]:
        q, k, v = (randn(1, batch, count, dim) for count in (key_heads, key_heads, heads))
        g, beta = (
            -randn(1, batch, heads, dtype=torch.float32).abs(),
            randn(1, batch, heads).sigmoid(),
        )
        cache = randn(batch + 1, heads, dim, dim, dtype=torch.float32)
        return [q, k, v, g, beta, *step_metadata(batch, context, False), cache, None, True]

    states = 4 * batch * heads * dim * dim
    moved = 2 * states + 2 * batch * dim * (2 * key_heads + 2 * heads)
    return Case("cached_gated_delta_rule", layer, (9,), states, moved)


KERNELS: dict[str, Callable[[int, int], Case]] = {
    "attention": attention,
    "mla": mla,
    "ssm": ssm,
    "delta": delta,
}
STATES = ("ssm", "delta")


def event_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call on the device, by events around each."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return bytes a second of a 1 GiB copy, read plus written."""
    source, target = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    target.copy_(source)
    return 2 * source.nbytes / event_seconds(lambda: target.copy_(source), 10)


def call_seconds(op: Callable[..., Tensor], layers: list[list[Any]]) -> float:
    """Return the time of one call: a graph replays all layers, one after the other."""
    for layer in layers:
        op(*layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 16 // len(layers))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for layer in layers:
                op(*layer)
    graph.replay()
    torch.cuda.synchronize()
    once = event_seconds(graph.replay, 3)
    repeats = min(50, max(5, int(SECONDS_EACH / once)))
    return event_seconds(graph.replay, repeats) / rounds / len(layers)


def layers_that_fit(case: Case) -> int:
    """Return how many layers a rotation has; raise `MemoryError` when memory does not hold one."""
    free, _ = torch.cuda.mem_get_info()
    each = case.cache_bytes + case.moved_bytes // 8
    affordable = int(0.6 * free) // each
    if affordable < 1:
        raise MemoryError(
            f"a layer's cache takes {each / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        )
    return min(affordable, MOST_LAYERS, max(2, -(-LAYER_BYTES // case.cache_bytes)))


def error_against_torch(make: Callable[[int, int], Case], context: int) -> float:
    """Return the relative error of the kernel against the torch op in float32, for two short
    sequences.
    """
    case = make(COMPARED, min(context, 1024))
    ops: Any = torch.ops.onboard
    ours = case.layer()
    theirs = [
        each.float() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in ours
    ]
    theirs = [each.clone() if index in case.cache else each for index, each in enumerate(theirs)]
    expected = getattr(ops, f"torch_{case.name}")(*theirs).float()
    actual = getattr(ops, f"triton_{case.name}")(*ours).float()
    return ((actual - expected).norm() / expected.norm()).item()


def measure(kernel: str, batch: int, context: int, bandwidth: float) -> str:
    """Return the row of one case."""
    shown = "any" if kernel in STATES else str(context)
    head = f"| {kernel} | {batch} | {shown} |"
    try:
        error = error_against_torch(KERNELS[kernel], context)
        case = KERNELS[kernel](batch, context)
        layers = [case.layer() for _ in range(layers_that_fit(case))]
        seconds = call_seconds(getattr(torch.ops.onboard, f"triton_{case.name}"), layers)
    except Exception as problem:  # shown as the row; the others go on
        reason = (str(problem).strip().splitlines() or [""])[0]
        return f"{head} failed: {type(problem).__name__}: {reason[:120]} | | | |"
    reached = case.moved_bytes / seconds
    wrong = " WRONG" if not error < 2e-2 else ""
    return f"{head} {seconds * 1e6:.1f} | {reached / 1e9:.0f} | {reached / bandwidth:.2f} | {error:.1e}{wrong} |"


def measure_here(options: argparse.Namespace) -> None:
    """Measure the cases of the kernels, and print each row behind `ROW`."""
    torch.manual_seed(int(time.time()))
    begin, bandwidth = time.monotonic(), copy_bandwidth()
    torch.cuda.empty_cache()
    print(
        f"{TITLE}{torch.cuda.get_device_name()}, copy bandwidth {bandwidth / 1e9:.0f} GB/s",
        flush=True,
    )
    for kernel in options.kernel:
        for context in options.context[:1] if kernel in STATES else options.context:
            for batch in options.batch:
                if time.monotonic() - begin > options.limit:
                    row = f"| {kernel} | {batch} | {context} | not run: {options.limit:.0f} s are over | | | |"
                else:
                    row = measure(kernel, batch, context, bandwidth)
                torch.cuda.empty_cache()
                print(ROW + row, flush=True)


def measure_in_a_process(kernel: str, options: argparse.Namespace) -> list[str]:
    """Return what a process of its own prints of one kernel; that it ended badly is a row, too."""
    numbers = [
        str(each)
        for name in ("batch", "context")
        for each in (f"--{name}", *getattr(options, name))
    ]
    command = [
        sys.executable,
        __file__,
        "--here",
        "--kernel",
        kernel,
        "--limit",
        str(options.limit),
        *numbers,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        alarm = threading.Timer(options.limit + 15, child.kill)
        alarm.start()
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        code = child.wait()
        alarm.cancel()
    if code:
        lines.append(f"{ROW}| {kernel} | | | failed: its process ended with {code} | | | |")
    return lines


def main() -> None:
    """Measure every kernel and print the table at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument(
        "--limit", type=float, default=30, help="seconds after which a kernel begins no new case"
    )
    parser.add_argument("--here", action="store_true", help="in this process, without the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.here:
        measure_here(options)
        return
    lines = [line for kernel in options.kernel for line in measure_in_a_process(kernel, options)]
    print(
        "\n"
        + "\n".join(sorted({line.removeprefix(TITLE) for line in lines if line.startswith(TITLE)}))
        + "\n"
    )
    print(
        "| kernel | batch | context | us a call | GB/s | share of the copy | error against torch |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(line.removeprefix(ROW) for line in lines if line.startswith(ROW)))


if __name__ == "__main__":
    main()
