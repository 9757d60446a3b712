"""Whether transformers' own cache changes what a model says: the reference has to agree with
itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from onboard.analysis.behaviour.thresholds import crossing_prompts
from onboard.analysis.recognise.scans.watch import lines_run
from onboard.analysis.tiny.tiny_config import one_line
from onboard.analysis.tiny.tiny_prompts import prompts
from onboard.errors import OnboardError
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

DIFFERS = "transformers' cached decode differs from its prefill"
_DECODED = 3
_SHOWN = 3
_STATES = ("past_key_values", "cache_params", "state")


@torch.no_grad()
def cache_notes(model: nn.Module) -> list[str]:
    """Return what a human should know of a transformers model's own cache; none when all is well.

    Proofs compare without a cache; users call the model with one. Prefill has to be the same. In
    decode a generated model is held against the whole text's logits, so that a fault of
    transformers' own decode is no more than a note.

    Raises:
        OnboardError: with a cache, prefill gives other logits.
    """
    if "use_cache" not in inspect.signature(model.forward).parameters:
        return []
    for inputs in prompts(model):
        expected = model(**inputs, use_cache=False).logits
        try:
            actual = model(**inputs).logits
        except Exception as error:
            return [f"transformers' cache does not work on the small model: {one_line(error)}"]
        if not rmse_ratio(actual, expected) <= SAME:
            raise OnboardError(
                f"{type(model).__name__} gives other logits in prefill with its cache than without"
            )
    notes = _first_token_notes(model, inputs)
    for each in (inputs, *crossing_prompts(model)):
        if found := _decode_notes(model, each):
            return [*notes, *found]
    return notes


def _first_token_notes(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Look at a prompt of one token, which some code takes for a step of decode."""
    first = {key: tensor[:, :1] for key, tensor in inputs.items()}
    try:
        error = rmse_ratio(model(**first).logits, model(**first, use_cache=False).logits)
    except Exception as fault:
        return [f"transformers' model does not take one token alone: {one_line(fault)}"]
    return (
        []
        if error <= SAME
        else [f"transformers' cache changes a prompt of one token (rmse ratio {error:.1e})"]
    )


def _decode_notes(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[str]:
    expected = model(**inputs, use_cache=False).logits[:, -_DECODED:]
    try:
        error = rmse_ratio(_decoded(model, inputs), expected)
    except Exception as fault:
        return [f"transformers' cached decode does not work on the small model: {one_line(fault)}"]
    if error <= SAME:
        return []
    said = (
        f"{DIFFERS} (rmse ratio {error:.1e} after {inputs['input_ids'].shape[1] - _DECODED} tokens)"
    )
    return [f"{said}, which the generated model follows{_only_decode(model, inputs)}"]


def _only_decode(model: nn.Module, inputs: dict[str, torch.Tensor]) -> str:
    """Return which lines of the model's code run in cached decode and not in prefill."""
    prefill, both = (
        lines_run(model, run) for run in (lambda: model(**inputs), lambda: _decoded(model, inputs))
    )
    lines = [
        f"{path.name}:{number} `{text}`"
        for (path, number), text in both.items()
        if (path, number) not in prefill
    ]
    return f"; decode alone runs {', '.join(lines[:_SHOWN])}" if lines else ""


def _decoded(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of the last tokens, fed one by one after a prefill of the others."""
    sizes = [inputs["input_ids"].shape[1] - _DECODED, *[1] * _DECODED]
    splits = zip(*(torch.split(tensor, sizes, dim=1) for tensor in inputs.values()), strict=True)
    state: dict[str, Any] = {}
    logits = []
    for split in splits:
        output = model(**dict(zip(inputs, split, strict=True)), use_cache=True, **state)
        state = {key: output[key] for key in _STATES if key in output}
        logits.append(output.logits[:, -1:])
    return torch.cat(logits[1:], dim=1)
