"""The straight definition of a class's forward, or why there is none."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.source import ModuleSource, find_method, module_source
from onboard.codegen.straight.checked import check_straight
from onboard.codegen.straight.lines import NotStraight
from onboard.codegen.straight.merged import Sample, merged
from onboard.codegen.straight.printed import definition
from onboard.codegen.straight.recorded import NotRun, recorded
from onboard.codegen.straight.rolled import rolled
from onboard.hf.copied_model import copied
from onboard.hf.hf_model import build_reference, unquantised
from onboard.hf.parameters_on import without_memory

Definition = tuple[ModuleSource, ast.FunctionDef]


def straight_forward(
    cls: type,
    model: nn.Module,
    config: PretrainedConfig,
    leaves: Collection[Any],
    positions: bool,
) -> Definition:
    """Return a definition of a class's forward without branches, calls of helpers and objects.

    Args:
        cls: the class, of modules of `model`.
        model: the small model.
        config: that of the whole one.
        leaves: functions whose calls stay.
        positions: the model is given positions.

    Raises:
        NotStraight: what it does depends on more than sizes, or cannot be written.
    """
    found = find_method(cls, "forward")
    if found is None:
        raise NotStraight(f"{cls.__name__} has no forward")
    samples: list[Sample] = []
    for index, (one, needed) in enumerate(_models(model, config)):
        try:
            samples += _samples(one, cls, leaves, positions, twice=index == 0)
        except NotRun:
            if needed:
                raise
    made = definition(merged(samples), found[1])
    source = _source(found[0])
    check_straight(made, source.namespace, cls, model)
    return source, made


def _samples(
    model: nn.Module, cls: type, leaves: Collection[Any], positions: bool, *, twice: bool
) -> list[Sample]:
    watched = recorded(model, {cls}, leaves, positions, twice=twice)
    if cls in watched.failed:
        raise NotStraight(watched.failed[cls])
    dtype = next(model.parameters()).dtype
    calls = watched.found.get(cls, [])
    if not calls:
        raise NotStraight("it is not run")
    return [Sample(rolled(straight, module), by, dtype) for module, straight, by in calls]


def _models(model: nn.Module, config: PretrainedConfig) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the models to record, and whether a straight form needs the recording."""
    yield copied(model), True
    yield _whole_model(config), True
    yield _in_dtype(model, torch.float64), True
    yield _in_dtype(model, torch.bfloat16), False


def _whole_model(config: PretrainedConfig) -> nn.Module:
    """Return the model with its real sizes, its parameters on the meta device."""
    with without_memory(computing=True):
        model = build_reference(
            unquantised(config), dtype=torch.float32, attn_implementation="eager"
        )
    made: nn.Module = model.eval().requires_grad_(False)
    return made


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy in a dtype: what stays float32 there is so whatever the model is."""
    return copied(model).to(dtype)


def _source(owner: type) -> ModuleSource:
    """Return the module that a definition stands in, as it were: that of the class, with torch by
    its name.
    """
    own = module_source(owner.__module__)
    module = ModuleType(own.module.__name__)
    vars(module).update({**own.namespace, "torch": torch, "nn": nn, "math": math})
    return replace(own, module=module)
