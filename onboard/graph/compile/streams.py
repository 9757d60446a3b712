"""Parts of a graph that run on an auxiliary CUDA stream, beside the rest.

A branch lies between `begin_aux` and `end_aux`; the main stream goes on and meets it in `wait_aux`.
All three are plain functions in the graph, whose order is the order of its nodes. Fork and join are
events, which is all that the capture of a CUDA graph needs to see the branch, too.

Memory: each stream has its own in PyTorch's caching allocator, and what a stream frees is used
again in the order of that stream's work. So a branch's inputs, which are the main stream's, are
kept (as arguments of `wait_aux`) until the branch has been waited for; and its results may be read
by the main stream until the next fork, at which the auxiliary stream waits for all of the main
stream's work before it allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from onboard.graph.fx import nodes_of


@dataclass(frozen=True)
class Fork:
    """An open branch: the stream that goes on beside it, and its own."""

    main: torch.cuda.Stream
    aux: torch.cuda.Stream


@cache
def _aux_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def begin_aux(beside: Tensor) -> Fork | None:
    """Let what follows run on the auxiliary stream of the tensor's device; None where there are no
    streams.
    """
    if not beside.is_cuda or isinstance(beside, FakeTensor):
        return None
    fork = Fork(torch.cuda.current_stream(beside.device), _aux_stream(beside.device))
    if fork.main != fork.aux:
        fork.aux.wait_stream(fork.main)
        torch.cuda.set_stream(fork.aux)
    return fork


def end_aux(
    fork: Fork | None, *results: Tensor
) -> tuple[torch.cuda.Event | None, tuple[Tensor, ...]]:
    """Close a branch: what follows runs on the main stream again, beside it."""
    if fork is None:
        return None, results
    event = fork.aux.record_event()
    torch.cuda.set_stream(fork.main)
    return event, results


def wait_aux(
    ended: tuple[torch.cuda.Event | None, tuple[Tensor, ...]], *kept: Tensor
) -> tuple[Tensor, ...]:
    """Wait for a branch and return its results; `kept` are its inputs, whose memory is not free
    before.
    """
    event, results = ended
    if event is not None:
        torch.cuda.current_stream(results[0].device).wait_event(event)
    return results


def in_one_stream(gm: fx.GraphModule) -> int:
    """Take all branches back into the main stream; return how many there were."""
    joins = nodes_of(gm, wait_aux)
    for join in joins:
        end = join.args[0]
        assert isinstance(end, fx.Node)
        for item in list(join.users):
            result = end.args[1 + int(item.args[1])]  # type: ignore[arg-type]
            assert isinstance(result, fx.Node)
            item.replace_all_uses_with(result)
            gm.graph.erase_node(item)
        for marker in (join, end, end.args[0]):
            assert isinstance(marker, fx.Node)
            gm.graph.erase_node(marker)
    if joins:
        gm.recompile()
    return len(joins)
