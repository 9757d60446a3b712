"""The forms in which prompts, parameters and priorities are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from onboard.errors import UsageError
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.tokenizer import Tokenizer

MEDIA = "multi_modal_data"
MESSAGES = "messages"
"""Of a prompt that a processor makes tokens of itself, beside its sounds."""
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids (a sequence, tensor or array), or vLLM's `{"prompt": ...}` or
`{"prompt_token_ids": ...}`.

For a model with several codebooks, `LLM.pack` makes token ids of the codes. A text in a mapping may
come with vLLM's `"multi_modal_data"`: `{"image": ..., "audio": ...}`, each a file, a URL, what is
decoded already, or a list of these, in the order of the placeholders in the text. Token ids may come
with `"processed"`: the output of transformers' processor for the prompt's images (`pixel_values`
and the like); its `input_ids` and `attention_mask` are ignored.
"""


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return a list of prompts; one alone makes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _as_list(prompts)
    return [items] if items and all(map(_is_whole, items)) else items


def text_or_tokens(prompt: Any) -> str | list[int]:
    """Return a prompt's text or token ids; raise `UsageError` for anything else."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return _text(prompt)
    return as_tokens(prompt)


def token_ids(prompt: str | list[int], tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of a prompt's text; ids stay as they are. Raises `UsageError` for a text
    where there is no tokenizer.
    """
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise UsageError(
            "the checkpoint has no tokenizer", hint="Give prompts as lists of token ids"
        )
    return tokenizer.encode(prompt)


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(f"a prompt is {prompt!r:.80}, which is no Unicode text") from None
    return prompt


def flattened(tokens: Any) -> Any:
    """Return a prompt's token ids, nested or not, as a flat tensor; anything else unchanged."""
    try:
        return torch.as_tensor(tokens).flatten()
    except (TypeError, ValueError, RuntimeError):
        return tokens


def as_tokens(prompt: Any) -> list[int]:
    """Return a prompt's token ids; raise `UsageError` for anything else."""
    tokens = _as_list(prompt)
    if set(map(type, tokens)) <= {int}:  # a look at each by itself takes a second for a million
        return tokens
    if bad := [token for token in tokens if not _is_whole(token)]:
        raise UsageError(
            f"a prompt has {bad[0]!r:.80} for a token",
            hint="Tokens are whole numbers; LLM.pack makes them of codes",
        )
    return [int(token) for token in tokens]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def processed_inputs(prompt: Any) -> dict[str, Any] | None:
    """Return the processor's outputs for a prompt's images, None if it has none."""
    processed = prompt.get("processed") if isinstance(prompt, Mapping) else None
    if not processed:
        return None
    return {
        key: value for key, value in processed.items() if key not in ("input_ids", "attention_mask")
    }


def has_media(prompt: Any) -> bool:
    """Whether a prompt has images or sound."""
    return isinstance(prompt, Mapping) and bool(prompt.get("processed") or prompt.get(MEDIA))


def _as_list(values: Any) -> list[Any]:
    """Return a sequence, a tensor or an array as a list; raise `UsageError` for anything else."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise UsageError(f"a prompt is {values!r:.80}", hint="Give a text, or a list of token ids")
    return list(values)


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    lora: str | Sequence[str | None] | None = None,
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts, with the adapters in `lora`, one for all or
    one for each; raise `UsageError` for anything else.
    """
    each = _each_params(params, count)
    if lora is None:
        return each
    names = [lora] * count if isinstance(lora, str) else lora
    if not isinstance(names, Sequence) or not all(isinstance(n, str | None) for n in names):
        raise UsageError(f"lora is {lora!r:.80}", hint="Give the name of an adapter, or a list")
    if len(names) != count:
        raise UsageError(
            f"there are {count} prompts and {len(names)} adapters", hint="Give one for each"
        )
    return [
        one if name is None else one.model_copy(update={"lora": name})
        for one, name in zip(each, names, strict=True)
    ]


def _each_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(
        isinstance(each, SamplingParams) for each in params
    ):
        raise UsageError(
            f"sampling_params is {params!r:.80}", hint="Give SamplingParams, or a list of them"
        )
    if len(params) != count:
        raise UsageError(
            f"there are {count} prompts and {len(params)} sampling parameters",
            hint="Give one for each",
        )
    return list(params)


def as_priorities(priority: int | Sequence[int], count: int) -> list[int]:
    """Return the priority of each of `count` prompts; raise `UsageError` for anything else."""
    priorities = [priority] * count if isinstance(priority, int) else priority
    if not isinstance(priorities, Sequence) or not all(map(_is_whole, priorities)):
        raise UsageError(f"priority is {priority!r:.80}", hint="Priorities are whole numbers")
    if len(priorities) != count:
        raise UsageError(
            f"there are {count} prompts and {len(priorities)} priorities", hint="Give one for each"
        )
    return list(priorities)
