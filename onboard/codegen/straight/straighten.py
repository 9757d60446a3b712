"""The straight definition of a class's forward, or why there is none."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.repository_source import is_imported_from_it
from onboard.analysis.source import ModuleSource, find_method, module_source
from onboard.codegen.cores.recordings import improved
from onboard.codegen.straight.checked import check_straight
from onboard.codegen.straight.merged import Sample, merged
from onboard.codegen.straight.printed import definition
from onboard.codegen.straight.recorded import NotRun, recorded
from onboard.codegen.straight.rolled import rolled
from onboard.codegen.straight.straight_lines import NotStraight
from onboard.codegen.straight.watched_calls import Watched
from onboard.hf.copied_model import copied
from onboard.hf.hf_model import build_reference, unquantised
from onboard.hf.parameters_on import without_memory

Definition = tuple[ModuleSource, ast.FunctionDef]


class Recordings:
    """What the classes of a model do, in the small one and in others.

    Args:
        model: the small model.
        config: that of the whole one.
        leaves: functions whose calls stay.
        positions: the model is given positions.
    """

    def __init__(
        self, model: nn.Module, config: PretrainedConfig, leaves: Collection[Any], positions: bool
    ) -> None:
        self.model, self.config = model, config
        self.leaves, self.positions = leaves, positions
        self.no_attention: dict[type, str] = {}
        """Why what may be attention in a class is none that the canonical op computes."""
        kinds = (type(module) for module in model.modules())
        self.classes = {cls for cls in kinds if is_imported_from_it(cls.__module__)}

    @cached_property
    def runs(self) -> list[tuple[nn.Module, Watched]]:
        """The models that ran, and what was recorded; errors are those of `straight_forward`."""
        found = []
        for index, (one, needed) in enumerate(_models(self.model, self.config)):
            twice = index == 0
            try:
                run = recorded(one, self.classes, self.leaves, self.positions, twice=twice)
            except NotRun:
                if needed:
                    raise
                continue
            found.append((one, run))
        return found

    def straight_forward(self, cls: type) -> Definition:
        """Return a definition of a class's forward without branches, calls of helpers and objects.

        Raises:
            NotStraight: what it does depends on more than sizes, or cannot be written.
        """
        found = find_method(cls, "forward")
        if found is None or cls not in self.classes:
            raise NotStraight("it has no forward of the repository's")
        samples: list[Sample] = []
        single: set[int] = set()
        for one, run in self.runs:
            samples += _samples(one, cls, run)
            single |= _to_try(one, run.single, self.model, single)
        straight = merged(samples)
        made = definition(straight, found[1])
        source = _source(found[0])
        check_straight(made, source.namespace, cls, self.model, single)
        better, findings = improved(straight, cls, self.model, positions=self.positions)
        reasons = [each.reason for each in findings if each.reason]
        if reasons:
            self.no_attention[cls] = f"{cls.__name__} has no attention of the op: {reasons[0]}"
        return source, made if better is straight else definition(better, found[1])


def _samples(model: nn.Module, cls: type, watched: Watched) -> list[Sample]:
    if cls in watched.failed:
        raise NotStraight(watched.failed[cls])
    dtype = next(model.parameters()).dtype
    calls = watched.found.get(cls, [])
    if not calls:
        raise NotStraight("it is not run")
    return [Sample(rolled(straight, module), by, dtype) for module, straight, by in calls]


def _to_try(one: nn.Module, single: set[int], small: nn.Module, known: set[int]) -> set[int]:
    """Return the single sizes to try with the small model: a text of all positions of the whole
    model is one of all positions of the small one.
    """
    ends = [getattr(model.config, "max_position_embeddings", None) for model in (one, small)]
    return {size for size in single if size != ends[0] or ends[1] not in known}


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
