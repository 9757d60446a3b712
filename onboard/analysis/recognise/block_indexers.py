"""Recognise the choice of blocks of keys for sparse attention: a module that gives a mask of the
chosen keys.

It has one linear layer for queries and keys, which are normalised each in its own way and rotated.
The key of a block is the mean of its tokens' keys, normalised and rotated as the block's first
token is.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.probe import Finding, probe_norm
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.scans.scan_modules import bound_arguments
from onboard.ops.sparse.sparse import chosen_keys

_SMALL = (1, 2, 3)
_PARTS = ("proj", "query_norm", "key_norm", "block_size", "top_k")


def probe_block_indexer(module: nn.Module, calls: list[ModuleCall]) -> Finding | None:
    """Recognise an indexer of blocks, and the attributes that are the size of a block and how many
    are chosen.
    """
    if not calls or not all(_is_mask(call.output) for call in calls):
        return None
    linears = [name for name, child in module.named_children() if type(child) is nn.Linear]
    norms = [name for name, child in module.named_children() if probe_norm(child) is not None]
    if len(linears) != 1 or len(norms) != 2 or len(list(module.children())) != 3:
        return None
    if (inputs := _inputs(module, calls[0])) is None:
        return None
    for both_norms, counts in itertools.product(
        itertools.permutations(norms), itertools.permutations(_counts(module), 2)
    ):
        parts = dict(zip(_PARTS, (linears[0], *both_norms, *counts), strict=True)) | inputs
        if all(
            _fits(variant, parts, call) for variant in _variants(module, parts) for call in calls
        ):
            return Finding(
                "block_indexer", parts, ["probe: torch_block_indexer chooses the same keys"]
            )
    return None


def _inputs(module: nn.Module, call: ModuleCall) -> dict[str, str] | None:
    """Return the names of the arguments that are hidden states and RoPE's tables; None where there
    are others.
    """
    given = bound_arguments(module, call)
    hidden = [key for key, item in given.items() if isinstance(item, Tensor) and item.dim() == 3]
    tables = [key for key, item in given.items() if isinstance(item, tuple) and len(item) == 2]
    return {"x": hidden[0], "tables": tables[0]} if len(hidden) == len(tables) == 1 else None


def _is_mask(value: Any) -> bool:
    """Whether a value tells for each query which keys it sees, [batch, 1, queries, keys]."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.bool
        and value.dim() == 4
        and value.shape[1] == 1
    )


def _counts(module: nn.Module) -> list[str]:
    return [key for key, value in vars(module).items() if type(value) is int and value > 0]


def _variants(module: nn.Module, parts: dict[str, str]) -> Iterator[nn.Module]:
    """Yield the module, and copies in which one of the attributes in question is another one."""
    yield module
    for name, value in itertools.product((parts["block_size"], parts["top_k"]), _SMALL):
        variant = copy.deepcopy(module)
        setattr(variant, name, min(value, getattr(module, name)))
        yield variant


def _fits(module: Any, parts: dict[str, str], call: ModuleCall) -> bool:
    given = bound_arguments(module, call)
    try:
        expected = module(*call.args, **call.kwargs)
        chosen = _chosen(module, parts, given[parts["x"]], *given[parts["tables"]])
    except REFUSED:
        return False
    return torch.equal(chosen_keys(chosen, expected.shape[-1]), expected)


def _chosen(module: Any, parts: dict[str, str], hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what the template of a block indexer computes."""
    ops: Any = torch.ops.onboard
    proj, query_norm, key_norm, size, top_k = (getattr(module, parts[name]) for name in _PARTS)
    dim = key_norm.weight.shape[0]
    both = proj(hidden)
    query, key = query_norm(both[..., :-dim].unflatten(-1, (-1, dim))), both[..., -dim:]
    last = torch.arange(size) - size + 1 + torch.arange(hidden.shape[1]).unsqueeze(1)
    last = last.clamp(min=0)
    key = key_norm(key[:, last].mean(dim=2)).unsqueeze(2)
    query, _ = ops.torch_rope_with_explicit_cos_sin(query, query, cos, sin, 2)
    key, _ = ops.torch_rope_with_explicit_cos_sin(
        key, key, cos[:, last[:, 0]], sin[:, last[:, 0]], 2
    )
    return ops.torch_block_indexer(query, key.squeeze(2), None, top_k, size, expand=True)  # type: ignore[no-any-return]
