"""Modeling code of which one class is written anew, and what that class is given in a probe."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from onboard.agents.patch import with_block
from onboard.agents.refused import RefusedError
from onboard.errors import OnboardError

_MOST_CALLS = 3


def with_ported(text: str, name: str, block: str) -> str:
    """Return modeling code with another text of a class; raise `OnboardError` for one that is
    none.
    """
    try:
        return with_block(text, name, block)
    except RefusedError as error:
        raise OnboardError(str(error)) from None


def import_ported(module: str, name: str, block: str, folder: Path) -> None:
    """Import a module of transformers with another text of a class, in this process for good.

    Nothing of it may have been imported before: classes that others hold would stay as they were.
    """
    assert module not in sys.modules
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    path = folder / Path(found.origin).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(with_ported(Path(found.origin).read_text("utf-8"), name, block), "utf-8")
    made = spec_from_file_location(module, path)
    assert made is not None
    assert made.loader is not None
    sys.modules[module] = module_from_spec(made)
    made.loader.exec_module(sys.modules[module])


def recorded_calls(config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the first calls of a class of the model that a config stands for: the shapes and dtypes
    of what it is given and gives.
    """
    import torch

    from onboard.analysis.behaviour.thresholds import build_roomy
    from onboard.analysis.recognise.recorder import ModuleCall, modules_recorded
    from onboard.analysis.tiny.loaded_config import load_config
    from onboard.analysis.tiny.tiny_prompts import prompts

    model = build_roomy(load_config(config))
    calls: dict[str, list[ModuleCall]] = {}
    with modules_recorded(model, calls), torch.no_grad():
        model(**prompts(model)[0], use_cache=False)
    found = [
        call
        for path, module in model.named_modules()
        if type(module).__name__ == name
        for call in calls.get(path, [])
    ]
    return [_described(call) for call in found[:_MOST_CALLS]]


def _described(call: Any) -> dict[str, Any]:
    given = {str(index): item for index, item in enumerate(call.args)} | call.kwargs
    arguments = {key[:100]: _form(item) for key, item in given.items()}
    return {"arguments": arguments, "result": _form(call.output)}


def _form(value: Any) -> str:
    """Return a value's form: shape and dtype of a tensor, those of its items, else its type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_form, value[:8]))})"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return type(value).__name__
