"""transformers' attention interface: every call of it goes to a handler, and its masks say which
keys they allow.

transformers models look their attention function up by the name in their config, in a table that
anyone may add to (https://huggingface.co/docs/transformers/attention_interface); masks are made by
a function of the same name, which is given a rule (batch, head, query, key) -> bool. The rule is
evaluated, never the mask: a window of any length shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.graph.pattern_matcher.masks import MaskForm

_EAGER = "eager"
CACHED = "onboard_cached"
"""Attention without masks: the paged caches know which keys a query sees."""

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """One call of the interface: query, key and value [batch, heads, sequence, dim] and what came
    with them.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    form: MaskForm | None
    """What the mask allows; None when it is not one of transformers' own masks as it was made, or
    of no known form.
    """
    keywords: dict[str, Any]
    own: dict[str, str] = field(default_factory=dict)
    """Keywords that are tensors of the module itself -> their names there; known in recorded
    passes.
    """

    @property
    def scale(self) -> float | None:
        """Factor of the scores; None: one over the root of the head size."""
        return self.keywords.get("scaling")

    @property
    def sinks(self) -> torch.Tensor | None:
        """One more logit per head in the denominator."""
        return self.keywords.get("s_aux")

    @property
    def logit_cap(self) -> float | None:
        """Soft cap of the scores."""
        return self.keywords.get("softcap")

    @property
    def window(self) -> int | None:
        """Keys that a query sees; None: all before it."""
        return self.form.sliding_window if self.form is not None else None


Handler = Callable[[AttentionCall], torch.Tensor]
"""Computes a call: [batch, sequence, heads, value_dim]."""


@dataclass
class _Interception:
    handler: Handler
    length: int | None
    """Longest sequence for which a mask's rule is evaluated; None: rules are not looked at."""
    masks: list[tuple[torch.Tensor, MaskForm | None]] = field(default_factory=list)
    making_mask: bool = False

    def form(self, mask: torch.Tensor | None) -> MaskForm | None:
        """Return the form of a mask that is still the very tensor that was handed out."""
        return next((form for known, form in self.masks if known is mask), None)


_ACTIVE: ContextVar[_Interception] = ContextVar("onboard_attention")


@contextmanager
def attention_recorded(model: nn.Module, handler: Handler, length: int) -> Iterator[None]:
    """Let the calls of `model` go to `handler` inside the block, masks evaluated for sequences of
    up to `length`.

    The model is to do what it does with eager attention, so its config says nothing else: models
    ask for that name. Inside the block no other eager model can run.
    """
    with ExitStack() as stack:
        stack.enter_context(_implementation(model, _EAGER))
        for interface, function in (
            (AttentionInterface, _attend),
            (AttentionMaskInterface, _make_mask),
        ):
            stack.enter_context(mock.patch.dict(interface._global_mapping, {_EAGER: function}))
        # Rows of a recorded pass are one sequence each; transformers would look at the positions to
        # see whether.
        stack.enter_context(
            mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
        )
        stack.enter_context(handled(handler, length))
        yield


@contextmanager
def handled(handler: Handler, length: int | None = None) -> Iterator[None]:
    """Let the calls of models whose attention is `CACHED` go to `handler` inside the block."""
    token = _ACTIVE.set(_Interception(handler, length))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def is_making_mask() -> bool:
    """Tell whether transformers is making a mask right now."""
    return _ACTIVE.get().making_mask


def configs(model: nn.Module) -> list[Any]:
    """Return the config objects that the modules of a transformers model read their settings from,
    each once.
    """
    found = (getattr(module, "config", None) for module in model.modules())
    return list(
        {id(config): config for config in found if hasattr(config, "_attn_implementation")}.values()
    )


@contextmanager
def _implementation(model: nn.Module, name: str) -> Iterator[None]:
    saved = [(config, config._attn_implementation) for config in configs(model)]
    try:
        for config, _ in saved:
            config._attn_implementation = name
        yield
    finally:
        for config, old in reversed(saved):
            config._attn_implementation = old


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    active = _ACTIVE.get()
    form = active.form(attention_mask)
    own = _own_tensors(module, keywords) if active.length is not None else {}
    return active.handler(
        AttentionCall(module, query, key, value, attention_mask, form, keywords, own)
    ), None


def _own_tensors(module: nn.Module, keywords: dict[str, Any]) -> dict[str, str]:
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return {
        key: name
        for key, value in keywords.items()
        for name, tensor in tensors
        if tensor is value is not None
    }


def _make_mask(
    *, mask_function: MaskRule, attention_mask: torch.Tensor | None = None, **settings: Any
) -> torch.Tensor | None:
    """Return the mask that eager attention gets, and note what it allows."""
    active = _ACTIVE.get()
    active.making_mask = True
    mask: torch.Tensor | None = eager_mask(
        mask_function=mask_function, attention_mask=attention_mask, **settings
    )
    active.making_mask = False
    if mask is not None and active.length is not None:
        form = rule_form(mask_function, active.length) if _no_padding(attention_mask) else None
        active.masks.append((mask, form))
    return mask


def _no_padding(attention_mask: torch.Tensor | None) -> bool:
    """Tell whether a mask of the tokens leaves none out; one without numbers, as in an export, may
    leave out some.
    """
    return attention_mask is None or (
        not torch.compiler.is_compiling() and bool(attention_mask.all())
    )


def rule_form(rule: MaskRule, length: int) -> MaskForm | None:
    """Return what a mask's rule amounts to in sequences of up to `length`, None when it is none of
    the known forms.
    """
    # A thread of its own has none of the modes in which torch.export runs a model: here numbers are
    # wanted.
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(_form, rule, length).result()
        except (
            Exception
        ):  # a rule that depends on more than indices may raise anything: it has no known form
            return None


def _form(rule: MaskRule, length: int) -> MaskForm | None:
    keys, zero = torch.arange(length), torch.tensor(0)

    def row(query: int) -> torch.Tensor:
        return rule(zero, zero, torch.tensor(query), keys).expand(length)

    window = int(row(length - 1).sum())
    candidates = (MaskForm(False), MaskForm(True, window if window < length else None))
    queries = {0, 1, 2, length // 2, length - 1, window - 1, window, window + 1} & set(
        range(length)
    )
    rows = {query: row(query) for query in queries}
    return next(
        (
            form
            for form in candidates
            if all(torch.equal(rows[q], allowed_keys(form, q, keys)) for q in queries)
        ),
        None,
    )


def allowed_keys(form: MaskForm, query: int | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return which keys a query sees, bool."""
    distance = query - keys
    if not form.is_causal:
        return torch.ones_like(distance, dtype=torch.bool)
    return (distance >= 0) & (distance < (form.sliding_window or distance.numel()))


AttentionInterface.register(CACHED, _attend)
