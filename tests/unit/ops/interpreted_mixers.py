"""The Triton kernels of cached mixers against float64; `test_triton_kernels.py` starts this in the interpreter.

On a GPU the same tests run as they are (`tests/gpu/test_mixer_kernels.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive import relative_error
from ragged import PAGE, STEPS, Row, check, make_row, make_step, randn

import onboard.ops  # noqa: F401
from onboard.errors import UsageError
from onboard.ops.triton import cached_delta_rule, cached_mla, cached_ssm

ops: Any = torch.ops.onboard
PAGED = ("cu_seqlens", "kv_lens", "block_table", "slot_mapping", "batch_info_host")
STATE = ("cu_seqlens", "kv_lens", "state_slots", "batch_info_host")
LOW = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences shall cross the borders of chunks, too."""
    for launcher in (cached_delta_rule, cached_ssm):
        monkeypatch.setattr(launcher, "CHUNK", 16)


def mla(row: Row, heads: int, rank: int, rope: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """Arguments of a cached latent attention."""
    nope, value = 6, 7
    tokens = [randn(1, row.tokens, *shape, dtype=dtype) for shape in [(heads, nope), (heads, rope), (rank,), (1, rope)]]
    weight = (randn(heads * (nope + value), rank) * rank**-0.5).to(dtype)
    cache = randn(row.pages, 1, PAGE, rank + rope, dtype=options.get("cache_dtype", dtype))
    return [*tokens, weight, *row.metadata(*PAGED), cache, options.get("scale")]


def check_mla(row: Row, arguments: list[Any], tolerance: float) -> None:
    check("cached_mla", arguments, 10, row, tolerance, row.args["block_table"].flatten().long())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 16, 4), (3, 24, 10), (20, 32, 16)])
def test_mla(step: str, heads: int, rank: int, rope: int) -> None:
    row = make_step(step)
    check_mla(row, mla(row, heads, rank, rope, scale=0.3), 1e-5)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_mla_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_mla(row, mla(row, 16, 32, 8, dtype), LOW[dtype])


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_mla_is_the_same_for_every_number_of_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_mla, "MOST_SPLITS", splits)
    row = make_row([(1, 1), (1, 150), (1, 64)])
    check_mla(row, mla(row, 4, 16, 4), 1e-5)


def test_mla_reads_lengths_on_the_device_only() -> None:
    row = make_row([(1, 3), (1, 90)])
    row.args["batch_info_host"][3] = 1
    arguments = mla(row, 4, 16, 4)
    wide = [each.double() if each.is_floating_point() else each for each in arguments[:-1]]
    wide[9] = torch.tensor([2, 2, 1, 90], dtype=torch.int32)
    assert relative_error(ops.triton_cached_mla(*arguments), ops.torch_cached_mla(*wide)) < 1e-5


def check_state(name: str, row: Row, arguments: list[Any], cache: int, tolerance: float = 1e-5) -> None:
    check(name, arguments, cache, row, tolerance, row.slots)


def slots(row: Row, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States of every slot that a test's sequences can have, and some more."""
    return randn(len(STEPS["mixed"]) + 4, *shape, dtype=dtype)


def conv(row: Row, channels: int, kernel: int, dilation: int, activation: str | None, **options: Any) -> list[Any]:
    """Arguments of a cached causal convolution, whose input is a slice of a wider projection."""
    dtype = options.get("dtype", torch.float32)
    x = randn(1, row.tokens, channels + 5, dtype=dtype)[..., 3 : channels + 3]
    weight = randn(channels, 1, kernel, dtype=dtype)
    bias = randn(channels, dtype=dtype) if options.get("bias", True) else None
    cache = slots(row, dilation * (kernel - 1), channels, dtype=dtype)
    return [x, weight, bias, *row.metadata(*STATE), cache, dilation, channels, activation]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("channels", "kernel", "dilation", "activation"),
    [(70, 4, 1, "silu"), (5, 3, 2, None), (33, 2, 1, "gelu"), (8, 1, 1, None)],
)
def test_causal_conv(step: str, channels: int, kernel: int, dilation: int, activation: str | None) -> None:
    row = make_step(step)
    arguments = conv(row, channels, kernel, dilation, activation, bias=channels != 33)
    check_state("cached_causal_conv1d", row, arguments, 7)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_causal_conv_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state("cached_causal_conv1d", row, conv(row, 20, 4, 1, "silu", dtype=dtype), 7, LOW[dtype])


def test_causal_conv_refuses_what_it_does_not_know() -> None:
    arguments = conv(make_step("decode"), 8, 4, 1, "mish")
    with pytest.raises(UsageError, match="no activation 'mish'"):
        ops.triton_cached_causal_conv1d(*arguments)
    with pytest.raises(UsageError, match="2 groups of 8 channels"):
        ops.triton_cached_causal_conv1d(*arguments[:-2], 2, None)


def delta_rule(
    row: Row, key_heads: int, heads: int, key: int, value: int, normalise: bool, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Arguments of a cached gated delta rule; keys that are not normalised are short, or no one's states would last."""
    shapes = [(key_heads, key), (key_heads, key), (heads, value), (heads,), (heads,)]
    q, k, v, g, beta = (randn(1, row.tokens, *shape, dtype=dtype) for shape in shapes)
    k = k if normalise else (k * key**-0.5).to(dtype)
    cache = slots(row, heads, key, value)
    return [q, k, v, -g.abs(), beta.sigmoid(), *row.metadata(*STATE), cache, None if normalise else 0.4, normalise]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("key_heads", "heads", "key", "value", "normalise"),
    [(2, 4, 16, 8, True), (1, 3, 5, 20, False), (1, 16, 8, 3, True)],
)
def test_gated_delta_rule(step: str, key_heads: int, heads: int, key: int, value: int, normalise: bool) -> None:
    row = make_step(step)
    arguments = delta_rule(row, key_heads, heads, key, value, normalise)
    check_state("cached_gated_delta_rule", row, arguments, 9)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_gated_delta_rule_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state("cached_gated_delta_rule", row, delta_rule(row, 2, 4, 16, 8, True, dtype), 9, LOW[dtype])


def test_a_chunk_of_equal_keys_is_solved() -> None:
    """The system's powers would overflow what float32 can hold apart, its inverse does not."""
    row = make_row([(70, 70)])
    arguments = delta_rule(row, 1, 1, 8, 8, True)
    arguments[1] = arguments[1][:, :1].expand_as(arguments[1]).contiguous()
    arguments[3], arguments[4] = torch.zeros_like(arguments[3]), torch.ones_like(arguments[4])
    check_state("cached_gated_delta_rule", row, arguments, 9)


def ssm(row: Row, heads: int, groups: int, size: int, state: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Arguments of a cached Mamba 2 scan."""
    shapes = [(heads, size), (groups, state), (groups, state), (heads,)]
    x, B, C, dt = (randn(1, row.tokens, *shape, dtype=dtype) for shape in shapes)
    A, D, bias = -randn(heads).abs(), randn(heads, dtype=dtype), randn(heads, dtype=dtype)
    limits = [0.1, 2.0] if groups > 1 else [0.0, float("inf")]
    return [x, A, B, C, D, dt, bias, *row.metadata(*STATE), slots(row, heads, size, state), limits, 8]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "groups", "size", "state"), [(4, 2, 8, 16), (3, 1, 5, 20), (16, 1, 3, 4)])
def test_ssm(step: str, heads: int, groups: int, size: int, state: int) -> None:
    row = make_step(step)
    check_state("cached_ssm", row, ssm(row, heads, groups, size, state), 11)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_ssm_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state("cached_ssm", row, ssm(row, 4, 1, 8, 16, dtype), 11, LOW[dtype])


def selective_scan(
    row: Row, channels: int, state: int, optional: bool, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Arguments of a cached Mamba scan."""
    x, dt, z = (randn(1, row.tokens, channels, dtype=dtype) for _ in range(3))
    B, C = (randn(1, row.tokens, state, dtype=dtype) for _ in range(2))
    extras = [randn(channels, dtype=dtype), z, randn(channels, dtype=dtype)] if optional else [None] * 3
    return [x, dt, -randn(channels, state).abs(), B, C, *extras, *row.metadata(*STATE), slots(row, channels, state)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("channels", "state", "optional"), [(70, 16, True), (9, 5, False)])
def test_selective_scan(step: str, channels: int, state: int, optional: bool) -> None:
    row = make_step(step)
    check_state("cached_selective_scan", row, selective_scan(row, channels, state, optional), 12)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_selective_scan_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state("cached_selective_scan", row, selective_scan(row, 9, 16, True, dtype), 12, LOW[dtype])
