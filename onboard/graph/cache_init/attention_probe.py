"""Is a transformers model's own attention what the canonical op computes? Both get the same random
numbers.

The interface hands over tensors and keywords, and each model's eager function may do with them what
it likes. So every kind of call that a pass has recorded is computed twice: by the function of the
model's file, and by `torch_attention`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from onboard.errors import OnboardError
from onboard.graph.export.hf_attention import AttentionCall, allowed_keys
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

_EAGER_FUNCTION = "eager_attention_forward"
_SEED = 20


def check_calls(model: nn.Module, calls: Sequence[AttentionCall]) -> None:
    """Raise `OnboardError` for the first call whose canonical form would compute something else."""
    paths = {module: path for path, module in model.named_modules()}
    kinds = {_kind(call): call for call in reversed(calls)}
    for call in kinds.values():
        if problem := _problem(call):
            raise OnboardError(
                f"the attention of {paths[call.module]} cannot be replaced: {problem}"
            )


def _kind(call: AttentionCall) -> Any:
    """Return what calls have in common that are computed alike: all but the numbers in their
    tensors.
    """
    sizes = tuple(
        tensor.shape[index] for tensor in (call.query, call.key, call.value) for index in (1, 3)
    )
    settings = {
        key: type(value) if isinstance(value, torch.Tensor | tuple) else value
        for key, value in call.keywords.items()
    }
    return type(call.module), call.mask is None, call.form, sizes, repr(sorted(settings.items()))


def _problem(call: AttentionCall) -> str:
    if call.mask is None:
        return "it has no mask, so it is not causal"
    if call.form is None:
        return "its mask depends on more than positions"
    if not call.form.is_causal:
        return "it sees later tokens"
    eager = vars(sys.modules[type(call.module).__module__]).get(_EAGER_FUNCTION)
    if eager is None:
        return f"its file has no {_EAGER_FUNCTION} to compare with"
    try:
        error = compare(eager, call)
    except (
        Exception
    ) as failure:  # a model's own code may raise anything outside of its forward pass
        return (
            f"its {_EAGER_FUNCTION} cannot be run by itself ({type(failure).__name__}: {failure})"
        )
    return (
        ""
        if error <= SAME
        else f"its {_EAGER_FUNCTION} computes something else (error {error:.1e})"
    )


def compare(eager: Callable[..., Any], call: AttentionCall) -> float:
    """Return rmse(canonical - eager) / rmse(eager) on random float32 numbers of the call's shapes,
    on the CPU.
    """
    material = partial(_material, torch.Generator().manual_seed(_SEED))
    twin = copy.copy(call.module)
    twin.__dict__["_parameters"] = {
        name: _parameter(material(p)) for name, p in call.module._parameters.items()
    }
    twin.__dict__["_buffers"] = {name: material(b) for name, b in call.module._buffers.items()}
    query, key, value = (material(tensor) for tensor in (call.query, call.key, call.value))
    keywords = tree_map(material, call.keywords) | {
        word: getattr(twin, name) for word, name in call.own.items()
    }
    with torch.no_grad():
        expected, _ = eager(
            twin, query, key, value, _mask(call, query, key), **{**keywords, "dropout": 0.0}
        )
        settings = (call.scale, keywords.get("s_aux"), call.window, call.logit_cap)
        actual = torch.ops.onboard.torch_attention(
            query, key, value, None, 0.0, True, *settings, "bnsd"
        )
    actual, expected = actual.transpose(1, 2).double(), expected.double()
    if actual.shape != expected.shape:
        raise ValueError(f"it returns {list(expected.shape)}, not {list(actual.shape)}")
    return rmse_ratio(actual, expected)


def _mask(call: AttentionCall, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask of the call's form as eager attention gets it: [batch, 1, queries, keys],
    added to the scores.
    """
    assert call.form is not None
    allowed = allowed_keys(
        call.form, torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    )
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return mask.expand(query.shape[0], 1, *mask.shape)


def _parameter(value: Any) -> Any:
    return nn.Parameter(value, requires_grad=False) if isinstance(value, torch.Tensor) else value


def _material(generator: torch.Generator, tensor: Any) -> Any:
    """Return random numbers in the place of a tensor, which may have none yet; anything else as it
    is.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    shape = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    if tensor.is_floating_point():
        return torch.randn(shape, generator=generator)
    return torch.zeros(shape, dtype=tensor.dtype)
