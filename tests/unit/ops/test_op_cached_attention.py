from __future__ import annotations

import pytest
import torch

import onboard.ops  # noqa: F401
from tests.support.ops.naive import (
    Batch,
    Options,
    cached_attention,
    forget,
    make_batch,
    relative_error,
)

ops = torch.ops.onboard

STEPS = {
    "prefill": [(5, 5), (1, 1), (17, 17)],
    "chunked prefill": [(5, 12), (9, 33)],
    "decode": [(1, 1), (1, 8), (1, 9), (1, 30)],
    "mixed": [(1, 20), (7, 7), (4, 11), (1, 16)],
}
VARIANTS = {
    "plain": Options(),
    "window": Options(sliding_window=5),
    "chunks": Options(chunk_size=6),
    "window in chunks": Options(sliding_window=5, chunk_size=7),
    "cap": Options(logit_cap=0.8),
    "sinks": Options(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "slopes": Options(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.7])),
    "all": Options(
        0.7, torch.tensor([0.5, -1.0, 2.0, 0.0]), 9, 0.8, torch.tensor([0.5, 0.25, 0.125, 0.7])
    ),
}


def run(batch: Batch, options: Options) -> torch.Tensor:
    return ops.torch_cached_attention(*forget(batch, options).arguments(), **vars(options))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_attention_over_the_whole_history(step: str, variant: str) -> None:
    batch = make_batch(STEPS[step], value_dim=12, padding=3)
    expected = cached_attention(batch, VARIANTS[variant])
    assert relative_error(run(batch, VARIANTS[variant]), expected) < 1e-6


@pytest.mark.parametrize("lengths", [(9, 9, 9), (20, 17, 30), (8, 16, 3, 8), (2, 60)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_that_decodes_reads_no_more_than_its_own_keys(
    lengths: tuple[int, ...], variant: str
) -> None:
    batch = make_batch([(1, length) for length in lengths])
    expected = cached_attention(batch, VARIANTS[variant])
    assert relative_error(run(batch, VARIANTS[variant]), expected) < 1e-6


def test_new_tokens_are_stored_in_their_slots_and_nothing_else_is_touched() -> None:
    batch = make_batch(STEPS["mixed"])
    before = batch.k_cache.clone(), batch.v_cache.clone()
    run(batch, Options())
    for cache, old, tokens in zip(
        (batch.k_cache, batch.v_cache), before, (batch.key, batch.value), strict=True
    ):
        expected = old.clone()
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            expected[slot // 8, :, slot % 8] = tokens[0, token]
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_decode_steps_continue_a_prefill() -> None:
    whole = make_batch([(11, 11)])
    expected = run(whole, Options())[0]
    step = make_batch([(1, 11)])
    step.k_cache, step.v_cache, step.block_table = (
        whole.k_cache.zero_(),
        whole.v_cache.zero_(),
        whole.block_table,
    )
    for position in range(11):
        step.query, step.key, step.value = (
            t[:, position : position + 1] for t in (whole.query, whole.key, whole.value)
        )
        step.slot_mapping = whole.slot_mapping[position : position + 1]
        step.kv_lens = torch.tensor([position + 1], dtype=torch.int32)
        assert relative_error(run(step, Options())[0, 0], expected[position]) < 1e-6


def test_padding_rows_of_a_captured_decode_share_page_zero() -> None:
    batch = make_batch([(1, 9), (1, 1), (1, 1)])
    batch.block_table[1:] = 0
    batch.slot_mapping[1:] = 0
    expected = cached_attention(batch, Options())
    actual = run(batch, Options())
    assert relative_error(actual[:, 0], expected[:, 0]) < 1e-6
    assert actual.isfinite().all()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_cache_may_have_another_dtype(cache_dtype: torch.dtype) -> None:
    batch = make_batch(STEPS["mixed"], cache_dtype=cache_dtype)
    actual = run(batch, Options())
    assert actual.dtype == torch.float32
    assert relative_error(actual, cached_attention(batch, Options())) < 1e-6


def test_registration_is_sound() -> None:
    batch = make_batch([(1, 9), (3, 3)], value_dim=12)
    torch.library.opcheck(ops.torch_cached_attention.default, tuple(batch.arguments()))
