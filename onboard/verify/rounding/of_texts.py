"""Whether a model's logits are the reference's but for rounding, by many texts: of a single one chance
decides which of the two rounds more, where a small model makes much of each rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import torch
from torch import nn

from onboard.hf.copied_model import copied
from onboard.verify.error import rmse_ratio
from onboard.verify.rounding.in_float64 import InFloat64
from onboard.verify.tolerances import MOST_ROUNDING

_TEXTS = 24
_AS_MUCH = 2.0
"""How many times the median of the reference's errors ours may be. An error of another kind is in each
text, and would be no more than the reference's own rounding."""


def rounds_alike(
    reference: nn.Module, model: nn.Module, inputs: Mapping[str, torch.Tensor], words: int
) -> bool:
    """Whether a model errs about as little as the reference, both against the reference in float64, on
    texts of so many words as long as that of `inputs` ([batch, length] each, `input_ids` among them);
    not where that does not run.
    """
    try:
        ours, theirs = _errors(reference, model, inputs, words)
    except Exception:  # whatever a model's own code raises in float64
        return False
    return max(ours) <= MOST_ROUNDING and median(ours) <= _AS_MUCH * median(theirs)


@torch.no_grad()
def _errors(
    reference: nn.Module, model: nn.Module, inputs: Mapping[str, torch.Tensor], words: int
) -> tuple[list[float], list[float]]:
    """Return the errors of texts, ours and the reference's own."""
    exact = InFloat64(copied(reference))
    generator = torch.Generator().manual_seed(0)
    ours, theirs = list[float](), list[float]()
    for _ in range(_TEXTS):
        ids = torch.randint(words, inputs["input_ids"].shape, generator=generator)
        text = {**inputs, "input_ids": ids}
        whole = exact(**text, use_cache=False).logits
        ours.append(rmse_ratio(model(**text).logits, whole))
        theirs.append(rmse_ratio(reference(**text, use_cache=False).logits, whole))
    return ours, theirs
