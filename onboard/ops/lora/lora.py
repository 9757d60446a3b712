"""What low-rank adapters add to the outputs of linear layers (Hu et al. 2021, "LoRA",
arXiv:2106.09685, equation 3), each token by its own adapter."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op


def same_outputs(outputs: Tensor, *_: object, **__: object) -> Tensor:
    """Return what the op's result is like."""
    return outputs.new_empty(outputs.shape)


@register_op(same_outputs, inserted=True)
def torch_lora(
    outputs: Tensor,
    input: Tensor,
    down: Tensor,
    up: Tensor,
    sizes: list[int],
    adapters: Tensor | None = None,
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

    Returns:
        [..., out] in the outputs' dtype.
    """
    if adapters is None:
        return outputs.clone()
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
