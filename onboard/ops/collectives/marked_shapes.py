"""What a model file says of ranks beside its layers: where their summands are added up, and which
sizes in reshapes and splits are those of all ranks together.

A file computes the whole model, however many ranks there are, until its graph is divided: there the
sum is its input, and the others are what PyTorch's are. Export puts those in their place.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.library import register_op


@register_op(marks=True)
def all_reduce(x: Tensor, layer_type: str = "unknown") -> Tensor:
    """Mark a value that is a sum over ranks once they divide the layer; `dist_all_reduce` adds up.

    Args:
        x: any tensor.
        layer_type: the kind of layer that it ends.

    Returns:
        The same values, as a new tensor.
    """
    return x.clone()


@register_op(marks=True)
def view(
    x: Tensor, shape: list[int], tp_scaled_dim: int = -1, layer_type: str = "unknown"
) -> Tensor:
    """Give a tensor another shape.

    Args:
        x: any tensor.
        shape: sizes on one device, one of them may be -1.
        tp_scaled_dim: the dimension of the result of which each rank has a share.
        layer_type: the kind of layer.

    Returns:
        A new tensor.
    """
    return x.reshape(shape).clone()


@register_op(marks=True)
def split_with_sizes(
    x: Tensor,
    split_sizes: list[int],
    dim: int = -1,
    enable_sharding: bool = False,
    layer_type: str = "unknown",
) -> list[Tensor]:
    """Cut a dimension into pieces.

    Args:
        x: any tensor.
        split_sizes: of the pieces on one device.
        dim: the dimension.
        enable_sharding: whether each rank has a share of each piece.
        layer_type: the kind of layer.

    Returns:
        The pieces, as new tensors.
    """
    return [piece.clone() for piece in x.split_with_sizes(split_sizes, dim)]
