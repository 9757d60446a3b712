"""What a multimodal model's text model adds to hidden states between layers, such as an image's
features after several layers.

This is found by running the text model's own forward, whatever its arguments are called, with
layers that return states chosen here: what the next layer receives beyond these was added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from onboard.errors import OnboardError


@dataclass
class _Seen:
    """One pass through the text model."""

    states: list[torch.Tensor] = field(default_factory=list)
    """Hidden states that each layer received, and last the output, [1, tokens, hidden]."""
    others: list[tuple[Any, ...]] = field(default_factory=list)
    """All other arguments of each layer."""


def added_states(
    text: nn.Module, layers: str, handed: Mapping[str, Any], others: Sequence[str]
) -> list[torch.Tensor]:
    """Return what a text model adds to the output of each layer, [tokens, hidden] each.

    Args:
        text: the text model; only its token embedding needs weights.
        layers: the name of its list of layers.
        handed: all arguments that it is called with.
        others: the names of the arguments whose effect is wanted.

    Raises:
        OnboardError: they have another effect than an addition between layers.
    """
    count = len(text.get_submodule(layers))  # type: ignore[arg-type]
    embeds = handed["inputs_embeds"]
    generator = torch.Generator().manual_seed(4)
    random = [torch.randn(embeds.shape, generator=generator).to(embeds) for _ in range(count)]
    without = _pass(
        text, layers, {key: value for key, value in handed.items() if key not in others}, random
    )
    within = _pass(text, layers, handed, random)
    alone = _pass(text, layers, handed, [torch.zeros_like(embeds)] * count)
    plain = [without.states[0], *random]
    if not all(map(_same, without.states, plain)) or not _same(within.states[0], without.states[0]):
        raise OnboardError(
            "its forward does more to hidden states than to add to them between layers"
        )
    if not _same(within.others, without.others):
        raise OnboardError("its layers take them, too")
    added = alone.states[1:]
    for sent, got, own in zip(random, within.states[1:], added, strict=True):
        if not torch.equal(got, sent + own):
            raise OnboardError("what it adds between layers depends on the hidden states")
    return [own[0] for own in added]


def _pass(
    text: nn.Module, layers: str, handed: Mapping[str, Any], states: Sequence[torch.Tensor]
) -> _Seen:
    """Run the text model with layers that give `states`, and nothing done by modules that have no
    weights at hand.
    """
    seen = _Seen()

    def layer(index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.states.append(hidden)
        seen.others.append((args, kwargs))
        return states[index]

    own = {f"{layers}.{index}": partial(layer, index) for index in range(len(states))}
    for name, child in text.named_children():
        if name != layers and any(parameter.is_meta for parameter in child.parameters()):
            own[name] = _unchanged  # type: ignore[assignment]
    with _replaced({text.get_submodule(name): forward for name, forward in own.items()}):
        out = text(**handed)
    seen.states.append(out.last_hidden_state)
    if len(seen.states) != len(states) + 1:
        raise OnboardError("its forward does not call each layer once")
    return seen


def _unchanged(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Give instances a forward of their own: their classes stay as they are."""
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


def _same(one: Any, other: Any) -> bool:
    """Whether nested arguments have the same values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(_same(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(one == other)
