"""A text's logits depend on nothing but that text: no later token, and no other text of a batch."""

from __future__ import annotations

import torch
from torch import nn

from onboard.analysis.recorder import rmse_ratio
from onboard.analysis.tiny import VOCABULARY, from_zero, prompt, prompts
from onboard.errors import OnboardError

_SAME = 1e-5
"""Largest rmse ratio of logits that are to be the same."""


def check_causality(model: nn.Module) -> None:
    """Refuse a model in which a token changes the logits of those before it."""
    inputs = prompts(model)[0]
    later = {**inputs, "input_ids": inputs["input_ids"].clone()}
    later["input_ids"][:, -1] = (later["input_ids"][:, -1] + 7) % VOCABULARY
    with torch.no_grad():
        one, other = (model(**item, use_cache=False).logits[:, :-1] for item in (inputs, later))
    if not rmse_ratio(one, other) <= _SAME:
        raise OnboardError(f"{type(model).__name__} is not causal: a token changes the logits of tokens before it")


def check_batch(model: nn.Module) -> None:
    """Refuse a model in which a text's logits depend on the other texts of a batch, or on whether there are any."""
    inputs = from_zero(prompt(0, batch=3, seed=8))
    first = {name: tensor[:1] for name, tensor in inputs.items()}
    with torch.no_grad():
        one, other = (model(**item, use_cache=False).logits[:1] for item in (inputs, first))
    if not (error := rmse_ratio(one, other)) <= _SAME:
        raise OnboardError(
            f"{type(model).__name__} gives a text other logits in a batch than alone (rmse ratio {error:.1e})"
        )
