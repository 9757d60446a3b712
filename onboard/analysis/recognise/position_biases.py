"""Position biases that attention modules are handed: is one linear in the key's position
(ALiBi)?
"""

from __future__ import annotations

import torch

from onboard.analysis.recognise.mask_makers import FAR_BELOW
from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.spec import Trait
from onboard.verify.tolerances import SAME


def position_bias(recording: Recording) -> dict[str, Trait]:
    """Return the trait of a model whose modules get a bias that is linear in the key's position, by
    head.
    """
    for path, calls in recording.modules.items():
        numbered = {f"argument {place}": value for place, value in enumerate(calls[0].args, 1)}
        for name, value in (numbered | calls[0].kwargs).items():
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

    Keys after each query may be masked in it. None for what is no bias: whole numbers, fewer than
        three dimensions, the same for all keys, one row for all heads or the same for each, if
        these are positions.
    """
    if not bias.is_floating_point() or bias.dim() < 3 or bias.shape[-1] < 3:
        return None
    seen = _seen(bias)
    steps = torch.where(seen, bias.double(), 0).diff(dim=-1)
    first = steps[..., -1:, :1]
    slopes = set(first.flatten().tolist())
    heads = len(slopes) > 1 or (bias.shape[-3] > 1 and slopes != {1.0})
    if not steps.any() or not heads:
        return None
    both = seen[..., 1:] & seen[..., :-1]
    size = torch.where(seen, bias.double(), 0).abs().max()
    return float(torch.where(both, steps - first, 0).abs().max() / size)


def _seen(bias: torch.Tensor) -> torch.Tensor:
    """Return which keys each query sees, in the shape of a bias: all, or none that is later."""
    every = torch.ones_like(bias, dtype=torch.bool)
    later = every.triu(1)
    masked = bias.shape[-2] == bias.shape[-1] and bool((bias[later] <= FAR_BELOW).all())
    return ~later if masked else every
