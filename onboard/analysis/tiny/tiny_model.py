"""A tiny random model of a checkpoint's architecture: the object that every probe and proof looks
at.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis import repository
from onboard.analysis.behaviour.code_numbers import code_of, literals
from onboard.analysis.behaviour.lines_run import steps_run
from onboard.analysis.tiny.own_failures import refuse_own_code
from onboard.analysis.tiny.random_weights import note_drawn, randomize
from onboard.analysis.tiny.tiny_config import (
    KEPT_HEADS,
    KEPT_LAYERS,
    KEPT_SIZES,
    WAYS_TO_KEEP,
    one_line,
    tiny_config,
)
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, runs_as_it_is, vocabulary
from onboard.errors import OnboardError
from onboard.hf.hf_model import build_reference

_LEAST, _MOST = 16, 1 << 16
"""Numbers that may be sizes of the checkpoint, and no others that code has."""
_ALL, _MOST_LAYERS = 10**6, 16
"""Layers: more than any model has, and those of the longest small model that is tried."""
VOCABULARY_SIZES = frozenset({"vocab_size", "padded_vocab_size"})


def build_tiny(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    """Return the tiny transformers model: float32, evaluation mode, eager attention, every
    parameter random.

    Raises:
        OnboardError: the code of a repository does not run.
    """
    model = _with_any_vocabulary(config, seed)
    if not repository.is_installed(config.model_type):
        return model
    model = _with_all_kinds(config, model, seed)
    if runs_as_it_is(model):
        return _with_whole_texts(config, model, seed)
    if (kept := _with_kept_heads(config, seed)) is not None:
        return kept
    if (longer := _with_more_layers(config, seed)) is not None:
        return longer
    if (kept := _with_kept_sizes(config, model, seed)) is not None:
        return kept
    if (kept := _with_all_words(config, seed)) is not None:
        return kept
    if repository.bind_absent(config.model_type):
        return build_tiny(config, seed)
    refuse_own_code(model, from_zero(prompt(0, seed=3, tokens=vocabulary(model))))
    return model


def _with_any_vocabulary(config: PretrainedConfig, seed: int) -> nn.Module:
    """Return a small model, with the checkpoint's vocabulary where code cannot make one with a small
    one: it may have the number of a token of its own.
    """
    try:
        return build_small(tiny_config(config), seed)
    except OnboardError:
        if not repository.is_installed(config.model_type):
            raise
        KEPT_SIZES[type(config)] = VOCABULARY_SIZES
        try:
            return build_small(tiny_config(config), seed)
        except OnboardError:
            del KEPT_SIZES[type(config)]
        raise


def _with_all_kinds(config: PretrainedConfig, model: nn.Module, seed: int) -> nn.Module:
    """Return a small model with more layers where it lacks something of the one with all layers, the
    shortest that has the most of it: what a layer is made of, and does, may follow from its number.
    """
    try:
        wanted = _kinds(build_small(tiny_config(config, layers=_ALL), seed))
    except Exception:
        return model  # what is in the way shows where the small model runs
    best, lacking, kept = model, len(wanted - _kinds(model)), 0
    for count in range(3, _MOST_LAYERS + 1) if lacking else ():
        KEPT_LAYERS[type(config)] = count
        longer = build_small(tiny_config(config), seed)
        if (lacks := len(wanted - _kinds(longer))) < lacking:
            best, lacking, kept = longer, lacks, count
        if not lacking:
            break
    KEPT_LAYERS[type(config)] = kept
    return best


def _kinds(model: nn.Module) -> set[object]:
    """Return what layers may differ in: classes, switches of modules, and the ways that their code
    takes.
    """
    switches = {
        (type(module), key, value)
        for module in model.modules()
        for key, value in vars(module).items()
        if value is None or isinstance(value, bool)
    }
    return {*map(type, model.modules()), *switches, *steps_run(model)}


def _with_whole_texts(config: PretrainedConfig, model: nn.Module, seed: int) -> nn.Module:
    """Return a small model with the checkpoint's vocabulary where one with a small one has logits of
    no more tokens than it has words: code may cut the wrong axis, which no text is too long for.
    """
    words = vocabulary(model)
    text = torch.arange(words + 1).remainder(words)[None]
    try:
        with torch.no_grad():
            rows = model(input_ids=text, use_cache=False).logits.shape[1]
    except Exception:  # the text may be too long
        return model
    if rows != words:
        return model
    KEPT_SIZES[type(config)] = KEPT_SIZES.get(type(config), frozenset()) | VOCABULARY_SIZES
    return build_small(tiny_config(config), seed)


def _with_all_words(config: PretrainedConfig, seed: int) -> nn.Module | None:
    """Return a small model with the checkpoint's vocabulary, where its code needs that to run; None
    where that does not help.
    """
    kept = KEPT_SIZES.get(type(config))
    KEPT_SIZES[type(config)] = (kept or frozenset()) | VOCABULARY_SIZES
    model = build_small(tiny_config(config), seed)
    if runs_as_it_is(model):
        return model
    KEPT_SIZES.pop(type(config))
    if kept is not None:
        KEPT_SIZES[type(config)] = kept
    return None


def _with_kept_heads(config: PretrainedConfig, seed: int) -> nn.Module | None:
    """Return a small model that keeps of the checkpoint's heads what its code needs to run; None
    where that does not help.
    """
    for kept in WAYS_TO_KEEP:
        KEPT_HEADS[type(config)] = kept
        model = build_small(tiny_config(config), seed)
        if runs_as_it_is(model):
            return model
    del KEPT_HEADS[type(config)]
    return None


def _with_more_layers(config: PretrainedConfig, seed: int) -> nn.Module | None:
    """Return a small model with as many layers as its code needs to run; None where that does not
    help.
    """
    for count in range(3, _MOST_LAYERS + 1):
        KEPT_LAYERS[type(config)] = count
        model = build_small(tiny_config(config), seed)
        if runs_as_it_is(model):
            return model
    del KEPT_LAYERS[type(config)]
    return None


def _with_kept_sizes(config: PretrainedConfig, model: nn.Module, seed: int) -> nn.Module | None:
    """Return a small model that keeps the sizes that stand in its code as numbers; None where that
    does not help.
    """
    full, small = config.to_dict(), tiny_config(config).to_dict()
    written = {number for number in literals(*code_of(model)) if _LEAST < number <= _MOST}
    changed = (name for name, value in full.items() if value != small.get(name))
    names = frozenset(name for name in changed if type(full[name]) is int and full[name] in written)
    if not names:
        return None
    KEPT_SIZES[type(config)] = names
    try:
        kept = build_small(tiny_config(config), seed)
        if runs_as_it_is(kept):
            return kept
    except OnboardError:
        pass  # what is said of the small model says more
    del KEPT_SIZES[type(config)]
    return None


def build_small(
    small: PretrainedConfig, seed: int = 0, attention: str | None = "eager"
) -> nn.Module:
    """Return the model of a config that is small already, as `build_tiny` does; with the attention
    that transformers chooses, if `attention` is None.

    What the config was before the model's constructor, which may change it, is `made_with(model)`.
    """
    before = copy.deepcopy(small)
    try:
        given = {"attn_implementation": attention} if attention else {}
        model = build_reference(small, dtype=torch.float32, **given)
        if repository.is_installed(small.model_type):
            again = partial(build_reference, copy.deepcopy(before), dtype=torch.float32, **given)
            note_drawn(model, again)
    except OnboardError:
        raise
    except Exception as error:
        raise OnboardError(
            f"transformers cannot build {small.model_type}: {one_line(error)}"
        ) from error
    randomize(model, seed)
    vars(model)["made_with"] = before
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def made_with(model: nn.Module) -> Any:
    """Return the config that a small model was made with."""
    return vars(model)["made_with"]
