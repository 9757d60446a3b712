"""What loading a checkpoint into transformers' model would find wrong, known from names, shapes and
dtypes alone.

transformers itself does it, by its own rules of renaming, stacking and splitting: on the meta
device, where tensors have no values, so that it takes no memory and reads no weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from onboard.graph.weight_load.safetensors_folder import TensorMeta
from onboard.graph.weight_load.weight_names import explain_unused, match_names, module_renaming
from onboard.hf.hf_model import missing_towers
from onboard.hf.quiet import quiet_transformers

Shape = tuple[int, ...]

_UNKNOWN = TensorMeta((0,), torch.float32, 0)
"""Stands for a tensor that transformers makes of several, and then has no use for."""


@dataclass(frozen=True)
class Rehearsal:
    """What a load comes to."""

    misfits: list[str]
    """Each says of a tensor what is in the checkpoint and what the model needs."""
    facts: list[str]
    """What is left out for a reason."""


def rehearse_load(model: Any, tensors: Mapping[str, TensorMeta]) -> Rehearsal:
    """Load a checkpoint's tensors into `model`, transformers' own on the meta device, which is of
    no use afterwards.
    """
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    rename = module_renaming(model)
    load = _load(model, tensors)
    plain = not load.spare and all(meta.dtype.is_floating_point for meta in tensors.values())
    # One by one, which takes its time
    names = {} if plain else {rename(name): name for name in tensors}
    spare = {name: tensors[names[name]] if name in names else _UNKNOWN for name in load.spare}
    shapes = load.shapes | {
        name: (spare[source].shape, tuple(expected[name].shape))
        for name, source in load.prefixed.items()
        if spare[source] is not _UNKNOWN and spare[source].shape != tuple(expected[name].shape)
    }
    left_out = {name: spare[name] for name in sorted(spare.keys() - load.prefixed.values())}
    taken = _without_foreign(names.keys() - spare.keys(), left_out, expected, model)
    facts, unknown = explain_unused(left_out, expected.keys() | taken)
    for path, packages in missing_towers(model).items():
        unknown = [name for name in unknown if not name.startswith(f"{path}.")]
        facts.append(f"{path} is left out: it needs the packages {' and '.join(packages)}")
    if ignored := [name for name in unknown if name in load.ignored]:
        facts.append(
            f"transformers' model leaves out {ignored[0]} and {len(ignored) - 1} more tensors on purpose"
        )
    misfits = [
        *(f"it has no {name}" for name in sorted(load.missing - load.broken.keys())),
        *(
            f"{name} is {list(found)}, not {list(wanted)}"
            for name, (found, wanted) in sorted(shapes.items())
        ),
        *(
            f"{name} cannot be made of its parts ({why})"
            for name, why in sorted(load.broken.items())
        ),
        *(
            f"the model has no use for {names.get(name, name)}"
            for name in unknown
            if name not in load.ignored
        ),
        *_integers(expected, tensors, names, load, f"{model.base_model_prefix}."),
    ]
    return Rehearsal(misfits, facts)


def _without_foreign(
    names: Set[str], left_out: Collection[str], expected: Collection[str], model: Any
) -> Set[str]:
    """Return the names of tensors that are in the model: those that are a part of one that is left
    out, as experts of a layer beyond the model's, lie in a module that it does not have.
    """
    prefix = f"{model.base_model_prefix}."
    own = {
        module
        for name in expected
        for each in (name, prefix + name, name.removeprefix(prefix))
        for module in _modules(each)
    }
    foreign = {module for name in left_out for module in _modules(name)} - own
    return {name for name in names if foreign.isdisjoint(_modules(name))} if foreign else names


def _modules(name: str) -> Iterator[str]:
    """Yield the paths of all modules that a tensor lies in."""
    while name := name.rpartition(".")[0]:
        yield name


def tied_in(model: Any, tensors: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the names of a checkpoint's tensors that transformers' `model` has as one weight."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    rename = module_renaming(model)
    names = {rename(name): name for name in tensors} if tied else {}
    for target, source in tied.items():
        if target in names and source in names:
            yield names[source], names[target]


@dataclass(frozen=True)
class _Load:
    """What transformers found; names are those of its model."""

    missing: set[str]
    shapes: dict[str, tuple[Shape, Shape]]
    """Found and needed."""
    broken: dict[str, str]
    """Tensors that could not be made of several, and why."""
    spare: set[str]
    """What the model has no place for."""
    ignored: set[str]
    """Those of `spare` that its class expects in checkpoints."""
    prefixed: dict[str, str]
    """Names of the model whose tensors are in `spare`, under one prefix more or less."""


def _load(model: Any, tensors: Mapping[str, TensorMeta]) -> _Load:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    values = {
        name: torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        for name, meta in tensors.items()
    }
    how = LoadStateDictConfig(
        device_map={"": "meta"}, weight_mapping=get_model_conversion_mapping(model)
    )
    with quiet_transformers():
        info, _ = convert_and_load_state_dict_in_model(model, values, how)
        spare = set(info.unexpected_keys)
        prefixed = match_names(sorted(info.missing_keys), sorted(spare))
        info.missing_keys -= prefixed.keys()
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(info)
    shapes = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info.mismatched_keys}
    broken = {name: _last(text) for name, text in info.conversion_errors.items()}
    return _Load(
        set(info.missing_keys), shapes, broken, spare, spare - info.unexpected_keys, prefixed
    )


def _integers(
    expected: Mapping[str, torch.Tensor],
    tensors: Mapping[str, TensorMeta],
    renamed: Mapping[str, str],
    load: _Load,
    prefix: str,
) -> Iterator[str]:
    """Yield what is wrong with integers in the place of weights, which transformers would cast
    without a word.
    """
    for name, stored in renamed.items():
        if tensors[stored].dtype.is_floating_point:
            continue
        names = (name, prefix + name, name.removeprefix(prefix))
        place = next((expected[each] for each in names if each in expected), None)
        left_out = place is None and any(each in load.spare for each in names)
        if not left_out and (place is None or place.is_floating_point()):
            yield f"{stored} is {str(tensors[stored].dtype).removeprefix('torch.')}, not floating-point numbers"


def _last(text: str) -> str:
    return text.strip().splitlines()[-1].removeprefix("Error: ")
