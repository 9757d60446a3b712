"""A page of a prompt with images is reused where all that its tokens see is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onboard.runtime.multimodal.image_inputs import ImageInputs

TOKENS, HIDDEN = 12, 4


@pytest.fixture
def inputs() -> ImageInputs:
    return ImageInputs(torch.randn(TOKENS, HIDDEN), np.arange(TOKENS), 0)


def changed(inputs: ImageInputs, at: int) -> ImageInputs:
    embeds = inputs.embeds.clone()
    embeds[at] += 1
    return replace(inputs, embeds=embeds)


def test_a_page_has_its_own_tokens_alone(inputs: ImageInputs) -> None:
    other = changed(inputs, 9)
    assert inputs.digest(0, 8) == other.digest(0, 8)
    assert inputs.digest(8, 12) != other.digest(8, 12)
    places = replace(inputs, place=inputs.place + (inputs.place > 8))
    assert inputs.digest(0, 8) == places.digest(0, 8)
    assert inputs.digest(8, 12) != places.digest(8, 12)


def test_a_block_counts_as_a_whole(inputs: ImageInputs) -> None:
    """Its tokens in this page see those in the next."""
    blocks = np.full(TOKENS, -1, dtype=np.int32)
    blocks[6:10] = 0
    within = replace(inputs, blocks=blocks)
    assert within.digest(0, 8) != changed(within, 9).digest(0, 8)
    assert within.digest(0, 8) == changed(within, 10).digest(0, 8)
    assert within.digest(0, 8) != inputs.digest(0, 8)


def test_tokens_behind_the_prompt_have_its_offset(inputs: ImageInputs) -> None:
    later = replace(inputs, after=-3)
    assert inputs.digest(0, 12) == later.digest(0, 12)
    assert inputs.digest(8, 16) != later.digest(8, 16)


def test_what_layers_add_counts(inputs: ImageInputs) -> None:
    added = replace(inputs, added={"layers.0": torch.zeros(TOKENS, HIDDEN)})
    assert added.digest(0, 8) != inputs.digest(0, 8)
    assert added.digest(0, 8) != replace(added, added={"layers.1": added.added["layers.0"]}).digest(
        0, 8
    )
