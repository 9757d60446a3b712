"""What is under review, and what an item of the checklist is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from onboard.agents.source import Outcome, Source
from onboard.analysis.composite import is_under
from onboard.analysis.spec import Block, ModelSpec
from onboard.analysis.tiny import load_config
from onboard.graph.expert_weights import separate_experts
from onboard.graph.reference import without_missing_towers
from onboard.modeling import load_model_file, registered_config, registered_model


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
        """Name -> shape of the checkpoint's tensors: those of Hugging Face's model, built without memory.

        Experts are one by one where checkpoints have them so; a composite's towers are left out.
        """
        model_class = getattr(importlib.import_module(self.spec.hf_module), self.spec.architecture)
        shapes = _shapes(separate_experts(self._build(model_class)))
        return {name: shape for name, shape in shapes.items() if not is_under(name, self.spec.eager)}

    def actual_shapes(self) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Execute the model file; return the shapes in its model's state dict, and the names of the parameters."""
        load_model_file(self.model_file)
        model = self._build(registered_model(self.spec.config_class))
        return _shapes(model.state_dict()), {name for name, _ in model.named_parameters()}

    def _build(self, model_class: type[nn.Module]) -> nn.Module:
        own: Any = model_class
        with torch.device("meta"), without_missing_towers():
            return own(self._config())  # type: ignore[no-any-return]

    def _config(self) -> Any:
        if self.spec.repository is None:
            return load_config(self.spec.config)
        load_model_file(self.model_file)
        return registered_config(self.spec.config["model_type"])(**self.spec.config)


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


Kind = Literal["contract", "style"]


@dataclass(frozen=True)
class Item:
    """One item of the checklist."""

    id: str
    kind: Kind
    """contract: what the proof, its safety or the rest of the engine rests on; whatever breaks it is refused.
    style: how a proven text should read; what is not so is a note, and a fault of the generator."""
    title: str
    """What holds when it passes; `{spec.…}` is filled in."""
    check: Callable[[Subject], Outcome]


def contract(id: str, title: str, check: Callable[[Subject], Outcome]) -> Item:
    """Return an item that a model can fail by."""
    return Item(id, "contract", title, check)


def style(id: str, title: str, check: Callable[[Subject], Outcome]) -> Item:
    """Return an item that is noted where it does not hold."""
    return Item(id, "style", title, check)
