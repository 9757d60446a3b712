"""Position biases that attention modules are handed: is one linear in the key's position
(ALiBi)?
"""

from __future__ import annotations

import torch

from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.spec import Trait
from onboard.verify.tolerances import SAME


def position_bias(recording: Recording) -> dict[str, Trait]:
    """Return the trait of a model whose modules get a bias that is linear in the key's position, by
    head.
    """
    for path, calls in recording.modules.items():
        for name, value in calls[0].kwargs.items():
            if (
                isinstance(value, torch.Tensor)
                and (error := deviation(value)) is not None
                and error <= SAME
            ):
                where = f"{name} of {path} is linear in the key's position within {error:.0e}, in slopes of each head's"
                return {"position_bias": Trait(value="alibi", evidence=f"probe: {where}")}
    return {}


def deviation(bias: torch.Tensor) -> float | None:
    """Return how far a tensor [..., heads, queries, keys] is from slopes times positions, relative
    to its size.

    None for what is no bias: whole numbers, fewer than three dimensions, the same for all heads or
        all keys.
    """
    if not bias.is_floating_point() or bias.dim() < 3 or bias.shape[-1] < 3:
        return None
    steps = bias.double().diff(dim=-1)
    slopes = steps[..., 0, 0].flatten()
    if not steps.any() or len(set(slopes.tolist())) < 2:
        return None
    size = bias.double().abs().max()
    return float((steps - steps[..., :1, :1]).abs().max() / size)
