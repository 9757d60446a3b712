"""Why a small model of a repository's own code does not run."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any, Never

import torch
from torch import nn

from onboard.analysis import repository
from onboard.analysis.repository_source import is_imported_from_it
from onboard.analysis.tiny.conditional_names import only_if
from onboard.analysis.tiny.tiny_config import one_line
from onboard.errors import OnboardError, unfit_package
from onboard.hf.old import packages


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
    _refuse_what_is_lacking(error)
    alone = _raised(model, {"input_ids": tokens})
    if alone is None:
        raise OnboardError(
            "the model's own code takes no position_ids of several texts, [batch, length]:"
            f" {one_line(error)}{_drawing(model, tokens)}",
            hint="Have its forward take them in a copy of the code",
        ) from error
    if _takes_labels(model) and _raised(model, {"input_ids": tokens, "labels": tokens}) is None:
        raise OnboardError(
            f"the model's own code computes a loss whatever it is given: {one_line(error)}",
            hint="Have a copy of the code compute it only where there are labels",
        ) from error
    others = one_line(alone)
    also = "" if others == one_line(error) else f"; with tokens alone: {others}"
    raise OnboardError(
        f"the model's own code fails on a small model of this config: {one_line(error)}{also}",
        hint=repository.what_to_do(type(model), error),
    ) from error


def _refuse_what_is_lacking(error: BaseException) -> None:
    """Refuse code that imports a package which is not installed, or does not fit, or that a kernel's launch
    fails in.
    """
    package = repository.not_found(error).split(".")[0]
    if package and packages.missing([package]):
        raise OnboardError(
            f"the model's own code imports {package}, which is not here ({one_line(error)})",
            hint=packages.to_install(package),
        ) from error
    if (unfit := unfit_package(error)) is not None:
        raise unfit from error
    if kernel := _launched(error):
        raise OnboardError(
            f"the model's own code runs Triton kernels, {kernel} first, which need a GPU, and it runs"
            f" where there is none ({one_line(error)})",
            hint="Have a copy of the code compute in torch what they do",
        ) from error


def _launched(error: BaseException) -> str:
    """Return the name of a kernel that one of the code's functions launches which an error came
    through, or one that such a function is around; "" where there is a GPU, or none does.
    """
    if torch.cuda.is_available():
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if is_imported_from_it(str(frame.f_globals.get("__name__")))]
    inside = [frame.f_locals.get(name) for frame in own for name in frame.f_code.co_freevars]
    found = [_kernel(frame.f_code, frame.f_globals, depth=0) for frame in own]
    found += [_kernel_of(function, depth=3) for function in inside]
    return next(filter(None, found), "")


def _kernel(code: CodeType, names: Mapping[str, Any], *, depth: int) -> str:
    """Return the first Triton kernel that a function's code names, by way of so many others."""
    values = {name: names.get(name) for name in code.co_names}
    for name, value in values.items():
        if type(value).__module__.startswith("triton."):
            return name
    return next(filter(None, (_kernel_of(item, depth=depth - 1) for item in values.values())), "")


def _kernel_of(function: object, *, depth: int) -> str:
    inner = inspect.unwrap(function) if isinstance(function, FunctionType) and depth >= 0 else None
    return _kernel(inner.__code__, inner.__globals__, depth=depth) if inner else ""


@torch.no_grad()
def _raised(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Return what a model raises for inputs; None where it runs."""
    try:
        model(**inputs, use_cache=False)
    except Exception as error:
        return error
    return None


def _takes_labels(model: nn.Module) -> bool:
    return "labels" in inspect.signature(inspect.unwrap(type(model).forward)).parameters


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
