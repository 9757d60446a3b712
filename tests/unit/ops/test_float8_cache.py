from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.attention.stored import as_stored
from tests.support.ops.float8 import exact_and_bound
from tests.support.ops.naive import (
    Options,
    attention,
    cached_attention,
    make_batch,
    relative_error,
)

STEPS = {
    "prefill": [(5, 5), (1, 1), (17, 17)],
    "decode": [(1, 1), (1, 8), (1, 9), (1, 70)],
    "mixed": [(1, 20), (7, 7), (4, 11), (1, 16)],
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("size", [0.02, 1.0])
def test_attention_is_as_near_as_the_format_allows(step: str, size: float) -> None:
    batch = make_batch(STEPS[step], cache_dtype=torch.float8_e4m3fn)
    batch.query *= size
    for sequence in batch.sequences:
        sequence.query *= size
    expected, bound = exact_and_bound(batch)
    error = (torch.ops.onboard.torch_cached_attention(*batch.arguments()).double() - expected).abs()
    assert (error <= bound + 1e-6).all()
    assert error.max() > 1e-3  # it is this format, not a finer one


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kinds", [(1, 1), (2, 2)])
@pytest.mark.parametrize("op", ["torch_cached_attention", "torch_cached_block_attention"])
def test_scales_of_layers_or_heads(step: str, kinds: tuple[int, int], op: str) -> None:
    """Float64 attention to keys and values that are rounded by the same rule."""
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    own = [torch.rand(kind) * 0.03 + 0.005 for kind in kinds]
    scales = [each.expand(2).clone() for each in own]
    stored = {"cache_dtype": torch.float8_e4m3fn, "scales": scales}
    batch = make_batch(STEPS[step], kv_heads=2, **stored)
    for sequence in batch.sequences:
        sequence.key, sequence.value = (
            rounded(each, scale)
            for each, scale in zip((sequence.key, sequence.value), scales, strict=True)
        )
    batch_of_numbers = replace(batch, k_cache=batch.query, v_cache=batch.query)
    expected = cached_attention(batch_of_numbers, Options())
    blocks = (torch.full((batch.query.shape[1],), -1),) if "block" in op else ()
    given = dict(zip(("k_scale", "v_scale"), own, strict=True))
    actual = getattr(torch.ops.onboard, op)(*blocks, *batch.arguments(), **given)
    assert relative_error(actual, expected) < 1e-6


def rounded(tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each head's numbers [tokens, heads, dim] as codes times its scale."""
    out = torch.empty_like(tokens)
    for head in range(tokens.shape[1]):
        codes = (tokens[:, head] / scale[head]).clamp(-448, 448).to(torch.float8_e4m3fn)
        out[:, head] = codes.float() * scale[head]
    return out


@pytest.mark.parametrize("layout", ["bsnd", "bnsd"])
def test_attention_without_a_cache_rounds_alike(layout: str) -> None:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    k_scale, v_scale = torch.rand(2) * 0.03 + 0.005, torch.rand(1) * 0.03 + 0.005
    near = [
        torch.stack([rounded(x, scale) for x in each])
        for each, scale in ((k, k_scale), (v, v_scale.expand(2)))
    ]
    expected = attention(q, *near, Options())
    inputs = [each.transpose(1, 2) if layout == "bnsd" else each for each in (q, k, v)]
    given = {"layout": layout, "k_scale": k_scale, "v_scale": v_scale}
    actual = torch.ops.onboard.torch_attention(*inputs, **given)
    actual = actual.transpose(1, 2) if layout == "bnsd" else actual
    assert relative_error(actual, expected) < 1e-6


def test_latents_with_a_scale() -> None:
    """Float64 latent attention to latents and keys that are rounded by the same rule."""
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    length, heads, nope, rope, rank = 11, 4, 6, 4, 16
    sizes = [(heads, nope), (heads, rope), (rank,), (1, rope)]
    q_nope, q_pe, latent, kpe = (torch.randn(1, length, *size) for size in sizes)
    weight, scale = torch.randn(heads * (nope + 7), rank) / 4, torch.tensor([0.013])
    near = [rounded(latent[0, :, None], scale)[:, 0][None], rounded(kpe[0], scale)[None]]
    exact = [each.double() for each in (q_nope, q_pe, *near, weight)]
    expected = torch.ops.onboard.torch_mla(*exact)
    whole = torch.ops.onboard.torch_mla(q_nope, q_pe, latent, kpe, weight, k_scale=scale)
    assert relative_error(whole, expected) < 1e-6
    cache = torch.zeros(4, 1, 4, rank + rope, dtype=torch.float8_e4m3fn)
    table = torch.tensor([[1, 3, 2]], dtype=torch.int32)
    rows = []
    for start, end in ((0, 7), (7, 10), (10, 11)):
        place = torch.arange(start, end)
        slots = table[0, place // 4].long() * 4 + place % 4
        starts, kv_lens = torch.tensor([0, end - start]).int(), torch.tensor([end]).int()
        info = torch.tensor([1, end - start, end - start, end]).int()
        new = [each[:, start:end] for each in (q_nope, q_pe, latent, kpe)]
        paged = (starts, kv_lens, table, slots, info, cache)
        rows.append(torch.ops.onboard.torch_cached_mla(*new, weight, *paged, None, scale))
    assert relative_error(torch.cat(rows, 1), expected) < 1e-6


def test_what_the_format_cannot_hold_becomes_its_largest_number() -> None:
    values = torch.tensor([1e4, -1e4, 448.0, 449.0, 0.0, torch.inf, 2**-9])
    stored = as_stored(values, torch.float8_e4m3fn).float()
    assert stored.tolist() == [448, -448, 448, 448, 0, 448, 2**-9]
    assert as_stored(torch.tensor([torch.nan]), torch.float8_e4m3fn).float().isnan().all()
