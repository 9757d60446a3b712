"""A way of running a model: as onboard serves it, or as transformers runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onboard.config import RuntimeConfig, with_settings
from onboard.errors import OnboardError
from onboard.graph.context import TransformContext
from onboard.runtime.build import make_context
from onboard.runtime.llm import LLM
from onboard.runtime.resolve import find_checkpoint, resolve_config
from onboard.verify.hf_logits import Asked, load_model, model_logits

Logits = Callable[[Sequence[int]], torch.Tensor]
"""From token ids to their logits, [tokens, vocabulary] float32 on the CPU."""


@dataclass(frozen=True)
class Side:
    """A model, who runs it, and with which settings."""

    name: str
    """As messages call it."""
    model: str
    root: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_transformers: bool = False

    @cached_property
    def runtime(self) -> RuntimeConfig:
        """The configuration that it runs with."""
        mode = {"mode": "transformers"} if self.by_transformers else {}
        return with_settings(resolve_config(self.model, self.root, None, mode), self.settings)

    @cached_property
    def context(self) -> TransformContext:
        """Device, dtype, limits and config; weights are fetched and not read.

        Raises `OnboardError` where onboard is to run what it has not onboarded.
        """
        checkpoint = find_checkpoint(self.runtime)
        return make_context(checkpoint, self.runtime, root=self.root, model=self.model)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that logits are of."""
        return int(self.context.factory.text_config.vocab_size)

    @contextmanager
    def opened(self, facts: list[str]) -> Iterator[Logits]:
        """Load the model and yield what computes its logits; whoever keeps that keeps the model in
        memory. `facts` get what is to be known of the run.
        """
        try:
            if self.by_transformers:
                yield self._theirs()
            else:
                llm = LLM(self.model, self.root, settings=self.settings)
                facts.extend(llm.engine.facts)
                yield llm.logits
        except torch.OutOfMemoryError as error:
            raise OnboardError(
                f"{self.name} does not fit into the memory of the GPU", hint="Use --device cpu"
            ) from error

    def _theirs(self) -> Logits:
        with torch.inference_mode():
            model = load_model(self.context, self.context.dtype)

        def logits(ids: Sequence[int]) -> torch.Tensor:
            with torch.inference_mode():
                return model_logits(model, [Asked.whole(ids)])[0]

        return logits
