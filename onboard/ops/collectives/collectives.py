"""Sums and concatenations over the ranks of a run on several devices.

Both are ordinary operators of a graph: without aliasing, the identity where there is one rank, and
every rank calls them in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op
from onboard.parallel.ranks import current_group, current_ranks


@register_op(lambda x, layer_type="unknown": torch.empty_like(x), inserted=True)
def dist_all_reduce(x: Tensor, layer_type: str = "unknown") -> Tensor:
    """Add up a tensor over all ranks.

    Args:
        x: this rank's summand; shape and dtype are the same on every rank.
        layer_type: the kind of layer that it ends, for those who read graphs.

    Returns:
        The sum, as a new tensor.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    if not current_ranks().is_alone:
        current_group().allreduce([total]).wait()
    return total


def _fake_gather(x: Tensor, dim: int, sizes: list[int], layer_type: str = "unknown") -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


@register_op(_fake_gather, inserted=True)
def all_gather(x: Tensor, dim: int, sizes: list[int], layer_type: str = "unknown") -> Tensor:
    """Concatenate a tensor's parts over all ranks, in the order of ranks.

    Args:
        x: this rank's part; parts differ in dimension `dim` at most.
        dim: the dimension that is concatenated.
        sizes: how many entries each rank has there.
        layer_type: the kind of layer that it ends, for those who read graphs.

    Returns:
        The whole, as a new tensor.
    """
    if current_ranks().is_alone:
        return x.clone(memory_format=torch.contiguous_format)
    # One collective takes equal parts: rows come first, and short parts are filled up
    part = x.movedim(dim, 0)
    filled = part.new_zeros((max(sizes), *part.shape[1:]))
    filled[: part.shape[0]] = part
    parts = [torch.empty_like(filled) for _ in sizes]
    current_group().allgather([parts], [filled]).wait()
    whole = torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()
