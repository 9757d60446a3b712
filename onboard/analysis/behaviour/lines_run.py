"""Which lines of a model's own code run when a small model is made, and reads a text."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from copy import deepcopy
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
        classes = {type(item) for item in model.modules()}
        names = {cls.__module__ for cls in classes if not cls.__module__.startswith("torch.")}
        files = {str(module_source(name).path) for name in names}
        with _counted(_COUNTS[model], files), contextlib.suppress(Exception), torch.no_grad():
            made: Any = type(model)(deepcopy(config)).eval()
            made(**from_zero(prompt(0, seed=3, tokens=vocabulary(made))), use_cache=False)
    return _COUNTS[model]


@contextlib.contextmanager
def _counted(counts: Counter[tuple[str, int]], files: Collection[str]) -> Iterator[None]:
    def inside(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            counts[frame.f_code.co_filename, frame.f_lineno] += 1
        return inside

    def entered(frame: Any, event: str, _: Any) -> Any:
        return inside if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)
