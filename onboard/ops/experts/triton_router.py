# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""The router of a mixture of experts as one kernel: scores, groups, choice and weights of a token
in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.experts.router import check_scoring, fake_router
from onboard.ops.library import register_op
from onboard.ops.triton.launch import last_contiguous, overlaps, power_of_two, require_device
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def _largest(values):
    return tl.max(tl.max(values, 1), 0)


@triton.jit
def _take_best(choice, index, BIG: tl.constexpr):
    """Return where the largest number is (the first one), and the numbers without it."""
    best = tl.min(tl.min(tl.where(choice == _largest(choice), index, BIG), 1), 0)
    return best, tl.where(index == best, float("-inf"), choice)


@triton.jit
def _group_sums(choice, GROUP_TOP: tl.constexpr):
    """Return the sum of the GROUP_TOP largest numbers of each row."""
    column = tl.arange(0, choice.shape[1])[None, :]
    total = tl.zeros([choice.shape[0]], tl.float32)
    for _ in tl.static_range(GROUP_TOP):
        best = tl.max(choice, 1)
        total += best
        first = tl.min(tl.where(choice == best[:, None], column, choice.shape[1]), 1)
        choice = tl.where(column == first[:, None], float("-inf"), choice)
    return total


@triton.jit
def router_kernel(
    weights_ptr, experts_ptr, logits_ptr, bias_ptr, scale, epsilon, stride,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_TOP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Route one token; its experts are a tile of [groups, experts of a group]."""
    wait_for_inputs(OVERLAP)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group, place, slot = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_TOP)
    index = group[:, None] * SIZE + place[None, :]
    real = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    index = tl.where(real, index, EXPERTS)
    logits = tl.load(logits_ptr + token * stride + index, mask=real, other=float("-inf")).to(
        tl.float32
    )
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - _largest(logits))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + index, mask=real, other=0.0).to(tl.float32)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        sums = _group_sums(choice, GROUP_TOP)
        sums = tl.where(group < GROUPS, sums, float("-inf"))
        kept = tl.zeros([BLOCK_G], tl.int1)
        for _ in tl.static_range(TOP_GROUPS):
            first = tl.min(tl.where(sums == tl.max(sums, 0), group, BLOCK_G), 0)
            kept |= group == first
            sums = tl.where(group == first, float("-inf"), sums)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    weights, experts = tl.zeros([BLOCK_TOP], tl.float32), tl.zeros([BLOCK_TOP], tl.int64)
    for step in tl.static_range(TOP):
        best, choice = _take_best(choice, index, EXPERTS)
        score = tl.sum(tl.sum(tl.where(index == best, scores, 0.0), 1), 0)
        weights = tl.where(slot == step, score, weights)
        experts = tl.where(slot == step, best, experts)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + epsilon)
    tl.store(weights_ptr + token * TOP + slot, weights * scale, mask=slot < TOP)
    tl.store(experts_ptr + token * TOP + slot, experts, mask=slot < TOP)


@register_op(fake_router, row_wise=True)
def triton_moe_router(
    logits: Tensor,
    top_k: int,
    normalize: bool = True,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    epsilon: float = 0.0,
    groups: int = 1,
    top_groups: int = 1,
    group_top: int = 1,
) -> tuple[Tensor, Tensor]:
    """`torch_moe_router` as one kernel; of equal scores the first expert's counts."""
    require_device(logits)
    check_scoring(scoring)
    weights, chosen = fake_router(logits, top_k)
    experts = logits.shape[-1]
    rows = last_contiguous(logits).reshape(-1, experts)
    if len(rows):
        router_kernel[(len(rows),)](
            weights, chosen, rows, bias, scale, epsilon, rows.stride(0),
            EXPERTS=experts, TOP=top_k, GROUPS=groups, TOP_GROUPS=top_groups, GROUP_TOP=group_top,
            SIGMOID=scoring == "sigmoid", NORMALIZE=normalize, HAS_BIAS=bias is not None,
            BLOCK_G=power_of_two(groups), BLOCK_S=power_of_two(experts // groups), BLOCK_TOP=power_of_two(top_k),
            num_warps=1, **overlaps(logits.device),
        )  # fmt: skip
    return weights, chosen
