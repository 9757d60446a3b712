"""`StaticLLM`: a model with a static cache as a Python object, for comparison and study.

Prompts run one after the other. The whole prompt is one step, then each token is one; the caches
are as long as prompt and output together, and every step copies them, as their form has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from onboard.config import DType, Mode, with_settings
from onboard.errors import UsageError
from onboard.runtime.build import eos_token_ids
from onboard.runtime.calls.outputs import RequestOutput, request_output
from onboard.runtime.calls.prompt_forms import (
    Prompt,
    as_batch,
    as_params,
    has_media,
    text_or_tokens,
    token_ids,
)
from onboard.runtime.calls.request_texts import RequestTexts
from onboard.runtime.resolve import ConfigLike, find_checkpoint, resolve_config
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request
from onboard.runtime.static.static_graph import empty_caches, static_graph
from onboard.runtime.tokenizer import Tokenizer, tokenizer_folder


@dataclass
class StaticStats:
    """What the runs of a `StaticLLM` took."""

    generated_tokens: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return {**vars(self), "tokens_per_second": self.tokens_per_second}

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens, by all of the time."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def draft_line(self) -> None:
        """Return nothing: there are no drafts."""

    def cache_line(self) -> str:
        """Return what a person is told of the caches."""
        return "static caches: as long as prompt and output, copied in every step"


class StaticLLM:
    """A model that was onboarded under `root`, with a static cache of one of the forms
    "static_v1" and "static_v2".

    The other arguments are those of `LLM`. Raises what `LLM` raises, and `OnboardError` for a model
    that keeps more than keys and values of causal attention.
    """

    def __init__(
        self,
        model: str | Path,
        form: str,
        root: str | Path | None = None,
        device: str = "auto",
        dtype: DType = "auto",
        config: ConfigLike = None,
        mode: Mode = "graph",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Path.cwd() if root is None else Path(root).expanduser()
        overrides = {"device": device, "dtype": dtype, "mode": mode}
        runtime = with_settings(resolve_config(str(model), folder, config, overrides), settings)
        if runtime.speculative.draft:
            raise UsageError("drafts need a paged cache", hint="Leave --draft or --cache out")
        checkpoint = find_checkpoint(runtime)
        graph = static_graph(checkpoint, runtime, form, root=folder, model=str(model))
        self.gm: fx.GraphModule = graph[0]
        self.context = graph[1]
        self.tokenizer = Tokenizer.load(tokenizer_folder(runtime.tokenizer, checkpoint))
        self.texts = RequestTexts(self.tokenizer)
        self.eos_token_ids = eos_token_ids(checkpoint, self.context.factory.text_config)
        self.stats = StaticStats()

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.context.device

    @property
    def facts(self) -> list[str]:
        """Fallbacks and what the static cache leaves out."""
        own = "a static cache: prompts run one by one, greedily, and nothing is fused"
        return [own, *self.context.facts]

    @property
    def limits(self) -> dict[str, int]:
        """The limits that it serves, by their names in the configuration."""
        longest = self.context.runtime.max_seq_len
        return {"max_seq_len": longest, "max_batch_size": 1, "max_num_tokens": longest}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[Request], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate greedily for each prompt; return one `RequestOutput` for each, in order.

        `on_step` is called with the prompt's request after each token.

        Raises `UsageError` for a prompt that is empty, too long or has unknown tokens, and for
        parameters that ask for more than greedy tokens and where they end.
        """
        batch = [text_or_tokens(prompt) for prompt in as_batch(prompts)]
        if any(map(has_media, as_batch(prompts))):
            raise UsageError("static caches take text alone", hint="Use LLM")
        params = as_params(sampling_params, len(batch))
        requests = [
            self._request(token_ids(prompt, self.tokenizer), each)
            for prompt, each in zip(batch, params, strict=True)
        ]
        start = time.perf_counter()
        for request in requests:
            self._run(request, on_step)
        self.stats.seconds += time.perf_counter() - start
        return [
            request_output(prompt if isinstance(prompt, str) else None, each.prompt, [each])
            for prompt, each in zip(batch, requests, strict=True)
        ]

    @torch.inference_mode()
    def next_tokens(self, prompt: Sequence[int], length: int) -> Iterator[int]:
        """Yield the greedy tokens after a prompt, until prompt and tokens fill `length` places."""
        device, first = self.context.device, self.context.first_position
        caches, new, start = empty_caches(self.gm, length, device), list(prompt), 0
        while (end := start + len(new)) < length:
            ids = torch.tensor([new], device=device)
            places = torch.arange(start, end, device=device).unsqueeze(0) + first
            logits, *caches = self.gm(ids, places, *caches, start, end)
            new, start = [int(logits[0, -1].argmax())], end
            yield new[0]

    def _run(self, request: Request, on_step: Callable[[Request], None] | None) -> None:
        for token in self.next_tokens(request.prompt, request.limit):
            request.tokens.append(token)
            self.stats.generated_tokens += 1
            if on_step is not None:
                on_step(request)
            if token in request.last_tokens or self.texts.stopped_by(request) is not None:
                request.finish_reason = "stop"
                break
        request.finish_reason = request.finish_reason or "length"
        self.texts.finish(request)

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        _refuse_more_than_greedy(params)
        longest = self.context.runtime.max_seq_len
        size = getattr(self.context.factory.text_config, "vocab_size", None)
        if not prompt or len(prompt) >= longest:
            raise UsageError(f"a prompt has {len(prompt)} tokens", hint=f"Give 1 to {longest - 1}")
        if size and (bad := [token for token in prompt if not 0 <= token < size]):
            raise UsageError(
                f"a prompt has token {bad[0]}", hint=f"Token ids go from 0 to {size - 1}"
            )
        if params.stop and self.tokenizer is None:
            raise UsageError("stop texts need a tokenizer and the checkpoint has none")
        request = Request(prompt, params, key=0)
        wanted = longest if params.max_tokens is None else len(prompt) + params.max_tokens
        request.limit = min(wanted, longest)
        request.last_tokens = params.last_tokens(self.eos_token_ids)
        return request


def _refuse_more_than_greedy(params: SamplingParams) -> None:
    asks = {
        "a temperature": not params.greedy,
        "several outputs": params.n > 1,
        "log-probabilities": params.logprobs is not None or params.prompt_logprobs is not None,
        "changed logits": params.adjusts_logits,
    }
    if found := [name for name, asked in asks.items() if asked]:
        raise UsageError(
            f"a static cache is for greedy tokens alone, and {found[0]} was asked for",
            hint="Use --cache paged",
        )
