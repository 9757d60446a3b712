"""The Triton kernels on the CPU, in Triton's interpreter; `test_triton_kernels.py` starts this in
its own process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import onboard.ops  # noqa: F401
from onboard.errors import UsageError
from onboard.ops.attention import triton_cached_attention as launcher
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.triton.ragged_blocks import block_of, most_blocks
from tests.support.ops.float8 import exact_and_bound
from tests.support.ops.naive import (
    Batch,
    Options,
    cached_attention,
    forget,
    make_batch,
    padded_to_captured,
    relative_error,
)

ops = torch.ops.onboard

# The interpreter truncates where hardware rounds, hence twice the usual error of bfloat16.
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2.5e-2}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])
SLOPES = 0.3 ** torch.arange(6)
VARIANTS = {
    "plain": Options(),
    "scale": Options(scale=0.7),
    "window": Options(sliding_window=5),
    "long window": Options(sliding_window=70),
    "chunks": Options(chunk_size=7),
    "long chunks": Options(sinks=SINKS, chunk_size=60),
    "cap": Options(logit_cap=0.8),
    "sinks": Options(sinks=SINKS),
    "slopes": Options(alibi_slopes=SLOPES),
    "all": Options(0.7, SINKS, 37, 0.8, SLOPES, 50),
}
STEPS = {
    "prefill": [(5, 5), (1, 1), (17, 17)],
    "chunked prefill": [(5, 12), (9, 133), (40, 90)],
    "decode": [(1, 1), (1, 8), (1, 9), (1, 230), (1, 64), (1, 65)],
    "mixed": [(1, 20), (7, 7), (4, 111), (1, 16)],
}


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 100), (2, 5, 4, 24), (1, 1, 2048), (7,)])
def test_rmsnorm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    actual = ops.triton_rmsnorm(x, weight, 1e-3)
    assert actual.dtype == dtype
    assert relative_error(actual, ops.torch_rmsnorm(x, weight, 1e-3)) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rmsnorm(dtype: torch.dtype) -> None:
    x, residual, weight = (
        (torch.randn(2, 5, 40) * 3).to(dtype),
        torch.randn(2, 5, 40).to(dtype),
        torch.randn(40),
    )
    expected = ops.torch_rmsnorm(x.double(), weight.double(), 1e-3)
    assert relative_error(ops.triton_wide_rmsnorm(x, weight, 1e-3), expected) < DTYPES[dtype]
    normed, total = ops.triton_fused_add_wide_rmsnorm(x, residual, weight, 1e-3)
    assert normed.dtype == total.dtype == dtype
    assert relative_error(total, x.double() + residual.double()) < DTYPES[dtype]
    assert (
        relative_error(normed, ops.torch_rmsnorm(total.double(), weight.double(), 1e-3))
        < DTYPES[dtype]
    )


def test_rmsnorm_of_heads_inside_a_projection_and_its_dtypes() -> None:
    x, weight = torch.randn(2, 5, 60).bfloat16(), torch.randn(8)
    part = x[..., 16:48].view(2, 5, 4, 8)
    assert not part.is_contiguous()
    actual = ops.triton_rmsnorm(part, weight, 1e-6)
    assert actual.dtype == torch.float32
    assert relative_error(actual, ops.torch_rmsnorm(part, weight, 1e-6)) < 1e-2
    assert (
        relative_error(
            ops.triton_rmsnorm(x.float().mT, torch.ones(5), 1e-6).mT.norm(dim=1),
            torch.full((2, 60), 5**0.5),
        )
        < 1e-3
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rmsnorm(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in [(1, 7, 100), (1, 7, 100), (100,)])
    normed, total = ops.triton_fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert relative_error(total, x + residual) < DTYPES[dtype]
    assert relative_error(normed, ops.torch_rmsnorm(x + residual, weight, 1e-5)) < DTYPES[dtype]


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_silu_and_mul(dtype: torch.dtype, activation: str) -> None:
    x = (torch.randn(2, 3, 2 * 1100) * 2).to(dtype)
    actual = ops.triton_silu_and_mul(x, activation)
    assert actual.dtype == dtype
    assert relative_error(actual, ops.torch_silu_and_mul(x.double(), activation)) < DTYPES[dtype]


def test_silu_and_mul_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UsageError, match="no activation 'mish'"):
        ops.triton_silu_and_mul(torch.randn(2, 4), "mish")


@pytest.mark.parametrize("bias", [True, False])
def test_fused_swiglu_mlp(bias: bool) -> None:
    x, both, down = torch.randn(1, 3, 8), torch.randn(24, 8), torch.randn(8, 12)
    biases = (torch.randn(24), torch.randn(8)) if bias else (None, None)
    actual = ops.triton_fused_swiglu_mlp(x, both, down, *biases, "gelu")
    assert relative_error(actual, ops.torch_fused_swiglu_mlp(x, both, down, *biases, "gelu")) < 1e-6


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "size"), [(8, 8), (24, 24), (80, 32), (20, 6)])
def test_rope_cached(dtype: torch.dtype, dim: int, size: int) -> None:
    wide = torch.randn(2, 5, 9 * dim).to(dtype)
    q, k = wide[..., : 6 * dim].view(2, 5, 6, dim), wide[..., 7 * dim :].view(2, 5, 2, dim)
    angle = torch.rand(1, 5, size // 2).repeat(1, 1, 2) * 6.28
    cos, sin = angle.cos().expand(2, 5, size), angle.sin().expand(2, 5, size)
    expected = ops.torch_rope_cached(
        q.double(), k.double(), cos.to(dtype).double(), sin.to(dtype).double()
    )
    for ours, theirs in zip(ops.triton_rope_cached(q, k, cos, sin), expected, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, theirs) < DTYPES[dtype]


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "size"), [(24, 24), (24, 10)])
def test_norm_rope(dtype: torch.dtype, dim: int, size: int) -> None:
    wide = (torch.randn(2, 5, 9 * dim) * 3).to(dtype)
    q, k = wide[..., : 6 * dim].view(2, 5, 6, dim), wide[..., 7 * dim :].view(2, 5, 2, dim)
    weights = [torch.randn(dim).to(dtype) for _ in range(2)]
    angle = torch.rand(2, 5, size // 2).repeat(1, 1, 2) * 6.28
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = ops.torch_norm_rope(
        *(t.double() for t in (q, k, *weights)), 1e-2, cos.double(), sin.double()
    )
    for ours, theirs in zip(
        ops.triton_norm_rope(q, k, *weights, 1e-2, cos, sin), expected, strict=True
    ):
        assert ours.dtype == dtype
        assert relative_error(ours, theirs) < 2 * DTYPES[dtype]


def run(batch: Batch, options: Options, op: str = "triton_cached_attention") -> torch.Tensor:
    return getattr(ops, op)(*forget(batch, options).arguments(), **vars(options))


def pair(lengths: list[tuple[int, int]], **kwargs: object) -> tuple[Batch, Batch]:
    """The same batch twice, each with caches of its own."""
    batch = make_batch(lengths, **kwargs)
    twin = Batch(
        **{**vars(batch), "k_cache": batch.k_cache.clone(), "v_cache": batch.v_cache.clone()}
    )
    return batch, twin


@pytest.mark.drawn
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_attention(step: str, variant: str) -> None:
    ours, theirs = pair(STEPS[step], heads=6, kv_heads=2, dim=24, value_dim=20, padding=3)
    expected = run(theirs, VARIANTS[variant], "torch_cached_attention")
    assert relative_error(run(ours, VARIANTS[variant]), expected) < 1e-6
    for name in ("k_cache", "v_cache"):
        caches = (getattr(batch, name)[1:] for batch in (ours, theirs))
        torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)


@pytest.mark.drawn
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, torch.float32])
def test_cached_attention_in_low_precision(
    step: str, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    ours, theirs = pair(STEPS[step], dim=16, dtype=dtype, cache_dtype=cache_dtype)
    expected = run(theirs, Options(sliding_window=50), "torch_cached_attention")
    actual = run(ours, Options(sliding_window=50))
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < DTYPES[dtype]


@pytest.mark.parametrize("step", STEPS)
def test_a_cache_of_float8(step: str) -> None:
    """As near to float64 as the format allows; what is too large for it is stored as its largest
    number.
    """
    ours, theirs = pair(
        STEPS[step], heads=6, kv_heads=2, dim=24, value_dim=20, cache_dtype=torch.float8_e4m3fn
    )
    # The interpreter truncates where hardware rounds
    expected, bound = exact_and_bound(ours, steps=1)
    assert ((run(ours, Options()).double() - expected).abs() <= bound + 1e-5).all()
    for batch in (ours, theirs):
        batch.value *= 1000
    run(ours, Options())
    run(theirs, Options(), "torch_cached_attention")
    slots = ours.slot_mapping
    stored, known = (batch.v_cache.float()[slots // 8, :, slots % 8] for batch in (ours, theirs))
    assert stored.abs().max() == 448
    assert torch.equal(stored.abs() == 448, known.abs() == 448)


@pytest.mark.drawn
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("variant", ["plain", "cap", "sinks"])
def test_scales_of_a_cache_of_float8(step: str, kind: int, variant: str) -> None:
    """Float64 attention; what is stored is a code times its scale, so that nothing is rounded."""
    options = {
        "plain": Options(),
        "cap": Options(logit_cap=2.0, alibi_slopes=torch.rand(6)),
        "sinks": Options(sinks=torch.randn(6), sliding_window=6),
    }[variant]
    own = [torch.tensor([0.25, 2.0])[:kind], torch.tensor([4.0, 0.5])[:kind]]
    scales = [each.expand(2).clone() for each in own]
    sizes = {"heads": 6, "kv_heads": 2, "dim": 24, "value_dim": 20}
    codes = {"dtype": torch.float8_e4m3fn, "cache_dtype": torch.float8_e4m3fn}
    batch = make_batch(STEPS[step], **sizes, **codes, padding=3)
    for sequence in batch.sequences:
        sequence.query = sequence.query.float()
        sequence.key = sequence.key.float() * scales[0][:, None]
        sequence.value = sequence.value.float() * scales[1][:, None]
    batch.query = batch.query.float()
    batch.key = batch.key.float() * scales[0][:, None]
    batch.value = batch.value.float() * scales[1][:, None]
    expected = cached_attention(replace(batch, k_cache=batch.query), options)
    forget(batch, options)
    given = {"k_scale": own[0], "v_scale": own[1], **vars(options)}
    for op in (ops.triton_cached_attention, ops.invariant_cached_attention):
        arguments = replace(
            batch, k_cache=batch.k_cache.clone(), v_cache=batch.v_cache.clone()
        ).arguments()
        assert relative_error(op(*arguments, **given), expected) < 1e-6


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 8), (3, 3, 16), (20, 1, 16), (10, 2, 40)]
)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_cached_attention_of_any_group(step: str, heads: int, kv_heads: int, dim: int) -> None:
    batch = make_batch(STEPS[step], heads=heads, kv_heads=kv_heads, dim=dim, page_size=16)
    assert relative_error(run(batch, Options()), cached_attention(batch, Options())) < 1e-6


def test_decode_does_not_read_what_lies_behind_a_sequence() -> None:
    batch = make_batch(STEPS["decode"], spare_columns=40)
    expected = cached_attention(batch, Options())
    batch.block_table[:, -40:] = 10**6  # no such page
    assert relative_error(run(batch, Options()), expected) < 1e-6


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_is_the_same_for_every_number_of_splits(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "MOST_SPLITS", splits)
    batch = make_batch(STEPS["decode"], heads=6, spare_columns=60)
    options = Options(sinks=SINKS, sliding_window=150)
    assert relative_error(run(batch, options), cached_attention(batch, options)) < 1e-6


def test_decode_reads_lengths_and_pages_on_the_device_only() -> None:
    """What a CUDA graph bakes in (the host's batch information, the shapes) must not decide the
    result.
    """
    batch = make_batch([(1, 3), (1, 200), (1, 77)], spare_columns=10)
    batch.batch_info_host[3] = 1
    assert relative_error(run(batch, Options()), cached_attention(batch, Options())) < 1e-6


@pytest.mark.drawn
@pytest.mark.parametrize("longest", [2, 11, 64])
@pytest.mark.parametrize("step", ["prefill", "chunked prefill", "mixed"])
@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("op", ["triton_cached_attention", "invariant_cached_attention"])
def test_a_captured_step_serves_prompts_of_any_lengths(
    op: str, variant: str, step: str, longest: int
) -> None:
    """What the host knows of the step that was captured must not decide the result."""
    batch = make_batch(STEPS[step], heads=6, padding=5)
    expected = cached_attention(batch, VARIANTS[variant])
    real = int(batch.cu_seqlens[-1])
    padded_to_captured(forget(batch, VARIANTS[variant]), 5, longest)
    actual = getattr(ops, op)(*batch.arguments(), **vars(VARIANTS[variant]))
    assert relative_error(actual[:, :real], expected[:, :real]) < 1e-6


def test_heads_inside_a_projection_need_no_copy() -> None:
    ours, theirs = pair(STEPS["mixed"])
    tokens = ours.query.shape[1]
    wide = torch.cat([t.flatten(2) for t in (ours.query, ours.key, ours.value)], -1)
    ours.query, ours.key, ours.value = (
        t.view(1, tokens, -1, 16) for t in wide.split([64, 32, 32], -1)
    )
    assert (
        relative_error(run(ours, Options()), run(theirs, Options(), "torch_cached_attention"))
        < 1e-6
    )


def test_registration_is_sound() -> None:
    batch, x = make_batch([(1, 9), (3, 3)], value_dim=12), torch.randn(2, 3, 8)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        ops.triton_cached_attention.default, tuple(batch.arguments()), test_utils=checks
    )
    torch.library.opcheck(ops.triton_rmsnorm.default, (x, torch.ones(8), 1e-6), test_utils=checks)
    torch.library.opcheck(
        ops.triton_fused_add_rmsnorm.default, (x, x, torch.ones(8), 1e-6), test_utils=checks
    )
    torch.library.opcheck(ops.triton_silu_and_mul.default, (x,), test_utils=checks)
    heads, table = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 8)
    torch.library.opcheck(
        ops.triton_rope_cached.default, (heads, heads, table, table), test_utils=checks
    )


@triton.jit
def _count_blocks(seen, cu_seqlens, sequences, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    sequence, block = block_of(tl.program_id(0), cu_seqlens, sequences, ROWS, BLOCK_M, WIDTH=8)
    tl.store(seen + 2 * tl.program_id(0), sequence)
    tl.store(seen + 2 * tl.program_id(0) + 1, block)


def test_blocks_of_sequences_of_unlike_lengths_are_counted_through() -> None:
    rows, block, lengths = 3, 16, torch.randint(1, 30, (21,))
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    programs = most_blocks(int(lengths.sum()), len(lengths), rows, block)
    seen = torch.empty(programs, 2, dtype=torch.int32)
    _count_blocks[(programs,)](seen, starts, len(lengths), ROWS=rows, BLOCK_M=block)
    expected = {
        (sequence, number)
        for sequence, length in enumerate(lengths.tolist())
        for number in range(-(-length * rows // block))
    }
    found = [tuple(pair) for pair in seen.tolist()]
    assert len(set(found)) == len(found)
    assert expected <= set(found)
