"""Attention of decoding sequences on Hopper GPUs, with the rotation and the join of its parts in one
launch: how its kernel is launched.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onboard.ops.attention.rotation_kernels import Rotation, decoding_rotation
from onboard.ops.cuda.kernel import Kernel
from onboard.ops.cuda.nvrtc import compiled
from onboard.ops.triton.launch import power_of_two_in, processors, runs_hopper_code

_TILE, _PIECE = 16, 8
"""Keys that a warp takes at a time; channels of sixteen bytes."""
_MOST_CHANNELS, _MOST_GROUP, _MOST_CLUSTER = 128, 16, 8
_MOST_PROGRAMS = 2
"""Of a processor."""
_NUMBERS = {torch.bfloat16: 0, torch.float32: 2}
_TURNS = ("rope_cached", "rope_pairs")
_SOURCE = "decode_attention.cu"


@dataclass(frozen=True)
class Sequences:
    """What a step's sequences have: where their new tokens start [sequences + 1], how many keys
    [sequences], their pages [sequences, pages], all int32, and each token's slot [tokens] int64.
    """

    starts: Tensor
    lengths: Tensor
    pages: Tensor
    slots: Tensor
    count: int


@dataclass(frozen=True)
class Scores:
    """What becomes of scores: as in `torch_attention`, but `window` and `chunk` are 0 for none."""

    scale: float
    sinks: Tensor | None = None
    window: int = 0
    cap: float | None = None
    chunk: int = 0


@dataclass(frozen=True)
class _Division:
    """Warps of a program, programs that share a sequence's keys, programs of a processor."""

    warps: int
    cluster: int
    resident: int


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel."""

    _pointers = (
        *("out", "query", "key", "value", "starts", "lengths", "table", "slots"),
        *("keys", "values", "sinks", "cos", "sin", "query_norm", "key_norm"),
    )
    _strides = (
        *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
        *("table_row", "keys_page", "keys_head", "keys_slot"),
        *("values_page", "values_head", "values_slot", "cos_token", "sin_token"),
    )
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_longlong) for name in _strides),
        *((name, ctypes.c_float) for name in ("scale", "cap", "eps")),
    )


def suits_one_launch(
    query: Tensor, key: Tensor, value: Tensor, count: int, caches: tuple[Tensor, Tensor],
    sinks: Tensor | None, rotation: Rotation | None,
) -> bool:  # fmt: skip
    """Whether the kernel knows queries [tokens, heads, dim], keys and values of so many sequences and
    of these caches: on Hopper GPUs, all in bfloat16, of at most 128 channels and sixteen heads on a
    key head; and where the device has programs for all at a time, beyond which Triton's is faster.
    """
    keys, values = caches
    heads, dim = query.shape[1:]
    return (
        runs_hopper_code(query.device)
        and count * keys.shape[1] <= _MOST_PROGRAMS * processors(query.device)
        and all(each.dtype == torch.bfloat16 for each in (query, key, value, *caches))
        and max(dim, values.shape[3]) <= _MOST_CHANNELS
        and heads // keys.shape[1] <= _MOST_GROUP
        and keys.shape[2] % _TILE == 0
        and all(map(_is_of_pieces, (query, key, value, *caches)))
        and (sinks is None or sinks.dtype in _NUMBERS)
        and (rotation is None or _knows(rotation))
    )


def _is_of_pieces(x: Tensor) -> bool:
    """Whether all of a tensor's rows begin and end where sixteen bytes do."""
    sizes = (x.data_ptr() // x.element_size(), x.shape[-1], *x.stride()[:-1])
    return x.stride(-1) == 1 and all(size % _PIECE == 0 for size in sizes)


def _is_whole(weight: Tensor) -> bool:
    """Whether a norm's weight is read as rows are."""
    return weight.dtype == torch.bfloat16 and _is_of_pieces(weight)


def _knows(rotation: Rotation) -> bool:
    norms = rotation.norms
    return (
        (norms is None or all(map(_is_whole, norms[:2])))
        and rotation.turns in _TURNS
        and rotation.size % (2 * _PIECE) == 0
        and rotation.cos.dtype == rotation.sin.dtype
        and rotation.cos.dtype in _NUMBERS
    )


def decode_attention(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, caches: tuple[Tensor, Tensor],
    scores: Scores, rotation: Rotation | None,
) -> None:  # fmt: skip
    """Store each sequence's one new key and value, and write what its queries mix to `out`
    [tokens, heads, value_dim].
    """
    keys, values = caches
    tables, steps, turning = decoding_rotation(rotation)
    norms = None if rotation is None else rotation.norms
    heads, dim = query.shape[1:]
    kv_heads, page = keys.shape[1:3]
    most_keys = scores.window or scores.chunk or sequences.pages.shape[1] * page
    division = _division(kv_heads * sequences.count, most_keys, processors(query.device))
    cos, sinks = tables[0], scores.sinks
    macros = {
        "DIM": dim, "VALUE_DIM": values.shape[3], "GROUP": heads // kv_heads, "PAGE": page, "WARPS": division.warps,
        "CLUSTER": division.cluster, "RESIDENT": division.resident, "WINDOW": scores.window, "CHUNK": scores.chunk,
        "HAS_SINKS": sinks is not None, "HAS_NORMS": norms is not None, "HAS_CAP": scores.cap is not None,
        "TABLE_TYPE": 0 if cos is None else _NUMBERS[cos.dtype],
        "SINK_TYPE": 0 if sinks is None else _NUMBERS[sinks.dtype],
        **{name: turning.get(name, 0) for name in ("SIZE", "STEP", "TURNS")},
    }  # fmt: skip
    tensors = (
        out, query, key, value, sequences.starts, sequences.lengths, sequences.pages, sequences.slots, keys, values,
        sinks, *tables, *(norms[:2] if norms else (None, None)),
    )  # fmt: skip
    strides = (
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], sequences.pages.stride(0),
        *keys.stride()[:3], *values.stride()[:3], *steps,
    )  # fmt: skip
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    numbers = (scores.scale, scores.cap or 0.0, norms.eps if norms else 0.0)
    arguments = _Arguments(*pointers, *strides, *numbers)
    grid = (division.cluster * kv_heads, sequences.count)
    form = tuple((name, int(macro)) for name, macro in macros.items())
    _kernel(form, query.device).launch(grid, arguments, division.cluster)


def _division(pairs: int, most_keys: int, processors: int) -> _Division:
    """Return how to divide the keys of so many pairs of a sequence and a key head: all processors
    have a program, or some, whose warps are less then.
    """
    if pairs > processors:
        return _Division(4, 1, _MOST_PROGRAMS)
    rounds = -(-most_keys // (8 * _TILE))
    return _Division(
        8, min(_MOST_CLUSTER, power_of_two_in(processors // pairs), power_of_two_in(rounds)), 1
    )


def _shared(macros: dict[str, int]) -> int:
    """Return the bytes of a program's `Memory`."""
    columns = -(-macros["GROUP"] // 8)
    sums = 16 * columns * 32 * 4 * -(-macros["VALUE_DIM"] // 64)
    peaks = 4 * 2 * columns * 8
    rows = 2 * (macros["GROUP"] + 2) * max(32 * -(-macros["DIM"] // 32), macros["VALUE_DIM"])
    warps, cluster = macros["WARPS"], macros["CLUSTER"]
    return sums * (warps + 1) + peaks * (warps + cluster) + rows


@cache
def _kernel(form: tuple[tuple[str, int], ...], device: torch.device) -> Kernel:
    macros = dict(form)
    code = compiled((Path(__file__).parent / _SOURCE).read_text(encoding="utf-8"), macros, "sm_90a")
    with torch.cuda.device(device):
        return Kernel(code, "decode_attention", 32 * macros["WARPS"], _shared(macros))
