"""The texts that the judge gives to both models: what transformers can read, of tokens that are
text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import ARBITRARY, SAME
from onboard.workflow.sweep.verdict import NEW_TOKENS

LONGEST = 300
_STRATA = ((1, 1), (2, 5), (6, 16), (17, 48), (49, 100), (101, 200), (201, LONGEST))
"""A prompt's length is drawn from each, as far as the model has positions."""
_PLACE = re.compile(r"(?!bos_|eos_|forced_|decoder_start_|sep_|cls_)\w+_token_(id|index)")
_REPEATED = (20, 3)
"""Of so many words a text is made that is to show what becomes of equal tokens: where a top-k ends
between words it shows little.
"""


def draw_prompts(
    capacity: int, vocabulary: Sequence[int], seed: int, distinct: bool = False
) -> list[list[int]]:
    """Return prompts of different lengths, behind each of which the tokens that are decoded have
    room.

    With `distinct` no token comes twice in one, and the vocabulary has enough others to choose from
    behind each, at the end still two.
    """
    draw = random.Random(seed)
    longest = min(capacity, len(vocabulary) - 1) if distinct else capacity
    room = max(1, longest - NEW_TOKENS)
    strata = [(least, min(most, room)) for least, most in _STRATA if least <= room]
    lengths = [draw.randint(*bounds) for bounds in strata]
    return [
        draw.sample(vocabulary, length) if distinct else draw.choices(vocabulary, k=length)
        for length in lengths
    ]


def longest_read(model: nn.Module, capacity: int, token: int) -> int:
    """Return the longest text that transformers' model can compute, `capacity` tokens or what a
    search finds below.

    Some have tables that end before the model does (a bias of each distance), of which no position
    says anything.
    """
    most = min(capacity, LONGEST + NEW_TOKENS)
    if _reads(model, [token] * most):
        return most
    least = 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if _reads(model, [token] * middle) else (least, middle)
    return least


def _reads(model: nn.Module, text: list[int]) -> bool:
    try:
        text_logits(model, text)
    except (RuntimeError, IndexError, ValueError):  # what a table that is too short raises
        return False
    return True


def is_arbitrary(model: nn.Module, vocabulary: Sequence[int], length: int, seed: int) -> bool:
    """Whether transformers' own logits of repeated tokens change when a text goes on, and of others
    they do not.

    A top-k over the keys' scores, which are equal where the tokens are, takes any of the equals:
    which ones hangs on the number of keys. What such a model says can be compared where no token
    comes twice.
    """
    draw, size = random.Random(seed), min(length, len(vocabulary))
    texts = (
        draw.choices(draw.sample(vocabulary, min(count, len(vocabulary))), k=size)
        for count in _REPEATED
    )
    return (
        any(_dependence(model, text) > ARBITRARY for text in texts)
        and _dependence(model, draw.sample(vocabulary, size)) <= SAME
    )


def _dependence(model: nn.Module, text: list[int]) -> float:
    """Return the largest error of the logits of a text's beginnings to those that the whole text
    has there.
    """
    whole = text_logits(model, text)
    cuts = {len(text) // 3, len(text) // 2, len(text) - 1} - {0}
    return max((_error(text_logits(model, text[:cut]), whole[:cut]) for cut in cuts), default=0.0)


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    alive = other > -1e30
    return rmse_ratio(one[alive], other[alive])


def text_logits(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits of every token of a text, [tokens, vocabulary] float32, float64
    of such a model.
    """
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def text_of(tokens: list[int], places: set[int]) -> list[int]:
    """Return the tokens up to the first that is no text, with it."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in places), len(tokens))
    return tokens[:end]


def places(fields: Any) -> Iterator[int]:
    """Yield the tokens that a config names as something else than text, padding and the places of
    images among them.
    """
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, dict):
            yield from places(value)
        elif type(value) is int and _PLACE.fullmatch(name):
            yield value
