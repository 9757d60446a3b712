"""A tiny random checkpoint of a target, saved by transformers: safetensors under the names that releases have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import logging

from onboard.analysis.tiny import VOCABULARY, build_tiny, load_config, one_line
from onboard.errors import OnboardError
from onboard.graph.architecture import decoder_config, find_language_model
from onboard.graph.reference import build_reference
from onboard.workflow.sweep.defaults import complete, default_config
from onboard.workflow.sweep.options import Option, options
from onboard.workflow.sweep.targets import Target

_LENGTH = 21
_SAME = 1e-4
"""Largest change, relative to the logits, that another order of the same sums may make."""


@dataclass
class Checkpoint:
    """What was made."""

    architecture: str
    is_causal: bool | None
    """Logits do not depend on later tokens, nor on the time of day; None: the model does not run on a text."""
    options: list[str] = field(default_factory=list)
    """Options that are on."""
    refused: dict[str, str] = field(default_factory=dict)
    """Options that the model does not run with, and why."""
    missing: list[str] = field(default_factory=list)
    """Classes of modules that the full model has and this one lacks: a pass would say nothing of them."""
    flow: float = 0.0
    """How far a token moves the logits of later ones, in terms of their size."""


def make_checkpoint(target: Target, folder: Path, seed: int = 0) -> Checkpoint:
    """Save the target's tiny model to `folder`; every parameter is random, every kind of layer there.

    Of a model that is none of texts, or that cannot be built, the config alone: why, the workflow has to say.
    """
    logging.disable_progress_bar()
    try:
        return _made(target, _config(target), folder, seed)
    except OnboardError:
        return _config_alone(_full_config(target), folder)


def _made(target: Target, config: PretrainedConfig, folder: Path, seed: int) -> Checkpoint:
    varied = target.variant == "varied" and _reads_texts(build_tiny(config))
    on, refused = _switched_on(config) if varied else ([], {})
    model = build_tiny(_with(config, on), seed)
    model.save_pretrained(folder)  # type: ignore[operator]
    missing = missing_classes(_with(config, on), model)
    names = [option.name for option in on]
    causal, moved = (is_causal(model), flow(model)) if _reads_texts(model) else (None, 0.0)
    return Checkpoint(type(model).__name__, causal, names, refused, missing, moved)


def _config_alone(config: PretrainedConfig, folder: Path) -> Checkpoint:
    model_class: Any = find_language_model(config)
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    return Checkpoint(config.architectures[0], None)


@torch.no_grad()
def _reads_texts(model: nn.Module) -> bool:
    try:
        model(input_ids=_text(), use_cache=False)
    except Exception:  # whatever a model's own code raises
        return False
    return True


def missing_classes(config: PretrainedConfig, tiny: nn.Module) -> list[str]:
    """Return the names of the module classes that the full-size model has and `tiny` does not, sorted."""
    with torch.device("meta"):
        full = build_reference(config)
    names = [{type(module).__name__ for module in model.modules()} for model in (full, tiny)]
    return sorted(names[0] - names[1])


@torch.no_grad()
def is_causal(model: nn.Module) -> bool:
    """Tell whether a language model gives the same logits again, and the same ones when only later tokens change."""
    ids = _text()
    changed = ids.clone()
    changed[:, -4:] = (changed[:, -4:] + 1) % VOCABULARY
    first, second, other = (model(input_ids=text, use_cache=False).logits for text in (ids, ids, changed))
    limit = _SAME * first.square().mean().sqrt()
    return bool(((first - second).abs() <= limit).all() and ((first - other).abs()[:, :-4] <= limit).all())


@torch.no_grad()
def flow(model: nn.Module) -> float:
    """Return how far a token moves the logits of the three after it: rmse over their root mean square.

    Where it is next to nothing, no comparison of logits shows what became of earlier tokens.
    """
    ids = _text()
    changed = ids.clone()
    changed[:, -4] = (changed[:, -4] + 1) % VOCABULARY
    first, other = (model(input_ids=text, use_cache=False).logits[:, -3:].double() for text in (ids, changed))
    return float((other - first).square().mean().sqrt() / first.square().mean().sqrt())


def _text() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, _LENGTH), generator=torch.Generator().manual_seed(7))


def _config(target: Target) -> PretrainedConfig:
    """The full-size config of the language model itself, with what a class's defaults leave out."""
    config = _full_config(target)
    return config if target.config is not None else complete(decoder_config(config))


def _full_config(target: Target) -> PretrainedConfig:
    """The target's own config, or its class's defaults."""
    return load_config(target.config) if target.config is not None else default_config(target.name)


def _switched_on(config: PretrainedConfig) -> tuple[list[Option], dict[str, str]]:
    """Try each option on top of those that worked; return those that work together, and why the others do not.

    One that changes neither the parameters nor the logits did not take effect: a pass would say nothing of it.
    """
    on: list[Option] = []
    refused: dict[str, str] = {}
    before = _effect(config)
    for option in options(config):
        try:
            after = _effect(_with(config, [*on, option]))
        except Exception as error:  # whatever a model's own code raises is the reason for the table
            refused[option.name] = one_line(error)
            continue
        if after[0] == before[0] and torch.equal(after[1], before[1]):
            refused[option.name] = "it changes nothing in the tiny model"
        else:
            on.append(option)
            before = after
    return on, refused


@torch.no_grad()
def _effect(config: PretrainedConfig) -> tuple[dict[str, torch.Size], torch.Tensor]:
    """Return the shapes of the tiny model's parameters and buffers by name, and its logits for a fixed text."""
    model = build_tiny(config)
    logits: torch.Tensor = model(input_ids=_text(), use_cache=False).logits
    return {name: tensor.shape for name, tensor in model.state_dict().items()}, logits


def _with(config: PretrainedConfig, on: list[Option]) -> PretrainedConfig:
    changes = {key: value for option in on for key, value in option.changes.items()}
    return type(config).from_dict(config.to_dict() | changes) if changes else config
