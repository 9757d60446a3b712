"""A text's logits depend on nothing but that text: no later token, no other text of a batch, no mask
that hides nothing, and no name of an attention function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_attn_mask_utils import AttentionMaskConverter

from onboard.analysis.source import module_source
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.errors import EagerDiffersError, NotCausalError, OnboardError
from onboard.hf.codebooks import codebooks_of
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import NOT_CHANGED, SAME

_TEXTS = ((2, 21), (3, 9), (1, 40))
"""Batch and length."""
_REFUSED = re.compile(r"`(\w+)` attention does not support `(softcap)`")
"""What transformers says of arguments that it left out of attention before."""
_WHICH = "_attn_implementation"
_EAGER = 'If eager attention is meant, say so in config.json: "attn_implementation": "eager"'
_OTHER = 7
"""How far another token lies from the one whose place it takes."""


def check_causality(model: nn.Module) -> None:
    """Refuse a model in which a token changes the logits of those before it."""
    if (
        not (
            change := change_by_later(model, from_zero(prompt(0, seed=1, tokens=vocabulary(model))))
        )
        <= NOT_CHANGED
    ):
        name = type(model).__name__
        raise NotCausalError(
            f"{name} is not causal: a token changes the logits of tokens before it ({_shown(change)})"
        )


def looks_ahead(model: nn.Module) -> NotCausalError | None:
    """Return what `check_causality` raises of a model that may not run."""
    try:
        check_causality(model)
    except NotCausalError as error:
        return error
    except Exception:  # whatever a model's own code raises
        return None
    return None


@torch.no_grad()
def change_by_later(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> float:
    """Return how far tokens change the logits of those before them: the largest rmse ratio of any
    ending of a text.

    Code may look ahead in some part of a text alone, so every ending is tried: each row of a batch
    is the first text of `inputs` ([batch, length] each, `input_ids` among them) with other tokens
    from one place on. NaN stays NaN.
    """
    ids = inputs["input_ids"][:1]
    places = torch.arange(ids.shape[1])
    earlier = places < places.unsqueeze(1)
    earlier[0] = True  # this row is the text as it is
    rows = {name: tensor[:1].expand(len(places), -1) for name, tensor in inputs.items()}
    books = codebooks_of(model)
    # Of several codebooks each has another code
    step = books.pack(torch.full((books.count,), _OTHER))
    rows["input_ids"] = torch.where(earlier, ids, (ids + step) % vocabulary(model))
    whole, *others = model(**rows, use_cache=False).logits
    changes = [rmse_ratio(other[:place], whole[:place]) for place, other in enumerate(others, 1)]
    return float(torch.tensor(changes).max())


@torch.no_grad()
def runs_fresh(make: Callable[[], nn.Module], tokens: int) -> bool:
    """Whether a model that is made anew for each runs texts of several lengths, in batches of
    several sizes, without and with a mask: one that fails without that keeps what it computed of
    the last one.
    """
    try:
        for batch, length in _TEXTS:
            text = from_zero(prompt(0, length=length, batch=batch, tokens=tokens))
            make()(**text, use_cache=False)
            mask = torch.ones_like(text["input_ids"])
            make()(**text, attention_mask=mask, use_cache=False)
    except Exception:  # whatever a model's own code raises
        return False
    return True


def _hashes(model: nn.Module) -> str:
    """Return `file.py:12` of a call of Python's `hash` in the files of a model's classes, outside
    torch's; "" where there is none.
    """
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    for source in (module_source(name) for name in names if name.split(".")[0] != "torch"):
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(func=ast.Name(id="hash")):
                    return source.location(node)
    return ""


@torch.no_grad()
def check_repeats(make: Callable[[], nn.Module], tokens: int) -> None:
    """Refuse a model that draws random numbers: two that are made alike, with the same weights, give
    a text different logits. Buffers that checkpoints have are weights.
    """
    inputs = from_zero(prompt(0, seed=8, tokens=tokens))
    found, weights = [], dict[str, Any]()
    for seed in (1, 2):
        model = make()
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        torch.manual_seed(seed)
        found.append(model(**inputs, use_cache=False).logits)
    if not any(bool(logits.isfinite().all()) for logits in found):
        raise OnboardError(
            f"{type(model).__name__} gives no finite numbers with random weights of the usual size:"
            " it rounds them to zeros, and divides by those, say",
            hint="Report this architecture; it cannot be compared so",
        )
    if not (error := rmse_ratio(*found)) <= SAME:
        if place := _hashes(model):
            raise OnboardError(
                f"{type(model).__name__} gives a text other logits each time ({_shown(error)}): it"
                f" calls hash(), at {place}, which gives other numbers in each process",
                hint="Have a copy of the code work its hashes out of the tokens' numbers, in torch",
            )
        raise OnboardError(
            f"{type(model).__name__} draws random numbers: a text has other logits each time"
            f" ({_shown(error)})",
            hint="See whether a field of the config turns that off",
        )


def check_batch(model: nn.Module) -> None:
    """Refuse a model in which a text's logits depend on the other texts of a batch, or on whether
    there are any.
    """
    inputs = from_zero(prompt(0, batch=3, seed=8, tokens=vocabulary(model)))
    first = {name: tensor[:1] for name, tensor in inputs.items()}
    with torch.no_grad():
        one, other = (model(**item, use_cache=False).logits[:1] for item in (inputs, first))
    if not (apart := rmse_ratio(one, other)) <= SAME:
        raise OnboardError(
            f"{type(model).__name__} gives a text other logits in a batch than alone ({_shown(apart)})",
            hint="See whether a field of the config has it compute each text by itself",
        )


@torch.no_grad()
def check_mask(model: nn.Module) -> None:
    """Refuse a model to which a mask that hides nothing is another thing than none: generation by
    transformers passes one.
    """
    inputs = from_zero(prompt(0, seed=8, tokens=vocabulary(model)))
    mask = torch.ones_like(inputs["input_ids"])
    one, other = (
        model(**inputs, **given, use_cache=False).logits for given in ({}, {"attention_mask": mask})
    )
    if not (apart := rmse_ratio(one, other)) <= SAME:
        raise OnboardError(
            f"{type(model).__name__} computes other logits with an attention_mask of ones than with"
            f" none ({_shown(apart)})"
        )


@torch.no_grad()
def check_attention(model: nn.Module, make: Callable[[], nn.Module], length: int = 40) -> None:
    """Refuse a model with eager attention that computes something else with the one that users get,
    which `make` makes it with, for a text of this length: code may leave out a window or a soft cap
    there.

    Where that one does not run, or is not causal, as masks of today make older code, eager
    attention is what there is; but not where it does not run for a soft cap, nor where the code
    asks whether it may do without a mask, which transformers answers today as it did in its time,
    and has attention that then looks ahead.
    """
    inputs = from_zero(prompt(0, length=length, seed=8, tokens=vocabulary(model)))
    try:
        with _answers_to_code() as left_out:
            usual = make()
            other = usual(**inputs, use_cache=False).logits
            change = change_by_later(usual, inputs)
    except Exception as error:  # whatever a model's own code raises
        _refuse_cap(model, error)
        return
    config = getattr(usual, "config", None)
    if getattr(config, _WHICH, None) == "eager":  # older ones may have taken sdpa
        setattr(config, _WHICH, "sdpa")
        try:
            usual(**inputs, use_cache=False)
        except Exception as error:  # as above
            _refuse_cap(model, error)
        setattr(config, _WHICH, "eager")
    name = getattr(config, _WHICH, None)
    if not change <= NOT_CHANGED:
        if not any(left_out):
            return
        as_causal = change_by_later(model, inputs) <= NOT_CHANGED
        raise NotCausalError(
            f"{type(model).__name__} is not causal with {name} attention, which users get"
            f"{'' if as_causal else ', nor with eager'}: a token changes the logits of tokens before"
            f" it ({_shown(change)})",
            hint=_EAGER if as_causal else "",
        )
    one = model(**inputs, use_cache=False).logits
    if not (apart := rmse_ratio(one, other)) <= SAME:
        raise EagerDiffersError(
            f"{type(model).__name__} computes other logits with {name} attention, which users get,"
            f" than with eager attention ({_shown(apart)})",
            hint=_EAGER,
        )


@contextmanager
def _answers_to_code() -> Iterator[list[bool]]:
    """Collect what code is told that asks transformers whether a causal mask may be left out."""
    asked, told = AttentionMaskConverter._ignore_causal_mask_sdpa, list[bool]()

    def answer(*args: Any, **kwargs: Any) -> bool:
        told.append(bool(asked(*args, **kwargs)))
        return told[-1]

    AttentionMaskConverter._ignore_causal_mask_sdpa = staticmethod(answer)
    try:
        yield told
    finally:
        AttentionMaskConverter._ignore_causal_mask_sdpa = staticmethod(asked)


def _refuse_cap(model: nn.Module, error: Exception) -> None:
    """Raise where an error says that attention does not take a soft cap, which it left out before."""
    if (left_out := _REFUSED.search(str(error))) is not None:
        raise OnboardError(
            f"{type(model).__name__} hands {left_out[2]} to {left_out[1]} attention, which users get:"
            " transformers of its time leaves it out there, and today's refuses it",
            hint=_EAGER,
        ) from error


def _shown(error: float) -> str:
    return f"rmse ratio {error:.1e}"
