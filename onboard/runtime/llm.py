"""`LLM`: an onboarded model as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import numpy as np
import torch

from onboard.config import DType, Mode, RuntimeConfig, with_settings
from onboard.content import content_path
from onboard.errors import OnboardError, UsageError
from onboard.hub import read_config
from onboard.registry import find_entry
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine
from onboard.runtime.resolve import ConfigLike, find_checkpoint, resolve_config
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import FinishReason, Request, Step
from onboard.runtime.tested_file import why_not_run

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids (a sequence, tensor or array), or vLLM's `{"prompt": ...}` or
`{"prompt_token_ids": ...}`.

For a model with several codebooks, `LLM.pack` makes token ids of the codes. A mapping may also have
`"processed"`: the output of transformers' processor for the prompt's images (`pixel_values` and the
like); its `input_ids` and `attention_mask` are ignored.
"""


@dataclass(frozen=True)
class Completion:
    """One output of a prompt."""

    text: str
    """The generated text, without special tokens and stop text; empty if the checkpoint has no
    tokenizer.
    """
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    """For each generated token a mapping from token ids to log-probabilities; None unless
    `SamplingParams.logprobs` is set.

    With several codebooks the keys are columns of `LLM.logits`, and each codebook has its own
    distribution.
    """
    num_preemptions: int = 0
    """How often the request was preempted: it lost its pages and was computed again."""


@dataclass(frozen=True)
class RequestOutput:
    """The result for one prompt: `n` outputs. The properties are those of the first output."""

    prompt: str | None
    """The prompt's text; None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    """Leading tokens of the prompt that were reused from the prefix cache."""

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first output's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output finished."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """The first output's log-probabilities."""
        return self.outputs[0].logprobs


class LLM:
    """A model that was onboarded under `root`, ready to generate.

    Args:
        model: a local folder, a Hugging Face id or a name in the root's registry.
        root: the folder that the model was onboarded under; None: the current folder.
        device: "cpu", "cuda", or "auto": the GPU if there is one.
        dtype: "auto" is the checkpoint's dtype on a GPU and float32 on the CPU.
        world_size: the number of devices; only 1 is supported.
        config: replaces the registered configuration: a path, a mapping or a `RuntimeConfig`.
        mode: "graph" runs the generated model file; "hf" and "transformers" run transformers' own
            model, which need not be onboarded, and `engine.facts` lists what that loses.
        batch_invariant: make each sequence's logits independent of the rest of the batch, bit for
            bit; an error says why a model cannot.
        strict: raise an error where there would be a fact otherwise: a fallback, a model file other
            than the one whose tests passed under `root`, a registered model whose run has not
            passed.
        settings: replace single fields of the configuration, for example
            `{"max_seq_len": 4096, "kv_cache_config": {"dtype": "float8_e4m3fn"}}`.

    Raises:
        UsageError: a setting that the model or this machine does not allow.
        OnboardError: the model was not onboarded, or its files are damaged.
    """

    def __init__(
        self,
        model: str | Path,
        root: str | Path | None = None,
        device: str = "auto",
        dtype: DType = "auto",
        world_size: int = 1,
        config: ConfigLike = None,
        mode: Mode = "graph",
        batch_invariant: bool = False,
        strict: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if world_size > 1:
            raise UsageError(
                f"world_size is {world_size} and models run on one device", hint="Set it to 1"
            )
        folder = Path.cwd() if root is None else Path(root).expanduser()
        overrides = {"device": device, "dtype": dtype, "world_size": world_size, "mode": mode}
        overrides["batch_invariant"] = batch_invariant
        resolved = resolve_config(str(model), folder, config, overrides)
        self.runtime: RuntimeConfig = with_settings(resolved, settings)
        checkpoint = find_checkpoint(self.runtime)
        doubted = self._doubt(str(model), folder, checkpoint) if config is None else None
        if doubted and strict:
            raise OnboardError(doubted, hint=f"Run: onboard {model}")
        self.engine: Engine = build_engine(
            checkpoint, self.runtime, root=folder, model=str(model), strict=strict
        )
        self.engine.facts.extend([doubted] if doubted else [])
        self._lock = Lock()
        self._holder: int | None = None

    def _doubt(self, model: str, root: Path, checkpoint: Path) -> str | None:
        """Return why the registry does not vouch for the model, None if it does; transformers' own
        model needs no registration.
        """
        entry = find_entry(model, root) if self.runtime.mode == "graph" else None
        if entry is None:
            return None
        name = f"modeling_{read_config(checkpoint)['model_type']}.py"
        return why_not_run(entry, content_path("models", name, root=root))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[Step], None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; return one `RequestOutput` for each, in order.

        `sampling_params` and `priority` are one value for all prompts or a list with one for each;
        smaller priorities go first. `on_step` is called after each forward pass and may cancel
        outputs (`engine.cancel`). `engine.stats` counts steps, preemptions and reused tokens.

        Threads may share an `LLM`: one call runs at a time and the others wait, in no particular
        order. Prompts that are to run in one batch belong in one call.

        Raises `UsageError` for a prompt that is empty, too long or has unknown tokens.
        """
        batch = [_unwrapped(prompt) for prompt in _as_batch(prompts)]
        params = _as_params(sampling_params, len(batch))
        inputs = [_inputs(prompt) for prompt in _as_batch(prompts)]
        priorities = _as_priorities(priority, len(batch))
        with self._alone():
            encoded = [self._encode(prompt) for prompt in batch]
            try:
                pending = [
                    self.engine.submit(*each)
                    for each in zip(encoded, params, inputs, priorities, strict=True)
                ]
            except BaseException:
                self.engine.scheduler.abort()
                raise
            self.engine.run(on_step)
        return [
            _result(prompt if isinstance(prompt, str) else None, ids, outputs)
            for prompt, ids, outputs in zip(batch, encoded, pending, strict=True)
        ]

    def logits(self, input_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return the logits of every token of one prompt, [tokens, vocabulary] float32 on the CPU.

        With several codebooks the columns are [codebooks * codes], one codebook after the other.
        """
        tokens = _tokens(_flat(input_ids))
        with self._alone():
            return self.engine.logits(tokens)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock: engine, caches and tokenizer serve one call at a time."""
        if self._holder == get_ident():
            raise UsageError(
                "the LLM is called from its own on_step", hint="Call it after generate has ended"
            )
        with self._lock:
            self._holder = get_ident()
            try:
                yield
            finally:
                self._holder = None

    def pack(self, codes: Sequence[Sequence[int]]) -> list[int]:
        """Return one token id for the codes of each position, one code a codebook; `unpack` is the
        inverse.

        Raises `UsageError` for a wrong number of codes, or a code outside its codebook.
        """
        books = self.engine.codebooks
        for each in codes:
            if len(each) != books.count or not all(0 <= code < books.size for code in each):
                raise UsageError(
                    f"a position has codes {tuple(each)}",
                    hint=f"Give {books.count} codes, each 0 to {books.size - 1}",
                )
        return books.pack(torch.tensor(codes, dtype=torch.long).view(-1, books.count)).tolist()

    def unpack(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the codes of each token id, one a codebook; with a single codebook the token id
        itself.
        """
        return [
            tuple(codes)
            for codes in self.engine.codebooks.unpack(
                torch.tensor(token_ids, dtype=torch.long)
            ).tolist()
        ]

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.engine.codebooks.count > 1:
            raise UsageError(
                "the model's tokens are codes, no text", hint="Give what LLM.pack makes of codes"
            )
        if self.engine.tokenizer is None:
            raise UsageError(
                "the checkpoint has no tokenizer", hint="Give prompts as lists of token ids"
            )
        return self.engine.tokenizer.encode(prompt)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _as_list(prompts)
    return [items] if items and all(map(_is_whole, items)) else items


def _unwrapped(prompt: Any) -> str | list[int]:
    """Return a prompt's text or token ids; raise `UsageError` for anything else."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return _text(prompt)
    return _tokens(prompt)


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(f"a prompt is {prompt!r:.80}, which is no Unicode text") from None
    return prompt


def _flat(tokens: Any) -> Any:
    """Return a prompt's token ids, nested or not, as a flat tensor; anything else unchanged."""
    try:
        return torch.as_tensor(tokens).flatten()
    except (TypeError, ValueError, RuntimeError):
        return tokens


def _tokens(prompt: Any) -> list[int]:
    """Return a prompt's token ids; raise `UsageError` for anything else."""
    tokens = _as_list(prompt)
    if bad := [token for token in tokens if not _is_whole(token)]:
        raise UsageError(
            f"a prompt has {bad[0]!r:.80} for a token",
            hint="Tokens are whole numbers; LLM.pack makes them of codes",
        )
    return [int(token) for token in tokens]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _inputs(prompt: Any) -> dict[str, Any] | None:
    """Return the processor's outputs for a prompt's images, None if it has none."""
    processed = prompt.get("processed") if isinstance(prompt, Mapping) else None
    if not processed:
        return None
    return {
        key: value for key, value in processed.items() if key not in ("input_ids", "attention_mask")
    }


def _as_list(values: Any) -> list[Any]:
    """Return a sequence, a tensor or an array as a list; raise `UsageError` for anything else."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise UsageError(f"a prompt is {values!r:.80}", hint="Give a text, or a list of token ids")
    return list(values)


def _as_params(
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


def _as_priorities(priority: int | Sequence[int], count: int) -> list[int]:
    priorities = [priority] * count if isinstance(priority, int) else priority
    if not isinstance(priorities, Sequence) or not all(map(_is_whole, priorities)):
        raise UsageError(f"priority is {priority!r:.80}", hint="Priorities are whole numbers")
    if len(priorities) != count:
        raise UsageError(
            f"there are {count} prompts and {len(priorities)} priorities", hint="Give one for each"
        )
    return list(priorities)


def _result(prompt: str | None, token_ids: list[int], outputs: Sequence[Request]) -> RequestOutput:
    cached = outputs[0].num_reused or 0
    return RequestOutput(
        prompt, token_ids, [_completion(each) for each in outputs], min(cached, len(token_ids))
    )


def _completion(output: Request) -> Completion:
    assert output.finish_reason is not None
    logprobs = output.logprobs if output.params.logprobs is not None else None
    return Completion(
        output.text, output.generated, output.finish_reason, logprobs, output.num_preemptions
    )
