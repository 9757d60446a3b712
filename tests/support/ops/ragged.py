"""Rows of tokens of several sequences with their metadata, and a cached op beside its reference in
float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onboard.ops.triton.launch import INTERPRETED
from tests.support.ops.naive import relative_error

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
HOPPER_SIZES = [(20, 128, 32), (70, 256, 16), (40, 512, 64)] if DEVICE == "cuda" else []
"""Heads, rank and rotated channels of latent attention that has a kernel of its own on Hopper GPUs."""
PAGE = 4
SLOTS = 8
PAGED = ("cu_seqlens", "kv_lens", "block_table", "slot_mapping", "batch_info_host")
STATE = ("cu_seqlens", "kv_lens", "state_slots", "batch_info_host")
STEPS = {
    "prefill": [(5, 5), (1, 1), (18, 18)],
    "chunked prefill": [(6, 14), (17, 25)],
    "decode": [(1, 1), (1, 4), (1, 5), (1, 66)],
    "mixed": [(1, 20), (7, 7), (2, 3), (1, 1)],
}


@dataclass
class Row:
    """The metadata of one step; `new` sequences own their rows, the rest is padding."""

    args: dict[str, Tensor]
    tokens: int
    real_tokens: int
    slots: Tensor
    """Of the sequences that are no padding."""
    pages: int

    def metadata(self, *names: str) -> list[Tensor]:
        return [self.args[name] for name in names]

    def spoil(self, cache: Tensor, paged: bool) -> None:
        """Put NaN, as an earlier owner may have left it, wherever no sequence of the row has stored
        anything.
        """
        starts, lengths = self.args["cu_seqlens"].tolist(), self.args["kv_lens"].tolist()
        known = torch.zeros(
            cache.shape[:1] + cache.shape[2:3] if paged else cache.shape[:1],
            dtype=torch.bool,
            device="cpu",
        )
        for sequence, length in enumerate(lengths):
            before = length - (starts[sequence + 1] - starts[sequence])
            position = torch.arange(before, device="cpu")
            if paged:
                known[
                    self.args["block_table"][sequence].cpu()[position // PAGE], position % PAGE
                ] = True
            elif before:
                known[self.args["state_slots"][sequence].cpu()] = True
        (cache.transpose(1, 2) if paged else cache)[~known.to(cache.device)] = torch.nan


def make_row(
    lengths: list[tuple[int, int]], padding_sequences: int = 0, unused_rows: int = 0
) -> Row:
    """Sequences of (new, all) tokens in random slots and pages; padding sequences write to slot 0
    and page 0.
    """
    spans = lengths + [(1, 1)] * padding_sequences
    new, kv_lens = (torch.tensor(column) for column in zip(*spans, strict=True))
    columns = -(-int(kv_lens.max()) // PAGE) + 2
    order = torch.randperm(len(lengths) * columns).view(len(lengths), columns) + 1
    table = torch.cat([order, torch.zeros(padding_sequences, columns, dtype=torch.int64)])
    mapping = []
    for row, (count, length) in enumerate(spans):
        position = torch.arange(length - count, length)
        mapping.append(table[row][position // PAGE] * PAGE + position % PAGE)
    slots = torch.randperm(len(lengths) + 2)[: len(lengths)] + 1
    tokens = int(new.sum()) + unused_rows
    args = {
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)]).int(),
        "kv_lens": kv_lens.int(),
        "block_table": table.int(),
        "slot_mapping": torch.cat([*mapping, torch.zeros(unused_rows, dtype=torch.int64)]),
        "state_slots": torch.cat([slots, torch.zeros(padding_sequences, dtype=torch.int64)]),
    }
    args = {name: value.to(DEVICE) for name, value in args.items()}
    info = [len(spans), int(new.sum()), int(new.max()), int(kv_lens.max())]
    args["batch_info_host"] = torch.tensor(info, dtype=torch.int32)
    real = sum(count for count, _ in lengths)
    return Row(args, tokens, real, slots.to(DEVICE), len(lengths) * columns + 1)


def make_step(name: str) -> Row:
    """One of `STEPS`, padded as the runtime pads: decode with sequences, other steps with unused
    rows.
    """
    return make_row(STEPS[name], 2 if name == "decode" else 0, 0 if name == "decode" else 3)


def captured(row: Row, longest: int) -> dict[str, Tensor]:
    """Return the metadata of a row as that of a step that a captured one serves: one more sequence has
    the unused rows, on the spare page, two more have none, and what the host says is of another step,
    whose longest query has `longest` tokens.
    """
    unused, args = row.tokens - row.real_tokens, dict(row.args)
    more = torch.zeros(3, args["block_table"].shape[1], device=DEVICE).int()
    ends = torch.full((3,), row.tokens, device=DEVICE)
    args["cu_seqlens"] = torch.cat([args["cu_seqlens"], ends]).int()
    lengths = torch.tensor([unused, 0, 0], device=DEVICE)
    args["kv_lens"] = torch.cat([args["kv_lens"], lengths]).int()
    args["block_table"] = torch.cat([args["block_table"], more])
    sequences = len(args["kv_lens"])
    args["batch_info_host"] = torch.tensor([sequences, row.tokens, longest, 7], dtype=torch.int32)
    return args


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def double(values: list[Any]) -> list[Any]:
    """The same arguments in float64, in memory of their own."""
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def check(
    name: str,
    arguments: list[Any],
    cache: int,
    row: Row,
    tolerance: float,
    used: Tensor,
    backend: str = "triton",
) -> None:
    """Compare `<backend>_<name>` with `torch_<name>` in float64: outputs, and the cache at position
    `cache`.

    What no sequence has stored there is NaN before, as an earlier owner may have left it.
    `used` are the indices of the cache that the sequences own; others, but the spare 0, must stay
    as they were.
    """
    ops: Any = torch.ops.onboard
    row.spoil(arguments[cache], "mla" in name)
    before = arguments[cache].clone()
    theirs = double(arguments)
    expected = getattr(ops, f"torch_{name}")(*theirs)
    actual = getattr(ops, f"{backend}_{name}")(*arguments)
    assert actual.shape == expected.shape
    # Zeros, or padding sequences
    assert not actual[:, row.real_tokens :].any() or row.real_tokens + 2 == row.tokens
    assert relative_error(actual[:, : row.real_tokens], expected[:, : row.real_tokens]) < tolerance
    if before.numel():
        stored, wanted = arguments[cache][used], theirs[cache][used]
        assert torch.equal(stored.isnan(), wanted.isnan())
        assert relative_error(stored.nan_to_num(), wanted.nan_to_num()) < tolerance
    left = torch.ones(len(before), dtype=torch.bool, device=before.device)
    left[used], left[0] = False, False
    torch.testing.assert_close(arguments[cache][left], before[left], rtol=0, atol=0, equal_nan=True)


def mla(
    row: Row, heads: int, rank: int, rope: int, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Any]:
    """Arguments of a cached latent attention."""
    nope, value = 6, 7
    tokens = [
        randn(1, row.tokens, *shape, dtype=dtype)
        for shape in [(heads, nope), (heads, rope), (rank,), (1, rope)]
    ]
    weight = (randn(heads * (nope + value), rank) * rank**-0.5).to(dtype)
    cache = randn(row.pages, 1, PAGE, rank + rope, dtype=options.get("cache_dtype", dtype))
    return [*tokens, weight, *row.metadata(*PAGED), cache, options.get("scale")]


def slots(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """States of every slot that a test's sequences can have, and some more."""
    return randn(SLOTS, *shape, dtype=dtype)


def conv(
    row: Row, channels: int, kernel: int, dilation: int, activation: str | None, **options: Any
) -> list[Any]:
    """Arguments of a cached causal convolution, whose input is a slice of a wider projection."""
    dtype = options.get("dtype", torch.float32)
    x = randn(1, row.tokens, channels + 5, dtype=dtype)[..., 3 : channels + 3]
    weight = randn(channels, 1, kernel, dtype=dtype)
    bias = randn(channels, dtype=dtype) if options.get("bias", True) else None
    cache = slots(dilation * (kernel - 1), channels, dtype=dtype)
    return [x, weight, bias, *row.metadata(*STATE), cache, dilation, channels, activation]


def delta_rule(
    row: Row,
    key_heads: int,
    heads: int,
    key: int,
    value: int,
    normalise: bool,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """Arguments of a cached gated delta rule; keys that are not normalised are short, or no one's
    states would last.
    """
    shapes = [(key_heads, key), (key_heads, key), (heads, value), (heads,), (heads,)]
    q, k, v, g, beta = (randn(1, row.tokens, *shape, dtype=dtype) for shape in shapes)
    k = k if normalise else (k * key**-0.5).to(dtype)
    cache = slots(heads, key, value)
    return [
        q,
        k,
        v,
        -g.abs(),
        beta.sigmoid(),
        *row.metadata(*STATE),
        cache,
        None if normalise else 0.4,
        normalise,
    ]


def ssm(
    row: Row, heads: int, groups: int, size: int, state: int, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Arguments of a cached Mamba 2 scan."""
    shapes = [(heads, size), (groups, state), (groups, state), (heads,)]
    x, B, C, dt = (randn(1, row.tokens, *shape, dtype=dtype) for shape in shapes)
    A, D, bias = -randn(heads).abs(), randn(heads, dtype=dtype), randn(heads, dtype=dtype)
    limits = [0.1, 2.0] if groups > 1 else [0.0, float("inf")]
    return [x, A, B, C, D, dt, bias, *row.metadata(*STATE), slots(heads, size, state), limits, 8]


def selective_scan(
    row: Row, channels: int, state: int, optional: bool, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Arguments of a cached Mamba scan."""
    x, dt, z = (randn(1, row.tokens, channels, dtype=dtype) for _ in range(3))
    B, C = (randn(1, row.tokens, state, dtype=dtype) for _ in range(2))
    extras = (
        [randn(channels, dtype=dtype), z, randn(channels, dtype=dtype)] if optional else [None] * 3
    )
    return [
        x,
        dt,
        -randn(channels, state).abs(),
        B,
        C,
        *extras,
        *row.metadata(*STATE),
        slots(channels, state),
    ]
