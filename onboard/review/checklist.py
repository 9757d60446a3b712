"""What is under review, and what an item of the checklist is."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from onboard.analysis.multimodal import is_under
from onboard.analysis.spec import ModelSpec
from onboard.analysis.spec_blocks import Block
from onboard.analysis.tiny.loaded_config import load_config
from onboard.codegen.equivalence_test import generate_test_file
from onboard.codegen.hints.hinted_text import hinted
from onboard.codegen.model_file import generate_model_file
from onboard.codegen.straight.recorded_classes import recorded_classes
from onboard.errors import ProofError
from onboard.hf.expert_weights import separate_experts
from onboard.hf.hf_model import without_missing_towers
from onboard.hf.parameters_on import without_memory
from onboard.modeling import load_model_file, registered_config, registered_model
from onboard.review.python_source import Outcome, Source, definitions, shape


@dataclass(frozen=True)
class Subject:
    """The two files under review, the suite that the tests inherit, and the spec that they were
    made from.
    """

    model: Source
    test: Source
    suite: Source
    spec: ModelSpec
    model_file: Path

    def blocks(self, *kinds: str) -> list[Block]:
        """Return the spec's blocks of these kinds."""
        return [block for block in self.spec.blocks if block.kind in kinds]

    @cached_property
    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the checkpoint's tensors: those of Hugging Face's model, built without
        memory.

        Experts are one by one where checkpoints have them so; a multimodal model's towers are left
        out.
        """
        model_class = getattr(importlib.import_module(self.spec.hf_module), self.spec.architecture)
        shapes = _shapes(separate_experts(self._build(model_class, load_config(self.spec.config))))
        return {
            name: shape for name, shape in shapes.items() if not is_under(name, self.spec.eager)
        }

    @cached_property
    def built(self) -> nn.Module:
        """The model of the file under review, built without memory; whatever the file raises is
        raised.
        """
        load_model_file(self.model_file)
        return self._build(registered_model(self.spec.config_class), self._config())

    def actual_shapes(self) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Return the shapes in the state dict of the model under review, and the names of its
        parameters.
        """
        return _shapes(self.built.state_dict()), {name for name, _ in self.built.named_parameters()}

    def in_use(self) -> dict[str, ast.ClassDef]:
        """Return the classes that the model under review has modules of; all where it cannot be
        built.
        """
        classes = self.model.classes()
        with suppress(Exception):
            used = {type(module).__name__ for module in self.built.modules()}
            return {name: node for name, node in classes.items() if name in used}
        return classes

    def is_weight(self, attribute: str) -> bool:
        """Whether the checkpoint has tensors under an attribute's name."""
        return any(attribute in name.split(".") for name in self.expected_shapes)

    @cached_property
    def generated_model(self) -> Source | None:
        """The model file as the generator makes it from the spec; None where it makes none."""
        with suppress(Exception):  # then nothing in the file is the generator's
            text = hinted(generate_model_file(self.spec, self._ask_for_recorded), self.spec)
            return Source.parse("models/generated.py", text)
        return None

    def _ask_for_recorded(self, text: str) -> None:
        """Refuse a text in which a forward is translated that the file under review has as it was
        recorded: the translation was not proven.
        """
        recorded = recorded_classes(text)
        for name in recorded_classes(self.model.text):
            if name not in recorded:
                raise ProofError(f"{name} is translated", blocks=(name,))

    @cached_property
    def generated_tests(self) -> Source | None:
        """The tests as the shipped template makes them from the spec; None where it makes none."""
        with suppress(Exception):
            return Source.parse(
                "tests/generated.py", generate_test_file(self.spec, code=self._code_folder())
            )
        return None

    def _code_folder(self) -> str | None:
        """The folder, relative to the root, that the tests have a repository's code from."""
        if self.spec.repository is None:
            return None
        texts = {str(node.value) for node in self.test.all(ast.Constant)}
        return next(
            (text for text in sorted(texts) if re.fullmatch(r"\.onboard/[\w.-]+/code", text)), None
        )

    @cached_property
    def edited(self) -> set[str]:
        """The definitions of the model file that are not, or not so, in what the generator
        makes.
        """
        made = {} if self.generated_model is None else definitions(self.generated_model)
        shapes = {name: shape(node) for name, node in made.items()}
        return {
            name
            for name, node in definitions(self.model).items()
            if shape(node) != shapes.get(name)
        }

    def _build(self, model_class: type[nn.Module], config: Any) -> nn.Module:
        own: Any = model_class
        own_code = self.spec.repository is not None
        with without_memory(computing=own_code), without_missing_towers():
            return own(config)  # type: ignore[no-any-return]

    def _config(self) -> Any:
        """Return the config that the file under review is made for, of its own class."""
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
    """contract: what the proof, its safety or the rest of the engine rests on; whatever breaks it
    is refused.
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
