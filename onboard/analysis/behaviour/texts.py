"""Whether a model reads texts: each row of `input_ids` one, with one token at a position, and the
whole of it at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onboard.analysis.behaviour.apart import check_causality
from onboard.analysis.tiny.tiny_prompts import prompt, prompts, vocabulary
from onboard.errors import NotCausalError, OnboardError
from onboard.hf.old.given_logits import given_by, last_logits
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

_MOST_ROWS = 16
_ENDS = (5, 12, 20)
"""Lengths of a text's beginnings, each of which is compared with that of one token more."""


def check_rows(model: nn.Module) -> None:
    """Refuse a model to which several rows are one text, as to one that has a row for each of its
    codebooks.
    """
    if (rows := rows_of_a_text(model)) > 1:
        raise OnboardError(
            f"{type(model).__name__} reads {rows} rows of input_ids as one text, a token of each at every position",
            hint="Only texts of one token a position can be generated",
        )


@torch.no_grad()
def rows_of_a_text(model: nn.Module) -> int:
    """Return n where a transformers model runs with n and 2 n rows and with no number between; 1
    where that is none.
    """
    ids = prompt(0, batch=2 * _MOST_ROWS)["input_ids"]
    rows = next((count for count in range(1, _MOST_ROWS + 1) if _runs(model, ids[:count])), 1)
    between = any(_runs(model, ids[:count]) for count in range(rows + 1, 2 * rows))
    return rows if not between and _runs(model, ids[: 2 * rows]) else 1


@torch.no_grad()
def check_ends(model: nn.Module) -> None:
    """Refuse a model whose code gives logits of a text's last token alone, where those that it has
    of the others are not what it gives of the text up to them.
    """
    if not given_by(type(model)).of_last:
        return
    ids = prompt(0, seed=5, tokens=vocabulary(model))["input_ids"]
    logits = model(input_ids=ids).logits
    ends = [last_logits(model, ids[:, : end + 1]) for end in range(ids.shape[1])]
    error = rmse_ratio(logits, torch.stack(ends, dim=1))
    if not error <= SAME:
        raise OnboardError(
            f"{type(model).__name__} gives logits of the last token alone, and other ones of a text"
            f" than of its beginnings (rmse ratio {error:.1e}): it is not causal, or does more at the last",
            hint="Have it give those of every token in a copy of the code",
        )


@torch.no_grad()
def check_lengths(model: nn.Module) -> None:
    """Refuse a model in which what follows a text changes its logits by being there, as positions
    that are counted from the text's end do: it has other logits as the beginning of a longer text.

    One that has other tables for texts beyond some length differs there alone, and is not meant.
    """
    ids = prompt(0, batch=1, seed=6, tokens=vocabulary(model))["input_ids"]
    errors = []
    for end in _ENDS:
        shorter, longer = ids[:, :end], ids[:, : end + 1]
        if not (_runs(model, shorter) and _runs(model, longer)):
            return  # it takes texts of some lengths alone
        one, other = (model(input_ids=each, use_cache=False).logits for each in (shorter, longer))
        errors.append(rmse_ratio(other[:, :end], one))
    if min(errors) > SAME:
        check_causality(model)  # which says more of one that looks at later tokens
        raise NotCausalError(
            f"{type(model).__name__} is not causal: a text has other logits as the beginning of a longer"
            f" one (rmse ratio {max(errors):.1e}), as where positions are counted from its end"
        )


def check_pieces(model: nn.Module) -> None:
    """Refuse a model whose layers run several times in a forward, on some of the text's tokens
    each: what they keep of earlier ones is another thing than a cache of keys and values.
    """
    for inputs in prompts(model):
        if (found := pieces_of_a_text(model, inputs)) is not None:
            path, lengths = found
            pieces = " and ".join(map(str, lengths))
            raise OnboardError(
                f"{type(model).__name__} reads a text in pieces ({path} runs on {pieces} of its tokens):"
                " what it keeps of earlier pieces is no cache that is known here",
                hint="See whether a field of the config has it read texts of the length you need at once",
            )


@torch.no_grad()
def pieces_of_a_text(
    model: nn.Module, inputs: dict[str, torch.Tensor]
) -> tuple[str, list[int]] | None:
    """Return the path of a layer that runs on parts of a text one after the other, and how many
    tokens each has; None where none does.
    """
    length = inputs["input_ids"].shape[1]
    lengths: dict[str, list[int]] = {}
    lists = [item for item in model.named_modules() if isinstance(item[1], nn.ModuleList)]
    layers = [
        (f"{path}.{name}", each) for path, item in lists for name, each in item.named_children()
    ]

    def note(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        if isinstance(given, torch.Tensor) and given.dim() == 3:
            lengths.setdefault(path, []).append(given.shape[1])

    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, path=path: note(path, args, kwargs), with_kwargs=True
        )
        for path, layer in layers
    ]
    try:
        model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    parts = [
        (path, each) for path, each in lengths.items() if len(each) > 1 and sum(each) == length
    ]
    return parts[0] if parts else None


def _runs(model: nn.Module, ids: torch.Tensor) -> bool:
    try:
        model(input_ids=ids, use_cache=False)
    except Exception:  # whatever a model's own code raises for a shape that it does not take
        return False
    return True
