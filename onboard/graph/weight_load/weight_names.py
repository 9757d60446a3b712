"""Which checkpoint tensor belongs to which parameter, and what it means when one is left over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn

from onboard.graph.weight_load.safetensors_folder import TensorMeta

_LEGACY_BUFFER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(self_)?att(entio)?n\.(masked_)?bias)$")
"""Causal masks and frequencies that old releases of transformers saved with the weights."""
_DRAFT_HEAD = re.compile(r"(\w+\.)*?(\w+_)?mtp(_\w+)?(?=\.)")
"""Modules of heads for multi-token prediction, which lie beside a model's layers in some releases."""


def declared_renaming(identifiers: Sequence[str]) -> Callable[[str], str]:
    """Return how transformers renames a checkpoint's tensors when it loads them into its own
    module.

    `identifiers` are class names and a model type; the first one that transformers knows counts.
    Conversions that also change values (stacked experts) are none of ours: model files follow the
    checkpoint there.
    """

    def declared() -> Iterable[object]:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        return next(filter(None, map(get_checkpoint_conversion_mapping, identifiers)), ())

    return _renaming(declared)


def module_renaming(model: nn.Module) -> Callable[[str], str]:
    """Return how transformers renames a checkpoint's tensors for its own `model`, by the rules of
    all its parts.
    """

    def declared() -> Iterable[object]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        own: Any = model
        rules: list[object] = get_model_conversion_mapping(own)
        return rules

    return _renaming(declared)


def _renaming(declared: Callable[[], Iterable[object]]) -> Callable[[str], str]:
    """Return the renaming by the declared rules, which are looked up only when a name asks for
    them.
    """

    @cache
    def renamings() -> list[Any]:
        from transformers.core_model_loading import WeightRenaming

        return [each for each in declared() if isinstance(each, WeightRenaming)]

    def rename(name: str) -> str:
        for renaming in renamings():
            name, _ = renaming.rename_source_key(name)
        return name

    return rename


def match_names(
    wanted: Collection[str], available: Collection[str], rename: Callable[[str], str] = str
) -> dict[str, str]:
    """Return wanted name -> available name: equal ones first, then renamed ones, then those that
    differ by one prefix.

    A checkpoint saved from the base model lacks its prefix ("wte.weight" for
    "transformer.wte.weight"), one saved from a larger model has another in addition. The prefix
    that settles most names is the one used; what it does not settle is left out.
    """
    matches = {name: name for name in wanted if name in available}
    renamed = {rename(name): name for name in available if name not in matches}
    matches |= {
        name: renamed.pop(name) for name in wanted if name in renamed and name not in matches
    }
    missing = [name for name in wanted if name not in matches]
    if not (prefix := _likeliest_prefix(missing, renamed)):
        return matches
    strip, text = prefix
    for name in missing:
        candidate = name.removeprefix(text) if strip else text + name
        if candidate in renamed:
            matches[name] = renamed[candidate]
    return matches


def _likeliest_prefix(missing: Collection[str], spare: Collection[str]) -> tuple[bool, str] | None:
    """Return (True, prefix to strip) or (False, prefix to add) that brings most of `missing` to a
    name in `spare`.
    """
    missing, spare = set(missing), set(spare)
    votes = Counter(
        (True, prefix) for name in missing for prefix, rest in _splits(name) if rest in spare
    )
    votes.update(
        (False, prefix) for name in spare for prefix, rest in _splits(name) if rest in missing
    )
    return max(votes, key=lambda vote: (votes[vote], vote), default=None)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield every ("a.b.", "c") split of a dotted name, the whole name left out."""
    for position, character in enumerate(name):
        if character == ".":
            yield name[: position + 1], name[position + 1 :]


def explain_unused(
    unused: Mapping[str, TensorMeta], used: Collection[str], rename: Callable[[str], str] = str
) -> tuple[list[str], list[str]]:
    """Sort tensors that no parameter takes into (facts to show, names that prove the model wrong).

    A layer beyond the model's (a reduced run, a draft layer), a draft head and a whole tree that the model does
    not have (a vision tower) are left out for a reason, and so are legacy buffers and zeros. Anything else
    inside a module that the model has would change what it computes. That a tensor is a layer's may
    show only in the name that transformers gives it.
    """
    left_out = {name: what for name, meta in unused.items() if (what := _says_nothing(name, meta))}
    for renamed in (str, rename):
        rest = [name for name in unused if name not in left_out]
        modules = (
            {prefix for name in used for prefix, _ in _splits(renamed(name))} if rest else set()
        )
        left_out |= {name: tree for name in rest if (tree := _foreign_tree(renamed(name), modules))}
    counts = Counter(left_out[name] for name in unused if name in left_out)
    facts = [
        f"the model leaves out {what} ({count} tensors of the checkpoint)"
        for what, count in counts.items()
    ]
    return facts, [name for name in unused if name not in left_out]


def _foreign_tree(name: str, modules: Collection[str]) -> str | None:
    """Return the layer or the whole tree that a tensor lies in and the model does not have; None:
    it lies elsewhere.
    """
    if (head := _DRAFT_HEAD.match(name)) and f"{head[0]}." not in modules:
        return head[0]
    foreign = next((prefix for prefix, _ in _splits(name) if prefix not in modules), name)
    is_tree = foreign.endswith(".") and (
        foreign.count(".") == 1 or foreign.split(".")[-2].isdigit()
    )
    return foreign.rstrip(".") if is_tree else None


def set_aside(
    unused: Mapping[str, TensorMeta], rename: Callable[[str], str], modules: Sequence[str]
) -> tuple[dict[str, TensorMeta], list[str]]:
    """Return the tensors that belong to none of `modules`, paths in transformers' module tree, and
    a fact for each.
    """
    owners = {name: _owner(rename(name), modules) for name in unused}
    counts = Counter(owner for owner in owners.values() if owner is not None)
    facts = [
        f"{owner} stays transformers' own module ({count} tensors of the checkpoint)"
        for owner, count in counts.items()
    ]
    return {name: meta for name, meta in unused.items() if owners[name] is None}, facts


def _owner(name: str, modules: Sequence[str]) -> str | None:
    return next(
        (module for module in modules if name == module or name.startswith(f"{module}.")), None
    )


def _says_nothing(name: str, meta: TensorMeta) -> str | None:
    """Return what a tensor is that no model misses, None for any other."""
    if meta.is_zero:
        return "biases that are zero"
    return "legacy buffers" if _is_legacy_buffer(name, meta) else None


def _is_legacy_buffer(name: str, meta: TensorMeta) -> bool:
    # A mask is [1, 1, n, n] and its filler a scalar; the bias of a layer has one dimension.
    is_mask = len(meta.shape) == 4 or meta.shape in ((), (1,))
    return bool(_LEGACY_BUFFER.search(name)) and (is_mask or name.endswith("inv_freq"))
