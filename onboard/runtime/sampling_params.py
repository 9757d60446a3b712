"""Sampling parameters. This module does not import torch, so that a wrong value is refused at once."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from onboard.config import ModelOfOptions, StrictModel
from onboard.errors import UsageError
from onboard.untrusted.bounds import OUTPUTS

_LOWEST_TEMPERATURE = 1e-5  # below it (as in vLLM) division by it may overflow float32
_MOST = 1e12  # what logits become with the most of all parameters is far within float32
_MOST_TOKENS = 2**31 - 1


class StructuredOutputs(StrictModel):
    """One constraint on an output; names are those of vLLM."""

    json_schema: dict[str, Any] | str | None = None
    """A JSON schema, or its text; vLLM's name for it, `json`, is taken, too."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation."""

    @model_validator(mode="before")
    @classmethod
    def _json_is_a_schema(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "json" in values:
            return {
                **{key: values[key] for key in values if key != "json"},
                "json_schema": values["json"],
            }
        return values

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [self.json_schema, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(each is not None for each in given) != 1:
            raise UsageError(
                "structured_outputs say nothing, or several things",
                hint="Give one of json, json_object, regex, choice, grammar",
            )
        return self


class SamplingParams(ModelOfOptions):
    """How a request's tokens are sampled and when it ends; names and defaults are those of vLLM."""

    max_tokens: int | None = Field(default=16, ge=1)
    """None: until the end of the text, or of the room that a sequence has."""
    min_tokens: int = Field(default=0, ge=0)
    """Neither an end-of-text token nor a stop token is chosen before this many tokens."""
    temperature: float = Field(default=1.0, ge=0.0, le=_MOST)
    """0 (or less than 1e-5): greedy, always the most likely token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens with at least this probability in total
    (Holtzman et al. 2020).
    """
    top_k: int = Field(default=0, ge=-1, le=_MOST_TOKENS)
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
    include_stop_str_in_output: bool = False
    """Whether the stop text is part of the output."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the output's text."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken off the logit of each token that the output has already."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken off the logit of a token for each time that the output has it."""
    repetition_penalty: float = Field(default=1.0, ge=1 / _MOST, le=100.0)
    """Divides positive logits of tokens that prompt or output have, multiplies negative ones
    (Keskar et al. 2019, arXiv:1909.05858, section 4.1)."""
    logit_bias: dict[int, Annotated[float, Field(ge=-_MOST, le=_MOST)]] = Field(
        default_factory=dict
    )
    """Added to the logits of tokens, by id; -100 bans one, 100 all but forces it."""
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1)
    """The tokens that may be chosen; None: all."""
    bad_words: list[str] = Field(default_factory=list)
    """Texts that the output may not have, each as the tokenizer writes it."""
    structured_outputs: StructuredOutputs | None = None
    """What the output has to be: JSON of a schema, a text of an expression or a grammar."""
    logprobs: int | None = Field(default=None, ge=-1)
    """Return the log-probabilities of the chosen token and of this many most likely tokens; -1: of
    all.
    """
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    """The same for each token of the prompt but the first; they cost a second prefill."""
    n: int = Field(default=1, ge=1, le=OUTPUTS.most)
    """Outputs per prompt."""
    lora: str | None = None
    """The adapter that prompt and outputs are computed with; None: the model as it is."""

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

    @field_validator("bad_words", mode="after")
    @classmethod
    def _no_empty_word(cls, values: list[str]) -> list[str]:
        if "" in values:
            raise ValueError("an empty text is in every output")
        return values

    @model_validator(mode="after")
    def _least_below_most(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens is more than max_tokens ({self.max_tokens})")
        return self

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before a token is chosen from them."""
        return (
            bool(self.presence_penalty or self.frequency_penalty or self.min_tokens)
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias or self.bad_words or self.structured_outputs)
            or self.allowed_token_ids is not None
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < _LOWEST_TEMPERATURE

    def last_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end an output, of a model with these end-of-text tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_token_ids)

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
