"""What one kernel for all layers reaches: one token of one sequence through a dense decoder of 0.6
billion parameters, as a whole and with parts left out.

    python benchmarks/one_kernel/run.py [--context 1024 8192]

Shapes are those of Qwen3-0.6B, weights and caches random, in bfloat16. The result is compared with
torch's, layer by layer in float32 sums, and has to be the same in every run. The rows say what waiting for
other programs, weights and attention take; those that leave something out compute something else.
The kernel asks for compute capability 9.0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN, HEADS, KV_HEADS, DIM, WIDE, LAYERS, PAGE = 1024, 16, 8, 128, 3072, 28, 32
EPS, SCALE = 1e-6, DIM**-0.5
SPLITS, COPIES, CHUNK, RING = 16, 4, 8192, 172 * 2**10
SHARED = RING + 48 * 2**10
THREADS = 288
REPEATS, CALLS = 5, 8
MOST_ERROR = 0.03
"""Relative error of 28 layers in bfloat16 beside torch, which rounds elsewhere."""
PARTS = {
    "whole": {},
    "without waiting for programs": {"WITHOUT_WAITS": 1},
    "without weights": {"WITHOUT_WEIGHTS": 1},
    "neither": {"WITHOUT_WAITS": 1, "WITHOUT_WEIGHTS": 1},
    "nor attention": {"WITHOUT_WAITS": 1, "WITHOUT_WEIGHTS": 1, "WITHOUT_ATTENTION": 1},
}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


@dataclass(frozen=True)
class Layer:
    """A layer's weights, [rows, columns] and norms."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor, Tensor, Tensor]
    """Before attention, before the MLP, of queries, of keys."""

    @classmethod
    def random(cls) -> Layer:
        """Weights that keep the size of what passes through."""

        def weight(rows: int, columns: int, gain: float) -> Tensor:
            return (_random(rows, columns) * gain * columns**-0.5).bfloat16()

        def norm(size: int) -> Tensor:
            return (1 + 0.1 * _random(size)).bfloat16()

        return cls(
            weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, 1.0),
            weight(HIDDEN, HEADS * DIM, 0.3),
            weight(2 * WIDE, HIDDEN, 1.0),
            weight(HIDDEN, WIDE, 0.3),
            (norm(HIDDEN), norm(HIDDEN), norm(DIM), norm(DIM)),
        )


@dataclass(frozen=True)
class Step:
    """A token and what it goes through."""

    x: Tensor
    layers: list[Layer]
    caches: list[tuple[Tensor, Tensor]]
    """Keys and values [pages, key heads, page, channels] of each layer."""
    pages: Tensor
    length: int
    cos: Tensor
    sin: Tensor

    @classmethod
    def random(cls, context: int, layers: list[Layer]) -> Step:
        """The last token of a text of nearly `context`."""
        pages = -(-context // PAGE)
        shape = (pages + 1, KV_HEADS, PAGE, DIM)
        caches = [(_random(*shape).bfloat16(), _random(*shape).bfloat16()) for _ in layers]
        angles = (_random(DIM // 2) * 3).repeat(2)
        order = torch.randperm(pages, device="cuda").int() + 1
        rotation = angles.cos().bfloat16(), angles.sin().bfloat16()
        return cls(_random(HIDDEN).bfloat16(), layers, caches, order, context - 3, *rotation)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return (x.float() * factor).to(x.dtype) * weight


def _turned(x: Tensor, step: Step) -> Tensor:
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * step.cos.float() + turned * step.sin.float()).to(x.dtype)


def _stored(cache: Tensor, new: Tensor, step: Step) -> Tensor:
    """Return what a sequence has in a cache [keys, heads, channels], with its new token."""
    rows = cache[step.pages.long()].transpose(1, 2).reshape(-1, KV_HEADS, DIM)[: step.length]
    rows = torch.cat((rows[:-1], new[None]))
    return rows.repeat_interleave(HEADS // KV_HEADS, 1).float()


def reference(step: Step) -> Tensor:
    """Return the residual stream [hidden] behind all layers, by torch."""
    x = step.x
    for layer, (keys, values) in zip(step.layers, step.caches, strict=True):
        heads = (_normed(x, layer.norms[0]) @ layer.qkv.T).view(-1, DIM)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS])
        query = _turned(_normed(query, layer.norms[2]), step)
        key = _turned(_normed(key, layer.norms[3]), step)
        scores = torch.einsum("hd,nhd->hn", query.float(), _stored(keys, key, step)) * SCALE
        mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), _stored(values, value, step))
        x = x + mixed.to(x.dtype).flatten() @ layer.out.T
        gate, up = (_normed(x, layer.norms[1]) @ layer.gate_up.T).split(WIDE)
        x = x + (F.silu(gate.float()) * up.float()).to(x.dtype) @ layer.down.T
    return x


def _constants(programs: int, flying: int, left_out: dict[str, int]) -> dict[str, Any]:
    def rows(all_rows: int) -> int:  # of a program, an even number
        return 2 * -(-all_rows // (2 * programs))

    return {
        "H": HIDDEN, "HEADS": HEADS, "KV": KV_HEADS, "D": DIM, "I": WIDE, "L": LAYERS, "PAGE": PAGE,
        "EPS": EPS, "SCALE": SCALE, "CTAS": programs, "RA": rows((HEADS + 2 * KV_HEADS) * DIM),
        "RH": rows(HIDDEN), "RE": rows(WIDE), "SPLITS": SPLITS, "COPIES": COPIES, "CHUNK": CHUNK, "RING": RING,
        "FLYING": flying, "WITHOUT_WAITS": 0, "WITHOUT_WEIGHTS": 0, "WITHOUT_ATTENTION": 0, **left_out,
    }  # fmt: skip


def compiled(programs: int, flying: int, left_out: dict[str, int]) -> Any:
    """Return the kernel for this device's number of programs."""
    constants = _constants(programs, flying, left_out)
    macros = "".join(f"#define {name} {value!r}\n" for name, value in constants.items())
    source = Path(__file__).with_name("layers.cu").read_text(encoding="utf-8")
    kernel = torch.cuda._compile_kernel(macros + source, "layers")
    kernel.set_shared_memory_config(SHARED)
    return kernel


def prepared(kernel: Any, step: Step, programs: int) -> tuple[Callable[[], None], Tensor]:
    """Return what runs the kernel, and where its result is."""
    addresses = [
        [each.data_ptr() for each in (layer.qkv, layer.out, layer.gate_up, layer.down, *caches)]
        for layer, caches in zip(step.layers, step.caches, strict=True)
    ]
    table = torch.tensor(addresses, dtype=torch.int64, device="cuda")
    norms = torch.stack([torch.cat(layer.norms) for layer in step.layers])
    sent = HEADS * DIM + 2 * HIDDEN + WIDE
    words = (HEADS + 2 * KV_HEADS) * DIM // 2 + HEADS * SPLITS * (DIM + 1) + COPIES * sent // 2
    wires = torch.zeros((LAYERS + 1) * words, dtype=torch.int64, device="cuda")
    epoch = torch.zeros(1, dtype=torch.int32, device="cuda")
    length = torch.tensor([step.length], dtype=torch.int32, device="cuda")
    out = torch.empty_like(step.x)
    args = [
        out, step.x, wires, table, norms, epoch, length, step.pages, step.cos, step.sin
    ]  # fmt: skip

    def run() -> None:
        kernel(grid=(programs, 1, 1), block=(THREADS, 1, 1), args=args, shared_mem=SHARED)

    return run, out


def microseconds(run: Callable[[], None]) -> float:
    """Return the shortest time of a call, of several in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    best = float("inf")
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / CALLS * 1e3)
    return best


def _check(run: Callable[[], None], out: Tensor, step: Step) -> float:
    expected = reference(step).float()
    run()
    first = out.clone()
    for _ in range(REPEATS):
        run()
        assert bool((out == first).all()), "another result in another run"
    error = ((out.float() - expected).norm() / expected.norm()).item()
    assert error < MOST_ERROR, f"relative error {error:.3f}"
    return error


def main() -> None:
    """Print a row for each part that is left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--flying", type=int, default=3, help="copies of weights at once")
    options = parser.parse_args()
    programs = torch.cuda.get_device_properties().multi_processor_count
    layers = [Layer.random() for _ in range(LAYERS)]
    for context in options.context:
        step = Step.random(context, layers)
        for name, left_out in PARTS.items():
            run, out = prepared(compiled(programs, options.flying, left_out), step, programs)
            error = f"error {_check(run, out, step):.4f}" if not left_out else ""
            time = microseconds(run)
            print(f"{context:>6} {name:<30} {time:7.1f} us  {time / LAYERS:5.2f} a layer  {error}")


if __name__ == "__main__":
    main()
