"""Weights of four or eight bits over few tokens on Hopper GPUs: how their kernel is launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onboard.ops.cuda.kernel import Kernel
from onboard.ops.cuda.nvrtc import compiled
from onboard.ops.four_bits.four_bits import GROUPS, RUN, Words
from onboard.ops.linear.activation import number_in_cuda
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.ops.triton.launch import power_of_two, processors, runs_hopper_code

_MOST_TOKENS, _MOST_OF_BYTES = 16, 8
_MOST_INPUTS = {1: 96 * RUN, 8: 96 * RUN, 16: 44 * RUN}
"""Of so many tokens at most, that a program's memory holds."""
BYTES = "e4m3"
"""The levels of a weight [outputs, inputs] that has a byte for each code, as PyTorch keeps it."""
_MOST_CLUSTER = 4
_STAGE = 1152
"""Bytes of sixteen rows' words and scales of a run, in a warp's ring."""
_MANY_ROWS = 36
"""Of a processor, for one token."""
_SOURCES = ("tiny_numbers.cuh", "few_tokens.cu")
_SCALES = {
    torch.bfloat16: 0, torch.uint8: 1, torch.float32: 2, torch.float16: 3, torch.float8_e4m3fn: 4
}  # fmt: skip
_ROUTING = {torch.bfloat16: 0, torch.float32: 1}
_ORDERS = {"gate_up": 0, "up_gate": 1, "interleaved": 2}


@dataclass(frozen=True)
class Tiles:
    """How the kernel is divided: warps along inputs and along rows, programs along inputs, runs that
    are on their way, programs of a processor, batches of a ring (of weights that have one); see
    `few_tokens.cu`.
    """

    parts: int = 4
    height: int = 2
    cluster: int = 1
    batch: int = 4
    resident: int = 2
    ring: int = 0


@dataclass(frozen=True)
class Experts:
    """Which of so many experts' weights are read: of `chosen` [pairs], an expert's outputs for each;
    with `routing` weights [pairs] their sum, of a row of inputs each.
    """

    chosen: Tensor
    count: int
    routing: Tensor | None = None


@dataclass(frozen=True)
class Blocks:
    """Pairs of tokens and of `count` experts, sorted by expert and cut into blocks: `table` [blocks, 3]
    has a block's expert, its first place, and the end of its expert's; `order` [pairs] which pair has a
    place. Both are int32. With `top` experts a token, rows of inputs are tokens' and those of outputs are
    places'; with `routing` weights [pairs] rows of inputs are places', and those of outputs are pairs'.
    """

    table: Tensor
    order: Tensor
    count: int
    top: int = 0
    routing: Tensor | None = None


@dataclass(frozen=True)
class Around:
    """What is done before a product and behind it."""

    residual: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    activation: str = ""
    order: str = "gate_up"
    limit: float | None = None
    alpha: float | None = None
    offset: float = 0.0


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel."""

    _pointers = (
        *("out", "x", "weight", "scale", "zero", "whole"),
        *("bias", "residual", "norm", "chosen", "routing", "table", "order"),
    )
    _sizes = (
        *("tokens", "outputs", "inputs", "groups", "tiles", "pairs", "experts"),
        *("blocks", "top", "four", "sixty_four"),
    )
    _numbers = ("eps", "limit", "alpha", "offset")
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_int) for name in _sizes),
        *((name, ctypes.c_float) for name in _numbers),
    )


@dataclass(frozen=True)
class _Form:
    """What the kernel is compiled for, and the bytes of memory of a program."""

    macros: tuple[tuple[str, int], ...]
    threads: int
    shared: int


def suits(x: Tensor, words: Words) -> bool:
    """Whether the kernel computes products of x [tokens, inputs]: few, and as `suits_weight` says."""
    return (
        len(x) <= (_MOST_OF_BYTES if words.levels == BYTES else _MOST_TOKENS)
        and x.shape[1] <= _MOST_CLUSTER * _MOST_INPUTS[columns_of(len(x))]
        and x.storage_offset() % 4 == 0
        and suits_weight(x.device, x.dtype, x.shape[1], words)
    )


def columns_of(tokens: int) -> int:
    """Return how many tokens the kernel is compiled for."""
    return 1 if tokens == 1 else 8 if tokens <= 8 else 16


def suits_weight(device: torch.device, dtype: torch.dtype, inputs: int, words: Words) -> bool:
    """Whether the kernel knows a weight of so many inputs: on Hopper GPUs, in bfloat16, whose exponents
    have room for what it puts between codes and inputs.
    """
    whole_runs = words.group % RUN == 0 or words.group >= inputs
    if words.levels == BYTES:
        codes = inputs % run_of(BYTES) == 0 and words.values.is_contiguous()
    elif words.levels == "e2m1":
        codes = (whole_runs or words.group in GROUPS) and words.zero is None
    else:
        codes = (whole_runs or words.group in GROUPS[1:]) and (
            words.zero is None or words.zero.dtype == torch.uint8
        )
    return (
        codes
        and runs_hopper_code(device)
        and dtype == torch.bfloat16
        and inputs % 4 == 0
        and words.scale.dtype in _SCALES
        and (words.bias is None or words.bias.dtype == dtype)
    )


def run_of(levels: str) -> int:
    """Return how many inputs sixteen words have."""
    return RUN // 2 if levels == BYTES else RUN


def suits_routing(routing: Tensor) -> bool:
    """Whether the kernel knows weights of this type."""
    return routing.dtype in _ROUTING


def runs_of(words: Words, inputs: int, parts: int) -> int:
    """Return how many runs a warp has, which has one of so many parts of the inputs."""
    return -(-inputs // (run_of(words.levels) * parts))


def batch_of(words: Words, inputs: int, parts: int) -> int:
    """Return how many of a warp's runs are on their way."""
    return min(_most_ahead(words), runs_of(words, inputs, parts))


def _most_ahead(words: Words) -> int:
    """Return how many runs may be: of small groups all scales are in registers, too."""
    return 2 if words.group < run_of(words.levels) else 4


def tiles_for(tokens: int, rows: int, inputs: int, words: Words, many: int) -> Tiles:
    """Return the tiles for `rows` of a weight on so many processors; measured over the layers of a dense
    model of 8 billion parameters.
    """
    if tokens == 1:
        return _for_one_token(rows, inputs, words, many)
    batch, columns = _most_ahead(words), columns_of(tokens)
    cluster = power_of_two(-(-inputs // _MOST_INPUTS[columns]))
    if columns > 8:  # whose sums leave words fewer registers
        shared, alone = Tiles(4, 3, cluster, batch, 1), Tiles(8, 2, batch=2, resident=1)
        return shared if cluster > 1 else alone
    low, high = Tiles(8, 2, batch=batch, resident=1), Tiles(4, 4, batch=batch, resident=1)
    if cluster > 1 or turns(rows, high, many) <= turns(rows, low, many):
        return replace(high, cluster=cluster)
    return low


def _for_one_token(rows: int, inputs: int, words: Words, many: int) -> Tiles:
    """Return twelve warps of a processor, which have more registers than sixteen; of few rows sixteen,
    whose parts are shorter, so that no processor is idle.
    """
    each = rows / many
    parts, height = (4, 3) if each > _MANY_ROWS else (8, 2) if each > 16 else (16, 1)
    return Tiles(parts, height, batch=batch_of(words, inputs, parts), resident=1)


def turns(rows: int, tiles: Tiles, many: int) -> int:
    """Return how many rows a processor has, one tile after the other."""
    height = 16 * tiles.height
    return -(-rows // (height * many)) * height


def product(
    x: Tensor, words: Words, around: Around, tiles: Tiles | None = None, experts: Experts | None = None
) -> Tensor:  # fmt: skip
    """Return products of x [rows, inputs]: of a linear layer [rows, outputs]; of each chosen expert with
    the one row of x [pairs, outputs]; or, with routing weights, the sum of what experts bring, with a
    row of x each [1, outputs].
    """
    roles = 2 if around.gated else 1
    outputs = words.values.shape[-2] // roles
    pairs = 1 if experts is None else experts.chosen.numel()
    summed = experts is not None and experts.routing is not None
    others, slots = (1, power_of_two(pairs)) if summed else (pairs, 1)
    tokens = len(x) if experts is None else 1
    tiles = tiles or tiles_for(
        tokens, outputs * roles * others, x.shape[1], words, processors(x.device)
    )
    tiles = replace(tiles, parts=max(tiles.parts, slots))
    columns = columns_of(tokens)
    form = _form(x.shape[1], columns, words, around, tiles, slots, experts)
    count = -(-outputs // (16 * tiles.height // roles))
    programs = -(-count // -(-count * others // _clusters(form, x.device, tiles.cluster)))
    out = x.new_empty(tokens * others, outputs)
    arguments = _arguments(out, x, words, around, experts, (tokens, count, pairs))
    _kernel(form, x.device).launch((programs * tiles.cluster, others), arguments, tiles.cluster)
    return out


def product_of_blocks(
    x: Tensor, words: Words, around: Around, blocks: Blocks, columns: int, tiles: Tiles
) -> Tensor:  # fmt: skip
    """Return products of blocks of at most `columns` (8 or 16) pairs with their experts [pairs, outputs];
    rows of x [rows, inputs] are what `Blocks` says.
    """
    roles = 2 if around.gated else 1
    outputs, pairs = words.values.shape[-2] // roles, len(blocks.order)
    form = _form(x.shape[1], columns, words, around, tiles, 1, blocks)
    count = -(-outputs // (16 * tiles.height // roles))
    programs = _clusters(form, x.device, tiles.cluster)
    out = x.new_empty(pairs, outputs)
    arguments = _arguments(out, x, words, around, blocks, (pairs, count, pairs))
    _kernel(form, x.device).launch((programs * tiles.cluster, 1), arguments, tiles.cluster)
    return out


def _form(
    inputs: int, columns: int, words: Words, around: Around, tiles: Tiles, slots: int,
    experts: Experts | Blocks | None,
) -> _Form:  # fmt: skip
    run = run_of(words.levels)
    groups = 1 if words.group >= run else run // words.group
    routing = experts.routing if experts else None
    routed = 0 if not isinstance(experts, Blocks) else 1 if routing is None else 2
    integers = words.levels not in ("e2m1", BYTES)
    each = -(-inputs // (run * (tiles.parts // slots) * tiles.cluster))
    in_blocks = words.scale.shape[-2] != words.values.shape[-2]  # one may have all inputs, too
    scaled_rows = BLOCK if words.levels == BYTES and in_blocks else 1
    held = min(8 // groups, tiles.batch)  # runs whose groups are columns
    assert columns > 1 or tiles.batch % held == 0, "all runs of a batch are computed"
    own_rows = columns > 1 and tiles.parts == tiles.cluster == 1  # nothing is added up
    ring = tiles.ring if own_rows and _folds(words) else 0
    in_pairs = groups > 1 or (words.group == run and each % 2 == tiles.batch % 2 == 0)
    macros = {
        "PARTS": tiles.parts, "HEIGHT": tiles.height, "CLUSTER": tiles.cluster, "BATCH": tiles.batch,
        "RESIDENT": tiles.resident, "BITS": 512 // run,
        "SCALED_ROWS": scaled_rows, "TOKENS": columns, "ROUTED": routed,
        "INTEGERS": integers, "GROUP": words.group, "GROUPS": groups, "RING": ring,
        "EVEN": in_pairs and words.scale.shape[-1] % 2 == 0,
        "SCALE_TYPE": _SCALES[words.scale.dtype], "SLOTS": slots, "SUMMED": routing is not None and not routed,
        "ROUTING_TYPE": 0 if routing is None else _ROUTING[routing.dtype],
        "EARLY": experts is None or routing is not None, "GATED": around.gated, "ORDER": _ORDERS[around.order],
        "ACTIVATION": number_in_cuda(around.activation),
        "HAS_ZERO": words.zero is not None, "HAS_WHOLE": words.whole is not None, "HAS_BIAS": words.bias is not None,
        "HAS_RESIDUAL": around.residual is not None, "HAS_NORM": around.norm is not None,
        "HAS_LIMIT": around.limit is not None, "HAS_ALPHA": around.alpha is not None,
    }  # fmt: skip
    runs = tiles.parts * each
    planes = run // 32  # of a word's half
    kept = planes * (64 * columns if columns > 1 else 64 if groups == 1 else 128)
    of_inputs = (runs + 1) * groups * columns if integers else 0
    of_rows = 0 if own_rows else 2 * tiles.parts * columns * 16 * tiles.height
    of_norm = columns * (tiles.parts * tiles.height + 1) if around.norm is not None else 0
    return _Form(
        tuple((name, int(value)) for name, value in macros.items()),
        threads=32 * tiles.parts * tiles.height,
        shared=kept * (runs + 1)
        + 4 * (of_inputs + of_rows + of_norm)
        + ring * tiles.batch * _STAGE * tiles.height,
    )


def _folds(words: Words) -> bool:
    """Whether weights are multiplied by their scales, powers of two, before inputs are (MXFP4)."""
    return words.levels == "e2m1" and words.group == 32 and words.scale.dtype == torch.uint8


@cache
def _kernel(form: _Form, device: torch.device) -> Kernel:
    code = compiled(_source(), dict(form.macros), "sm_90a")
    with torch.cuda.device(device):
        return Kernel(code, "few_tokens", form.threads, form.shared)


def _source() -> str:
    here = Path(__file__).parent
    return "".join((here / name).read_text(encoding="utf-8") for name in _SOURCES)


@cache
def _clusters(form: _Form, device: torch.device, cluster: int) -> int:
    return _kernel(form, device).clusters(cluster)


def _arguments(
    out: Tensor, x: Tensor, words: Words, around: Around, experts: Experts | Blocks | None,
    sizes: tuple[int, int, int],
) -> _Arguments:  # fmt: skip
    tokens, tiles, pairs = sizes
    blocks = experts if isinstance(experts, Blocks) else None
    tensors = (
        out, x, words.values, words.scale, words.zero, words.whole, words.bias, around.residual, around.norm,
        experts.chosen if isinstance(experts, Experts) else None, experts.routing if experts else None,
        blocks.table if blocks else None, blocks.order if blocks else None,
    )  # fmt: skip
    return _Arguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        tokens, out.shape[1], x.shape[1], words.scale.shape[-1], tiles, pairs, experts.count if experts else 0,
        len(blocks.table) if blocks else 0, blocks.top if blocks else 0, 4, 64,
        around.eps, around.limit or 0.0, around.alpha or 0.0, around.offset,
    )  # fmt: skip
