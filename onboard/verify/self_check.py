"""Is a cached model still transformers' own one? For models that no generated test has proven.

What a model carries from token to token other than by attention (a convolution, a recurrence), and
positions that it counts in its own way, would go wrong in a flat row of several sequences. So a few
short prompts are computed twice: each by itself by transformers, as soon as the weights are read,
and all together as the engine computes them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.graph.cache_init.position_probe import counts_positions
from onboard.graph.context import TransformContext
from onboard.graph.pipeline import Observer
from onboard.hf.text_tokens import text_tokens
from onboard.runtime.length_dependent_rope import length_dependent_rope
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SELF_CHECK
from onboard.verify.ways import interface_for, plans, run_plain, run_plan

_LENGTHS = (9, 14, 5)


class SelfCheck:
    """An observer of the pipeline that keeps the logits of transformers' model, to compare the
    cached one's.
    """

    def __init__(self, context: TransformContext, observer: Observer | None = None) -> None:
        self.context = context
        self.observer = observer
        self.prompts = _prompts(context)
        self.expected: list[torch.Tensor] = []
        context.on_transformers_model = self.keep

    @torch.inference_mode()
    def keep(self, model: nn.Module) -> None:
        """Keep the logits of transformers' model, given nothing but the tokens of one prompt at a
        time.
        """
        with self._reported("transformers' model does not run"):
            if counts_positions(model, self.context.factory.config.get_text_config().vocab_size):
                raise OnboardError(
                    f"mode {self.context.factory.mode}: the model counts positions itself in some of its code",
                    hint="Onboard it: a model file takes the positions that it is given",
                )
            outputs = (
                model(input_ids=torch.tensor([prompt]), use_cache=False) for prompt in self.prompts
            )
            self.expected = [output.logits[0].float() for output in outputs]

    def observe(self, key: str, module: nn.Module, context: TransformContext) -> None:
        """Without a checkpoint, keep the logits of the model before it has caches."""
        if key == "load_weights" and not self.expected:
            with self._reported("transformers' model does not run"):
                self.expected = run_plain(module, self.prompts, context)
        if self.observer is not None:
            self.observer(key, module, context)

    def run(self, gm: nn.Module) -> float:
        """Return the error of the cached model; raise `OnboardError` when it is another model."""
        rope = length_dependent_rope(self.context.factory.config.to_dict())
        cache = interface_for(self.context.cache, self.prompts)
        with self._reported("the model does not run with caches"):
            steps = plans(self.prompts, rope, cache.info.max_num_tokens)["batched decode"]
            found = run_plan(gm, cache, self.prompts, steps, rope)
        error = worst(
            rmse_ratio(ours, theirs) for ours, theirs in zip(found, self.expected, strict=True)
        )
        if not error <= SELF_CHECK[self.context.dtype]:
            raise OnboardError(
                f"mode {self.context.factory.mode}: with caches the logits are others (error {error:.1e})",
                hint="The model carries more than keys and values from token to token, or counts positions itself",
            )
        return error

    @contextmanager
    def _reported(self, problem: str) -> Iterator[None]:
        try:
            yield
        except OnboardError:
            raise
        except Exception as error:  # a model's own code may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise OnboardError(f"mode {self.context.factory.mode}: {problem} ({reason})") from error


def _prompts(context: TransformContext) -> list[list[int]]:
    """Return prompts of different lengths, as many as a step may hold."""
    runtime, draw = context.runtime, random.Random(0)
    lengths = [min(length, runtime.max_seq_len) for length in _LENGTHS[: runtime.max_batch_size]]
    words = text_tokens(context.factory.config)
    return [draw.choices(words, k=length) for length in lengths]
