"""A tiny random checkpoint of a target, saved by transformers: safetensors under the names that
releases have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import logging

from onboard.analysis.behaviour.apart import change_by_later
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import one_line, tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.analysis.tiny.tiny_prompts import vocabulary
from onboard.errors import OnboardError
from onboard.hf.architecture import decoder_config, find_language_model, is_composite, text_config
from onboard.hf.hf_model import build_reference
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import NOT_CHANGED, SAME_ELEMENT
from onboard.workflow.sweep.inputs.checkpoint_defaults import complete, default_config
from onboard.workflow.sweep.inputs.options_on import Option, options
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.inputs.variation import aspects
from onboard.workflow.sweep.target_record import LEAST_FLOW

_LENGTH = 21


@dataclass(frozen=True)
class _Effect:
    """What a small config's model is."""

    shapes: dict[str, torch.Size]
    """Of its tensors, by name."""
    logits: torch.Tensor
    """For a fixed text."""
    problem: str
    """Why no comparison of logits would show anything; empty: it would."""

    def is_that_of(self, other: _Effect) -> bool:
        return self.shapes == other.shapes and torch.equal(self.logits, other.logits)


@dataclass
class Checkpoint:
    """What was made."""

    architecture: str
    is_causal: bool | None
    """Logits do not depend on later tokens, nor on the time of day; None: the model does not run on
    a text.
    """
    why_not_causal: str = ""
    """What they depend on that they must not."""
    options: list[str] = field(default_factory=list)
    """What was changed."""
    refused: dict[str, str] = field(default_factory=dict)
    """Changes that the model does not run with, and why."""
    missing: list[str] = field(default_factory=list)
    """Classes of modules that the full model has and this one lacks: a pass would say nothing of
    them.
    """
    flow: float = 0.0
    """How far a token moves the logits of later ones, in terms of their size."""


def make_checkpoint(target: Target, folder: Path, seed: int = 0) -> Checkpoint:
    """Save the target's tiny model to `folder`; every parameter is random, every kind of layer
    there.

    Of a model that is none of texts, or that cannot be built, the config alone: why, the workflow
        has to say.
    """
    logging.disable_progress_bar()
    try:
        return _made(target, _config(target), folder, seed)
    except OnboardError:
        return _config_alone(_full_config(target), folder)


def _made(target: Target, full: PretrainedConfig, folder: Path, seed: int) -> Checkpoint:
    small = tiny_config(full)
    model, made = build_small(small, seed), Checkpoint("", None)
    if target.variant == "varied" and _reads_texts(model) and is_causal(model):
        full = _switched_on(full, made)
        model = build_small(_varied(tiny_config(full), target.name, made), seed)
    model.save_pretrained(folder)  # type: ignore[operator]
    made.architecture, made.missing = type(model).__name__, missing_classes(full, model)
    if _reads_texts(model):
        made.why_not_causal, made.flow = why_not_causal(model), flow(model)
        made.is_causal = not made.why_not_causal
    return made


def _config_alone(config: PretrainedConfig, folder: Path) -> Checkpoint:
    model_class: Any = find_language_model(config)
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    return Checkpoint(config.architectures[0], None)


@torch.no_grad()
def _reads_texts(model: nn.Module) -> bool:
    try:
        # One text, to whatever takes several rows for one
        model(input_ids=_text(model)[:1], use_cache=False)
    except Exception:  # whatever a model's own code raises
        return False
    return True


def missing_classes(config: PretrainedConfig, tiny: nn.Module) -> list[str]:
    """Return the names of the module classes that the full-size model has and `tiny` does not,
    sorted.
    """
    with torch.device("meta"):
        full = build_reference(config)
    names = [{type(module).__name__ for module in model.modules()} for model in (full, tiny)]
    return sorted(names[0] - names[1])


def is_causal(model: nn.Module) -> bool:
    """Tell whether a language model gives the same logits again, and the same ones when only later
    tokens change.
    """
    return not why_not_causal(model)


@torch.no_grad()
def why_not_causal(model: nn.Module) -> str:
    """Return what makes a language model none that is causal; empty: it is one."""
    inputs = {"input_ids": _text(model)}
    first, second = (model(**inputs, use_cache=False).logits for _ in range(2))
    if not ((first - second).abs() <= SAME_ELEMENT * first.square().mean().sqrt()).all():
        return "its logits differ from one run to the next"
    if not (change := change_by_later(model, inputs)) <= NOT_CHANGED:
        return f"a token changes the logits of tokens before it (rmse ratio {change:.1e})"
    return ""


@torch.no_grad()
def flow(model: nn.Module) -> float:
    """Return how far a token moves the logits of the three after it: rmse over their root mean
    square.

    Where it is next to nothing, no comparison of logits shows what became of earlier tokens.
    """
    ids = _text(model)
    changed = ids.clone()
    changed[:, -4] = (changed[:, -4] + 1) % vocabulary(model)
    first, other = (
        model(input_ids=text, use_cache=False).logits[:, -3:].double() for text in (ids, changed)
    )
    return rmse_ratio(other, first)


def _text(model: nn.Module) -> torch.Tensor:
    return torch.randint(
        vocabulary(model), (2, _LENGTH), generator=torch.Generator().manual_seed(7)
    )


def _config(target: Target) -> PretrainedConfig:
    """The full-size config of the language model itself, with what a class's defaults leave out."""
    config = _full_config(target)
    return config if target.config is not None else complete(decoder_config(config))


def _full_config(target: Target) -> PretrainedConfig:
    """The target's own config, or its class's defaults."""
    return load_config(target.config) if target.config is not None else default_config(target.name)


def _switched_on(config: PretrainedConfig, made: Checkpoint) -> PretrainedConfig:
    """Return the full-size config with each option on that the tiny model runs with."""
    before = _effect(tiny_config(config))
    for option in options(text_part(config)[1]):
        if (after := _tried(option, config, tiny_config, before, made)) is not None:
            config, before = _with(config, option), after
    return config


def _varied(small: PretrainedConfig, name: str, made: Checkpoint) -> PretrainedConfig:
    """Return a small config with the first change of each aspect that its model runs with."""
    before = _effect(small)
    for aspect in aspects(text_part(small)[1], name):
        for option in aspect:
            if (after := _tried(option, small, lambda config: config, before, made)) is not None:
                small, before = _with(small, option), after
                break
    return small


def _tried(
    option: Option,
    config: PretrainedConfig,
    shrink: Callable[[PretrainedConfig], PretrainedConfig],
    before: _Effect,
    made: Checkpoint,
) -> _Effect | None:
    """Return the effect of a change and note that it is on, or note why it is not.

    One that changes neither the parameters nor the logits did not take effect: a pass would say
        nothing of it.
    """
    try:
        after = _effect(shrink(_with(config, option)))
    except Exception as error:  # whatever a model's own code raises is the reason for the table
        made.refused[option.name] = one_line(error)
        return None
    problem = (
        "it changes nothing in the tiny model"
        if option.shows and after.is_that_of(before)
        else after.problem
    )
    if problem:
        made.refused[option.name] = problem
        return None
    made.options.append(option.name)
    return after


@torch.no_grad()
def _effect(small: PretrainedConfig) -> _Effect:
    model = build_small(small)
    logits: torch.Tensor = model(input_ids=_text(model), use_cache=False).logits
    problem = why_not_causal(model)
    if not flow(model) >= LEAST_FLOW:
        problem = "with it a token hardly moves later logits"
    return _Effect(
        {name: tensor.shape for name, tensor in model.state_dict().items()}, logits, problem
    )


def text_part(config: PretrainedConfig) -> tuple[tuple[str, ...], PretrainedConfig]:
    """Return the text model's config inside a multimodal model's and the names that lead there;
    else none, and the config.
    """
    text = text_config(config)
    for name in config.sub_configs if is_composite(config) else ():
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            path, found = text_part(part)
            if found is text:
                return (name, *path), found
    return (), config


def _with(config: PretrainedConfig, option: Option) -> PretrainedConfig:
    changes = option.changes
    for name in reversed(text_part(config)[0]):
        changes = {name: changes}
    return type(config).from_dict(_merged(config.to_dict(), changes))


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return nested fields with nested changes."""
    both = fields.keys() & changes.keys()
    inner = {
        name: _merged(fields[name], changes[name])
        for name in both
        if isinstance(fields[name], dict) and isinstance(changes[name], dict)
    }
    return fields | changes | inner
