"""Linear layers of decode steps beside the library's product, at the sizes of two dense models, on
one GPU.

    python benchmarks/linears.py [--tokens 1 8 32 64]

Each layer runs as in a model: with the norm before it, the gate or the residual addition after it.
The library's version is what `triton_fused_linear` does for many tokens: cuBLAS, and kernels around
it. Calls lie in one CUDA graph and take weights in turn that are together larger than the L2 cache.
The floor is the weight's bytes over the bandwidth that a large read reaches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.ops.linear import triton_linear as linear

WEIGHT_BYTES = 200e6
CALLS = 12


@dataclass(frozen=True)
class Layer:
    """A linear layer: rows and columns of its weight, and what stands around it."""

    name: str
    outputs: int
    columns: int
    norm: bool = False
    activation: str = ""
    residual: bool = False


LAYERS = (
    Layer("8B: norm, q k v", 6144, 4096, norm=True),
    Layer("8B: o, residual", 4096, 4096, residual=True),
    Layer("8B: norm, gate and up, silu", 28672, 4096, norm=True, activation="silu"),
    Layer("8B: down, residual", 4096, 14336, residual=True),
    Layer("8B: head", 128256, 4096),
    Layer("0.6B: norm, q k v", 4096, 1024, norm=True),
    Layer("0.6B: o, residual", 1024, 2048, residual=True),
    Layer("0.6B: norm, gate and up, silu", 6144, 1024, norm=True, activation="silu"),
    Layer("0.6B: down, residual", 1024, 3072, residual=True),
    Layer("0.6B: head", 151936, 1024),
)


def randn(*shape: int) -> Tensor:
    """Return random bfloat16 numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def microseconds(calls: Sequence[Callable[[], Tensor]], repeats: int = 5) -> float:
    """Return the median time of one of the calls, replayed one after another in a CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    times: list[float] = []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def measure(layer: Layer, tokens: int) -> tuple[float, float]:
    """Return the microseconds of our version and of the library's."""
    each = 2 * layer.outputs * layer.columns
    weights = [
        randn(layer.outputs, layer.columns) / layer.columns**0.5
        for _ in range(max(2, int(WEIGHT_BYTES // each)))
    ]
    x, norm = randn(tokens, layer.columns), randn(layer.columns) if layer.norm else None
    outputs = layer.outputs // 2 if layer.activation else layer.outputs
    residual = randn(tokens, outputs) if layer.residual else None
    order = weights * max(1, CALLS // len(weights))

    def calls(run: Callable[..., Tensor]) -> list[Callable[[], Tensor]]:
        return [lambda w=w: run(x, w, None, residual, norm, 1e-6, layer.activation) for w in order]  # type: ignore[misc]

    return microseconds(calls(linear.launch)), microseconds(calls(linear.compose))


def read_bandwidth() -> float:
    """Return the bytes a second of a sum over 4 GiB."""
    data = torch.ones(2**30, dtype=torch.float32, device="cuda")
    return data.nbytes / microseconds([data.sum] * 4) * 1e6


@torch.inference_mode()
def main() -> None:
    """Measure and print one row a layer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64])
    tokens = parser.parse_args().tokens
    bandwidth = read_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e9:.0f} GB/s; us, ours / library's (share)"
    )
    print("| layer | floor |" + "".join(f" {count} tokens |" for count in tokens))
    print("|---|---|" + "---|" * len(tokens))
    for layer in LAYERS:
        floor = 2e6 * layer.outputs * layer.columns / bandwidth
        pairs = [measure(layer, count) for count in tokens]
        cells = [f" {ours:.2f} / {library:.2f} ({floor / ours:.2f}) |" for ours, library in pairs]
        print(f"| {layer.name} | {floor:.2f} |" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
