"""Which lines of a model's own code run when a small model is made, and reads a text, and in which
order.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from onboard.analysis.source import module_source
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary

_COUNTS: WeakKeyDictionary[nn.Module, Counter[tuple[str, int]]] = WeakKeyDictionary()


def lines_run(model: nn.Module, config: Any) -> Counter[tuple[str, int]]:
    """Return how often each line (file, number) of the modules that a small model's classes are in
    begins, where the model is made anew of a config and reads a text.
    """
    if model not in _COUNTS:
        _COUNTS[model] = Counter()
        files = _files(model)
        with _counted(_COUNTS[model], files), contextlib.suppress(Exception), torch.no_grad():
            made: Any = type(model)(deepcopy(config)).eval()
            made(**from_zero(prompt(0, seed=3, tokens=vocabulary(made))), use_cache=False)
    return _COUNTS[model]


def steps_run(model: nn.Module) -> set[tuple[str, int, int]]:
    """Return which line (file, number) of the modules that a model's classes are in follows which
    where it reads a text; 0 follows the last one of a call.
    """
    steps: set[tuple[str, int, int]] = set()

    def inside(frame: Any, event: str, _: Any, last: int = 0) -> Any:
        file, line = frame.f_code.co_filename, frame.f_lineno if event == "line" else 0
        if event in ("line", "return"):
            steps.add((file, last, line))
        return partial(inside, last=line or last)

    with _traced(inside, _files(model)), contextlib.suppress(Exception), torch.no_grad():
        model(**from_zero(prompt(0, seed=3, tokens=vocabulary(model))), use_cache=False)
    return steps


def _files(model: nn.Module) -> set[str]:
    classes = {type(item) for item in model.modules()}
    names = {cls.__module__ for cls in classes if not cls.__module__.startswith("torch.")}
    return {str(module_source(name).path) for name in names}


@contextlib.contextmanager
def _counted(counts: Counter[tuple[str, int]], files: Collection[str]) -> Iterator[None]:
    def inside(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            counts[frame.f_code.co_filename, frame.f_lineno] += 1
        return inside

    with _traced(inside, files):
        yield


@contextlib.contextmanager
def _traced(inside: Callable[..., Any], files: Collection[str]) -> Iterator[None]:
    """Have a function follow the calls in files, line by line."""

    def entered(frame: Any, event: str, _: Any) -> Any:
        return inside if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)
