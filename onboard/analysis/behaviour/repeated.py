"""Whether a transformers model treats several of the same token in an arbitrary order."""

from __future__ import annotations

import torch
from torch import nn

from onboard.analysis.spec import Trait
from onboard.analysis.tiny.tiny_prompts import prompts
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME

_FEW = 3


def repeated_tokens(tiny: nn.Module) -> Trait | None:
    """Return the trait of a model whose logits of repeated tokens depend on how many tokens come
    later; None: another.

    A top-k over the keys' own scores, which are equal where the tokens are, does that: which of
    them it takes is up to the sort, and so to the number of keys. Only what the model says of texts
    without repetition can be compared.
    """
    inputs = prompts(tiny)[0]
    ids = inputs["input_ids"]
    generator = torch.Generator().manual_seed(6)
    distinct = torch.stack(
        [torch.randperm(VOCABULARY, generator=generator)[: ids.shape[1]] for _ in ids]
    )
    # None of the special tokens
    repeated = torch.randint(_FEW, ids.shape, generator=generator) + 16
    error = _dependence(tiny, {**inputs, "input_ids": repeated})
    if error <= SAME or not _dependence(tiny, {**inputs, "input_ids": distinct}) <= SAME:
        return None
    change = f"rmse ratio {error:.1e}"
    said = (
        f"probe: later tokens change the logits of repeated ones ({change}), not of distinct ones"
    )
    return Trait(value="arbitrary", evidence=said)


@torch.no_grad()
def _dependence(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Return the largest rmse ratio of the logits of a text's beginning to those that the whole
    text has there.
    """
    whole, length = model(**inputs, use_cache=False).logits, inputs["input_ids"].shape[1]
    errors = []
    for cut in (length // 2, length - 4, length - 1):
        begun = {key: tensor[:, :cut] for key, tensor in inputs.items()}
        errors.append(rmse_ratio(model(**begun, use_cache=False).logits, whole[:, :cut]))
    return worst(errors)
