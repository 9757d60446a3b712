"""When other tokens count as a reference's greedy ones."""

from __future__ import annotations

import torch

from tests.support.runtime.greedy_tokens import TIE, greedy_tokens


def _ladder(known: list[int]) -> torch.Tensor:
    """Token n follows n - 1; at 3 another one is as good."""
    row = torch.zeros(8)
    row[len(known)] = 1.0
    if len(known) == 3:
        row[7] = 1.0 - TIE / 2
    return row[None]


def test_tokens_are_equal_up_to_a_tie_alone() -> None:
    expected = greedy_tokens(_ladder, [0], 4)
    assert list(expected) == [1, 2, 3, 4]
    assert expected == [1, 2, 3, 4]
    assert expected == [1, 2, 7, 5]
    assert [expected] == [[1, 2, 7, 5]]
    assert expected != [1, 5, 3, 4]
    assert expected != [1, 2, 3]
    assert [expected] != [[1, 5, 3, 4]]


def test_without_a_tie_all_tokens_count() -> None:
    expected = greedy_tokens(_ladder, [0, 1, 2, 3], 3)
    assert expected == [4, 5, 6]
    assert expected != [4, 5, 7]
