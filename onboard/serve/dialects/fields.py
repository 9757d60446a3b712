"""What the bodies of requests have in common; fields that nobody knows are left aside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from onboard.runtime.sampling_params import SamplingParams
from onboard.serve.refusals import RefusedError

Tokens = list[int]


class Body(BaseModel):
    """The body of a request. Clients send fields of newer versions, so unknown ones pass."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def read(cls, body: bytes) -> Any:
        """Return a parsed body; raise `RefusedError` for the first thing that is wrong."""
        try:
            # no JSON has NaN, so no answer could repeat it
            said = from_json(body, allow_inf_nan=False)
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise _refusal(error, said) from None
        except ValueError as error:
            raise RefusedError(f"the body is no JSON: {error}") from None


def _refusal(error: ValidationError, said: Any) -> RefusedError:
    """Return what to tell of the first thing that is wrong in `said`, by its place there."""
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    place = first["loc"] if first["type"] == "missing" else _place(first["loc"], said)
    depth = len(place)
    tried = [each["loc"][depth] for each in errors if each["loc"][:depth] == place != each["loc"]]
    forms = ", ".join(dict.fromkeys(map(str, tried)))
    message = f"Input should be one of {forms}" if ", " in forms else first["msg"]
    where = ".".join(map(str, place))
    return RefusedError(f"{where}: {message}" if where else message, param=where or None)


def _place(loc: tuple[int | str, ...], said: Any) -> tuple[int | str, ...]:
    """Return the part of a place that is one in `said`; the rest are the forms that were tried
    there.
    """
    for depth, part in enumerate(loc):
        try:
            said = said[part]
        except (LookupError, TypeError):
            return loc[: max(depth, 1)]
    return loc


class StreamOptions(Body):
    """What a stream brings besides the text."""

    include_usage: bool = False


class Sampling(Body):
    """How tokens are chosen: OpenAI's fields, and vLLM's further ones."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1)
    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Tokens | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    priority: int = 0

    def truncated(self, tokens: Tokens) -> Tokens:
        """Return the last tokens of a prompt, as many as are wanted at most."""
        most = self.truncate_prompt_tokens
        return tokens if most is None else tokens[-most:]

    def params(self, defaults: Mapping[str, Any], **further: Any) -> SamplingParams:
        """Return the parameters: the request's, else `defaults`; `further` overrides both.

        Raises `UsageError` for a value that is wrong.
        """
        known = set(SamplingParams.model_fields)
        said = {
            name: value
            for name, value in self.model_dump(include=known).items()
            if value is not None
        }
        if said.get("top_p") == 0.0:  # OpenAI's clients say so for the likeliest token
            said["top_p"], said["top_k"] = 1.0, 1
        if (seed := said.get("seed")) is not None:
            said["seed"] = seed & (2**63 - 1)
        return SamplingParams(**{**defaults, **said, **further})

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the counts of tokens as OpenAI's interface has them; cached ones are the prompt's."""
    total = prompt_tokens + completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
