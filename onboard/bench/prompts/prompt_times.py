"""How long given prompts take, here and in transformers: what `onboard run --benchmark` prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from onboard.bench.ceilings import synchronized
from onboard.bench.peers import transformers_model
from onboard.bench.subject import open_subject
from onboard.errors import UsageError
from onboard.runtime.build import resolve_dtype

REPEATS = 3


@dataclass(frozen=True)
class PromptTimes:
    """Medians, in seconds, for all prompts together; end-of-text tokens do not end them."""

    prefill: float
    """Of a generation of one token a prompt."""
    decode_step: float
    """Of one more token a prompt."""
    duration: float
    """Of all tokens."""
    tokens_per_second: float

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)


def time_prompts(
    generate: Callable[[int], object], prompts: int, output: int, device: torch.device
) -> PromptTimes:
    """Time a function that generates that many tokens for each of `prompts` prompts; it has run
    once before it is timed.

    Raises `UsageError` for less than two tokens: there is no step between them.
    """
    if output < 2:
        raise UsageError("--benchmark needs at least two tokens", hint="Raise --num-tokens")
    generate(output)
    firsts = [synchronized(lambda: generate(1), device) for _ in range(REPEATS)]
    wholes = [synchronized(lambda: generate(output), device) for _ in range(REPEATS)]
    first, whole = statistics.median(firsts), statistics.median(wholes)
    return PromptTimes(first, (whole - first) / (output - 1), whole, prompts * output / whole)


@dataclass(frozen=True)
class TransformersRun:
    """What transformers' own `generate` answers to the same prompts."""

    tokens: list[list[int]]
    """Greedy tokens of each prompt, by transformers' own end-of-text tokens."""
    times: PromptTimes | None


def run_transformers(
    model: str,
    prompts: Sequence[Sequence[int]],
    output: int,
    device: torch.device,
    *,
    inputs: Sequence[Mapping[str, Any] | None],
    root: Path,
    config: Path | None,
    overrides: Mapping[str, Any],
    settings: Mapping[str, Any],
    ignore_eos: bool,
    timed: bool,
) -> TransformersRun:
    """Generate greedily with transformers' model, prompt by prompt; `timed` measures it, too.

    `inputs` are what the processor has made of each prompt's images and sounds. The other arguments
    are those of `LLM`. Raises `OnboardError` for a checkpoint that transformers
    cannot load.
    """
    opened = open_subject(
        model, root, config=config, overrides=overrides, random_weights=False, settings=settings
    )
    with ExitStack() as stack:
        subject = stack.enter_context(opened)
        dtype = resolve_dtype(subject.runtime.dtype, subject.config, device)
        hf = stack.enter_context(transformers_model(subject, device, dtype))
        given = [
            (torch.tensor([list(prompt)], device=device), _moved(each or {}, device, dtype))
            for prompt, each in zip(prompts, inputs, strict=True)
        ]

        def generate(count: int, ends: bool = False) -> list[list[int]]:
            return [_greedy(hf, *each, count, ends) for each in given]

        tokens = generate(output, not ignore_eos)
        times = time_prompts(generate, len(prompts), output, device) if timed else None
    return TransformersRun(tokens, times)


def _moved(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs on the device, numbers with a fraction in the model's dtype."""
    return {
        name: each.to(device, dtype if each.is_floating_point() else None)
        if isinstance(each, torch.Tensor)
        else each
        for name, each in inputs.items()
    }


def _greedy(
    hf: Any, ids: torch.Tensor, inputs: Mapping[str, Any], count: int, ends: bool
) -> list[int]:
    options: dict[str, Any] = {} if ends else {"eos_token_id": None, "min_new_tokens": count}
    found = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=count,
        **inputs,
        **options,
    )
    return [int(token) for token in found[0, ids.shape[1] :]]
