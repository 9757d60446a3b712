"""Where in a checkpoint a model's parameters and buffers are, and what of the checkpoint has no
use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import torch

from onboard.errors import OnboardError
from onboard.graph.weight_load.converted_weights import Source, converted
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.graph.weight_load.weight_names import (
    declared_renaming,
    explain_unused,
    match_names,
    module_renaming,
    set_aside,
)

if TYPE_CHECKING:
    from onboard.graph.factory import ModelFactory
    from onboard.graph.weight_load.converted import ConvertedCheckpoint

WRONG_MODEL = "The checkpoint and the model differ: onboard the model again"


def find_sources(
    wanted: Mapping[str, Sequence[str]],
    buffers: Sequence[str],
    unread: Collection[str],
    checkpoint: Checkpoint | ConvertedCheckpoint,
    factory: ModelFactory,
    *,
    is_part: bool = False,
) -> tuple[dict[str, Source], list[str]]:
    """Return where each part is, under any of the names that `wanted` has for it, and facts about
    what is left out.

    The weights `unread` belong to the model, which does not run them (a decoder's cross attention).
    A persistent buffer that the checkpoint lacks keeps its initial value, which is a fact. Raises
    `OnboardError` when the two sides differ. Of a graph that `is_part` of a model the checkpoint has
    more.
    """
    available, rename = checkpoint.names(), _declared_renaming(factory)
    matches = match_names([*chain(*wanted.values()), *buffers, *unread], available, rename)
    found = {
        part: Source((matches[name],))
        for part, names in wanted.items()
        if (name := _first(names, matches))
    }
    others = [part for part in wanted if part not in found]
    found |= converted(others, available, _identifiers(factory), rename)
    if missing := [part for part in wanted if part not in found]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise OnboardError(f"the checkpoint has no {missing[0]}{more}", hint=WRONG_MODEL)
    used = {*matches.values(), *chain(*(source.names for source in found.values()))}
    unused = {name: meta for name, meta in available.items() if name not in used}
    facts: list[str] = []
    if not isinstance(checkpoint, Checkpoint):
        facts.extend(checkpoint.explain(unused, used))
        unused = {}
    unused = {} if is_part else unused
    unused, aside = set_aside(unused, rename, factory.eager_modules)
    explained, wrong = explain_unused(unused, used, rename)
    if wrong:
        raise OnboardError(
            f"the model has no use for {wrong[0]} of the checkpoint ({len(wrong)})",
            hint=WRONG_MODEL,
        )
    facts.extend([*aside, *explained])
    facts.extend(
        f"the checkpoint has no {name}, a buffer" for name in buffers if name not in matches
    )
    return found | {name: Source((matches[name],)) for name in buffers if name in matches}, facts


def check_ties(
    names: Sequence[Sequence[str]], checkpoint: Checkpoint, factory: ModelFactory
) -> None:
    """Raise `OnboardError` where a checkpoint has several tensors for one weight, which is under any
    of its `names`, and they differ.
    """
    if all(len(each) == 1 for each in names):
        return
    matches = match_names([*chain(*names)], checkpoint.names(), _declared_renaming(factory))
    for each in names:
        stored = dict.fromkeys(matches[name] for name in each if name in matches)
        for first, other in pairwise(stored):
            check_alike(checkpoint, first, other)


def check_alike(checkpoint: Checkpoint, first: str, other: str) -> None:
    """Raise `OnboardError` where tensors that stand for one weight differ: transformers 5 then has
    two weights, whatever the config says, and 4 has the first alone.
    """
    if not torch.equal(checkpoint.read(first), checkpoint.read(other)):
        raise OnboardError(
            f"{other} differs from {first}, and config.json says that they are one (tie_word_embeddings)",
            hint='Set "tie_word_embeddings": false in config.json to use both, or leave one out',
        )


def read_source(
    checkpoint: Checkpoint | ConvertedCheckpoint, source: Source, device: torch.device | str
) -> torch.Tensor:
    """Return what a source stands for; of stacks no more than the entry is read."""
    if source.entry is None:
        return source.of([checkpoint.read(name, device) for name in source.names])
    assert isinstance(checkpoint, Checkpoint), "transformers' module has its stacks"
    entries = [checkpoint.read_entry(name, source.entry, device) for name in source.names]
    return source.joined(entries)


def _first(names: Sequence[str], known: Container[str]) -> str | None:
    return next((name for name in names if name in known), None)


def _declared_renaming(factory: ModelFactory) -> Callable[[str], str]:
    if factory.towers:
        return module_renaming(factory.hf_model())
    return declared_renaming(_identifiers(factory))


def _identifiers(factory: ModelFactory) -> list[str]:
    config = factory.config
    return [*(config.architectures or []), config.model_type]
