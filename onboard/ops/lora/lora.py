"""What low-rank adapters add to the outputs of linear layers (Hu et al. 2021, "LoRA",
arXiv:2106.09685, equation 3), each token by its own adapter."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.linear.fused import torch_silu_and_mul


def empty_result(outputs: Tensor, activation: str) -> Tensor:
    """Return what the op's result is like."""
    size = outputs.shape[-1]
    return outputs.new_empty((*outputs.shape[:-1], size // 2 if activation else size))


def fake_lora(
    outputs: Tensor, input: Tensor, down: Tensor, up: Tensor, sizes: list[int],
    adapters: Tensor | None = None, activation: str = "",
) -> Tensor:  # fmt: skip
    """Return what the op's result is like, from its arguments."""
    return empty_result(outputs, activation)


@register_op(fake_lora, inserted=True)
def torch_lora(
    outputs: Tensor,
    input: Tensor,
    down: Tensor,
    up: Tensor,
    sizes: list[int],
    adapters: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """Add to the outputs of a linear layer, or of several side by side, what each token's adapter
    adds: up(down(input)).

    All adapters are computed for all tokens and those of other tokens are left out, so that the
    host need not know which there are.

    Args:
        outputs: [..., out] of the layers.
        input: [..., in], which they have in common.
        down: [adapters, layers * rank, in], each layer's after the other's; zeros where an adapter
            has a smaller rank.
        up: [adapters, rank, out], times the adapter's scale.
        sizes: the outputs of each layer; their sum is out.
        adapters: [...] int64, for each token 0 for none, or 1 + the index of its adapter; None:
            no token has one.
        activation: what `torch_silu_and_mul` then does with the halves; "" for nothing.

    Returns:
        [..., out], or [..., out / 2] behind an activation, in the outputs' dtype.
    """
    adapted = (
        outputs.clone() if adapters is None else _adapted(outputs, input, down, up, sizes, adapters)
    )
    return torch_silu_and_mul(adapted, activation) if activation else adapted


def _adapted(
    outputs: Tensor, input: Tensor, down: Tensor, up: Tensor, sizes: list[int], adapters: Tensor
) -> Tensor:
    count, rank = up.shape[:2]
    x = input.reshape(-1, input.shape[-1])
    own = adapters.reshape(-1, 1) == torch.arange(1, count + 1, device=adapters.device)
    inner = (x @ down.flatten(0, 1).T).view(-1, count, len(sizes), rank)
    inner = torch.where(own[:, :, None, None], inner, 0.0)
    added = [
        inner[:, :, layer].flatten(1) @ part.flatten(0, 1)
        for layer, part in enumerate(torch.split(up, sizes, dim=2))
    ]
    return outputs + torch.cat(added, dim=1).view(outputs.shape)
