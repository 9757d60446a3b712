"""Linear layers with four-bit weights at the sizes of an 8B model, on one GPU: the tiles that are
chosen beside others.

    python benchmarks/four_bit_linears.py [--kinds int4 mxfp4 nvfp4] [--tokens 1 8 64] [--search]

Each layer runs as in a model, as `linears.py` has them. `--search` tries tiles in turn and names
the best three. The floor is the bytes of codes and scales over the bandwidth that a large read
reaches.

To be timed next: floats of four bits, whose scales are multiplied into the weights where bfloat16
has the product exactly, beside sums that are scaled group by group (`mxfp4-sums`, `nvfp4-sums`: the
same codes with scales in float16, which are not), for 8, 16 and 64 tokens; then `--search` again,
as their tiles were measured with such sums.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from linears import CALLS, LAYERS, WEIGHT_BYTES, Layer, microseconds, randn, read_bandwidth
from torch import Tensor

from onboard.ops.four_bits import triton_four_bit_linear as launcher
from onboard.ops.four_bits.four_bits import RUN
from onboard.ops.linear.triton_linear import Tiles

KINDS = {
    "int4": ("int4", 128, torch.float16),
    "mxfp4": ("e2m1", 32, torch.uint8),
    "nvfp4": ("e2m1", 16, torch.float8_e4m3fn),
    "mxfp4-sums": ("e2m1", 32, torch.float16),
    "nvfp4-sums": ("e2m1", 16, torch.float16),
}
"""Levels, group and dtype of the scales."""
OF_A_LAYER = LAYERS[:4]


@dataclass(frozen=True)
class Case:
    """Calls of one layer with weights in turn, and the bytes that one of them reads."""

    calls: list[Callable[[], Tensor]]
    bytes: int


def case(layer: Layer, kind: str, tokens: int) -> Case:
    """Return a layer with random codes and scales; its values may be anything."""
    levels, group, dtype = KINDS[kind]
    groups = layer.outputs, layer.columns // group
    size = layer.outputs * layer.columns // 2
    weights = []
    for _ in range(max(2, int(WEIGHT_BYTES // size))):
        words = torch.randint(-(2**31), 2**31, (layer.outputs, layer.columns // 8), device="cuda")
        scale = torch.rand(groups, device="cuda") / 100
        exponent = torch.randint(118, 122, groups, device="cuda", dtype=torch.uint8)
        weights.append((words.int(), exponent if dtype == torch.uint8 else scale.to(dtype)))
    whole = torch.rand(layer.outputs, device="cuda") if kind.startswith("nvfp4") else None
    x, norm = randn(tokens, layer.columns), randn(layer.columns) if layer.norm else None
    outputs = layer.outputs // 2 if layer.activation else layer.outputs
    residual = randn(tokens, outputs) if layer.residual else None

    def run(words: Tensor, scale: Tensor) -> Tensor:
        form = (scale, None, whole, levels, group)
        return launcher.triton_fused_four_bit_linear(
            x, words, None, *form, residual, norm, 1e-6, layer.activation
        )

    order = weights * max(1, CALLS // len(weights))
    return Case([lambda each=each: run(*each) for each in order], size + weights[0][1].nbytes)  # type: ignore[misc]


def tried(tokens: int) -> Iterator[Tiles]:
    """Yield tiles that may be good."""
    rows = [16] if tokens <= 16 else [16, 32, 64]
    for tile in product(rows, (32, 64, 128), (4, 8), (3, 6), (1, 2, 4, 8)):
        size, outputs, warps, stages, splits = tile
        yield Tiles(size, outputs, RUN, num_warps=warps, num_stages=stages, splits=splits)


def best(each: Case, tokens: int) -> list[tuple[float, Tiles]]:
    """Return the three fastest tiles of a layer, with their microseconds."""
    chosen, found = launcher.choose_four_bit_tiles, []
    for tiles in tried(tokens):
        launcher.choose_four_bit_tiles = lambda *_, tiles=tiles: tiles
        try:
            found.append((microseconds(each.calls, 3), tiles))
        except Exception as error:  # a tile too large for the device, say
            print(f"{tiles}: {type(error).__name__}")
    launcher.choose_four_bit_tiles = chosen
    return sorted(found, key=lambda pair: pair[0])[:3]


@torch.inference_mode()
def main() -> None:
    """Measure and print one row for each kind, number of tokens and layer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS)[:3], choices=list(KINDS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e9:.0f} GB/s; us")
    for kind, tokens in product(options.kinds, options.tokens):
        for layer in OF_A_LAYER:
            each = case(layer, kind, tokens)
            floor, time = 1e6 * each.bytes / bandwidth, microseconds(each.calls)
            print(f"{kind}, {tokens} tokens, {layer.name}: {time:.1f}, floor {floor:.1f}")
            for least, tiles in best(each, tokens) if options.search else []:
                print(f"    {least:.1f} {tiles}", flush=True)


if __name__ == "__main__":
    main()
