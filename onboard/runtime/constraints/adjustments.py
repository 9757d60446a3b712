"""Changes of one request's logits before its next token is chosen from them.

Biases are added, penalties taken off, and tokens excluded, by masks that the host finds; temperature
and filters come after that. Log-probabilities that a request gets back are those of before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from onboard.errors import UsageError
from onboard.runtime.constraints.structured import End, Matcher
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.tokenizer import Tokenizer

Bits = npt.NDArray[np.uint8]
"""[bytes] a bit for each token, the first token's first: whether it may come."""


class Adjustments:
    """What is done to the logits of one request; it follows the tokens that the request gets."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        last_tokens: Collection[int],
        eos: int,
        words: Sequence[Sequence[int]],
        matcher: Matcher | None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        """The grammar that the output follows, None if it need not follow one."""
        self.eos = eos
        """What comes where nothing else may."""
        self._last_tokens = sorted(last_tokens)
        self._words = words
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed)

    @property
    def changes_values(self) -> bool:
        """Whether logits get other values, besides those of excluded tokens."""
        params = self.params
        penalties = params.presence_penalty or params.frequency_penalty
        return bool(penalties or params.logit_bias) or params.repetition_penalty != 1.0

    def change(self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Change `logits` [vocabulary] float32 in place; `output` are the tokens so far."""
        for token, bias in self.params.logit_bias.items():
            logits[token] += bias
        self._penalise(logits, prompt, output)

    def exclude(self, kept: Bits, output: Sequence[int]) -> None:
        """Clear the bits of the tokens that may not come behind `output`, the tokens so far."""
        if self._allowed is not None:
            kept &= _bits_of(self._allowed, len(kept))
        excluded = [word[-1] for word in self._words if _ends_with(output, word[:-1])]
        excluded += self._last_tokens if len(output) < self.params.min_tokens else []
        if excluded:
            kept &= ~_bits_of(np.array(excluded), len(kept))
        if self.matcher is not None:
            self.matcher.exclude(kept)

    def took(self, token: int) -> End:
        """Follow a token that the request got; return how the grammar ends with it, if it does."""
        return None if self.matcher is None else self.matcher.took(token)

    def _penalise(self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        params = self.params
        if params.repetition_penalty != 1.0:
            seen = _unique(logits, [*prompt, *output])[0]
            values = logits[seen]
            factor = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if output and (params.frequency_penalty or params.presence_penalty):
            seen, counts = _unique(logits, output)
            logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def wanted_adjustments(
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    vocabulary: int | None,
    tokenizer: Tokenizer | None,
    matcher: Matcher | None,
) -> Adjustments | None:
    """Return what a request wants done to its logits; None for most. The request has the matcher for
    itself.
    """
    if not params.adjusts_logits:
        return None
    check_token_ids(params, vocabulary)
    return Adjustments(
        params,
        last_tokens=params.last_tokens(eos_token_ids),
        eos=min(eos_token_ids, default=0),
        words=word_tokens(params.bad_words, tokenizer),
        matcher=matcher,
    )


def _bits_of(tokens: npt.NDArray[np.int64], size: int) -> Bits:
    """Return `size` bytes with the bits of some tokens."""
    each = np.zeros(8 * size, dtype=np.bool_)
    each[tokens] = True
    return np.packbits(each, bitorder="little")


def _unique(logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that there are, and how often."""
    ids, counts = torch.unique(torch.tensor(tokens), return_counts=True)
    return ids.to(logits.device), counts.to(logits)


def _ends_with(output: Sequence[int], beginning: Sequence[int]) -> bool:
    return not beginning or list(output[-len(beginning) :]) == list(beginning)


def word_tokens(words: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the token ids of each text, alone and behind a space.

    Raises `UsageError` without a tokenizer.
    """
    if words and tokenizer is None:
        raise UsageError(
            "bad_words need a tokenizer and the checkpoint has none", hint="Use logit_bias"
        )
    if tokenizer is None:
        return []
    ways = [way for word in words for way in (word, f" {word.lstrip()}")]
    found = (tokenizer.encode_plain(way) for way in ways)
    return [ids for ids in found if ids]


def check_token_ids(params: SamplingParams, vocabulary: int | None) -> None:
    """Raise `UsageError` for ids that no token has: on a GPU an index out of range ends the
    process.
    """
    named = {
        "logit_bias": list(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or [],
        "stop_token_ids": params.stop_token_ids if params.min_tokens else [],
    }
    for field, ids in named.items():
        if bad := [each for each in ids if each < 0 or each >= (vocabulary or 1 << 62)]:
            raise UsageError(
                f"{field} has token {bad[0]}",
                hint=f"Token ids go from 0 to {(vocabulary or 0) - 1}",
            )
