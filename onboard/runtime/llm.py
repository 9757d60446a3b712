"""`LLM`: an onboarded model as a Python object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Self

import torch

from onboard.config import DType, Mode, RuntimeConfig, with_settings
from onboard.content import content_path
from onboard.errors import OnboardError, UsageError
from onboard.hub import read_config
from onboard.media.media_limits import MediaLimits
from onboard.registry import find_entry
from onboard.runtime.build import build_engine
from onboard.runtime.calls.follower import Follower
from onboard.runtime.calls.outputs import Delta, RequestOutput, request_output
from onboard.runtime.calls.pooling import Pooling, pooled
from onboard.runtime.calls.prompt_forms import (
    Prompt,
    as_batch,
    as_params,
    as_priorities,
    as_tokens,
    flattened,
    text_or_tokens,
)
from onboard.runtime.calls.prompt_reader import PromptReader
from onboard.runtime.engine import Engine
from onboard.runtime.multimodal.own_towers import OwnTowers
from onboard.runtime.ranks.leading import LedRanks, led_ranks
from onboard.runtime.resolve import ConfigLike, find_checkpoint, resolve_config
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.engine_stats import EngineStats
from onboard.runtime.scheduling.request import Step
from onboard.runtime.tested_file import why_not_run
from onboard.untrusted.consent import Consent

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages with `role` and `content`, and what else the chat template reads."""


class LLM:
    """A model that was onboarded under `root`, ready to generate.

    Args:
        model: a local folder, a Hugging Face id or a name in the root's registry.
        root: the folder that the model was onboarded under; None: the current folder.
        device: "cpu", "cuda", or "auto": the GPU if there is one.
        dtype: "auto" is the checkpoint's dtype on a GPU and float32 on the CPU.
        world_size: the number of ranks, each with a device and its share of the weights; None: as
            configured if there are as many GPUs, else one. This process has the first, and starts
            the others, which end with `close`, or with this process.
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
        lora: low-rank adapters in PEFT's format that prompts may ask for: a name and a folder each.
        media: how much images and sounds may be, and which hosts they are fetched from.
        trust_remote_code: towers and processor that are code of the model's repository may run, in
            a sandbox, where a prompt has images.
        unsandboxed: they may run where the system has no sandbox.
        draft: who proposes tokens that a step checks together, as `speculative.draft`: "ngram",
            "mtp" (the checkpoint's own heads) or a small model.

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
        world_size: int | None = None,
        config: ConfigLike = None,
        mode: Mode = "graph",
        batch_invariant: bool = False,
        strict: bool = False,
        settings: Mapping[str, Any] | None = None,
        media: MediaLimits | None = None,
        lora: Mapping[str, str | Path] | None = None,
        trust_remote_code: bool = False,
        unsandboxed: bool = False,
        draft: str | None = None,
    ) -> None:
        folder = Path.cwd() if root is None else Path(root).expanduser()
        overrides: dict[str, Any] = {"device": device, "dtype": dtype, "world_size": world_size}
        overrides |= {"mode": mode, "batch_invariant": batch_invariant}
        resolved = resolve_config(str(model), folder, config, overrides)
        adapters = {"lora": {name: str(path) for name, path in (lora or {}).items()}}
        more: dict[str, Any] = adapters if lora else {}
        more |= {} if draft is None else {"speculative": {"draft": draft}}
        self.runtime: RuntimeConfig = with_settings(with_settings(resolved, settings), more)
        checkpoint = find_checkpoint(self.runtime)
        doubted = self._doubt(str(model), folder, checkpoint) if config is None else None
        if doubted and strict:
            raise OnboardError(doubted, hint=f"Run: onboard {model}")
        named: dict[str, Any] = {"root": folder, "model": str(model), "strict": strict}
        asked = world_size is not None or "world_size" in (settings or {})
        self.ranks: LedRanks | None = led_ranks(
            checkpoint, self.runtime, root=folder, model=str(model), must=asked
        )
        """The other ranks; None where there are none."""
        consent = Consent(trust_remote_code, unsandboxed)
        self.engine: Engine = (
            self.ranks.build(checkpoint, self.runtime, **named)
            if self.ranks
            else build_engine(checkpoint, self.runtime, **named, consent=consent)
        )
        if self.ranks is not None:
            weakref.finalize(self, self.ranks.close)
        self.engine.facts.extend([doubted] if doubted else [])
        self.prompts = PromptReader(self.engine, media)
        self._lock = Lock()
        self._holder: int | None = None

    def close(self) -> None:
        """End the processes of other ranks, and the one in which code of a repository reads images."""
        if self.ranks is not None:
            self.ranks.close()
        if isinstance(self.engine.towers, OwnTowers):
            self.engine.towers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _doubt(self, model: str, root: Path, checkpoint: Path) -> str | None:
        """Return why the registry does not vouch for the model, None if it does; transformers' own
        model needs no registration.
        """
        entry = find_entry(model, root) if self.runtime.mode == "graph" else None
        if entry is None:
            return None
        name = f"modeling_{read_config(checkpoint)['model_type']}.py"
        return why_not_run(entry, content_path("models", name, root=root))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.engine.cache.info.device

    @property
    def facts(self) -> list[str]:
        """Fallbacks, skipped matches, lowered limits."""
        return self.engine.facts

    @property
    def limits(self) -> dict[str, int]:
        """The limits that it serves, by their names in the configuration."""
        return self.engine.limits

    @property
    def stats(self) -> EngineStats:
        """What its steps were and took, so far."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[Step], None] | None = None,
        priority: int | Sequence[int] = 0,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; return one `RequestOutput` for each, in order.

        `sampling_params`, `priority` and `lora`, the name of an adapter, are one value for all
        prompts or a list with one for each; smaller priorities go first. `on_step` is called after each
        forward pass and may cancel outputs (`engine.cancel`). `engine.stats` counts steps,
        preemptions and reused tokens.

        Threads may share an `LLM`: one call runs at a time and the others wait, in no particular
        order. Prompts that are to run in one batch belong in one call.

        Raises `UsageError` for a prompt that is empty, too long or has unknown tokens.
        """
        batch = as_batch(prompts)
        params = as_params(sampling_params, len(batch), lora)
        priorities = as_priorities(priority, len(batch))
        media = [self.prompts.media(prompt) for prompt in batch]
        with self._alone():
            read = [self.prompts.read(*each) for each in zip(batch, media, strict=True)]
            try:
                pending = [
                    self.engine.submit(each.tokens, param, each.inputs, first)
                    for each, param, first in zip(read, params, priorities, strict=True)
                ]
            except BaseException:
                self.engine.abort()
                raise
            self.engine.run(on_step)
        return [
            request_output(each.text, each.tokens, outputs)
            for each, outputs in zip(read, pending, strict=True)
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written as the checkpoint's chat template says.

        Contents are texts, or lists of parts: OpenAI's `text`, `image_url` and `input_audio`, and
        transformers' `{"type": "image", "image": ...}`. `tools` (JSON schemas of functions) and
        `chat_template_kwargs` are for the template. Raises `UsageError` without a template,
        `OnboardError` if it fails.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [self.chat_prompt(each, tools, chat_template_kwargs) for each in conversations]
        return self.generate(prompts, sampling_params, lora=lora)

    def chat_prompt(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return a conversation up to the beginning of the answer: its token ids, or its text with
        its images and sounds.
        """
        return self.prompts.conversation(messages, tools, chat_template_kwargs)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> Generator[Delta, None, None]:
        """Generate for one prompt; yield each output's new text and tokens after every step.

        Who leaves the loop early cancels the rest. The `LLM` serves nobody else meanwhile:
        `AsyncLLM` serves many.
        """
        media, params = self.prompts.media(prompt), as_params(sampling_params, 1, lora)[0]
        with self._alone():
            try:
                read = self.prompts.read(prompt, media)
                outputs = self.engine.submit(read.tokens, params, read.inputs, priority)
                follower = Follower(outputs, self.engine.texts)
                while not follower.finished:
                    self.engine.step()
                    yield from follower.deltas()
            finally:
                self.engine.abort()

    def logits(
        self, input_ids: Sequence[int] | torch.Tensor, lora: str | None = None
    ) -> torch.Tensor:
        """Return the logits of every token of one prompt, [tokens, vocabulary] float32 on the CPU,
        computed with an adapter if `lora` names one.

        With several codebooks the columns are [codebooks * codes], one codebook after the other.
        """
        tokens = as_tokens(flattened(input_ids))
        with self._alone():
            return self.engine.logits(tokens, lora)

    def last_logits(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the logits of the last `counts[i]` tokens of each prompt (token ids), [count,
        vocabulary] float32 on the CPU; prompts that fit into a step together run in one.

        Raises `UsageError` for a prompt that is too long, or has fewer tokens than are asked for.
        """
        for prompt, count in zip(prompts, counts, strict=True):
            if not 0 < count <= len(prompt):
                raise UsageError(f"a prompt of {len(prompt)} tokens has no last {count}")
        with self._alone():
            return self.engine.last_logits(prompts, counts)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "last",
        normalize: bool = True,
        lora: str | None = None,
    ) -> torch.Tensor:
        """Return a vector of each prompt's last hidden states, [prompts, hidden] float32 on the CPU.

        These are what the language-model head reads. `normalize` makes vectors of length one.
        Raises `UsageError` for a prompt that is empty, too long or has unknown tokens, and for a
        model whose graph does not show the states.
        """
        batch = [text_or_tokens(prompt) for prompt in as_batch(prompts)]
        with self._alone():
            states = (self.engine.hidden_states(self.encode(prompt), lora) for prompt in batch)
            return torch.stack([pooled(each, pooling, normalize=normalize) for each in states])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock: engine, caches and tokenizer serve one call at a time."""
        if self._holder == get_ident():
            raise UsageError(
                "the LLM is called while it generates, by the same thread",
                hint="Call it after generate or stream has ended",
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

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt's text; ids stay as they are."""
        return self.prompts.encode(prompt)
