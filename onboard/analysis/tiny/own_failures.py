"""Why a small model of a repository's own code does not run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Never

import torch
from torch import nn

from onboard.analysis import repository
from onboard.analysis.tiny.conditional_names import only_if
from onboard.analysis.tiny.tiny_config import one_line
from onboard.errors import OnboardError


def refuse_own_code(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Never:
    """Raise `OnboardError` with what a model's own code raises for a text, `input_ids` and
    `position_ids` [batch, length] each, that it does not run with.
    """
    tokens = inputs["input_ids"]
    _check_inputs(model)
    error = _raised(model, {**inputs, "attention_mask": torch.ones_like(tokens)})
    if isinstance(error, OnboardError):
        raise error
    if isinstance(error, NameError) and (found := only_if(error.name)) is not None:
        test, place = found
        raise OnboardError(
            f"the model's own code needs {error.name}, which it has only if {test}, at {place}",
            hint=f"Onboard it where that holds, or have the config ask for code without {error.name}",
        ) from error
    alone = _raised(model, {"input_ids": tokens})
    if alone is None:
        raise OnboardError(
            "the model's own code takes no position_ids of several texts, [batch, length]:"
            f" {one_line(error)}{_drawing(model, tokens)}",
            hint="Have its forward take them in a copy of the code",
        ) from error
    others = one_line(alone)
    also = "" if others == one_line(error) else f"; with tokens alone: {others}"
    raise OnboardError(
        f"the model's own code fails on a small model of this config: {one_line(error)}{also}",
        hint=repository.what_to_do(type(model)),
    ) from error


@torch.no_grad()
def _raised(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Return what a model raises for inputs; None where it runs."""
    try:
        model(**inputs, use_cache=False)
    except Exception as error:
        return error
    return None


def _check_inputs(model: nn.Module) -> None:
    """Refuse a forward that cannot be given `input_ids`, as transformers does."""
    own = inspect.unwrap(type(model).forward)
    parameters = list(inspect.signature(own).parameters.values())[1:]
    required = [item.name for item in parameters if item.default is item.empty]
    taken = [item.name for item in parameters]
    first = next((name for name in required if name not in ("args", "kwargs")), None)
    if first is not None and "input_ids" not in taken:
        raise OnboardError(
            f"{type(model).__name__}.forward takes {first} and no input_ids: transformers cannot"
            " run it either",
            hint=f"Rename {first} to input_ids in a copy of the code",
        )


@torch.no_grad()
def _drawing(model: nn.Module, tokens: torch.Tensor) -> str:
    """Return that a model draws random numbers, if it gives a text other logits the second time."""
    one, other = (model(input_ids=tokens, use_cache=False).logits for _ in range(2))
    return "" if torch.equal(one, other) else "; and it draws random numbers at each text"
