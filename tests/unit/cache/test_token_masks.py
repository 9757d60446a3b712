"""Masks of rows of logits, beside what Python's own numbers say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from onboard.cache.token_masks import MaskBuffer, TokenMasks, masked


def drawn_masks(
    rows: int, vocabulary: int, rng: random.Random
) -> tuple[TokenMasks, list[set[int]]]:
    """Of the rows each third is free, each fifth has no token left; and what each allows."""
    masks, allowed = TokenMasks(rows, vocabulary), []
    for row in range(rows):
        kept = set(range(vocabulary))
        if row % 3:
            kept = set() if row % 5 == 0 else set(rng.sample(range(vocabulary), k=1 + row))
            bits = np.zeros(8 * len(masks.of(row, last=row)), dtype=bool)
            bits[sorted(kept)] = True
            masks.of(row, last=row)[:] = np.packbits(bits, bitorder="little")
        allowed.append(kept)
    return masks, allowed


@pytest.mark.parametrize("vocabulary", [63, 64, 65, 211])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_allowed_tokens_are_left(vocabulary: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed := random.randrange(1 << 30))
    print(f"seed {seed}")
    logits = torch.randn(32, vocabulary, generator=torch.Generator().manual_seed(seed)).to(dtype)
    masks, allowed = drawn_masks(32, vocabulary, rng)
    numbers = masks.on(logits.device)
    buffer = MaskBuffer(40, vocabulary, logits.device)
    buffer.write(masks)
    assert torch.equal(buffer.fetch(32), numbers)
    left = masked(logits, numbers)
    assert left.dtype == dtype
    for row, kept in enumerate(allowed):
        for token in range(vocabulary):
            expected = logits[row, token].item() if token in kept else float("-inf")
            if not kept and token == row:
                expected = 0.0
            assert left[row, token].item() == expected, (row, token)


def test_a_row_whose_allowed_tokens_the_model_excludes_ends_and_a_free_one_does_not() -> None:
    logits = torch.full((3, 9), float("-inf"))
    logits[:, 2] = 1.0
    logits[2] = float("-inf")
    masks = TokenMasks(3, 9)
    masks.of(0, last=4)[:] = [0b11110000, *[0] * 7]
    masks.of(1, last=4)[:] = [0b11110100, *[0] * 7]
    left = masked(logits, masks.on(logits.device))
    assert left[:2].argmax(-1).tolist() == [4, 2]
    assert left[2].isneginf().all()
