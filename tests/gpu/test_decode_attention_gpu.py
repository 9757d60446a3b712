"""Attention of decoding sequences on a Hopper GPU, in every form that its kernel has, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.ops.attention import cuda_decode_attention as decoding
from onboard.ops.rope.turned_heads import TURNS
from tests.support.ops.naive import relative_error
from tests.support.ops.rotated import EPS, normalise, tables
from tests.support.ops.seeds import seeded

_CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_CAPABILITY[0] != 9, reason="needs a Hopper GPU"),
]
ops = torch.ops.onboard
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1025, 4000)
LIMIT = 6e-3
"""Relative, root mean square: bfloat16 has 2^-9, of weights, values, keys that turned and results."""
SHAPES = {
    "32 heads on 8 of 128": (32, 8, 128, 128),
    "8 heads on 8 of 64": (8, 8, 64, 64),
    "16 heads on 1 of 128": (16, 1, 128, 128),
    "22 heads on 2 of 96 and 80": (22, 2, 96, 80),
    "14 heads on 2 of 24 and 8": (14, 2, 24, 8),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"sliding_window": 100},
    "chunks and cap": {"chunk_size": 128, "logit_cap": 5.0, "scale": 0.2},
}


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _step(lengths: tuple[int, ...], shape: tuple[int, int, int, int], page: int) -> list[Any]:
    """Queries, keys and values of one product, and what a step of these lengths has; what no sequence
    sees is no number.
    """
    heads, kv_heads, dim, value_dim = shape
    count, columns = len(lengths), -(-max(lengths) // page)
    sizes = (heads * dim, kv_heads * dim, kv_heads * value_dim)
    parts = _randn(1, count, sum(sizes)).split(sizes, -1)
    of_heads = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    rows = [part.unflatten(-1, each) for part, each in zip(parts, of_heads, strict=True)]
    table = torch.randperm(count * columns, device="cuda").view(count, columns).int()
    last = torch.tensor(lengths, device="cuda") - 1
    slots = table[torch.arange(count), last // page].long() * page + last % page
    info = torch.tensor([count, count, 1, max(lengths), 0], dtype=torch.int32)
    caches = []
    for channels in (dim, value_dim):
        cache = torch.full((count * columns, kv_heads, page, channels), torch.nan, device="cuda")
        for row, length in enumerate(lengths):
            places = torch.arange(length - 1, device="cuda")
            pages = table[row][places // page].long()
            cache[pages, :, places % page] = torch.randn(
                length - 1, kv_heads, channels, device="cuda"
            )
        caches.append(cache.bfloat16())
    starts = torch.arange(count + 1, device="cuda").int()
    return [*rows, starts, (last + 1).int(), table, slots, info, *caches]


def _check(
    step: list[Any], turns: str | None, size: int, options: dict[str, Any], normed: bool = False
) -> None:
    """Compare with the reference in float64, whose caches begin as the kernel's do."""
    tokens = step[0].shape[1]
    theirs = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in step]
    theirs[8:] = [cache.clone() for cache in theirs[8:]]
    if turns is None:
        actual = ops.triton_cached_attention(*step, **options)
    else:
        cos, sin = (t.cuda() for t in tables(tokens, size, turns))
        norms: dict[str, Any] = {}
        if normed:
            norms = {name: _randn(step[0].shape[3]) for name in ("q_norm", "k_norm")}
            theirs[:2] = (
                normalise(x[0], weight)[None]
                for x, weight in zip(theirs[:2], norms.values(), strict=True)
            )
            norms["norm_eps"] = EPS
        actual = ops.triton_cached_rope_attention(
            *step[:3], cos, sin, *step[3:], turns=turns, **options, **norms
        )
        theirs[:2] = (
            t.double() for t in TURNS[turns](theirs[0].float(), theirs[1].float(), cos, sin)
        )
    expected = ops.torch_cached_attention(*theirs, **options)
    assert relative_error(actual, expected) < LIMIT
    for mine, other in zip(step[8:], theirs[8:], strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        assert relative_error(mine.nan_to_num(), other.nan_to_num()) < 2e-3


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test's attention is this kernel's."""
    seeded()
    calls, launch = [], decoding.Kernel.launch
    monkeypatch.setattr(decoding.Kernel, "launch", lambda *a: (calls.append(a), launch(*a)))
    yield
    assert calls


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths(shape: str, options: str, page: int) -> None:
    _check(_step(LENGTHS, SHAPES[shape], page), None, 0, OPTIONS[options])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 5, 24])
def test_sinks_and_counts_of_sequences(count: int, dtype: torch.dtype) -> None:
    sinks = torch.randn(64, device="cuda").to(dtype)
    lengths = tuple(torch.randint(1, 700, (count,)).tolist())
    _check(_step(lengths, (64, 8, 64, 64), 32), None, 0, {"sinks": sinks, "sliding_window": 128})


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("turns", ["rope_cached", "rope_pairs"])
@pytest.mark.parametrize("shape", ["32 heads on 8 of 128", "16 heads on 1 of 128"])
def test_rotations(shape: str, turns: str, size: int) -> None:
    _check(_step(LENGTHS, SHAPES[shape], 64), turns, size, {})


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_of_heads(shape: str) -> None:
    size = SHAPES[shape][2] // 16 * 16
    _check(_step(LENGTHS, SHAPES[shape], 64), "rope_cached", size, {}, normed=True)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize(("warps", "resident"), [(4, 3), (8, 1), (2, 1)])
def test_divisions_of_the_work(
    warps: int, resident: int, cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    division = decoding._Division(warps, cluster, resident)
    monkeypatch.setattr(decoding, "_division", lambda *_: division)
    for options in OPTIONS.values():
        _check(_step(LENGTHS, (32, 4, 128, 128), 32), "rope_cached", 128, options)


def test_the_same_step_gives_the_same_bits() -> None:
    step = _step(LENGTHS, SHAPES["32 heads on 8 of 128"], 64)
    first, second = (ops.triton_cached_attention(*step) for _ in range(2))
    assert torch.equal(first, second)
