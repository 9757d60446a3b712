"""Which axis of what code hands to functions of flash-linear-attention (`fla`) its tokens are on.

Its first versions took [batch, heads, tokens, size], those since April 2025 take [batch, tokens, heads,
size]; between them a call could say `head_first`, whose default changed. Code does not name its
version, and with the wrong order a token's heads are read as a text, which fails nowhere. But tokens
are as many as the text has, at every length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Shown:
    """What the calls of a model have shown that do not say which axis comes first."""

    heads_first: bool | None = None
    length: int | None = None
    """Tokens of the text that the model reads now."""


_now = Shown()
"""What the model that ran last has shown: parts of it may run alone."""


class _UntoldError(NotImplementedError):
    """A text with as many tokens as there are heads shows nothing."""


def watch(model_class: Any) -> None:
    """Have a class's forward say how long the text is that it is given; one that shows nothing is read
    twice over before, where the model keeps nothing of it.
    """
    if hasattr(model_class.forward, "shown"):
        return
    forward, shown = model_class.forward, Shown()

    @functools.wraps(forward)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return _told(shown, _length(*args[:1], **kwargs), forward, self, *args, **kwargs)
        except _UntoldError:
            named = dict(zip(("input_ids",), args, strict=False)) | kwargs
            text, mask = named.get("input_ids"), named.get("attention_mask")
            if not isinstance(text, torch.Tensor) or kwargs.get("past_key_values") is not None:
                raise
        doubled = {} if mask is None else {"attention_mask": mask.repeat(1, 2)}
        _told(shown, 2 * text.shape[1], forward, self, input_ids=text.repeat(1, 2), **doubled)
        return _told(shown, text.shape[1], forward, self, *args, **kwargs)

    watched.shown = shown  # type: ignore[attr-defined]
    model_class.forward = watched


def _told(shown: Shown, length: int | None, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a forward gives that reads a text of so many tokens."""
    global _now
    _now, shown.length = shown, length
    try:
        return forward(*args, **kwargs)
    finally:
        shown.length = None


def _length(input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> int | None:
    """Return the tokens of `input_ids` [batch, tokens] or `inputs_embeds` [batch, tokens, size]."""
    text = inputs_embeds if input_ids is None else input_ids
    return text.shape[1] if isinstance(text, torch.Tensor) and text.dim() > 1 else None


def shown_by(model_class: Any) -> bool | None:
    """Whether heads come first in the calls of a class's models that do not say; None: no call has
    shown it.
    """
    shown: Shown | None = getattr(model_class.forward, "shown", None)
    return None if shown is None else shown.heads_first


def heads_come_first(tensors: Sequence[torch.Tensor], said: bool | None) -> bool:
    """Whether tensors are [batch, heads, tokens, ...], and not [batch, tokens, heads, ...]; `said` is
    the call's `head_first`.

    Raises:
        NotImplementedError: nothing tells, or calls differ.
    """
    if said is not None:
        return said
    here = _by_length(tensors, _now.length)
    if here is None:
        here = _now.heads_first
    if here is None:
        raise _UntoldError("nothing tells whether heads or tokens come first: no form here")
    if _now.heads_first not in (None, here):
        raise NotImplementedError("heads come first in some calls, tokens in others: no form here")
    _now.heads_first = here
    return here


def _by_length(tensors: Sequence[torch.Tensor], length: int | None) -> bool | None:
    """Whether the second axis has as many items as the text has tokens; None: so has the first, or
    the text's length is not known.

    Raises:
        NotImplementedError: neither axis has.
    """
    if length is None:
        return None
    first, second = (all(each.shape[axis] == length for each in tensors) for axis in (1, 2))
    if not (first or second):
        raise NotImplementedError("neither axis has the text's length: no form here")
    return None if first and second else second
