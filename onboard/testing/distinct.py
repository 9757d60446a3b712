"""Texts in which no token comes twice, for models that treat two of the same in an arbitrary
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from onboard.runtime.llm import LLM


def distinct_prompts(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return one random prompt of each length, as token ids, none of which comes twice in it."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(vocab_size, generator=generator)[:length].tolist() for length in lengths]


def continue_distinct(
    llm: LLM, prompts: Sequence[Sequence[int]], steps: int, vocab_size: int
) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Return the tokens that each prompt goes on with, and the log-probabilities of every token at
    each step.

    The next token is the most likely one that the text lacks. Each step is a request of its own,
    which with pages of one token, and room for all, computes its last token alone: the others are
    in the cache.
    """
    from onboard.runtime.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=vocab_size)
    texts = [list(prompt) for prompt in prompts]
    logprobs: list[list[dict[int, float]]] = [[] for _ in prompts]
    for _ in range(steps):
        for text, said, output in zip(texts, logprobs, llm.generate(texts, params), strict=True):
            assert output.logprobs is not None
            (found,) = output.logprobs
            said.append(found)
            text.append(max(found.keys() - set(text), key=found.__getitem__))
    return [
        (text[len(prompt) :], said)
        for text, prompt, said in zip(texts, prompts, logprobs, strict=True)
    ]
