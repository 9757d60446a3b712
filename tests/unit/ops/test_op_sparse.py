"""Latent attention to chosen keys: against float64 element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onboard.ops  # noqa: F401
from onboard.ops.sparse import indexer
from onboard.ops.sparse.indexer import best_first, index_scores, share_of_ties, tie_note
from onboard.ops.sparse.sparse import chosen_keys
from tests.support.ops import naive
from tests.support.ops.naive import relative_error

ops: Any = torch.ops.onboard


@pytest.mark.parametrize("with_sinks", [False, True])
def test_sparse_mla_sees_the_chosen_keys_that_are_not_later(with_sinks: bool) -> None:
    heads, nope, rope, rank, value_dim, length = 3, 8, 4, 12, 6, 9
    q_nope, q_pe = torch.randn(2, length, heads, nope), torch.randn(2, length, heads, rope)
    latent, kpe = torch.randn(2, length, rank), torch.randn(2, length, 1, rope)
    weight = torch.randn(heads * (nope + value_dim), rank)
    sinks = torch.randn(heads) if with_sinks else None
    indices = torch.rand(2, length, length).argsort(-1)[..., :4]
    indices[..., 0] = torch.arange(length)  # each query sees a key at least
    expanded = torch.einsum("bsr,nor->bsno", latent.double(), weight.double().view(heads, -1, rank))
    key = torch.cat([expanded[..., :nope], kpe.double().expand(-1, -1, heads, -1)], -1)
    mask = torch.zeros(2, 1, length, length, dtype=torch.bool)
    for row, query, choice in [
        (b, i, int(k)) for b in range(2) for i in range(length) for k in indices[b, i]
    ]:
        mask[row, 0, query, choice] = True
    assert torch.equal(chosen_keys(indices.int(), length), mask)
    options = naive.Options(scale=0.3, sinks=sinks)
    expected = naive.attention(
        torch.cat([q_nope, q_pe], -1), key, expanded[..., nope:], options, mask
    )
    actual = ops.torch_sparse_mla(q_nope, q_pe, latent, kpe, weight, indices.int(), 0.3, sinks)
    assert relative_error(actual, expected) < 1e-6
    near = naive.Options(scale=0.3, sinks=sinks, sliding_window=3)
    expected = naive.attention(torch.cat([q_nope, q_pe], -1), key, expanded[..., nope:], near)
    actual = ops.torch_sparse_mla(q_nope, q_pe, latent, kpe, weight, None, 0.3, sinks, 3)
    assert relative_error(actual, expected) < 1e-6


def test_the_indexer_chooses_the_best_keys_that_are_not_later() -> None:
    query, key, weights = torch.randn(2, 11, 12, 5), torch.randn(2, 11, 5), torch.randn(2, 11, 12)
    chosen = ops.torch_lightning_indexer(query, key, weights, 4, 0.3)
    assert chosen.shape == (2, 11, 4)
    for row, position in [(b, i) for b in range(2) for i in range(11)]:
        q, w = query[row, position].double(), weights[row, position].double()
        scores = [
            sum(float(w[n]) * max(0.3 * float(q[n] @ k), 0.0) for n in range(12))
            for k in key[row].double()
        ]
        best = sorted(range(position + 1), key=lambda each: -scores[each])[:4]
        assert chosen[row, position, : position + 1].tolist() == best


def _small(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).float()


@pytest.mark.parametrize("top_k", [1, 4, 9])
def test_of_equal_scores_the_first_keys_are_chosen(top_k: int) -> None:
    """Scores of small integers are exact, and most of them are equals; half of the zeros are
    negative ones.
    """
    query, key, weights = _small(2, 30, 2, 4), _small(2, 30, 4), _small(2, 30, 2)
    chosen, ties = ops.torch_lightning_indexer(query, key, weights, top_k, 0.5), 0
    for row, position in [(b, i) for b in range(2) for i in range(top_k, 30)]:
        q, w = query[row, position].double(), weights[row, position].double()
        seen = key[row, : position + 1].double()
        scores = [
            sum(float(w[n]) * max(0.5 * float(q[n] @ k), 0.0) for n in range(2)) for k in seen
        ]
        ranked = sorted(range(position + 1), key=lambda each: (-scores[each], each))
        ties += scores[ranked[top_k - 1]] == scores[ranked[top_k]]
        assert chosen[row, position].tolist() == ranked[:top_k]
    assert ties > 10


def test_negative_zeros_are_zeros() -> None:
    scores = torch.tensor([-0.0, 0.0, -1.0, 0.0, -0.0, 2.0])
    assert best_first(scores, 5).tolist() == [5, 0, 1, 3, 4]


def test_scores_of_few_heads_are_known_to_tie() -> None:
    assert share_of_ties(2, 16, 4) > 0.1
    assert share_of_ties(2, 128, 2048) > 0.1
    assert share_of_ties(16, 16, 6) == share_of_ties(64, 128, 2048) == 0
    assert "tie for" in tie_note(2, 16, 4)
    assert tie_note(64, 128, 2048) == ""


def test_the_indexer_takes_all_keys_of_a_short_text() -> None:
    query, key, weights = torch.randn(1, 3, 12, 5), torch.randn(1, 3, 5), torch.randn(1, 3, 12)
    assert ops.torch_lightning_indexer(query, key, weights, 4).sort(-1).values.tolist() == [
        [[0, 1, 2]] * 3
    ]


class _Products(TorchDispatchMode):
    """Records the size of each batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("limit", [1, 250, 600, 10**6])
def test_long_rows_are_scored_in_blocks(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as fit in the limit, a query at a time at least; what a block gives does not depend on
    its size.
    """
    query, key, weights = (
        torch.randn(2, 23, 3, 5).double(),
        torch.randn(2, 20, 5).double(),
        torch.randn(2, 23, 3).double(),
    )
    expected = index_scores(query, key, weights, 0.3)
    monkeypatch.setattr(indexer, "SCORES_AT_ONCE", limit)
    with _Products() as products:
        actual = index_scores(query, key, weights, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    of_one = 2 * 3 * 20
    rows = max(1, limit // of_one)
    scores = products.sizes[::2]  # and after each its sum over the heads
    assert scores == [of_one * min(rows, 23 - start) for start in range(0, 23, rows)]


@pytest.mark.parametrize("top_k", [2, 6])  # there are four blocks
@pytest.mark.parametrize("weighted", [False, True])
def test_the_indexer_of_blocks_chooses_the_best_that_have_ended_and_the_own_block(
    weighted: bool, top_k: int
) -> None:
    length, size = 14, 3
    query, key = torch.randn(2, length, 12, 5), torch.randn(2, length, 5)
    weights = torch.randn(2, length, 12) if weighted else None
    chosen = ops.torch_block_indexer(query, key, weights, top_k, size, 0.3)
    expanded = ops.torch_block_indexer(query, key, weights, top_k, size, 0.3, expand=True)
    assert (chosen.shape, expanded.shape) == (
        (2, length, top_k),
        (2, length, top_k * size + size - 1),
    )
    for row, position in [(b, i) for b in range(2) for i in range(length)]:
        q, ended = query[row, position].double(), (position + 1) // size
        w = torch.ones(12).double() if weights is None else weights[row, position].double()
        keys = key[row, size - 1 :: size].double()
        scores = [
            sum(float(w[n]) * max(0.3 * float(q[n] @ k), 0.0) for n in range(12)) for k in keys
        ]
        best = sorted(range(ended), key=lambda each: -scores[each])[:top_k]
        assert chosen[row, position].tolist() == best + [-1] * (top_k - len(best))
        tokens = [block * size + i for block in best for i in range(size)] + list(
            range(ended * size, position + 1)
        )
        assert sorted(t for t in expanded[row, position].tolist() if t >= 0) == sorted(tokens)


def test_attention_sees_the_chosen_keys_that_are_not_later() -> None:
    query, key, value = torch.randn(2, 9, 4, 6), torch.randn(2, 9, 2, 6), torch.randn(2, 9, 2, 3)
    indices = torch.rand(2, 9, 9).argsort(-1)[..., :4]
    indices[..., 0] = torch.arange(9)  # each query sees a key at least
    indices[:, 5:, 3] = -1
    mask = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    for row, at, choice in [
        (b, i, int(k)) for b in range(2) for i in range(9) for k in indices[b, i] if k >= 0
    ]:
        mask[row, 0, at, choice] = True
    expected = naive.attention(query, key, value, naive.Options(scale=0.3), mask)
    assert (
        relative_error(ops.torch_sparse_attention(query, key, value, indices, 0.3), expected) < 1e-6
    )


def test_registration_is_sound() -> None:
    q, latent, kpe = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 6), torch.randn(2, 3, 1, 4)
    indices = torch.zeros(2, 3, 1, dtype=torch.int32)
    torch.library.opcheck(
        ops.torch_sparse_mla.default, (q, q + 1, latent, kpe, torch.randn(2 * 9, 6), indices)
    )
    torch.library.opcheck(
        ops.torch_lightning_indexer.default, (q, q[:, :, 0] + 1, torch.randn(2, 3, 2), 2)
    )
    torch.library.opcheck(
        ops.torch_block_indexer.default, (q, q[:, :, 0] + 1, torch.randn(2, 3, 2), 2, 2)
    )
    torch.library.opcheck(ops.torch_sparse_attention.default, (q, q + 1, q + 2, indices))
