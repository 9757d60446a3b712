"""What a prompt has beside its tokens, once the towers have run: rows for its tokens, positions,
blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from onboard.cache.step_buffer import IntArray
from onboard.graph.cache_init.embedded_inputs import (
    BLOCKS,
    COS,
    EMBEDS,
    GIVEN,
    SIN,
    TURNED,
    name_of_added,
)

if TYPE_CHECKING:
    from onboard.runtime.scheduling.request import Step


@dataclass(frozen=True)
class PromptInputs:
    """What transformers' composite hands to its text model for one prompt of `tokens` tokens."""

    embeds: torch.Tensor
    """[tokens, hidden], features of images in their places."""
    place: IntArray
    """[tokens], each token's position for the text model, counted from the model's first one."""
    after: int
    """Added to the places of all later tokens: their positions go on after the largest one of the
    prompt.
    """
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    """cos and sin [tokens, size] where positions go along several axes."""
    blocks: IntArray | None = None
    """[tokens], the block in which a token sees also what comes after it, -1 outside."""
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Path of a layer -> what is added to the hidden states behind it, [tokens, hidden]."""

    def __len__(self) -> int:
        return len(self.embeds)

    def rows(self) -> dict[str, torch.Tensor]:
        """Return what the graph is given, by input: [tokens, size]."""
        tables = dict(zip((COS, SIN), self.tables, strict=True)) if self.tables is not None else {}
        added = {name_of_added(layer): rows for layer, rows in self.added.items()}
        return {EMBEDS: self.embeds, **tables, **added}

    @cached_property
    def digest(self) -> bytes:
        """A digest of all of it: tokens that are known by their content depend on it."""
        arrays = [self.place, np.array(self.after), *([] if self.blocks is None else [self.blocks])]
        arrays += [np.array([ord(letter) for name in sorted(self.added) for letter in name])]
        arrays += [
            each.detach().cpu().contiguous().view(torch.uint8).numpy()
            for each in self.rows().values()
        ]
        whole = hashlib.blake2b(digest_size=16)
        for array in arrays:
            whole.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
        return whole.digest()

    def positions(self, start: int, length: int) -> IntArray:
        """Return the positions of tokens `start` to `start + length`, generated ones too."""
        later = np.arange(max(start, len(self)), start + length) + self.after
        return np.concatenate([self.place[start : start + length], later])

    def fitting(self, start: int, length: int) -> int:
        """Return the largest number of tokens from `start` on, at most `length`, whose last one
        ends its block.
        """
        end = start + length
        while self.blocks is not None and start < end < len(self) and self._inside(end):
            end -= 1
        return end - start

    def longest_block(self) -> int:
        """Return the number of tokens of the largest block."""
        if self.blocks is None or not (self.blocks >= 0).any():
            return 0
        return int(np.bincount(self.blocks[self.blocks >= 0]).max())

    def _inside(self, end: int) -> bool:
        assert self.blocks is not None
        return bool(self.blocks[end] >= 0 and self.blocks[end - 1] == self.blocks[end])


def given_rows(step: Step, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of `with_given_inputs` for a step whose row has `tokens` tokens, padding
    included.
    """
    rows = {key: torch.zeros(1, tokens, dtype=torch.bool, device=device) for key in (GIVEN, TURNED)}
    blocks = np.full(tokens, -1, dtype=np.int32)
    first = number = 0
    for chunk in step.chunks:
        given, start = chunk.sequence.given, chunk.sequence.num_cached
        if given is not None and (count := min(chunk.length, len(given) - start)) > 0:
            part, place = slice(start, start + count), slice(first, first + count)
            rows[GIVEN][0, place] = True
            rows[TURNED][0, place] = given.tables is not None
            for name, tensor in given.rows().items():
                whole = rows.setdefault(name, tensor.new_zeros(1, tokens, tensor.shape[-1]))
                whole[0, place] = tensor[part]
            if given.blocks is not None:
                own = given.blocks[part]
                blocks[place] = np.where(own >= 0, own + number, -1)
                number += int(given.blocks.max()) + 1
        first += chunk.length
    rows[BLOCKS] = torch.from_numpy(blocks).to(device)
    return rows
