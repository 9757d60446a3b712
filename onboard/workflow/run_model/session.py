"""A run's own side: the model as users build it, what it generates, and the logits that are
compared later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.config import RuntimeConfig, SettledConfig
from onboard.errors import OnboardError, TooLongError, UsageError
from onboard.graph.context import TransformContext
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.hf.text_tokens import special_tokens, text_tokens, up_to_special
from onboard.hub import open_source
from onboard.runtime.build import make_context
from onboard.runtime.calls.outputs import RequestOutput
from onboard.runtime.limits import LIMITS, PROOF, max_positions
from onboard.runtime.llm import LLM
from onboard.runtime.multimodal.own_towers import OwnTowers
from onboard.runtime.multimodal.towers import Towers
from onboard.runtime.sampling_params import SamplingParams
from onboard.verify.comparison import Kind, Observed, Passage, passages
from onboard.verify.held_out import stories
from onboard.verify.ways import interface_for, plans, run_plan
from onboard.workflow.run_model.media import MediaPrompt, media_prompts
from onboard.workflow.run_model.run_prompts import (
    LONG_TOKENS,
    Prompt,
    build_prompts,
    long_length,
    long_prompt,
    up_to_repeat,
)

MAX_NEW_TOKENS = 64
STORY_TOKENS = 500
"""Most tokens of a held-out story."""
TEXT_TOKENS = 800
"""Of all stories together: as many as come to it."""
_WHOLE_VOCABULARY = 2**31


@dataclass
class Session:
    """A built model, the context that it was built in, and what it has generated."""

    llm: LLM
    context: TransformContext
    build_seconds: float
    long_ids: list[int]
    notes: list[str]
    """What the long prompt does not reach."""
    passages: list[Passage] = field(default_factory=list)
    again: tuple[torch.Tensor, torch.Tensor] | None = None
    """See `Observed.again`."""
    distinct: bool = False
    """Texts are compared up to their first repeated token."""

    @classmethod
    def start(
        cls,
        config: RuntimeConfig,
        root: Path,
        distinct: bool = False,
        world_size: int | None = None,
    ) -> Session:
        """Build the model as users do, through `LLM`, with room for a prompt that passes the
        model's thresholds; on as many ranks as are asked for, None: as configured.
        """
        files = open_source(config.model, revision=config.revision).files()
        context = make_context(files, config, root=root, model=config.model, defaults=PROOF)
        asked, config = config, _with_limits(config, context.runtime)
        text = context.factory.text_config
        positions = max_positions(text)
        positions = None if positions is None else positions - context.first_position
        parameters, device, served = (
            _parameters(context),
            context.device.type,
            context.runtime.max_seq_len,
        )
        length, notes = long_length(text, positions, parameters, device)
        start = time.perf_counter()
        try:
            room = _with_room(config, context, length + LONG_TOKENS)
            llm = LLM(config.model, root=root, config=room, world_size=world_size)
        except OnboardError as error:
            served = _served_instead(error, asked, served, length + LONG_TOKENS)
            wanted = length
            length, _ = long_length(text, min(served, positions or served), parameters, device)
            if length < wanted:
                notes.append(f"the long prompt has no {wanted:,} tokens: {error.message}")
            shorter = {"max_seq_len": served}
            context.runtime = context.runtime.model_copy(update=shorter)
            room = config.model_copy(update=shorter)
            llm = LLM(config.model, root=root, config=room, world_size=world_size)
        seconds = time.perf_counter() - start
        if length > (most := llm.engine.capacity - LONG_TOKENS):
            notes.append(
                f"the long prompt has {most:,} tokens, not {length:,}: the cache has no room for more"
            )
            length = max(1, most)
        words = text_tokens(context.factory.config, context.codebooks)
        ids = long_prompt(llm.engine.tokenizer, files, words, length, distinct)
        if len(ids) < length:
            notes.append(
                f"the long prompt has {len(ids):,} tokens, not {length:,}: there are no more different ones"
            )
        return cls(llm, context, seconds, ids, notes, distinct=distinct)

    @property
    def world_size(self) -> int:
        """How many ranks run it."""
        return self.llm.engine.cache.ranks.world_size

    def settings(self) -> dict[str, Any]:
        """Return what the run's "auto" settings came to."""
        device, runtime = self.context.device, self.context.runtime
        return {
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "dtype": str(self.context.dtype).removeprefix("torch."),
            "mode": runtime.mode,
            "attn_backend": self.context.attn_backend,
            "compile_backend": _compile_backend(self.context),
            "world_size": self.world_size,
            "max_seq_len": runtime.max_seq_len,
            "max_num_tokens": runtime.max_num_tokens,
            "num_hidden_layers": getattr(
                self.context.factory.text_config, "num_hidden_layers", None
            ),
        }

    def generate(self, facts: list[str]) -> dict[str, Any]:
        """Generate greedily for all prompts in one batch; return prompts and outputs verbatim, and
        the figures.
        """
        engine = self.llm.engine
        room = min(self.context.runtime.max_seq_len, engine.capacity)
        files, words = (
            self.context.factory.checkpoint,
            text_tokens(self.context.factory.config, engine.codebooks),
        )
        prompts = build_prompts(
            engine.tokenizer, files, words, max(1, room // 2), facts, self.distinct
        )
        longest = max(len(prompt.token_ids) for prompt in prompts)
        before, start = engine.stats.graph_replays, time.perf_counter()
        records = self._generate(prompts, max(1, min(MAX_NEW_TOKENS, room - longest)))
        seconds = time.perf_counter() - start
        replays = engine.stats.graph_replays - before
        return {
            "prompts": records,
            "seconds": {"build": self.build_seconds, "generate": seconds},
            "tokens_per_second": sum(len(record["output_ids"]) for record in records) / seconds,
            "cache": engine.stats.cache(),
            "cuda_graphs": {
                "used": replays > 0,
                "replays": replays,
                "batch_sizes": engine.cache.info.decode_sizes,
            },
        }

    def _generate(self, prompts: list[Prompt], max_tokens: int) -> list[dict[str, Any]]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        outputs = self.llm.generate([prompt.token_ids for prompt in prompts], params)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.passages += self._read("prompt", prompt.token_ids, output.token_ids)
        return [
            {
                "prompt": prompt.text,
                "chat": prompt.chat,
                "token_ids": prompt.token_ids,
                "output": output.text if prompt.text is not None else None,
                "output_ids": output.token_ids,
                "finish_reason": output.finish_reason,
            }
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def observe(self) -> Observed:
        """Return the logits that are compared with transformers'; nothing can be generated
        after.
        """
        self._read_long_prompt()
        media = self._read_media()
        self.passages += [Passage("text", ids) for ids in self._held_out() if len(ids) > 1]
        prefill = [self.llm.logits(passage.ids)[passage.asked.rows] for passage in self.passages]
        self.passages += [passage for passage, _ in media]
        rows = [*prefill, *(rows for _, rows in media)]
        return Observed(self.passages, rows, self._decoded(), self.context.codebooks, self.again)

    def _read_long_prompt(self) -> None:
        """Ask twice: the second time the prompt's pages are known, where prefixes are reused."""
        options: dict[str, Any] = {} if self.distinct else {"logprobs": _WHOLE_VOCABULARY}
        params = SamplingParams(max_tokens=LONG_TOKENS, temperature=0.0, ignore_eos=True, **options)
        [first] = self.llm.generate([self.long_ids], params)
        self.passages += self._read("long prompt", self.long_ids, first.token_ids)
        if not self.distinct:  # there a token's equals are chosen by how many are read at a time
            [second] = self.llm.generate([self.long_ids], params)
            self.again = _same_text(first, second) if second.num_cached_tokens else None

    def _read(self, kind: Kind, prompt: list[int], output: list[int]) -> list[Passage]:
        return passages(kind, prompt, self._text_of(kind, prompt, output), self.llm.engine.rope)

    def _text_of(self, kind: Kind, prompt: list[int], output: list[int]) -> list[int]:
        """Return the tokens that transformers reads as text, and the first that it does not, if
        there is one.
        """
        text = up_to_special(
            output, special_tokens(self.context.factory.config, self.context.codebooks)
        )
        if left := len(output) - len(text):
            self.notes.append(
                f"{left} of {len(output)} tokens after a {kind} come behind one that is no text"
            )
        return self._without_repeats(kind, text, prompt)

    def _without_repeats(
        self, kind: Kind, tokens: list[int], prompt: Sequence[int] = ()
    ) -> list[int]:
        """Return the tokens, where repeated ones cannot be compared up to the first that comes
        twice.
        """
        text = up_to_repeat(prompt, tokens) if self.distinct else tokens
        if left := len(tokens) - len(text):
            self.notes.append(
                f"{left} of {len(tokens)} tokens of a {kind} come behind a repeated one"
            )
        return text

    def _read_media(self) -> list[tuple[Passage, torch.Tensor]]:
        """Return the log-probabilities of what follows prompts with an image or a sound, [tokens,
        vocabulary].
        """
        towers, vocabulary = (
            self.llm.engine.towers,
            self.context.factory.text_config.vocab_size,
        )
        if isinstance(towers, OwnTowers):
            self.notes.append("no prompt with an image was read: towers are the repository's code")
        if not isinstance(towers, Towers):
            return []
        try:
            prompts = media_prompts(towers.model, self.context.dtype)
            return [self._read_media_prompt(prompt, vocabulary) for prompt in prompts]
        except (OnboardError, UsageError) as error:
            self.notes.append(f"no prompt with an image or a sound was read: {error}")
            return []

    def _read_media_prompt(
        self, prompt: MediaPrompt, vocabulary: int
    ) -> tuple[Passage, torch.Tensor]:
        params = SamplingParams(
            max_tokens=LONG_TOKENS, temperature=0.0, ignore_eos=True, logprobs=vocabulary
        )
        [output] = self.llm.generate(
            {"prompt_token_ids": prompt.ids, "processed": prompt.inputs}, params
        )
        tokens = self._text_of("media", prompt.ids, output.token_ids)
        ids, inputs = [*prompt.ids, *tokens[:-1]], prompt.followed_by(len(tokens) - 1)
        return Passage("media", ids, tuple(tokens), inputs), _rows(output, len(tokens))

    def _held_out(self) -> list[list[int]]:
        """Return the tokens of held-out stories."""
        tokenizer = self.llm.engine.tokenizer
        found: list[list[int]] = []
        for story in stories(self.context.factory.checkpoint) if tokenizer is not None else ():
            assert tokenizer is not None
            if sum(map(len, found)) < TEXT_TOKENS:
                found.append(tokenizer.encode(story)[: min(STORY_TOKENS, self.llm.engine.capacity)])
        texts = [self._without_repeats("text", ids) for ids in found if len(ids) > 1]
        return [ids[:-1] if self.distinct and ids[-1] in ids[:-1] else ids for ids in texts]

    def _decoded(self) -> list[torch.Tensor]:
        """Return the logits of the prompts with their outputs, the last tokens decoded in a batch
        that they join.
        """
        chosen = [passage for passage in self.passages if passage.kind == "prompt"]
        ids = [passage.ids for passage in chosen]
        cache = interface_for(self.llm.engine.cache, ids)
        if cache is not self.llm.engine.cache and self.world_size > 1:
            # Other ranks have no temporary caches
            logits = [rows for each in ids for rows in self._decode([each], self.llm.engine.cache)]
        else:
            logits = self._decode(ids, cache)
        return [rows[passage.asked.rows] for passage, rows in zip(chosen, logits, strict=True)]

    def _decode(self, ids: list[list[int]], cache: CachedSequenceInterface) -> list[torch.Tensor]:
        engine, most = self.llm.engine, cache.info.max_num_tokens
        plan = plans(ids, engine.rope, most)["batched decode"]
        with engine.together():
            return run_plan(engine.gm, cache, ids, plan, engine.rope)


def _rows(output: RequestOutput, count: int) -> torch.Tensor:
    """Return the log-probabilities of an output's first `count` tokens, [count, vocabulary], of
    which it has all.
    """
    assert output.logprobs is not None
    return torch.tensor(
        [[step[token] for token in range(len(step))] for step in output.logprobs[:count]]
    )


def _same_text(first: RequestOutput, second: RequestOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of both up to where they chose another token, and the texts
    part.
    """
    pairs = zip(first.token_ids, second.token_ids, strict=True)
    count = next(
        (place + 1 for place, (one, other) in enumerate(pairs) if one != other),
        len(first.token_ids),
    )
    return _rows(first, count), _rows(second, count)


def _with_limits(config: RuntimeConfig, settled: SettledConfig) -> RuntimeConfig:
    """Return the config with limits that are numbers: a run is not the slower for what a user is
    served.
    """
    numbers = {name: getattr(settled, name) for name in LIMITS}
    return RuntimeConfig.model_validate(config.model_dump(exclude_unset=True) | numbers)


def _with_room(config: RuntimeConfig, context: TransformContext, length: int) -> RuntimeConfig:
    """Return the config with sequences of `length` tokens allowed; a cache in the host's memory
    keeps its size.
    """
    served = context.runtime.max_seq_len
    if length <= served:
        return config
    values = config.model_dump(exclude_unset=True) | {"max_seq_len": length}
    cache = config.kv_cache_config
    if context.device.type == "cpu" and cache.max_tokens is None:
        tokens = max(context.runtime.max_batch_size * served, length + cache.tokens_per_block)
        values["kv_cache_config"] = cache.model_dump(exclude_unset=True) | {"max_tokens": tokens}
    return RuntimeConfig.model_validate(values)


def _served_instead(error: OnboardError, asked: RuntimeConfig, served: int, wanted: int) -> int:
    """Return how many tokens a sequence may have where a model with room for the `wanted` ones of
    the long prompt cannot be built: those that its graph is right for, or the `served` ones; raise
    the error where these are no fewer.
    """
    if isinstance(error, TooLongError) and asked.max_seq_len is None and error.longest < served:
        return error.longest
    if wanted <= served:
        raise error
    return served


def _parameters(context: TransformContext) -> int:
    """Return the number of the checkpoint's parameters; 0 when it is not read."""
    if context.runtime.skip_loading_weights:
        return 0
    return sum(
        math.prod(meta.shape)
        for meta in open_checkpoint(context.factory.checkpoint).names().values()
    )


def _compile_backend(context: TransformContext) -> str:
    if context.runtime.compile_backend != "auto":
        return context.runtime.compile_backend
    return "torch-cudagraph" if context.device.type == "cuda" else "torch-simple"
