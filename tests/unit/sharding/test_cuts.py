"""What a cut becomes behind reshapes, splits and joins, beside the entries of real tensors."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import fx

from onboard.graph.sharding.cuts import Cut, evenly, joined, nearly_evenly, union
from onboard.graph.sharding.exchange import Exchange
from onboard.graph.sharding.reshaped_cuts import Size, reshaped

BATCH, SEQUENCE = 2, 3
SYMBOLS = {"s0": BATCH, "s1": SEQUENCE, "s0*s1": BATCH * SEQUENCE, "4*s0*s1": 4 * BATCH * SEQUENCE}


def _real(shape: tuple[Size, ...]) -> list[int]:
    return [SYMBOLS[size] if isinstance(size, str) else size for size in shape]


def _held(x: torch.Tensor, dim: int, cut: Cut, rank: int) -> torch.Tensor:
    """What a rank has of a tensor, entry by entry."""
    blocks = x.shape[dim] // cut.size
    places = [block * cut.size + own for block in range(blocks) for own in cut.entries[rank]]
    return x.index_select(dim, torch.tensor(places))


RESHAPES = [
    (("s0", "s1", 4, 6), 2, ("s0", "s1", 24), 2),
    (("s0", "s1", 24), 2, ("s0", "s1", 4, 6), 2),
    (("s0", "s1", 24), 2, ("s0", "s1", 2, 12), 2),
    (("s0", "s1", 4, 6), 2, ("4*s0*s1", 6), 0),
    (("s0*s1", 24), 1, ("s0", "s1", 24), 2),
    (("s0", "s1", 3, 4, 2), 3, ("s0", "s1", 24), 2),
    (("s0", "s1", 4, 2, 6), 2, ("s0", "s1", 8, 6), 2),
    (("s0", "s1", 4, 6), 2, ("s0", "s1", 4, 1, 6), 2),
    ((4, 2, 6), 0, (8, 6), 0),
]


@pytest.mark.parametrize(("before", "dim", "behind", "expected"), RESHAPES)
def test_a_reshape_of_a_share_is_the_share_of_the_reshape(
    before: tuple[Size, ...], dim: int, behind: tuple[Size, ...], expected: int
) -> None:
    size = before[dim]
    assert isinstance(size, int)
    cut = evenly(size, 2)
    assert cut is not None
    found = reshaped(dim, cut, before, behind)
    assert found is not None
    assert found[0] == expected
    x = torch.arange(math.prod(_real(before))).reshape(_real(before))
    for rank in range(2):
        share = _held(x.reshape(_real(behind)), *found, rank)
        assert torch.equal(_held(x, dim, cut, rank).reshape(share.shape), share)
    # and back
    again = reshaped(found[0], found[1], behind, before)
    assert again is not None
    assert again[0] == dim
    assert again[1].same_as(cut)


def test_a_cut_through_a_head_is_no_cut_of_heads() -> None:
    cut = evenly(24, 4)  # six entries each, of heads with eight
    assert cut is not None
    assert reshaped(2, cut, ("s0", "s1", 24), ("s0", "s1", 3, 8)) is None


def test_one_head_of_one_rank_is_no_cut_of_tokens() -> None:
    """The other one could not tell how many tokens there are."""
    cut = Cut(1, (np.array([0]), np.array([], dtype=np.int64)))
    for rest in ((), (16,)):
        assert reshaped(2, cut, ("s0", "s1", 1, *rest), ("s0", "s1", *rest)) is None


def test_a_cut_in_front_of_symbolic_sizes_is_lost() -> None:
    cut = evenly(4, 2)
    assert cut is not None
    assert reshaped(0, cut, (4, "s0", 6), ("4*s0", 6)) is None


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "expected"),
    [
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (8, 1, 4, [[0]] * 4),
        (6, 2, 3, [[0, 0], [0, 1], [1, 1]]),  # the second rank needs two: so all have two
        (6, 3, 2, [[0, 0, 1], [1, 2, 2]]),
        (12, 6, 4, [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]),
        (6, 3, 3, [[0], [1], [2]]),
    ],
)
def test_key_heads_follow_query_heads(
    heads: int, key_heads: int, ranks: int, expected: list[list[int]] | None
) -> None:
    cut = evenly(heads, ranks)
    assert cut is not None
    found = cut.shared_by(heads // key_heads)
    assert (None if found is None else [own.tolist() for own in found.entries]) == expected


def test_pieces_and_joins_are_those_of_tensors() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    x = torch.arange(20)
    entries = tuple(np.sort(generator.permutation(20)[:9]) for _ in range(3))
    cut = Cut(20, entries)
    parts = [cut.part(0, 7), cut.part(7, 20)]
    assert joined(parts).same_as(cut)
    for start, stop, step in ((0, 7, 1), (7, 20, 1), (0, 20, 2), (1, 20, 3)):
        piece = cut.part(start, stop, step)
        for rank in range(3):
            wanted = [v for v in x[start:stop:step].tolist() if v in entries[rank]]
            assert (
                x[start:stop:step][torch.tensor(piece.entries[rank], dtype=torch.long)].tolist()
                == wanted
            )
    other = Cut(20, tuple(np.sort(generator.permutation(20)[:4]) for _ in range(3)))
    both = union([cut, other])
    assert [own.tolist() for own in both.entries] == [
        sorted({*a.tolist(), *b.tolist()}) for a, b in zip(entries, other.entries, strict=True)
    ]
    places = other.positions_in(both)
    assert places is not None
    for own, has, place in zip(other.entries, both.entries, places, strict=True):
        assert np.array_equal(has[place], own)
    assert (
        Cut(20, tuple(np.array([19]) for _ in range(3))).positions_in(
            Cut(20, tuple(np.array([3, 4]) for _ in range(3)))
        )
        is None
    )


def test_runs_of_a_vocabulary_differ_by_one_at_most() -> None:
    lengths = [len(own) for own in nearly_evenly(131, 4).entries]
    assert lengths == [33, 33, 33, 32]
    assert evenly(131, 4) is None


def test_what_nobody_asked_for_is_had_by_every_rank() -> None:
    """Of heads for queries, one for keys and one for values, only those of queries are asked for."""
    asked = Cut(6, (np.array([0, 1]), np.array([2, 3])))
    assert asked.left_out.tolist() == [4, 5]
    assert [own.tolist() for own in asked.completed().entries] == [[0, 1, 4, 5], [2, 3, 4, 5]]
    assert asked.completed().completed() is not None
    assert not len(asked.completed().left_out)


def test_what_no_rank_has_is_not_gathered() -> None:
    gm = fx.symbolic_trace(torch.nn.Identity())
    node = next(iter(gm.graph.nodes))
    cut = Cut(6, (np.array([0, 1]), np.array([2, 3])))
    with pytest.raises(AssertionError, match="what no rank has cannot be gathered"):
        Exchange(gm, 0).gather(node, 1, 6, cut, "unknown", gm.graph.output_node())
    Exchange(gm, 0).gather(node, 1, 6, cut.completed(), "unknown", gm.graph.output_node())
    assert "index_select" in gm.graph.python_code("self").src  # each once, in order
