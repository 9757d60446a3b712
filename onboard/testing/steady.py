"""Which tokens a block leaves where they are when its input is rounded otherwise: half precision
tells of these alone.

A router takes the experts of the best scores. Where two are as good as each other up to the dtype's
rounding, another order of the same sums takes the other one, and the token ends up elsewhere, which
says nothing of what computed it. transformers' own block tells which tokens these are: they move
far when its input moves by one step of the dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Change = Callable[[torch.Tensor], torch.Tensor]

_DRAWS = 16
_FAR = 10
"""Steps of the dtype, relative to the output's size, which no rounding of the input moves a token
by itself.
"""
_MOST_LEFT_OUT = 1 / 3


@dataclass(frozen=True)
class Again:
    """A call of transformers' block that can be made again, on hidden states that differ a
    little.
    """

    block: nn.Module
    bound: inspect.BoundArguments
    """Its arguments; of a whole model the first are tokens, whose embeddings differ then."""

    @torch.no_grad()
    def __call__(self, change: Change) -> torch.Tensor:
        """Return the first tensor that the block gives for changed hidden states [batch, sequence,
        hidden].
        """
        arguments = pytree.tree_map(copied, dict(self.bound.arguments))  # a block may work in place
        name, first = next(iter(arguments.items()))
        if first.is_floating_point():
            return self._output(arguments | {name: change(first)})
        embeddings: nn.Module = self.block.get_input_embeddings()  # type: ignore[operator]
        handle = embeddings.register_forward_hook(lambda _, __, output: change(output))
        try:
            return self._output(arguments)
        finally:
            handle.remove()

    def _output(self, arguments: dict[str, Any]) -> torch.Tensor:
        bound = inspect.BoundArguments(self.bound.signature, arguments)
        value = self.block(*bound.args, **bound.kwargs)
        return next(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def copied(value: Any) -> Any:
    """Return a copy of a tensor, or of a list, which code may fill, and anything else as it is."""
    if isinstance(value, list):
        return [*map(copied, value)]
    return value.clone() if isinstance(value, torch.Tensor) else value


def steady_tokens(again: Again, output: torch.Tensor) -> torch.Tensor:
    """Return which tokens of a block's half-precision `output` [batch, sequence, size] stay,
    [batch, sequence] bool.

    All where more than a third do not: those that were left would be no test of the block.
    """
    eps = torch.finfo(output.dtype).eps
    far = _FAR * eps * output.float().square().mean().sqrt()
    steady = torch.ones(output.shape[:2], dtype=torch.bool, device=output.device)
    for draw in range(_DRAWS):
        other = again(partial(_rounded_otherwise, draw=draw))
        moved = other.float() - output.float()
        steady &= moved.square().mean(-1).sqrt() <= far
    return steady if float((~steady).float().mean()) <= _MOST_LEFT_OUT else torch.ones_like(steady)


def _rounded_otherwise(hidden: torch.Tensor, draw: int) -> torch.Tensor:
    """Return a tensor each of whose numbers is moved by a step of its dtype up or down, or not at
    all.
    """
    generator = torch.Generator().manual_seed(draw)
    steps = (torch.randint(3, hidden.shape, generator=generator) - 1).to(hidden.device)
    return (hidden.float() * (1 + torch.finfo(hidden.dtype).eps * steps)).to(hidden.dtype)
