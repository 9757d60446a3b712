"""What quantising loses, format by format: KL divergence of the demo checkpoint from itself, as a
Markdown table (docs/quantised.md has one).

`python -m scripts.quality_table [FORMAT...]` on the CPU takes minutes. No data is used: scales come
from the weights alone, and each element goes to the nearest code. What onboard's own `quantize` can
do is computed by that; the other formats are written here, as weights that are rounded to what the
format can hold, or, where inputs are quantised too, as a checkpoint of compressed-tensors.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onboard.cli.commands.demo import CHECKPOINT
from onboard.verify.divergence.divergence import Figures, measure
from onboard.verify.divergence.side import Side
from scripts.quantised.k_blocks import SUPER, k_blocks

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 8192
FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3)."""
NORMAL_FLOAT4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""NF4's values (QLoRA, Dettmers et al. 2023, appendix E)."""

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""From a weight [outputs, inputs] float32 to what its codes stand for."""


def integers(weight: torch.Tensor, bits: int, group: int | None = None) -> torch.Tensor:
    """Symmetric integers whose steps reach from -max to max, in two's complement; scales in bfloat16,
    as the files of compressed-tensors have them, of `group` inputs or of all of an output's.
    """
    half = 1 << (bits - 1)

    def rounded(groups: torch.Tensor) -> torch.Tensor:
        scale = (_largest(groups) / (half - 0.5)).bfloat16().float()
        return (groups / scale).round().clamp(-half, half - 1) * scale

    return _by_groups(weight, group or weight.shape[1], rounded)


def with_zeros(weight: torch.Tensor) -> torch.Tensor:
    """Integers from 0 to 15 whose steps reach from the least to the most of 128 inputs, and a code of
    zero; scales in float16, as the files of AWQ and GPTQ have them.
    """

    def rounded(groups: torch.Tensor) -> torch.Tensor:
        low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True)
        steps = (high.clamp(min=0) - low) / 15
        scale = torch.where(steps > 0, steps, 1.0).half().float()
        zero = (-low / scale).round()
        return ((groups / scale).round() + zero).clamp(0, 15).sub(zero) * scale

    return _by_groups(weight, 128, rounded)


def float8(weight: torch.Tensor) -> torch.Tensor:
    """E4M3 with a scale of the tensor."""
    scale = weight.abs().max() / 448.0
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def mxfp8(weight: torch.Tensor) -> torch.Tensor:
    """E4M3 in groups of 32 with a power of two: that of the largest magnitude, less that of 448; what
    is beyond 448 then becomes that (OCP Microscaling Formats 1.0, section 6.3).
    """

    def rounded(groups: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(torch.floor(torch.log2(_largest(groups))) - 8)
        return (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    return _by_groups(weight, 32, rounded)


def of_gguf(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A type of GGUF, written and read by the gguf package, K types written here; the last block of a
    row is filled up with zeros.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    of_package, inputs = GGMLQuantizationType[kind], weight.shape[1]
    block, _ = GGML_QUANT_SIZES[of_package]
    rows = torch.nn.functional.pad(weight, (0, -inputs % block)).numpy()
    data = k_blocks(rows, kind) if block == SUPER else quantize(rows, of_package)
    return torch.from_numpy(dequantize(data, of_package))[:, :inputs].contiguous()


def nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """E2M1 in groups of 16 with a scale in float8_e4m3fn, which a scale of the tensor multiplies so
    that the largest one is 448.
    """
    whole = weight.abs().max() / (6.0 * 448.0)

    def rounded(groups: torch.Tensor) -> torch.Tensor:
        scale = (_largest(groups) / 6.0 / whole).to(torch.float8_e4m3fn).float() * whole
        return _nearest_magnitude(groups / scale) * scale

    return _by_groups(weight, 16, rounded)


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """QLoRA's four bits: blocks of 64 of the flat weight, by their largest magnitude."""

    def rounded(groups: torch.Tensor) -> torch.Tensor:
        scale = _largest(groups)
        return NORMAL_FLOAT4[_nearest(groups / scale, NORMAL_FLOAT4)] * scale

    return _by_groups(weight.reshape(1, -1), 64, rounded).reshape(weight.shape)


def _by_groups(weight: torch.Tensor, group: int, rounded: Rounding) -> torch.Tensor:
    """Round groups of inputs [outputs, group]; the last group of an output may be smaller."""
    return torch.cat([rounded(part) for part in torch.split(weight, group, dim=1)], dim=1)


def _largest(groups: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row; of a row of zeros a number that may divide."""
    largest = groups.abs().amax(dim=1, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def _nearest_magnitude(values: torch.Tensor) -> torch.Tensor:
    return FLOAT4[_nearest(values.abs(), FLOAT4)].copysign(values)


def _nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest of ascending levels; of two alike the even one (OCP
    Microscaling Formats 1.0, section 5.3.3: its code's last bit is 0).
    """
    middle = (levels[1:] + levels[:-1]) / 2
    below, upto = torch.bucketize(values, middle), torch.bucketize(values, middle, right=True)
    return torch.where(below % 2 == 0, below, upto)


@dataclass(frozen=True)
class Format:
    """A row of the table."""

    what: str
    bits: float
    """Of a weight in a linear layer, with its share of the scales."""
    rounding: Rounding | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    integers_too: bool = False
    """Weights and inputs are integers of eight bits."""


def _on_the_cpu(key: str) -> dict[str, Any]:
    """Settings with which the reference computes with codes, which "auto" leaves to GPUs."""
    return {"transforms": {key: {"backend": "torch"}}}


GGUF_BITS = {
    "Q8_0": 8.5,
    "Q6_K": 6.5625,
    "Q5_1": 6,
    "Q5_0": 5.5,
    "Q5_K": 5.5,
    "Q4_1": 5,
    "Q4_0": 4.5,
    "Q4_K": 4.5,
}
_ROWS = _on_the_cpu("quantize_fp8_linear_from_config")
_BLOCKS = _on_the_cpu("quantize_finegrained_fp8_linear_from_config")
FORMATS = {
    "bfloat16": Format("bfloat16 weights and activations", 16, settings={"dtype": "bfloat16"}),
    "int8": Format("int8, scales of outputs", 8, partial(integers, bits=8)),
    "w8a8": Format(
        "W8A8: int8, scales of outputs; inputs in int8, scales of tokens",
        8,
        settings=_on_the_cpu("quantize_int8_linear_from_config"),
        integers_too=True,
    ),
    "fp8-tensor": Format("float8_e4m3fn, a scale of the tensor; inputs as they are", 8, float8),
    "fp8": Format(
        "`quantize=fp8`: scales of outputs; inputs in float8, scales of tokens",
        8,
        settings={"quantize": "fp8", **_ROWS},
    ),
    "fp8-block": Format(
        "`quantize=fp8-block`: blocks of 128 x 128; inputs in float8, groups of 128",
        8,
        settings={"quantize": "fp8-block", **_BLOCKS},
    ),
    "mxfp8": Format("MXFP8: groups of 32; inputs as they are", 8.25, mxfp8),
    "int4-g32": Format("int4, groups of 32", 4.5, partial(integers, bits=4, group=32)),
    "int4": Format(
        "`quantize=int4`: groups of 128",
        4.125,
        settings={"quantize": "int4", **_on_the_cpu("quantize_int4_linear_from_config")},
    ),
    "int4-zeros": Format("int4 with zeros, as in AWQ and GPTQ: groups of 128", 4.15625, with_zeros),
    "nvfp4": Format("NVFP4, groups of 16", 4.5, nvfp4),
    "nf4": Format("NF4, blocks of 64", 4.5, nf4),
    "mxfp4": Format(
        "`quantize=mxfp4`: groups of 32",
        4.25,
        settings={"quantize": "mxfp4", **_on_the_cpu("quantize_mxfp4_linear_from_config")},
    ),
    **{
        kind: Format(f"GGUF {kind}", bits, partial(of_gguf, kind=kind))
        for kind, bits in GGUF_BITS.items()
    },
}


def write(folder: Path, rounding: Rounding) -> None:
    """Write the demo checkpoint with the matrices of its linear layers rounded; the embedding, which
    is its head, stays.
    """
    rounded = {name: rounding(weight.float()) for name, weight in _linears().items()}
    _save(folder, rounded)


def write_w8a8(folder: Path) -> None:
    """Write the demo checkpoint with the matrices of its linear layers as integers of eight bits, and
    inputs that are to become such, as compressed-tensors has them.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, weight in _linears().items():
        scale = (_largest(weight.float()) / 127.5).bfloat16()
        codes = (weight.float() / scale.float()).round().clamp(-128, 127)
        stored |= {name: codes.to(torch.int8), f"{name}_scale": scale}
    _save(folder, stored)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    integer = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**integer, "strategy": "channel"},
        "input_activations": {**integer, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    path.write_text(json.dumps(config), "utf-8")


def _linears() -> dict[str, torch.Tensor]:
    weights = load_file(CHECKPOINT / "model.safetensors")
    return {name: each for name, each in weights.items() if each.dim() == 2 and "embed" not in name}


def _save(folder: Path, changed: Mapping[str, torch.Tensor]) -> None:
    shutil.copytree(CHECKPOINT, folder)
    weights = {**load_file(CHECKPOINT / "model.safetensors"), **changed}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def figures(chosen: Format) -> Figures:
    """Return how far the demo checkpoint in a format is from itself, in float32."""
    settings = {"device": "cpu", "dtype": "float32"}
    plain = Side("A", str(CHECKPOINT), ROOT, settings)
    with TemporaryDirectory() as temporary:
        folder = CHECKPOINT
        if chosen.integers_too or chosen.rounding is not None:
            folder = Path(temporary) / "demo"
        if chosen.integers_too:
            write_w8a8(folder)
        elif chosen.rounding is not None:
            write(folder, chosen.rounding)
        other = Side("B", str(folder), ROOT, {**settings, **chosen.settings})
        return measure(plain, other, tokens=TOKENS).figures


def table(names: list[str]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| format | bits | mean | p99 | largest | same top-1 | same top-5 | perplexity |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for name in names:
        found, chosen = figures(FORMATS[name]), FORMATS[name]
        sizes = (found.mean, found.p99, found.largest)
        shown = [f"{size:.2g}" for size in sizes if size is not None]
        shares = [f"{share:.1%}" for share in (found.top1, found.top5)]
        cells = [chosen.what, f"{chosen.bits:g}", *shown, *shares, f"{found.perplexity_b:.4f}"]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the rows that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = f"of {', '.join(FORMATS)}; all of them unless named"
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=known)
    names = parser.parse_args().formats
    if unknown := [name for name in names if name not in FORMATS]:
        parser.error(f"no formats: {', '.join(unknown)} (known: {', '.join(FORMATS)})")
    print(f"{datetime.date.today()}, torch {torch.__version__}, CPU, {TOKENS:,} tokens", flush=True)
    for line in table(names or list(FORMATS)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
