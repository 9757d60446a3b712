"""Random values for all that a checkpoint fills."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_NORM = 0.7
_DRAWN = "drawn_buffers"


def randomize(model: nn.Module, seed: int, center: float = _NORM) -> None:
    """Fill every floating-point tensor of the state dict, norm weights, biases and sinks too, with
    random values.

    Those of vectors lie around `center`, those of norms around 0.7. Recurrent mixers take their
    decay and their step from vectors through exp and softplus: with 0.7 they forget within a few
    tokens, with a negative center they remember for long. Norms of another size would let rounding
    errors grow from layer to layer. Tables that the model works out for itself (decays by distance)
    stay: with other numbers it would not be the model that it is; those that it draws
    (`note_drawn`) do not.
    """
    tables = {name for name, buffer in model.named_buffers() if is_table(buffer)}
    tables -= vars(model).get(_DRAWN, frozenset())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and name not in tables:
                around = _NORM if name.endswith(".weight") else center
                wide = max(tensor.shape[-1:], default=1) or 1  # some have no items
                scale, shift = (wide**-0.5, 0.0) if tensor.dim() > 1 else (0.3, around)
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + shift)
        for norm in model.modules():
            if isinstance(norm, _BatchNorm) and norm.running_var is not None:
                norm.running_var.abs_()  # a statistic: there is no negative variance
    fill_integers(model, generator)


def note_drawn(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Note at a model which of its buffers a constructor fills at random, as some fill embeddings:
    `make` returns a model made alike, in which they are others.
    """
    state = model.state_dict()
    tables = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in state and buffer.is_floating_point() and buffer.dim() > 1 and is_table(buffer)
    }
    if tables:
        others = dict(make().named_buffers())
        drawn = {name for name, buffer in tables.items() if not _alike(buffer, others[name])}
        vars(model)[_DRAWN] = frozenset(drawn)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, equal_nan=True)


def fill_integers(model: nn.Module, generator: torch.Generator) -> None:
    """Fill the tables of integers that checkpoints fill with zeros and ones, which tables of any
    numbers may have.

    So an expert of a token by a table is one of two, not the first for all.
    """
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dtype == torch.int64 and tensor.dim() > 1 and not is_table(tensor):
                tensor.copy_(torch.randint(2, tensor.shape, generator=generator))


def is_table(buffer: torch.Tensor) -> bool:
    """Whether a buffer was computed: what checkpoints fill starts as one number everywhere, and
    a single number as 0, 1 or without bound.
    """
    if buffer.dim() == 0:
        return not (buffer.isinf() or float(buffer) in (0.0, 1.0))
    return buffer.numel() > 1 and bool((buffer != buffer.flatten()[0]).any())
