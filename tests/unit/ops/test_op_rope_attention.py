"""References of attention that rotates by itself, beside float64, channel by channel."""

from __future__ import annotations

import pytest
import torch

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from tests.support.ops.naive import Options, attention, cached_attention, relative_error
from tests.support.ops.rotated import EPS, TURNS, normalise, rotate, tables, with_rotation
from tests.support.ops.seeds import seeded

ops = torch.ops.onboard
STEPS = {
    "prefill": [(5, 5), (1, 1)],
    "chunks": [(4, 12), (3, 30)],
    "decode": [(1, 1), (1, 9), (1, 31)],
}


@pytest.mark.parametrize(
    ("flat", "normed"), [(False, False), (False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("step", STEPS)
def test_over_pages(step: str, turns: str, flat: bool, normed: bool) -> None:
    seeded()
    options = Options(scale=0.3, sinks=torch.randn(6), sliding_window=12, logit_cap=5.0)
    shapes = {"heads": 6, "dim": 12, "value_dim": 10, "padding": 2}
    batch, args, named, turned = with_rotation(STEPS[step], turns, 8, flat, normed, **shapes)
    expected = cached_attention(turned, options)
    actual = ops.torch_cached_rope_attention(*args, **named, **vars(options))
    assert relative_error(actual, expected) < 1e-6
    for row, sequence in enumerate(turned.sequences):
        last = len(sequence.key) - 1
        page, offset = int(batch.block_table[row, last // 8]), last % 8
        assert relative_error(batch.k_cache[page, :, offset], sequence.key[-1]) < 1e-6


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("turns", TURNS)
def test_without_pages(turns: str, flat: bool) -> None:
    seeded()
    parts = [torch.randn(1, 7, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    cos, sin = tables(7, 6, turns)
    q, k = (rotate(part[0], cos[0], sin[0], turns)[None] for part in parts[:2])
    expected = attention(q, k, parts[2], Options(sliding_window=3))
    heads = [4, 2, 8] if flat else None
    given = [torch.cat([each.flatten(2) for each in parts], -1)] * 3 if flat else parts
    actual = ops.torch_rope_attention(*given, cos, sin, turns, heads, sliding_window=3)
    assert relative_error(actual, expected) < 1e-6
    norms = {"q_norm": torch.randn(8), "k_norm": torch.randn(8), "norm_eps": EPS}
    actual = ops.torch_rope_attention(*given, cos, sin, turns, heads, sliding_window=3, **norms)
    q, k = (
        rotate(normalise(part[0], norms[name]), cos[0], sin[0], turns)[None]
        for part, name in zip(parts, ("q_norm", "k_norm"), strict=False)
    )
    expected = attention(q, k, parts[2], Options(sliding_window=3))
    assert relative_error(actual, expected) < 1e-6
    meta = ops.torch_rope_attention(
        *(each.to("meta") for each in (*given, cos, sin)), turns, heads, sliding_window=3
    )
    assert meta.shape == actual.shape


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("cached", [False, True])
def test_latent_attention(turns: str, cached: bool) -> None:
    """Prefill in a whole sequence, or token by token over pages, as `torch_mla` of what is rotated."""
    seeded()
    tokens, heads, rope, rank = 6, 3, 8, 10
    q_nope, q_pe = torch.randn(1, tokens, heads, 5), torch.randn(1, tokens, heads, rope)
    latent, kpe = torch.randn(1, tokens, rank), torch.randn(1, tokens, 1, rope)
    weight, (cos, sin) = torch.randn(heads * 9, rank), tables(tokens, 6, turns)
    turned = [rotate(x[0], cos[0], sin[0], turns)[None] for x in (q_pe, kpe)]
    expected = ops.torch_mla(
        q_nope.double(), turned[0], latent.double(), turned[1], weight.double()
    )
    if not cached:
        actual = ops.torch_rope_mla(q_nope, q_pe, latent, kpe, weight, cos, sin, turns)
    else:
        cache = torch.full((3, 1, 4, rank + rope), torch.nan)
        rows = []
        for token in range(tokens):
            info = torch.tensor([1, 1, 1, token + 1, 0], dtype=torch.int32)
            metadata = torch.tensor([0, 1]), torch.tensor([token + 1]), torch.tensor([[2, 1]])
            slot = torch.tensor([(2, 1)[token // 4] * 4 + token % 4])
            one = [x[:, token : token + 1] for x in (q_nope, q_pe, latent, kpe)]
            table = [x[:, token : token + 1] for x in (cos, sin)]
            args = (*one, weight, *table, *metadata, slot, info, cache, turns)
            rows.append(ops.torch_cached_rope_mla(*args))
        actual = torch.cat(rows, 1)
    assert relative_error(actual, expected) < 1e-5
