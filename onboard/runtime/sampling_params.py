"""Sampling parameters. This module does not import torch, so that a wrong value is refused at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from onboard.config import StrictModel
from onboard.errors import UsageError
from onboard.untrusted.bounds import OUTPUTS

_OURS = "Value error, "  # what pydantic puts before words of ours
_LOWEST_TEMPERATURE = 1e-5  # below it (as in vLLM) division by it may overflow float32


class SamplingParams(StrictModel):
    """How a request's tokens are sampled and when it ends; names and defaults are those of vLLM."""

    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    """0 (or less than 1e-5): greedy, always the most likely token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens with at least this probability in total
    (Holtzman et al. 2020).
    """
    top_k: int = Field(default=0, ge=-1)
    """Sample from the k most likely tokens; 0 or -1: all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample from tokens at least this likely relative to the most likely one (Nguyen et al.
    2024).
    """
    seed: int | None = Field(default=None, ge=0)
    stop: list[str] = Field(default_factory=list)
    """Stop texts: each ends the output and is not part of it."""
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0)
    """Return the log-probabilities of the chosen token and of this many most likely tokens."""
    n: int = Field(default=1, ge=1, le=OUTPUTS.most)
    """Outputs per prompt."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, values: Any, validate: Callable[[Any], Self]) -> Self:
        """Raise `UsageError` for the first value that is wrong."""
        try:
            return validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix(_OURS)
            raise UsageError(f"{place} is {first['input']!r:.80}: {reason}") from None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple):
            raise ValueError("a stop text is a text, or a list of them")
        if "" in values:
            raise ValueError("an empty stop text would end every output at once")
        return list(values)

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _no_stop_tokens(cls, value: Any) -> Any:
        return [] if value is None else value

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < _LOWEST_TEMPERATURE

    def row(self) -> tuple[float, float, float, float]:
        """Return (temperature, top_k, top_p, min_p) for the step buffer: temperature 0 is greedy,
        top_k 0 keeps all tokens.
        """
        if self.greedy:
            return 0.0, 0.0, 1.0, 0.0
        return self.temperature, max(self.top_k, 0), self.top_p, self.min_p


def stream_key(params: SamplingParams, index: int) -> int:
    """Return the key of the random numbers of output number `index` of a prompt, random if no seed
    is set.

    Random numbers depend on the key and the token's index alone: the same seed gives the same
    tokens in any batch, and after a preemption.
    """
    if params.seed is None:
        return secrets.randbits(64)
    return int.from_bytes(
        blake2b(f"{params.seed} {index}".encode(), digest_size=8).digest(), "little"
    )
