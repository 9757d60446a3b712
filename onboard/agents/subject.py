"""What is under review, and what an item of the checklist is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from onboard.agents.source import Outcome, Source
from onboard.analysis.spec import Block, ModelSpec


@dataclass(frozen=True)
class Subject:
    """The two files under review and the spec that they were made from."""

    model: Source
    test: Source
    spec: ModelSpec
    model_file: Path

    def blocks(self, *kinds: str) -> list[Block]:
        """Return the spec's blocks of these kinds."""
        return [block for block in self.spec.blocks if block.kind in kinds]

    @cached_property
    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the checkpoint's tensors: the state dict of Hugging Face's model, built without memory."""
        config_class = getattr(importlib.import_module("transformers"), self.spec.config_class)
        model_class = getattr(importlib.import_module(self.spec.hf_module), self.spec.architecture)
        with torch.device("meta"):
            model = model_class(config_class(**self.spec.config))
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@dataclass(frozen=True)
class Item:
    """One item of the checklist."""

    id: str
    title: str
    """What holds when it passes; `{spec.…}` is filled in."""
    check: Callable[[Subject], Outcome]
