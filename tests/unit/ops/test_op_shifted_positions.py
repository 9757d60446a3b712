"""Each token's position is moved by what the cache has for its sequence."""

from __future__ import annotations

import torch

import onboard.ops  # noqa: F401


def test_each_token_is_moved_with_its_sequence() -> None:
    lengths, slots = [3, 1, 2, 1], torch.tensor([2, 4, 0, 1])
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    deltas, positions = torch.randint(-90, 90, (5, 1)), torch.randint(100, (1, sum(lengths)))
    actual = torch.ops.onboard.torch_shifted_positions(positions, ends, slots, deltas)
    moved = [
        int(deltas[slot])
        for slot, length in zip(slots, lengths, strict=True)
        for _ in range(length)
    ]
    assert (actual - positions)[0].tolist() == moved
    assert actual.dtype == torch.int64
