"""Which tokens are text: a config names others for padding, for a mask, for the place of an image
or a sound.

transformers may not count such a token, may leave it out of attention, or may ask for the image:
what it makes of a text with one inside, or of what comes behind it, is not the model's prediction
of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from onboard.hf.architecture import text_config
from onboard.modeling import ONE_CODEBOOK, Codebooks

_NO_TEXT = re.compile(r"(?!(bos|eos|sep|cls|forced|decoder_start)_)\w+_token_(id|index)")


def special_tokens(config: Any, codebooks: Codebooks = ONE_CODEBOOK) -> frozenset[int]:
    """Return the tokens that a Hugging Face config, or a part of it, names as something else than
    text.

    Where a token is a code of each of several codebooks, a config names codes: tokens are alike
        then.
    """
    return frozenset(_special(config.to_dict())) if codebooks.count == 1 else frozenset()


def text_tokens(config: Any, codebooks: Codebooks = ONE_CODEBOOK) -> Sequence[int]:
    """Return the vocabulary of a config's text model without `special_tokens`: what random prompts
    are made of.
    """
    if codebooks.count > 1:
        return range(codebooks.tokens)
    special = special_tokens(config)
    return [token for token in range(text_config(config).vocab_size) if token not in special]


def up_to_special(tokens: Sequence[int], special: frozenset[int]) -> list[int]:
    """Return the tokens up to the first one that is no text, with it."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in special), len(tokens))
    return list(tokens[:end])


def _special(fields: dict[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _special(value)
        elif type(value) is int and _NO_TEXT.fullmatch(str(name)):
            yield value
