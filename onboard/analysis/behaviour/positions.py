"""Where a transformers model begins to count positions when it is given none."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.spec import Trait
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.hf.architecture import text_config

_ORDINARY_TOKENS = 16
"""Tokens from here on are none of the special ones, which some models do not count."""
_MOST = 8
_OTHER_PADDING = 3


def first_position(config: PretrainedConfig) -> Trait | None:
    """Return the position of a text's first token where that is not 0: "2", or "pad_token_id + 1".

    Learned positions of RoBERTa and its kin lie behind the padding token's own entry in the table.
    Explicit positions are taken as they are, so this is for whoever has none to give. transformers'
    `generate` does give some, from 0 on, where no such model was trained; given positions from the
    first one on it agrees with forward.
    """
    first = _probe(config, None)
    if not first:
        return None
    moved = None if text_config(config).pad_token_id is None else _probe(config, _OTHER_PADDING)
    if moved is not None and moved != first:
        value: str | int = f"pad_token_id + {moved - _OTHER_PADDING}"
    else:
        value = first
    return Trait(
        value=value,
        evidence=f"probe: without position_ids the logits are those of positions from {value} on",
    )


def _probe(config: PretrainedConfig, pad_token_id: int | None) -> int | None:
    """Return the first position of the small model, with another padding token if one is given;
    None: not found.
    """
    small = tiny_config(config)
    if pad_token_id is not None:
        text_config(small).pad_token_id = pad_token_id
    model = build_small(small)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(_ORDINARY_TOKENS, VOCABULARY, (2, 9), generator=generator)
    expected = _logits(model, tokens, None)
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    return next(
        (
            at
            for at in range(_MOST + 1)
            if torch.equal(_logits(model, tokens, places + at), expected)
        ),
        None,
    )


@torch.no_grad()
def _logits(
    model: nn.Module, tokens: torch.Tensor, position_ids: torch.Tensor | None
) -> torch.Tensor:
    mask = torch.ones_like(tokens)
    logits: torch.Tensor = model(
        input_ids=tokens, attention_mask=mask, position_ids=position_ids, use_cache=False
    ).logits
    return logits
