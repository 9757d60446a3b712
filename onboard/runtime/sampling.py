"""Sampling: the parameters that users set, and the choice of the next token from logits, vectorised over the batch.

A token is drawn by inverting the cumulative distribution at one uniform number, which comes from the request's own
generator. So the same seed gives the same tokens on every device and beside any other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pydantic import Field, field_validator

from onboard.config import StrictModel
from onboard.errors import NotFiniteError

_LOWEST_TEMPERATURE = 1e-5  # below it (as in vLLM) division by it may overflow float32
_NOT_A_NUMBER = -1  # in place of a token


class SamplingParams(StrictModel):
    """How a request's tokens are chosen and when it ends; names and defaults are vLLM's."""

    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    """0 (or less than 1e-5): the most likely token, always."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the most likely tokens that together have at least this probability (Holtzman et al. 2020)."""
    top_k: int = Field(default=0, ge=-1)
    """Keep the k most likely tokens; 0 or -1: all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Keep tokens at least this likely relative to the most likely one (Nguyen et al. 2024)."""
    seed: int | None = Field(default=None, ge=0)
    stop: list[str] = Field(default_factory=list)
    """Texts that end the output and are not part of it."""
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0)
    """Report the log-probabilities of the chosen token and of this many most likely ones."""
    n: int = Field(default=1, ge=1)
    """Outputs per prompt."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        values = [] if value is None else [value] if isinstance(value, str) else list(value)
        if "" in values:
            raise ValueError("an empty stop text would end every output at once")
        return values

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _no_stop_tokens(cls, value: Any) -> Any:
        return [] if value is None else value

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _LOWEST_TEMPERATURE

    @property
    def filtered(self) -> bool:
        """Whether unlikely tokens are cut off."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def make_generator(params: SamplingParams, index: int) -> np.random.Generator:
    """Return the source of randomness of a request's output number `index`; without a seed it is a fresh one."""
    return np.random.default_rng(None if params.seed is None else [params.seed, index])


@dataclass(slots=True)
class Choice:
    """One chosen token; `logprobs` maps token ids to log-probabilities, the chosen one and the most likely ones."""

    token: int
    logprobs: dict[int, float] = field(default_factory=dict)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[np.random.Generator]
) -> list[Choice]:
    """Choose a token for each row of `logits` [rows, vocabulary]; one parameter set and one generator a row.

    Raises `NotFiniteError` for logits that are NaN or infinite: any token would be as good as any other.
    """
    assert len(logits) == len(params) == len(generators)
    largest, tokens = logits.max(dim=-1)  # a NaN counts as largest
    for filtered in (False, True):
        rows = [i for i, each in enumerate(params) if not each.greedy and each.filtered == filtered]
        if rows:
            uniform = torch.tensor([generators[i].random() for i in rows], dtype=torch.float64).to(logits.device)
            draw = _draw_filtered if filtered else _draw
            tokens[rows] = draw(logits[rows].float(), [params[i] for i in rows], uniform)
    choices = [Choice(token) for token in torch.where(largest.isfinite(), tokens, _NOT_A_NUMBER).tolist()]
    if any(choice.token == _NOT_A_NUMBER for choice in choices):
        raise NotFiniteError("the logits are not finite", hint="Use dtype bfloat16 or float32")
    for i, each in enumerate(params):
        if each.logprobs is not None:
            choices[i].logprobs = _logprobs(logits[i], choices[i].token, each.logprobs)
    return choices


def _column(params: Sequence[SamplingParams], name: str, like: torch.Tensor) -> torch.Tensor:
    """Return one parameter of every row as a column [rows, 1] on the device of `like`."""
    return torch.tensor([getattr(each, name) for each in params], dtype=torch.float32).to(like.device)[:, None]


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    probabilities = torch.softmax(logits / _column(params, "temperature", logits), dim=-1)
    return _invert(probabilities, uniform)


def _draw_filtered(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Draw after min-p, then top-k, then top-p, each on what the one before left; ties keep the lower token id."""
    scaled, order = torch.sort(logits / _column(params, "temperature", logits), dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(scaled, dim=-1)
    keep = probabilities >= _column(params, "min_p", logits) * probabilities[:, :1]
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    top_k = _column(params, "top_k", logits)
    keep &= (top_k <= 0) | (ranks < top_k)
    probabilities = torch.softmax(scaled.masked_fill(~keep, -torch.inf), dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    keep &= (before < _column(params, "top_p", logits)) | (ranks == 0)
    drawn = _invert(probabilities.masked_fill(~keep, 0.0), uniform)
    return order.gather(-1, drawn[:, None])[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return for each row the index at which its cumulated weights pass `uniform` times their sum."""
    cumulated = weights.double().cumsum(-1)
    target = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)


def _logprobs(row: torch.Tensor, token: int, count: int) -> dict[int, float]:
    logprobs = torch.log_softmax(row.float(), dim=-1)
    values, ids = logprobs.topk(min(count, len(row)))
    best = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {token: float(logprobs[token]), **best}
