"""Recognise modules that make keys of blocks of tokens, and those that choose among such keys.

A compressor has two linear layers, for values and for gates, a bias of the gates by the place in a
block, a norm of the pooled entries, and RoPE at the first token of each block. It gives the entries
with a mask of those that a query sees: all whose blocks have ended or, if it has an indexer, those
that this chooses. An indexer pools keys of its own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.probe import Finding, probe_norm
from onboard.analysis.recognise.recorder import ModuleCall, Recording
from onboard.analysis.recognise.scans.scan_modules import bound_arguments
from onboard.analysis.spec_blocks import Block
from onboard.errors import OnboardError
from onboard.ops.sparse.sparse import chosen_keys
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

COMPRESSOR, INDEXER = "compressor", "pooled_indexer"
_Calls = Mapping[str, list[ModuleCall]]


def probe_compressor(module: nn.Module, path: str, recorded: _Calls) -> Finding | None:
    """Recognise a compressor, or an indexer with a pool of its own, by what it gave in the recorded
    calls.
    """
    calls = recorded.get(path, [])
    if not calls or not all(
        _gives_entries(call.output) or _gives_choice(call.output) for call in calls
    ):
        return None
    chooses = _gives_choice(calls[0].output)
    for pool in _pools(module):
        for inputs in _inputs(module, calls[0], pool):
            parts = {**pool, **inputs}
            found = (
                _indexer(module, parts, calls)
                if chooses
                else _compressor(module, path, parts, recorded)
            )
            if found is not None:
                return found
    return None


def _gives_entries(value: Any) -> bool:
    """Whether a value is entries [batch, 1, blocks, dim] and a mask [batch, 1, queries, blocks] or
    None.
    """
    entries, mask = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
    masked = mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)
    return isinstance(entries, Tensor) and entries.dim() == 4 and entries.shape[1] == 1 and masked


def _gives_choice(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 3


def _pools(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the names of the parts that a pool may be made of."""
    biases = [name for name, item in module.named_parameters(recurse=False) if item.dim() == 2]
    norms = {name: width for name, child in module.named_children() if (width := _width(child))}
    rotary = [
        name
        for name, child in module.named_children()
        if hasattr(child, "compute_default_rope_parameters")
    ]
    for bias, (norm, dim), turn in itertools.product(biases, norms.items(), rotary):
        channels = getattr(module, bias).shape[1]
        linears = [name for name, child in module.named_children() if _is_linear(child, channels)]
        if channels not in (dim, 2 * dim) or (kind := _rope_kind(module, turn)) is None:
            continue
        for values, gates in itertools.permutations(linears, 2):
            parts = {"values": values, "gates": gates, "bias": bias, "norm": norm, "rotary": turn}
            yield {**parts, "overlap": channels == 2 * dim, "rope_kind": kind}


def _width(module: nn.Module) -> int:
    """Return the channels of a norm with a weight, 0 of any other module."""
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and probe_norm(module) is not None else 0


def _is_linear(module: nn.Module, channels: int) -> bool:
    return type(module) is nn.Linear and module.out_features == channels


def _rope_kind(module: nn.Module, rotary: str) -> str | None:
    """Return which of its kinds a module asks a rotary embedding for; it has the name of that as an
    attribute.
    """
    kinds = getattr(getattr(module, rotary), "layer_types", [])
    own = {**vars(type(module)), **vars(module)}.values()
    return next((item for item in own if isinstance(item, str) and item in kinds), None)


def _inputs(
    module: nn.Module, call: ModuleCall, pool: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    """Yield the names of the arguments that are hidden states, positions and (where there is one)
    another input.
    """
    given = bound_arguments(module, call)
    states = [key for key, item in given.items() if isinstance(item, Tensor) and item.dim() == 3]
    positions = [
        key for key, item in given.items() if isinstance(item, Tensor) and item.dtype == torch.int64
    ]
    wide = getattr(module, pool["values"]).in_features
    for x, at in itertools.product(states, positions):
        if given[x].shape[-1] == wide:
            yield from (
                {"x": x, "positions": at, "other": other}
                for other in (*(s for s in states if s != x), x)
            )


def _compressor(
    module: nn.Module, path: str, parts: dict[str, Any], recorded: _Calls
) -> Finding | None:
    """Return the finding where the entries are those of the parts, and the mask is of what has
    ended or is chosen.
    """
    children = [
        name
        for name, _ in module.named_children()
        if all(map(_gives_choice, _outputs(recorded, path, name)))
    ]
    choosing = [name for name in children if _outputs(recorded, path, name)]
    if len(choosing) > 1:
        return None
    indexer = choosing[0] if choosing else None
    chosen = _outputs(recorded, path, indexer) if indexer else [None] * len(recorded[path])
    if not all(
        _fits(module, parts, call, own) for call, own in zip(recorded[path], chosen, strict=True)
    ):
        return None
    passed = {} if indexer is None else _passed(module, path, indexer, recorded)
    evidence = "probe: torch_gated_pool gives the same entries"
    return Finding(COMPRESSOR, {**parts, "indexer": indexer, "passed": passed}, [evidence])


def _outputs(recorded: _Calls, path: str, name: str) -> list[Any]:
    return [call.output for call in recorded.get(f"{path}.{name}", [])]


def _passed(module: nn.Module, path: str, indexer: str, recorded: _Calls) -> dict[str, str]:
    """Return which of a compressor's arguments each tensor is that its indexer gets: parameter ->
    argument.
    """
    own = bound_arguments(module, recorded[path][0])
    inner = bound_arguments(getattr(module, indexer), recorded[f"{path}.{indexer}"][0])
    tensors = {key: item for key, item in inner.items() if isinstance(item, Tensor)}
    return {
        key: next(name for name, each in own.items() if each is item)
        for key, item in tensors.items()
    }


def _fits(
    module: nn.Module, parts: dict[str, Any], call: ModuleCall, chosen: Tensor | None
) -> bool:
    given = bound_arguments(module, call)
    entries, mask = call.output
    hidden, positions = given[parts["x"]], given[parts["positions"]]
    ours = pooled(module, parts, hidden, positions)[
        :, _size(module, parts) - 1 :: _size(module, parts)
    ]
    if ours.shape != entries[:, 0].shape or not rmse_ratio(ours, entries[:, 0]) < SAME:
        return bool(entries.numel() == 0 and ours.numel() == 0)
    if mask is None:
        return bool(hidden.shape[1] == 1)
    blocks = torch.arange(ours.shape[1])
    seen = (
        blocks < ((torch.arange(hidden.shape[1]) + 1) // _size(module, parts)).unsqueeze(-1)
    ).expand(mask.shape)
    seen = seen if chosen is None else seen & chosen_keys(chosen, ours.shape[1])
    return bool(((mask == 0) == seen).all() and ((mask == -torch.inf) == ~seen).all())


def _indexer(module: nn.Module, parts: dict[str, Any], calls: list[ModuleCall]) -> Finding | None:
    """Return the finding where the choice is that of the block indexer, for some linear layers and
    number of keys.

    Positive factors of all scores are left out: they change nothing about which are the highest.
    """
    dim = getattr(module, parts["norm"]).weight.shape[0]
    linears = {name: child for name, child in module.named_modules() if type(child) is nn.Linear}
    left = {
        name: child
        for name, child in linears.items()
        if name not in (parts["values"], parts["gates"])
    }
    counts = [key for key, value in vars(module).items() if type(value) is int and value > 0]
    for (query, weights), top_k in itertools.product(itertools.permutations(left, 2), counts):
        heads = left[weights].out_features
        if left[query].out_features != heads * dim:
            continue
        found = {**parts, "query": query, "weights": weights, "top_k": top_k}
        if all(
            _chooses(variant, found, call) for variant in _variants(module, top_k) for call in calls
        ):
            return Finding(INDEXER, found, ["probe: torch_block_indexer chooses the same entries"])
    return None


def _variants(module: nn.Module, top_k: str) -> Iterator[nn.Module]:
    """Yield the module, and copies that are to choose fewer."""
    yield module
    for count in (1, 2, 3):
        variant = copy.deepcopy(module)
        setattr(variant, top_k, min(count, getattr(module, top_k)))
        yield variant


def _chooses(module: nn.Module, parts: dict[str, Any], call: ModuleCall) -> bool:
    """Whether the block indexer chooses what the module did; equal scores leave that open, of which
    there are few.
    """
    given = bound_arguments(module, call)
    try:
        expected = module(*call.args, **call.kwargs)
        ours = _choice(module, parts, *(given[parts[name]] for name in ("x", "other", "positions")))
    except REFUSED:
        return False  # of another width
    blocks = given[parts["x"]].shape[1] // _size(module, parts)
    return torch.equal(chosen_keys(ours, blocks), chosen_keys(expected, blocks))


def _choice(
    module: nn.Module, parts: dict[str, Any], hidden: Tensor, other: Tensor, positions: Tensor
) -> Tensor:
    """Return what the template of an indexer computes."""
    dim = getattr(module, parts["norm"]).weight.shape[0]
    entries = pooled(module, parts, hidden, positions)
    query = module.get_submodule(parts["query"])(other).unflatten(-1, (-1, dim))
    query = _turned(query, *_tables(module, parts, query, positions))
    weights = module.get_submodule(parts["weights"])(hidden)
    ops: Any = torch.ops.onboard
    top_k, size = getattr(module, parts["top_k"]), _size(module, parts)
    return ops.torch_block_indexer(query, entries, weights, top_k, size)  # type: ignore[no-any-return]


def check_keys_beside(model: nn.Module, recordings: list[Recording], blocks: list[Block]) -> None:
    """Refuse attention to more keys than the text has tokens, unless a part of it is known that
    makes these.
    """
    makers = {block.class_name for block in blocks if block.kind == COMPRESSOR}
    for call in (call for recording in recordings for call in recording.attention if call.beside):
        parts = {type(part).__name__ for part in model.get_submodule(call.path).modules()}
        if not parts & makers:
            raise OnboardError(
                f"{call.path} attends to {call.beside} more keys than the text has tokens: "
                "what makes these keys has no canonical form"
            )


def pooled(
    module: nn.Module, parts: Mapping[str, Any], hidden: Tensor, positions: Tensor
) -> Tensor:
    """Return what the templates compute of the entries, [batch, sequence, dim]."""
    values, gates, bias, norm = (
        getattr(module, parts[name]) for name in ("values", "gates", "bias", "norm")
    )
    ops: Any = torch.ops.onboard
    entries = norm(ops.torch_gated_pool(values(hidden), gates(hidden), bias, parts["overlap"]))
    size = _size(module, parts)
    return _turned(
        entries.unsqueeze(2), *_tables(module, parts, entries, positions // size * size)
    ).squeeze(2)


def _size(module: nn.Module, parts: Mapping[str, Any]) -> int:
    return len(getattr(module, parts["bias"]))


def _tables(
    module: nn.Module, parts: Mapping[str, Any], like: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = getattr(module, parts["rotary"])(like, positions, parts["rope_kind"])
    return cos, sin


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last channels of x [batch, sequence, heads, dim], neighbours as pairs."""
    still = x.shape[-1] - 2 * cos.shape[-1]
    rest, turned = x[..., :still], x[..., still:]
    freqs = torch.complex(cos.float(), sin.float())
    turned, _ = torch.ops.onboard.torch_rope_with_complex_freqs(turned, turned, freqs, 2)
    return torch.cat([rest, turned], dim=-1)
