"""A state that is taken back and replayed is the one that the tokens that count lead to."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import onboard.ops  # noqa: F401

ops: Any = torch.ops.onboard
HEADS, SIZE, GROUPS, STATE, TOKENS, REPLAY = 4, 5, 2, 3, 20, 3
ROUNDS = (
    ((0, 6, 6), (0, 7, 7)),
    ((6, 9, 7), (7, 10, 10)),
    ((7, 9, 9), (10, 11, 10)),
    ((9, 10, 10), (10, 11, 11)),
    ((10, 13, 10), (11, 14, 12)),
    ((10, 11, 11), (12, 13, 13)),
    ((11, 17, 17), (13, 18, 18)),
)
"""Of each step and sequence: the first token read, where it ends, and up to where its tokens are
the right ones.
"""
_SHAPES = ((HEADS, SIZE), (GROUPS, STATE), (GROUPS, STATE), (HEADS,))


def _metadata(spans: list[tuple[int, int]]) -> list[Tensor]:
    new, ends = (
        torch.tensor([end - start for start, end in spans]),
        torch.tensor([end for _, end in spans]),
    )
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    info = torch.tensor(
        [len(spans), int(new.sum()), int(new.max()), int(ends.max()), 0], dtype=torch.int32
    )
    return [starts.int(), ends.int(), torch.tensor([2, 1])[: len(spans)], info]


def test_steps_that_are_taken_back_leave_no_trace() -> None:
    torch.manual_seed(seed := random.getrandbits(30))
    print("seed", seed)
    right = [torch.randn(2, TOKENS, *shape) for shape in _SHAPES]
    A, D, bias = -torch.randn(HEADS).abs(), torch.randn(HEADS), torch.randn(HEADS)
    limits = [0.1, 2.0]

    def arguments(x: Tensor, B: Tensor, C: Tensor, dt: Tensor) -> list[Tensor]:
        return [x, A, B, C, D, dt, bias]

    expected = ops.torch_ssm(*arguments(*right), limits, 4)
    states = torch.full((4, HEADS, SIZE, STATE), torch.nan)
    kept = [torch.full((4, REPLAY, *_SHAPES[index]), torch.nan) for index in (0, 1, 3)]
    caches = [states, *kept, torch.full((4, 1), -1)]
    for step in ROUNDS:
        spans = [(start, end) for start, end, _ in step]
        read = [
            torch.cat([full[i, start:end] for i, (start, end) in enumerate(spans)])[None]
            for full in right
        ]
        counts = torch.cat([torch.arange(start, end) < until for start, end, until in step])
        for tensor in read:
            tensor[0, ~counts] = torch.randn_like(tensor[0, ~counts])
        out = ops.torch_replayed_ssm(*arguments(*read), *_metadata(spans), *caches, limits, 4)
        wanted = torch.cat([expected[i, start:end] for i, (start, end) in enumerate(spans)])
        torch.testing.assert_close(out[0, counts], wanted[counts], rtol=1e-5, atol=1e-5)
    for sequence, slot in enumerate((2, 1)):
        end, plain = ROUNDS[-1][sequence][1], torch.zeros(4, HEADS, SIZE, STATE)
        whole = [tensor[sequence : sequence + 1, :end] for tensor in right]
        ops.torch_cached_ssm(*arguments(*whole), *_metadata([(0, end)]), plain, limits, 4)
        torch.testing.assert_close(states[slot], plain[2], rtol=1e-5, atol=1e-5)
