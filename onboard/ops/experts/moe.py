"""Mixture of experts: the feed-forward networks that a router chose for each token, weighted and
added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.activation import Activation, activation_function


def fake_moe(x: Tensor, *_: object, **__: object) -> Tensor:
    """Return an empty output of a mixture."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_SCHEMA = (
    "(Tensor x, Tensor selected_experts, Tensor routing_weights, Tensor[] w1_weight, Tensor[] w2_weight, "
    'Tensor[] w3_weight, bool is_gated_mlp=True, str act_fn="silu", Tensor[]? w1_bias=None, Tensor[]? w2_bias=None, '
    "Tensor[]? w3_bias=None, float? limit=None, float? alpha=None, float up_offset=0., "
    "float? gate_cap=None, float? up_cap=None) -> Tensor"
)


@register_op(
    fake_moe,
    schema=_SCHEMA,
    experts=True,
    feed_forward=True,
    no_pieces="torch_moe computes every expert for every token where it is captured",
    described="Mixture of experts, [batch, seq, hidden] to the same.",
    hinted=True,
)
def torch_moe(
    x: Tensor,
    selected_experts: Tensor,
    routing_weights: Tensor,
    w1_weight: list[Tensor],
    w2_weight: list[Tensor],
    w3_weight: list[Tensor],
    is_gated_mlp: bool = True,
    act_fn: str = "silu",
    w1_bias: list[Tensor] | None = None,
    w2_bias: list[Tensor] | None = None,
    w3_bias: list[Tensor] | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    gate_cap: float | None = None,
    up_cap: float | None = None,
) -> Tensor:
    """Sparse mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), the experts chosen already.

    Each token's output is the sum over its chosen experts of routing weight times w2(act(w1(x)) *
    w3(x)), without the factor w3(x) when the experts are not gated. An id outside [0, experts) adds
    nothing: that is how a rank skips the experts of others.

    Args:
        x: [..., hidden].
        selected_experts: [..., k] int64, the same tokens in the same order.
        routing_weights: [..., k].
        w1_weight, w3_weight: gate and up projection of each expert, [intermediate, hidden]; no w3
            unless gated.
        w2_weight: down projection of each expert, [hidden, intermediate].
        is_gated_mlp: whether there is a w3.
        act_fn: a key of `onboard.ops.linear.activation.ACTIVATIONS`.
        w1_bias, w3_bias, w2_bias: [intermediate], [intermediate] and [hidden] of each expert, or
            None.
        limit: bound of the gate from above and of the up projection from both sides, or None.
        alpha: the gate's activation is gate * sigmoid(alpha * gate) instead of act_fn, unless None.
        up_offset: what is added to the (bounded) up projection.
        gate_cap: c; of an activation gate * sigmoid(gate), the factor gate becomes c * tanh(gate /
            c), or None.
        up_cap: the same of the up projection.

    Returns:
        [..., hidden] in x's dtype.

    Raises:
        UsageError: unknown activation.
    """
    act = expert_activation(act_fn, alpha, gate_cap)

    def expert(index: int, chosen: Tensor) -> Tensor:
        gate = _layer(chosen, index, w1_weight, w1_bias)
        up = _layer(chosen, index, w3_weight, w3_bias) if is_gated_mlp else None
        return _layer(gated(gate, up, act, limit, up_offset, up_cap), index, w2_weight, w2_bias)

    return run_experts(x, selected_experts, routing_weights, len(w1_weight), expert)


def run_experts(
    x: Tensor,
    selected_experts: Tensor,
    routing_weights: Tensor,
    experts: int,
    expert: Callable[[int, Tensor], Tensor],
    residual: Tensor | None = None,
) -> Tensor:
    """Return the sum of what each token's experts make of it, times their routing weights, and of
    `residual`.

    `expert` gets an expert's number and its tokens [tokens, hidden], and returns as many rows.
    """
    tokens, selected, weights = map(_flat, (x, selected_experts, routing_weights))
    out = torch.zeros_like(tokens)
    for index in _experts_to_run(selected, experts):
        _add(out, tokens, selected == index, weights, partial(expert, index))
    return with_residual(out.view(x.shape), residual)


def with_residual(y: Tensor, residual: Tensor | None) -> Tensor:
    """Return y [..., hidden] with what is added to it, the same tokens in the same order."""
    return y if residual is None else y + residual.reshape(y.shape)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _layer(x: Tensor, index: int, weights: list[Tensor], biases: list[Tensor] | None) -> Tensor:
    return F.linear(x, weights[index], biases[index] if biases else None)


def _experts_to_run(selected: Tensor, experts: int) -> Iterable[int]:
    """Return the experts that were chosen; all of them where that cannot be known."""
    if _are_values_unknown(selected):
        return range(experts)
    chosen: list[int] = selected.unique().tolist()  # type: ignore[no-untyped-call]
    return [index for index in chosen if 0 <= index < experts]


def _are_values_unknown(tensor: Tensor) -> bool:
    """Whether a graph is captured or exported, which cannot depend on values."""
    is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return is_captured or torch.compiler.is_exporting()


def _add(
    out: Tensor,
    tokens: Tensor,
    chosen: Tensor,
    routing_weights: Tensor,
    expert: Callable[[Tensor], Tensor],
) -> None:
    """Add an expert's weighted output to the tokens that chose it; `chosen` is [tokens, k]."""
    if _are_values_unknown(tokens):
        # The expert sees every token, and is added where it was chosen.
        weight = torch.where(chosen, routing_weights, 0).sum(dim=-1, keepdim=True)
        out += torch.where(chosen.any(dim=-1, keepdim=True), expert(tokens) * weight, 0).to(
            out.dtype
        )
        return
    rows, slots = torch.where(chosen)
    if rows.numel():
        weighted = expert(tokens[rows]) * routing_weights[rows, slots, None]
        out.index_add_(0, rows, weighted.to(out.dtype))


def expert_activation(act_fn: str, alpha: float | None, gate_cap: float | None) -> Activation:
    """Return an expert's activation, as `torch_moe` says."""
    if alpha is None and gate_cap is None:
        return activation_function(act_fn)
    return _swish(alpha or 1.0, gate_cap)


def _swish(alpha: float, cap: float | None) -> Activation:
    return lambda gate: _capped(gate, cap) * torch.sigmoid(gate * alpha)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def gated(
    gate: Tensor,
    up: Tensor | None,
    act: Activation,
    limit: float | None,
    up_offset: float,
    up_cap: float | None,
) -> Tensor:
    """Return what goes into an expert's second product, as `torch_moe` says."""
    up = None if up is None else _capped(up, up_cap)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = None if up is None else up.clamp(-limit, limit)
    if up is None:
        return act(gate)
    return act(gate) * (up + up_offset if up_offset else up)
