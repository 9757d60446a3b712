"""The prompts of a run: texts and a chat turn where there is a tokenizer, else random tokens; and a
long one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.runtime.tokenizer import Tokenizer
from onboard.verify.held_out import stories
from onboard.verify.lengths import thresholds
from onboard.workflow.run_model.prompts_file import own_prompts

PROMPTS = (
    "Once upon a time there was a little girl who",
    "The capital of France is",
    "To make a good cup of tea, first",
    "In simple words, gravity is",
)
QUESTION = "In one sentence, why is the sky blue?"
LONG_TOKENS = 8
"""Tokens that are generated after the long prompt."""

_BEYOND = 21
"""By how many tokens the long prompt passes a threshold: no multiple of a page, a chunk or a
window.
"""
_SHORTEST_LONG = 96
_OPERATIONS = {"cpu": 2e12, "cuda": 2e15}
"""What the long prompt may cost: seconds on either device."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as it is shown and as the model gets it."""

    text: str | None
    """None for token ids of a checkpoint without a tokenizer."""
    token_ids: list[int]
    chat: bool = False
    """Rendered with the tokenizer's chat template."""


def build_prompts(
    tokenizer: Tokenizer | None,
    checkpoint: Path,
    words: Sequence[int],
    room: int,
    facts: list[str],
    distinct: bool = False,
) -> list[Prompt]:
    """Return the checkpoint's prompts or the built-in ones, and a chat turn when there is a
    template; without a tokenizer, random `words`.

    With `distinct` they are random words, none of which comes twice.
    """
    if distinct:
        facts.append(
            "transformers treats repeated tokens in an arbitrary order: prompts are random tokens without any"
        )
        return [
            Prompt(None, random.Random(n).sample(words, min(n, room, len(words))))
            for n in (5, 9, 17, 3)
        ]
    if tokenizer is None:
        facts.append("the checkpoint has no tokenizer: prompts are random token ids")
        draw = random.Random(0)
        return [Prompt(None, draw.choices(words, k=min(n, room))) for n in (5, 9, 17, 3)]
    texts, question = _texts(checkpoint, tokenizer.has_template)
    prompts = [Prompt(text, tokenizer.encode(text)) for text in texts]
    if tokenizer.has_template:
        prompts += _chat_turn(tokenizer, question, facts)
    for prompt in prompts:
        if len(prompt.token_ids) > room:
            facts.append(
                f"prompt {prompt.text!r} is cut to {room} tokens: the model has few positions"
            )
            del prompt.token_ids[room:]
    return prompts


def _texts(checkpoint: Path, has_template: bool) -> tuple[Sequence[str], str]:
    """Return the texts of a run and what a chat turn asks: the last of several that the checkpoint
    brings.
    """
    own = own_prompts(checkpoint)
    if has_template and len(own) > 1:
        return own[:-1], own[-1]
    return own or PROMPTS, own[-1] if own else QUESTION


def _chat_turn(tokenizer: Tokenizer, question: str, facts: list[str]) -> list[Prompt]:
    """Return the chat turn, or none with the reason."""
    try:
        text = tokenizer.chat([{"role": "user", "content": question}])
    except OnboardError as error:
        facts.append(f"no chat turn: {error.message}")
        return []
    return [Prompt(text, tokenizer.encode_plain(text), chat=True)]


def long_length(
    config: Any, positions: int | None, parameters: int, device: str
) -> tuple[int, list[str]]:
    """Return how long the long prompt is, and the thresholds of the config that it does not pass,
    with the reason.

    It passes as many of the config's windows, chunks and original positions as the model's
    positions and the device's time allow; `parameters` is the number of the model's parameters.
    """
    length, left = _SHORTEST_LONG, []
    for name, value in thresholds(config.to_dict()).items():
        needed = value + _BEYOND
        if positions is not None and needed + LONG_TOKENS > positions:
            if value < positions:
                left.append(
                    f"{name} {value:,} is not crossed: the model has {positions:,} positions"
                )
        elif _operations(config, parameters, needed) > _OPERATIONS[device]:
            left.append(
                f"{name} {value:,} is not crossed: a prompt of that length takes too long on this device"
            )
        else:
            length = max(length, needed)
    return (length if positions is None else max(1, min(length, positions - LONG_TOKENS))), left


def _operations(config: Any, parameters: int, length: int) -> float:
    """Return the floating-point operations of a prompt: two a parameter and token, and the scores
    of attention.
    """
    layers, hidden = (
        getattr(config, "num_hidden_layers", 0) or 0,
        getattr(config, "hidden_size", 0) or 0,
    )
    return 2.0 * parameters * length + 4.0 * layers * hidden * length**2


def long_prompt(
    tokenizer: Tokenizer | None,
    checkpoint: Path,
    words: Sequence[int],
    length: int,
    distinct: bool = False,
) -> list[int]:
    """Return `length` tokens: held-out text over and over, or random `words` without a tokenizer.

    With `distinct` they are random words, none of which comes twice, as many as there are.
    """
    if distinct:
        return random.Random(1).sample(words, min(length, len(words)))
    if tokenizer is None:
        return random.Random(1).choices(words, k=length)
    ids: list[int] = []
    while len(ids) < length:
        ids += [token for story in stories(checkpoint) for token in tokenizer.encode(story)]
    return ids[:length]


def up_to_repeat(seen: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return the tokens up to the first that `seen` or those before it have, with it."""
    known = set(seen)
    for index, token in enumerate(tokens):
        if token in known:
            return list(tokens[: index + 1])
        known.add(token)
    return list(tokens)
