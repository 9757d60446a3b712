"""Sums and concatenations over the ranks of a run on several devices.

Both are ordinary operators of a graph: without aliasing, the identity where there is one rank, and
every rank calls them in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from onboard.ops.library import register_op
from onboard.parallel.peer_memory import PeerMemory
from onboard.parallel.ranks import current_group, current_ranks, peer_memory

_LONG = 2**22
"""Bytes from which a sum is made of sums of parts."""


def _fake_sum(x: Tensor, layer_type: str = "unknown", residual: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


@register_op(_fake_sum, inserted=True)
def dist_all_reduce(
    x: Tensor, layer_type: str = "unknown", residual: Tensor | None = None
) -> Tensor:
    """Add up a tensor over all ranks.

    Args:
        x: this rank's summand; shape and dtype are the same on every rank.
        layer_type: the kind of layer that it ends, for those who read graphs.
        residual: what is added to the sum, the same on every rank; of x's shape and dtype.

    Returns:
        The sum, as a new tensor.
    """
    if current_ranks().is_alone:
        return x.clone(memory_format=torch.contiguous_format) if residual is None else x + residual
    if (total := _summed_by_kernels(x, residual)) is not None:
        return total
    if x.device.type == "cuda" and x.numel() * x.element_size() >= _LONG:
        return _sum_of_parts(x.contiguous(), residual)
    total = x.clone(memory_format=torch.contiguous_format)
    current_group().allreduce([total]).wait()
    return total if residual is None else total.add_(residual)


def _memory_beside(x: Tensor) -> PeerMemory | None:
    """Return the memory that the ranks share where a tensor is, if they do."""
    return peer_memory() if x.device.type == "cuda" else None


def _summed_by_kernels(x: Tensor, residual: Tensor | None) -> Tensor | None:
    """Return what the ranks' own kernels make of a tensor, where they can."""
    if (memory := _memory_beside(x)) is None:
        return None
    from onboard.ops.collectives.triton_long_sum import long_sum
    from onboard.ops.collectives.triton_peer_sum import can_exchange, peer_sum

    if not can_exchange(x, x.nbytes):
        return None
    add = peer_sum if can_exchange(x) else long_sum
    return add(x.contiguous(), memory, None if residual is None else residual.contiguous())


def _sum_of_parts(x: Tensor, residual: Tensor | None) -> Tensor:
    """Add up a long tensor, a part on each rank, which also adds that part of the residual.

    The library's sums are written over what they add up; its sums of parts are not, so that nothing
    is copied.
    """
    ranks = current_ranks()
    size = x.numel() // ranks.world_size
    own, even = slice(ranks.rank * size, (ranks.rank + 1) * size), slice(size * ranks.world_size)
    rest = slice(even.stop, None)
    total = torch.empty_like(x)
    given, sums = x.view(-1), total.view(-1)
    added = None if residual is None else residual.reshape(-1)
    distributed.reduce_scatter_tensor(sums[own], given[even])
    if added is not None:
        sums[own] += added[own]
    distributed.all_gather_into_tensor(sums[even], sums[own])
    if rest.start < x.numel():
        sums[rest] = given[rest]
        distributed.all_reduce(sums[rest])
        if added is not None:
            sums[rest] += added[rest]
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
    if len(set(sizes)) == 1 and (gathered := _gathered_by_kernels(x, dim)) is not None:
        return gathered
    # One collective takes equal parts: short ones are filled up, and what fills them is left out
    part, longest = x.movedim(dim, 0).contiguous(), max(sizes)
    if part.shape[0] < longest:
        part = torch.cat([part, part.new_zeros((longest - part.shape[0], *part.shape[1:]))])
    parts = part.new_empty((len(sizes), *part.shape))
    current_group().allgather([list(parts)], [part]).wait()
    if min(sizes) == longest:
        return parts.flatten(0, 1).movedim(0, dim).contiguous()
    whole = torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


def _gathered_by_kernels(x: Tensor, dim: int) -> Tensor | None:
    """Return what the ranks' own kernels make of parts of one shape, where they can."""
    if (memory := _memory_beside(x)) is None:
        return None
    from onboard.ops.collectives.triton_peer_sum import can_exchange, most_gathered, peer_gather

    if not can_exchange(x, most_gathered(memory)):
        return None
    return peer_gather(x.contiguous(), dim, memory)


def tell(tokens: Tensor) -> None:
    """Overwrite token ids, [rows] int64, with those of the first rank."""
    if (memory := _memory_beside(tokens)) is not None:
        from onboard.ops.collectives.triton_peer_sum import peer_gather

        # No half of an id is a pattern that the kernel cannot send: 32 bits of a small number
        told = peer_gather(tokens.view(torch.float32), 0, memory)
        if told is not None:
            tokens.copy_(told.view(torch.int64)[: len(tokens)])
            return
    distributed.broadcast(tokens, 0)
