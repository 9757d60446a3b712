"""What a prompt has beside its tokens, once the towers have run: rows for its tokens, positions,
blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from onboard.cache.step_buffer import IntArray
from onboard.graph.cache_init.embedded_inputs import (
    BLOCKS,
    COS,
    EMBEDS,
    HAS_EMBEDS,
    HAS_TABLES,
    SIN,
    name_of_added,
)

if TYPE_CHECKING:
    from onboard.runtime.scheduling.request import Step


@dataclass(frozen=True)
class ImageInputs:
    """What transformers' multimodal model passes to its text model for one prompt."""

    embeds: torch.Tensor
    """[tokens, hidden] input embeddings, with the images' features in their places."""
    place: IntArray
    """[tokens] position of each token for the text model, counted from its first position."""
    after: int
    """Position offset of all later tokens: added to a token's index in the sequence."""
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    """cos and sin [tokens, size] of the rotary embedding, if positions have several axes."""
    blocks: IntArray | None = None
    """[tokens] number of the block (an image's tokens) within which a token also sees later tokens;
    -1: none.
    """
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Path of a layer -> what is added to its output, [tokens, hidden]."""

    def __len__(self) -> int:
        return len(self.embeds)

    def rows(self) -> dict[str, torch.Tensor]:
        """Return input name -> tensor [tokens, size], for the graph with image inputs."""
        tables = dict(zip((COS, SIN), self.tables, strict=True)) if self.tables is not None else {}
        added = {name_of_added(layer): rows for layer, rows in self.added.items()}
        return {EMBEDS: self.embeds, **tables, **added}

    def digest(self, start: int, end: int) -> bytes:
        """Digest of what tokens `start` to `end` have: it is part of a page's digest, so that only
        prompts with the same images reuse the page.

        A block that goes on behind `end` counts as a whole, since its tokens see later ones.
        """
        while end < len(self) and self._inside(end):
            end += 1
        whole = hashlib.blake2b(digest_size=16)
        whole.update(f"{sorted(self.added)} {self.after if end > len(self) else ''}".encode())
        for array in self._arrays:
            part = array[start:end]
            whole.update(f"{part.shape} {part.dtype}".encode() + part.tobytes())
        return whole.digest()

    @cached_property
    def _arrays(self) -> list[np.ndarray[Any, Any]]:
        """All fields that tokens have, [tokens, ...] each, on the host."""
        rows = (each.detach().cpu().contiguous() for each in self.rows().values())
        numbers = [self.place, *([] if self.blocks is None else [self.blocks])]
        return [*numbers, *(each.view(torch.uint8).numpy() for each in rows)]

    def positions(self, start: int, length: int) -> IntArray:
        """Return the positions of tokens `start` to `start + length`, also of generated tokens."""
        later = np.arange(max(start, len(self)), start + length) + self.after
        return np.concatenate([self.place[start : start + length], later])

    def fitting(self, start: int, length: int) -> int:
        """Return the largest number of tokens from `start` on, at most `length`, that splits no
        block.
        """
        end = start + length
        while start < end < len(self) and self._inside(end):
            end -= 1
        return end - start

    def longest_block(self) -> int:
        """Return the number of tokens of the largest block."""
        if self.blocks is None or not (self.blocks >= 0).any():
            return 0
        return int(np.bincount(self.blocks[self.blocks >= 0]).max())

    def _inside(self, end: int) -> bool:
        return self.blocks is not None and bool(
            self.blocks[end] >= 0 and self.blocks[end - 1] == self.blocks[end]
        )


def image_rows(step: Step, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of `with_image_inputs` for a step whose row has `tokens` tokens, padding
    included.
    """
    rows = {
        key: torch.zeros(1, tokens, dtype=torch.bool, device=device)
        for key in (HAS_EMBEDS, HAS_TABLES)
    }
    blocks = np.full(tokens, -1, dtype=np.int32)
    first = number = 0
    for chunk in step.chunks:
        images, start = chunk.sequence.image_inputs, chunk.sequence.num_cached
        if images is not None and (count := min(chunk.length, len(images) - start)) > 0:
            part, place = slice(start, start + count), slice(first, first + count)
            rows[HAS_EMBEDS][0, place] = True
            rows[HAS_TABLES][0, place] = images.tables is not None
            for name, tensor in images.rows().items():
                whole = rows.setdefault(name, tensor.new_zeros(1, tokens, tensor.shape[-1]))
                whole[0, place] = tensor[part]
            if images.blocks is not None:
                own = images.blocks[part]
                blocks[place] = np.where(own >= 0, own + number, -1)
                number += int(images.blocks.max()) + 1
        first += chunk.length
    rows[BLOCKS] = torch.from_numpy(blocks).to(device)
    return rows
