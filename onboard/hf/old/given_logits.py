"""What the forward of a repository's own model gives: its logits as transformers' models give them,
of every token of a text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import CausalLMOutput

from onboard.errors import OnboardError

_ITSELF = ""
_FEWER = ("logits_to_keep", "num_logits_to_keep")
"""What transformers' generation asks for, of who has such parameters."""


@dataclass
class Given:
    """What a class's forward gives."""

    place: int | str | None = None
    """Where the logits, or an output of transformers with them, are in a tuple or a dict; "" where
    nothing else is given; None: at `logits` of an output of transformers.
    """
    of_last: bool = False
    """They are those of the last token alone."""

    def said(self, name: str) -> Iterator[str]:
        """Yield what the report says of it."""
        if self.place is not None:
            form = {_ITSELF: "a tensor"}.get(str(self.place), f"a tuple or dict, [{self.place!r}]")
            yield f"{name}.forward gives its logits as {form}; they are taken from there"
        if self.of_last:
            yield f"{name}.forward gives logits of the last token; those of every token are taken"


_given: WeakKeyDictionary[type, Given] = WeakKeyDictionary()


def given_by(model_class: type) -> Given:
    """Return what the forward of a class gave when it last ran."""
    return _given.get(model_class, Given())


def last_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [batch, vocabulary] of the last token as the class itself gives them."""
    output = inspect.unwrap(type(model).forward)(model, input_ids=ids)
    logits: torch.Tensor = _with_logits(model, output).logits
    return logits.view(len(ids), -1)


def giving_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that gives an output of transformers, with logits of every token."""

    @functools.wraps(forward)
    def giving(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        length = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() > 1 else 1
        if any(kwargs.get(name) for name in _FEWER):
            return forward(self, *args, **kwargs)
        found = _given.setdefault(type(self), Given())
        if not found.of_last:
            output = _with_logits(self, forward(self, *args, **kwargs))
            found.of_last = length > 1 and _is_of_last(output.logits)
        if not found.of_last:
            return output
        with _AllTokens():
            output = _with_logits(self, forward(self, *args, **kwargs))
        if length > 1 and _is_of_last(output.logits):
            raise OnboardError(
                f"{type(self).__name__}.forward gives logits of the last token alone, in a way that is not known",
                hint="Have it give those of every token in a copy of the code",
            )
        return output

    return giving


def _is_of_last_index(index: Any) -> bool:
    """Whether `x[index]` of hidden states [batch, sequence, ...] is the last token's alone:
    `x[:, -1:]`, `x[:, [-1], :]`, `x[:, -1]`.
    """
    match index:
        case (slice(start=None, stop=None, step=None), last):
            return _is_last(last)
        case (
            slice(start=None, stop=None, step=None),
            last,
            slice(start=None, stop=None, step=None),
        ):
            return _is_last(last)
    return False


def _is_last(index: Any) -> bool:
    return index in (-1, [-1]) if not isinstance(index, slice) else index == slice(-1, None, None)


class _AllTokens(TorchFunctionMode):
    """Has code take all hidden states where it takes the last token's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and _is_last_state(*args):
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_last_state(owner: torch.Tensor, index: Any) -> bool:
    return owner.dim() == 3 and owner.is_floating_point() and _is_of_last_index(index)


def _with_logits(model: Any, output: Any) -> Any:
    """Return an output of transformers; where it is none, note the place of the logits in it."""
    if hasattr(output, "logits"):  # of transformers, or any object that keeps them
        return output if isinstance(output, Mapping) else CausalLMOutput(logits=output.logits)
    found = _given.setdefault(type(model), Given())
    if isinstance(output, torch.Tensor):
        found.place = _ITSELF
        return CausalLMOutput(logits=output)
    parts = dict(output if isinstance(output, Mapping) else enumerate(output))
    outputs = [key for key, item in parts.items() if hasattr(item, "logits")]
    if len(outputs) == 1:  # one of transformers, with something else beside it
        [found.place] = outputs
        return CausalLMOutput(logits=parts[outputs[0]].logits)
    places = [key for key, item in parts.items() if _may_be_logits(item)]
    size = getattr(model.config, "vocab_size", None)
    named = (
        [key for key in places if key == "logits"]
        or [key for key in places if parts[key].shape[-1] == size]
        or places
    )
    if len(named) != 1:
        raise OnboardError(
            f"{type(model).__name__}.forward gives {len(named)} tensors that may be logits, and no"
            " output of transformers",
            hint="Have it give a CausalLMOutput in a copy of the code",
        )
    found.place = named[0]
    return CausalLMOutput(logits=parts[named[0]])


def _may_be_logits(item: Any) -> bool:
    is_tensor = isinstance(item, torch.Tensor) and item.is_floating_point()
    return is_tensor and item.dim() in (2, 3)


def _is_of_last(logits: Any) -> bool:
    """Whether logits of a text of several tokens are of one."""
    return isinstance(logits, torch.Tensor) and (logits.dim() == 2 or logits.shape[1] == 1)
