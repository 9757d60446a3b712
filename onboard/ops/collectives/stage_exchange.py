"""What one pipeline stage hands to the next: from one rank to another, the others take no part."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, distributed

from onboard.ops.library import register_op
from onboard.parallel.ranks import current_group


def _processes() -> distributed.ProcessGroup:
    return cast(distributed.ProcessGroup, current_group())  # stages are never threads


def _fake_receive(
    input_ids: Tensor, shape: list[int], dtype: torch.dtype, rank: int, number: int
) -> Tensor:
    return input_ids.new_empty(shape, dtype=dtype)


@register_op(_fake_receive, inserted=True)
def receive_from_stage(
    input_ids: Tensor, shape: list[int], dtype: torch.dtype, rank: int, number: int
) -> Tensor:
    """Receive a tensor that the stage before has computed.

    Args:
        input_ids: any tensor on the device of this rank.
        shape, dtype: of the tensor.
        rank: who has the stage before.
        number: of the tensor among those that it sends, each of which is received once.

    Returns:
        The tensor.
    """
    received = torch.empty(shape, dtype=dtype, device=input_ids.device)
    _processes().recv([received], rank, number).wait()
    return received


def _nothing(input_ids: Tensor, values: list[Tensor], rank: int) -> Tensor:
    return input_ids.new_zeros((*input_ids.shape, 1), dtype=torch.float32)


@register_op(_nothing, inserted=True)
def send_to_stage(input_ids: Tensor, values: list[Tensor], rank: int) -> Tensor:
    """Send tensors to the rank that has the next stage.

    Args:
        input_ids: [batch, tokens].
        values: the tensors, in the order of the numbers that they are received by.
        rank: who has the next stage.

    Returns:
        [batch, tokens, 1] float32, zeros: what stands in the place of logits.
    """
    for number, value in enumerate(values):
        _processes().send([value.contiguous()], rank, number).wait()
    return _nothing(input_ids, values, rank)
