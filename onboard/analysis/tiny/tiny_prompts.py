"""Prompts for a tiny model, and what it wants them to be: a mask, positions, where texts begin."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from onboard.analysis import repository
from onboard.analysis.tiny.tiny_sizes import ORIGINAL_POSITIONS, VOCABULARY
from onboard.hf.codebooks import codebooks_of
from onboard.hf.copied_model import copied
from onboard.hf.given_inputs import hands_no_mask
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

_LAST = 8
"""Tokens: what becomes of one may show only once a block of them is whole."""
_COUNTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_BELOW_LENGTH: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def vocabulary(model: nn.Module) -> int:
    """Return how many tokens a tiny transformers model has."""
    codebooks = codebooks_of(model)
    return VOCABULARY if codebooks.count == 1 else codebooks.tokens


def prompt(
    start: int, length: int = 21, batch: int = 2, seed: int = 0, tokens: int = VOCABULARY
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `position_ids` [batch, length]; row i begins at position start + 3
    i.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(tokens, (batch, length), generator=generator)
    positions = start + 3 * torch.arange(batch).unsqueeze(1) + torch.arange(length)
    return {"input_ids": ids, "position_ids": positions}


def prompts(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return prompts for a transformers model, on both sides of `ORIGINAL_POSITIONS`.

    A model that counts positions by itself, or is causal nowhere else, gets rows that begin at
    zero.
    """
    tokens = vocabulary(model)
    if not begins_at_zero(model):
        return [
            prompt(2, seed=1, tokens=tokens),
            prompt(ORIGINAL_POSITIONS + 6, seed=2, tokens=tokens),
        ]
    long = prompt(0, length=ORIGINAL_POSITIONS + 6, seed=2, tokens=tokens)
    return [from_zero(prompt(0, seed=1, tokens=tokens)), from_zero(long)]


def from_zero(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a prompt with the positions that a model counts by itself."""
    batch, length = inputs["input_ids"].shape
    return {**inputs, "position_ids": torch.arange(length).expand(batch, length).contiguous()}


def counts_positions(model: nn.Module) -> bool:
    """Whether a transformers model pays no heed to `position_ids`: it counts tokens, or knows no
    positions.
    """
    if model not in _COUNTS:
        _COUNTS[model] = _counts(model)
    return _COUNTS[model]


def _counts(model: nn.Module) -> bool:
    inputs = prompt(0, seed=3, tokens=vocabulary(model))
    stretched = {**inputs, "position_ids": inputs["position_ids"] * 2}
    if positions_below_length(model):
        inputs = from_zero(inputs)
        stretched = {**inputs, "position_ids": inputs["position_ids"].flip(1)}
    # Without one, gaps count as the borders of packed sequences
    mask = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        one, other = (
            model(**item, attention_mask=mask, use_cache=False).logits
            for item in (inputs, stretched)
        )
    return bool(torch.equal(one, other))


def begins_at_zero(model: nn.Module) -> bool:
    """Whether a transformers model wants texts that begin at position zero.

    It counts positions by itself; or it has a table of as many positions as the text has tokens;
    or it counts blocks of tokens from the text's first one on and shows them by position, so that
    elsewhere, and only there, a token changes the logits of those before it.
    """
    if positions_below_length(model):
        return True
    here, there = (prompt(start, batch=1, seed=3, tokens=vocabulary(model)) for start in (0, 9))
    return counts_positions(model) or (sees_ahead(model, there) and not sees_ahead(model, here))


def positions_below_length(model: nn.Module) -> bool:
    """Whether a transformers model fails at positions that its texts are too short for, or that
    are so far from the text's first: it cuts its table of positions to the text's length.
    """
    if model not in _BELOW_LENGTH:
        there = prompt(9, batch=1, seed=3, tokens=vocabulary(model))
        apart = {**there, "position_ids": there["position_ids"] * 2}
        fails = not (runs(model, there) and runs(model, apart))
        _BELOW_LENGTH[model] = fails and runs(model, from_zero(there))
    return _BELOW_LENGTH[model]


def runs_as_it_is(model: nn.Module) -> bool:
    """Whether a transformers model runs with tokens alone; where it needs a mask or positions, it is
    given them from now on, a mask as truth values where it needs these, and no mask where one token
    has none, or no positions where it runs with none alone, or keeps what it would for later tokens
    where it runs so alone. A copy is run: a first run may change weights, or leave things behind.
    """
    model = copied(model)
    inputs = from_zero(prompt(0, seed=3, tokens=vocabulary(model)))
    mask = torch.ones_like(inputs["input_ids"])
    if runs(model, inputs):
        one = {key: tensor[:, :1] for key, tensor in inputs.items()}
        fails = not runs(model, {**inputs, "attention_mask": mask})
        if fails and hands_no_mask(model, mask):
            repository.spare_masks(type(model), always=True)
        elif fails and runs(model, {**inputs, "attention_mask": mask.bool()}):
            repository.give_truth_masks(type(model))
        elif runs(model, one) and not runs(model, {**one, "attention_mask": mask[:, :1]}):
            repository.spare_masks(type(model))
    elif runs(model, {**inputs, "attention_mask": mask}):
        repository.give_masks(type(model))
    elif runs(model, {"input_ids": inputs["input_ids"]}):
        repository.spare_positions(type(model))
        return runs_as_it_is(model)
    elif runs(model, {**inputs, "attention_mask": mask}, use_cache=True):
        repository.give_caches(type(model))
        return runs_as_it_is(model)
    else:
        return False
    if not runs(model, {"input_ids": inputs["input_ids"]}):
        repository.give_positions(type(model))
    return True


@torch.no_grad()
def runs(model: nn.Module, inputs: dict[str, torch.Tensor], *, use_cache: bool = False) -> bool:
    """Whether a transformers model takes some inputs."""
    try:
        model(**inputs, use_cache=use_cache)
    except Exception:  # whatever a model's own code raises
        return False
    return True


def sees_ahead(model: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether the last tokens of a prompt change the logits of those before them."""
    later = {**inputs, "input_ids": inputs["input_ids"].clone()}
    later["input_ids"][:, -_LAST:] = (later["input_ids"][:, -_LAST:] + 7) % vocabulary(model)
    with torch.no_grad():
        one, other = (model(**item, use_cache=False).logits[:, :-_LAST] for item in (inputs, later))
    return not rmse_ratio(one, other) <= SAME


def first_token_is_plain(model: nn.Module) -> bool:
    """Whether a transformers model gives a text of one token the logits that the first token of a
    longer one has.
    """
    same = []
    for inputs in prompts(model):
        first = {key: tensor[:, :1] for key, tensor in inputs.items()}
        with torch.no_grad():
            one, other = (model(**item, use_cache=False).logits[:, :1] for item in (first, inputs))
        same.append(torch.allclose(one, other, rtol=1e-5, atol=1e-5))
    return all(same)
